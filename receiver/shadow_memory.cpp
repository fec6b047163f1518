#include "receiver/shadow_memory.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "receiver/target_checks.hpp"
#include "receiver/tile_memory.hpp"

namespace deltasync {

namespace {
constexpr std::uint64_t kTileAlignment = 64;
}

Status ShadowMemory::open_memory(const Until& until) {
  at_.clear();
  at_.reserve(static_cast<std::size_t>(tiles().tiles()));
  std::uint64_t bytes = 0;
  for (std::uint64_t i = 0; i < tiles().tiles(); ++i) {
    const Tile tile = layout_of().tile(tiles().nth(i));
    at_.push_back(bytes);
    bytes += (tile.rect.rows * row_bytes(tile) + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
  }
  const std::string what = "a shadow of " + std::to_string(bytes) + " bytes of host memory";
  if (bytes_max_ != 0 && bytes > bytes_max_) {
    return Error(Errc::no_space, what + ": " + std::to_string(bytes_max_) + " are allowed");
  }
  auto memory = HostMemory::map(bytes, pool(), until);
  if (!memory.ok()) return std::move(memory).error().with_context(what);
  memory_ = *std::move(memory);
  log::info("shadow keeps bytes={}", bytes);
  return {};
}

Status ShadowMemory::put(const Tile& tile, const TileRows& rows) {
  copy_tile_rows(layout_of(), tile, rows, tile_in(memory_, tile));
  return {};
}

Status ShadowMemory::exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) {
  const TileRows rows = tile_in(memory_, tile);
  delta::exchange_tile(layout_of(), record, rows.first, rows.row_stride, changes);
  return {};
}

Status ShadowMemory::open_staging(const Until& until) {
  if (!staging_) {
    DS_ASSIGN(staging_, HostMemory::map(bytes(), pool(), until));
  }
  return {};
}

Status ShadowMemory::exchange_staging(const Until& /*done at once*/) {
  memory_.swap(staging_);
  return {};
}

Result<TileRows> ShadowMemory::sound_tile(const HostMemory& memory, const Tile& tile, const TargetState& state) const {
  const TileRows rows = tile_in(memory, tile);
  if (digest_of_rows(layout_of(), tile, rows) == state.digests[static_cast<std::size_t>(tile.index)]) return rows;
  return Error(Errc::corrupt,
               "the shadow's " + describe_tile(layout_of(), tile.index) + " differs from what was committed");
}

Status ShadowMemory::check(const HostMemory& memory, const TargetState& state, const Until& until) const {
  constexpr std::uint64_t kTilesPerItem = 16;
  const std::uint64_t items = (tiles().tiles() + kTilesPerItem - 1) / kTilesPerItem;
  return run_all(pool(), items, until, "reading the shadow", [&](std::uint64_t item, unsigned) -> Status {
    const std::uint64_t end = std::min((item + 1) * kTilesPerItem, tiles().tiles());
    for (std::uint64_t i = item * kTilesPerItem; i < end; ++i) {
      DS_TRY(sound_tile(memory, layout_of().tile(tiles().nth(i)), state));
    }
    return {};
  });
}

Result<TileRows> ShadowMemory::sound_tile(const Tile& tile) const {
  return sound_tile(memory_, tile, *committed());
}

Status ShadowMemory::check(const Until& until) const {
  return check(memory_, *committed(), until);
}

Status ShadowMemory::check_before(const Until& until) const {
  return staged_before() == nullptr ? Status() : check(staging_, *staged_before(), until);
}

}  // namespace deltasync
