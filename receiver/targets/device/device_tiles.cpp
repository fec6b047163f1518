// Many tiles at a time: those of full updates on their way to the devices, those that devices read in host memory where
// they are, and those that change places with a second version in host memory. A wide slot has their descriptions, then
// the tiles; it is copied as one (but from lent memory), in a stream of its own, while kernels work on another slot.
#include <algorithm>
#include <cstring>

#include "base/log.hpp"
#include "placement/regions.hpp"
#include "receiver/targets/device/device_executor.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kTileAlignment = RegisteredHostMemory::kTileAlignment;
static_assert(kTileAlignment % gpu::kUnitBytes == 0);

/// What somebody gave up waiting for has a moment to end.
constexpr std::chrono::seconds kLentGrace{1};

std::uint64_t aligned(std::uint64_t bytes) {
  return (bytes + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
}

}  // namespace

// ---- full updates --------------------------------------------------------------------------------------------------

Status DeviceExecutor::put_tile(std::uint64_t rank, const std::byte* from, std::uint64_t row_stride,
                                const CallContext& until) {
  const CallContext end = patient(until);
  for (std::uint32_t i = 0; i < parts_.size(); ++i) {
    if ((places_[rank] >> i & 1) != 0) DS_TRY(put_on(*parts_[i], rank, from, row_stride, end));
  }
  return {};
}

/// Copied while others copy into the same batch, or into the next.
Status DeviceExecutor::put_on(Part& part, std::uint64_t rank, const std::byte* from, std::uint64_t row_stride,
                              const CallContext& until) {
  std::unique_lock lock(part.batch_mutex);
  DS_ASSIGN(Batch* const batch, room_for(part, lock, rank, until));
  std::byte* const to = batch->slot->pinned.data() + kTilesAt + batch->tiles.back().at;
  lock.unlock();
  const std::uint64_t row_bytes = tile_bytes(rank) / rows_[rank];
  for (std::uint64_t r = 0; r < rows_[rank]; ++r) {
    std::memcpy(to + r * row_bytes, from + r * row_stride, static_cast<std::size_t>(row_bytes));
  }
  lock.lock();
  --batch->writers;
  send_closed_locked(part);
  return part.failed ? Status(Error(*part.failed)) : Status();
}

/// The open batch, with the tile as its last and the caller as one of its writers.
Result<DeviceExecutor::Batch*> DeviceExecutor::room_for(Part& part, std::unique_lock<std::mutex>& lock,
                                                        std::uint64_t rank, const CallContext& until) {
  const std::uint64_t bytes = tile_bytes(rank);
  for (;;) {
    if (part.failed) return Error(*part.failed);
    if (part.open != nullptr) {
      Batch& batch = *part.open;
      if (batch.used + bytes <= wide_bytes_ - kTilesAt && batch.tiles.size() < kTilesMax && !batch.has(rank)) {
        batch.tiles.push_back({rank, batch.used, rows_[rank], 0});
        batch.used += aligned(bytes);
        batch.largest = std::max(batch.largest, bytes);
        ++batch.writers;
        return &batch;
      }
      close_batch_locked(part);
      send_closed_locked(part);
    }
    DS_TRY(open_batch(part, lock, until));
  }
}

/// One thread waits for a slot, without the lock, since those who write into other batches need that to end; all others
/// wait for this thread.
Status DeviceExecutor::open_batch(Part& part, std::unique_lock<std::mutex>& lock, const CallContext& until) {
  if (part.opening) {
    const auto opened = [&] { return !part.opening; };
    if (part.batch_changed.wait_until(lock, until.stop(), until.deadline().at(), opened)) return {};
    const std::string what = "waiting for staging of " + part.device->name();
    DS_TRY(until.check(what));
    return Error(Errc::timed_out, "deadline passed while " + what);
  }
  part.opening = true;
  lock.unlock();
  auto slot = take_slot(part, part.wide, until);
  lock.lock();
  part.opening = false;
  part.batch_changed.notify_all();
  if (!slot.ok()) return std::move(slot).error();
  part.open.reset(new Batch{*std::move(slot), {}});
  return {};
}

/// One that nobody came to use (another had failed meanwhile) has nothing to send.
void DeviceExecutor::close_batch_locked(Part& part) {
  if (part.open != nullptr && !part.open->tiles.empty()) part.closed.push_back(std::move(part.open));
  part.open.reset();
}

/// In their order, as far as nobody writes into them any more.
void DeviceExecutor::send_closed_locked(Part& part) {
  while (!part.closed.empty() && part.closed.front()->writers == 0) {
    Batch& batch = *part.closed.front();
    Status sent = send(part, batch);
    if (!sent.ok() && !part.failed) part.failed = with_tiles(std::move(sent).error(), batch.tiles);
    part.closed.pop_front();
    part.batch_changed.notify_all();
  }
}

Error DeviceExecutor::with_tiles(Error error, std::span<const gpu::StagedTile> tiles) const {
  const Layout& layout = *placement_->layout();
  const std::uint64_t first = parts_of(*placement_).tiles.nth(tiles.front().rank);
  return std::move(error).with_context(std::to_string(tiles.size()) + " tiles from tile " + std::to_string(first) +
                                       " (" + layout.tensors()[layout.tensor_of_tile(first)].spec.name + ") on");
}

gpu::MoveTiles DeviceExecutor::move_of(const Part& part, const Slot& slot, std::span<const gpu::StagedTile> tiles,
                                       std::uint64_t largest, gpu::MoveTiles::Way way) const {
  std::memcpy(slot.pinned.data(), tiles.data(), tiles.size_bytes());
  return {part.table,
          reinterpret_cast<const gpu::StagedTile*>(slot.device.data()),
          slot.device.data() + kTilesAt,
          static_cast<std::uint32_t>(tiles.size()),
          gpu::blocks_for(largest),
          way};
}

/// Copies that `copy` puts into a stream of their own, and then the kernel. What was copied before something failed may
/// still be under way: the slot waits for that stream.
template <class Copy>
Status DeviceExecutor::copy_and_run(Part& part, Slot& slot, const Copy& copy, const gpu::MoveTiles& kernel) {
  const std::lock_guard lock(part.mutex);
  gpu::Stream* last = part.in.get();
  const auto put = [&]() -> Status {
    DS_TRY(copy(*part.in));
    DS_TRY(part.in->record(*slot.copied));
    DS_TRY(part.stream->wait_for(*slot.copied));
    last = part.stream.get();
    return part.stream->launch(kernel);
  };
  Status done = put();
  Status recorded = last->record(*slot.event);
  if (!recorded.ok()) slot.lost = true;
  return done.ok() ? std::move(recorded) : std::move(done);
}

Status DeviceExecutor::send(Part& part, Batch& batch) {
  Slot& slot = *batch.slot.operator->();
  const auto kernel = move_of(part, slot, batch.tiles, batch.largest, gpu::MoveTiles::Way::scatter);
  const auto copy = [&](gpu::Stream& in) {
    return in.copy_in(slot.device.data(), slot.pinned.data(), kTilesAt + batch.used);
  };
  return copy_and_run(part, slot, copy, kernel);
}

Status DeviceExecutor::send_before_reading(Part& part, std::uint64_t rank, const CallContext& until) {
  std::unique_lock lock(part.batch_mutex);
  if (part.open == nullptr && part.closed.empty()) return {};
  if (part.open != nullptr && part.open->has(rank)) close_batch_locked(part);
  send_closed_locked(part);
  const auto sent = [&] {
    return std::none_of(part.closed.begin(), part.closed.end(), [&](const auto& batch) { return batch->has(rank); });
  };
  if (part.batch_changed.wait_until(lock, until.stop(), until.deadline().at(), sent)) return {};
  DS_TRY(until.check("waiting for tiles to be put"));
  return Error(Errc::timed_out, "deadline passed while waiting for tiles to be put");
}

Status DeviceExecutor::send_tiles(const CallContext& until) {
  std::optional<Error> failed;
  for (const auto& part : parts_) {
    const std::lock_guard lock(part->batch_mutex);
    close_batch_locked(*part);
    send_closed_locked(*part);
    if (part->failed) failed = std::move(part->failed);
    part->failed.reset();
  }
  Status finished = finish(until);
  if (failed) return *std::move(failed);
  return finished;
}

// ---- lent memory ---------------------------------------------------------------------------------------------------

class DeviceExecutor::Lent final : public RegisteredHostMemory {
 public:
  struct OnPart {
    gpu::RegisteredHost memory;
    std::unique_ptr<gpu::Event> read;  ///< behind the last copies from there
    bool lost = false;                 ///< nobody knows when these end
  };
  explicit Lent(std::uint64_t lot_bytes) : lot_bytes_(lot_bytes) {}
  ~Lent() override { end(); }

  std::uint64_t lot_bytes() const noexcept override { return lot_bytes_; }

  bool end() noexcept override {
    // Who put tiles from there has waited for them as long as he could.
    const Deadline grace = Deadline::after(kLentGrace);
    Status read;
    for (std::size_t i = 0; i < parts.size() && read.ok(); ++i) {
      read = parts[i].lost ? Status(Error(Errc::io, "a copy from it was not recorded"))
                           : gpu::wait(*parts[i].read, grace, "waiting for copies from it");
    }
    if (!read.ok()) {
      log::warn("device_target abandons_lent_memory why=\"{}\"", read.error().to_string());
      // It stays registered for all of them.
      for (OnPart& on : parts) on.memory.abandon();
    }
    parts.clear();
    return read.ok();
  }

  std::vector<OnPart> parts;

 private:
  const std::uint64_t lot_bytes_;
};

Result<std::unique_ptr<RegisteredHostMemory>> DeviceExecutor::lend(std::span<std::byte> memory,
                                                                   const std::shared_ptr<const void>& keeper,
                                                                   const CallContext& until) {
  auto lent = std::make_unique<Lent>(wide_bytes_ - kTilesAt);
  for (const auto& part : parts_) {
    Lent::OnPart on;
    DS_ASSIGN(on.read, part->device->make_event());
    DS_ASSIGN(on.memory, gpu::RegisteredHost::make(*part->device, memory.data(), memory.size(), keeper,
                                                   limits_.register_bytes, until));
    lent->parts.push_back(std::move(on));
  }
  return std::unique_ptr<RegisteredHostMemory>(std::move(lent));
}

/// The end of the tiles from `first` on that a wide slot has room for.
std::uint64_t DeviceExecutor::group_end(std::uint64_t first, std::uint64_t end) const {
  std::uint64_t used = 0;
  std::uint64_t rank = first;
  while (rank < end && rank - first < kTilesMax && used + tile_bytes(rank) <= wide_bytes_ - kTilesAt) {
    used += aligned(tile_bytes(rank));
    ++rank;
  }
  return rank;
}

Status DeviceExecutor::put_lent(RegisteredHostMemory& memory, std::uint64_t first, std::uint64_t end,
                                const std::byte* rows, const CallContext& until) {
  auto& lent = static_cast<Lent&>(memory);
  const CallContext device_timeout = patient(until);
  while (first < end) {
    const std::uint64_t group = group_end(first, end);
    for (std::uint32_t i = 0; i < parts_.size(); ++i) DS_TRY(put_lent_on(i, lent, first, group, rows, device_timeout));
    for (; first < group; ++first) rows += aligned(tile_bytes(first));
  }
  return {};
}

/// Tiles that are contiguous there are so in the slot, too, and are one copy.
Status DeviceExecutor::put_lent_on(std::uint32_t index, Lent& memory, std::uint64_t first, std::uint64_t end,
                                   const std::byte* rows, const CallContext& until) {
  struct Run {
    const std::byte* from;
    std::uint64_t at;
    std::uint64_t bytes;
  };
  std::vector<gpu::StagedTile> tiles;
  std::vector<Run> runs;
  std::uint64_t used = 0;
  std::uint64_t largest = 0;
  for (std::uint64_t rank = first; rank < end; rows += aligned(tile_bytes(rank)), ++rank) {
    if ((places_[rank] >> index & 1) == 0) continue;
    const std::uint64_t bytes = tile_bytes(rank);
    if (runs.empty() || runs.back().from + (used - runs.back().at) != rows) runs.push_back({rows, used, 0});
    runs.back().bytes = used + bytes - runs.back().at;
    tiles.push_back({rank, used, rows_[rank], 0});
    used += aligned(bytes);
    largest = std::max(largest, bytes);
  }
  if (tiles.empty()) return {};
  Part& part = *parts_[index];
  auto guard = take_slot(part, part.wide, until);
  if (!guard.ok()) return with_tiles(std::move(guard).error(), tiles);
  Slot& slot = *guard->operator->();
  const auto kernel = move_of(part, slot, tiles, largest, gpu::MoveTiles::Way::scatter);
  Lent::OnPart& lent = memory.parts[index];
  const auto copy_all = [&](gpu::Stream& in) -> Status {
    DS_TRY(in.copy_in(slot.device.data(), slot.pinned.data(), tiles.size() * sizeof(gpu::StagedTile)));
    for (const Run& run : runs) {
      std::byte* const to = slot.device.data() + kTilesAt + run.at;
      DS_TRY(lent.memory.each_piece(run.from, run.bytes, [&](const std::byte* from, std::uint64_t bytes) {
        return in.copy_in(to + (from - run.from), from, bytes);
      }));
    }
    return {};
  };
  const auto copy = [&](gpu::Stream& in) -> Status {
    Status copied = copy_all(in);
    Status recorded = in.record(*lent.read);
    lent.lost = !recorded.ok();  // what comes later in this stream is behind it
    return copied.ok() ? std::move(recorded) : std::move(copied);
  };
  Status sent = copy_and_run(part, slot, copy, kernel);
  if (!sent.ok()) return with_tiles(std::move(sent).error(), tiles);
  return {};
}

// ---- exchange ------------------------------------------------------------------------------------------------------

void DeviceExecutor::find_groups() {
  groups_ = {0};
  while (groups_.back() != rows_.size()) groups_.push_back(group_end(groups_.back(), rows_.size()));
}

/// What a device does of a group.
struct DeviceExecutor::OnPart {
  std::uint32_t index;
  Part& part;
  SlotGuard slot;
  std::vector<gpu::StagedTile> tiles{};
  std::uint64_t used = 0;
  gpu::MoveTiles kernel{};
  bool launched = false;
};

Status DeviceExecutor::fill(OnPart& on, std::uint64_t first, std::uint64_t end, const AsideOf& aside_of,
                            const CallContext& until) {
  DS_TRY(until.check("exchanging tiles"));
  std::byte* const host = on.slot->pinned.data();
  std::uint64_t largest = 0;
  for (std::uint64_t rank = first; rank < end; ++rank) {
    if ((places_[rank] >> on.index & 1) == 0) continue;
    const std::uint64_t bytes = tile_bytes(rank);
    on.tiles.push_back({rank, on.used, rows_[rank], 0});
    std::memcpy(host + kTilesAt + on.used, aside_of(rank), static_cast<std::size_t>(bytes));
    on.used += aligned(bytes);
    largest = std::max(largest, bytes);
  }
  on.kernel = move_of(on.part, *on.slot.operator->(), on.tiles, largest, gpu::MoveTiles::Way::exchange);
  return {};
}

Status DeviceExecutor::launch_exchange(OnPart& on) {
  Part& part = on.part;
  Slot& slot = *on.slot.operator->();
  const std::lock_guard lock(part.mutex);
  gpu::Stream* last = part.in.get();
  const auto put = [&]() -> Status {
    DS_TRY(part.in->copy_in(slot.device.data(), slot.pinned.data(), kTilesAt + on.used));
    DS_TRY(part.in->record(*slot.copied));
    DS_TRY(part.stream->wait_for(*slot.copied));
    last = part.stream.get();
    DS_TRY(part.stream->launch(on.kernel));
    on.launched = true;
    DS_TRY(part.stream->record(*slot.ran));
    DS_TRY(part.out->wait_for(*slot.ran));
    last = part.out.get();
    return part.out->copy_out(slot.pinned.data() + kTilesAt, slot.device.data() + kTilesAt, on.used);
  };
  Status done = put();
  Status recorded = last->record(*slot.event);
  if (!recorded.ok()) slot.lost = true;
  return done.ok() ? std::move(recorded) : std::move(done);
}

/// What was there is in the slot: the same kernel brings it back.
Status DeviceExecutor::roll_back(OnPart& on) {
  {
    const std::lock_guard lock(on.part.mutex);
    DS_TRY(on.part.stream->launch(on.kernel));
  }
  return idle(on.part, patient());
}

Status DeviceExecutor::exchange_group(std::size_t group, const AsideOf& aside_of, const CallContext& until,
                                      std::atomic<bool>& torn) {
  const std::uint64_t first = groups_[group];
  const std::uint64_t end = groups_[group + 1];
  const CallContext device_timeout = patient(until);
  std::uint32_t places = 0;
  for (std::uint64_t rank = first; rank < end; ++rank) places |= places_[rank];
  // In one order, so that no two threads wait for each other's slots.
  std::vector<OnPart> on;
  for (std::uint32_t i = 0; i < parts_.size(); ++i) {
    if ((places >> i & 1) == 0) continue;
    DS_ASSIGN(SlotGuard slot, take_slot(*parts_[i], parts_[i]->wide, device_timeout));
    on.push_back({i, *parts_[i], std::move(slot)});
    DS_TRY(fill(on.back(), first, end, aside_of, until));
  }
  Status done;
  for (std::size_t i = 0; i < on.size() && done.ok(); ++i) done = launch_exchange(on[i]);
  for (std::size_t i = 0; i < on.size() && done.ok(); ++i) {
    done = gpu::wait(*on[i].slot->event, device_timeout, "exchanging tiles of " + on[i].part.device->name());
  }
  if (!done.ok()) {
    for (OnPart& of : on) {
      if (of.launched && !roll_back(of).ok()) torn = true;
    }
    return done;
  }
  for (const OnPart& of : on) {
    for (const gpu::StagedTile& tile : of.tiles) {
      const bool reads_here = source_part_[tile.rank] == of.index || source_part_[tile.rank] == kMixed;
      if (reads_here) merge(tile.rank, of.index, of.slot->pinned.data() + kTilesAt + tile.at, aside_of(tile.rank));
    }
  }
  return {};
}

}  // namespace deltasync
