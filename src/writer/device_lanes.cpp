#include "writer/device_lanes.hpp"

#include <algorithm>

#include "gpu/cuda_device.hpp"

namespace deltasync {
namespace {

class CudaDevices final : public DeviceFinder {
 public:
  Result<gpu::Device*> find(std::int32_t ordinal) override {
    auto& device = devices_[ordinal];
    if (!device) {
      DS_ASSIGN(device, gpu::open_cuda_device(ordinal, gpu::Use::copies));
    }
    return device.get();
  }

 private:
  std::map<std::int32_t, std::unique_ptr<gpu::Device>> devices_;
};

}  // namespace

std::unique_ptr<DeviceFinder> cuda_devices() {
  return std::make_unique<CudaDevices>();
}

Result<DeviceLane*> DeviceLanes::lane(std::int32_t ordinal, shm::Segment& segment, shm::WriterRole& role,
                                      ThreadPool& pool) {
  auto& lane = lanes_[ordinal];
  if (!lane) {
    auto opened = [&]() -> Result<std::unique_ptr<DeviceLane>> {
      DS_ASSIGN(gpu::Device* const device, finder_->find(ordinal));
      return DeviceLane::open({*device, segment, role, pool}, limits_);
    }();
    if (!opened) {
      lanes_.erase(ordinal);
      return std::move(opened).error();
    }
    lane = std::move(opened).value();
  }
  return lane.get();
}

Status DeviceLanes::poll() {
  for (auto& [ordinal, lane] : lanes_) DS_TRY(lane->poll());
  return {};
}

Status DeviceLanes::wait(std::uint64_t ticket, Deadline deadline) {
  for (auto& [ordinal, lane] : lanes_) DS_TRY(lane->wait(ticket, deadline));
  return {};
}

/// All lanes: one that hangs keeps no other's bracket open.
Status DeviceLanes::settle(Deadline deadline) {
  Status first;
  for (auto& [ordinal, lane] : lanes_) {
    Status settled = lane->settle(deadline);
    if (!settled && first) first = std::move(settled);
  }
  return first;
}

bool DeviceLanes::busy() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [](const auto& item) { return item.second->busy(); });
}

}  // namespace deltasync
