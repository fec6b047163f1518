// How the copies of elements are read: on the host through a HostExecutor, on devices through a DeviceExecutor.
#include <utility>

#include "format/tiling.hpp"
#include "placement/host_executor.hpp"
#include "placement/regions.hpp"
#include "receiver/targets/copy_check.hpp"
#include "receiver/targets/device/device_executor.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync {
namespace {

class HostReader final : public CopyCheck::Reader {
 public:
  HostReader(placement::HostExecutor executor, ThreadPool& pool) : executor_(std::move(executor)), pool_(pool) {}

  Status digests(std::span<const std::uint64_t> ranks, std::span<std::uint64_t> out,
                 const CallContext& until) override {
    std::vector<std::vector<std::byte>> scratch(pool_.size());
    return run_all(pool_, ranks.size(), until, "reading copies of tiles", [&](std::uint64_t i, unsigned worker) {
      out[i] = digest(ranks[i], scratch[worker]);
      return Status();
    });
  }
  Status gather(std::uint64_t rank, std::vector<std::byte>& to, const CallContext& /*it waits for nobody*/) override {
    to.resize(static_cast<std::size_t>(executor_.tile_bytes(rank)));
    executor_.gather_tile(rank, to.data());
    return {};
  }

 private:
  std::uint64_t digest(std::uint64_t rank, std::vector<std::byte>& scratch) const {
    const Placement& placement = executor_.placement();
    const Tile tile = tile_of(*placement.layout(), parts_of(placement).tiles.nth(rank));
    if (const auto rows = executor_.read_rows_of(rank)) {
      return digest_of_rows(*placement.layout(), tile, {rows->first, static_cast<std::size_t>(rows->row_stride)});
    }
    scratch.resize(static_cast<std::size_t>(executor_.tile_bytes(rank)));
    executor_.gather_tile(rank, scratch.data());
    return digest_of_rows(*placement.layout(), tile,
                          {scratch.data(), scratch.size() / static_cast<std::size_t>(tile.rect.rows)});
  }

  placement::HostExecutor executor_;
  ThreadPool& pool_;
};

class DeviceReader final : public CopyCheck::Reader {
 public:
  explicit DeviceReader(std::unique_ptr<DeviceExecutor> executor) : executor_(std::move(executor)) {}

  Status digests(std::span<const std::uint64_t> ranks, std::span<std::uint64_t> out,
                 const CallContext& until) override {
    return executor_->digests(ranks, out, until);
  }
  Status gather(std::uint64_t rank, std::vector<std::byte>& to, const CallContext& until) override {
    to.resize(static_cast<std::size_t>(executor_->tile_bytes(rank)));
    return executor_->gather_tile(rank, to.data(), until);
  }
  Status finish(const CallContext& until) override { return executor_->finish_all(until); }

 private:
  const std::unique_ptr<DeviceExecutor> executor_;
};

}  // namespace

CopyCheck::Open copies_on_host(ThreadPool& pool) {
  return [&pool](const std::shared_ptr<const Placement>& layer,
                 const CallContext& /*it waits for nobody*/) -> Result<std::unique_ptr<CopyCheck::Reader>> {
    DS_ASSIGN(auto executor, placement::HostExecutor::make(layer));
    return std::unique_ptr<CopyCheck::Reader>(std::make_unique<HostReader>(std::move(executor), pool));
  };
}

CopyCheck::Open copies_on_devices(std::vector<CopyDevice> devices, std::chrono::nanoseconds device_timeout) {
  return [devices = std::move(devices), device_timeout](
             const std::shared_ptr<const Placement>& layer,
             const CallContext& until) -> Result<std::unique_ptr<CopyCheck::Reader>> {
    std::vector<DeviceExecutor::PlacedDevice> sources;
    for (const CopyDevice& of : devices) {
      DeviceExecutor::PlacedDevice source;
      source.ordinal = of.ordinal;
      source.device = of.device;
      sources.push_back(std::move(source));
    }
    auto executor = DeviceExecutor::make(layer, std::move(sources),
                                         {/*staging_bytes=*/0, /*changes_bytes=*/0, device_timeout}, until);
    if (!executor.ok()) return std::move(executor).error().with_context("looking at copies of tiles");
    return std::unique_ptr<CopyCheck::Reader>(std::make_unique<DeviceReader>(*std::move(executor)));
  };
}

}  // namespace deltasync
