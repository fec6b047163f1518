// The state digests of tiles, taken by the devices that have them.
#include <algorithm>
#include <cstring>
#include <deque>

#include "delta/delta.hpp"
#include "receiver/targets/device/device_executor.hpp"

namespace deltasync {

/// Tiles whose digests a device takes in one launch. In the slot: their descriptions, then the sums.
struct DeviceExecutor::DigestBatch {
  SlotGuard slot;
  std::vector<std::size_t> where;  ///< in the caller's list
  std::uint64_t largest = 0;       ///< bytes of a tile
  bool is_sent = false;

  std::uint64_t list_bytes() const noexcept { return where.size() * sizeof(gpu::StagedTile); }
  std::uint64_t sum_bytes() const noexcept { return where.size() * sizeof(std::uint64_t); }
};

Status DeviceExecutor::send_digests(Part& part, DigestBatch& batch) {
  const SlotGuard& slot = batch.slot;
  batch.is_sent = true;
  const std::uint64_t list_bytes = batch.list_bytes();
  const gpu::DigestTiles kernel{part.table, reinterpret_cast<const gpu::StagedTile*>(slot->device.data()),
                                reinterpret_cast<std::uint64_t*>(slot->device.data() + list_bytes),
                                static_cast<std::uint32_t>(batch.where.size()),
                                gpu::blocks_for(batch.largest, gpu::kDigestBlockBytes)};
  return use(part, slot, [&]() -> Status {
    DS_TRY(part.stream->copy_in(slot->device.data(), slot->pinned.data(), list_bytes));
    DS_TRY(part.stream->zero(slot->device.data() + list_bytes, batch.sum_bytes()));
    DS_TRY(part.stream->launch(kernel));
    return part.stream->copy_out(slot->pinned.data() + list_bytes, slot->device.data() + list_bytes, batch.sum_bytes());
  });
}

Status DeviceExecutor::take_digests(const Part& part, const DigestBatch& batch, std::span<std::uint64_t> out,
                                    const CallContext& until) const {
  DS_TRY(gpu::wait(*batch.slot->event, patient(until), "digests of " + part.device->name()));
  const std::byte* const sums = batch.slot->pinned.data() + batch.list_bytes();
  for (std::size_t i = 0; i < batch.where.size(); ++i) {
    std::memcpy(&out[batch.where[i]], sums + i * sizeof(std::uint64_t), sizeof(std::uint64_t));
  }
  return {};
}

/// Of those that are read on one device. While it takes some, the next ones are listed.
Status DeviceExecutor::digests_on(std::uint32_t index, std::span<const std::uint64_t> ranks,
                                  std::span<std::uint64_t> out, const CallContext& until) {
  // Who takes slots while he has some leaves others one at least, who wait for none then.
  constexpr std::size_t kBatches = 3;
  static_assert(kBatches < kWideSlots);
  // What a launch costs beside its kernel is little of so many tiles, and the first does not wait for long to be
  // listed.
  constexpr std::size_t kPortionMax = 16384;
  const std::size_t room = static_cast<std::size_t>(wide_bytes_) / (sizeof(gpu::StagedTile) + sizeof(std::uint64_t));
  const std::size_t portion = std::min(room, kPortionMax);
  Part& part = *parts_[index];
  std::deque<DigestBatch> batches;  // all but the last one are sent
  for (std::size_t k = 0; k < ranks.size(); ++k) {
    const std::uint64_t rank = ranks[k];
    if (source_part_[rank] != index) continue;
    if (batches.empty() || batches.back().is_sent) {
      if (batches.size() == kBatches) {
        DS_TRY(take_digests(part, batches.front(), out, until));
        batches.pop_front();
      }
      DS_ASSIGN(SlotGuard slot, take_slot(part, part.wide, patient(until)));
      batches.push_back({std::move(slot), {}});
      batches.back().where.reserve(std::min(portion, ranks.size() - k));
    }
    DigestBatch& batch = batches.back();
    const gpu::StagedTile tile{rank, 0, rows_[rank], 0};
    std::memcpy(batch.slot->pinned.data() + batch.list_bytes(), &tile, sizeof tile);
    batch.where.push_back(k);
    batch.largest = std::max(batch.largest, tile_bytes(rank));
    if (batch.where.size() == portion) DS_TRY(send_digests(part, batch));
  }
  if (!batches.empty() && !batches.back().is_sent) DS_TRY(send_digests(part, batches.back()));
  for (const DigestBatch& batch : batches) DS_TRY(take_digests(part, batch, out, until));
  return {};
}

Status DeviceExecutor::digests(std::span<const std::uint64_t> ranks, std::span<std::uint64_t> out,
                               const CallContext& until) {
  for (std::uint32_t i = 0; i < parts_.size(); ++i) DS_TRY(digests_on(i, ranks, out, until));
  std::vector<std::byte> tile;
  for (std::size_t k = 0; k < ranks.size(); ++k) {
    if (source_part_[ranks[k]] != kMixed) continue;
    tile.resize(static_cast<std::size_t>(tile_bytes(ranks[k])));
    DS_TRY(gather_tile(ranks[k], tile.data(), until));
    const std::uint64_t row_bytes = tile.size() / rows_[ranks[k]];
    out[k] = delta::tile_digest(tile.data(), static_cast<std::size_t>(row_bytes), rows_[ranks[k]], row_bytes);
  }
  return {};
}

}  // namespace deltasync
