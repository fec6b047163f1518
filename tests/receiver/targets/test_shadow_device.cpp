// A shadow of live memory that is on a device: what the device reads of it, and what becomes of both when it fails.
#include <cstdio>
#include <fstream>
#include <numeric>

#include "base/call_context.hpp"
#include "deltasync/receiver.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/attest.hpp"
#include "receiver/targets/shadow/shadowed_target.hpp"
#include "tests/receiver/device_place.hpp"
#include "tests/receiver/shadow_fixture.hpp"

namespace deltasync::test {
namespace {

using testing::HasSubstr;
using Call = gpu::FakeDevice::Call;

class ShadowOfADevice : public ShadowPull {
 protected:
  gpu::FakeDevice& fake() { return *engine_->fake(); }
};

/// A launch that does not end: nobody knows what live memory has, and the shadow has the version before.
TEST_P(ShadowOfADevice, ADeviceThatHangsLosesLiveMemoryAlone) {
  device_timeout_ = std::chrono::milliseconds(400);
  start_shadowed();
  commit_pull();
  const std::vector<std::byte> before = model_.half;
  const Version held = *receiver_->current();
  step(0.02);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  engine_->fake()->fail(Call::endless_launch, 1);
  const Status committed = (*staged)->commit();
  ASSERT_FALSE(committed.ok());
  EXPECT_EQ(engine_->fake()->forget_faults(), 0u);
  EXPECT_THAT(committed.error().message(), HasSubstr("its shadow has " + to_string(held)));
  EXPECT_FALSE(receiver_->current().has_value());
  engine_->fake()->hang(false);
  ASSERT_TRUE(engine_->fake()->drain());
  const auto restored = receiver_->restore(in_ms(60'000));
  ASSERT_TRUE(restored.ok()) << restored.error().to_string();
  EXPECT_EQ(restored->version, held);
  expect_live(before);
  EXPECT_EQ(commit_pull().mode, PullMode::delta);
}

/// The engine frees what was given up: what a commit that timed out has left in the streams must not come later.
TEST_P(ShadowOfADevice, WhatADeviceMayStillWriteIsNotGivenUp) {
  device_timeout_ = std::chrono::milliseconds(400);
  start_shadowed();
  commit_pull();
  const std::vector<std::byte> before = model_.half;
  step(0.02);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  engine_->fake()->fail(Call::endless_launch, 1);
  ASSERT_FALSE((*staged)->commit().ok());
  EXPECT_EQ(engine_->fake()->forget_faults(), 0u);
  const Status early = receiver_->release(in_ms(20));
  ASSERT_FALSE(early.ok());
  EXPECT_EQ(early.error().code(), Errc::timed_out) << early.error().to_string();
  EXPECT_THAT(early.error().message(), HasSubstr("may still write to live memory"));
  std::stop_source stop;
  stop.request_stop();
  EXPECT_EQ(receiver_->release(CallContext(in_ms(60'000), stop.get_token())).error().code(), Errc::cancelled);
  EXPECT_FALSE(shadow_of(*receiver_->target())->released);
  engine_->fake()->hang(false);
  const Status given_up = receiver_->release(in_ms(60'000));
  ASSERT_TRUE(given_up.ok()) << given_up.error().to_string();
  EXPECT_TRUE(engine_->fake()->idle());
  EXPECT_TRUE(shadow_of(*receiver_->target())->released);
  engine_->scramble(std::byte{0x33});
  ASSERT_TRUE(receiver_->restore(in_ms(60'000)).ok());
  expect_live(before);
}

/// Nor what an attestation that timed out still reads, of copies in streams of their own.
TEST_P(ShadowOfADevice, ReadersOfCopiesAreWaitedFor) {
  device_timeout_ = std::chrono::milliseconds(400);
  start_shadowed();
  commit_pull();
  Target& target = *receiver_->target();
  ASSERT_TRUE(target.capabilities().copies->prepare_copies(in_time()).ok());
  std::vector<std::uint64_t> tiles(static_cast<std::size_t>(model_.layout->tile_count()));
  std::iota(tiles.begin(), tiles.end(), 0);
  std::vector<std::uint64_t> digests(tiles.size());
  const std::uint64_t before = engine_->fake()->counts().launches;
  ASSERT_TRUE(target.capabilities().digests->live_digests(tiles, digests, in_time()).ok());
  const std::uint64_t of_live = engine_->fake()->counts().launches - before;
  engine_->fake()->fail(Call::endless_launch, of_live + 1);
  EXPECT_EQ(attest(target, in_time()).error().code(), Errc::timed_out);
  EXPECT_EQ(engine_->fake()->forget_faults(), 0u);
  EXPECT_EQ(receiver_->release(in_ms(20)).error().code(), Errc::timed_out);
  engine_->fake()->hang(false);
  ASSERT_FALSE(engine_->fake()->idle()) << "nothing is read: this test proves nothing";
  ASSERT_TRUE(receiver_->release(in_ms(60'000)).ok());
  EXPECT_TRUE(engine_->fake()->idle());
}

TEST_P(ShadowOfADevice, EachFailedCallLeavesBothOnOneVersion) {
  start_shadowed();
  commit_pull();
  for (const Call call : {Call::copy, Call::launch, Call::allocate}) {
    bool came_up = true;
    for (std::uint64_t n = 1; came_up; n += 1 + n / 3) {
      SCOPED_TRACE("call " + std::to_string(static_cast<int>(call)) + " number " + std::to_string(n));
      const Version held = *receiver_->current();
      const std::vector<std::byte> before = model_.half;
      step(0.02);
      auto staged = pull();
      ASSERT_TRUE(staged.ok()) << staged.error().to_string();
      EXPECT_EQ((*staged)->report().mode, PullMode::delta);
      engine_->fake()->fail(call, n);
      const Status committed = (*staged)->commit();
      came_up = engine_->fake()->forget_faults() == 0;
      EXPECT_TRUE(came_up || n > 1) << "there is no such call";
      EXPECT_TRUE(came_up || committed.ok());
      ASSERT_TRUE(receiver_->current().has_value());
      expect_live(committed.ok() ? model_.half : before);
      EXPECT_EQ(*receiver_->current(), committed.ok() ? (*staged)->report().version : held);
      if (!committed.ok()) commit_pull();
    }
  }
}

// ---- what a device reads where it is -------------------------------------------------------------------------------

TEST_P(ShadowOfADevice, IsReadWhereItIs) {
  start();
  engine_.emplace(made_.engine, made_.plan, GetParam(), 5);
  engine_->staging_bytes = std::uint64_t{8} << 20;
  bind_to_engine();
  commit_pull();
  const ShadowState shadow = *shadow_of(*receiver_->target());
  EXPECT_TRUE(shadow.pinned);
  EXPECT_EQ(fake().counts().registered_bytes, shadow.bytes);
  ASSERT_TRUE(receiver_->release(in_ms(60'000)).ok());
  engine_->scramble(std::byte{0x5A});
  const auto before = fake().counts();
  ASSERT_TRUE(receiver_->restore(in_ms(60'000)).ok());
  const auto after = fake().counts();
  expect_live(model_.half);
  EXPECT_GE(after.copied_from_registered - before.copied_from_registered, model_.layout->model_bytes());
  const std::uint64_t staged =
      after.bytes_copied - before.bytes_copied - (after.copied_from_registered - before.copied_from_registered);
  EXPECT_EQ(staged, model_.layout->tile_count() * sizeof(gpu::StagedTile)) << "tiles are described in staging";
  EXPECT_LT(after.copies - before.copies, model_.layout->tile_count()) << "tiles do not go together";
  receiver_.reset();
  EXPECT_EQ(fake().counts().registered_bytes, 0u);
}

TEST_P(ShadowOfADevice, WorksWhereItIsNot) {
  for (const bool refused : {true, false}) {
    SCOPED_TRACE(refused);
    shadow_.pin = refused;
    start();
    engine_.emplace(made_.engine, made_.plan, GetParam(), 5);
    if (refused) fake().fail(Call::register_host, 1);
    bind_to_engine();
    EXPECT_EQ(fake().forget_faults(), 0u);
    EXPECT_FALSE(shadow_of(*receiver_->target())->pinned);
    EXPECT_EQ(fake().counts().registered_bytes, 0u);
    commit_pull();
    engine_->scramble(std::byte{0x5A});
    ASSERT_TRUE(receiver_->restore(in_ms(60'000)).ok());
    expect_live(model_.half);
    EXPECT_EQ(fake().counts().copied_from_registered, 0u);
    receiver_.reset();
  }
}

/// Registered in parts of two pages, which tiles cross.
TEST_P(ShadowOfADevice, IsReadAcrossItsParts) {
  start();
  engine_.emplace(made_.engine, made_.plan, GetParam(), 5);
  engine_->register_bytes = 8192;
  bind_to_engine();
  commit_pull();
  EXPECT_TRUE(shadow_of(*receiver_->target())->pinned);
  ASSERT_TRUE(receiver_->release(in_ms(60'000)).ok());
  engine_->scramble(std::byte{0x5A});
  const auto before = fake().counts();
  ASSERT_TRUE(receiver_->restore(in_ms(60'000)).ok());
  expect_live(model_.half);
  EXPECT_GT(fake().counts().copies - before.copies, model_.layout->model_bytes() / 8192);
}

TEST_P(ShadowOfADevice, IsNotInheritedByChildren) {
  start_shadowed();
  commit_pull();
  std::vector<std::byte> scratch;
  const auto at = reinterpret_cast<std::uintptr_t>(
      receiver_->target()->capabilities().sleep->kept_tile(tile_of(*model_.layout, 0), scratch)->first);
  std::ifstream maps("/proc/self/smaps");
  std::uintptr_t first = 0;
  std::uintptr_t end = 0;
  for (std::string line; std::getline(maps, line);) {
    if (std::sscanf(line.c_str(), "%lx-%lx ", &first, &end) == 2 || !line.starts_with("VmFlags:")) continue;
    if (at < first || at >= end) continue;
    EXPECT_THAT(line, HasSubstr(" dc"));
    return;
  }
  FAIL() << "the shadow is not mapped";
}

/// No update registers anything, since an engine may compute: a staged one takes the pins away, and sleep brings them
/// back.
TEST_P(ShadowOfADevice, IsPinnedAgainInSleep) {
  FakeAgent::Setup setup;
  setup.ring_deltas = 0;  // never a delta
  start_shadowed(setup);
  commit_pull();
  const std::vector<std::byte> first = model_.half;
  const auto registered = [&] { return fake().counts().registered_bytes; };
  const std::uint64_t bytes = shadow_of(*receiver_->target())->bytes;
  step(0.5);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  EXPECT_EQ(registered(), bytes);
  ASSERT_TRUE((*staged)->commit().ok());
  expect_live(model_.half);
  EXPECT_FALSE(shadow_of(*receiver_->target())->pinned);
  ASSERT_TRUE((*staged)->rollback().ok());
  expect_live(first);
  EXPECT_TRUE(shadow_of(*receiver_->target())->pinned);
  EXPECT_EQ(registered(), bytes);
  commit_pull();
  staged->reset();
  ASSERT_TRUE(pull().ok());
  EXPECT_EQ(registered(), 0u);
  ASSERT_TRUE(receiver_->release(in_ms(60'000)).ok());
  EXPECT_TRUE(shadow_of(*receiver_->target())->pinned);
  EXPECT_EQ(registered(), bytes);
  engine_->scramble(std::byte{0x5A});
  ASSERT_TRUE(receiver_->restore(in_ms(60'000)).ok());
  expect_live(model_.half);
  EXPECT_GE(fake().counts().copied_from_registered, model_.layout->model_bytes());
}

/// Each call of a restoration fails once: live memory has no version, the shadow has it, and the next one is whole.
TEST_P(ShadowOfADevice, ARestorationThatFailsIsRepeated) {
  start_shadowed();
  commit_pull();
  for (const Call call : {Call::copy, Call::launch, Call::record, Call::wait_for, Call::done}) {
    bool came_up = true;
    for (std::uint64_t n = 1; came_up; ++n) {
      SCOPED_TRACE("call " + std::to_string(static_cast<int>(call)) + " number " + std::to_string(n));
      ASSERT_TRUE(receiver_->release(in_ms(60'000)).ok());
      engine_->scramble(std::byte{0x5A});
      fake().fail(call, n);
      const auto restored = receiver_->restore(in_ms(60'000));
      came_up = fake().forget_faults() == 0;
      EXPECT_TRUE(came_up || n > 1) << "there is no such call";
      EXPECT_EQ(restored.ok(), !came_up);
      EXPECT_EQ(receiver_->current().has_value(), restored.ok());
      if (!restored.ok()) {
        EXPECT_THAT(restored.error().message(), HasSubstr(fake().name()));
        // A slot whose end nobody knows is never used again.
        if (call == Call::record) {
          receiver_.reset();
          start_shadowed();
          commit_pull();
          continue;
        }
        ASSERT_TRUE(receiver_->restore(in_ms(60'000)).ok());
      }
      expect_live(model_.half);
    }
  }
}

/// A device that hangs reads it some day: it is never given back.
TEST_P(ShadowOfADevice, WhatADeviceMayStillReadStays) {
  device_timeout_ = std::chrono::milliseconds(300);
  start_shadowed();
  commit_pull();
  const std::uint64_t bytes = shadow_of(*receiver_->target())->bytes;
  fake().hang(true);
  const auto restored = receiver_->restore(in_ms(60'000));
  ASSERT_FALSE(restored.ok());
  EXPECT_EQ(restored.error().code(), Errc::timed_out) << restored.error().to_string();
  receiver_.reset();
  EXPECT_EQ(fake().counts().registered_bytes, bytes);
  ASSERT_FALSE(fake().idle()) << "nothing is read: this test proves nothing";
  fake().hang(false);
  EXPECT_TRUE(fake().drain());
}

/// One of two devices hangs: the other one has registered the memory for both, and must not end that.
TEST(ShadowOfDevices, WhatOneOfThemMayStillReadStays) {
  TrainerModel trainer(3);
  ThreadPool pool(2, "shadow");
  DeviceEngine::Devices devices;
  std::vector<gpu::FakeDevice*> fakes;
  for (std::int32_t i = 0; i < 2; ++i) {
    auto device = std::make_unique<gpu::FakeDevice>(gpu::FakeDevice::Options{.ordinal = i, .seed = 3});
    fakes.push_back(device.get());
    devices.push_back(std::move(device));
  }
  DeviceEngine engine(*trainer.layout(), 3, RandomPlan::Ignore::nothing, std::move(devices), false);
  PlacedTargetOptions options;
  options.staging_bytes = std::uint64_t{1} << 20;
  options.device_timeout = std::chrono::seconds(1);
  std::unique_ptr<Target> target = *make_shadowed_target(*engine.make(trainer.layout(), options));
  ASSERT_TRUE(target->open(pool, in_time()).ok());
  ASSERT_TRUE(commit_whole(*target, trainer.now()).ok());
  const std::uint64_t bytes = shadow_of(*target)->bytes;
  ASSERT_EQ(fakes[1]->counts().registered_bytes, bytes);
  fakes[1]->hang(true);
  EXPECT_EQ(static_cast<ShadowedTarget*>(target.get())->restore(in_time()).error().code(), Errc::timed_out);
  target.reset();
  EXPECT_TRUE(fakes[0]->idle());
  EXPECT_FALSE(fakes[1]->idle()) << "nothing is read: this test proves nothing";
  for (gpu::FakeDevice* const fake : fakes) EXPECT_EQ(fake->counts().registered_bytes, bytes);
  fakes[1]->hang(false);
  EXPECT_TRUE(fakes[1]->drain());
}

INSTANTIATE_TEST_SUITE_P(Where, ShadowOfADevice, testing::Values(AnyEngine::Where::device),
                         [](const auto& param_info) { return name_of(param_info.param); });

}  // namespace
}  // namespace deltasync::test
