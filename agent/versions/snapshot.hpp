// What is served at one moment. Immutable: who has a snapshot plans and reads without a lock.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "agent/versions/generation.hpp"
#include "agent/versions/leases.hpp"
#include "agent/versions/offer.hpp"
#include "agent/versions/ring.hpp"
#include "shm/arriving_memory.hpp"

namespace deltasync::agent {

/// A version that receivers get: its half, and the digests fixed when it was published.
struct ServedVersion {
  GenerationPtr generation;
  HalfKey half;
  Version version;
  Digest128 root;
  std::shared_ptr<const std::vector<std::uint64_t>> digests;
  /// What it was published with before digests of damaged tiles were taken again, the oldest first; few.
  std::vector<FormerState> former;
  /// A relay brought it: its digests are those of the agent above, and are never taken again.
  bool relayed = false;
  /// Of a relayed one, ascending: tiles whose bytes are not what their digests say. Nobody gets it whole from here.
  std::vector<std::uint64_t> damaged;
  std::chrono::steady_clock::time_point published_at;
  /// Of one that is none yet: where it lies. Only tiles that are in place may be read. Null: in its half.
  std::shared_ptr<const shm::ArrivingMemory> arriving;
  bool found_at_start = false;  ///< in a segment that an agent before this one left: published_at is no more than that
  // What making it cost; zero for the first of a generation.
  std::uint64_t delta_bytes = 0;
  std::uint64_t changed = 0;
  double encode_s = 0;
  double digest_s = 0;

  /// Of a whole half, and where they lie in which file.
  ByteSpan bytes() const { return arriving ? arriving->model() : generation->half(half.half); }
  int file() const { return arriving ? arriving->file() : generation->segment->file(); }
  std::uint64_t file_offset() const {
    return arriving ? arriving->model_offset() : generation->segment->half_file_offset(half.half);
  }
  /// Whose bytes are others than those that were offloaded, ascending.
  std::vector<std::uint64_t> damaged_tiles() const;
};
using ServedPtr = std::shared_ptr<const ServedVersion>;

/// Copies tiles of a served half to `out`, contiguous, their rows without padding. Takes no lease, so that no writer
/// waits for a thread of low priority. False if the half was given back to the writers meanwhile: then what is in `out`
/// is of no use.
bool copy_while_served(const ServedVersion& served, std::span<const std::uint64_t> tiles, std::byte* out);

/// Those of these tiles that do not have their digests. Nothing if the half was given back to the writers meanwhile.
std::optional<std::vector<std::uint64_t>> wrong_tiles(const ServedVersion& served,
                                                      std::span<const std::uint64_t> tiles);

/// Everything that a plan is made from.
struct Snapshot {
  GenerationPtr generation;  ///< whose layout receivers get; null: no trainer has come yet
  ServedPtr served;          ///< null: no version yet
  ServedPtr arriving;        ///< only while nothing is served: what a relay is bringing; or null
  RingEntryPtr ahead;        ///< the delta from what is served that a relay is receiving; or null
  std::vector<RingEntryPtr> ring;
  std::uint64_t ring_bytes_max = 0;
  std::uint64_t ring_revision = 0;  ///< DeltaRing::revision()
  Offer offer;                      ///< the same for the planner
  Offer offer_arriving;             ///< and what it is for those who take a version that arrives
  Offer offer_ahead;                ///< what it will be once the delta that arrives is the last of the ring
};
using SnapshotPtr = std::shared_ptr<const Snapshot>;

/// `ahead`: null, or a delta that arrives: left out if it does not lead from what is served.
SnapshotPtr make_snapshot(GenerationPtr generation, ServedPtr served, ServedPtr arriving, RingEntryPtr ahead,
                          const DeltaRing& ring);

}  // namespace deltasync::agent
