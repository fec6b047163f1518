#include "agent/plans/packed_frame_cache.hpp"

#include <new>
#include <optional>
#include <tuple>
#include <utility>

namespace deltasync::agent {
namespace {

std::uint64_t held_bytes(const PackedFrame& made) {
  return made.frame.bytes.capacity();
}

}  // namespace

PackedFramePtr PackedFrameCache::find(const Tiles& tiles) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(tiles);
  return found == entries_.end() ? nullptr : found->second.frame;
}

void PackedFrameCache::get(const Tiles& tiles, Make make, Deliver deliver) {
  Entries::iterator entry;
  PackedFramePtr here;
  {
    const std::lock_guard lock(mutex_);
    bool first = false;
    std::tie(entry, first) = entries_.try_emplace(tiles);
    here = entry->second.frame;
    if (!here && !first) {
      entry->second.waiting.push_back({std::move(make), std::move(deliver)});
      return;
    }
  }
  if (here) return deliver(here);
  // An entry that is being made is nobody else's to take away.
  for (;;) {
    const Result<PackedFramePtr> made = make();
    std::vector<Asker> served;
    std::optional<Asker> next;
    Kept evicted;  // freed when the lock is gone
    {
      const std::lock_guard lock(mutex_);
      std::vector<Asker>& waiting = entry->second.waiting;
      if (made) {
        served.swap(waiting);
        evicted = keep_locked(entry, *made);
      } else if (waiting.empty()) {
        entries_.erase(entry);
      } else {
        next = std::move(waiting.back());
        waiting.pop_back();
      }
    }
    deliver(made);
    for (const Asker& asker : served) asker.deliver(made);
    if (!next) return;
    make = std::move(next->make);
    deliver = std::move(next->deliver);
  }
}

PackedFrameCache::Kept PackedFrameCache::keep_locked(Entries::iterator entry, const PackedFramePtr& frame) {
  Kept evicted;
  const std::uint64_t bytes = held_bytes(*frame);
  auto share = room_.take_spare(bytes);
  while (!share && !kept_.empty()) {
    evict_locked(evicted);
    share = room_.take_spare(bytes);
  }
  try {
    if (share) kept_.push_back({entry, frame, *std::move(share)});
  } catch (const std::bad_alloc&) {
    share.reset();
  }
  if (!share) {
    entries_.erase(entry);
    return evicted;
  }
  entry->second.frame = frame;
  bytes_ += bytes;
  while (bytes_ > bytes_max_) evict_locked(evicted);
  return evicted;
}

void PackedFrameCache::evict_locked(Kept& evicted) {
  KeptFrame& oldest = kept_.front();
  bytes_ -= held_bytes(*oldest.frame);
  entries_.erase(oldest.entry);
  oldest.share = Room::Share();  // now, not when the list is freed
  evicted.splice(evicted.end(), kept_, kept_.begin());
}

std::shared_ptr<PackedFrameCache> ServedPackedFrameCache::share(const HalfKey& half,
                                                                std::shared_ptr<Reclaimer> reclaimer,
                                                                const Room& room) {
  auto cache = half_ == half ? cache_.lock() : nullptr;
  if (cache) return cache;
  cache = {new PackedFrameCache(PackedFrameCache::kBytesMax, room),
           [reclaimer = std::move(reclaimer)](const PackedFrameCache* last) {
             try {
               reclaimer->retire(std::shared_ptr<const PackedFrameCache>(last));
             } catch (const std::bad_alloc&) {
               // It was freed here.
             }
           }};
  cache_ = cache;
  half_ = half;
  return cache;
}

}  // namespace deltasync::agent
