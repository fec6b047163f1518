// The target in live memory that is the host's.
#pragma once

#include <memory>

#include "deltasync/target.hpp"

namespace deltasync {

/// unsupported if a memory is a device's.
Result<std::unique_ptr<Target>> make_host_placed_target(std::shared_ptr<const Placement> placement,
                                                        const PlacedTargetOptions& options);

}  // namespace deltasync
