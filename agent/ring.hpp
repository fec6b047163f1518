// The bounded ring of recent deltas: a contiguous chain of versions, oldest first, in memory beside the segment.
// Not thread-safe; lives behind the core's mutex. Entries are immutable and shared with the conversations that serve
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
#include "deltasync/version.hpp"

namespace deltasync::agent {

/// One delta ready to be served.
struct RingEntry {
  delta::DeltaPtr delta;
  Version from;
  Version to;
  std::vector<std::uint64_t> frame_hashes;  ///< XXH3-64 of each frame's bytes: the wire's payload hashes
  /// A changed tile and its digest in `from`: with the digests of a later version they give those of an earlier one.
  struct Before {
    std::uint64_t tile = 0;
    std::uint64_t digest = 0;
  };
  std::vector<Before> before;  ///< ascending; of the ring's own deltas only, merged ones have none
  std::chrono::steady_clock::time_point made_at;
  double encode_s = 0;

  /// Hashes the frames.
  static std::shared_ptr<const RingEntry> make(delta::Delta delta, Version from, Version to, double encode_s,
                                               std::vector<Before> before = {});
  /// What it takes of the bounds: frames and digests.
  std::uint64_t bytes() const noexcept { return delta->frame_bytes + before.size() * sizeof(Before); }
};
using RingEntryPtr = std::shared_ptr<const RingEntry>;

/// The tiles whose digests differ, with those of `from`.
std::vector<RingEntry::Before> changed_digests(std::span<const std::uint64_t> from, std::span<const std::uint64_t> to);

class DeltaRing {
 public:
  /// `bytes_max` and `entries_max` bound the ring; a newest delta smaller than `half_bytes` is kept whatever its size.
  DeltaRing(std::uint64_t bytes_max, std::size_t entries_max) : bytes_max_(bytes_max), entries_max_(entries_max) {}

  /// Appends, and evicts from the old end. An entry that does not continue the chain (`from` and root) empties the ring
  /// first. Returns what was evicted.
  std::vector<RingEntryPtr> push(RingEntryPtr entry, std::uint64_t half_bytes);
  std::vector<RingEntryPtr> clear();
  void set_bytes_max(std::uint64_t bytes_max) { bytes_max_ = bytes_max; }

  const std::deque<RingEntryPtr>& entries() const noexcept { return entries_; }
  std::uint64_t bytes() const noexcept { return bytes_; }
  std::uint64_t bytes_max() const noexcept { return bytes_max_; }

 private:
  std::uint64_t bytes_max_;
  std::size_t entries_max_;
  std::deque<RingEntryPtr> entries_;
  std::uint64_t bytes_ = 0;
};

}  // namespace deltasync::agent
