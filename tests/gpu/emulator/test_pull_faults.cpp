// Whole pulls into devices that fail in the middle of them: each call to CUDA in turn, once or with all that come after
// it. They end with an error that names the device, or with the new version; what the receiver says that it has is what
// the devices have; nobody waits for good; and the process ends.
#include <cuda_runtime_api.h>
#include <gmock/gmock-matchers.h>

#include "tests/gpu/emulator/runtime.hpp"
#include "tests/receiver/device_pull_fixture.hpp"

namespace deltasync::emulator {
namespace {

using namespace deltasync::test;
using testing::HasSubstr;

/// How many calls in turn, before some are left out.
constexpr std::int64_t kEach = 4;

std::vector<TensorSpec> tiny_specs() {
  return {{"a", Dtype::bf16, {64, 96}, {}, {}}, {"b", Dtype::f32, {33}, {}, {}}, {"c", Dtype::bf16, {40, 64}, {}, {}}};
}

class EmulatedPullFaults : public DevicePull {
 protected:
  void SetUp() override { keep_faults(true); }
  void TearDown() override {
    revive();
    end();
    keep_faults(false);
    this_thread() = {};
  }

  /// Of pulls into so many devices that have a version already, or nothing.
  void fail_each_call(std::int32_t devices, bool has_version) {
    for (const bool stays : {true, false}) {
      for (std::int64_t n = 1;; n += 1 + n / kEach) {
        SCOPED_TRACE("call " + std::to_string(n) + (stays ? " and all that follow" : ""));
        ASSERT_NO_FATAL_FAILURE(begin(devices, has_version));
        bool is_over = false;
        ASSERT_NO_FATAL_FAILURE(fail_one_call(n, stays, is_over));
        if (is_over) break;
      }
    }
  }
  void begin(std::int32_t devices, bool has_version) {
    end();
    model_ = make_model(7, tiny_specs());
    PlacedTargetOptions options;
    options.device_timeout = std::chrono::seconds(5);  // an injected error is no hang
    ASSERT_NO_FATAL_FAILURE(start_on(devices, false, options));
    if (!has_version) return;
    pull_on_devices();
    step(0.2);
  }
  Status pull_and_commit() {
    DS_ASSIGN(const auto staged, pull());
    return staged->commit(in_ms(60'000));
  }

 private:
  void end() {
    receiver_.reset();
    engine_.reset();
    agent_.reset();
  }
  void fail_one_call(std::int64_t n, bool stays, bool& is_over) {
    const auto before = receiver_->current();
    const Version after = agent_->newest_version();
    fail_call(n, cudaErrorIllegalAddress, stays);
    const Status status = pull_and_commit();
    is_over = call_is_due();
    const auto now = receiver_->current();
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    if (!status.ok()) {
      EXPECT_THAT(status.error().message(), HasSubstr(" (emulated from PTX)"));
      EXPECT_FALSE(is_over) << status.error().to_string();
      EXPECT_TRUE(now == before || now == std::nullopt) << status.error().to_string();
    } else {
      EXPECT_EQ(now, after);
    }
    if (stays) receiver_.reset();  // on devices that are dead
    revive();
    if (now) {
      EXPECT_EQ(differences(agent_->half_of(now->id)), "") << (status.ok() ? "" : status.error().to_string());
    }
    if (stays) return;
    const Status again = pull_and_commit();
    ASSERT_TRUE(again.ok()) << again.error().to_string();
    EXPECT_EQ(receiver_->current(), after);
    EXPECT_EQ(differences(model_.half), "");
  }
};

TEST_F(EmulatedPullFaults, OfAFirstVersion) {
  fail_each_call(1, false);
}

TEST_F(EmulatedPullFaults, OfADelta) {
  fail_each_call(1, true);
}

TEST_F(EmulatedPullFaults, OfADeltaOnTwoDevices) {
  fail_each_call(2, true);
}

TEST_F(EmulatedPullFaults, TheProcessEnds) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto end_process = [&] {
    begin(1, true);
    fail_call(20, cudaErrorIllegalAddress, true);
    const Status failed = pull_and_commit();
    receiver_.reset();
    std::exit(failed.ok() ? 1 : 0);
  };
  EXPECT_EXIT(end_process(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace deltasync::emulator
