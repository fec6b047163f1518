#include "agent/trainer/segment_hooks.hpp"

#include <algorithm>
#include <thread>
#include <tuple>
#include <utility>

#include "base/log.hpp"
#include "delta/geometry.hpp"
#include "deltasync/layout.hpp"

namespace deltasync::agent {
namespace {

/// How long a release of the serving generation waits for its memory once nobody uses it (--low-memory): terabytes take
/// minutes.
constexpr auto kUnmapLimit = std::chrono::minutes(10);

VersionId newest_of(const Generation& generation) {
  return shm::inspect_newest(*generation.segment).id;
}

/// Whether a writer with this layout and sidecar can fill the generation. Who brings no sidecar leaves it as it is.
bool fits(const Generation& generation, const Layout& layout, ByteSpan sidecar) {
  if (generation.layout->digest() != layout.digest()) return false;
  const ByteSpan there = generation.segment->sidecar_encoded();
  return sidecar.empty() || std::equal(sidecar.begin(), sidecar.end(), there.begin(), there.end());
}

/// A process that is not proved dead and has a slot (granted by this agent or by the one before); 0 if there is none.
/// `asker`'s own slots are given back if they are in no fill: its goodbye may have been lost with an agent.
std::int32_t slot_holder(const Generation& generation, const ProcessId& asker) {
  generation.role->reap();
  for (unsigned slot = 0; slot < shm::kSlotsMax; ++slot) {
    const shm::SlotStatus status = shm::inspect_slot(*generation.segment, slot);
    if (status.pid == 0) continue;
    if (status.pid != asker.pid || status.phase != shm::Phase::idle) return status.pid;
    generation.role->revoke_slot(slot);
  }
  return 0;
}

template <class File, class Content>
std::string first_difference(const std::vector<File>& a, const std::vector<File>& b, const Content& content) {
  const auto missing_in = [&](const std::vector<File>& from, const std::vector<File>& in) -> std::string {
    for (const File& file : from) {
      const bool same = std::any_of(in.begin(), in.end(), [&](const File& other) {
        return other.name == file.name && content(other) == content(file);
      });
      if (!same) return file.name;
    }
    return {};
  };
  std::string name = missing_in(b, a);
  return name.empty() ? missing_in(a, b) : name;
}

/// Why a writer cannot fill the generation, for an error.
std::string misfit(const Generation& generation, const Layout& layout, ByteSpan sidecar) {
  if (generation.layout->digest() != layout.digest()) {
    return "with layout " + to_string(generation.layout->digest()) + ", this one brings " + to_string(layout.digest());
  }
  Sidecar there;
  if (auto decoded = Sidecar::decode(generation.segment->sidecar_encoded(), layout)) there = std::move(*decoded);
  const auto here = Sidecar::decode(sidecar, layout);
  std::string file;
  if (here) {
    file = first_difference(
        there.others, here->others, [](const auto& f) -> const auto& { return f.bytes; });
    if (file.empty()) {
      file = first_difference(there.weights, here->weights, [](const auto& f) { return std::tie(f.bytes, f.tensors); });
    }
  }
  return "of a model directory whose " + (file.empty() ? "files differ" : file + " differs") +
         " from what this one brings";
}

}  // namespace

/// A new epoch comes after the one that was published last, and after those that receivers hold.
Result<OpenSegment> SegmentHooks::open_as(const Generation& generation) const {
  DS_ASSIGN(UniqueFd file, generation.segment->hand_over());
  const std::uint64_t epoch = std::max(epoch_published_, versions_.epoch_heard());
  return OpenSegment{generation.segment->path(), generation.number, newest_of(generation), std::move(file), epoch};
}

Result<OpenSegment> SegmentHooks::open_segment(LayoutPtr layout, ByteSpan layout_encoded, ByteSpan sidecar_encoded,
                                               const ProcessId& asker) {
  for (const GenerationPtr& generation : versions_.generations()) {
    if (const VersionId id = newest_of(*generation); id.valid())
      epoch_published_ = id.epoch;  // the latest one's stands
  }
  GenerationPtr newest = versions_.newest();
  if (newest && fits(*newest, *layout, sidecar_encoded)) return open_as(*newest);
  for (const GenerationPtr& generation : versions_.generations()) {
    if (const std::int32_t holder = slot_holder(*generation, asker); holder != 0) {
      return Error(Errc::layout_mismatch, "a live writer (pid " + std::to_string(holder) + ") fills segment " +
                                              generation->segment->path().name + " " +
                                              misfit(*generation, *layout, sidecar_encoded));
    }
  }
  if (newest && newest_of(*newest) == VersionId{}) {
    // Its writers left before they sealed anything: nobody misses it.
    log::info("segment_removed name={} reason=\"its writers left before its first version\"",
              newest->segment->path().name);
    DS_TRY(versions_.remove(newest));
    newest = versions_.newest();
    if (newest && fits(*newest, *layout, sidecar_encoded)) return open_as(*newest);
  }
  if (newest && options_.low_memory) {
    newest.reset();
    DS_TRY(release_serving("a new layout comes and memory is low"));
  }
  auto made = versions_.create(std::move(layout), layout_encoded, sidecar_encoded);
  if (!made) {
    Error error = std::move(made).error();
    if (error.code() != Errc::no_space || !newest) return error;
    return Error(Errc::no_space, error.message() + "; the generation that is served holds " +
                                     std::to_string(2 * newest->segment->half_bytes()) +
                                     " bytes, which --low-memory would release first");
  }
  return open_as(**made);
}

/// Stops serving, removes the files, and waits until nobody of this process uses the mappings and they are gone.
Status SegmentHooks::release_serving(const std::string& why) {
  const auto released = versions_.release_all(why);
  plans_.end_all();
  if (!released) return released.error();
  const std::vector<std::uint64_t>& gone = *released;
  const auto wait = [&](bool (Reclaimer::*there)(std::uint64_t) const, auto limit, const char* state) -> Status {
    const Deadline deadline = Deadline::after(limit);
    while (std::any_of(gone.begin(), gone.end(), [&](std::uint64_t number) { return (*reclaimer_.*there)(number); })) {
      if (stop_) return Error(Errc::connection, "the agent is shutting down");
      if (deadline.passed()) {
        return Error(Errc::timed_out, std::string("the generation that is to be released is still ") + state);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return {};
  };
  DS_TRY(wait(&Reclaimer::held, options_.release_limit, "read, by receivers or by the diff"));
  return wait(&Reclaimer::has, kUnmapLimit, "being unmapped");
}

Result<std::uint64_t> SegmentHooks::grant(std::uint64_t generation, std::uint32_t slot, std::uint32_t writers,
                                          ProcessWatch watch) {
  for (const GenerationPtr& candidate : versions_.generations()) {
    if (candidate->number != generation) continue;
    return candidate->role->grant_slot(slot, writers, std::move(watch));
  }
  return Error(Errc::not_found, "generation " + std::to_string(generation) + " of the segment is gone");
}

void SegmentHooks::writer_gone(std::uint64_t generation, std::uint32_t slot, std::uint64_t grant) {
  for (const GenerationPtr& candidate : versions_.generations()) {
    if (candidate->number == generation) candidate->role->revoke_slot(slot, grant);
  }
  bell_.ring();
}

Result<UniqueFd> SegmentHooks::segment_to_read(std::uint64_t generation) {
  for (const GenerationPtr& candidate : versions_.generations()) {
    if (candidate->number != generation) continue;
    DS_ASSIGN(UniqueFd file, candidate->segment->hand_over_to_read());
    Metrics::add(metrics_.local_pulls, 1);
    return file;
  }
  return Error(Errc::not_found, "generation " + std::to_string(generation) + " of the segment is gone");
}

void SegmentHooks::segment_changed() {
  bell_.ring();
}

void SegmentHooks::offloaded(const wire::TrainerNotify& durations) {
  metrics_.offload.observe(static_cast<double>(durations.offload_ns) * 1e-9);
  metrics_.guard.observe(static_cast<double>(durations.guard_ns) * 1e-9);
}

void SegmentHooks::relays(std::uint64_t connection, const ProcessId& relay, wire::Parents said) {
  origin_.set(connection, relay, std::move(said));
}

void SegmentHooks::relay_gone(std::uint64_t connection) {
  arrival_.end(connection);
  delta_arrival_.end(connection);
  origin_.forget(connection);
}

Status SegmentHooks::arrives(std::uint64_t connection, std::uint64_t generation, wire::TrainerArrival said,
                             UniqueFd memory) {
  if (!said.version.id.valid()) {
    arrival_.end(connection);
    return {};
  }
  ServedVersion version;
  for (const GenerationPtr& candidate : versions_.generations()) {
    if (candidate->number == generation) version.generation = candidate;
  }
  if (!version.generation) return Error(Errc::not_found, "the generation of its segment is gone");
  const Layout& layout = *version.generation->layout;
  if (said.layout != layout.digest() || said.digests.size() != layout.tile_count()) {
    return Error(Errc::layout_mismatch, "it is of layout " + to_string(said.layout) + " with " +
                                            std::to_string(said.digests.size()) + " tiles, the segment of " +
                                            to_string(layout.digest()));
  }
  if (delta::root_digest(said.digests) != said.root) return Error(Errc::corrupt, "its digests have another root");
  DS_ASSIGN(auto opened, shm::ArrivingMemory::open(std::move(memory), {layout.tile_count(), layout.half_bytes()}));
  version.version = std::move(said.version);
  version.root = said.root;
  version.digests = std::make_shared<const std::vector<std::uint64_t>>(std::move(said.digests));
  const auto unmap = [reclaimer = reclaimer_](const shm::ArrivingMemory* last) {
    reclaimer->retire(std::shared_ptr<const shm::ArrivingMemory>(last));
  };
  version.arriving = std::shared_ptr<const shm::ArrivingMemory>(opened.release(), unmap);
  arrival_.begin(connection, std::move(version));
  return {};
}

Status SegmentHooks::delta_arrives(std::uint64_t connection, std::uint64_t generation, wire::TrainerDelta said) {
  for (const GenerationPtr& candidate : versions_.generations()) {
    if (candidate->number == generation) return delta_arrival_.begin(connection, candidate->layout, std::move(said));
  }
  return Error(Errc::not_found, "the generation of its segment is gone");
}

Status SegmentHooks::frames_arrive(std::uint64_t connection, wire::TrainerFrames part) {
  return delta_arrival_.take(connection, std::move(part));
}

void SegmentHooks::trains() {
  origin_.is_trainers();
}

/// A version of this epoch is being filled, is sealed, or is active and not served yet.
bool SegmentHooks::is_pending(std::uint64_t epoch) const {
  for (const GenerationPtr& generation : versions_.generations()) {
    for (unsigned h = 0; h < shm::kHalves; ++h) {
      const shm::HalfStatus half = shm::inspect_half(*generation->segment, h);
      const bool past = half.state == shm::HalfState::free || half.state == shm::HalfState::quarantined ||
                        half.state == shm::HalfState::retiring;
      if (!past && half.version.id.epoch == epoch) return true;
    }
  }
  return false;
}

Result<std::optional<wire::TrainerReady>> SegmentHooks::ready(const VersionId& version) {
  const bool pending = is_pending(version.epoch);  // before: what is pending now may be served a moment later
  const SnapshotPtr now = versions_.snapshot();
  if (stop_) return Error(Errc::connection, "the agent is shutting down");
  if (!now->served) return std::optional<wire::TrainerReady>();
  const ServedVersion& served = *now->served;
  if (served.version.id.epoch != version.epoch && !pending && version.epoch < served.version.id.epoch) {
    return Error(Errc::version_conflict,
                 to_string(version) + " is past: " + to_string(served.version.id) + " of another epoch is served");
  }
  if (served.version.id.epoch != version.epoch || served.version.id.number < version.number) {
    return std::optional<wire::TrainerReady>();
  }
  if (served.version.id == version && !served.damaged.empty()) {
    return Error(Errc::corrupt, "tiles of " + to_string(served.version) + " are not what they were handed over as, " +
                                    delta::tile_name(*served.generation->layout, served.damaged.front()) +
                                    " the first of " + std::to_string(served.damaged.size()));
  }
  wire::TrainerReady reply;
  reply.version = served.version.id;
  reply.delta_bytes = served.delta_bytes;
  reply.changed = served.changed;
  reply.encode_us = static_cast<std::uint64_t>(served.encode_s * 1e6);
  return std::optional<wire::TrainerReady>(reply);
}

}  // namespace deltasync::agent
