// Pulls into the weights of a running engine on devices: played on the host, or (DELTASYNC_TEST_CUDA) real ones by
// make_placed_target(), without which the tests are skipped.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tests/receiver/device_fixture.hpp"
#include "tests/receiver/pull_fixture.hpp"

namespace deltasync::test {

class DevicePull : public PullTest {
 protected:
  static constexpr std::uint64_t kPlan = 3;  ///< of several memories

  void SetUp() override { model_ = make_model(7, few_specs()); }
  void TearDown() override { receiver_.reset(); }  // before the engine's memory
  /// The engine's weights lie on so many devices; with its stream, commits are in turn with what it does there.
  void start_on(std::int32_t count, bool with_stream = false, PlacedTargetOptions options = {}) {
    DeviceEngine::Devices devices;
    for (std::int32_t i = 0; i < count; ++i) {
      ASSERT_NO_FATAL_FAILURE(open(i, devices));
      if (IsSkipped()) return;
    }
    options_.attest_commits = true;
    ASSERT_NO_FATAL_FAILURE(start());
    engine_.emplace(*model_.layout, kPlan, RandomPlan::Ignore::parts_of_tiles, std::move(devices), false);
    ASSERT_GE(engine_->plan().memories.size(), static_cast<std::size_t>(count));
    options.staging_bytes = kStagingBytes;
    if (with_stream) options.engine_streams.emplace(0, stream_.raw);
    auto target = make(options);
    ASSERT_TRUE(target.ok()) << target.error().to_string();
    const Status bound = receiver_->bind(*std::move(target), placement_->slices(), in_ms(60'000));
    ASSERT_TRUE(bound.ok()) << bound.error().to_string();
  }

  PullMode pull_on_devices() {
    auto staged = pull();
    EXPECT_TRUE(staged.ok()) << staged.error().to_string();
    if (!staged) return PullMode::up_to_date;
    const Status committed = (*staged)->commit();
    EXPECT_TRUE(committed.ok()) << committed.error().to_string();
    EXPECT_EQ(differences(agent_->half_of((*staged)->report().version.id)), "");
    return (*staged)->report().mode;
  }
  std::string differences(const std::vector<std::byte>& half) { return engine_->differences(*model_.layout, half); }
  const LiveMemory& weights() const { return engine_->plan().memories.front(); }

  std::optional<DeviceEngine> engine_;
  std::shared_ptr<const Placement> placement_;
  gpu::StreamHandle
      stream_;  ///< the engine's on the first device; of a real one its default stream, if a test has no other

 private:
#ifdef DELTASYNC_TEST_CUDA
  void open(std::int32_t ordinal, DeviceEngine::Devices& devices) {
    auto device = gpu::open_cuda_device(ordinal, gpu::Use::kernels);
    if (!device.ok() && device.error().code() == Errc::unsupported) GTEST_SKIP() << device.error().to_string();
    ASSERT_TRUE(device.ok()) << device.error().to_string();
    devices.push_back(*std::move(device));
  }
  Result<std::unique_ptr<Target>> make(const PlacedTargetOptions& options) {
    DS_ASSIGN(placement_, Placement::build(model_.layout, engine_->plan()));
    return make_placed_target(placement_, options);
  }
#else
  void open(std::int32_t ordinal, DeviceEngine::Devices& devices) {
    gpu::FakeDevice::Options options;
    options.ordinal = ordinal;
    options.lazy = true;
    auto device = std::make_unique<gpu::FakeDevice>(options);
    if (ordinal == 0) stream_ = device->engine_stream();
    devices.push_back(std::move(device));
  }
  Result<std::unique_ptr<Target>> make(const PlacedTargetOptions& options) {
    auto target = engine_->make(model_.layout, options);
    placement_ = engine_->placement();
    return target;
  }
#endif
};

}  // namespace deltasync::test
