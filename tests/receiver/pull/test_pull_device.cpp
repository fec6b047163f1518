// Whole pulls into the weights of a running engine on devices. Compiled twice: for devices that are played on the host,
// and for real ones by make_placed_target() (label gpu), two of them where there are two.
#include <chrono>
#include <stop_token>
#include <thread>

#include "tests/receiver/device_pull_fixture.hpp"

namespace deltasync::test {
namespace {

#ifdef DELTASYNC_TEST_CUDA
constexpr std::uint64_t kActivationBytes = 256u << 20;
#else
constexpr std::uint64_t kActivationBytes = gpu::SumMemory::kBytes;
#endif
/// An engine has so much to do before it comes to its weights.
constexpr int kLayers = 200;

class DevicesPull : public DevicePull, public testing::WithParamInterface<std::int32_t> {};

TEST_P(DevicesPull, FullDeltaAndBack) {
  ASSERT_NO_FATAL_FAILURE(start_on(GetParam()));
  if (IsSkipped()) return;
  EXPECT_EQ(pull_on_devices(), PullMode::full);
  for (const double density : {0.01, 0.3}) {
    step(density);
    EXPECT_EQ(pull_on_devices(), PullMode::delta);
  }
  const std::vector<std::byte> before = model_.half;
  step(0.05);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  ASSERT_TRUE((*staged)->commit().ok());
  EXPECT_EQ(differences(model_.half), "");
  const Status back = (*staged)->rollback();
  ASSERT_TRUE(back.ok()) << back.error().to_string();
  EXPECT_EQ(differences(before), "");
}

/// What the engine's stream has when a commit begins sees the old weights, however late it runs; what it gets
/// afterwards sees the new ones, and nobody waits for that on the host.
TEST_F(DevicePull, CommitsAreInTurnWithTheEnginesWork) {
  ASSERT_NO_FATAL_FAILURE(start_on(1, true));
  if (IsSkipped()) return;
  EXPECT_EQ(pull_on_devices(), PullMode::full);
  gpu::Device& device = engine_->device();
  Work on_device(device);
  const auto old = on_device.down<std::byte>(weights().base, weights().bytes);
  const auto own = device.adopt_stream(stream_);
  ASSERT_TRUE(own.ok()) << own.error().to_string();
  gpu::Stream& stream = **own;
  // An emulated device takes as long for little.
  const bool is_slow = device.name().find("emulated") != std::string::npos;
  const std::uint64_t activation_bytes = is_slow ? gpu::SumMemory::kBytes : kActivationBytes;
  const auto activations = device.allocate(activation_bytes);
  ASSERT_TRUE(activations.ok()) << activations.error().to_string();
  gpu::SumMemory layer{activations->data(), activation_bytes, nullptr};
  layer.sums = on_device.up(std::vector<std::uint64_t>(layer.blocks()));
  on_device.finish();
  const auto seen_before = device.pin(weights().bytes);
  const auto seen_after = device.pin(weights().bytes);
  ASSERT_TRUE(seen_before.ok() && seen_after.ok());

  step(0.5);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  for (int i = 0; i < kLayers; ++i) Work::check(stream.launch(layer));
  Work::check(stream.copy_out(seen_before->data(), weights().base, weights().bytes));
  const Status committed = (*staged)->commit();
  Work::check(stream.copy_out(seen_after->data(), weights().base, weights().bytes));
  const auto event = device.make_event();
  ASSERT_TRUE(event.ok());
  Work::check(stream.record(**event));
  Work::check(gpu::wait(**event, in_ms(60'000), "waiting for the engine"));

  ASSERT_TRUE(committed.ok()) << committed.error().to_string();
  EXPECT_EQ(differences(model_.half), "");
  EXPECT_TRUE(std::equal(old.begin(), old.end(), seen_before->data())) << "the commit came before the engine's work";
  const auto now = on_device.down<std::byte>(weights().base, weights().bytes);
  EXPECT_TRUE(now != old);
  EXPECT_TRUE(std::equal(now.begin(), now.end(), seen_after->data())) << "the engine's work came before the commit";
}

#ifndef DELTASYNC_TEST_CUDA
/// What is put into a stream whose work is being captured as a graph ends the capture.
TEST_F(DevicePull, CommitsWaitForTheEndOfACapture) {
  ASSERT_NO_FATAL_FAILURE(start_on(1, true));
  EXPECT_EQ(pull_on_devices(), PullMode::full);
  const std::vector<std::byte> before = model_.half;
  step(0.5);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  auto& fake = dynamic_cast<gpu::FakeDevice&>(engine_->device());
  fake.capture(stream_, true);
  const Status refused = (*staged)->commit(in_ms(20));
  EXPECT_EQ(refused.error().code(), Errc::timed_out);
  EXPECT_THAT(refused.error().message(), testing::HasSubstr("graph's capture on the engine's stream on cuda:0"));
  EXPECT_FALSE(fake.capture_ended_by_others());
  EXPECT_EQ(differences(before), "");
  EXPECT_TRUE((*staged)->is_staged());
  fake.capture(stream_, false);
  const Status committed = (*staged)->commit();
  EXPECT_TRUE(committed.ok()) << committed.error().to_string();
  EXPECT_FALSE((*staged)->is_staged());
  EXPECT_EQ(differences(model_.half), "");
}

/// A delta, and a full update that is staged.
TEST_F(DevicePull, AnUpdateStaysStagedWhileTheEngineIsBusy) {
  ASSERT_NO_FATAL_FAILURE(start_on(1, true));
  EXPECT_EQ(pull_on_devices(), PullMode::full);
  auto& fake = dynamic_cast<gpu::FakeDevice&>(engine_->device());
  for (const PullMode mode : {PullMode::delta, PullMode::full}) {
    const std::vector<std::byte> before = model_.half;
    step(0.5);
    if (mode == PullMode::full) receiver_->target()->invalidate();
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    ASSERT_EQ((*staged)->report().mode, mode);
    fake.hold(stream_, true);
    fake.engine_work(stream_, [] {});
    EXPECT_EQ((*staged)->commit(in_ms(20)).error().code(), Errc::timed_out);
    CallOptions stopped = in_ms(60'000);
    std::stop_source stop;
    stopped.stop = stop.get_token();
    std::thread stopper([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      stop.request_stop();
    });
    EXPECT_EQ((*staged)->commit(stopped).error().code(), Errc::cancelled);
    stopper.join();
    EXPECT_EQ(differences(before), "");
    EXPECT_TRUE((*staged)->is_staged());
    fake.hold(stream_, false);
    const Status committed = (*staged)->commit();
    EXPECT_TRUE(committed.ok()) << committed.error().to_string();
    EXPECT_EQ(differences(model_.half), "");
  }
}
#endif

/// Of real devices those that are there, but one at least, which says why it is not.
std::int32_t devices_to_test() {
#ifdef DELTASYNC_TEST_CUDA
  const auto count = gpu::cuda_device_count();
  return count.ok() && *count > 1 ? 2 : 1;
#else
  return 2;
#endif
}
INSTANTIATE_TEST_SUITE_P(Devices, DevicesPull, testing::Range(1, devices_to_test() + 1),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace deltasync::test
