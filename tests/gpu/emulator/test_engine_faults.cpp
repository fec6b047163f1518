// A device that fails in the middle of everything: each call of a target's to CUDA fails in turn, once or with all that
// come after it. What is committed is whole; what is not whole is not committed; nobody waits for good; and the calling
// thread finds its own device and no error afterwards.
#include <cuda_runtime_api.h>
#include <gmock/gmock-matchers.h>

#include <functional>

#include "format/tiling.hpp"
#include "tests/gpu/emulator/runtime.hpp"
#include "tests/receiver/device_fixture.hpp"

namespace deltasync::emulator {
namespace {

using namespace deltasync::test;
using testing::HasSubstr;

constexpr std::uint64_t kSeed = 3;
/// What the engine's thread uses meanwhile.
constexpr int kOther = 1;
/// How many calls in turn, before some are left out.
constexpr std::int64_t kEach = 8;

std::vector<TensorSpec> tiny_specs() {
  return {{"a", Dtype::bf16, {64, 96}, {}, {}}, {"b", Dtype::f32, {33}, {}, {}}, {"c", Dtype::bf16, {40, 64}, {}, {}}};
}

PlacedTargetOptions impatient() {
  PlacedTargetOptions options;
  options.device_timeout = std::chrono::seconds(5);  // an injected error is no hang
  options.staging_bytes = 64 << 10;
  return options;
}

/// commit_whole(), where tiles may be refused.
Status try_whole(Target& target, const Reference& reference) {
  DS_TRY(target.begin_full(FullUpdatePolicy::stage, in_time()));
  Status done;
  for (std::uint64_t i = 0; i < target.layout()->tile_count() && done.ok(); ++i) {
    done = put_from_half(target, reference, tile_of(*target.layout(), i));
  }
  if (done.ok()) done = target.commit_full(reference.state, in_time());
  if (!done.ok()) target.discard_full();
  return done;
}

class EmulatedFaults : public DeviceTarget {
 protected:
  void SetUp() override {
    keep_faults(true);
    trainer_ = std::make_unique<TrainerModel>(kSeed, tiny_specs());
  }
  void TearDown() override {
    revive();
    target_.reset();
    engine_.reset();
    keep_faults(false);
    this_thread() = {};
  }

  /// `act` makes `after` of `before` (or nothing), and calls what it is given when its calls may fail.
  using Act = std::function<Status(const std::function<void()>& arm)>;
  void fail_each_call(const Reference* before, const Reference& after, const Act& act) {
    for (const bool stays : {true, false}) {
      for (std::int64_t n = 1;; n += 1 + n / kEach) {
        SCOPED_TRACE("call " + std::to_string(n) + (stays ? " and all that follow" : ""));
        ASSERT_NO_FATAL_FAILURE(start(impatient()));
        if (before != nullptr) {
          ASSERT_TRUE(commit_whole(*target_, *before).ok());
        }
        bool is_whole = false;
        ASSERT_NO_FATAL_FAILURE(fail_one_call(n, stays, before, after, act, is_whole));
        if (is_whole) break;
      }
    }
  }

 private:
  void fail_one_call(std::int64_t n, bool stays, const Reference* before, const Reference& after, const Act& act,
                     bool& is_over) {
    ASSERT_EQ(cudaSetDevice(kOther), cudaSuccess);
    const Status status = act([&] { fail_call(n, cudaErrorIllegalAddress, stays); });
    is_over = call_is_due();
    expect_as_found();
    if (!status.ok()) {
      EXPECT_THAT(status.error().message(), HasSubstr("cuda:0 (emulated from PTX)"));
      EXPECT_FALSE(is_over) << status.error().to_string();
    }
    if (!is_over && stays) {
      const bool is_committed = target_->committed() != nullptr;
      EXPECT_TRUE(is_committed || !status.ok());
      target_.reset();  // on a device that is dead
      expect_as_found();
      revive();
      if (is_committed) {
        ASSERT_EQ(engine_->differences(*trainer_->layout(), (status.ok() ? after : *before).half), "")
            << (status.ok() ? "committed" : status.error().to_string());
      }
      return;
    }
    revive();
    if (target_->committed() != nullptr) {
      ASSERT_TRUE(status.ok() || before != nullptr);
      ASSERT_TRUE(holds(status.ok() ? after : *before)) << (status.ok() ? "committed" : status.error().to_string());
    } else {
      EXPECT_FALSE(status.ok());
    }
    const Status again = commit_whole(*target_, after);
    ASSERT_TRUE(again.ok()) << again.error().to_string();
    ASSERT_TRUE(holds(after));
  }
  static void expect_as_found() {
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    int device = -1;
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, kOther);
  }
};

TEST_P(EmulatedFaults, InAFirstFullUpdate) {
  const Reference first = trainer_->now();
  fail_each_call(nullptr, first, [&](const auto& arm) {
    arm();
    return try_whole(*target_, first);
  });
}

TEST_P(EmulatedFaults, InAStagedFullUpdate) {
  const Reference first = trainer_->now();
  const Reference second = trainer_->step(0.2);
  fail_each_call(&first, second, [&](const auto& arm) {
    arm();
    return try_whole(*target_, second);
  });
}

TEST_P(EmulatedFaults, InADelta) {
  const Reference first = trainer_->now();
  const Reference second = trainer_->step(0.2);
  for (const std::uint64_t budget : {kEverything, std::uint64_t{0}}) {
    fail_each_call(&first, second, [&](const auto& arm) {
      auto steps = resolved_step(first, second, budget);
      arm();
      return target_->commit_delta(std::move(steps), second.state, in_time());
    });
  }
}

TEST_P(EmulatedFaults, InARollback) {
  const Reference first = trainer_->now();
  const Reference second = trainer_->step(0.2);
  fail_each_call(&second, first, [&](const auto& arm) -> Status {
    DS_TRY(commit_whole(*target_, first));
    auto steps = resolved_step(first, second, kEverything);
    DS_TRY(target_->commit_delta(std::move(steps), second.state, in_time()));
    arm();
    return roll_back(*target_);
  });
}

TEST_P(EmulatedFaults, InAttestation) {
  const Reference first = trainer_->now();
  fail_each_call(&first, first, [&](const auto& arm) -> Status {
    std::vector<std::uint64_t> tiles(trainer_->layout()->tile_count());
    for (std::size_t i = 0; i < tiles.size(); ++i) tiles[i] = i;
    std::vector<std::uint64_t> digests(tiles.size());
    arm();
    DS_TRY(target_->capabilities().digests->live_digests(tiles, digests, in_time()));
    EXPECT_EQ(digests, first.state.digests);
    return {};
  });
}

TEST_P(EmulatedFaults, WhenATargetIsMade) {
  for (const bool stays : {true, false}) {
    for (std::int64_t n = 1;; n += 1 + n / kEach) {
      SCOPED_TRACE("call " + std::to_string(n) + (stays ? " and all that follow" : ""));
      ASSERT_NO_FATAL_FAILURE(start(impatient()));
      target_.reset();
      fail_call(n, cudaErrorIllegalAddress, stays);
      const auto target = engine_->make(trainer_->layout(), impatient());
      const bool is_over = call_is_due();
      EXPECT_EQ(target.ok(), is_over);
      if (!target.ok()) {
        EXPECT_THAT(target.error().message(), HasSubstr("cuda:0 (emulated from PTX): cu"));
      }
      EXPECT_EQ(cudaGetLastError(), cudaSuccess);
      revive();
      if (is_over) break;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seed, EmulatedFaults, testing::Values(kSeed));

}  // namespace
}  // namespace deltasync::emulator
