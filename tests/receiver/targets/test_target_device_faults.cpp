// What a target makes of devices that fail half-way, hang, or are busy.
#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "deltasync/receiver.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/attest.hpp"
#include "tests/receiver/device_fixture.hpp"

namespace deltasync::test {
namespace {

using gpu::FakeDevice;
using testing::HasSubstr;
using Call = FakeDevice::Call;

class DeviceFaults : public DeviceTarget {};

/// Many times what staging has room for.
std::vector<TensorSpec> large_specs() {
  return {{"a", Dtype::bf16, {4096, 512}, {}, {}}};
}

/// Each call of a commit and of a rollback fails once: the version before is there, whole, and goes on from there.
TEST_P(DeviceFaults, AFailedCallTakesTheCommitBack) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_->step(0.2);
  for (const std::uint64_t budget : {kEverything, std::uint64_t{0}}) {
    for (const Call call : {Call::copy, Call::launch, Call::allocate}) {
      for (std::uint64_t n = 1;; n += 1 + n / 4) {
        SCOPED_TRACE("call " + std::to_string(static_cast<int>(call)) + " number " + std::to_string(n));
        auto steps = resolved_step(first, second, budget);
        fake_->fail(call, n);
        const Status status = target_->commit_delta(std::move(steps), second.state, in_time());
        ASSERT_EQ(fake_->forget_faults(), status.ok() ? 1u : 0u);
        if (status.ok()) {
          EXPECT_GT(n, call == Call::allocate ? 0u : 1u);
          ASSERT_TRUE(holds(second));
          ASSERT_TRUE(roll_back(*target_).ok());
          ASSERT_TRUE(holds(first));
          break;
        }
        EXPECT_THAT(status.error().message(), HasSubstr(fake_->name()));
        ASSERT_TRUE(holds(first)) << status.error().to_string();
      }
    }
  }
}

TEST_P(DeviceFaults, AFailedCallTakesAStagedFullBack) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_->step(0.9);
  for (const Call call : {Call::copy, Call::launch}) {
    for (std::uint64_t n = 1;; n += 1 + n / 2) {
      ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::stage, in_time()).ok());
      fill_full(*target_, second);
      fake_->fail(call, n);
      const Status status = target_->commit_full(second.state, in_time());
      ASSERT_EQ(fake_->forget_faults(), status.ok() ? 1u : 0u);
      if (status.ok()) {
        EXPECT_GT(n, 1u);
        ASSERT_TRUE(holds(second));
        ASSERT_TRUE(roll_back(*target_).ok());
        ASSERT_TRUE(holds(first));
        break;
      }
      ASSERT_TRUE(holds(first)) << status.error().to_string();
      target_->discard_full();
    }
  }
}

/// Tiles go together: who puts them is told that some did not get there, and the update is not committed.
TEST_P(DeviceFaults, AFirstFullIsWholeOrNothing) {
  trainer_ = std::make_unique<TrainerModel>(GetParam(), large_specs());
  start({});
  const Reference first = trainer_->now();
  for (const Call call : {Call::copy, Call::launch, Call::wait_for}) {
    for (const std::uint64_t n : {1, 3}) {
      SCOPED_TRACE("call " + std::to_string(static_cast<int>(call)) + " number " + std::to_string(n));
      ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::stage, in_time()).ok());
      fake_->fail(call, n);
      int failed = 0;
      for (std::uint64_t i = 0; i < trainer_->layout()->tile_count(); ++i) {
        const Status put = put_from_half(*target_, first, tile_of(*trainer_->layout(), i));
        if (put.ok()) continue;
        ++failed;
        EXPECT_THAT(put.error().message(), HasSubstr(fake_->name()));
        EXPECT_THAT(put.error().message(), HasSubstr(" tiles from tile "));
      }
      EXPECT_GT(failed, 0);
      EXPECT_EQ(fake_->forget_faults(), 0u);
      const Status committed = target_->commit_full(first.state, in_time());
      ASSERT_FALSE(committed.ok());
      EXPECT_THAT(committed.error().message(), HasSubstr(fake_->name()));
      EXPECT_EQ(target_->committed(), nullptr);
      ASSERT_TRUE(commit_whole(*target_, first).ok()) << "the next one has nothing of it";
      ASSERT_TRUE(holds(first));
      ASSERT_TRUE(roll_back(*target_).ok());
    }
  }
}

/// A copy and a launch for many tiles.
TEST_P(DeviceFaults, TilesOfAFullUpdateGoTogether) {
  start_whole();
  const Reference first = trainer_->now();
  const FakeDevice::Counts before = fake_->counts();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  EXPECT_LT(fake_->counts().copies - before.copies, trainer_->layout()->tile_count() / 2);
  EXPECT_LT(fake_->counts().launches - before.launches, trainer_->layout()->tile_count() / 2);
  const FakeDevice::Counts whole = fake_->counts();
  const Reference second = trainer_->step(0.5);
  ASSERT_TRUE(commit_whole(*target_, second).ok());
  EXPECT_LT(fake_->counts().copies - whole.copies, trainer_->layout()->tile_count());
  EXPECT_LT(fake_->counts().launches - whole.launches, trainer_->layout()->tile_count() / 2);
  ASSERT_TRUE(holds(second));
}

/// On a device where nothing happens before somebody waits for it, with as little staging as there may be.
TEST_P(DeviceFaults, StagingIsUsedAgainWhenItsCopyIsOver) {
  fake_options_.lazy = true;
  trainer_ = std::make_unique<TrainerModel>(GetParam(), large_specs());
  PlacedTargetOptions options;
  options.staging_bytes = 1;
  start(options);
  const Reference first = trainer_->now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  ASSERT_TRUE(holds(first));
  const Reference second = trainer_->step(0.3);
  ASSERT_TRUE(commit_whole(*target_, second).ok());
  ASSERT_TRUE(holds(second));
  const Reference third = trainer_->step(0.3);
  for (const std::uint64_t budget : {kEverything, std::uint64_t{0}}) {
    auto steps = resolved_step(second, third, budget);
    ASSERT_TRUE(target_->commit_delta(std::move(steps), third.state, in_time()).ok());
    ASSERT_TRUE(holds(third));
    ASSERT_TRUE(roll_back(*target_).ok());
    ASSERT_TRUE(holds(second));
  }
}

TEST_P(DeviceFaults, WhatCannotBeReadIsNoCorruption) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_->step(0.2);
  StagedStep step = trainer_->delta(first, second);
  ResolvedBudget budget(kEverything);
  std::vector<std::uint64_t> digests = first.state.digests;
  fake_->fail(Call::launch, 1);
  const Status status = verify_frame(*target_, step.frames[0], first.state.digests, digests, budget);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), Errc::io);
  EXPECT_EQ(fake_->forget_faults(), 0u);
  EXPECT_THAT(status.error().message(), HasSubstr(fake_->name()));
  EXPECT_TRUE(verify_frame(*target_, step.frames[0], first.state.digests, digests, budget).ok());
}

/// Decoded changes are resolved where the tiles are: these do not come to the host.
TEST_P(DeviceFaults, TilesAreVerifiedWhereTheyAre) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_->step(0.01);
  const std::uint64_t before = fake_->counts().bytes_copied;
  auto steps = resolved_step(first, second, kEverything);
  EXPECT_LT(fake_->counts().bytes_copied - before, trainer_->layout()->model_bytes() / 2);
  ASSERT_TRUE(target_->commit_delta(std::move(steps), second.state, in_time()).ok());
  ASSERT_TRUE(holds(second));
}

/// Long for a device that is played here, and short for those who wait for one that hangs.
PlacedTargetOptions impatient() {
  PlacedTargetOptions options;
  options.device_timeout = std::chrono::milliseconds(400);
  return options;
}

/// A launch that does not end: nobody knows what is in live memory, so there is no version. A full update brings one,
/// behind whatever still happens in the stream.
TEST_P(DeviceFaults, AStreamThatDoesNotEndLeavesNoTornVersion) {
  start(impatient());
  const Reference first = trainer_->now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_->step(0.2);
  const bool all_at_once = GetParam() % 2 == 0;
  auto steps = resolved_step(first, second, all_at_once ? kEverything : 0);
  fake_->fail(Call::endless_launch, all_at_once ? 1 : 9);
  const Status status = target_->commit_delta(std::move(steps), second.state, in_time());
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), Errc::timed_out) << status.error().to_string();
  EXPECT_EQ(fake_->forget_faults(), 0u);
  EXPECT_EQ(target_->committed(), nullptr);
  EXPECT_EQ(roll_back(*target_).error().code(), Errc::unsupported);
  fake_->hang(false);
  ASSERT_TRUE(fake_->drain());
  const Reference third = trainer_->step(0.2);
  const Status again = commit_whole(*target_, third);
  ASSERT_TRUE(again.ok()) << again.error().to_string();
  EXPECT_TRUE(holds(third));
}

TEST_P(DeviceFaults, AHangingDeviceDoesNotHoldUpTheEnd) {
  start(impatient());
  ASSERT_TRUE(commit_whole(*target_, trainer_->now()).ok());
  fake_->hang(true);
  std::vector<std::byte> scratch;
  EXPECT_EQ(target_->live_tile(tile_of(*trainer_->layout(), 0), scratch).error().code(), Errc::timed_out);
  target_.reset();
  fake_->hang(false);
  fake_->drain();  // what is left may still use its memory
}

/// The engine's own work before a commit sees the old weights, what it begins afterwards the new ones.
TEST_P(DeviceFaults, CommitsStandInTheEnginesStream) {
  start({}, true);
  const Reference first = trainer_->now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_->step(1.0);
  const LiveMemory& memory = engine_->plan().memories[0];
  std::vector<std::vector<std::byte>> seen(3);
  const auto look = [&](std::size_t i) {
    fake_->engine_work(stream_, [&, i] { seen[i].assign(memory.base, memory.base + memory.bytes); });
  };
  auto steps = resolved_step(first, second, 20'000);
  look(0);
  ASSERT_TRUE(target_->commit_delta(std::move(steps), second.state, in_time()).ok());
  look(1);
  ASSERT_TRUE(roll_back(*target_).ok());
  look(2);
  ASSERT_TRUE(fake_->drain());
  ASSERT_TRUE(holds(first));
  EXPECT_EQ(seen[0], seen[2]);
  EXPECT_NE(seen[0], seen[1]);
  std::vector<std::byte> now(memory.bytes);
  fake_->peek(memory.base, now.data(), now.size());
  EXPECT_EQ(seen[2], now);
}

/// An engine that is in the middle of a step has its weights as they were, however long that takes.
TEST_P(DeviceFaults, CommitsWaitForTheEngine) {
  start(impatient(), true);
  const Reference first = trainer_->now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_->step(0.3);
  const LiveMemory& memory = engine_->plan().memories[0];
  std::vector<std::byte> before(memory.bytes);
  fake_->peek(memory.base, before.data(), before.size());
  std::vector<std::byte> seen;
  fake_->hold(stream_, true);
  fake_->engine_work(stream_, [&] { seen.assign(memory.base, memory.base + memory.bytes); });
  const auto busy = Deadline::after(std::chrono::milliseconds(50));
  auto steps = resolved_step(first, second, kEverything);
  EXPECT_EQ(target_->commit_delta(std::move(steps), second.state, busy).error().code(), Errc::timed_out);
  ASSERT_TRUE(holds(first));
  ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::stage, in_time()).ok());
  fill_full(*target_, second);
  EXPECT_EQ(target_->commit_full(second.state, busy).error().code(), Errc::timed_out);
  target_->discard_full();
  ASSERT_TRUE(holds(first));
  EXPECT_TRUE(seen.empty());
  fake_->hold(stream_, false);
  steps = resolved_step(first, second, kEverything);
  ASSERT_TRUE(target_->commit_delta(std::move(steps), second.state, in_time()).ok());
  ASSERT_TRUE(holds(second));
  ASSERT_TRUE(fake_->drain());
  EXPECT_EQ(seen, before);
  fake_->hold(stream_, true);
  fake_->engine_work(stream_, [] {});
  EXPECT_EQ(roll_back(*target_).error().code(), Errc::timed_out);
  ASSERT_TRUE(holds(second));
  fake_->hold(stream_, false);
  ASSERT_TRUE(roll_back(*target_).ok());
  ASSERT_TRUE(holds(first));
}

TEST_P(DeviceFaults, TakesNoMoreMemoryThanItSays) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_->step(0.5);
  auto steps = resolved_step(first, second, kEverything);
  const std::uint64_t allocations = fake_->counts().allocations;
  ASSERT_TRUE(target_->commit_delta(std::move(steps), second.state, in_time()).ok());
  EXPECT_LE(fake_->counts().allocations, allocations + 1) << "changes that are not there yet";
  forget_rollback(*target_);
  EXPECT_EQ(fake_->counts().allocations, allocations);
  target_.reset();
  EXPECT_EQ(fake_->counts().allocations, allocations_before_);
  EXPECT_EQ(fake_->counts().pinned_bytes, 0u);
  EXPECT_LE(fake_->counts().pinned_bytes_most, kStagingBytes + (std::uint64_t{64} << 20)) << "with the test's own";
}

TEST_P(DeviceFaults, WhatManyUpdatesDidNotNeedGoesBack) {
  PlacedTargetOptions options;
  options.changes_bytes = std::uint64_t{16} << 20;
  start_whole(options);
  Reference now = trainer_->now();
  ASSERT_TRUE(commit_whole(*target_, now).ok());
  const std::uint64_t allocations = fake_->counts().allocations;
  for (int i = 0; i < 9; ++i) {
    target_->capabilities().devices->begin_pull(in_time());
    EXPECT_EQ(fake_->counts().allocations, allocations + (i == 0 || i == 8 ? 0 : 1)) << i;
    const Reference next = trainer_->step(0.001);
    auto steps = resolved_step(now, next, kEverything);
    target_->capabilities().devices->end_pull();
    ASSERT_TRUE(target_->commit_delta(std::move(steps), next.state, in_time()).ok());
    ASSERT_TRUE(holds(next));
    forget_rollback(*target_);
    now = next;
  }
}

/// A pull's deadline and its stop end its waits for a device, long before the patience with that does.
TEST_P(DeviceFaults, APullsWaitsEndWithIt) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_->step(0.01);
  auto step = trainer_->delta(first, second);
  const auto calls = [&](Errc expected) {
    std::vector<std::byte> scratch;
    EXPECT_EQ(target_->live_tile(tile_of(*trainer_->layout(), 0), scratch).error().code(), expected);
    ResolvedBudget budget(kEverything);
    std::vector<std::uint64_t> digests = first.state.digests;
    const Status status = verify_frame(*target_, step.frames[0], first.state.digests, digests, budget);
    EXPECT_EQ(status.error().code(), expected) << status.error().to_string();
  };
  fake_->hang(true);
  target_->capabilities().devices->begin_pull(Deadline::after(std::chrono::milliseconds(1)));
  calls(Errc::timed_out);
  target_->capabilities().devices->end_pull();
  std::stop_source stop;
  stop.request_stop();
  target_->capabilities().devices->begin_pull(CallContext(in_time(), stop.get_token()));
  calls(Errc::cancelled);
  target_->capabilities().devices->end_pull();
  fake_->hang(false);
  std::vector<std::byte> scratch;
  EXPECT_TRUE(target_->live_tile(tile_of(*trainer_->layout(), 0), scratch).ok()) << "the pull's stop is over with it";
}

/// A kernel or a copy goes wrong half-way, which shows in a later call, and from there on nothing works: as CUDA does
/// it. A version that is committed is whole; else there is none.
TEST_P(DeviceFaults, ADeviceThatDiesLeavesNoTornVersion) {
  enum class Way : std::uint8_t { first_full, staged_full, kept_delta, delta, rollback };
  const Reference first = trainer_->now();
  const Reference second = trainer_->step(0.2);
  for (const Way way : {Way::first_full, Way::staged_full, Way::kept_delta, Way::delta, Way::rollback}) {
    std::size_t lost = 0;
    for (std::uint64_t n = 1;; n += 1 + n / 3) {
      SCOPED_TRACE("way " + std::to_string(static_cast<int>(way)) + ", operation " + std::to_string(n));
      start(impatient());
      if (way != Way::first_full) {
        ASSERT_TRUE(commit_whole(*target_, first).ok());
      }
      Status status;
      if (way == Way::first_full || way == Way::staged_full) {
        ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::stage, in_time()).ok());
        fake_->die(n);
        for (std::uint64_t i = 0; i < trainer_->layout()->tile_count() && status.ok(); ++i) {
          status = put_from_half(*target_, second, tile_of(*trainer_->layout(), i));
        }
        if (status.ok()) {
          status = target_->commit_full(second.state, in_time());
        } else {
          target_->discard_full();
        }
      } else {
        auto steps = resolved_step(first, second, way == Way::delta ? 0 : kEverything);
        if (way != Way::rollback) fake_->die(n);
        status = target_->commit_delta(std::move(steps), second.state, in_time());
        if (way == Way::rollback) {
          ASSERT_TRUE(status.ok());
          fake_->die(n);
          status = roll_back(*target_);
        }
      }
      fake_->die(0);
      const bool went = status.ok();
      const Reference& before = way == Way::rollback ? second : first;
      const Reference& after = way == Way::rollback ? first : second;
      if (!went) {
        EXPECT_THAT(status.error().message(), HasSubstr(fake_->name()));
      }
      if (target_->committed() == nullptr) {
        EXPECT_FALSE(went);
        ++lost;
      } else {
        fake_->revive();
        ASSERT_TRUE(holds(went ? after : before)) << (went ? "committed" : status.error().to_string());
      }
      if (went) break;
    }
    EXPECT_NE(lost, 0u) << "some of it cannot be repaired";
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, DeviceFaults, testing::Range<std::uint64_t>(1, kDeviceSeeds + 1));

}  // namespace
}  // namespace deltasync::test
