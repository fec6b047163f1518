// An engine whose parameters lie on devices, and some of them on the host: a random plan, with memory for it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "receiver/targets/device/device_target.hpp"
#include "tests/gpu/work.hpp"
#include "tests/placement/plan_fixture.hpp"
#include "tests/support/model.hpp"

namespace deltasync::test {

class DeviceEngine {
 public:
  using Devices = std::vector<std::unique_ptr<gpu::Device>>;

  /// Memory i is on device i mod n, or every so often (with `some_on_host`) on the host.
  DeviceEngine(const Layout& layout, std::uint64_t seed, RandomPlan::Ignore ignore, Devices devices, bool some_on_host)
      : made_(layout, seed, ignore), devices_(std::move(devices)), plan_(made_.plan) {
    for (std::size_t i = 0; i < plan_.memories.size(); ++i) {
      LiveMemory& memory = plan_.memories[i];
      live_.emplace_back();
      if (some_on_host && (i + seed) % 3 == 0) continue;
      memory.device.ordinal = static_cast<std::int32_t>(i % devices_.size());
      live_.back() = *devices_[i % devices_.size()]->allocate(memory.bytes);
      memory.base = live_.back().data();
      Work(*devices_[i % devices_.size()]).to(memory.base, std::vector<std::byte>(memory.bytes, Engine::kUntouched));
    }
  }

  const PlacementPlan& plan() const { return plan_; }
  Result<std::unique_ptr<Target>> make(const LayoutPtr& layout, const PlacedTargetOptions& options) {
    DS_ASSIGN(placement_, Placement::build(layout, plan_));
    std::vector<DeviceExecutor::PlacedDevice> sources;
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      DeviceExecutor::PlacedDevice source;
      source.ordinal = static_cast<std::int32_t>(i);
      source.device = devices_[i].get();
      sources.push_back(std::move(source));
    }
    return make_device_target_on(placement_, std::move(sources), options);
  }
  gpu::Device& device(std::size_t i = 0) { return *devices_[i]; }
  const std::shared_ptr<const Placement>& placement() const { return placement_; }

  /// What of live memory is not what the plan makes of the half; empty: nothing.
  std::string differences(const Layout& layout, const std::vector<std::byte>& half) {
    const auto placed = placed_contents(made_.engine, layout, made_.plan, half);
    const auto on_host = made_.engine.contents();
    for (std::size_t i = 0; i < live_.size(); ++i) {
      if (!live_[i]) {
        if (on_host[i] != placed[i]) return "memory " + std::to_string(i) + " of the host differs";
        continue;
      }
      const auto bytes = Work(*devices_[i % devices_.size()]).down<std::byte>(live_[i].data(), live_[i].bytes());
      const auto* const expected = reinterpret_cast<const std::byte*>(placed[i].data()) + Engine::kGuardBytes;
      if (!same_bytes(bytes, {expected, bytes.size()})) return "memory " + std::to_string(i) + " differs";
    }
    return {};
  }

 private:
  RandomPlan made_;
  Devices devices_;  ///< outlive what is on them
  PlacementPlan plan_;
  std::shared_ptr<const Placement> placement_;
  std::vector<gpu::Memory> live_;  ///< empty: on the host, in made_.engine
};

}  // namespace deltasync::test
