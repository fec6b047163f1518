// A version in the live memory of an engine on devices: each element where a placement has it, and what has no place in
// the executor's rest, on the host. Staging is in host memory, tile behind tile.
//
// A device can fail at any call. What failed is put back; where that fails too, live memory has no version any more.
#include "receiver/targets/device/device_target.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "base/log.hpp"
#include "format/tiling.hpp"
#include "gpu/cuda_device.hpp"
#include "placement/regions.hpp"
#include "receiver/targets/copy_check.hpp"
#include "receiver/targets/device/device_log.hpp"
#include "receiver/targets/memory_target.hpp"
#include "receiver/targets/staged_tiles.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync {
namespace {

class DeviceTarget final : public MemoryTarget,
                           public CanReadCopies,
                           public CanResolve,
                           public CanBorrow,
                           public WaitsForDevices {
 public:
  DeviceTarget(std::unique_ptr<DeviceExecutor> executor, bool live, CopyCheck::Open open_copies)
      : MemoryTarget("device_target", executor->placement().layout(), parts_of(executor->placement()).tiles, live),
        executor_(std::move(executor)),
        open_copies_(std::move(open_copies)) {}

  TargetCapabilities capabilities() override {
    TargetCapabilities can = MemoryTarget::capabilities();
    can.in_live_memory = true;
    can.placement = &executor_->placement();
    can.copies = this;
    can.resolve = this;
    can.borrow = this;
    can.devices = this;
    return can;
  }
  Status live_digests(std::span<const std::uint64_t> tiles, std::span<std::uint64_t> digests,
                      const CallContext& until) override;
  Status prepare_copies(const CallContext& until) override;
  Result<std::vector<WrongCopy>> wrong_copies(std::span<const std::uint64_t> tiles, const CallContext& until) override;
  Result<std::unique_ptr<KeptChanges>> resolve(std::span<TileChanges> changes) const override;
  void begin_pull(const CallContext& until) override;
  void end_pull() noexcept override { pull_.reset(); }
  Status wait_for_engine(const CallContext& until) override { return executor_->enter_engine(until); }
  Status finish_live(const CallContext& until) override;
  Result<std::unique_ptr<RegisteredHostMemory>> lend(std::span<std::byte> memory, std::shared_ptr<const void> keeper,
                                                     const CallContext& until) override {
    return executor_->lend(memory, keeper, until);
  }
  Status put_lent(RegisteredHostMemory& memory, std::uint64_t first, std::uint64_t end, const std::byte* rows) override;

 private:
  Status check_subscription(const TileSet& asked) const override { return check_placed_tiles(tiles(), asked); }
  Status open_memory(const CallContext& /*nothing is here to verify*/) override {
    log::info("device_target stages bytes={} keeps_rest bytes={} keeps_changes bytes_max={}",
              executor_->staging_bytes(), executor_->placement().rest_bytes(), executor_->changes_bytes_max());
    return {};
  }
  Status open_live(const CallContext& until) override;
  Result<TileRows> read_tile(const Tile& tile, std::vector<std::byte>& scratch) const override;
  Result<TileRows> open_tile(const Tile& tile, std::vector<std::byte>& scratch) override {
    return read_tile(tile, scratch);
  }
  Status put(const Tile& tile, const TileRows& rows) override {
    return executor_->put_tile(rank(tile), rows.first, rows.row_stride, patient());
  }
  Status settle_full(const CallContext& until) override;
  Status apply_delta(std::vector<StagedStep> steps, std::span<const std::uint64_t> digests, Deadline deadline,
                     bool& torn) override;
  Status revert_delta() override;
  void forget_delta() noexcept override { log_.reset(); }
  bool kept_whole() const noexcept override { return kept_whole_; }

  Status open_staging(const CallContext& until) override;
  void close_staging() noexcept override { staging_.close(); }
  TileRows staged_tile(const Tile& tile) const override { return {staging_.tile(rank(tile)), row_bytes(tile)}; }
  Status exchange_staging(const CallContext& until) override;
  std::uint64_t staging_bytes() const override { return staging_.bytes(); }

  /// Among the placement's tiles. Others are refused before they come here.
  std::uint64_t rank(const Tile& tile) const { return tiles().rank(tile.index).value(); }
  /// For calls of a pull, if there is one.
  CallContext patient() const { return pull_ ? executor_->patient(*pull_) : executor_->patient(); }

  const std::unique_ptr<DeviceExecutor> executor_;
  std::unique_ptr<DeviceLog> log_;  ///< of the last delta, as long as it can be rolled back
  bool kept_whole_ = false;
  std::optional<CallContext> pull_;  ///< that is under way
  StagedTiles staging_;
  const CopyCheck::Open open_copies_;
  std::optional<CopyCheck> copies_;  ///< once it is prepared; ends before the executor's devices
};

/// What an earlier update left in the streams is over before this one begins.
Status DeviceTarget::open_live(const CallContext& until) {
  DS_TRY(executor_->finish(until));
  return executor_->enter_engine(until);
}

Result<TileRows> DeviceTarget::read_tile(const Tile& tile, std::vector<std::byte>& scratch) const {
  const std::uint64_t at = rank(tile);
  scratch.resize(static_cast<std::size_t>(executor_->tile_bytes(at)));
  DS_TRY(executor_->gather_tile(at, scratch.data(), patient()));
  return TileRows{scratch.data(), row_bytes(tile)};
}

Status DeviceTarget::put_lent(RegisteredHostMemory& memory, std::uint64_t first, std::uint64_t end,
                              const std::byte* rows) {
  if (full() == Full::closed) return {};
  if (full() == Full::staged) return Error(Errc::internal, "lent tiles for a staged update");
  return executor_->put_lent(memory, first, end, rows, patient());
}

Status DeviceTarget::settle_full(const CallContext& until) {
  DS_TRY(executor_->send_tiles(pull_ ? pull_->earlier(until.deadline()) : until));
  return executor_->leave_engine();
}

Status DeviceTarget::apply_delta(std::vector<StagedStep> steps, std::span<const std::uint64_t> digests,
                                 Deadline deadline, bool& torn) {
  DS_TRY(executor_->enter_engine(deadline));
  log_ = std::make_unique<DeviceLog>(tiles(), *executor_, std::move(steps));
  Status applied = log_->apply(digests, pool(), deadline, torn);
  if (applied.ok()) {
    applied = executor_->leave_engine();
    if (!applied.ok() && !log_->revert(pool(), executor_->patient(with_grace(deadline)), torn).ok()) torn = true;
  }
  if (!applied.ok()) log_.reset();
  return applied;
}

Status DeviceTarget::revert_delta() {
  bool torn = false;
  kept_whole_ = true;
  DS_TRY(executor_->enter_engine(executor_->patient()));
  kept_whole_ = false;
  DS_TRY(log_->revert(pool(), executor_->patient(), torn));
  return executor_->leave_engine();
}

Status DeviceTarget::open_staging(const CallContext& until) {
  if (staging_) return {};
  const auto bytes_of = [&](std::uint64_t rank) { return executor_->tile_bytes(rank); };
  DS_TRY(staging_.open(tiles().tiles(), bytes_of, pool(), until));
  log::info("device_target stages_update bytes={}", staging_.bytes());
  return {};
}

Status DeviceTarget::exchange_staging(const CallContext& until) {
  const auto aside_of = [&](std::uint64_t rank) { return staging_.tile(rank); };
  std::atomic<bool> torn{false};
  const auto exchange = [&](std::uint64_t group, unsigned, const CallContext& end) {
    return executor_->exchange_group(static_cast<std::size_t>(group), aside_of, end, torn);
  };
  const std::uint64_t groups = executor_->groups().size() - 1;
  bool unrepaired = false;
  kept_whole_ = true;
  DS_TRY(executor_->enter_engine(until));
  const Deadline back = with_grace(until.deadline());
  Status done = exchange_all(pool(), groups, until, back, unrepaired, exchange);
  if (done.ok()) {
    done = executor_->leave_engine();
    if (done.ok()) return {};
    // The engine would not wait for it: it cannot stay.
    if (!exchange_all(pool(), groups, back, back, unrepaired, exchange).ok()) unrepaired = true;
  }
  kept_whole_ = !torn && !unrepaired;
  return done;
}

void DeviceTarget::begin_pull(const CallContext& until) {
  pull_ = until;
  executor_->trim_changes(until);
}

Status DeviceTarget::finish_live(const CallContext& until) {
  DS_TRY(executor_->finish_all(until));
  return copies_ ? copies_->finish(until) : Status();
}

Result<std::unique_ptr<KeptChanges>> DeviceTarget::resolve(std::span<TileChanges> changes) const {
  std::vector<std::uint64_t> ranks;
  ranks.reserve(changes.size());
  for (const TileChanges& of : changes) ranks.push_back(tiles().rank(of.tile).value());
  auto kept = std::make_unique<ChangesOnDevices>();
  DS_TRY(executor_->resolve(changes, ranks, *kept, patient()));
  if (kept->tiles.empty()) return std::unique_ptr<KeptChanges>();
  return std::unique_ptr<KeptChanges>(std::move(kept));
}

Status DeviceTarget::live_digests(std::span<const std::uint64_t> tiles, std::span<std::uint64_t> digests,
                                  const CallContext& until) {
  std::vector<std::uint64_t> ranks;
  ranks.reserve(tiles.size());
  for (const std::uint64_t tile : tiles) ranks.push_back(this->tiles().rank(tile).value());
  return executor_->digests(ranks, digests, until);
}

Status DeviceTarget::prepare_copies(const CallContext& until) {
  if (copies_) return {};
  DS_ASSIGN(copies_, CopyCheck::make(executor_->placement(), open_copies_, until));
  return {};
}

Result<std::vector<WrongCopy>> DeviceTarget::wrong_copies(std::span<const std::uint64_t> tiles,
                                                          const CallContext& until) {
  DS_TRY(prepare_copies(until));
  return copies_->find(*this, tiles, until);
}

}  // namespace

Result<std::unique_ptr<Target>> make_device_target_on(std::shared_ptr<const Placement> placement,
                                                      std::vector<DeviceExecutor::PlacedDevice> sources,
                                                      const PlacedTargetOptions& options,
                                                      std::uint64_t register_bytes) {
  for (const auto& [ordinal, stream] : options.engine_streams) {
    const auto source = std::find_if(sources.begin(), sources.end(),
                                     [wanted = ordinal](const auto& candidate) { return candidate.ordinal == wanted; });
    if (source == sources.end()) {
      return Error(Errc::invalid_argument,
                   "an engine's stream of cuda:" + std::to_string(ordinal) + ", which the placement does not use");
    }
    DS_ASSIGN(source->engine.emplace_back(), source->device->adopt_stream({stream}));
  }
  std::vector<CopyDevice> devices;
  devices.reserve(sources.size());
  for (const auto& source : sources) devices.push_back({source.ordinal, source.device});
  auto executor =
      DeviceExecutor::make(std::move(placement), std::move(sources),
                           {options.staging_bytes, options.changes_bytes, options.device_timeout, register_bytes});
  if (!executor.ok()) return std::move(executor).error().with_context("device target");
  return std::unique_ptr<Target>(new DeviceTarget(*std::move(executor), options.live,
                                                  copies_on_devices(std::move(devices), options.device_timeout)));
}

Result<std::unique_ptr<Target>> make_device_target(std::shared_ptr<const Placement> placement,
                                                   const PlacedTargetOptions& options) {
  std::vector<DeviceExecutor::PlacedDevice> sources;
  for (const LiveMemory& memory : placement->memories()) {
    const std::int32_t ordinal = memory.device.ordinal;
    const auto same = [&](const auto& source) { return source.ordinal == ordinal; };
    if (memory.device.is_host() || std::any_of(sources.begin(), sources.end(), same)) continue;
    auto device = gpu::open_cuda_device(ordinal, gpu::Use::kernels);
    if (!device.ok()) return std::move(device).error().with_context("device target");
    DeviceExecutor::PlacedDevice source;
    source.ordinal = ordinal;
    source.own = *std::move(device);
    source.device = source.own.get();
    sources.push_back(std::move(source));
  }
  return make_device_target_on(std::move(placement), std::move(sources), options);
}

}  // namespace deltasync
