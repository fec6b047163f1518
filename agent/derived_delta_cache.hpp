// Deltas that are made of the ring's when a receiver asks, and kept for those that ask the same: one for a chain
// (merged), one that is smaller for slow links (compact). Only the bookkeeping; who makes them is in core_derived.cpp.
// Not thread-safe; lives behind the core's mutex. Entries are immutable and shared with the plans that serve them.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "agent/ring.hpp"

namespace deltasync::agent {

enum class DeltaForm : std::uint8_t {
  plain,    ///< as the ring's
  compact,  ///< in exponent classes where that is smaller
};

/// What such a delta applies to, exactly, where it leads, and how it says that.
struct DeltaKey {
  VersionId from;
  Digest128 from_root;
  VersionId to;
  DeltaForm form = DeltaForm::plain;

  auto operator<=>(const DeltaKey&) const = default;
};

class DerivedDeltaCache {
 public:
  /// Bounds what is kept, of both forms together, and how many may wait to be made; compact ones, which take much
  /// longer to make, may be half of these.
  explicit DerivedDeltaCache(std::uint64_t bytes_max, std::size_t wanted_max = 16)
      : bytes_max_(bytes_max), wanted_max_(wanted_max) {}

  enum class State : std::uint8_t {
    none,        ///< nobody wants it, or it was evicted
    wanted,      ///< to be made, or being made
    made,        ///< kept
    impossible,  ///< it was tried: it cannot be made, or is not worth it
  };
  State state(const DeltaKey& key) const;
  /// Null unless made.
  RingEntryPtr find(const DeltaKey& key) const;
  /// One of those who want a delta. any thread may drop it at any time: what nobody holds a request for any more is
  /// forgotten unless it was begun.
  using Request = std::shared_ptr<const void>;
  /// From `none` to `wanted`, or with those who want it already. Null if it is made or impossible, or if too many are
  /// wanted.
  Request request(const DeltaKey& key);
  /// The one of this form that has been wanted for longest, and is not begun yet. It stays wanted until put(), fail()
  /// or forget(), no matter who wants it.
  std::optional<DeltaKey> begin(DeltaForm form);

  /// The wanted one is made. Evicts the oldest. Returns what is not kept: those, or `entry` itself if nobody can ask
  /// for it any more or it is larger than the bound (then it is impossible).
  std::vector<RingEntryPtr> put(const DeltaKey& key, RingEntryPtr entry);
  void fail(const DeltaKey& key);
  void forget(const DeltaKey& key);
  /// Forgets all whose two ends are not in `ring` any more: nobody can ask for them. Returns what was kept of them.
  std::vector<RingEntryPtr> retain(const std::deque<RingEntryPtr>& ring);
  void set_bytes_max(std::uint64_t bytes_max) { bytes_max_ = bytes_max; }

  std::uint64_t bytes() const noexcept { return bytes_; }
  std::uint64_t bytes_max() const noexcept { return bytes_max_; }
  std::size_t wanted() const noexcept;  ///< waiting, or begun
  /// Oldest first.
  std::vector<RingEntryPtr> entries() const;

 private:
  static constexpr std::size_t kSlotsMax = 256;  ///< impossible ones take no bytes
  struct Slot {
    DeltaKey key;
    State state = State::wanted;
    bool begun = false;                  ///< wanted
    std::weak_ptr<const void> requests;  ///< wanted
    RingEntryPtr entry;                  ///< made

    bool is_wanted() const noexcept { return state == State::wanted && (begun || !requests.expired()); }
    bool is_abandoned() const noexcept { return state == State::wanted && !is_wanted(); }
  };
  std::list<Slot>::const_iterator slot(const DeltaKey& key) const;
  std::list<Slot>::iterator slot(const DeltaKey& key);
  bool has_room_for(DeltaForm form) const noexcept;

  std::uint64_t bytes_max_;
  const std::size_t wanted_max_;
  std::list<Slot> slots_;  ///< wanted: in the order of the requests; made: in that of their making
  std::uint64_t bytes_ = 0;
};

}  // namespace deltasync::agent
