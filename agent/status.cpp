#include "agent/status.hpp"

#include <fmt/format.h>

#include <cinttypes>
#include <nlohmann/json.hpp>

#include "shm/roles.hpp"

namespace deltasync::agent {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

std::string hex(std::uint64_t value) {
  return fmt::format("{:016x}", value);
}

double age_s(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

json id_json(const VersionId& id) {
  if (!id.valid()) return nullptr;
  return {{"epoch", hex(id.epoch)}, {"number", id.number}};
}

json version_json(const Version& version) {
  json out = id_json(version.id);
  if (!out.is_null()) out["label"] = version.label;
  return out;
}

const char* mode_name(wire::PlanMode mode) {
  return mode == wire::PlanMode::full ? "full" : mode == wire::PlanMode::delta ? "delta" : "up_to_date";
}

const char* state_name(shm::HalfState state) {
  switch (state) {
    case shm::HalfState::free: return "free";
    case shm::HalfState::filling: return "filling";
    case shm::HalfState::sealed: return "sealed";
    case shm::HalfState::active: return "active";
    case shm::HalfState::retiring: return "retiring";
    case shm::HalfState::quarantined: return "quarantined";
  }
  return "unknown";
}

json generation_json(Generation& generation) {
  json halves = json::array();
  for (unsigned half = 0; half < 2; ++half) {
    const shm::HalfStatus status = shm::inspect_half(*generation.segment, half);
    halves.push_back({{"half", half},
                      {"state", state_name(status.state)},
                      {"sequence", status.sequence},
                      {"writers", status.writers},
                      {"version", version_json(status.version)}});
  }
  json slots = json::array();
  for (unsigned slot = 0; slot < shm::kSlotsMax; ++slot) {
    const shm::SlotStatus status = shm::inspect_slot(*generation.segment, slot);
    if (status.pid == 0) continue;
    slots.push_back({{"slot", slot}, {"pid", status.pid}, {"waiting", status.waiting}});
  }
  return {{"generation", generation.number},
          {"segment", (generation.segment->path().dir / generation.segment->path().name).string()},
          {"layout", to_string(generation.layout->digest())},
          {"half_bytes", generation.segment->half_bytes()},
          {"halves", std::move(halves)},
          {"writer_slots", std::move(slots)}};
}

json served_json(const ServedVersion& served) {
  return {{"version", version_json(served.version)},
          {"root", to_string(served.root)},
          {"generation", served.half.generation},
          {"half", served.half.half},
          {"age_s", age_s(served.published_at)},
          {"delta_bytes", served.delta_bytes},
          {"changed", served.changed},
          {"encode_s", served.encode_s},
          {"digest_s", served.digest_s}};
}

json ring_json(const Snapshot& now, std::uint64_t bytes_max) {
  json entries = json::array();
  std::uint64_t bytes = 0;
  for (const RingEntryPtr& entry : now.ring) {
    bytes += entry->delta->frame_bytes;
    entries.push_back({{"from", version_json(entry->from)},
                       {"to", version_json(entry->to)},
                       {"bytes", entry->delta->frame_bytes},
                       {"frames", entry->delta->frames.size()},
                       {"changed", entry->delta->changed},
                       {"encode_s", entry->encode_s},
                       {"age_s", age_s(entry->made_at)}});
  }
  return {{"bytes", bytes},
          {"bytes_max", bytes_max},
          {"count", now.ring.size()},
          {"age_s", now.ring.empty() ? 0.0 : age_s(now.ring.front()->made_at)},
          {"entries", std::move(entries)}};
}

json merges_json(const AgentCore& core, const Metrics& metrics) {
  const AgentCore::MadeInfo info = core.made();
  json entries = json::array();
  for (const auto& entry : info.entries) {
    entries.push_back({{"from", version_json(entry.from)},
                       {"to", version_json(entry.to)},
                       {"bytes", entry.bytes},
                       {"changed", entry.changed},
                       {"compact", entry.compact},
                       {"merge_s", entry.merge_s},
                       {"age_s", age_s(entry.made_at)}});
  }
  return {{"bytes", info.bytes},
          {"bytes_max", info.bytes_max},
          {"count", info.entries.size()},
          {"wanted", info.wanted},
          {"made", metrics.merges.load(std::memory_order_relaxed)},
          {"failed", metrics.merges_failed.load(std::memory_order_relaxed)},
          {"hits", metrics.merge_hits.load(std::memory_order_relaxed)},
          {"compact_made", metrics.compacts.load(std::memory_order_relaxed)},
          {"compact_failed", metrics.compacts_failed.load(std::memory_order_relaxed)},
          {"entries", std::move(entries)}};
}

json receivers_json(const PullServer& server) {
  json list = json::array();
  for (const PeerStatus& peer : server.peers()) {
    list.push_back({{"connection", peer.connection},
                    {"address", peer.address},
                    {"name", peer.name},
                    {"role", peer.role},
                    {"connected_s", age_s(peer.connected_at)},
                    {"last_mode", peer.last_mode},
                    {"last_target", id_json(peer.last_target)},
                    {"bytes_sent", peer.bytes_sent}});
  }
  return list;
}

json writers_json(const TrainerServer* server) {
  json list = json::array();
  if (server == nullptr) return list;
  for (const TrainerStatus& writer : server->status()) {
    list.push_back({{"slot", writer.slot},
                    {"writers", writer.writers},
                    {"generation", writer.generation},
                    {"pid", writer.pid},
                    {"name", writer.name},
                    {"connected", writer.connected},
                    {"planned", writer.planned}});
  }
  return list;
}

/// Replaces what is not UTF-8 (a peer's name may hold anything).
std::string dump(const json& page) {
  return page.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

/// One metric family after the other.
class Exposition {
 public:
  void family(const char* name, const char* type, const char* help) {
    text_ += fmt::format("# HELP deltasync_{0} {1}\n# TYPE deltasync_{0} {2}\n", name, help, type);
    name_ = name;
  }
  void sample(double value, const std::string& labels = {}) {
    text_ += fmt::format("deltasync_{}{} {:.17g}\n", name_, labels.empty() ? "" : "{" + labels + "}", value);
  }
  void counter(const char* name, const char* help, const Metrics::Counter& value, double scale = 1) {
    family(name, "counter", help);
    sample(static_cast<double>(value.load(std::memory_order_relaxed)) * scale);
  }
  void gauge(const char* name, const char* help, double value) {
    family(name, "gauge", help);
    sample(value);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
  const char* name_ = "";
};

double of(const Metrics::Counter& counter) {
  return static_cast<double>(counter.load(std::memory_order_relaxed));
}

void add_counters(Exposition& out, const Metrics& m) {
  out.counter("versions_total", "Versions published.", m.versions);
  out.counter("deltas_total", "Deltas encoded.", m.deltas);
  out.counter("delta_bytes_total", "Bytes of all deltas encoded.", m.delta_bytes);
  out.counter("elements_changed_total", "Elements that differed between consecutive versions.", m.elements_changed);
  out.counter("elements_compared_total", "Elements compared between consecutive versions.", m.elements_compared);
  out.counter("encode_seconds_total", "Time spent on diffs and encoding after the seal.", m.encode_us, 1e-6);
  out.counter("batches_diffed_behind_total", "Batches of tiles diffed while their version was being offloaded.",
              m.batches_behind);
  out.counter("batches_diffed_after_total", "Batches of tiles diffed after their version was sealed.", m.batches_after);
  out.counter("tiles_damaged_total", "Tiles whose bytes were not what their digests said.", m.tiles_damaged);
  out.counter("scrub_bytes_total", "Bytes of what is served that were read again.", m.scrub_bytes);
  out.counter("scrub_passes_total", "Times that all of what is served was read again.", m.scrub_passes);
  out.counter("digest_seconds_total", "Time spent on digests of whole halves.", m.digest_us, 1e-6);
  out.counter("merges_total", "Chains of deltas merged.", m.merges);
  out.counter("merge_bytes_total", "Bytes of all merged deltas.", m.merge_bytes);
  out.counter("merge_seconds_total", "Time spent on merges.", m.merge_us, 1e-6);
  out.counter("merges_failed_total", "Chains that could not be merged, or were not worth it.", m.merges_failed);
  out.counter("merge_hits_total", "Plans answered with a merged or compact delta that was made for another.",
              m.merge_hits);
  out.counter("compacts_total", "Deltas made compact, for slow links.", m.compacts);
  out.counter("compact_bytes_total", "Bytes of all compact deltas.", m.compact_bytes);
  out.counter("compact_seconds_total", "Time spent on compact deltas.", m.compact_us, 1e-6);
  out.counter("compacts_failed_total", "Compact deltas that could not be made, or were not smaller.",
              m.compacts_failed);
  out.family("pulls_total", "counter", "Plans answered, by mode.");
  out.sample(of(m.pulls_up_to_date), "mode=\"up_to_date\"");
  out.sample(of(m.pulls_delta), "mode=\"delta\"");
  out.sample(of(m.pulls_full), "mode=\"full\"");
  out.family("sent_bytes_total", "counter", "Payload bytes sent to receivers, by kind.");
  out.sample(of(m.bytes_extent), "kind=\"extent\"");
  out.sample(of(m.bytes_frames), "kind=\"frames\"");
  out.sample(of(m.bytes_raw_tiles), "kind=\"raw_tiles\"");
  out.sample(of(m.bytes_digests), "kind=\"digests\"");
  out.sample(of(m.bytes_layout), "kind=\"layout\"");
  out.counter("leases_total", "Leases begun.", m.leases);
  out.counter("leases_revoked_total", "Leases revoked because a writer needed the half.", m.leases_revoked);
  out.counter("plans_expired_total", "Plans ended by their deadline or for the memory that they held.",
              m.plans_expired);
  out.counter("connections_total", "Connections accepted.", m.connections);
  out.counter("connections_refused_total", "Connections over the limit.", m.connections_refused);
  out.counter("handshakes_failed_total", "Connections that did not authenticate.", m.handshakes_failed);
  out.counter("http_requests_total", "HTTP requests answered.", m.http_requests);
  out.family("errors_total", "counter", "Errors answered to receivers or met on their connections, by code.");
  for (std::size_t code = 0; code < kErrcCount; ++code) {
    out.sample(of(m.errors[code]), fmt::format("code=\"{}\"", to_string(static_cast<Errc>(code))));
  }
}

}  // namespace

std::string status_json(const AgentParts& parts) {
  const SnapshotPtr now = parts.core.snapshot();
  json page;
  page["name"] = parts.core.options().name;
  page["instance"] = hex(parts.instance);
  page["uptime_s"] = age_s(parts.started_at);
  page["isa"] = delta::isa_name();
  page["generations"] = json::array();
  for (const GenerationPtr& generation : parts.core.generations()) {
    page["generations"].push_back(generation_json(*generation));
  }
  page["active"] = now->served ? served_json(*now->served) : json(nullptr);
  page["ring"] = ring_json(*now, parts.core.ring_bytes_max());
  page["merges"] = merges_json(parts.core, parts.core.metrics());
  page["leases"] = json::array();
  for (const LeaseTable::Count& lease : parts.core.leases().list()) {
    page["leases"].push_back({{"generation", lease.key.generation},
                              {"half", lease.key.half},
                              {"sequence", lease.key.sequence},
                              {"live", lease.live},
                              {"readers", lease.readers}});
  }
  page["plans"] = json::array();
  for (const AgentCore::PlanInfo& plan : parts.core.plans()) {
    page["plans"].push_back({{"connection", plan.connection},
                             {"mode", mode_name(plan.mode)},
                             {"target", id_json(plan.target)},
                             {"live", plan.live}});
  }
  page["receivers"] = receivers_json(parts.pull_server);
  page["writers"] = writers_json(parts.trainer_server);
  return dump(page);
}

std::string layout_json(const AgentParts& parts, bool tensors) {
  const GenerationPtr generation = parts.core.snapshot()->generation;
  if (!generation) return {};
  const Layout& layout = *generation->layout;
  json page = {{"digest", to_string(layout.digest())},
               {"generation", generation->number},
               {"tensors", layout.tensors().size()},
               {"elements", layout.elements()},
               {"model_bytes", layout.model_bytes()},
               {"half_bytes", layout.half_bytes()},
               {"tiles", layout.tile_count()},
               {"wire_bytes", generation->layout_payload->size()},
               {"sidecar_bytes", generation->segment->sidecar_encoded().size()}};
  if (tensors) {
    page["tensor_list"] = json::array();
    for (const Tensor& tensor : layout.tensors()) {
      page["tensor_list"].push_back({{"name", tensor.spec.name},
                                     {"dtype", std::string(to_string(tensor.spec.dtype))},
                                     {"shape", tensor.spec.shape},
                                     {"offset", tensor.offset},
                                     {"bytes", tensor.bytes},
                                     {"first_tile", tensor.first_tile},
                                     {"tiles", tensor.tile_count}});
    }
  }
  return dump(page);
}

std::string metrics_text(const AgentParts& parts) {
  const SnapshotPtr now = parts.core.snapshot();
  Exposition out;
  add_counters(out, parts.core.metrics());
  out.gauge("connections", "Receivers' connections now.", static_cast<double>(parts.pull_server.connections()));
  out.gauge("leases", "Leases on halves now.", static_cast<double>(parts.core.leases().list().size()));
  std::uint64_t ring_bytes = 0;
  for (const RingEntryPtr& entry : now->ring) ring_bytes += entry->delta->frame_bytes;
  out.gauge("ring_bytes", "Bytes of deltas in the ring.", static_cast<double>(ring_bytes));
  out.gauge("ring_entries", "Deltas in the ring.", static_cast<double>(now->ring.size()));
  const AgentCore::MadeInfo merges = parts.core.made();
  out.gauge("merged_bytes", "Bytes of merged and compact deltas that are kept.", static_cast<double>(merges.bytes));
  out.gauge("merged_entries", "Merged and compact deltas that are kept.", static_cast<double>(merges.entries.size()));
  const ServedVersion none{};
  const ServedVersion& served = now->served ? *now->served : none;
  const std::uint64_t elements = served.generation ? served.generation->layout->elements() : 0;
  out.gauge("version_number", "Number of the version that is served.", static_cast<double>(served.version.id.number));
  out.gauge("delta_density", "Part of all elements that the newest delta changed.",
            elements == 0 ? 0 : static_cast<double>(served.changed) / static_cast<double>(elements));
  out.gauge("encode_seconds", "What diff and encoding of the newest delta took.", served.encode_s);
  out.gauge("half_bytes", "Bytes of a half.", static_cast<double>(now->offer.full_bytes));
  return out.take();
}

}  // namespace deltasync::agent
