// A version in the live memory of an engine on devices: each element where a placement has it, and what has no place in
// the executor's rest, on the host. Staging is in host memory, tile behind tile.
//
// A device can fail at any call. What failed is put back; where that fails too, live memory has no version any more.
#include "receiver/target_device.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "base/log.hpp"
#include "gpu/cuda_device.hpp"
#include "receiver/copy_check.hpp"
#include "receiver/device_log.hpp"
#include "receiver/host_memory.hpp"
#include "receiver/memory_target.hpp"
#include "receiver/target_checks.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kStagedTileAlignment = 64;
constexpr std::uint64_t kTilesPerItem = 32;

class DeviceTarget final : public MemoryTarget {
 public:
  DeviceTarget(std::unique_ptr<DeviceExecutor> executor, bool live, CopyCheck::Open open_copies)
      : MemoryTarget("device_target", executor->placement().layout(), executor->placement().parts().tiles, live),
        executor_(std::move(executor)),
        open_copies_(std::move(open_copies)) {}

  Status live_digests(std::span<const std::uint64_t> tiles, std::span<std::uint64_t> digests,
                      const Until& until) override;
  Result<std::vector<WrongCopy>> wrong_copies(std::span<const std::uint64_t> tiles, const Until& until) override;
  bool resolves() const override { return true; }
  Status resolve(std::span<TileChanges> changes) const override;

 private:
  Status check_subscription(const TileSet& tiles) const override;
  Status open_memory(const Until& /*nothing is here to verify*/) override {
    spdlog::info("device_target stages bytes={} keeps_rest bytes={}", executor_->staging_bytes(),
                 executor_->placement().rest_bytes());
    return {};
  }
  Status open_live(const Until& until) override;
  Result<TileRows> read_tile(const Tile& tile, std::vector<std::byte>& scratch) const override;
  Result<TileRows> open_tile(const Tile& tile, std::vector<std::byte>& scratch) override {
    return read_tile(tile, scratch);
  }
  Status put(const Tile& tile, const TileRows& rows) override {
    return executor_->scatter_tile(rank(tile), rows.first, rows.row_stride, executor_->patient());
  }
  /// Deltas go through a log of their own.
  Status exchange(const Tile& /*tile*/, const delta::TileRecord& /*record*/, MutByteSpan /*changes*/) override {
    return Error(Errc::internal, "a device exchanges all changes of an update at once");
  }
  Status settle() override;
  Status apply_delta(std::vector<StagedStep> steps, std::span<const std::uint64_t> digests, Deadline deadline,
                     bool& torn) override;
  Status revert_delta() override;
  void forget_delta() noexcept override { log_.reset(); }
  bool kept_whole() const noexcept override { return kept_whole_; }

  Status open_staging(const Until& until) override;
  void close_staging() noexcept override;
  TileRows staged_tile(const Tile& tile) const override {
    return {staging_.span().data() + staged_at_[static_cast<std::size_t>(rank(tile))], row_bytes(tile)};
  }
  Status exchange_staging() override;
  std::uint64_t staging_bytes() const override { return staging_.span().size(); }

  /// Among the placement's tiles. Others are refused before they come here.
  std::uint64_t rank(const Tile& tile) const { return tiles().rank(tile.index).value(); }
  Status exchange_tiles(std::vector<std::uint8_t>& exchanged, bool forth, std::atomic<bool>& torn);
  Status exchange_tile(std::uint64_t rank, std::atomic<bool>& torn);

  const std::unique_ptr<DeviceExecutor> executor_;
  std::unique_ptr<DeviceLog> log_;  ///< of the last delta, as long as it can be taken back
  bool kept_whole_ = false;
  HostMemory staging_;
  std::vector<std::uint64_t> staged_at_;  ///< of each tile, by rank
  const CopyCheck::Open open_copies_;
  std::optional<CopyCheck> copies_;  ///< once it has been asked for; ends before the executor's devices
};

Status DeviceTarget::check_subscription(const TileSet& others) const {
  if (others.ranges() == tiles().ranges()) return {};
  return Error(Errc::invalid_argument, "the subscription has " + std::to_string(others.tiles()) +
                                           " tiles, the placement needs " + std::to_string(tiles().tiles()) +
                                           " (or others): bind with the placement's own subscription");
}

/// What an earlier update left in the streams is over before this one begins.
Status DeviceTarget::open_live(const Until& until) {
  DS_TRY(executor_->finish(until));
  return executor_->enter_engine();
}

Result<TileRows> DeviceTarget::read_tile(const Tile& tile, std::vector<std::byte>& scratch) const {
  const std::uint64_t at = rank(tile);
  scratch.resize(static_cast<std::size_t>(executor_->tile_bytes(at)));
  DS_TRY(executor_->gather_tile(at, scratch.data(), executor_->patient()));
  return TileRows{scratch.data(), row_bytes(tile)};
}

Status DeviceTarget::settle() {
  DS_TRY(executor_->finish(executor_->patient()));
  return executor_->leave_engine();
}

Status DeviceTarget::apply_delta(std::vector<StagedStep> steps, std::span<const std::uint64_t> digests,
                                 Deadline deadline, bool& torn) {
  DS_TRY(executor_->enter_engine());
  log_ = std::make_unique<DeviceLog>(tiles(), *executor_, std::move(steps));
  Status applied = log_->apply(digests, pool(), deadline, torn);
  if (applied.ok()) {
    applied = executor_->leave_engine();
    if (!applied.ok() && !log_->revert(pool(), executor_->patient(), torn).ok()) torn = true;
  }
  if (!applied.ok()) log_.reset();
  return applied;
}

Status DeviceTarget::revert_delta() {
  bool torn = false;
  kept_whole_ = true;
  DS_TRY(executor_->enter_engine());
  kept_whole_ = false;
  DS_TRY(log_->revert(pool(), executor_->patient(), torn));
  return executor_->leave_engine();
}

Status DeviceTarget::open_staging(const Until& until) {
  if (staging_) return {};
  std::uint64_t bytes = 0;
  staged_at_.clear();
  staged_at_.reserve(static_cast<std::size_t>(tiles().tiles()));
  for (std::uint64_t i = 0; i < tiles().tiles(); ++i) {
    staged_at_.push_back(bytes);
    bytes += (executor_->tile_bytes(i) + kStagedTileAlignment - 1) / kStagedTileAlignment * kStagedTileAlignment;
  }
  auto memory = HostMemory::map(bytes, pool(), until);
  if (!memory.ok()) {
    close_staging();
    return std::move(memory).error();
  }
  staging_ = *std::move(memory);
  spdlog::info("device_target stages_update bytes={}", bytes);
  return {};
}

void DeviceTarget::close_staging() noexcept {
  staging_.release();
  staged_at_ = {};
}

/// The tile's old elements are written back if its new ones cannot be.
Status DeviceTarget::exchange_tile(std::uint64_t rank, std::atomic<bool>& torn) {
  std::vector<std::byte> live(static_cast<std::size_t>(executor_->tile_bytes(rank)));
  DS_TRY(executor_->gather_tile(rank, live.data(), executor_->patient()));
  std::byte* const aside = staging_.span().data() + staged_at_[static_cast<std::size_t>(rank)];
  const std::uint64_t stride = live.size() / layout_of().tile(tiles().nth(rank)).rect.rows;
  Status written = executor_->scatter_tile(rank, aside, stride, executor_->patient());
  if (written.ok()) {
    std::copy(live.begin(), live.end(), aside);
    return {};
  }
  if (!executor_->scatter_tile(rank, live.data(), stride, executor_->patient()).ok()) torn = true;
  return written;
}

/// Those that are not yet (forth), or that are (back).
Status DeviceTarget::exchange_tiles(std::vector<std::uint8_t>& exchanged, bool forth, std::atomic<bool>& torn) {
  const std::uint64_t items = (tiles().tiles() + kTilesPerItem - 1) / kTilesPerItem;
  return run_all(pool(), items, [&](std::uint64_t item, unsigned) -> Status {
    const std::uint64_t end = std::min((item + 1) * kTilesPerItem, tiles().tiles());
    for (std::uint64_t i = item * kTilesPerItem; i < end; ++i) {
      if ((exchanged[i] != 0) == forth) continue;
      DS_TRY(exchange_tile(i, torn));
      exchanged[i] = forth ? 1 : 0;
    }
    return {};
  });
}

Status DeviceTarget::exchange_staging() {
  std::vector<std::uint8_t> exchanged(static_cast<std::size_t>(tiles().tiles()), 0);
  std::atomic<bool> torn{false};
  Status done = executor_->enter_engine();
  if (done.ok()) done = exchange_tiles(exchanged, true, torn);
  if (done.ok()) done = executor_->finish(executor_->patient());
  if (done.ok()) done = executor_->leave_engine();
  if (done.ok()) return {};
  if (!exchange_tiles(exchanged, false, torn).ok() || !executor_->finish(executor_->patient()).ok()) torn = true;
  kept_whole_ = !torn;
  return done;
}

Status DeviceTarget::resolve(std::span<TileChanges> changes) const {
  std::vector<std::uint64_t> ranks;
  ranks.reserve(changes.size());
  for (const TileChanges& of : changes) ranks.push_back(tiles().rank(of.tile).value());
  return executor_->resolve(changes, ranks, executor_->patient());
}

Status DeviceTarget::live_digests(std::span<const std::uint64_t> tiles, std::span<std::uint64_t> digests,
                                  const Until& until) {
  std::vector<std::uint64_t> ranks;
  ranks.reserve(tiles.size());
  for (const std::uint64_t tile : tiles) ranks.push_back(this->tiles().rank(tile).value());
  return executor_->digests(ranks, digests, until);
}

Result<std::vector<WrongCopy>> DeviceTarget::wrong_copies(std::span<const std::uint64_t> tiles, const Until& until) {
  if (!copies_) {
    DS_ASSIGN(copies_, CopyCheck::make(executor_->placement(), open_copies_));
  }
  return copies_->find(*this, tiles, until);
}

}  // namespace

Result<TargetPtr> make_device_target_on(PlacementPtr placement, std::vector<DeviceExecutor::Source> sources,
                                        const DeviceTargetOptions& options) {
  for (const EngineStream& engine : options.engine_streams) {
    const auto source = std::find_if(sources.begin(), sources.end(),
                                     [&](const auto& candidate) { return candidate.ordinal == engine.device; });
    if (source == sources.end() || source->engine != nullptr) {
      return Error(Errc::invalid_argument, "an engine's stream of cuda:" + std::to_string(engine.device) +
                                               ", which the placement does not use, or a second one");
    }
    DS_ASSIGN(source->engine, source->device->adopt_stream({engine.stream}));
  }
  std::vector<CopyDevice> devices;
  for (const auto& source : sources) devices.push_back({source.ordinal, source.device});
  auto executor =
      DeviceExecutor::make(std::move(placement), std::move(sources), options.staging_bytes, options.patience);
  if (!executor.ok()) return std::move(executor).error().with_context("device target");
  return TargetPtr(
      new DeviceTarget(*std::move(executor), options.live, copies_on_devices(std::move(devices), options.patience)));
}

Result<TargetPtr> make_device_target(PlacementPtr placement, const DeviceTargetOptions& options) {
  std::vector<DeviceExecutor::Source> sources;
  for (const LiveMemory& memory : placement->memories()) {
    const std::int32_t ordinal = memory.device.ordinal;
    const auto same = [&](const auto& source) { return source.ordinal == ordinal; };
    if (memory.device.is_host() || std::any_of(sources.begin(), sources.end(), same)) continue;
    auto device = gpu::open_cuda_device(ordinal);
    if (!device.ok()) return std::move(device).error().with_context("device target");
    DeviceExecutor::Source source;
    source.ordinal = ordinal;
    source.own = *std::move(device);
    source.device = source.own.get();
    sources.push_back(std::move(source));
  }
  return make_device_target_on(std::move(placement), std::move(sources), options);
}

}  // namespace deltasync
