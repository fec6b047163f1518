// A second version beside one that lies in an engine's memory: in host memory, tile behind tile.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "receiver/targets/host_memory.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync {

/// Tiles are named by their rank in a set. Used by one thread at a time, but for tile().
class StagedTiles {
 public:
  using BytesOf = std::function<std::uint64_t(std::uint64_t rank)>;

  /// Memory for so many tiles; nothing if it is there already. On error there is none: no_space, timed_out, cancelled.
  Status open(std::uint64_t tiles, const BytesOf& bytes_of, ThreadPool& pool, const CallContext& until);
  void close() noexcept;
  explicit operator bool() const noexcept { return static_cast<bool>(memory_); }

  /// Its elements, row by row without gaps.
  std::byte* tile(std::uint64_t rank) const noexcept {
    return memory_.span().data() + at_[static_cast<std::size_t>(rank)];
  }
  std::uint64_t bytes() const noexcept { return memory_.span().size(); }

 private:
  HostMemory memory_;
  std::vector<std::uint64_t> at_;  ///< of each tile
};

/// Exchanges live memory with staging, all of it or nothing: exchange(i, worker, until) for each i below `count`, by
/// all of the pool's threads. Each leaves what it was if it fails, and rolls back what it did if it is called again.
/// Once `until` has come or one has failed, what was exchanged is exchanged back, in `back` at most; if that fails too,
/// memory is `torn`.
Status exchange_all(ThreadPool& pool, std::uint64_t count, const CallContext& until, const CallContext& back,
                    bool& torn, const std::function<Status(std::uint64_t, unsigned, const CallContext&)>& exchange);

/// A target with a placement keeps its tiles and no others.
Status check_placed_tiles(const TileSet& placed, const TileSet& asked);

}  // namespace deltasync
