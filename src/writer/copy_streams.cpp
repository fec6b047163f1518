#include "writer/copy_streams.hpp"

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

Result<CopyStream*> CopyStreams::stream_for(std::int32_t ordinal, const std::shared_ptr<shm::Segment>& segment,
                                            shm::WriterRole& role, Copier& copier) {
  auto& copies = copy_streams_[ordinal];
  if (!copies) {
    auto opened = [&]() -> Result<std::unique_ptr<CopyStream>> {
      DS_ASSIGN(gpu::Device* const device, finder_->find(ordinal));
      return CopyStream::open({*device, segment, role, copier}, limits_);
    }();
    if (!opened) {
      copy_streams_.erase(ordinal);
      return std::move(opened).error();
    }
    copies = std::move(opened).value();
  }
  return copies.get();
}

Status CopyStreams::poll() {
  for (auto& [ordinal, copies] : copy_streams_) DS_TRY(copies->poll());
  return {};
}

Status CopyStreams::wait(std::uint64_t ticket, Deadline deadline) {
  for (auto& [ordinal, copies] : copy_streams_) DS_TRY(copies->wait(ticket, deadline));
  return {};
}

/// All streams: one that hangs keeps no other's bracket open.
Status CopyStreams::settle(Deadline deadline) {
  Status first;
  for (auto& [ordinal, copies] : copy_streams_) {
    Status settled = copies->settle(deadline);
    if (!settled && first) first = std::move(settled);
  }
  return first;
}

bool CopyStreams::busy() const {
  return std::any_of(copy_streams_.begin(), copy_streams_.end(), [](const auto& item) { return item.second->busy(); });
}

}  // namespace deltasync
