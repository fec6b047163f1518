// What becomes of a shadow and of the live memory that it is beside (deltasync/target.hpp) when one of them fails.
#include "receiver/targets/shadow/shadowed_target.hpp"

#include <gmock/gmock-more-matchers.h>

#include "base/deadline.hpp"
#include "deltasync/target.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/verify.hpp"
#include "tests/placement/plan_fixture.hpp"
#include "tests/receiver/hf_fixture.hpp"
#include "tests/receiver/remote_memory.hpp"
#include "tests/receiver/trainer_model.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::test {
namespace {

using testing::HasSubstr;

// ---- faults of live memory -----------------------------------------------------------------------------------------

class ShadowFaults : public testing::Test {
 protected:
  void SetUp() override { start(); }
  void TearDown() override { EXPECT_EQ(live_->forget_faults(), 0u) << "a fault never came up"; }
  void start() {
    live_ = new RemoteMemory(trainer_.layout());
    auto made = make_shadowed_target(std::unique_ptr<Target>(live_));
    ASSERT_TRUE(made.ok()) << made.error().to_string();
    target_ = *std::move(made);
    ASSERT_TRUE(target_->open(pool_, in_time()).ok());
    first_ = trainer_.now();
    ASSERT_TRUE(commit_whole(*target_, first_).ok());
    second_ = trainer_.step(0.05);
  }
  Status commit_delta(bool resolved) {
    std::vector<StagedStep> steps;
    steps.push_back(trainer_.delta(first_, second_));
    ResolvedBudget budget(std::uint64_t{1} << 40);
    std::vector<std::uint64_t> digests = first_.state.digests;
    for (StagedFrame& frame : steps[0].frames) {
      if (resolved) DS_TRY(verify_frame(*target_, frame, first_.state.digests, digests, budget));
    }
    return target_->commit_delta(std::move(steps), second_.state, in_time());
  }
  Status commit_staged() {
    DS_TRY(target_->begin_full(FullUpdatePolicy::stage, in_time()));
    fill_full(*target_, second_);
    return target_->commit_full(second_.state, in_time());
  }
  /// Of what the shadow has committed, as long as it keeps that.
  std::byte& byte_of_shadow(std::uint64_t tile) {
    std::vector<std::byte> scratch;
    return *target_->capabilities().sleep->kept_tile(tile_of(*trainer_.layout(), tile), scratch)->first;
  }
  /// Live memory has no version any more.
  void lose() {
    live_->fail("settle");
    live_->fail("open_live");
    ASSERT_FALSE(commit_delta(true).ok());
    ASSERT_EQ(target_->committed(), nullptr);
  }
  Status restore() { return static_cast<ShadowedTarget*>(target_.get())->restore(in_time()); }
  void expect_holds(const Reference& reference) {
    ASSERT_NE(target_->committed(), nullptr);
    EXPECT_EQ(target_->committed()->version, reference.state.version);
    EXPECT_TRUE(live_->memory() == reference.half);
    EXPECT_TRUE(read_live(*target_) == reference.half) << "the shadow differs";
    EXPECT_EQ(shadow_of(*target_)->version, reference.state.version);
  }
  /// Live memory has nothing that anybody knows of, the shadow has this, and brings it back.
  void expect_lost(const Reference& reference) {
    EXPECT_EQ(target_->committed(), nullptr);
    std::vector<std::byte> scratch;
    EXPECT_EQ(target_->live_tile(tile_of(*trainer_.layout(), 0), scratch)->first, nullptr);
    EXPECT_EQ(shadow_of(*target_)->version, reference.state.version);
    EXPECT_EQ(roll_back(*target_).error().code(), Errc::unsupported);
    const Status restored = restore();
    ASSERT_TRUE(restored.ok()) << restored.error().to_string();
    expect_holds(reference);
  }

  ThreadPool pool_{3, "shadow"};
  TrainerModel trainer_{7};
  RemoteMemory* live_ = nullptr;
  std::unique_ptr<Target> target_;
  Reference first_;
  Reference second_;
};

TEST_F(ShadowFaults, ADeltaThatLiveMemoryRefusesLeavesBothOnTheVersionBefore) {
  for (const bool resolved : {true, false}) {
    for (const char* step : {"exchange", "put", "settle", "open_tile"}) {
      const bool once = std::string_view(step) == "settle";
      live_->fail(step, once ? 0 : 2);
      const Status status = commit_delta(resolved);
      SCOPED_TRACE(std::string(step) + (status.ok() ? " is not called" : ": " + status.error().to_string()));
      // Changes that were decoded are exchanged, others are put.
      const bool is_called = once || resolved == (std::string_view(step) == "exchange");
      EXPECT_EQ(live_->forget_faults(), is_called ? 0u : 1u);
      EXPECT_EQ(status.ok(), !is_called);
      if (status.ok()) {
        expect_holds(second_);
        ASSERT_TRUE(roll_back(*target_).ok());
      } else {
        EXPECT_EQ(status.error().code(), Errc::io);
      }
      expect_holds(first_);
    }
  }
}

/// And what cannot be written a second time either is lost; the shadow is not.
TEST_F(ShadowFaults, ADeltaThatCannotBeRolledBackLosesLiveMemoryAlone) {
  for (const char* again : {"open_live", "put"}) {
    live_->fail("settle");
    live_->fail(again);
    const Status status = commit_delta(true);
    ASSERT_FALSE(status.ok());
    EXPECT_THAT(status.error().message(), HasSubstr("its shadow has " + to_string(first_.state.version)));
    expect_lost(first_);
  }
  ASSERT_TRUE(commit_delta(true).ok());
  expect_holds(second_);
}

TEST_F(ShadowFaults, AStagedFullThatLiveMemoryRefusesIsRolledBack) {
  for (const char* step : {"open_live", "put", "settle"}) {
    live_->fail(step);
    const Status status = commit_staged();
    ASSERT_FALSE(status.ok()) << step;
    expect_holds(first_);
    EXPECT_EQ(roll_back(*target_).error().code(), Errc::unsupported);
  }
  ASSERT_TRUE(commit_staged().ok());
  expect_holds(second_);
  ASSERT_TRUE(roll_back(*target_).ok());
  expect_holds(first_);
}

TEST_F(ShadowFaults, ARollbackThatLiveMemoryRefuses) {
  // Of a delta: live memory is written again.
  ASSERT_TRUE(commit_delta(true).ok());
  live_->fail("settle");
  ASSERT_TRUE(roll_back(*target_).ok());
  expect_holds(first_);
  ASSERT_TRUE(commit_delta(true).ok());
  live_->fail("settle", 0);
  live_->fail("put", 5);
  EXPECT_THAT(roll_back(*target_).error().message(), HasSubstr("its shadow has"));
  expect_lost(first_);
  // Of a full update.
  for (const char* step : {"open_live", "put"}) {
    ASSERT_TRUE(commit_staged().ok());
    live_->fail(step);
    EXPECT_FALSE(roll_back(*target_).ok());
    expect_lost(first_);
  }
}

TEST_F(ShadowFaults, AFirstFullThatDoesNotSettleIsInTheShadow) {
  ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::in_place, in_time()).ok());
  fill_full(*target_, second_);
  live_->fail("settle");
  EXPECT_FALSE(target_->commit_full(second_.state, in_time()).ok());
  expect_lost(second_);
}

/// Until its commit a full update over a version that only the shadow has leaves it that.
TEST_F(ShadowFaults, AFullAfterALossThatEndsEarly) {
  lose();
  ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::stage, in_time()).ok());
  ASSERT_TRUE(put_from_half(*target_, second_, tile_of(*trainer_.layout(), 0)).ok());
  EXPECT_EQ(shadow_of(*target_)->version, first_.state.version);
  target_->discard_full();
  expect_lost(first_);
}

TEST_F(ShadowFaults, AFullAfterALossThatIsRefused) {
  lose();
  live_->fail("settle");
  const Status refused = commit_staged();
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::io);
  expect_holds(first_);
  lose();
  ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::stage, in_time()).ok());
  fill_full(*target_, second_);
  live_->fail("settle");
  live_->fail("open_live");
  EXPECT_THAT(target_->commit_full(second_.state, in_time()).error().message(),
              HasSubstr("its shadow has " + to_string(first_.state.version)));
  expect_lost(first_);
}

TEST_F(ShadowFaults, AFullAfterALossAndBack) {
  lose();
  ASSERT_TRUE(commit_staged().ok());
  expect_holds(second_);
  ASSERT_TRUE(roll_back(*target_).ok());
  expect_lost(first_);
}

/// What rolls a refused commit back has little more time than the commit.
TEST_F(ShadowFaults, ARollbackHasItsCommitsTimeAndSomeGrace) {
  ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::stage, in_time()).ok());
  fill_full(*target_, second_);
  live_->fail("put");
  const Deadline deadline = in_time();
  ASSERT_FALSE(target_->commit_full(second_.state, deadline).ok());
  EXPECT_EQ(live_->opened_until().at(), deadline.at() + kRollbackGrace);
  expect_holds(first_);
}

TEST_F(ShadowFaults, OverMemoryThatIsServed) {
  live_ = new RemoteMemory(trainer_.layout(), /*served=*/true);
  target_ = *make_shadowed_target(std::unique_ptr<Target>(live_));
  ASSERT_TRUE(target_->open(pool_, in_time()).ok());
  std::fill(live_->memory().begin(), live_->memory().end(), std::byte{0x5A});
  const std::vector<std::byte> served = live_->memory();
  ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::stage, in_time()).ok());
  fill_full(*target_, second_);
  EXPECT_TRUE(live_->memory() == served);
  ASSERT_TRUE(target_->commit_full(second_.state, in_time()).ok());
  expect_holds(second_);
  ASSERT_TRUE(roll_back(*target_).ok());
  EXPECT_EQ(target_->committed(), nullptr);
  EXPECT_TRUE(live_->memory() == served);
}

TEST_F(ShadowFaults, AShadowThatIsWrongIsNotWritten) {
  ASSERT_TRUE(static_cast<ShadowedTarget*>(target_.get())->release(in_time()).ok());
  EXPECT_TRUE(shadow_of(*target_)->released);
  const Tile tile = tile_of(*trainer_.layout(), 3);
  std::vector<std::byte> scratch;
  *target_->capabilities().sleep->kept_tile(tile, scratch)->first ^= std::byte{1};
  const Status refused = restore();
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::corrupt);
  EXPECT_THAT(refused.error().message(), HasSubstr("the shadow's tile 3 ("));
  EXPECT_EQ(target_->committed(), nullptr);
  *target_->capabilities().sleep->kept_tile(tile, scratch)->first ^= std::byte{1};
  ASSERT_TRUE(restore().ok());
  expect_holds(first_);
}

TEST_F(ShadowFaults, AShadowThatIsWrongIsPulledAgain) {
  ASSERT_TRUE(static_cast<ShadowedTarget*>(target_.get())->release(in_time()).ok());
  byte_of_shadow(3) ^= std::byte{1};
  EXPECT_EQ(restore().error().code(), Errc::corrupt);
  EXPECT_FALSE(shadow_of(*target_)->released);
  ASSERT_TRUE(commit_staged().ok());
  expect_holds(second_);
}

/// Live memory that has its version is not given up for a shadow that is rotten.
TEST_F(ShadowFaults, AWrongShadowDoesNotCostAValidVersion) {
  std::byte& rotten = byte_of_shadow(3);
  rotten ^= std::byte{1};
  live_->fail("open_live");
  const Status refused = restore();
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::corrupt) << refused.error().to_string();
  EXPECT_EQ(live_->forget_faults(), 1u) << "live memory was opened to be written";
  rotten ^= std::byte{1};
  expect_holds(first_);
  // And no commit is rolled back to a version before that is rotten.
  std::byte& before = byte_of_shadow(3);
  ASSERT_TRUE(commit_staged().ok());
  before ^= std::byte{1};
  live_->fail("open_live");
  const Status stays = roll_back(*target_);
  EXPECT_EQ(stays.error().code(), Errc::corrupt) << stays.error().to_string();
  EXPECT_THAT(stays.error().message(), HasSubstr("the shadow's tile 3 ("));
  EXPECT_EQ(live_->forget_faults(), 1u) << "live memory was opened to be written";
  expect_holds(second_);
  before ^= std::byte{1};
  ASSERT_TRUE(roll_back(*target_).ok());
  expect_holds(first_);
}

TEST_F(ShadowFaults, ACommitWritesNoTileThatIsWrong) {
  ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::stage, in_time()).ok());
  fill_full(*target_, second_);
  std::vector<std::byte> scratch;
  *target_->full_tile(tile_of(*trainer_.layout(), 3), scratch)->first ^= std::byte{1};
  const Status refused = target_->commit_full(second_.state, in_time());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::corrupt) << refused.error().to_string();
  expect_holds(first_);
}

/// Nor does what rolls a commit back.
TEST_F(ShadowFaults, ARollbackWritesNoTileThatIsWrong) {
  const Tensor& tensor = trainer_.layout()->tensors()[tile_of(*trainer_.layout(), 3).tensor];
  std::byte& before = byte_of_shadow(3);
  before ^= std::byte{1};
  live_->fail("put", 5);
  const Status refused = commit_staged();
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.error().message(), HasSubstr("its shadow has " + to_string(first_.state.version)));
  EXPECT_NE(live_->memory()[tensor.offset], first_.half[tensor.offset] ^ std::byte{1}) << "it was written";
  before ^= std::byte{1};
  expect_lost(first_);
}

TEST_F(ShadowFaults, ARestorationThatComesTooLateChangesNothing) {
  const Status late = static_cast<ShadowedTarget*>(target_.get())->restore(Deadline::after(std::chrono::seconds(0)));
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Errc::timed_out);
  expect_holds(first_);
  ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::stage, in_time()).ok());
  EXPECT_FALSE(restore().ok()) << "a full update is open";
  target_->discard_full();
  ASSERT_TRUE(restore().ok());
}

TEST(Shadows, OnlyOverLiveMemory) {
  TrainerModel trainer(1, {{"a", Dtype::bf16, {8, 16}, {}, {}}});
  EXPECT_EQ(make_shadowed_target(nullptr).error().code(), Errc::invalid_argument);
  EXPECT_EQ(make_shadowed_target(make_host_target(trainer.layout())).error().code(), Errc::unsupported);
  const TempDir dir;
  auto directory = make_hf_target(trainer.layout(), awkward_sidecar(*trainer.layout()), dir.path() / "out");
  ASSERT_TRUE(directory.ok()) << directory.error().to_string();
  EXPECT_EQ(make_shadowed_target(*std::move(directory)).error().code(), Errc::unsupported);
  Engine engine;
  PlacementPlan plan;
  plan.memories = {engine.add("a", 8 * 32)};
  plan.slices = {{"a", {0, 0, 8, 16}, 0, 0, 32, 2}};
  auto once = make_shadowed_target(*make_placed_target(*Placement::build(trainer.layout(), plan)));
  ASSERT_TRUE(once.ok()) << once.error().to_string();
  EXPECT_EQ(make_shadowed_target(*std::move(once)).error().code(), Errc::unsupported) << "a shadow of a shadow";
  EXPECT_FALSE(shadow_of(*make_host_target(trainer.layout())).has_value());
}

}  // namespace
}  // namespace deltasync::test
