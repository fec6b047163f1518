// CUDA devices. A build without the CUDA toolkit has these functions too, and no device.
#pragma once

#include "gpu/device.hpp"

namespace deltasync::gpu {

/// How many CUDA devices this process can use. unsupported, saying why, if it is none: no driver, no device, or a build
/// without CUDA.
Result<std::int32_t> cuda_device_count();

/// What a device is opened for.
enum class Use : std::uint8_t {
  copies,   ///< Stream::launch() may wait for all that runs there
  kernels,  ///< they are loaded at once, so that no launch does
};

/// Uses the device's primary context, as engines do, and leaves the calling threads' current device as it is.
/// unsupported without a driver or a device of this ordinal; io where there is no kernel for it.
Result<std::unique_ptr<Device>> open_cuda_device(std::int32_t ordinal, Use use);

}  // namespace deltasync::gpu
