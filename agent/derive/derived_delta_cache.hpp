// Derived deltas: made from the ring's when a receiver asks, and kept for others that ask for the same. A merged one
// stands for a chain; a compact one is smaller, for slow links. This is the bookkeeping; the DeltaBuilder builds
// them. Not thread-safe; protected by the builder's mutex. Entries are immutable and shared with the plans that serve
// them.
#pragma once

#include <compare>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "agent/versions/ring.hpp"

namespace deltasync::agent {

enum class DeltaForm : std::uint8_t {
  plain,    ///< as the ring's
  compact,  ///< in exponent classes where that is smaller
};

/// Names a derived delta: the exact state that it applies to, the version that it leads to, and its form.
struct DeltaKey {
  VersionId from;
  Digest128 from_root;
  VersionId to;
  DeltaForm form = DeltaForm::plain;
  std::uint64_t revision = 0;  ///< of the ring that it is made from (DeltaRing::revision)

  auto operator<=>(const DeltaKey&) const = default;
};

class DerivedDeltaCache {
 public:
  /// `bytes_max` bounds what is kept, of both forms together. `wanted_max` bounds how many may wait to be built; half
  /// of these may be compact ones, which take much longer.
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
  /// Held by one who wants a delta. Any thread may drop it at any time. A delta whose last request was dropped is
  /// forgotten, unless building it has begun.
  using Request = std::shared_ptr<const void>;
  /// Asks for a delta: from `none` to `wanted`, or joins those who want it already. Null if it is made or impossible,
  /// or if too many are wanted, or if it is of another revision than retain() was last told.
  Request request(const DeltaKey& key);
  /// Begins the one of this form that has been wanted for longest. It stays wanted until put(), fail() or forget(),
  /// even if all requests are dropped.
  std::optional<DeltaKey> begin(DeltaForm form);

  /// The wanted one is built. Evicts the oldest. Returns what is not kept: the evicted ones; or `entry` itself, if
  /// nobody can ask for it any more, or if it is larger than the bound (then it is impossible).
  std::vector<RingEntryPtr> put(const DeltaKey& key, RingEntryPtr entry);
  void fail(const DeltaKey& key);
  void forget(const DeltaKey& key);
  /// Forgets those whose two ends are not both in `ring` any more, or that are of another revision of it: nobody can
  /// ask for them. Returns what it had of them.
  std::vector<RingEntryPtr> retain(const std::vector<RingEntryPtr>& ring, std::uint64_t revision = 0);
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
  std::uint64_t revision_ = 0;  ///< of the ring
};

}  // namespace deltasync::agent
