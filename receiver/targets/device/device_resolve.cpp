// Changes resolved by the devices that have their tiles.
#include <algorithm>
#include <cstring>
#include <optional>

#include "receiver/targets/device/device_executor.hpp"

namespace deltasync {
namespace {

gpu::ChangeKind kind_of(delta::NumberKind kind) noexcept {
  switch (kind) {
    case delta::NumberKind::elements: return gpu::ChangeKind::elements;
    case delta::NumberKind::differences: return gpu::ChangeKind::differences;
    case delta::NumberKind::ulp_differences: return gpu::ChangeKind::ulp_differences;
  }
  return gpu::ChangeKind::elements;
}

std::uint64_t pieces_of(std::uint32_t count) noexcept {
  return (std::uint64_t{count} + gpu::kBlockWords - 1) / gpu::kBlockWords;
}

}  // namespace

/// Staging that a tile takes: its changes, their description, and a sum.
std::uint64_t DeviceExecutor::resolve_bytes(const TileChanges& changes, std::uint64_t rank) const noexcept {
  return gpu::WordRun::bytes(changes.count, shape_.tiles[rank].element_bytes) + sizeof(gpu::WordRun) +
         pieces_of(changes.count) * sizeof(gpu::WordPiece) + sizeof(std::uint64_t);
}

/// All changes of a call.
struct DeviceExecutor::Resolving {
  std::span<TileChanges> changes;
  std::span<const std::uint64_t> ranks;
  ChangesOnDevices& kept;
};

Status DeviceExecutor::resolve(std::span<TileChanges> changes, std::span<const std::uint64_t> ranks,
                               ChangesOnDevices& kept, const CallContext& until) {
  const Resolving all{changes, ranks, kept};
  for (std::uint32_t i = 0; i < parts_.size(); ++i) {
    DS_TRY(resolve_on(i, true, all, until));
    DS_TRY(resolve_on(i, false, all, until));
  }
  for (std::size_t k = 0; k < changes.size(); ++k) {
    if (changes[k].kept) kept.tiles.push_back(changes[k].tile);
  }
  std::sort(kept.tiles.begin(), kept.tiles.end());
  return {};
}

/// Those of tiles that are read there and have no other place (`keep`), or that have.
Status DeviceExecutor::resolve_on(std::uint32_t part, bool keep, const Resolving& all, const CallContext& until) {
  std::vector<std::size_t> some;
  std::uint64_t bytes = 0;
  for (std::size_t k = 0; k < all.changes.size(); ++k) {
    const std::uint64_t rank = all.ranks[k];
    if (all.changes[k].count == 0 || source_part_[rank] != part || (places_[rank] == 1u << part) != keep) continue;
    const std::uint64_t takes = resolve_bytes(all.changes[k], rank);
    if (takes > slot_bytes_) continue;
    if (bytes + takes > slot_bytes_) {
      DS_TRY(resolve_some(part, keep, all, some, patient(until)));
      some.clear();
      bytes = 0;
    }
    some.push_back(k);
    bytes += takes;
  }
  return some.empty() ? Status() : resolve_some(part, keep, all, some, patient(until));
}

/// In a slot, in this order, each a multiple of 8 bytes: runs, changes, sums, pieces. What is kept has a room for the
/// first two and one for the last, and nothing but sums comes back; of the rest the changes do too.
Status DeviceExecutor::resolve_some(std::uint32_t index, bool keep, const Resolving& all,
                                    std::span<const std::size_t> which, const CallContext& until) {
  Part& part = *parts_[index];
  std::uint64_t change_bytes = 0;
  std::uint64_t pieces_count = 0;
  for (const std::size_t k : which) {
    change_bytes += gpu::WordRun::bytes(all.changes[k].count, shape_.tiles[all.ranks[k]].element_bytes);
    pieces_count += pieces_of(all.changes[k].count);
  }
  const std::uint64_t changes_at = which.size() * sizeof(gpu::WordRun);
  const std::uint64_t sums_at = changes_at + change_bytes;
  const std::uint64_t pieces_at = sums_at + which.size() * sizeof(std::uint64_t);
  const std::uint64_t end = pieces_at + pieces_count * sizeof(gpu::WordPiece);

  DS_ASSIGN(const SlotGuard slot, take_slot(part, part.small, until));
  auto room = keep ? part.changes->claim(sums_at, pieces_count) : std::nullopt;
  std::byte* const base = room ? room->base() : slot->device.data();
  const std::uint64_t at = room ? room->at() : 0;
  const std::uint64_t first_run = room ? room->first_run() : 0;

  std::byte* const host = slot->pinned.data();
  std::uint64_t run_at = changes_at;
  std::uint64_t piece = pieces_at;
  for (std::size_t r = 0; r < which.size(); ++r) {
    const TileChanges& of = all.changes[which[r]];
    const std::uint64_t rank = all.ranks[which[r]];
    const gpu::WordRun run{rank, at + run_at, of.count, kind_of(of.kind)};
    std::memcpy(host + r * sizeof run, &run, sizeof run);
    const std::size_t positions = std::size_t{of.count} * sizeof(std::uint16_t);
    std::memcpy(host + run_at, of.changes.data(), positions);
    std::memcpy(host + run_at + gpu::WordRun::numbers_at(of.count), of.changes.data() + positions,
                of.changes.size() - positions);
    run_at += gpu::WordRun::bytes(of.count, shape_.tiles[rank].element_bytes);
    for (std::uint32_t first = 0; first < of.count; first += gpu::kBlockWords, piece += sizeof(gpu::WordPiece)) {
      const gpu::WordPiece some{static_cast<std::uint32_t>(first_run + r), first};
      std::memcpy(host + piece, &some, sizeof some);
    }
  }
  std::memset(host + sums_at, 0, static_cast<std::size_t>(pieces_at - sums_at));
  std::byte* const sums = slot->device.data() + sums_at;
  std::byte* const pieces = room ? base + room->pieces_at() : slot->device.data() + pieces_at;
  const gpu::ResolveWords kernel{part.table,
                                 reinterpret_cast<const gpu::WordRun*>(base),
                                 reinterpret_cast<const gpu::WordPiece*>(pieces),
                                 base,
                                 reinterpret_cast<std::uint64_t*>(sums),
                                 pieces_count,
                                 static_cast<std::uint32_t>(first_run)};
  const auto work = [&]() -> Status {
    if (room) {
      DS_TRY(part.stream->copy_in(base + at, host, sums_at));
      DS_TRY(part.stream->copy_in(sums, host + sums_at, pieces_at - sums_at));
      DS_TRY(part.stream->copy_in(pieces, host + pieces_at, end - pieces_at));
    } else {
      DS_TRY(part.stream->copy_in(base, host, end));
    }
    DS_TRY(part.stream->launch(kernel));
    const std::uint64_t from = room ? sums_at : changes_at;
    return part.stream->copy_out(host + from, slot->device.data() + from, pieces_at - from);
  };
  DS_TRY(use(part, slot, work));
  DS_TRY(gpu::wait(*slot->event, until, "resolving changes on " + part.device->name(), gpu::kBriefly));
  run_at = changes_at;
  for (std::size_t r = 0; r < which.size(); ++r) {
    TileChanges& of = all.changes[which[r]];
    const std::size_t positions = std::size_t{of.count} * sizeof(std::uint16_t);
    if (!room) {
      std::memcpy(of.changes.data() + positions, host + run_at + gpu::WordRun::numbers_at(of.count),
                  of.changes.size() - positions);
    }
    run_at += gpu::WordRun::bytes(of.count, shape_.tiles[all.ranks[which[r]]].element_bytes);
    std::memcpy(&of.digest_change, host + sums_at + r * sizeof(std::uint64_t), sizeof(std::uint64_t));
    of.resolved = true;
    of.kept = room.has_value();
  }
  if (room) all.kept.rooms.push_back({index, *std::move(room)});
  return {};
}

}  // namespace deltasync
