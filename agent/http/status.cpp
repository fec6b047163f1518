#include "agent/http/status.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "shm/roles.hpp"

namespace deltasync::agent {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016" PRIx64, value);
  return text;
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
          {"found_at_start", served.found_at_start},
          {"delta_bytes", served.delta_bytes},
          {"changed", served.changed},
          {"encode_s", served.encode_s},
          {"digest_s", served.digest_s}};
}

json ring_json(const Snapshot& now) {
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
                       {"age_s", age_s(entry->made_at)},
                       {"found_at_start", entry->found_at_start}});
  }
  return {{"bytes", bytes},
          {"bytes_max", now.ring_bytes_max},
          {"count", now.ring.size()},
          {"age_s", now.ring.empty() ? 0.0 : age_s(now.ring.front()->made_at)},
          {"entries", std::move(entries)}};
}

json merges_json(const DeltaBuilder::Info& info, const Metrics& metrics) {
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
          {"made", metrics.merges.load()},
          {"failed", metrics.merges_failed.load()},
          {"hits", metrics.merge_hits.load()},
          {"compact_made", metrics.compacts.load()},
          {"compact_failed", metrics.compacts_failed.load()},
          {"entries", std::move(entries)}};
}

json receivers_json(const std::vector<ReceiverStatus>& receivers) {
  json list = json::array();
  for (const ReceiverStatus& receiver : receivers) {
    const ReceiverRow& row = receiver.row;
    list.push_back({{"name", row.name},
                    {"host", row.host},
                    {"n", row.ordinal},
                    {"address", row.address},
                    {"connected", row.connection != 0},
                    {"lost", row.lost},
                    {"left_s", row.connection != 0 ? json(nullptr) : json(age_s(row.left_at))},
                    {"committed", version_json(row.committed)},
                    {"versions_behind", receiver.behind.versions},
                    {"seconds_behind", receiver.behind_s()},
                    {"last_error", row.error}});
  }
  return list;
}

json connections_json(const PullServer& server) {
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

}  // namespace

std::vector<ReceiverStatus> receiver_status(const AgentParts& parts) {
  std::vector<ReceiverRow> rows = parts.pull_server.receivers();
  std::vector<VersionId> held;
  held.reserve(rows.size());
  for (const ReceiverRow& row : rows) held.push_back(row.committed.id);
  const std::vector<Behind> behind = parts.core.versions().behind(held);
  std::vector<ReceiverStatus> list;
  list.reserve(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) list.push_back({std::move(rows[i]), behind[i]});
  return list;
}

std::size_t writers_attached(const AgentParts& parts) {
  if (parts.trainer_server == nullptr) return 0;
  const std::vector<TrainerStatus> writers = parts.trainer_server->status();
  return static_cast<std::size_t>(std::ranges::count_if(writers, &TrainerStatus::connected));
}

std::optional<Origin::CutOff> cut_off(const AgentParts& parts, const std::vector<ReceiverStatus>& receivers) {
  if (auto of_relay = parts.core.origin().cut_off()) return of_relay;
  const ServedPtr served = parts.core.versions().snapshot()->served;
  if (!served || writers_attached(parts) != 0) return std::nullopt;
  for (const ReceiverStatus& receiver : receivers) {
    const ReceiverRow& row = receiver.row;
    if (row.connection == 0 || row.committed.id.epoch <= served->version.id.epoch) continue;
    return Origin::CutOff{"no trainer is attached, and receiver " + row.name + " on " + row.host +
                              " has a version of a newer epoch: the trainer went on elsewhere; let receivers ask its "
                              "agent, and end this one",
                          served->published_at};
  }
  return std::nullopt;
}

std::string status_json(const AgentParts& parts) {
  const SnapshotPtr now = parts.core.versions().snapshot();
  json page;
  page["name"] = parts.core.options().name;
  page["instance"] = hex(parts.instance);
  page["uptime_s"] = age_s(parts.started_at);
  page["isa"] = delta::isa_name();
  page["generations"] = json::array();
  for (const GenerationPtr& generation : parts.core.versions().generations()) {
    page["generations"].push_back(generation_json(*generation));
  }
  page["active"] = now->served ? served_json(*now->served) : json(nullptr);
  page["ring"] = ring_json(*now);
  page["merges"] = merges_json(parts.core.deltas().info(), parts.core.metrics());
  page["leases"] = json::array();
  for (const LeaseTable::Count& lease : parts.core.leases().list()) {
    page["leases"].push_back({{"generation", lease.key.generation},
                              {"half", lease.key.half},
                              {"sequence", lease.key.sequence},
                              {"live", lease.live},
                              {"readers", lease.readers}});
  }
  page["plans"] = json::array();
  for (const OpenPlans::Info& plan : parts.core.open_plans().list()) {
    page["plans"].push_back({{"connection", plan.connection},
                             {"mode", wire::mode_name(plan.mode)},
                             {"target", id_json(plan.target)},
                             {"live", plan.live}});
  }
  page["parents"] = json::array();
  for (const wire::Parent& parent : parts.core.origin().parents()) page["parents"].push_back(parent.endpoint);
  page["cut_off"] = nullptr;
  const std::vector<ReceiverStatus> receivers = receiver_status(parts);
  if (const auto now_cut_off = cut_off(parts, receivers)) {
    page["cut_off"] = {{"why", now_cut_off->why}, {"seconds", age_s(now_cut_off->since)}};
  }
  const Children& children = parts.pull_server.children();
  page["children"] = {{"count", children.count()}, {"max", children.max()}, {"relays", children.endpoints()}};
  page["receivers"] = receivers_json(receivers);
  page["connections"] = connections_json(parts.pull_server);
  page["writers"] = writers_json(parts.trainer_server);
  return dump(page);
}

std::string layout_json(const AgentParts& parts, bool tensors) {
  const GenerationPtr generation = parts.core.versions().snapshot()->generation;
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

}  // namespace deltasync::agent
