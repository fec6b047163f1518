// What an engine on emulated devices sees of deltasync: its graphs' captures go on.
#include <gmock/gmock-matchers.h>

#include <future>

#include "tests/gpu/emulator/capture.hpp"
#include "tests/gpu/emulator/gate.hpp"
#include "tests/gpu/emulator/runtime.hpp"
#include "tests/receiver/device_pull_fixture.hpp"

namespace deltasync::emulator {
namespace {

using namespace deltasync::test;
using testing::HasSubstr;

class EmulatedEngine : public DevicePull {
 protected:
  void TearDown() override {
    DevicePull::TearDown();
    EXPECT_EQ(cudaStreamDestroy(own_), cudaSuccess);
    this_thread() = {};
  }
  /// While `captured` is, pulls go on, and commits wait for its end.
  void expect_commits_wait(cudaStream_t captured) {
    EXPECT_EQ(pull_on_devices(), PullMode::full);
    const std::vector<std::byte> before = model_.half;
    step(0.5);
    Captured capture(captured);
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    const Status refused = (*staged)->commit(in_ms(20));
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), Errc::timed_out);
    EXPECT_THAT(refused.error().message(), HasSubstr("waiting for the end of a graph's capture on the engine's stream "
                                                     "on cuda:0 (emulated from PTX)"));
    EXPECT_EQ(differences(before), "");
    staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    std::thread ends([&] { capture.end(); });
    const Status committed = (*staged)->commit(in_ms(60'000));
    ends.join();
    EXPECT_TRUE(committed.ok()) << committed.error().to_string();
    EXPECT_EQ(differences(model_.half), "");
  }

  const cudaStream_t own_ = make_stream(cudaStreamNonBlocking);
};

TEST_F(EmulatedEngine, CommitsWaitForTheEndOfACapture) {
  stream_.raw = own_;
  ASSERT_NO_FATAL_FAILURE(start_on(1, true));
  expect_commits_wait(own_);
}

/// The engine's is the default stream, which a captured one that is not told otherwise would wait for.
TEST_F(EmulatedEngine, CommitsWaitForACaptureThatWaitsForTheDefaultStream) {
  ASSERT_NO_FATAL_FAILURE(start_on(1, true));
  const cudaStream_t blocking = make_stream(cudaStreamDefault);
  expect_commits_wait(blocking);
  EXPECT_EQ(cudaStreamDestroy(blocking), cudaSuccess);
}

/// An engine that computes with its weights in two streams has them as they were until both have come to their end.
TEST_F(EmulatedEngine, CommitsWaitForEachOfItsStreams) {
  const cudaStream_t second = make_stream(cudaStreamNonBlocking);
  PlacedTargetOptions options;
  for (const cudaStream_t stream : {own_, second}) options.engine_streams.emplace(0, stream);
  ASSERT_NO_FATAL_FAILURE(start_on(1, false, options));
  EXPECT_EQ(pull_on_devices(), PullMode::full);
  const std::vector<std::byte> before = model_.half;
  step(0.5);
  for (const cudaStream_t busy : {own_, second}) {
    Gate gate(busy);
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    const Status refused = (*staged)->commit(in_ms(100));
    ASSERT_FALSE(refused.ok());
    EXPECT_THAT(refused.error().message(), HasSubstr("waiting for the engine on cuda:0"));
    EXPECT_EQ(differences(before), "");
    EXPECT_TRUE((*staged)->is_staged());
  }
  EXPECT_EQ(pull_on_devices(), PullMode::delta);
  receiver_.reset();
  EXPECT_EQ(cudaStreamDestroy(second), cudaSuccess);
}

/// Its threads find their own device and their own error after each of their calls.
TEST_F(EmulatedEngine, ItsErrorAndItsDeviceStay) {
  stream_.raw = own_;
  ASSERT_NO_FATAL_FAILURE(start_on(2, true));
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(99), cudaErrorInvalidDevice);
  const auto expect_as_found = [] {
    EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidDevice);
    int device = -1;
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, 1);
  };
  for (const PullMode mode : {PullMode::full, PullMode::delta}) {
    step(0.01);
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    EXPECT_EQ((*staged)->report().mode, mode);
    expect_as_found();
    EXPECT_TRUE((*staged)->commit().ok());
    expect_as_found();
  }
  receiver_.reset();
  expect_as_found();
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

/// What the engine has in its streams takes as long as it likes: our memory comes and goes meanwhile, its own stream or
/// not, and so do targets. Devices without memory pools are no others.
class EmulatedEngineAtWork : public EmulatedEngine, public testing::WithParamInterface<bool> {
 protected:
  void TearDown() override {
    EmulatedEngine::TearDown();
    set_pools(true);
  }
};
INSTANTIATE_TEST_SUITE_P(Pools, EmulatedEngineAtWork, testing::Bool());

TEST_P(EmulatedEngineAtWork, IsNotWaitedFor) {
  set_pools(GetParam());
  ASSERT_NO_FATAL_FAILURE(start_on(1));
  Gate gate(own_);
  auto ends = std::async(std::launch::async, [&] {
    for (int i = 0; i < 10; ++i) {  // what many did not need is given back meanwhile
      pull_on_devices();
      step(i == 0 ? 0.3 : 0.001);
    }
    receiver_.reset();
  });
  EXPECT_EQ(ends.wait_for(std::chrono::minutes(1)), std::future_status::ready) << "it waits for the engine";
  gate.open();
  ends.get();
}

}  // namespace
}  // namespace deltasync::emulator
