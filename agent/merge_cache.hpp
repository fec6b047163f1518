// Deltas that are made of the ring's when a receiver asks, and kept for those that ask the same: one for a chain
// (merged), one that is smaller for slow links (compact). Only the bookkeeping; who makes them is in core_merge.cpp.
// Not thread-safe; lives behind the core's mutex. Entries are immutable and shared with the plans that serve them.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <list>
#include <optional>
#include <vector>

#include "agent/ring.hpp"

namespace deltasync::agent {

enum class DeltaForm : std::uint8_t {
  plain,    ///< as the ring's
  compact,  ///< in exponent classes where that is smaller
};

/// What such a delta applies to, exactly, where it leads, and how it says that.
struct MergeKey {
  VersionId from;
  Digest128 from_root;
  VersionId to;
  DeltaForm form = DeltaForm::plain;

  auto operator<=>(const MergeKey&) const = default;
};

class MergeCache {
 public:
  /// Bounds what is kept, of both forms together, and how many may wait to be made.
  explicit MergeCache(std::uint64_t bytes_max, std::size_t wanted_max = 16)
      : bytes_max_(bytes_max), wanted_max_(wanted_max) {}

  enum class State : std::uint8_t {
    none,        ///< nobody wanted it, or it was evicted
    wanted,      ///< to be made, or being made
    made,        ///< kept
    impossible,  ///< it was tried: it cannot be made, or is not worth it
  };
  State state(const MergeKey& key) const;
  /// Null unless made.
  RingEntryPtr find(const MergeKey& key) const;
  /// From `none` to `wanted`; false if too many are wanted already.
  bool want(const MergeKey& key);
  /// The one that has been wanted for longest. It stays so until put(), fail() or forget().
  std::optional<MergeKey> next() const;

  /// The wanted one is made. Evicts the oldest. Returns what is not kept: those, or `entry` itself if nobody can ask
  /// for it any more or it is larger than the bound (then it is impossible).
  std::vector<RingEntryPtr> put(const MergeKey& key, RingEntryPtr entry);
  void fail(const MergeKey& key);
  void forget(const MergeKey& key);
  /// Forgets all whose two ends are not in `ring` any more: nobody can ask for them. Returns what was kept of them.
  std::vector<RingEntryPtr> retain(const std::deque<RingEntryPtr>& ring);
  void set_bytes_max(std::uint64_t bytes_max) { bytes_max_ = bytes_max; }

  std::uint64_t bytes() const noexcept { return bytes_; }
  std::uint64_t bytes_max() const noexcept { return bytes_max_; }
  std::size_t wanted() const noexcept;
  /// Oldest first.
  std::vector<RingEntryPtr> entries() const;

 private:
  static constexpr std::size_t kSlotsMax = 256;  ///< impossible ones take no bytes
  struct Slot {
    MergeKey key;
    State state = State::wanted;
    RingEntryPtr entry;  ///< made
  };
  std::list<Slot>::const_iterator slot(const MergeKey& key) const;
  std::list<Slot>::iterator slot(const MergeKey& key);

  std::uint64_t bytes_max_;
  const std::size_t wanted_max_;
  std::list<Slot> slots_;  ///< wanted: in the order of the wishes; made: in that of their making
  std::uint64_t bytes_ = 0;
};

}  // namespace deltasync::agent
