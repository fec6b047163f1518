// Tiles of the served half that may not be what their digests say. Receivers that could not verify them, conversations
// that sent them and the scrub tell of them; the publisher looks at them. Thread-safe, bounded.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "agent/versions/leases.hpp"

namespace deltasync::agent {

class Suspects {
 public:
  static constexpr std::size_t kTilesMax = 65'536;  ///< more are left to the scrub

  /// `found_by`: for the log.
  void add(const HalfKey& half, std::span<const std::uint64_t> tiles, const std::string& found_by) {
    const std::lock_guard lock(mutex_);
    if (half != half_) tiles_.clear();  // what is served changes: those of before concern nobody
    half_ = half;
    for (const std::uint64_t tile : tiles) {
      if (tiles_.size() < kTilesMax) tiles_.emplace(tile, found_by);
    }
  }
  /// Those of this content, ascending, with who found them; none of another one.
  std::map<std::uint64_t, std::string> take(const HalfKey& half) {
    const std::lock_guard lock(mutex_);
    std::map<std::uint64_t, std::string> taken;
    if (half == half_) taken.swap(tiles_);
    return taken;
  }

 private:
  std::mutex mutex_;
  HalfKey half_;  // protected by mutex_, as the next one
  std::map<std::uint64_t, std::string> tiles_;
};

}  // namespace deltasync::agent
