// The device target over any devices: what make_device_target() makes over CUDA's.
#pragma once

#include <string>

#include "deltasync/device_target.hpp"
#include "receiver/device_executor.hpp"

namespace deltasync {

/// `sources` and `register_bytes` as for DeviceExecutor::make.
Result<TargetPtr> make_device_target_on(PlacementPtr placement, std::vector<DeviceExecutor::PlacedDevice> sources,
                                        const DeviceTargetOptions& options,
                                        std::uint64_t register_bytes = DeviceExecutor::kRegisterBytes);

}  // namespace deltasync
