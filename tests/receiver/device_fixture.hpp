// A target on a device, with a trainer: played on the host, or (DELTASYNC_TEST_CUDA) a real one, without which the
// tests are skipped.
#pragma once

#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "gpu/cuda_device.hpp"
#include "gpu/fake_device.hpp"
#include "receiver/targets/device/device_target.hpp"
#include "receiver/targets/verify.hpp"
#include "tests/receiver/device_place.hpp"
#include "tests/receiver/trainer_model.hpp"

namespace deltasync::test {

inline std::vector<TensorSpec> few_specs() {
  std::vector<TensorSpec> specs = sample_specs();
  std::erase_if(specs, [](const TensorSpec& spec) { return spec.name == "wide.row" || spec.name == "ffn.down"; });
  TensorSpec& embed = specs.front();
  embed.shape = {200, 96};
  embed.row_cuts = {30, 100};
  return specs;
}

inline constexpr std::uint64_t kStagingBytes = std::uint64_t{2} << 20;

/// Of the cases that random placements repeat.
#ifdef DELTASYNC_SANITIZED
inline constexpr std::uint64_t kDeviceSeeds = 2;
#else
inline constexpr std::uint64_t kDeviceSeeds = 4;
#endif

class DeviceTarget : public testing::TestWithParam<std::uint64_t> {
 protected:
  void SetUp() override { start({}); }
  void TearDown() override { target_.reset(); }

  void start(PlacedTargetOptions options, bool engine_stream = false,
             RandomPlan::Ignore ignore = RandomPlan::Ignore::parts_of_tiles) {
    target_.reset();
    engine_.reset();
    DeviceEngine::Devices devices;
    ASSERT_NO_FATAL_FAILURE(open_device(devices));
    if (IsSkipped()) return;
    engine_.emplace(*trainer_->layout(), GetParam(), ignore, std::move(devices), false);
    if (fake_ != nullptr) allocations_before_ = fake_->counts().allocations;
    if (options.staging_bytes > kStagingBytes) options.staging_bytes = kStagingBytes;
    if (engine_stream) {
      stream_ = fake_->engine_stream();
      options.engine_streams.emplace(0, stream_.raw);
    }
    auto target = engine_->make(trainer_->layout(), options);
    ASSERT_TRUE(target.ok()) << target.error().to_string();
    target_ = *std::move(target);
    ASSERT_TRUE(target_->open(pool_, in_time()).ok());
  }
  void open_device(DeviceEngine::Devices& devices) {
#ifdef DELTASYNC_TEST_CUDA
    auto device = gpu::open_cuda_device(0, gpu::Use::kernels);
    if (!device.ok() && device.error().code() == Errc::unsupported) GTEST_SKIP() << device.error().to_string();
    ASSERT_TRUE(device.ok()) << device.error().to_string();
    devices.push_back(*std::move(device));
#else
    fake_options_.seed = GetParam();
    auto device = std::make_unique<gpu::FakeDevice>(fake_options_);
    fake_ = device.get();
    devices.push_back(std::move(device));
#endif
  }
  /// Live memory, past the target.
  std::vector<std::byte> peek(const std::byte* at, std::uint64_t bytes) {
    return Work(engine_->device()).down<std::byte>(at, static_cast<std::size_t>(bytes));
  }
  void poke(std::byte* at, std::span<const std::byte> bytes) {
    Work(engine_->device()).to(at, bytes);
  }
  testing::AssertionResult holds(const Reference& reference) {
    const TargetState* const state = target_->committed();
    if (state == nullptr || !(state->version == reference.state.version)) {
      return testing::AssertionFailure() << "another version, or none";
    }
    const std::string differences = engine_->differences(*trainer_->layout(), reference.half);
    if (!differences.empty()) return testing::AssertionFailure() << differences;
    return testing::AssertionSuccess();
  }
  gpu::FakeDevice::Counts counts() const {
    return fake_ == nullptr ? gpu::FakeDevice::Counts() : fake_->counts();
  }
  /// With decoded changes of some frames.
  std::vector<StagedStep> resolved_step(const Reference& before, const Reference& after, std::uint64_t budget_bytes) {
    std::vector<StagedStep> steps;
    steps.push_back(trainer_->delta(before, after));
    ResolvedBudget budget(budget_bytes);
    std::vector<std::uint64_t> digests = before.state.digests;
    for (StagedFrame& frame : steps[0].frames) {
      const Status status = verify_frame(*target_, frame, before.state.digests, digests, budget);
      EXPECT_TRUE(status.ok()) << status.error().to_string();
    }
    return steps;
  }
  /// On the device wholly, so that its changes can be kept there.
  void start_whole(PlacedTargetOptions options = {}) {
    start(std::move(options), false, RandomPlan::Ignore::nothing);
  }
  /// How many of a step's tiles have their changes on the device.
  static std::uint64_t kept(const std::vector<StagedStep>& steps) {
    std::uint64_t tiles = 0;
    for (const StagedFrame& frame : steps[0].frames) {
      for (const auto& some : frame.kept) tiles += some->tiles.size();
    }
    return tiles;
  }
  static std::uint64_t records(const std::vector<StagedStep>& steps) {
    std::uint64_t tiles = 0;
    for (const StagedFrame& frame : steps[0].frames) tiles += frame.records.size();
    return tiles;
  }
  static constexpr std::uint64_t kEverything = std::uint64_t{1} << 40;

  ThreadPool pool_{3, "target"};
  std::unique_ptr<TrainerModel> trainer_ = std::make_unique<TrainerModel>(GetParam(), few_specs());
  std::optional<DeviceEngine> engine_;
  gpu::FakeDevice::Options fake_options_;
  gpu::FakeDevice* fake_ = nullptr;  ///< or it is a real one
  gpu::StreamHandle stream_;
  std::uint64_t allocations_before_ = 0;
  std::unique_ptr<Target> target_;
};

}  // namespace deltasync::test
