// The state digests of tiles, taken by the devices that have them.
#include <algorithm>
#include <cstring>

#include "delta/delta.hpp"
#include "receiver/device_executor.hpp"

namespace deltasync {

Status DeviceExecutor::digests_on(Part& part, std::span<const std::uint64_t> ranks, std::uint64_t* out,
                                  const Until& until) {
  std::vector<gpu::StagedTile> tiles;
  std::uint64_t largest = 0;
  for (const std::uint64_t rank : ranks) {
    tiles.push_back({rank, 0, rows_[rank], 0});
    largest = std::max(largest, tile_bytes(rank));
  }
  const std::uint64_t list_bytes = tiles.size() * sizeof(gpu::StagedTile);
  const std::uint64_t sum_bytes = tiles.size() * sizeof(std::uint64_t);
  DS_ASSIGN(const Lease slot, take_slot(part, part.small, until));
  std::memcpy(slot->pinned.data(), tiles.data(), static_cast<std::size_t>(list_bytes));
  gpu::DigestTiles kernel{part.table, reinterpret_cast<const gpu::StagedTile*>(slot->device.data()),
                          reinterpret_cast<std::uint64_t*>(slot->device.data() + list_bytes),
                          static_cast<std::uint32_t>(tiles.size()), gpu::blocks_for(largest)};
  const auto sum = [&]() -> Status {
    DS_TRY(part.stream->copy_in(slot->device.data(), slot->pinned.data(), list_bytes));
    DS_TRY(part.stream->zero(slot->device.data() + list_bytes, sum_bytes));
    DS_TRY(part.stream->launch(kernel));
    return part.stream->copy_out(slot->pinned.data() + list_bytes, slot->device.data() + list_bytes, sum_bytes);
  };
  DS_TRY(use(part, slot, sum));
  DS_TRY(gpu::wait(*slot->event, until, "digests of " + part.device->name()));
  std::memcpy(out, slot->pinned.data() + list_bytes, static_cast<std::size_t>(sum_bytes));
  return {};
}

Status DeviceExecutor::digests(std::span<const std::uint64_t> ranks, std::span<std::uint64_t> out, const Until& until) {
  const std::size_t portion = static_cast<std::size_t>(slot_bytes_) / (sizeof(gpu::StagedTile) + sizeof(std::uint64_t));
  std::vector<std::uint64_t> list;
  std::vector<std::size_t> where;
  std::vector<std::uint64_t> sums;
  for (std::uint32_t i = 0; i < parts_.size(); ++i) {
    list.clear();
    where.clear();
    for (std::size_t k = 0; k < ranks.size(); ++k) {
      if (home_[ranks[k]] != i) continue;
      list.push_back(ranks[k]);
      where.push_back(k);
    }
    sums.resize(list.size());
    for (std::size_t at = 0; at < list.size(); at += portion) {
      const auto some = std::span<const std::uint64_t>(list).subspan(at, std::min(portion, list.size() - at));
      DS_TRY(digests_on(*parts_[i], some, sums.data() + at, patient(until)));
    }
    for (std::size_t k = 0; k < list.size(); ++k) out[where[k]] = sums[k];
  }
  std::vector<std::byte> tile;
  for (std::size_t k = 0; k < ranks.size(); ++k) {
    if (home_[ranks[k]] != kMixed) continue;
    tile.resize(static_cast<std::size_t>(tile_bytes(ranks[k])));
    DS_TRY(gather_tile(ranks[k], tile.data(), until));
    const std::uint64_t row_bytes = tile.size() / rows_[ranks[k]];
    out[k] = delta::tile_digest(tile.data(), static_cast<std::size_t>(row_bytes), rows_[ranks[k]], row_bytes);
  }
  return {};
}

}  // namespace deltasync
