// A version in the live memory of an engine on this host: each element where a placement has it, and what has no place
// in the executor's rest. Staging has tile behind tile.
#include <algorithm>
#include <optional>
#include <utility>

#include "base/log.hpp"
#include "deltasync/target.hpp"
#include "format/tiling.hpp"
#include "placement/host_executor.hpp"
#include "placement/regions.hpp"
#include "receiver/targets/copy_check.hpp"
#include "receiver/targets/host_memory.hpp"
#include "receiver/targets/memory_target.hpp"
#include "receiver/targets/staged_tiles.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kTilesPerItem = 32;

class PlacedTarget final : public TileTarget, public CanReadCopies {
 public:
  PlacedTarget(placement::HostExecutor executor, const PlacedTargetOptions& options)
      : TileTarget("placed_target", executor.placement().layout(), parts_of(executor.placement()).tiles, options.live),
        executor_(std::move(executor)) {}

  TargetCapabilities capabilities() override {
    TargetCapabilities can = TileTarget::capabilities();
    can.in_live_memory = true;
    can.placement = &executor_.placement();
    can.copies = this;
    return can;
  }
  Status prepare_copies(const CallContext& until) override;
  Result<std::vector<WrongCopy>> wrong_copies(std::span<const std::uint64_t> tiles, const CallContext& until) override;

 private:
  Status check_subscription(const TileSet& asked) const override { return check_placed_tiles(tiles(), asked); }
  Status open_memory(const CallContext& until) override;
  Status open_live(const CallContext& /*it is there*/) override { return {}; }
  Result<TileRows> read_tile(const Tile& tile, std::vector<std::byte>& scratch) const override;
  Result<TileRows> open_tile(const Tile& tile, std::vector<std::byte>& scratch) override {
    return gather(tile, scratch);
  }
  Status put(const Tile& tile, const TileRows& rows) override;
  Status exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) override;
  Status open_staging(const CallContext& until) override;
  void close_staging() noexcept override { staging_.close(); }
  TileRows staged_tile(const Tile& tile) const override { return {staging_.tile(rank(tile)), row_bytes(tile)}; }
  Status exchange_staging(const CallContext& until) override;
  std::uint64_t staging_bytes() const override { return staging_.bytes(); }
  bool kept_whole() const noexcept override { return true; }

  /// Among the placement's tiles. Others are refused before they come here.
  std::uint64_t rank(const Tile& tile) const { return tiles().rank(tile.index).value(); }
  TileRows gather(const Tile& tile, std::vector<std::byte>& scratch) const;

  placement::HostExecutor executor_;
  HostMemory rest_;
  StagedTiles staging_;
  std::optional<CopyCheck> copies_;  ///< once it is prepared
};

Status PlacedTarget::open_memory(const CallContext& until) {
  const std::uint64_t bytes = executor_.placement().rest_bytes();
  log::info("placed_target keeps_rest bytes={}", bytes);
  if (bytes == 0) return {};
  auto memory = HostMemory::map(bytes, pool(), until);
  if (!memory.ok()) {
    return std::move(memory).error().with_context("memory for the rest of tiles that slices cut through");
  }
  rest_ = *std::move(memory);
  executor_.set_rest(rest_.span().data());
  return {};
}

TileRows PlacedTarget::gather(const Tile& tile, std::vector<std::byte>& scratch) const {
  const std::uint64_t at = rank(tile);
  if (const auto rows = executor_.rows_of(at)) return {rows->first, static_cast<std::size_t>(rows->row_stride)};
  scratch.resize(static_cast<std::size_t>(executor_.tile_bytes(at)));
  executor_.gather_tile(at, scratch.data());
  return {scratch.data(), row_bytes(tile)};
}

Status PlacedTarget::put(const Tile& tile, const TileRows& rows) {
  const std::uint64_t at = rank(tile);
  const auto place = executor_.rows_of(at);
  const bool there = place && place->first == rows.first;
  if (!there) executor_.scatter_tile(at, rows.first, rows.row_stride);
  return {};
}

Result<TileRows> PlacedTarget::read_tile(const Tile& tile, std::vector<std::byte>& scratch) const {
  const auto rows = executor_.read_rows_of(rank(tile));
  if (rows) return TileRows{rows->first, static_cast<std::size_t>(rows->row_stride)};
  return gather(tile, scratch);
}

Status PlacedTarget::exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) {
  const std::uint64_t at = rank(tile);
  if (const auto rows = executor_.rows_of(at)) {
    delta::exchange_tile(layout_of(), record, rows->first, static_cast<std::size_t>(rows->row_stride), changes);
  } else {
    executor_.exchange_words(at, record.changed, changes);
  }
  return {};
}

Status PlacedTarget::open_staging(const CallContext& until) {
  if (staging_) return {};
  const auto bytes_of = [&](std::uint64_t rank) { return executor_.tile_bytes(rank); };
  DS_TRY(staging_.open(tiles().tiles(), bytes_of, pool(), until));
  log::info("placed_target stages bytes={}", staging_.bytes());
  return {};
}

/// Nothing of it fails: it is cut short at most, and rolled back.
Status PlacedTarget::exchange_staging(const CallContext& until) {
  std::vector<std::vector<std::byte>> scratch(pool().size());
  const std::uint64_t items = (tiles().tiles() + kTilesPerItem - 1) / kTilesPerItem;
  const auto exchange = [&](std::uint64_t item, unsigned worker, const CallContext& /*short*/) -> Status {
    const std::uint64_t end = std::min((item + 1) * kTilesPerItem, tiles().tiles());
    for (std::uint64_t i = item * kTilesPerItem; i < end; ++i) {
      executor_.exchange_tile(i, staging_.tile(i), scratch[worker]);
    }
    return {};
  };
  bool torn = false;
  return exchange_all(pool(), items, until, until, torn, exchange);
}

Status PlacedTarget::prepare_copies(const CallContext& until) {
  if (copies_) return {};
  DS_ASSIGN(copies_, CopyCheck::make(executor_.placement(), copies_on_host(pool()), until));
  return {};
}

Result<std::vector<WrongCopy>> PlacedTarget::wrong_copies(std::span<const std::uint64_t> tiles,
                                                          const CallContext& until) {
  DS_TRY(prepare_copies(until));
  return copies_->find(*this, tiles, until);
}

}  // namespace

Result<std::unique_ptr<Target>> make_host_placed_target(std::shared_ptr<const Placement> placement,
                                                        const PlacedTargetOptions& options) {
  auto executor = placement::HostExecutor::make(std::move(placement), placement::HostExecutor::Rest::given);
  if (!executor.ok()) return std::move(executor).error().with_context("placed target");
  return std::unique_ptr<Target>(new PlacedTarget(*std::move(executor), options));
}

}  // namespace deltasync
