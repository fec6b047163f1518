#include "receiver/targets/shadow/shadow_memory.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/target_checks.hpp"
#include "receiver/targets/tile_memory.hpp"

namespace deltasync {

Status ShadowMemory::open_memory(const CallContext& until) {
  at_.clear();
  at_.reserve(static_cast<std::size_t>(tiles().tiles()));
  std::uint64_t bytes = 0;
  for (std::uint64_t i = 0; i < tiles().tiles(); ++i) {
    const Tile tile = tile_of(layout_of(), tiles().nth(i));
    at_.push_back(bytes);
    bytes += (tile.rect.rows * row_bytes(tile) + RegisteredHostMemory::kTileAlignment - 1) /
             RegisteredHostMemory::kTileAlignment * RegisteredHostMemory::kTileAlignment;
  }
  const std::string what = "a shadow of " + std::to_string(bytes) + " bytes of host memory";
  if (options_.bytes_max != 0 && bytes > options_.bytes_max) {
    return Error(Errc::no_space, what + ": " + std::to_string(options_.bytes_max) + " are allowed");
  }
  auto memory = HostMemory::map(bytes, pool(), until);
  if (!memory.ok()) return std::move(memory).error().with_context(what);
  memory->keep_from_children();
  kept_ = Room(*std::move(memory));
  pin(until);
  log::info("shadow keeps bytes={} pinned={}", bytes, is_pinned());
  return {};
}

/// Memory that a device refuses to read is as good, but slower.
void ShadowMemory::pin(const CallContext& until) {
  if (!options_.pin || is_pinned()) return;
  const Status lent = kept_.lend_to(live_, until);
  if (!lent.ok()) log::warn("shadow not_pinned bytes={} why=\"{}\"", bytes(), lent.error().to_string());
}

Status ShadowMemory::Room::lend_to(Target& live, const CallContext& until) {
  auto* const devices = live.capabilities().borrow;
  if (devices == nullptr) return {};
  DS_ASSIGN(lent_, devices->lend(memory_->span(), memory_, until));
  return {};
}

/// What a device may still read is never given back.
void ShadowMemory::Room::release() noexcept {
  if (lent_ != nullptr && !lent_->end()) memory_->abandon();
  lent_.reset();
  memory_.reset();
}

Status ShadowMemory::put(const Tile& tile, const TileRows& rows) {
  copy_tile_rows(layout_of(), tile, rows, tile_in(kept_, tile));
  return {};
}

Status ShadowMemory::exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) {
  const TileRows rows = tile_in(kept_, tile);
  delta::exchange_tile(layout_of(), record, rows.first, rows.row_stride, changes);
  return {};
}

Status ShadowMemory::open_staging(const CallContext& until) {
  if (staging_) return {};
  // Not pinned: an engine computes meanwhile, and the driver would keep it waiting.
  DS_ASSIGN(HostMemory memory, HostMemory::map(bytes(), pool(), until));
  memory.keep_from_children();  // a commit makes it the shadow, which sleep will pin
  staging_ = Room(std::move(memory));
  return {};
}

Status ShadowMemory::exchange_staging(const CallContext& /*done at once*/) {
  std::swap(kept_, staging_);
  return {};
}

Status ShadowMemory::check_tile(const Room& room, const Tile& tile, const TargetState& state) const {
  const std::uint64_t digest = digest_of_rows(layout_of(), tile, tile_in(room, tile));
  if (digest == state.digests[static_cast<std::size_t>(tile.index)]) return {};
  return Error(Errc::corrupt,
               "the shadow's " + describe_tile(layout_of(), tile.index) + " differs from what was committed");
}

Status ShadowMemory::check(const Room& room, const TargetState& state, const CallContext& until) const {
  constexpr std::uint64_t kTilesPerCheck = 16;
  const std::uint64_t items = (tiles().tiles() + kTilesPerCheck - 1) / kTilesPerCheck;
  return run_all(pool(), items, until, "reading the shadow", [&](std::uint64_t item, unsigned) -> Status {
    const std::uint64_t end = std::min((item + 1) * kTilesPerCheck, tiles().tiles());
    for (std::uint64_t i = item * kTilesPerCheck; i < end; ++i) {
      DS_TRY(check_tile(room, tile_of(layout_of(), tiles().nth(i)), state));
    }
    return {};
  });
}

std::vector<std::uint64_t> ShadowMemory::batches() const {
  constexpr std::uint64_t kLotBytes = std::uint64_t{2} << 20;
  const std::uint64_t most = kept_.is_lent() ? kept_.lent().lot_bytes() : kLotBytes;
  std::vector<std::uint64_t> batches{0};
  for (std::uint64_t i = 1; i <= at_.size(); ++i) {
    const std::uint64_t end = i < at_.size() ? at_[static_cast<std::size_t>(i)] : kept_.bytes();
    if (end - at_[static_cast<std::size_t>(batches.back())] > most && i - 1 > batches.back()) batches.push_back(i - 1);
  }
  if (batches.back() != at_.size()) batches.push_back(at_.size());
  return batches;
}

Status ShadowMemory::put_live(std::uint64_t first, std::uint64_t end) const {
  for (std::uint64_t i = first; i < end; ++i) {
    DS_TRY(check_tile(kept_, tile_of(layout_of(), tiles().nth(i)), *committed()));
  }
  if (kept_.is_lent()) {
    return live_.capabilities().borrow->put_lent(kept_.lent(), first, end,
                                                 kept_.data() + at_[static_cast<std::size_t>(first)]);
  }
  for (std::uint64_t i = first; i < end; ++i) {
    const Tile tile = tile_of(layout_of(), tiles().nth(i));
    DS_TRY(live_.put_tile(tile, tile_in(kept_, tile)));
  }
  return {};
}

Status ShadowMemory::check(const CallContext& until) const {
  return check(kept_, *committed(), until);
}

Status ShadowMemory::check_before(const CallContext& until) const {
  return staged_before() == nullptr ? Status() : check(staging_, *staged_before(), until);
}

}  // namespace deltasync
