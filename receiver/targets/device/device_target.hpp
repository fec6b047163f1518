// The target in live memory on devices, over CUDA's or any others.
#pragma once

#include <string>

#include "deltasync/target.hpp"
#include "receiver/targets/device/device_executor.hpp"

namespace deltasync {

/// Over the CUDA devices of the placement; host memories may be among its own.
Result<std::unique_ptr<Target>> make_device_target(std::shared_ptr<const Placement> placement,
                                                   const PlacedTargetOptions& options);
/// `sources` and `register_bytes` as for DeviceExecutor::make.
Result<std::unique_ptr<Target>> make_device_target_on(std::shared_ptr<const Placement> placement,
                                                      std::vector<DeviceExecutor::PlacedDevice> sources,
                                                      const PlacedTargetOptions& options,
                                                      std::uint64_t register_bytes = DeviceExecutor::kRegisterBytes);

}  // namespace deltasync
