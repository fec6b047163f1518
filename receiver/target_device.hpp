// The device target over any devices: what make_device_target() makes over CUDA's.
#pragma once

#include <string>

#include "deltasync/device_target.hpp"
#include "receiver/device_executor.hpp"

namespace deltasync {

/// `sources` as for DeviceExecutor::make.
Result<TargetPtr> make_device_target_on(PlacementPtr placement, std::vector<DeviceExecutor::Source> sources,
                                        const DeviceTargetOptions& options);

}  // namespace deltasync
