// `deltasync inspect WHAT`: finds out what WHAT is and describes it. One function a kind; each makes the JSON object
// that `--json` prints, and the text is written from that object.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>

#include "base/deadline.hpp"
#include "base/process.hpp"
#include "delta/delta.hpp"
#include "deltasync/layout.hpp"
#include "format/mapped_file.hpp"
#include "format/safetensors.hpp"
#include "net/endpoint.hpp"
#include "shm/roles.hpp"
#include "shm/segment.hpp"
#include "tools/cli/cli.hpp"
#include "tools/cli/http_get.hpp"

namespace deltasync::cli {
namespace {

namespace fs = std::filesystem;

struct InspectArgs {
  std::string what;
  std::string layout;
  std::string save_layout;
  TlsOptions tls;
  std::uint64_t tensor_parallel = 1;
  double deadline_s = 5;
  bool tensors = false;
  bool json = false;
};

/// What a regular file is, by its first bytes.
enum class Kind : std::uint8_t { layout, delta, segment, safetensors, unknown };
Result<Kind> kind_of(const fs::path& path) {
  DS_ASSIGN(const MappedFile file, MappedFile::open(path));
  if (file.bytes().size() >= 8) {
    const ByteSpan magic = file.bytes().first(8);
    const std::string_view text(reinterpret_cast<const char*>(magic.data()), magic.size());
    if (text == "DSLAYOUT") return Kind::layout;
    if (text == "DSDELTA1") return Kind::delta;
    if (load<std::uint64_t>(magic.data()) == shm::kSegmentMagic) return Kind::segment;
  }
  return path.extension() == ".safetensors" ? Kind::safetensors : Kind::unknown;
}

// ---- layouts and models --------------------------------------------------------------------------------------

Json layout_json(const Layout& layout, bool with_tensors) {
  std::map<std::string, std::uint64_t> by_dtype;
  for (const Tensor& tensor : layout.tensors()) by_dtype[std::string(to_string(tensor.spec.dtype))] += tensor.bytes;
  Json json{{"digest", to_string(layout.digest())},
            {"tensors", layout.tensors().size()},
            {"elements", layout.elements()},
            {"model_bytes", layout.model_bytes()},
            {"half_bytes", layout.half_bytes()},
            {"tiles", layout.tile_count()},
            {"bytes_by_dtype", by_dtype}};
  if (!with_tensors) return json;
  json["tensor_list"] = Json::array();
  for (const Tensor& tensor : layout.tensors()) {
    json["tensor_list"].push_back({{"name", tensor.spec.name},
                                   {"dtype", to_string(tensor.spec.dtype)},
                                   {"shape", tensor.spec.shape},
                                   {"offset", tensor.offset},
                                   {"bytes", tensor.bytes},
                                   {"tiles", tensor.tile_count}});
  }
  return json;
}

Status print_layout(const Json& layout) {
  DS_TRY(print_line("  layout   " + layout["digest"].get<std::string>()));
  DS_TRY(print_line("  tensors  " + layout["tensors"].dump() + ", " + layout["elements"].dump() + " elements, " +
                    human_bytes(layout["model_bytes"].get<std::uint64_t>()) + ", " + layout["tiles"].dump() +
                    " tiles"));
  for (const auto& [dtype, bytes] : layout["bytes_by_dtype"].items()) {
    DS_TRY(print_line("  " + dtype + std::string(dtype.size() < 9 ? 9 - dtype.size() : 1, ' ') +
                      human_bytes(bytes.get<std::uint64_t>())));
  }
  if (!layout.contains("tensor_list")) return {};
  for (const auto& tensor : layout["tensor_list"]) {
    DS_TRY(print_line("    " + tensor["name"].get<std::string>() + "  " + tensor["dtype"].get<std::string>() + " " +
                      tensor["shape"].dump() + "  " + human_bytes(tensor["bytes"].get<std::uint64_t>())));
  }
  return {};
}

Status save_layout(const InspectArgs& options, const Layout& layout) {
  if (options.save_layout.empty()) return {};
  const auto bytes = layout.encode();
  std::ofstream file(options.save_layout, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) return Error::from_errno(options.save_layout, errno);
  return {};
}

Status inspect_layout(const InspectArgs& options, const LayoutPtr& layout) {
  Json json{{"kind", "layout"}, {"path", options.what}, {"layout", layout_json(*layout, options.tensors)}};
  DS_TRY(save_layout(options, *layout));
  if (options.json) return print_json(json);
  DS_TRY(print_line(options.what + ": a layout"));
  return print_layout(json["layout"]);
}

Status inspect_model(const InspectArgs& options) {
  const fs::path path = model_directory(options.what);
  DS_ASSIGN(const HfModel model, HfModel::open(path, options.tensor_parallel));
  DS_TRY(save_layout(options, *model.layout()));
  Json json{{"kind", "model"}, {"path", path.string()}};
  json["weight_files"] = Json::array();
  for (const auto& file : model.sidecar().weights) json["weight_files"].push_back(file.name);
  json["other_files"] = Json::array();
  for (const auto& file : model.sidecar().others) json["other_files"].push_back(file.name);
  json["layout"] = layout_json(*model.layout(), options.tensors);
  if (options.json) return print_json(json);
  DS_TRY(print_line(path.string() + ": a model directory"));
  DS_TRY(print_line("  files    " + std::to_string(json["weight_files"].size()) + " with weights, " +
                    std::to_string(json["other_files"].size()) + " others"));
  return print_layout(json["layout"]);
}

Status inspect_safetensors(const InspectArgs& options) {
  DS_ASSIGN(const MappedFile file, MappedFile::open(options.what));
  const ByteSpan bytes = file.bytes();
  DS_ASSIGN(const auto header, safetensors::header_bytes(bytes, bytes.size()).with_context(options.what));
  DS_ASSIGN(const auto entries,
            safetensors::parse_header(bytes.first(header), bytes.size() - header).with_context(options.what));
  Json json{{"kind", "safetensors"},
            {"path", options.what},
            {"header_bytes", header},
            {"data_bytes", bytes.size() - header},
            {"tensors", entries.size()}};
  if (options.tensors) {
    json["tensor_list"] = Json::array();
    for (const auto& entry : entries) {
      json["tensor_list"].push_back({{"name", entry.name},
                                     {"dtype", to_string(entry.dtype)},
                                     {"shape", entry.shape},
                                     {"bytes", entry.end - entry.begin}});
    }
  }
  if (options.json) return print_json(json);
  DS_TRY(print_line(options.what + ": a safetensors file"));
  DS_TRY(print_line("  tensors  " + std::to_string(entries.size()) + ", " + human_bytes(bytes.size() - header)));
  for (const auto& tensor : json.value("tensor_list", Json::array())) {
    DS_TRY(print_line("    " + tensor["name"].get<std::string>() + "  " + tensor["dtype"].get<std::string>() + " " +
                      tensor["shape"].dump()));
  }
  return {};
}

// ---- deltas --------------------------------------------------------------------------------------------------

/// The layout that a delta belongs to, from a model directory, a layout file or a segment.
Result<LayoutPtr> layout_for_delta(const InspectArgs& options) {
  if (options.layout.empty()) {
    return Error(Errc::invalid_argument,
                 options.what +
                     " is a delta, which is checked against its layout: name a model directory, "
                     "a layout file or a segment with --layout");
  }
  std::error_code ignored;
  if (fs::is_directory(options.layout, ignored)) {
    DS_ASSIGN(const HfModel model, HfModel::open(model_directory(options.layout), options.tensor_parallel));
    return model.layout();
  }
  DS_ASSIGN(const Kind kind, kind_of(options.layout));
  if (kind == Kind::segment) {
    const fs::path path = fs::absolute(options.layout);
    DS_ASSIGN(const auto segment, shm::Segment::attach({path.parent_path(), path.filename().string()}));
    return Layout::decode(segment->layout_encoded());
  }
  DS_ASSIGN(const MappedFile file, MappedFile::open(options.layout));
  return Layout::decode(file.bytes()).with_context(options.layout);
}

Status inspect_delta(const InspectArgs& options) {
  DS_ASSIGN(const MappedFile file, MappedFile::open(options.what));
  const ByteSpan bytes = file.bytes();
  DS_ASSIGN(const LayoutPtr layout, layout_for_delta(options));
  DS_ASSIGN(const delta::Delta delta, delta::from_container(bytes, *layout).with_context(options.what));
  Json codecs;
  for (std::size_t i = 1; i < delta::kCodecEnd; ++i) {
    const auto& stats = delta.stats[i];
    codecs[to_string(static_cast<delta::Codec>(i))] = {
        {"tiles", stats.tiles}, {"changed", stats.changed}, {"bytes", stats.bytes}};
  }
  const double bits =
      delta.changed == 0 ? 0 : static_cast<double>(bytes.size()) * 8 / static_cast<double>(delta.changed);
  Json json{{"kind", "delta"},
            {"path", options.what},
            {"layout", to_string(delta.layout)},
            {"from", to_string(delta.from)},
            {"to", to_string(delta.to)},
            {"from_root", to_string(delta.from_root)},
            {"to_root", to_string(delta.to_root)},
            {"frames", delta.frames.size()},
            {"bytes", bytes.size()},
            {"model_bytes", layout->model_bytes()},
            {"changed", delta.changed},
            {"bits_per_change", bits},
            {"codecs", codecs}};
  if (options.json) return print_json(json);
  DS_TRY(print_line(options.what + ": a delta, every frame intact"));
  DS_TRY(print_line("  from     " + to_string(delta.from) + "  root " + to_string(delta.from_root)));
  DS_TRY(print_line("  to       " + to_string(delta.to) + "  root " + to_string(delta.to_root)));
  DS_TRY(print_line("  changed  " + std::to_string(delta.changed) + " of " + std::to_string(layout->elements()) +
                    " elements, in " + human_bytes(bytes.size()) + " (full: " + human_bytes(layout->model_bytes()) +
                    ")"));
  for (const auto& [name, stats] : codecs.items()) {
    DS_TRY(print_line("  " + name + ": " + stats["tiles"].dump() + " tiles, " + stats["changed"].dump() +
                      " elements, " + human_bytes(stats["bytes"].get<std::uint64_t>())));
  }
  return {};
}

// ---- segments ------------------------------------------------------------------------------------------------

Json slots_json(shm::Segment& segment) {
  Json slots = Json::array();
  for (unsigned i = 0; i < shm::kSlotsMax; ++i) {
    const auto slot = shm::inspect_slot(segment, i);
    if (slot.pid == 0) continue;
    slots.push_back({{"slot", i},
                     {"pid", slot.pid},
                     {"phase", to_string(slot.phase)},
                     {"sequence", slot.sequence},
                     {"waiting", slot.waiting}});
  }
  return slots;
}

Status inspect_segment(const InspectArgs& options) {
  const fs::path path = fs::absolute(options.what);
  DS_ASSIGN(const auto segment, shm::Segment::attach({path.parent_path(), path.filename().string()}));
  DS_ASSIGN(const LayoutPtr layout, Layout::decode(segment->layout_encoded()).with_context(options.what));
  const auto agent = shm::inspect_agent(*segment);
  const bool agent_alive = agent.pid != 0 && !proved_dead(agent);
  Json json{{"kind", "segment"},
            {"path", path.string()},
            {"generation", segment->generation()},
            {"segment_bytes", segment->control().header.segment_bytes},
            {"agent", {{"pid", agent.pid}, {"alive", agent_alive}}}};
  json["halves"] = Json::array();
  for (unsigned half = 0; half < shm::kHalves; ++half) {
    const auto status = shm::inspect_half(*segment, half);
    Json item{{"half", half}, {"state", to_string(status.state)}, {"sequence", status.sequence}};
    if (status.version.id.valid()) {
      item["id"] = to_string(status.version.id);
      item["label"] = status.version.label;
    }
    if (status.state == shm::HalfState::filling) {
      item["elements_in_place"] = shm::inspect_progress(*segment, half, status.sequence);
    }
    json["halves"].push_back(item);
  }
  json["writers"] = slots_json(*segment);
  json["layout"] = layout_json(*layout, options.tensors);
  if (options.json) return print_json(json);
  DS_TRY(print_line(path.string() + ": a segment, generation " + std::to_string(segment->generation()) + ", " +
                    human_bytes(segment->control().header.segment_bytes)));
  DS_TRY(print_line("  agent    pid " + std::to_string(agent.pid) + (agent_alive ? "" : ", not running")));
  for (unsigned half = 0; half < shm::kHalves; ++half) DS_TRY(print_line("  " + shm::describe_half(*segment, half)));
  for (const auto& slot : json["writers"]) {
    DS_TRY(print_line("  writer " + slot["slot"].dump() + " is pid " + slot["pid"].dump() + ", " +
                      slot["phase"].get<std::string>() + (slot["waiting"].get<bool>() ? ", waiting for a half" : "")));
  }
  return print_layout(json["layout"]);
}

// ---- live agents ---------------------------------------------------------------------------------------------

Status inspect_agent(const InspectArgs& options, const tools::HttpSource& source) {
  const auto deadline = Deadline::after(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(options.deadline_s)));
  DS_ASSIGN(const std::string body, tools::http_get(source, "/v1/status", deadline).with_context(options.what));
  Json status = Json::parse(body, nullptr, false);
  if (status.is_discarded()) return Error(Errc::protocol, options.what + ": its status is not JSON");
  if (options.json)
    return print_json({{"kind", "agent"}, {"endpoint", net::to_string(source.endpoint)}, {"status", status}});
  DS_TRY(print_line(net::to_string(source.endpoint) + ": a live agent"));
  return print_json(status, 2);
}

Status run_inspect(const InspectArgs& options) {
  std::error_code ignored;
  if (fs::is_directory(options.what, ignored)) return inspect_model(options);
  if (!fs::exists(options.what, ignored)) {
    const auto source = tools::parse_http_source(options.what, options.tls);
    if (source && source->endpoint.port != 0) return inspect_agent(options, *source);
    if (!source && options.what.find("://") != std::string::npos) return source.error();
    return Error(Errc::not_found, options.what + ": no such file or directory, and no HOST:PORT either");
  }
  DS_ASSIGN(const Kind kind, kind_of(options.what));
  switch (kind) {
    case Kind::layout: {
      DS_ASSIGN(const MappedFile file, MappedFile::open(options.what));
      DS_ASSIGN(const LayoutPtr layout, Layout::decode(file.bytes()).with_context(options.what));
      return inspect_layout(options, layout);
    }
    case Kind::delta: return inspect_delta(options);
    case Kind::segment: return inspect_segment(options);
    case Kind::safetensors: return inspect_safetensors(options);
    case Kind::unknown: break;
  }
  return Error(Errc::unsupported, options.what + ": no layout, delta, segment or safetensors file");
}

}  // namespace

std::function<Status()> setup_inspect(CLI::App& app) {
  auto options = std::make_shared<InspectArgs>();  // shared with the callbacks, which CLI11 copies
  app.add_option("WHAT", options->what,
                 "model directory, safetensors, layout, delta or segment file, or the address of an agent's pages, "
                 "[https://]HOST:PORT")
      ->required();
  app.add_option("--layout", options->layout,
                 "for a delta: model directory, layout file or segment that it belongs to");
  app.add_option("--save-layout", options->save_layout, "write the layout's canonical encoding to this file")
      ->type_name("FILE");
  app.add_option("--tp", options->tensor_parallel, "cut the tensors of a model directory as for this many ranks")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app.add_option("--deadline-s", options->deadline_s, "for a live agent")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 3600.0));
  add_tls_options(app, options->tls);
  app.add_flag("--tensors", options->tensors, "list all tensors");
  app.add_flag("--json", options->json, "one JSON object");
  return [options] { return run_inspect(*options); };
}

}  // namespace deltasync::cli
