// Frames that were packed of one version, kept for other receivers that pull it too: those that were told of it
// together ask for the same frames within moments. Each plan of the version has a share in the one cache, which goes
// with the last of them. Frames hold copies, so no lease is needed for what lies here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "agent/generation.hpp"
#include "agent/leases.hpp"
#include "agent/reclaimer.hpp"
#include "agent/room.hpp"
#include "delta/delta.hpp"
#include "deltasync/result.hpp"

namespace deltasync::agent {

/// A frame and the hash of its bytes.
struct PackedFrame {
  delta::Frame frame;
  std::uint64_t hash = 0;
};
using PackedFramePtr = std::shared_ptr<const PackedFrame>;

/// Any thread.
class PackedFrameCache {
 public:
  using Tiles = std::vector<std::uint64_t>;
  using Make = std::function<Result<PackedFramePtr>()>;
  using Deliver = std::function<void(const Result<PackedFramePtr>&)>;

  /// What a receiver on a link of a gigabit takes in two seconds: others may begin so much later and still find what
  /// it has had packed.
  static constexpr std::uint64_t kBytesMax = 256u << 20;
  /// What is kept is taken from `room` too: if there is none to spare, less is kept.
  explicit PackedFrameCache(std::uint64_t bytes_max = kBytesMax, const Room& room = Room(kBytesMax))
      : bytes_max_(bytes_max), room_(room) {}

  /// Null: not here, or not yet.
  PackedFramePtr find(const Tiles& tiles) const;
  /// Delivers the frame of these tiles once: before this returns, or, if another thread is at it, on that thread when
  /// it has it. What cannot be made for one (its lease may have ended) is made for who waits by his own `make`. Both
  /// must not throw.
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

  /// Returns what had to go for it.
  Kept keep_locked(Entries::iterator entry, const PackedFramePtr& frame);
  void evict_locked(Kept& evicted);

  const std::uint64_t bytes_max_;
  const Room room_;
  mutable std::mutex mutex_;
  Entries entries_;          // protected by mutex_, as all below
  Kept kept_;                // those with frames, in the order of their making
  std::uint64_t bytes_ = 0;  // of these
};

/// Finds the cache of the content that is served. Its owner's mutex.
class ServedPackedFrameCache {
 public:
  /// The same one for all who hold a share of it; the reclaimer frees it.
  std::shared_ptr<PackedFrameCache> share(const HalfKey& half, std::shared_ptr<Reclaimer> reclaimer, const Room& room);

 private:
  std::weak_ptr<PackedFrameCache> cache_;
  HalfKey half_;  // whose frames lie there
};

}  // namespace deltasync::agent
