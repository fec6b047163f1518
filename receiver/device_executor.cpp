#include "receiver/device_executor.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.hpp"
#include "base/memory_room.hpp"
#include "delta/delta.hpp"
#include "gpu/host_lane.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kSlotsMin = 4;
constexpr std::uint64_t kSlotsMax = 64;
constexpr std::uint32_t kPartsMax = 32;  ///< bits of places_

Error with_tile(Error error, const Placement& placement, std::uint64_t rank) {
  const std::uint64_t tile = placement.parts().tiles.nth(rank);
  const Layout& layout = *placement.layout();
  return std::move(error).with_context("tile " + std::to_string(tile) + " (" +
                                       layout.tensors()[layout.tensor_of_tile(tile)].spec.name + ")");
}

}  // namespace

DeviceExecutor::DeviceExecutor(PlacementPtr placement, std::chrono::nanoseconds patience)
    : placement_(std::move(placement)), patience_(patience) {}

Result<std::unique_ptr<DeviceExecutor>> DeviceExecutor::make(PlacementPtr placement, std::vector<Source> sources,
                                                             std::uint64_t staging_bytes,
                                                             std::chrono::nanoseconds patience) {
  std::unique_ptr<DeviceExecutor> made(new DeviceExecutor(std::move(placement), patience));
  const Placement& placed = *made->placement_;
  const bool on_host = std::any_of(placed.memories().begin(), placed.memories().end(),
                                   [](const LiveMemory& memory) { return memory.device.is_host(); });
  const auto rest_bytes = static_cast<std::size_t>(placed.rest_bytes());
  if (rest_bytes != 0) {
    DS_TRY(check_memory_room(rest_bytes).with_context("memory for the rest of tiles that slices cut through"));
    made->rest_.resize(rest_bytes);
  }
  if (on_host || rest_bytes != 0) {
    made->host_part_ = static_cast<std::uint32_t>(sources.size());
    sources.push_back({Device::kHost, std::make_unique<gpu::HostLane>(), nullptr, nullptr});
    sources.back().device = sources.back().own.get();
  }
  if (sources.size() > kPartsMax) return Error(Errc::unsupported, "more than 32 devices");
  for (const LiveMemory& memory : placed.memories()) {
    const auto found = std::find_if(sources.begin(), sources.end(),
                                    [&](const Source& source) { return source.ordinal == memory.device.ordinal; });
    if (found == sources.end()) {
      return Error(Errc::unsupported, "live memory '" + memory.name + "' is on " + to_string(memory.device));
    }
    made->part_of_memory_.push_back(static_cast<std::uint32_t>(found - sources.begin()));
  }
  made->shape_ = placement::make_word_tables(placed, [](std::uint32_t) { return nullptr; });
  std::uint64_t largest = 0;
  for (std::uint64_t rank = 0; rank < placed.parts().tiles.tiles(); ++rank) {
    const Tile tile = placed.layout()->tile(placed.parts().tiles.nth(rank));
    made->rows_.push_back(static_cast<std::uint32_t>(tile.rect.rows));
    largest = std::max(largest, made->tile_bytes(rank));
  }
  made->slot_bytes_ = kTileAt + (largest + 255) / 256 * 256;
  made->find_homes();
  for (Source& source : sources) DS_TRY(made->add_part(std::move(source), staging_bytes));
  return made;
}

DeviceExecutor::~DeviceExecutor() {
  for (const auto& part : parts_) {
    if (part->stream == nullptr || part->event == nullptr) continue;
    Status idle = part->stream->record(*part->event);
    if (idle.ok()) idle = gpu::wait(*part->event, patient(), "ending a target");
    if (idle.ok()) continue;
    spdlog::warn("device_target abandons_memory device=\"{}\" why=\"{}\"", part->device->name(),
                 idle.error().message());
    part->tiles.abandon();
    part->regions.abandon();
    for (Slot& slot : part->slots) {
      slot.pinned.abandon();
      slot.device.abandon();
    }
  }
}

std::uint64_t DeviceExecutor::tile_bytes(std::uint64_t rank) const noexcept {
  return gpu::tile_bytes(shape_.tiles[rank], rows_[rank]);
}

std::uint64_t DeviceExecutor::staging_bytes() const noexcept {
  std::uint64_t bytes = 0;
  for (const auto& part : parts_) bytes += part->slots.size() * slot_bytes_;
  return bytes;
}

std::uint32_t DeviceExecutor::part_of(std::uint32_t memory) const noexcept {
  return memory == kRestMemory ? host_part_ : part_of_memory_[memory];
}

void DeviceExecutor::find_homes() {
  const Placement::Parts& parts = placement_->parts();
  for (const TileRegions& of : parts.of_tile) {
    std::uint32_t home = kMixed;
    std::uint32_t places = 0;
    bool first = true;
    for (const Region& region : parts.primaries(of)) {
      const std::uint32_t part = part_of(region.memory);
      home = first || home == part ? part : kMixed;
      first = false;
      places |= 1u << part;
    }
    for (const Region& region : parts.copies(of)) places |= 1u << part_of(region.memory);
    home_.push_back(home);
    places_.push_back(places);
  }
}

Status DeviceExecutor::add_part(Source source, std::uint64_t staging_bytes) {
  const auto index = static_cast<std::uint32_t>(parts_.size());
  parts_.push_back(std::make_unique<Part>());
  Part& part = *parts_.back();
  part.own = std::move(source.own);
  part.device = source.device;
  part.engine = std::move(source.engine);
  DS_ASSIGN(part.stream, part.device->make_stream());
  DS_ASSIGN(part.event, part.device->make_event());
  const std::uint64_t slots = std::clamp(staging_bytes / slot_bytes_, kSlotsMin, kSlotsMax);
  for (std::uint64_t i = 0; i < slots; ++i) {
    Slot slot;
    DS_ASSIGN(slot.pinned, part.device->pin(slot_bytes_));
    DS_ASSIGN(slot.device, part.device->allocate(slot_bytes_));
    DS_ASSIGN(slot.event, part.device->make_event());
    part.slots.push_back(std::move(slot));
  }
  for (Slot& slot : part.slots) part.idle.push_back(&slot);
  return make_table(part, index);
}

Status DeviceExecutor::make_table(Part& part, std::uint32_t index) {
  const placement::WordTables tables =
      placement::make_word_tables(*placement_, [&](std::uint32_t memory) -> std::byte* {
        if (part_of(memory) != index) return nullptr;
        return memory == kRestMemory ? rest_.data() : placement_->memories()[memory].base;
      });
  const auto tiles = std::as_bytes(std::span(tables.tiles));
  const auto regions = std::as_bytes(std::span(tables.regions));
  DS_ASSIGN(part.tiles, part.device->allocate(tiles.size()));
  DS_ASSIGN(part.regions, part.device->allocate(regions.size()));
  DS_TRY(upload(part, part.tiles.data(), tiles, patient()));
  DS_TRY(upload(part, part.regions.data(), regions, patient()));
  part.table = {reinterpret_cast<const placement::WordTile*>(part.tiles.data()),
                reinterpret_cast<const placement::WordRegion*>(part.regions.data())};
  return {};
}

DeviceExecutor::Lease::~Lease() {
  if (slot_ == nullptr || slot_->lost) return;
  {
    const std::lock_guard lock(part_->slots_mutex);
    part_->idle.push_back(slot_);
  }
  part_->freed.notify_one();
}

/// Slots go round, so that the one that was used longest ago, and is likeliest to be done with, comes next.
Result<DeviceExecutor::Lease> DeviceExecutor::take_slot(Part& part, const Until& until) const {
  Slot* slot = nullptr;
  {
    std::unique_lock lock(part.slots_mutex);
    const bool there = part.freed.wait_until(lock, until.deadline().at(), [&] { return !part.idle.empty(); });
    if (!there) return Error(Errc::timed_out, part.device->name() + ": deadline passed while waiting for staging");
    slot = part.idle.front();
    part.idle.erase(part.idle.begin());
  }
  Lease lease(part, *slot);
  DS_TRY(gpu::wait(*slot->event, until, "waiting for staging of " + part.device->name()));
  return lease;
}

gpu::MoveTiles DeviceExecutor::describe(const Part& part, const Lease& slot, std::uint64_t rank,
                                        gpu::MoveTiles::Way way) const {
  const gpu::StagedTile tile{rank, 0, rows_[rank], 0};
  std::memcpy(slot->pinned.data(), &tile, sizeof tile);
  return {part.table,
          reinterpret_cast<const gpu::StagedTile*>(slot->device.data()),
          slot->device.data() + kTileAt,
          1,
          gpu::blocks_for(tile_bytes(rank)),
          way};
}

Status DeviceExecutor::gather_from(Part& part, const Lease& slot, std::uint64_t rank) {
  const gpu::MoveTiles kernel = describe(part, slot, rank, gpu::MoveTiles::Way::gather);
  const std::uint64_t bytes = tile_bytes(rank);
  return use(part, slot, [&]() -> Status {
    DS_TRY(part.stream->copy_in(slot->device.data(), slot->pinned.data(), sizeof(gpu::StagedTile)));
    DS_TRY(part.stream->launch(kernel));
    return part.stream->copy_out(slot->pinned.data() + kTileAt, slot->device.data() + kTileAt, bytes);
  });
}

Status DeviceExecutor::scatter_to(Part& part, const Lease& slot, std::uint64_t rank) {
  const gpu::MoveTiles kernel = describe(part, slot, rank, gpu::MoveTiles::Way::scatter);
  return use(part, slot, [&]() -> Status {
    DS_TRY(part.stream->copy_in(slot->device.data(), slot->pinned.data(), kTileAt + tile_bytes(rank)));
    return part.stream->launch(kernel);
  });
}

/// Takes from a part's copy of a tile what is read there.
void DeviceExecutor::merge(std::uint64_t rank, std::uint32_t part, const std::byte* from, std::byte* to) const {
  if (home_[rank] == part) {
    std::memcpy(to, from, static_cast<std::size_t>(tile_bytes(rank)));
    return;
  }
  const Placement::Parts& parts = placement_->parts();
  const placement::WordTile& tile = shape_.tiles[rank];
  const Rect rect{tile.row, tile.col, rows_[rank], tile.cols};
  const std::uint64_t width = tile.element_bytes;
  for (const Region& region : parts.primaries(parts.of_tile[rank])) {
    if (part_of(region.memory) != part) continue;
    const Rect both = intersection(region.rect, rect);
    for (std::uint64_t row = both.row; row < both.row + both.rows; ++row) {
      const std::uint64_t at = ((row - rect.row) * rect.cols + both.col - rect.col) * width;
      std::memcpy(to + at, from + at, static_cast<std::size_t>(both.cols * width));
    }
  }
}

Status DeviceExecutor::gather_tile(std::uint64_t rank, std::byte* to, const Until& until) {
  const Until end = patient(until);
  for (std::uint32_t i = 0; i < parts_.size(); ++i) {
    Part& part = *parts_[i];
    if (home_[rank] == kMixed ? (places_[rank] >> i & 1) == 0 : home_[rank] != i) continue;
    auto slot = take_slot(part, end);
    if (!slot.ok()) return with_tile(std::move(slot).error(), *placement_, rank);
    Status done = gather_from(part, *slot, rank);
    if (done.ok()) done = gpu::wait(*(*slot)->event, end, "reading from " + part.device->name());
    if (!done.ok()) return with_tile(std::move(done).error(), *placement_, rank);
    merge(rank, i, (*slot)->pinned.data() + kTileAt, to);
  }
  return {};
}

Status DeviceExecutor::scatter_tile(std::uint64_t rank, const std::byte* from, std::uint64_t row_stride,
                                    const Until& until) {
  const Until end = patient(until);
  const std::uint64_t row_bytes = std::uint64_t{shape_.tiles[rank].cols} * shape_.tiles[rank].element_bytes;
  for (std::uint32_t i = 0; i < parts_.size(); ++i) {
    if ((places_[rank] >> i & 1) == 0) continue;
    auto slot = take_slot(*parts_[i], end);
    if (!slot.ok()) return with_tile(std::move(slot).error(), *placement_, rank);
    std::byte* const rows = (*slot)->pinned.data() + kTileAt;
    for (std::uint64_t r = 0; r < rows_[rank]; ++r) {
      std::memcpy(rows + r * row_bytes, from + r * row_stride, static_cast<std::size_t>(row_bytes));
    }
    Status sent = scatter_to(*parts_[i], *slot, rank);
    if (!sent.ok()) return with_tile(std::move(sent).error(), *placement_, rank);
  }
  return {};
}

Status DeviceExecutor::finish(const Until& until) {
  const Until end = patient(until);
  for (const auto& part : parts_) {
    const std::lock_guard lock(part->mutex);
    DS_TRY(part->stream->record(*part->event));
    DS_TRY(gpu::wait(*part->event, end, "waiting for " + part->device->name()));
  }
  return {};
}

Status DeviceExecutor::enter_engine() {
  for (const auto& part : parts_) {
    if (part->engine == nullptr) continue;
    const std::lock_guard lock(part->mutex);
    DS_TRY(part->engine->record(*part->event));
    DS_TRY(part->stream->wait_for(*part->event));
  }
  return {};
}

Status DeviceExecutor::leave_engine() {
  for (const auto& part : parts_) {
    if (part->engine == nullptr) continue;
    const std::lock_guard lock(part->mutex);
    DS_TRY(part->stream->record(*part->event));
    DS_TRY(part->engine->wait_for(*part->event));
  }
  return {};
}

/// Through staging, piece by piece.
Status DeviceExecutor::upload(Part& part, std::byte* to, std::span<const std::byte> bytes, const Until& until) {
  for (std::size_t at = 0; at < bytes.size(); at += slot_bytes_) {
    const std::span<const std::byte> piece =
        bytes.subspan(at, std::min<std::size_t>(static_cast<std::size_t>(slot_bytes_), bytes.size() - at));
    DS_ASSIGN(const Lease slot, take_slot(part, until));
    std::memcpy(slot->pinned.data(), piece.data(), piece.size());
    const auto copy = [&] { return part.stream->copy_in(to + at, slot->pinned.data(), piece.size()); };
    DS_TRY(use(part, slot, copy));
  }
  return {};
}

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
  DS_ASSIGN(const Lease slot, take_slot(part, until));
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
