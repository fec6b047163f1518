#include "receiver/targets/staged_tiles.hpp"

#include <string>
#include <utility>

namespace deltasync {

Status StagedTiles::open(std::uint64_t tiles, const BytesOf& bytes_of, ThreadPool& pool, const CallContext& until) {
  constexpr std::uint64_t kAlignment = 64;
  if (memory_) return {};
  std::uint64_t bytes = 0;
  at_.clear();
  at_.reserve(static_cast<std::size_t>(tiles));
  for (std::uint64_t rank = 0; rank < tiles; ++rank) {
    at_.push_back(bytes);
    bytes += (bytes_of(rank) + kAlignment - 1) / kAlignment * kAlignment;
  }
  auto memory = HostMemory::map(bytes, pool, until);
  if (!memory.ok()) {
    close();
    return std::move(memory).error();
  }
  memory_ = *std::move(memory);
  return {};
}

void StagedTiles::close() noexcept {
  memory_.release();
  at_ = {};
}

Status exchange_all(ThreadPool& pool, std::uint64_t count, const CallContext& until, const CallContext& back,
                    bool& torn, const std::function<Status(std::uint64_t, unsigned, const CallContext&)>& exchange) {
  std::vector<std::uint8_t> exchanged(static_cast<std::size_t>(count), 0);
  Status done = run_all(pool, count, until, "exchanging versions", [&](std::uint64_t i, unsigned worker) -> Status {
    DS_TRY(exchange(i, worker, until));
    exchanged[i] = 1;
    return {};
  });
  if (done.ok()) return {};
  const Status again = run_all(pool, count, [&](std::uint64_t i, unsigned worker) -> Status {
    return exchanged[i] == 0 ? Status() : exchange(i, worker, back);
  });
  torn = !again.ok();
  return done;
}

Status check_placed_tiles(const TileSet& placed, const TileSet& asked) {
  if (asked.ranges() == placed.ranges()) return {};
  return Error(Errc::invalid_argument, "the subscription has " + std::to_string(asked.tiles()) +
                                           " tiles, the placement needs " + std::to_string(placed.tiles()) +
                                           " (or others): bind with the placement's own subscription");
}

}  // namespace deltasync
