// The subscriptions of all connections: many replicas have the same ranks, and share what is computed for them.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "agent/plans/subset.hpp"
#include "agent/room.hpp"

namespace deltasync::agent {

/// Thread-safe. Its mutex protects the table, and none is taken under it. Invariant: subscriptions to the same tiles
/// that live at the same time are one object.
class SubsetTable {
 public:
  /// `room`: the memory that peers may take.
  explicit SubsetTable(Room room) : room_(std::move(room)) {}

  /// no_space beyond the room.
  Result<SubsetPtr> share(TileSet tiles);

 private:
  const Room room_;
  std::mutex mutex_;
  std::map<Digest128, std::weak_ptr<Subset>> subsets_;  // protected by mutex_; by TileSet::digest()
};

}  // namespace deltasync::agent
