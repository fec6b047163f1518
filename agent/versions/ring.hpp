// The bounded ring of recent deltas: a contiguous chain of versions, oldest first, in memory beside the segment.
// Not thread-safe; protected by the store's mutex. Entries are immutable and shared with the conversations that serve
// them, so that eviction never waits for a slow receiver.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "delta/delta.hpp"
#include "delta/kept_delta.hpp"
#include "deltasync/version.hpp"

namespace deltasync::agent {

using delta::DigestBefore;

/// A state that a version was published with before digests of its tiles were taken again, because they were not those
/// of its bytes. Receivers may hold it: what is damaged is the agent's memory, not theirs.
struct FormerState {
  Digest128 root;
  std::vector<DigestBefore> before;  ///< ascending: where it differs from the state that took its place
};

class ArrivingDelta;

/// One delta ready to be served.
struct RingEntry {
  delta::DeltaPtr delta;
  Version from;
  Version to;
  std::vector<std::uint64_t> frame_hashes;  ///< XXH3-64 of each frame's bytes: the wire's payload hashes
  /// Changed tiles with their digests in `from`: with the digests of a later version they give those of an earlier one.
  /// Ascending; of the ring's own deltas only, merged ones have none.
  std::vector<DigestBefore> before;
  /// Further states of `from`, the oldest first, that the delta applies to: it has their tiles raw.
  std::vector<FormerState> from_former;
  /// Tiles were left out of it whose state at `to` is not known: it leads there only together with what follows it.
  bool partial = false;
  std::chrono::steady_clock::time_point made_at;
  /// Of one that a relay still receives: `delta` has its sums and none of its frames. Never in the ring. Null: all is
  /// there.
  std::shared_ptr<ArrivingDelta> arriving;
  bool found_at_start = false;  ///< an agent before this one made and kept it: made_at is no more than that
  double encode_s = 0;

  /// Hashes the frames.
  static std::shared_ptr<RingEntry> make(delta::Delta delta, Version from, Version to, double encode_s,
                                         std::vector<DigestBefore> before = {});
  /// What it takes of the bounds: frames and digests.
  std::uint64_t bytes() const noexcept { return delta->frame_bytes + before.size() * sizeof(DigestBefore); }
};
using RingEntryPtr = std::shared_ptr<const RingEntry>;

/// The tiles whose digests differ, with those of `from`.
std::vector<DigestBefore> changed_digests(std::span<const std::uint64_t> from, std::span<const std::uint64_t> to);

class DeltaRing {
 public:
  /// `bytes_max` and `entries_max` bound the ring; a newest delta smaller than `half_bytes` is kept whatever its size.
  DeltaRing(std::uint64_t bytes_max, std::size_t entries_max) : bytes_max_(bytes_max), entries_max_(entries_max) {}

  /// Appends, and evicts from the old end. An entry that does not continue the chain (`from` and root) empties the ring
  /// first. Returns what was evicted.
  std::vector<RingEntryPtr> push(RingEntryPtr entry, std::uint64_t half_bytes);
  std::vector<RingEntryPtr> clear();
  /// Other deltas between the same versions take the place of all. Returns what was there.
  std::vector<RingEntryPtr> replace(std::vector<RingEntryPtr> entries);
  void set_bytes_max(std::uint64_t bytes_max) { bytes_max_ = bytes_max; }

  const std::deque<RingEntryPtr>& entries() const noexcept { return entries_; }
  /// Counts the calls of replace(): what was derived from the deltas of another revision leads elsewhere.
  std::uint64_t revision() const noexcept { return revision_; }
  std::uint64_t bytes() const noexcept { return bytes_; }
  std::uint64_t bytes_max() const noexcept { return bytes_max_; }

 private:
  std::uint64_t bytes_max_;
  std::size_t entries_max_;
  std::deque<RingEntryPtr> entries_;
  std::uint64_t bytes_ = 0;
  std::uint64_t revision_ = 0;
};

}  // namespace deltasync::agent
