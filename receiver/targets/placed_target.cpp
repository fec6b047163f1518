// Which target keeps versions in live memory: on the host or on devices, with a shadow or without.
#include <algorithm>
#include <utility>

#include "receiver/targets/device/device_target.hpp"
#include "receiver/targets/placed/host_placed_target.hpp"
#include "receiver/targets/shadow/shadowed_target.hpp"

namespace deltasync {

Result<std::unique_ptr<Target>> make_placed_target(std::shared_ptr<const Placement> placement,
                                                   const PlacedTargetOptions& options) {
  const auto is_host = [](const LiveMemory& memory) { return memory.device.is_host(); };
  const bool on_host = std::ranges::all_of(placement->memories(), is_host);
  DS_ASSIGN(std::unique_ptr<Target> live, on_host ? make_host_placed_target(std::move(placement), options)
                                                  : make_device_target(std::move(placement), options));
  if (!options.shadow) return live;
  return make_shadowed_target(std::move(live), *options.shadow);
}

}  // namespace deltasync
