// An engine whose weights lie on the host, on a device that is played there, or on both: by a plan over host buffers,
// whose memories are moved to the device. And what somebody else does to its memory.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deltasync/target.hpp"
#include "gpu/fake_device.hpp"
#include "receiver/targets/device/device_target.hpp"
#include "tests/gpu/work.hpp"
#include "tests/placement/plan_fixture.hpp"
#include "tests/support/model.hpp"

namespace deltasync::test {

class AnyEngine {
 public:
  enum class Where : std::uint8_t { host, device, both };

  /// The engine and the plan outlive this.
  AnyEngine(Engine& engine, const PlacementPlan& plan, Where where, std::uint64_t seed)
      : engine_(engine), host_plan_(plan), plan_(plan), where_(where) {
    gpu::FakeDevice::Options fake;
    fake.seed = seed;
    if (where != Where::host) fake_ = std::make_unique<gpu::FakeDevice>(fake);
    live_.resize(plan.memories.size());
    for (std::size_t i = 0; i < live_.size(); ++i) {
      if (where == Where::host || (where == Where::both && i % 2 == 1)) continue;
      live_[i] = *fake_->allocate(plan.memories[i].bytes);
      plan_.memories[i].base = live_[i].data();
      plan_.memories[i].device.ordinal = 0;
      write(i, std::vector<std::byte>(live_[i].bytes(), Engine::kUntouched));
    }
  }

  const PlacementPlan& plan() const { return plan_; }
  const std::shared_ptr<const Placement>& placement() const { return placement_; }
  gpu::FakeDevice* fake() { return fake_.get(); }

  Result<std::unique_ptr<Target>> make(const LayoutPtr& layout, bool live = false) {
    DS_ASSIGN(placement_, Placement::build(layout, plan_));
    if (where_ == Where::host) return make_placed_target(placement_, {.live = live});
    std::vector<DeviceExecutor::PlacedDevice> sources(1);
    sources[0].device = fake_.get();
    PlacedTargetOptions options;
    options.live = live;
    options.staging_bytes = staging_bytes;
    options.device_timeout = device_timeout;
    return make_device_target_on(placement_, std::move(sources), options, register_bytes);
  }
  std::chrono::nanoseconds device_timeout = std::chrono::seconds(30);
  std::uint64_t staging_bytes = std::uint64_t{1} << 20;
  std::uint64_t register_bytes = DeviceExecutor::kRegisterBytes;

  void flip(std::byte* at, unsigned bit) {
    const std::size_t i = memory_of(at);
    std::byte byte{};
    if (live_[i]) fake_->peek(at, &byte, 1);
    std::byte& there = live_[i] ? byte : *at;
    there ^= static_cast<std::byte>(1u << bit);
    if (live_[i]) fake_->poke(at, &byte, 1);
  }
  /// All of live memory is other bytes now: it was given up, and is back.
  void scramble(std::byte with) {
    for (std::size_t i = 0; i < live_.size(); ++i) write(i, std::vector<std::byte>(plan_.memories[i].bytes, with));
    scrambled_ = with;
  }
  /// What of live memory is not what the plan makes of the half; empty: nothing.
  std::string differences(const Layout& layout, const std::vector<std::byte>& half) {
    const auto before = engine_.contents();
    for (std::size_t i = 0; i < plan_.memories.size(); ++i) {
      std::memset(engine_.base(i), static_cast<int>(scrambled_), plan_.memories[i].bytes);
    }
    write_by_plan(layout, host_plan_, half);
    const auto placed = engine_.contents();
    engine_.restore(before);
    for (std::size_t i = 0; i < live_.size(); ++i) {
      const auto* const expected = reinterpret_cast<const std::byte*>(placed[i].data()) + Engine::kGuardBytes;
      const std::vector<std::byte> bytes = read(i);
      if (!same_bytes(bytes, {expected, bytes.size()})) return plan_.memories[i].name + " differs";
    }
    return {};
  }
  std::vector<std::byte> read(std::size_t memory) {
    std::vector<std::byte> bytes(plan_.memories[memory].bytes);
    if (live_[memory]) {
      fake_->peek(live_[memory].data(), bytes.data(), bytes.size());
    } else {
      std::memcpy(bytes.data(), plan_.memories[memory].base, bytes.size());
    }
    return bytes;
  }
  std::size_t memory_of(const std::byte* at) const {
    for (std::size_t i = 0; i < plan_.memories.size(); ++i) {
      const LiveMemory& memory = plan_.memories[i];
      if (at >= memory.base && at < memory.base + memory.bytes) return i;
    }
    return plan_.memories.size();
  }

 private:
  void write(std::size_t memory, const std::vector<std::byte>& bytes) {
    if (live_[memory]) {
      fake_->poke(live_[memory].data(), bytes.data(), bytes.size());
    } else {
      std::memcpy(plan_.memories[memory].base, bytes.data(), bytes.size());
    }
  }

  Engine& engine_;
  const PlacementPlan host_plan_;
  PlacementPlan plan_;
  const Where where_;
  std::unique_ptr<gpu::FakeDevice> fake_;  ///< outlives what is on it
  std::vector<gpu::Memory> live_;          ///< empty: on the host, in engine_
  std::shared_ptr<const Placement> placement_;
  std::byte scrambled_ = Engine::kUntouched;
};

inline std::string name_of(AnyEngine::Where where) {
  return where == AnyEngine::Where::host ? "Host" : where == AnyEngine::Where::device ? "Device" : "Both";
}

/// A tied weight, transposed where it is a copy; fused parameters, a replica of a part of one; a vector.
struct TiedEngine {
  static std::vector<TensorSpec> specs() {
    return {{"tied", Dtype::bf16, {300, 512}, {}, {}},
            {"gate", Dtype::bf16, {128, 512}, {}, {}},
            {"up", Dtype::bf16, {128, 512}, {}, {}},
            {"norm", Dtype::f32, {777}, {}, {}}};
  }
  TiedEngine() {
    plan.memories = {engine.add("embed", 300 * 1024), engine.add("head", 300 * 1024), engine.add("fused", 256 * 1024),
                     engine.add("replica", 40 * 1024), engine.add("norms", 777 * 4)};
    plan.slices = {{"tied", {0, 0, 300, 512}, 0, 0, 1024, 2}, {"tied", {0, 0, 300, 512}, 1, 0, 2, 600},
                   {"gate", {0, 0, 128, 512}, 2, 0, 1024, 2}, {"up", {0, 0, 128, 512}, 2, 128 * 1024, 1024, 2},
                   {"gate", {10, 0, 40, 512}, 3, 0, 1024, 2}, {"norm", {0, 0, 1, 777}, 4, 0, 777 * 4, 4}};
  }
  Engine engine;
  PlacementPlan plan;
};

}  // namespace deltasync::test
