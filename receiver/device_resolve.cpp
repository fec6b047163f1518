// Changes resolved by the devices that have their tiles.
#include <algorithm>
#include <cstring>

#include "receiver/device_executor.hpp"

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

Status DeviceExecutor::resolve(std::span<TileChanges> changes, std::span<const std::uint64_t> ranks,
                               const Until& until) {
  std::vector<std::size_t> some;
  for (std::uint32_t i = 0; i < parts_.size(); ++i) {
    std::uint64_t bytes = 0;
    some.clear();
    for (std::size_t k = 0; k < changes.size(); ++k) {
      if (changes[k].count == 0 || home_[ranks[k]] != i) continue;
      const std::uint64_t takes = resolve_bytes(changes[k], ranks[k]);
      if (takes > slot_bytes_) continue;
      if (bytes + takes > slot_bytes_) {
        DS_TRY(resolve_some(*parts_[i], some, changes, ranks, patient(until)));
        some.clear();
        bytes = 0;
      }
      some.push_back(k);
      bytes += takes;
    }
    if (!some.empty()) DS_TRY(resolve_some(*parts_[i], some, changes, ranks, patient(until)));
  }
  return {};
}

/// In one slot, in this order, each a multiple of 8 bytes: all changes, sums, runs, pieces.
Status DeviceExecutor::resolve_some(Part& part, std::span<const std::size_t> which, std::span<TileChanges> changes,
                                    std::span<const std::uint64_t> ranks, const Until& until) {
  std::vector<gpu::WordRun> runs;
  std::vector<gpu::WordPiece> pieces;
  std::uint64_t change_bytes = 0;
  for (const std::size_t k : which) {
    for (std::uint32_t first = 0; first < changes[k].count; first += gpu::kBlockWords) {
      pieces.push_back({static_cast<std::uint32_t>(runs.size()), first});
    }
    runs.push_back({ranks[k], change_bytes, changes[k].count, kind_of(changes[k].kind)});
    change_bytes += gpu::WordRun::bytes(changes[k].count, shape_.tiles[ranks[k]].element_bytes);
  }
  const std::uint64_t sums_at = change_bytes;
  const std::uint64_t runs_at = sums_at + runs.size() * sizeof(std::uint64_t);
  const std::uint64_t pieces_at = runs_at + runs.size() * sizeof(gpu::WordRun);
  const std::uint64_t end = pieces_at + pieces.size() * sizeof(gpu::WordPiece);

  DS_ASSIGN(const Lease slot, take_slot(part, until));
  std::byte* const host = slot->pinned.data();
  std::byte* const device = slot->device.data();
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const TileChanges& of = changes[which[r]];
    const std::size_t positions = std::size_t{of.count} * sizeof(std::uint16_t);
    std::byte* const at = host + runs[r].at;
    std::memcpy(at, of.changes.data(), positions);
    std::memcpy(at + gpu::WordRun::numbers_at(of.count), of.changes.data() + positions, of.changes.size() - positions);
  }
  std::memset(host + sums_at, 0, static_cast<std::size_t>(runs_at - sums_at));
  std::memcpy(host + runs_at, runs.data(), runs.size() * sizeof(gpu::WordRun));
  std::memcpy(host + pieces_at, pieces.data(), pieces.size() * sizeof(gpu::WordPiece));
  const gpu::ResolveWords kernel{part.table,
                                 reinterpret_cast<const gpu::WordRun*>(device + runs_at),
                                 reinterpret_cast<const gpu::WordPiece*>(device + pieces_at),
                                 device,
                                 reinterpret_cast<std::uint64_t*>(device + sums_at),
                                 pieces.size()};
  const auto work = [&]() -> Status {
    DS_TRY(part.stream->copy_in(device, host, end));
    DS_TRY(part.stream->launch(kernel));
    return part.stream->copy_out(host, device, runs_at);
  };
  DS_TRY(use(part, slot, work));
  DS_TRY(gpu::wait(*slot->event, until, "resolving changes on " + part.device->name()));
  for (std::size_t r = 0; r < runs.size(); ++r) {
    TileChanges& of = changes[which[r]];
    const std::size_t positions = std::size_t{of.count} * sizeof(std::uint16_t);
    std::memcpy(of.changes.data() + positions, host + runs[r].at + gpu::WordRun::numbers_at(of.count),
                of.changes.size() - positions);
    std::memcpy(&of.digest_change, host + sums_at + r * sizeof(std::uint64_t), sizeof(std::uint64_t));
    of.resolved = true;
  }
  return {};
}

}  // namespace deltasync
