// `deltasync diff A B`: what changed between two versions of a model, and what it costs to send.
#include <algorithm>
#include <fstream>
#include <memory>
#include <thread>

#include "deltasync/layout.hpp"
#include "tools/cli/cli.hpp"
#include "tools/cli/diff_sizes.hpp"

namespace deltasync::cli {
namespace {

using tools::DiffSizes;
using tools::FloorBits;

struct DiffArgs {
  std::string a;
  std::string b;
  std::string save_delta;
  std::uint64_t tensor_parallel = 1;
  unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  std::size_t tensors = 20;
  bool json = false;
};

Json size_json(const DiffSizes& d, double bits) {
  return {{"bytes", static_cast<std::uint64_t>(bits / 8)}, {"bits_per_change", d.bits_per_change(bits)}};
}

Json floor_json(const DiffSizes& d, const FloorBits& floor) {
  Json json = size_json(d, floor.total());
  json["position_bits_per_change"] = d.bits_per_change(floor.positions);
  json["value_bits_per_change"] = d.bits_per_change(floor.values);
  return json;
}

Json codec_json(const DiffSizes& d, std::uint64_t bytes, const std::array<delta::CodecStats, delta::kCodecEnd>& stats) {
  Json json = size_json(d, static_cast<double>(bytes) * 8);
  for (std::size_t i = 1; i < stats.size(); ++i) {
    json["tiles"][to_string(static_cast<delta::Codec>(i))] = {
        {"tiles", stats[i].tiles}, {"changed", stats[i].changed}, {"bytes", stats[i].bytes}};
  }
  return json;
}

Json to_json(const DiffArgs& options, const DiffSizes& d) {
  Json json{{"event", "diff"},
            {"a", options.a},
            {"b", options.b},
            {"elements", d.elements},
            {"changed", d.changed},
            {"density", d.density()},
            {"model_bytes", d.model_bytes},
            {"tiles", d.tiles},
            {"tiles_changed", d.tiles_changed}};
  json["changed_by_ulp"] = {{"1", d.by_ulp[0]}, {"2", d.by_ulp[1]}, {"3_to_8", d.by_ulp[2]}, {"more", d.by_ulp[3]}};
  json["sizes"]["coo"] = size_json(d, static_cast<double>(d.coo_bits));
  json["sizes"]["bitmap"] = size_json(d, static_cast<double>(d.bitmap_bits));
  json["sizes"]["raw_tiles"] = size_json(d, static_cast<double>(d.tile_bytes) * 8);
  json["sizes"]["delta_ulp"] = codec_json(d, d.ulp_bytes, d.ulp_stats);
  json["sizes"]["delta_compact"] = codec_json(d, d.compact_bytes, d.compact_stats);
  json["sizes"]["delta_absolute"] = codec_json(d, d.absolute_bytes, d.absolute_stats);
  json["floors"]["model"] = floor_json(d, d.floor_model);
  json["floors"]["tile"] = floor_json(d, d.floor_tile);
  json["floors"]["exponent"] = floor_json(d, d.floor_exponent);
  json["tensors"] = Json::array();
  for (const auto& tensor : d.tensors) {
    json["tensors"].push_back({{"name", tensor.name},
                               {"dtype", to_string(tensor.dtype)},
                               {"elements", tensor.elements},
                               {"changed", tensor.changed}});
  }
  return json;
}

std::string padded(std::string text, std::size_t width) {
  if (text.size() < width) text.insert(0, width - text.size(), ' ');
  return text;
}

std::string rounded(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f", value);
  return text;
}

Status print_size(const DiffSizes& d, const char* name, double bits) {
  const double of_full = d.model_bytes == 0 ? 0 : bits / 8 / static_cast<double>(d.model_bytes);
  std::string left(name);
  left.resize(std::max<std::size_t>(left.size(), 44), ' ');
  return print_line("  " + left + padded(human_bytes(static_cast<std::uint64_t>(bits / 8)), 11) +
                    padded(rounded(d.bits_per_change(bits)), 10) + padded(human_percent(of_full), 10));
}

Status print_tensors(const DiffArgs& options, const DiffSizes& d) {
  std::vector<const tools::TensorDensity*> order;
  for (const auto& tensor : d.tensors) {
    if (tensor.changed > 0) order.push_back(&tensor);
  }
  std::stable_sort(order.begin(), order.end(), [](const auto* x, const auto* y) { return x->changed > y->changed; });
  DS_TRY(
      print_line("tensors with a change: " + std::to_string(order.size()) + " of " + std::to_string(d.tensors.size())));
  for (std::size_t i = 0; i < std::min(order.size(), options.tensors); ++i) {
    const double density = static_cast<double>(order[i]->changed) / static_cast<double>(order[i]->elements);
    DS_TRY(print_line("  " + padded(human_percent(density), 8) + padded(std::to_string(order[i]->changed), 12) +
                      " of " + padded(std::to_string(order[i]->elements), 12) + "  " +
                      std::string(to_string(order[i]->dtype)) + "  " + order[i]->name));
  }
  if (order.size() > options.tensors) {
    DS_TRY(print_line("  … " + std::to_string(order.size() - options.tensors) + " more (--tensors N)"));
  }
  return {};
}

Status print_text(const DiffArgs& options, const DiffSizes& d) {
  DS_TRY(print_line("changed " + std::to_string(d.changed) + " of " + std::to_string(d.elements) + " elements (" +
                    human_percent(d.density()) + "), in " + std::to_string(d.tiles_changed) + " of " +
                    std::to_string(d.tiles) + " tiles"));
  if (d.changed > 0) {
    const auto part = [&](std::size_t i) { return human_percent(d.bits_per_change(static_cast<double>(d.by_ulp[i]))); };
    DS_TRY(print_line("size of a change in ulp: 1 " + part(0) + ", 2 " + part(1) + ", 3 to 8 " + part(2) + ", more " +
                      part(3)));
  }
  DS_TRY(print_tensors(options, d));
  DS_TRY(print_line("  size by encoding                                   bytes  bits/chg   of full"));
  DS_TRY(print_size(d, "full", static_cast<double>(d.model_bytes) * 8));
  DS_TRY(print_size(d, "raw tiles", static_cast<double>(d.tile_bytes) * 8));
  DS_TRY(print_size(d, "bitmap + values", static_cast<double>(d.bitmap_bits)));
  DS_TRY(print_size(d, "COO: u32 index + value", static_cast<double>(d.coo_bits)));
  DS_TRY(print_size(d, "delta, absolute values", static_cast<double>(d.absolute_bytes) * 8));
  DS_TRY(print_size(d, "delta, ulp differences", static_cast<double>(d.ulp_bytes) * 8));
  DS_TRY(print_size(d, "delta, ulp differences by exponent class", static_cast<double>(d.compact_bytes) * 8));
  DS_TRY(print_size(d, "floor: one density for the model", d.floor_model.total()));
  DS_TRY(print_size(d, "floor: density by tile", d.floor_tile.total()));
  return print_size(d, "floor: density by tensor and old exponent", d.floor_exponent.total());
}

/// The whole delta as one container file, for `inspect` and the reference decoder.
Status save_delta(const DiffArgs& options, const HfModel& a, const HfModel& b, ThreadPool& pool) {
  DS_ASSIGN(const auto bytes, tools::delta_container(a, b, pool));
  std::ofstream file(options.save_delta, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) return Error::from_errno(options.save_delta, errno);
  return {};
}

Status run_diff(const DiffArgs& options) {
  DS_ASSIGN(const HfModel a, HfModel::open(model_directory(options.a), options.tensor_parallel));
  DS_ASSIGN(const HfModel b, HfModel::open(model_directory(options.b), options.tensor_parallel));
  ThreadPool pool(options.threads, "diff");
  Progress progress(!options.json);
  const std::uint64_t total = a.layout()->model_bytes();
  DS_ASSIGN(const DiffSizes sizes, tools::diff_sizes(a, b, pool, [&](std::uint64_t bytes) {
              progress.show("compared " + human_bytes(bytes) + " of " + human_bytes(total));
            }));
  progress.clear();
  if (!options.save_delta.empty()) DS_TRY(save_delta(options, a, b, pool));
  return options.json ? print_json(to_json(options, sizes)) : print_text(options, sizes);
}

}  // namespace

std::function<Status()> setup_diff(CLI::App& app) {
  auto options = std::make_shared<DiffArgs>();  // shared with the callbacks, which CLI11 copies
  app.add_option("A", options->a, "model directory: the older version")->required();
  app.add_option("B", options->b, "model directory: the newer version")->required();
  app.add_option("--tp", options->tensor_parallel, "cut tensors as for this many ranks")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app.add_option("--threads", options->threads, "threads")->capture_default_str()->check(CLI::Range(1, 256));
  app.add_option("--tensors", options->tensors, "how many tensors to list, most changed first")->capture_default_str();
  app.add_option("--save-delta", options->save_delta, "write the delta container to this file")->type_name("FILE");
  app.add_flag("--json", options->json, "one JSON object with everything");
  return [options] { return run_diff(*options); };
}

}  // namespace deltasync::cli
