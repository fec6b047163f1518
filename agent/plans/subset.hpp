// A receiver's subscription as the agent keeps it: its tiles, with the roots of versions and the sizes of deltas for
// these tiles alone. Shared by all connections that subscribed to the same tiles: many replicas have the same ranks,
// and each value is computed once for all.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

#include "agent/plans/planner.hpp"
#include "agent/room.hpp"
#include "agent/versions/ring.hpp"
#include "format/tile_set.hpp"

namespace deltasync::agent {

/// Thread-safe.
class Subset {
 public:
  /// `share`: for range_bytes().
  explicit Subset(TileSet tiles, Room::Share share = {}) : tiles_(std::move(tiles)), share_(std::move(share)) {}

  const TileSet& tiles() const noexcept { return tiles_; }
  /// Memory that the ranges take.
  static std::uint64_t range_bytes(const TileSet& tiles) noexcept {
    return tiles.ranges().size() * (sizeof(wire::TileRange) + 8);
  }

  /// `whole` for these tiles: sizes and roots are theirs. `ring`, `served` (digests of all tiles) and `served_former`
  /// are what it was made from. Of versions and deltas that `plan` cannot be answered with, roots and sizes stay zero:
  /// what nobody asks for is not computed. What is, is kept as long as it is in the ring: for each version of the
  /// trainer's once.
  Offer offer(const Offer& whole, std::span<const RingEntryPtr> ring, std::span<const std::uint64_t> served,
              std::span<const FormerState> served_former, const wire::PlanRequest& plan);

  /// What of one delta is in these tiles, exactly.
  struct Part {
    std::uint64_t frames = 0;
    std::uint64_t frame_bytes = 0;
    std::uint64_t changed = 0;
  };
  Part part_of(const RingEntryPtr& entry);

 private:
  using RootKey = std::pair<VersionId, Digest128>;  ///< a version and its whole root

  void find_roots_locked(Offer& offer, const Offer& whole, std::span<const RingEntryPtr> ring,
                         std::span<const std::uint64_t> served, std::span<const FormerState> served_former,
                         std::size_t first);
  std::vector<Digest128> former_roots(std::span<const FormerState> former, std::vector<std::uint64_t> digests) const;
  void forget_roots_locked(const Offer& whole);
  std::optional<Part> known_part(const RingEntryPtr& entry) const;
  Part count(const RingEntry& entry) const;

  const TileSet tiles_;
  const Room::Share share_;
  std::mutex roots_mutex_;              // held while roots are computed: who waits wants the same ones
  std::map<RootKey, Digest128> roots_;  // protected by roots_mutex_
  mutable std::mutex parts_mutex_;      // for a look only
  std::map<std::weak_ptr<const RingEntry>, Part, std::owner_less<>> parts_;  // protected by parts_mutex_
};
using SubsetPtr = std::shared_ptr<Subset>;

}  // namespace deltasync::agent
