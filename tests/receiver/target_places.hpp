// The kinds of target that the conformance suite runs over, each with the place where it keeps its versions.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deltasync/target.hpp"
#include "gpu/cuda_device.hpp"
#include "gpu/fake_device.hpp"
#include "tests/placement/plan_fixture.hpp"
#include "tests/receiver/device_place.hpp"
#include "tests/receiver/hf_fixture.hpp"
#include "tests/receiver/place.hpp"
#include "tests/receiver/remote_memory.hpp"
#include "tests/support/model.hpp"

namespace deltasync::test {

class OwnMemory final : public Place {
 public:
  Result<std::unique_ptr<Target>> make(const LayoutPtr& layout) override { return make_host_target(layout); }
  std::string outside(const Target& target, const std::vector<std::byte>* half) override {
    if (half == nullptr) return {};
    const auto memory = host_target_memory(target);
    return same_bytes(memory, *half) ? "" : "host_target_memory differs";
  }
};

class UserMemory final : public Place {
 public:
  static constexpr std::size_t kGuardBytes = 4096;

  Result<std::unique_ptr<Target>> make(const LayoutPtr& layout) override {
    memory_.assign(layout->half_bytes() + kGuardBytes, std::byte{0xEE});
    return make_host_target(layout, memory_);
  }
  std::string outside(const Target& target, const std::vector<std::byte>* half) override {
    if (host_target_memory(target).data() != memory_.data()) return "host_target_memory is not the user's";
    const std::size_t bytes = memory_.size() - kGuardBytes;
    for (std::size_t i = bytes; i < memory_.size(); ++i) {
      if (memory_[i] != std::byte{0xEE}) return "written behind the half";
    }
    if (half == nullptr) return {};
    return same_bytes(*half, std::span(memory_).first(bytes)) ? "" : "the user's memory differs";
  }

 private:
  std::vector<std::byte> memory_;
};

class Directory final : public Place {
 public:
  Result<std::unique_ptr<Target>> make(const LayoutPtr& layout) override {
    sidecar_ = awkward_sidecar(*layout);
    return make_hf_target(layout, sidecar_, dir_.path() / "out");
  }
  std::string outside(const Target& target, const std::vector<std::byte>* half) override {
    const auto current = dir_.path() / "out" / "current";
    if (half == nullptr) return std::filesystem::exists(current) ? "current exists" : "";
    return compare_directory(current, *target.layout(), sidecar_, *half);
  }

 private:
  TempDir dir_;
  Sidecar sidecar_;
};

/// Memory that is reached by copies, as a device's is.
class FarMemory final : public Place {
 public:
  Result<std::unique_ptr<Target>> make(const LayoutPtr& layout) override {
    remote_ = new RemoteMemory(layout);
    return std::unique_ptr<Target>(remote_);
  }
  std::string outside(const Target& /*target*/, const std::vector<std::byte>* half) override {
    return half == nullptr || remote_->memory() == *half ? "" : "the remote memory differs";
  }

 private:
  RemoteMemory* remote_ = nullptr;
};

/// The live memory of an engine, where every tile has a place: some elements have two, in single tiles some have none.
class EngineMemory final : public Place {
 public:
  explicit EngineMemory(RandomPlan::Ignore ignore) : ignore_(ignore) {}
  Result<std::unique_ptr<Target>> make(const LayoutPtr& layout) override {
    static std::uint64_t seed = 0;
    made_.emplace(*layout, ++seed, ignore_);
    DS_ASSIGN(const std::shared_ptr<const Placement> placement, Placement::build(layout, made_->plan));
    return make_placed_target(placement);
  }
  std::string outside(const Target& target, const std::vector<std::byte>* half) override {
    if (half == nullptr) return {};
    const auto placed = placed_contents(made_->engine, *target.layout(), made_->plan, *half);
    return made_->engine.contents() == placed ? "" : "live memory of the engine differs";
  }

 private:
  const RandomPlan::Ignore ignore_;
  std::optional<RandomPlan> made_;
};

/// The same on devices.
class EngineDevices final : public Place {
 public:
  using Open = std::function<Result<std::unique_ptr<gpu::Device>>(std::int32_t ordinal, std::uint64_t seed)>;
  EngineDevices(RandomPlan::Ignore ignore, std::int32_t devices, bool some_on_host, Open open)
      : ignore_(ignore), devices_(devices), some_on_host_(some_on_host), open_(std::move(open)) {}
  Result<std::unique_ptr<Target>> make(const LayoutPtr& layout) override {
    static std::uint64_t seed = 0;
    ++seed;
    DeviceEngine::Devices devices;
    for (std::int32_t i = 0; i < devices_; ++i) {
      DS_ASSIGN(auto device, open_(i, seed * 10 + static_cast<std::uint64_t>(i)));
      devices.push_back(std::move(device));
    }
    engine_.emplace(*layout, seed, ignore_, std::move(devices), some_on_host_);
    PlacedTargetOptions options;
    options.staging_bytes = std::uint64_t{1} << 20;
    return engine_->make(layout, options);
  }
  std::string outside(const Target& target, const std::vector<std::byte>* half) override {
    return half == nullptr ? "" : engine_->differences(*target.layout(), *half);
  }

 private:
  const RandomPlan::Ignore ignore_;
  const std::int32_t devices_;
  const bool some_on_host_;
  const Open open_;
  std::optional<DeviceEngine> engine_;
};

inline std::unique_ptr<Place> devices(RandomPlan::Ignore ignore, std::int32_t count, bool some_on_host,
                                      EngineDevices::Open open) {
  return std::make_unique<EngineDevices>(ignore, count, some_on_host, std::move(open));
}

inline std::unique_ptr<Place> shadowed(std::unique_ptr<Place> live) {
  return std::make_unique<Shadowed>(std::move(live));
}

#ifdef DELTASYNC_TEST_CUDA
inline Result<std::unique_ptr<gpu::Device>> real_device(std::int32_t ordinal, std::uint64_t /*seed*/) {
  return gpu::open_cuda_device(ordinal, gpu::Use::kernels);
}

inline std::vector<Kind> kinds() {
  return {Kind{"Cuda", [] { return devices(RandomPlan::Ignore::parts_of_tiles, 1, true, real_device); }, false, true},
          Kind{"CudaResolved", [] { return devices(RandomPlan::Ignore::nothing, 1, false, real_device); }, true, true},
          Kind{"CudaShadow", [] { return shadowed(devices(RandomPlan::Ignore::parts_of_tiles, 1, true, real_device)); },
               true, true}};
}
#else
inline Result<std::unique_ptr<gpu::Device>> fake_device(std::int32_t ordinal, std::uint64_t seed) {
  gpu::FakeDevice::Options options;
  options.ordinal = ordinal;
  options.seed = seed;
  return std::unique_ptr<gpu::Device>(std::make_unique<gpu::FakeDevice>(options));
}

inline std::unique_ptr<Place> engine(RandomPlan::Ignore ignore) {
  return std::make_unique<EngineMemory>(ignore);
}

inline std::vector<Kind> kinds() {
  constexpr auto kNothing = RandomPlan::Ignore::nothing;
  constexpr auto kParts = RandomPlan::Ignore::parts_of_tiles;
  std::vector<Kind> all{
      Kind{"OwnMemory", [] { return std::make_unique<OwnMemory>(); }},
      Kind{"UserMemory", [] { return std::make_unique<UserMemory>(); }},
      Kind{"Resolved", [] { return std::make_unique<UserMemory>(); }, true},
      Kind{"Directory", [] { return std::make_unique<Directory>(); }},
      Kind{"Remote", [] { return std::make_unique<FarMemory>(); }},
      Kind{"RemoteResolved", [] { return std::make_unique<FarMemory>(); }, true},
      Kind{"Placed", [] { return engine(kParts); }},
      Kind{"PlacedResolved", [] { return engine(kNothing); }, true},
      Kind{"PlacedShadow", [] { return shadowed(engine(kParts)); }},
      Kind{"PlacedShadowResolved", [] { return shadowed(engine(kNothing)); }, true},
      Kind{"DevicesShadow", [] { return shadowed(devices(kParts, 2, true, fake_device)); }, true, false, true},
      Kind{"Device", [] { return devices(kNothing, 1, false, fake_device); }, false, false, true},
      Kind{"DevicesResolved", [] { return devices(kParts, 2, true, fake_device); }, true, false, true}};
#ifndef DELTASYNC_SANITIZED  // a device that is played on the host is slow, and there these take minutes
  all.push_back({"DeviceResolved", [] { return devices(kNothing, 1, false, fake_device); }, true, false, true});
  all.push_back({"Devices", [] { return devices(kParts, 2, true, fake_device); }, false, false, true});
#endif
  return all;
}
#endif

}  // namespace deltasync::test
