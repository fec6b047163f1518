#include "receiver/targets/device/device_executor.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.hpp"
#include "base/memory_room.hpp"
#include "delta/delta.hpp"
#include "format/tiling.hpp"
#include "gpu/host_device.hpp"
#include "placement/regions.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kAlignment = 256;  ///< of slots, and of what is in them
constexpr std::uint64_t kWideBytesMax = std::uint64_t{16} << 20;
constexpr std::uint64_t kSlotsMax = 64;
constexpr std::uint32_t kPartsMax = 32;  ///< bits of places_
/// Of what is placed on a device: so much is kept for changes at most, if nothing else is said. 6% of bf16 change by
/// it.
constexpr std::uint64_t kChangesPart = 8;
constexpr std::uint64_t kChangesMin = std::uint64_t{1} << 20;

Error with_tile(Error error, const Placement& placement, std::uint64_t rank) {
  const std::uint64_t tile = parts_of(placement).tiles.nth(rank);
  const Layout& layout = *placement.layout();
  return std::move(error).with_context("tile " + std::to_string(tile) + " (" +
                                       layout.tensors()[layout.tensor_of_tile(tile)].spec.name + ")");
}

}  // namespace

DeviceExecutor::DeviceExecutor(std::shared_ptr<const Placement> placement, const Limits& limits)
    : placement_(std::move(placement)), limits_(limits) {}

Result<std::unique_ptr<DeviceExecutor>> DeviceExecutor::make(std::shared_ptr<const Placement> placement,
                                                             std::vector<PlacedDevice> sources, const Limits& limits,
                                                             const std::optional<CallContext>& until) {
  std::unique_ptr<DeviceExecutor> made(new DeviceExecutor(std::move(placement), limits));
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
    sources.push_back({Device::kHost, std::make_unique<gpu::HostDevice>(), nullptr, {}});
    sources.back().device = sources.back().own.get();
  }
  if (sources.size() > kPartsMax) return Error(Errc::unsupported, "more than 32 devices");
  for (const LiveMemory& memory : placed.memories()) {
    const auto found = std::find_if(sources.begin(), sources.end(), [&](const PlacedDevice& source) {
      return source.ordinal == memory.device.ordinal;
    });
    if (found == sources.end()) {
      return Error(Errc::unsupported, "live memory '" + memory.name + "' is on " + to_string(memory.device));
    }
    made->part_of_memory_.push_back(static_cast<std::uint32_t>(found - sources.begin()));
  }
  made->shape_ = placement::make_word_tables(placed, [](std::uint32_t) { return nullptr; });
  std::uint64_t largest = 0;
  for (std::uint64_t rank = 0; rank < parts_of(placed).tiles.tiles(); ++rank) {
    const Tile tile = tile_of(*placed.layout(), parts_of(placed).tiles.nth(rank));
    made->rows_.push_back(static_cast<std::uint32_t>(tile.rect.rows));
    largest = std::max(largest, made->tile_bytes(rank));
  }
  largest = (largest + kAlignment - 1) / kAlignment * kAlignment;
  made->slot_bytes_ = kTileAt + largest;
  const std::uint64_t wide_bytes = limits.staging_bytes / 2 / kWideSlots / kAlignment * kAlignment;
  made->wide_bytes_ = std::clamp(wide_bytes, kTilesAt + largest, kWideBytesMax);
  made->find_source_parts();
  made->find_groups();
  for (PlacedDevice& source : sources) DS_TRY(made->add_part(std::move(source), until));
  return made;
}

DeviceExecutor::~DeviceExecutor() {
  for (const auto& part : parts_) {
    if (part->stream == nullptr || part->event == nullptr) continue;
    const Status ended = idle(*part, patient());
    if (ended.ok()) continue;
    log::warn("device_target abandons_memory device=\"{}\" why=\"{}\"", part->device->name(), ended.error().message());
    part->tiles.abandon();
    part->regions.abandon();
    if (part->changes != nullptr) part->changes->abandon();
    for (Slots* const slots : {&part->small, &part->wide}) {
      for (Slot& slot : slots->all) {
        slot.pinned.abandon();
        slot.device.abandon();
      }
    }
  }
}

std::uint64_t DeviceExecutor::tile_bytes(std::uint64_t rank) const noexcept {
  return gpu::tile_bytes(shape_.tiles[rank], rows_[rank]);
}

std::uint64_t DeviceExecutor::staging_bytes() const noexcept {
  std::uint64_t bytes = 0;
  for (const auto& part : parts_) bytes += part->small.all.size() * slot_bytes_ + part->wide.all.size() * wide_bytes_;
  return bytes;
}

std::uint32_t DeviceExecutor::part_of(std::uint32_t memory) const noexcept {
  return memory == kRestMemory ? host_part_ : part_of_memory_[memory];
}

void DeviceExecutor::find_source_parts() {
  const PlacementParts& parts = parts_of(*placement_);
  for (const TileRegions& of : parts.of_tile) {
    std::uint32_t source = kMixed;
    std::uint32_t places = 0;
    bool first = true;
    for (const Region& region : parts.primaries(of)) {
      const std::uint32_t part = part_of(region.memory);
      source = first || source == part ? part : kMixed;
      first = false;
      places |= 1u << part;
    }
    for (const Region& region : parts.copies(of)) places |= 1u << part_of(region.memory);
    source_part_.push_back(source);
    places_.push_back(places);
  }
}

Status DeviceExecutor::add_part(PlacedDevice source, const std::optional<CallContext>& until) {
  if (until) DS_TRY(until->check("taking staging of " + source.device->name()));
  const auto index = static_cast<std::uint32_t>(parts_.size());
  parts_.push_back(std::make_unique<Part>());
  Part& part = *parts_.back();
  part.own = std::move(source.own);
  part.device = source.device;
  part.engine = std::move(source.engine);
  DS_ASSIGN(part.stream, part.device->make_stream());
  DS_ASSIGN(part.in, part.device->make_stream());
  DS_ASSIGN(part.out, part.device->make_stream());
  DS_ASSIGN(part.event, part.device->make_event());
  const std::uint64_t small = std::clamp(limits_.staging_bytes / 2 / slot_bytes_, kSlotsMin, kSlotsMax);
  DS_TRY(make_slots(*part.device, part.small, small, slot_bytes_));
  DS_TRY(make_slots(*part.device, part.wide, kWideSlots, wide_bytes_));
  std::uint64_t placed_bytes = 0;
  for (std::uint64_t rank = 0; rank < source_part_.size(); ++rank) {
    if (source_part_[rank] == index) placed_bytes += tile_bytes(rank);
  }
  const std::uint64_t changes_max =
      limits_.changes_bytes != 0 ? limits_.changes_bytes : std::max(kChangesMin, placed_bytes / kChangesPart);
  part.changes = std::make_unique<ChangeArena>(*part.device, changes_max);
  changes_bytes_max_ += changes_max;
  return make_table(part, index, until);
}

Status DeviceExecutor::make_slots(gpu::Device& device, Slots& slots, std::uint64_t count, std::uint64_t bytes) {
  for (std::uint64_t i = 0; i < count; ++i) {
    Slot slot;
    DS_ASSIGN(slot.pinned, device.pin(bytes));
    DS_ASSIGN(slot.device, device.allocate(bytes));
    DS_ASSIGN(slot.event, device.make_event());
    DS_ASSIGN(slot.copied, device.make_event());
    DS_ASSIGN(slot.ran, device.make_event());
    slots.all.push_back(std::move(slot));
  }
  for (Slot& slot : slots.all) slots.idle.push_back(&slot);
  return {};
}

/// One stream after the other: what is in one may wait for another.
Status DeviceExecutor::idle(Part& part, const CallContext& until) {
  const std::lock_guard lock(part.mutex);
  for (gpu::Stream* const stream : {part.in.get(), part.stream.get(), part.out.get()}) {
    if (stream == nullptr) continue;
    DS_TRY(stream->record(*part.event));
    DS_TRY(gpu::wait(*part.event, until, "waiting for " + part.device->name()));
  }
  return {};
}

void DeviceExecutor::trim_changes(const CallContext& until) {
  for (const auto& part : parts_) {
    if (!part->changes->is_too_large()) continue;
    // What was given up may still be in use.
    if (idle(*part, patient(until)).ok()) part->changes->give_up();
  }
}

Status DeviceExecutor::make_table(Part& part, std::uint32_t index, const std::optional<CallContext>& until) {
  const auto end = [&] { return until ? patient(*until) : patient(); };
  const placement::WordTables tables =
      placement::make_word_tables(*placement_, [&](std::uint32_t memory) -> std::byte* {
        if (part_of(memory) != index) return nullptr;
        return memory == kRestMemory ? rest_.data() : placement_->memories()[memory].base;
      });
  const auto tiles = std::as_bytes(std::span(tables.tiles));
  const auto regions = std::as_bytes(std::span(tables.regions));
  DS_ASSIGN(part.tiles, part.device->allocate(tiles.size()));
  DS_ASSIGN(part.regions, part.device->allocate(regions.size()));
  DS_TRY(upload(part, part.tiles.data(), tiles, end()));
  DS_TRY(upload(part, part.regions.data(), regions, end()));
  part.table = {reinterpret_cast<const placement::WordTile*>(part.tiles.data()),
                reinterpret_cast<const placement::WordRegion*>(part.regions.data())};
  return {};
}

DeviceExecutor::SlotGuard::~SlotGuard() {
  if (slot_ == nullptr || slot_->lost) return;
  {
    const std::lock_guard lock(slots_->mutex);
    slots_->idle.push_back(slot_);
  }
  slots_->freed.notify_one();
}

/// Slots go round, so that the one that was used longest ago, and is likeliest to be done with, comes next.
Result<DeviceExecutor::SlotGuard> DeviceExecutor::take_slot(Part& part, Slots& slots, const CallContext& until) {
  const std::string what = "waiting for staging of " + part.device->name();
  Slot* slot = nullptr;
  {
    std::unique_lock lock(slots.mutex);
    const auto there = [&] { return !slots.idle.empty(); };
    if (!slots.freed.wait_until(lock, until.stop(), until.deadline().at(), there)) {
      DS_TRY(until.check(what));
      return Error(Errc::timed_out, "deadline passed while " + what);
    }
    slot = slots.idle.front();
    slots.idle.erase(slots.idle.begin());
  }
  SlotGuard guard(slots, *slot);
  DS_TRY(gpu::wait(*slot->event, until, what));
  return guard;
}

gpu::MoveTiles DeviceExecutor::describe(const Part& part, const SlotGuard& slot, std::uint64_t rank,
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

Status DeviceExecutor::gather_from(Part& part, const SlotGuard& slot, std::uint64_t rank) {
  const gpu::MoveTiles kernel = describe(part, slot, rank, gpu::MoveTiles::Way::gather);
  const std::uint64_t bytes = tile_bytes(rank);
  return use(part, slot, [&]() -> Status {
    DS_TRY(part.stream->copy_in(slot->device.data(), slot->pinned.data(), sizeof(gpu::StagedTile)));
    DS_TRY(part.stream->launch(kernel));
    return part.stream->copy_out(slot->pinned.data() + kTileAt, slot->device.data() + kTileAt, bytes);
  });
}

Status DeviceExecutor::scatter_to(Part& part, const SlotGuard& slot, std::uint64_t rank) {
  const gpu::MoveTiles kernel = describe(part, slot, rank, gpu::MoveTiles::Way::scatter);
  return use(part, slot, [&]() -> Status {
    DS_TRY(part.stream->copy_in(slot->device.data(), slot->pinned.data(), kTileAt + tile_bytes(rank)));
    return part.stream->launch(kernel);
  });
}

/// Takes from a part's copy of a tile what is read there.
void DeviceExecutor::merge(std::uint64_t rank, std::uint32_t part, const std::byte* from, std::byte* to) const {
  if (source_part_[rank] == part) {
    std::memcpy(to, from, static_cast<std::size_t>(tile_bytes(rank)));
    return;
  }
  const PlacementParts& parts = parts_of(*placement_);
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

Status DeviceExecutor::gather_tile(std::uint64_t rank, std::byte* to, const CallContext& until) {
  const CallContext end = patient(until);
  for (std::uint32_t i = 0; i < parts_.size(); ++i) {
    Part& part = *parts_[i];
    if (source_part_[rank] == kMixed ? (places_[rank] >> i & 1) == 0 : source_part_[rank] != i) continue;
    DS_TRY(send_before_reading(part, rank, end));
    auto slot = take_slot(part, part.small, end);
    if (!slot.ok()) return with_tile(std::move(slot).error(), *placement_, rank);
    Status done = gather_from(part, *slot, rank);
    if (done.ok()) done = gpu::wait(*(*slot)->event, end, "reading from " + part.device->name());
    if (!done.ok()) return with_tile(std::move(done).error(), *placement_, rank);
    merge(rank, i, (*slot)->pinned.data() + kTileAt, to);
  }
  return {};
}

Status DeviceExecutor::scatter_tile(std::uint64_t rank, const std::byte* from, std::uint64_t row_stride,
                                    const CallContext& until) {
  const CallContext end = patient(until);
  const std::uint64_t row_bytes = std::uint64_t{shape_.tiles[rank].cols} * shape_.tiles[rank].element_bytes;
  for (std::uint32_t i = 0; i < parts_.size(); ++i) {
    if ((places_[rank] >> i & 1) == 0) continue;
    auto slot = take_slot(*parts_[i], parts_[i]->small, end);
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

Status DeviceExecutor::finish(const CallContext& until) {
  const CallContext end = patient(until);
  for (const auto& part : parts_) {
    const std::lock_guard lock(part->mutex);
    DS_TRY(part->stream->record(*part->event));
    DS_TRY(gpu::wait(*part->event, end, "waiting for " + part->device->name()));
  }
  return {};
}

Status DeviceExecutor::finish_all(const CallContext& until) {
  const CallContext end = patient(until);
  for (const auto& part : parts_) DS_TRY(idle(*part, end));
  return {};
}

Status DeviceExecutor::enter_engine(const CallContext& until) {
  for (const auto& part : parts_) {
    const std::lock_guard lock(part->mutex);
    const CallContext end = patient(until);
    for (const auto& engine : part->engine) {
      DS_TRY(gpu::wait_for_capture(*engine, end, "the engine's stream on " + part->device->name()));
      DS_TRY(engine->record(*part->event));
      DS_TRY(gpu::wait(*part->event, end, "waiting for the engine on " + part->device->name()));
    }
  }
  return {};
}

Status DeviceExecutor::leave_engine() {
  for (const auto& part : parts_) {
    if (part->engine.empty()) continue;
    const std::lock_guard lock(part->mutex);
    DS_TRY(part->stream->record(*part->event));
    for (const auto& engine : part->engine) {
      DS_TRY(gpu::wait_for_capture(*engine, patient(), "the engine's stream on " + part->device->name()));
      DS_TRY(engine->wait_for(*part->event));
    }
  }
  return {};
}

/// Through staging, piece by piece.
Status DeviceExecutor::upload(Part& part, std::byte* to, std::span<const std::byte> bytes, const CallContext& until) {
  for (std::size_t at = 0; at < bytes.size(); at += slot_bytes_) {
    const std::span<const std::byte> piece =
        bytes.subspan(at, std::min<std::size_t>(static_cast<std::size_t>(slot_bytes_), bytes.size() - at));
    DS_ASSIGN(const SlotGuard slot, take_slot(part, part.small, until));
    std::memcpy(slot->pinned.data(), piece.data(), piece.size());
    const auto copy = [&] { return part.stream->copy_in(to + at, slot->pinned.data(), piece.size()); };
    DS_TRY(use(part, slot, copy));
  }
  return {};
}

}  // namespace deltasync
