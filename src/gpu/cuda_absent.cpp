#include "gpu/cuda_device.hpp"

namespace deltasync::gpu {

Result<std::int32_t> cuda_device_count() {
  return Error(Errc::unsupported, "this build has no CUDA");
}

Result<std::unique_ptr<Device>> open_cuda_device(std::int32_t ordinal, Use /*use*/) {
  return Error(Errc::unsupported, "cuda:" + std::to_string(ordinal) + ": this build has no CUDA");
}

}  // namespace deltasync::gpu
