// A version in the live memory of an engine on this host: each element where a placement has it.
//
// What is where:
//   live memory   the committed version (and a full update that may go to its final place), with the executor's rest
//   staging_      a staged full update, tile behind tile; after its commit, the version before, until the next update
// A delta is applied in live memory by exchanging its decoded changes with what is there (receiver/delta_log.hpp).
#include <algorithm>
#include <optional>
#include <utility>

#include "base/log.hpp"
#include "deltasync/placed_target.hpp"
#include "placement/host_executor.hpp"
#include "receiver/delta_log.hpp"
#include "receiver/host_memory.hpp"
#include "receiver/target_checks.hpp"
#include "receiver/tile_memory.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kStagedTileAlignment = 64;
constexpr std::uint64_t kTilesPerItem = 32;

/// How to take the last commit back.
struct Undo {
  enum class Kind : std::uint8_t {
    none,    ///< nothing committed since the update began, or the version before is gone
    empty,   ///< the first full update: before it there was nothing
    staged,  ///< the version before is in staging_
    deltas,  ///< the version before is live memory with `log` reverted
  };
  Kind kind = Kind::none;
  std::optional<TargetState> state;  ///< of the version before
  DeltaLog log;
};

class PlacedTarget final : public Target, private TileStore {
 public:
  explicit PlacedTarget(placement::HostExecutor executor)
      : layout_(executor.placement().layout()),
        tiles_(executor.placement().parts().tiles),
        executor_(std::move(executor)) {}

  const LayoutPtr& layout() const override { return layout_; }
  bool exchanges() const override { return true; }
  bool shares_memory() const override { return full_ == Full::first || full_ == Full::in_place; }
  Status subscribe(const TileSet& tiles) override;
  Status open(ThreadPool& pool, const Until& /*nothing is here to verify*/) override {
    pool_ = &pool;
    spdlog::info("placed_target keeps_rest bytes={}", executor_.rest().size());
    return {};
  }
  const TargetState* committed() const override { return committed_ ? &*committed_ : nullptr; }
  TileRows live_tile(const Tile& tile, std::vector<std::byte>& scratch) const override;
  Status begin_full(FullOverLive policy, const Until& until) override;
  TileRows full_tile(const Tile& tile, std::vector<std::byte>& scratch) override;
  void put_tile(const Tile& tile, const TileRows& rows) override;
  std::byte* full_rows(std::uint32_t /*rows lie anywhere*/) override { return nullptr; }
  Status commit_full(TargetState state) override;
  void discard_full() noexcept override;
  Status commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) override;
  Status rollback() override;
  void forget_rollback() noexcept override;

 private:
  enum class Full : std::uint8_t {
    closed,
    first,     ///< nothing was committed: tiles go to their places
    in_place,  ///< likewise, over the version before, which is lost
    staged,    ///< they go to staging_
  };

  TileRows open_tile(const Tile& tile, std::vector<std::byte>& scratch) override { return gather(tile, scratch); }
  void close_tile(const Tile& tile, const TileRows& rows) override { scatter(tile, rows); }
  void exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) override;

  /// Among the placement's tiles. Others are refused before they come here.
  std::uint64_t rank(const Tile& tile) const { return tiles_.rank(tile.index).value(); }
  std::size_t row_bytes(const Tile& tile) const {
    return static_cast<std::size_t>(tile.rect.cols) * layout_->tensors()[tile.tensor].element_bytes;
  }
  TileRows gather(const Tile& tile, std::vector<std::byte>& scratch) const;
  void scatter(const Tile& tile, const TileRows& rows);
  TileRows staged(const Tile& tile) const {
    return {staging_.span().data() + staged_at_[static_cast<std::size_t>(rank(tile))], row_bytes(tile)};
  }
  Status open_staging(const Until& until);
  void close_staging() noexcept;
  void exchange_live_and_staging();

  const LayoutPtr layout_;
  const TileSet tiles_;
  placement::HostExecutor executor_;
  ThreadPool* pool_ = nullptr;
  HostMemory staging_;
  std::vector<std::uint64_t> staged_at_;  ///< of each tile, by rank
  std::optional<TargetState> committed_;
  Full full_ = Full::closed;
  Undo undo_;
};

Status PlacedTarget::subscribe(const TileSet& tiles) {
  if (pool_ != nullptr) return Error(Errc::invalid_argument, "the target is open already");
  if (tiles.ranges() == tiles_.ranges()) return {};
  return Error(Errc::invalid_argument, "the subscription has " + std::to_string(tiles.tiles()) +
                                           " tiles, the placement needs " + std::to_string(tiles_.tiles()) +
                                           " (or others): bind with the placement's own subscription");
}

TileRows PlacedTarget::gather(const Tile& tile, std::vector<std::byte>& scratch) const {
  const std::uint64_t at = rank(tile);
  if (const auto rows = executor_.rows_of(at)) return {rows->first, static_cast<std::size_t>(rows->row_stride)};
  scratch.resize(static_cast<std::size_t>(executor_.tile_bytes(at)));
  executor_.gather_tile(at, scratch.data());
  return {scratch.data(), row_bytes(tile)};
}

void PlacedTarget::scatter(const Tile& tile, const TileRows& rows) {
  const std::uint64_t at = rank(tile);
  const auto place = executor_.rows_of(at);
  if (place && place->first == rows.first) return;  // written there
  executor_.scatter_tile(at, rows.first, rows.row_stride);
}

TileRows PlacedTarget::live_tile(const Tile& tile, std::vector<std::byte>& scratch) const {
  if (!committed_) return {};
  const auto rows = executor_.read_rows_of(rank(tile));
  if (rows) return {rows->first, static_cast<std::size_t>(rows->row_stride)};
  return gather(tile, scratch);
}

TileRows PlacedTarget::full_tile(const Tile& tile, std::vector<std::byte>& scratch) {
  if (full_ == Full::closed) return {};
  return full_ == Full::staged ? staged(tile) : gather(tile, scratch);
}

void PlacedTarget::put_tile(const Tile& tile, const TileRows& rows) {
  if (full_ == Full::closed) return;
  if (full_ == Full::staged) {
    copy_tile_rows(*layout_, tile, rows, staged(tile));
  } else {
    scatter(tile, rows);
  }
}

Status PlacedTarget::open_staging(const Until& until) {
  if (staging_) return {};
  std::uint64_t bytes = 0;
  staged_at_.clear();
  staged_at_.reserve(static_cast<std::size_t>(tiles_.tiles()));
  for (std::uint64_t i = 0; i < tiles_.tiles(); ++i) {
    staged_at_.push_back(bytes);
    bytes += (executor_.tile_bytes(i) + kStagedTileAlignment - 1) / kStagedTileAlignment * kStagedTileAlignment;
  }
  auto memory = HostMemory::map(bytes, *pool_, until);
  if (!memory.ok()) {
    close_staging();
    return std::move(memory).error().with_context("second copy for a full update");
  }
  staging_ = *std::move(memory);
  spdlog::info("placed_target stages bytes={}", bytes);
  return {};
}

void PlacedTarget::close_staging() noexcept {
  staging_.release();
  staged_at_ = {};
}

Status PlacedTarget::begin_full(FullOverLive policy, const Until& until) {
  if (pool_ == nullptr) return Error(Errc::invalid_argument, "the target is not open");
  if (full_ != Full::closed) return Error(Errc::invalid_argument, "a full update is open already");
  if (committed_ && policy == FullOverLive::refuse) {
    return Error(Errc::no_space, "a full update over the live version " + to_string(committed_->version) + " needs " +
                                     std::to_string(tiles_.bytes()) +
                                     " bytes of host memory, which the policy refuses");
  }
  undo_ = {};
  if (committed_ && policy == FullOverLive::stage) {
    DS_TRY(open_staging(until));
    full_ = Full::staged;
    return {};
  }
  full_ = committed_ ? Full::in_place : Full::first;
  committed_.reset();
  close_staging();
  return {};
}

void PlacedTarget::exchange_live_and_staging() {
  std::vector<std::vector<std::byte>> scratch(pool_->size());
  const std::uint64_t items = (tiles_.tiles() + kTilesPerItem - 1) / kTilesPerItem;
  pool_->run(items, [&](std::uint64_t item, unsigned worker) {
    const std::uint64_t end = std::min((item + 1) * kTilesPerItem, tiles_.tiles());
    for (std::uint64_t i = item * kTilesPerItem; i < end; ++i) {
      executor_.exchange_tile(i, staging_.span().data() + staged_at_[static_cast<std::size_t>(i)], scratch[worker]);
    }
  });
}

Status PlacedTarget::commit_full(TargetState state) {
  if (full_ == Full::closed) return Error(Errc::invalid_argument, "no full update is open");
  DS_TRY(check_state(*layout_, tiles_, state));
  undo_ = {};
  if (full_ == Full::staged) {
    exchange_live_and_staging();
    undo_.kind = Undo::Kind::staged;
    spdlog::info("placed_target keeps_for_rollback version={} bytes={}", to_string(committed_->version),
                 staging_.span().size());
  } else if (full_ == Full::first) {
    undo_.kind = Undo::Kind::empty;
  }
  undo_.state = std::move(committed_);
  committed_ = std::move(state);
  full_ = Full::closed;
  return {};
}

void PlacedTarget::discard_full() noexcept {
  if (full_ == Full::staged) close_staging();
  full_ = Full::closed;
}

void PlacedTarget::exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) {
  const std::uint64_t at = rank(tile);
  if (const auto rows = executor_.rows_of(at)) {
    delta::exchange_tile(*layout_, record, rows->first, static_cast<std::size_t>(rows->row_stride), changes);
  } else {
    executor_.exchange_words(at, record.changed, changes);
  }
}

Status PlacedTarget::commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) {
  if (full_ != Full::closed) return Error(Errc::invalid_argument, "a full update is open");
  DS_TRY(check_steps(*layout_, tiles_, committed(), steps, state));
  undo_ = {};
  close_staging();  // the version before the last full update: from here on it cannot be rolled back to
  DS_TRY(undo_.log.apply(*layout_, std::move(steps), *this, *pool_, deadline));
  undo_.kind = Undo::Kind::deltas;
  undo_.state = std::move(committed_);
  committed_ = std::move(state);
  return {};
}

Status PlacedTarget::rollback() {
  if (full_ != Full::closed) return Error(Errc::invalid_argument, "a full update is open");
  switch (undo_.kind) {
    case Undo::Kind::none: return Error(Errc::unsupported, "there is no commit that could be taken back");
    case Undo::Kind::empty: break;
    case Undo::Kind::staged:
      exchange_live_and_staging();
      close_staging();
      break;
    case Undo::Kind::deltas: undo_.log.revert(*layout_, *this, *pool_); break;
  }
  committed_ = std::move(undo_.state);
  undo_ = {};
  return {};
}

void PlacedTarget::forget_rollback() noexcept {
  undo_ = {};
  if (full_ != Full::staged) close_staging();
}

}  // namespace

Result<TargetPtr> make_placed_target(PlacementPtr placement) {
  auto executor = placement::HostExecutor::make(std::move(placement));
  if (!executor.ok()) return std::move(executor).error().with_context("placed target");
  return TargetPtr(new PlacedTarget(*std::move(executor)));
}

}  // namespace deltasync
