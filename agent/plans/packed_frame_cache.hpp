// Packed frames of one version, kept for other receivers that pull it too. Receivers hear of a version at the same
// time, so they ask for the same frames within moments. All full plans of a version share one cache; it ends with the
// last of them. Frames are copies, so a cached one needs no lease.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "agent/room.hpp"
#include "agent/versions/generation.hpp"
#include "agent/versions/leases.hpp"
#include "agent/versions/reclaimer.hpp"
#include "delta/delta.hpp"
#include "deltasync/result.hpp"

namespace deltasync::agent {

/// A frame and the hash of its bytes.
struct PackedFrame {
  delta::Frame frame;
  std::uint64_t hash = 0;
};
using PackedFramePtr = std::shared_ptr<const PackedFrame>;

/// Thread-safe.
class PackedFrameCache {
 public:
  using Tiles = std::vector<std::uint64_t>;
  using Make = std::function<Result<PackedFramePtr>()>;
  using Deliver = std::function<void(const Result<PackedFramePtr>&)>;

  /// Two seconds of a link of one gigabit: a receiver that begins so much later than another still finds its frames.
  static constexpr std::uint64_t kBytesMax = 256u << 20;
  /// The frames take from `room` as well: if it has nothing to spare, fewer are kept.
  explicit PackedFrameCache(std::uint64_t bytes_max = kBytesMax, const Room& room = Room(kBytesMax))
      : bytes_max_(bytes_max), room_(room) {}

  /// Null: not here, or not yet.
  PackedFramePtr find(const Tiles& tiles) const;
  /// Calls `deliver` once with the frame of these tiles. Before this returns; or, if another thread is making the
  /// frame, later on that thread. If its `make` fails (its lease may have ended), those who wait are tried with their
  /// own. Neither function may throw.
  void get(const Tiles& tiles, Make make, Deliver deliver);

 private:
  struct Asker {
    Make make;
    Deliver deliver;
  };
  struct Entry {
    PackedFramePtr frame;        ///< null: being made
    std::vector<Asker> waiting;  ///< for the one who makes it
  };
  using Entries = std::map<Tiles, Entry>;

  struct KeptFrame {
    Entries::iterator entry;
    PackedFramePtr frame;
    Room::Share share;
  };
  using Kept = std::list<KeptFrame>;

  /// Returns what was evicted for it.
  Kept keep_locked(Entries::iterator entry, const PackedFramePtr& frame);
  void evict_locked(Kept& evicted);

  const std::uint64_t bytes_max_;
  const Room room_;
  mutable std::mutex mutex_;
  Entries entries_;          // protected by mutex_, as all below
  Kept kept_;                // those with frames, in the order of their making
  std::uint64_t bytes_ = 0;  // of these
};

/// Finds the cache of the version that is served. Protected by its owner's mutex.
class ServedPackedFrameCache {
 public:
  /// One cache for all who ask with the same half. The reclaimer frees it after the last of them.
  std::shared_ptr<PackedFrameCache> share(const HalfKey& half, std::shared_ptr<Reclaimer> reclaimer, const Room& room);

 private:
  std::weak_ptr<PackedFrameCache> cache_;
  HalfKey half_;  // whose frames lie there
};

}  // namespace deltasync::agent
