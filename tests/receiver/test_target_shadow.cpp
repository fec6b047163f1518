// What a shadow beside live memory is for (deltasync/shadow.hpp), and what becomes of both when one of them fails.
#include "receiver/target_shadow.hpp"

#include <gmock/gmock-more-matchers.h>

#include <numeric>

#include "deltasync/attest.hpp"
#include "receiver/verify.hpp"
#include "tests/receiver/any_engine.hpp"
#include "tests/receiver/hf_fixture.hpp"
#include "tests/receiver/pull_fixture.hpp"
#include "tests/receiver/remote_memory.hpp"
#include "tests/receiver/trainer_model.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using wire::Type;
using Call = gpu::FakeDevice::Call;

// ---- faults of live memory -----------------------------------------------------------------------------------------

class ShadowFaults : public testing::Test {
 protected:
  void SetUp() override { start(); }
  void TearDown() override { EXPECT_EQ(live_->forget_faults(), 0u) << "a fault never came up"; }
  void start() {
    live_ = new RemoteMemory(trainer_.layout());
    auto made = make_shadowed_target(TargetPtr(live_));
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
    DS_TRY(target_->begin_full(FullOverLive::stage, in_time()));
    fill_full(*target_, second_);
    return target_->commit_full(second_.state, in_time());
  }
  /// Of what the shadow has committed, as long as it keeps that.
  std::byte& byte_of_shadow(std::uint64_t tile) {
    std::vector<std::byte> scratch;
    return *target_->kept_tile(trainer_.layout()->tile(tile), scratch)->first;
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
    EXPECT_EQ(target_->live_tile(trainer_.layout()->tile(0), scratch)->first, nullptr);
    EXPECT_EQ(shadow_of(*target_)->version, reference.state.version);
    EXPECT_EQ(target_->rollback().error().code(), Errc::unsupported);
    const Status restored = restore();
    ASSERT_TRUE(restored.ok()) << restored.error().to_string();
    expect_holds(reference);
  }

  ThreadPool pool_{3, "shadow"};
  TrainerModel trainer_{7};
  RemoteMemory* live_ = nullptr;
  TargetPtr target_;
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
        ASSERT_TRUE(target_->rollback().ok());
      } else {
        EXPECT_EQ(status.error().code(), Errc::io);
      }
      expect_holds(first_);
    }
  }
}

/// And what cannot be written a second time either is lost; the shadow is not.
TEST_F(ShadowFaults, ADeltaThatCannotBeTakenBackLosesLiveMemoryAlone) {
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

TEST_F(ShadowFaults, AStagedFullThatLiveMemoryRefusesIsTakenBack) {
  for (const char* step : {"open_live", "put", "settle"}) {
    live_->fail(step);
    const Status status = commit_staged();
    ASSERT_FALSE(status.ok()) << step;
    expect_holds(first_);
    EXPECT_EQ(target_->rollback().error().code(), Errc::unsupported);
  }
  ASSERT_TRUE(commit_staged().ok());
  expect_holds(second_);
  ASSERT_TRUE(target_->rollback().ok());
  expect_holds(first_);
}

TEST_F(ShadowFaults, ARollbackThatLiveMemoryRefuses) {
  // Of a delta: live memory is written anew.
  ASSERT_TRUE(commit_delta(true).ok());
  live_->fail("settle");
  ASSERT_TRUE(target_->rollback().ok());
  expect_holds(first_);
  ASSERT_TRUE(commit_delta(true).ok());
  live_->fail("settle", 0);
  live_->fail("put", 5);
  EXPECT_THAT(target_->rollback().error().message(), HasSubstr("its shadow has"));
  expect_lost(first_);
  // Of a full update.
  for (const char* step : {"open_live", "put"}) {
    ASSERT_TRUE(commit_staged().ok());
    live_->fail(step);
    EXPECT_FALSE(target_->rollback().ok());
    expect_lost(first_);
  }
}

TEST_F(ShadowFaults, AFirstFullThatDoesNotSettleIsInTheShadow) {
  ASSERT_TRUE(target_->begin_full(FullOverLive::in_place, in_time()).ok());
  fill_full(*target_, second_);
  live_->fail("settle");
  EXPECT_FALSE(target_->commit_full(second_.state, in_time()).ok());
  expect_lost(second_);
}

/// Until its commit a full update over a version that only the shadow has leaves it that.
TEST_F(ShadowFaults, AFullAfterALossThatEndsEarly) {
  lose();
  ASSERT_TRUE(target_->begin_full(FullOverLive::stage, in_time()).ok());
  ASSERT_TRUE(put_from_half(*target_, second_, trainer_.layout()->tile(0)).ok());
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
  ASSERT_TRUE(target_->begin_full(FullOverLive::stage, in_time()).ok());
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
  ASSERT_TRUE(target_->rollback().ok());
  expect_lost(first_);
}

/// What takes a refused commit back has little more time than the commit.
TEST_F(ShadowFaults, ATakeBackHasItsCommitsTimeAndSomeGrace) {
  ASSERT_TRUE(target_->begin_full(FullOverLive::stage, in_time()).ok());
  fill_full(*target_, second_);
  live_->fail("put");
  const Deadline deadline = in_time();
  ASSERT_FALSE(target_->commit_full(second_.state, deadline).ok());
  EXPECT_EQ(live_->opened_until().at(), deadline.at() + kTakeBackGrace);
  expect_holds(first_);
}

TEST_F(ShadowFaults, OverMemoryThatIsServed) {
  live_ = new RemoteMemory(trainer_.layout(), /*served=*/true);
  target_ = *make_shadowed_target(TargetPtr(live_));
  ASSERT_TRUE(target_->open(pool_, in_time()).ok());
  std::fill(live_->memory().begin(), live_->memory().end(), std::byte{0x5A});
  const std::vector<std::byte> served = live_->memory();
  ASSERT_TRUE(target_->begin_full(FullOverLive::stage, in_time()).ok());
  fill_full(*target_, second_);
  EXPECT_TRUE(live_->memory() == served);
  ASSERT_TRUE(target_->commit_full(second_.state, in_time()).ok());
  expect_holds(second_);
  ASSERT_TRUE(target_->rollback().ok());
  EXPECT_EQ(target_->committed(), nullptr);
  EXPECT_TRUE(live_->memory() == served);
}

TEST_F(ShadowFaults, AShadowThatIsWrongIsNotWritten) {
  ASSERT_TRUE(static_cast<ShadowedTarget*>(target_.get())->give_up_live(in_time()).ok());
  EXPECT_TRUE(shadow_of(*target_)->live_given_up);
  const Tile tile = trainer_.layout()->tile(3);
  std::vector<std::byte> scratch;
  *target_->kept_tile(tile, scratch)->first ^= std::byte{1};
  const Status refused = restore();
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::corrupt);
  EXPECT_THAT(refused.error().message(), HasSubstr("the shadow's tile 3 ("));
  EXPECT_EQ(target_->committed(), nullptr);
  *target_->kept_tile(tile, scratch)->first ^= std::byte{1};
  ASSERT_TRUE(restore().ok());
  expect_holds(first_);
}

/// Live memory that has its version is not given up for a shadow that is rotten.
TEST_F(ShadowFaults, AWrongShadowDoesNotCostASoundVersion) {
  std::byte& rotten = byte_of_shadow(3);
  rotten ^= std::byte{1};
  live_->fail("open_live");
  const Status refused = restore();
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::corrupt) << refused.error().to_string();
  EXPECT_EQ(live_->forget_faults(), 1u) << "live memory was opened to be written";
  rotten ^= std::byte{1};
  expect_holds(first_);
  // And no commit is taken back to a version before that is rotten.
  std::byte& before = byte_of_shadow(3);
  ASSERT_TRUE(commit_staged().ok());
  before ^= std::byte{1};
  live_->fail("open_live");
  const Status stays = target_->rollback();
  EXPECT_EQ(stays.error().code(), Errc::corrupt) << stays.error().to_string();
  EXPECT_THAT(stays.error().message(), HasSubstr("the shadow's tile 3 ("));
  EXPECT_EQ(live_->forget_faults(), 1u) << "live memory was opened to be written";
  expect_holds(second_);
  before ^= std::byte{1};
  ASSERT_TRUE(target_->rollback().ok());
  expect_holds(first_);
}

TEST_F(ShadowFaults, ACommitWritesNoTileThatIsWrong) {
  ASSERT_TRUE(target_->begin_full(FullOverLive::stage, in_time()).ok());
  fill_full(*target_, second_);
  std::vector<std::byte> scratch;
  *target_->full_tile(trainer_.layout()->tile(3), scratch)->first ^= std::byte{1};
  const Status refused = target_->commit_full(second_.state, in_time());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::corrupt) << refused.error().to_string();
  expect_holds(first_);
}

/// Nor does what takes a commit back.
TEST_F(ShadowFaults, ATakeBackWritesNoTileThatIsWrong) {
  const Tensor& tensor = trainer_.layout()->tensors()[trainer_.layout()->tile(3).tensor];
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
  ASSERT_TRUE(target_->begin_full(FullOverLive::stage, in_time()).ok());
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

// ---- receivers -----------------------------------------------------------------------------------------------------

class ShadowPull : public PullTest, public testing::WithParamInterface<AnyEngine::Where> {
 protected:
  void SetUp() override {
    model_ = make_model(7, TiedEngine::specs());
    options_.scrub_tiles = 0;
  }
  void TearDown() override { receiver_.reset(); }

  void start_shadowed(FakeAgent::Setup setup = FakeAgent::Setup()) {
    start(std::move(setup));
    bind_shadowed();
  }
  void bind_shadowed() {
    engine_.emplace(made_.engine, made_.plan, GetParam(), 5);
    engine_->patience = patience_;
    auto target = make_shadowed_target(*engine_->make(model_.layout));
    ASSERT_TRUE(target.ok()) << target.error().to_string();
    const Status bound = receiver_->bind(*std::move(target), engine_->placement()->subscription(), in_ms(60'000));
    ASSERT_TRUE(bound.ok()) << bound.error().to_string();
  }
  void expect_live(const std::vector<std::byte>& half) { EXPECT_EQ(engine_->differences(*model_.layout, half), ""); }
  PullReport commit_pull() {
    auto staged = pull();
    EXPECT_TRUE(staged.ok()) << staged.error().to_string();
    if (!staged.ok()) return {};
    const Status committed = (*staged)->commit();
    EXPECT_TRUE(committed.ok()) << committed.error().to_string();
    expect_live(agent_->half_of((*staged)->report().version.id));
    EXPECT_EQ(shadow_of(*receiver_->target())->version, receiver_->current());
    return (*staged)->report();
  }
  std::byte* place(const std::string& tensor, std::uint64_t row, std::uint64_t col, std::size_t nth = 0) {
    return places_of(engine_->plan(), tensor, row, col).at(nth);
  }
  std::uint64_t requests() const {
    std::uint64_t all = 0;
    for (const Type type : {Type::plan, Type::get_digests, Type::get_extent, Type::get_frames, Type::get_raw_tiles}) {
      all += agent_->requests(type);
    }
    return all;
  }

  TiedEngine made_;
  std::chrono::nanoseconds patience_ = std::chrono::seconds(30);
  std::optional<AnyEngine> engine_;
};

TEST_P(ShadowPull, DeltasAreVerifiedWithoutLiveMemory) {
  start_shadowed();
  commit_pull();
  for (int i = 0; i < 4; ++i) {
    step(0.02);
    if (i == 3) step(0.02);  // two steps at once
    const auto before = engine_->fake() == nullptr ? gpu::FakeDevice::Counts() : engine_->fake()->counts();
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    if (engine_->fake() != nullptr) {
      EXPECT_EQ(engine_->fake()->counts().copies, before.copies);
      EXPECT_EQ(engine_->fake()->counts().launches, before.launches);
    }
    ASSERT_TRUE((*staged)->commit().ok());
    EXPECT_EQ((*staged)->report().mode, PullMode::delta);
    expect_live(model_.half);
  }
}

TEST_P(ShadowPull, WakesWithoutTheNetwork) {
  options_.attest_commits = true;
  start_shadowed();
  EXPECT_EQ(restore_live(*receiver_, in_ms(60'000)).error().code(), Errc::not_found);
  commit_pull();
  step(0.02);
  commit_pull();
  const Version held = *receiver_->current();
  const ShadowState asleep_before = *shadow_of(*receiver_->target());
  EXPECT_GE(asleep_before.bytes, model_.layout->model_bytes());
  EXPECT_FALSE(asleep_before.live_given_up);
  ASSERT_TRUE(give_up_live(*receiver_, in_ms(60'000)).ok());
  EXPECT_FALSE(receiver_->current().has_value());
  EXPECT_EQ(shadow_of(*receiver_->target())->version, held);
  EXPECT_TRUE(shadow_of(*receiver_->target())->live_given_up);
  EXPECT_EQ(attest(*receiver_->target(), in_time()).error().code(), Errc::not_found);
  engine_->scramble(std::byte{0xA5});
  const auto early = pull();
  ASSERT_FALSE(early.ok());
  EXPECT_EQ(early.error().code(), Errc::invalid_argument) << early.error().to_string();
  EXPECT_THAT(early.error().message(), HasSubstr("restored first"));
  const std::uint64_t before = requests();
  const auto restored = restore_live(*receiver_, in_ms(60'000));
  ASSERT_TRUE(restored.ok()) << restored.error().to_string();
  EXPECT_EQ(requests(), before);
  EXPECT_EQ(restored->version, held);
  EXPECT_EQ(restored->bytes, model_.layout->model_bytes());
  EXPECT_GT(restored->restore_s, restored->attest_s);
  EXPECT_GT(restored->attest_s, 0);
  EXPECT_EQ(receiver_->current(), held);
  EXPECT_FALSE(shadow_of(*receiver_->target())->live_given_up);
  expect_live(model_.half);
  step(0.02);
  EXPECT_EQ(commit_pull().mode, PullMode::delta);
}

/// What was under way is forgotten: it stood on memory that is not there any more.
TEST_P(ShadowPull, SleepForgetsWhatWasUnderWay) {
  start_shadowed();
  commit_pull();
  const std::vector<std::byte> before = model_.half;
  step(0.02);
  auto staged = pull();
  ASSERT_TRUE(staged.ok());
  ASSERT_TRUE(give_up_live(*receiver_, in_ms(60'000)).ok());
  EXPECT_FALSE((*staged)->commit().ok());
  engine_->scramble(std::byte{0x11});
  ASSERT_TRUE(restore_live(*receiver_, in_ms(60'000)).ok());
  expect_live(before);
  staged = pull();
  ASSERT_TRUE(staged.ok() && (*staged)->commit().ok());
  ASSERT_TRUE(restore_live(*receiver_, in_ms(60'000)).ok());
  EXPECT_FALSE((*staged)->rollback().ok());
  expect_live(model_.half);
}

TEST_P(ShadowPull, RepairsComeFromTheShadow) {
  start_shadowed();
  commit_pull();
  engine_->flip(place("up", 77, 500), 3);
  engine_->flip(place("tied", 7, 50, 1), 1);
  step(0.02);  // and the agent has moved on
  const auto wrong = attest(*receiver_->target(), in_time());
  ASSERT_TRUE(wrong.ok()) << wrong.error().to_string();
  ASSERT_EQ(wrong->size(), 2u);
  EXPECT_EQ((*wrong)[0].copy_in, "head");
  const std::uint64_t before = requests();
  const auto repaired = repair(*receiver_, *wrong, in_ms(60'000));
  ASSERT_TRUE(repaired.ok()) << repaired.error().to_string();
  EXPECT_EQ(repaired->tiles, 2u);
  EXPECT_EQ(repaired->fetched, 0u);
  EXPECT_EQ(repaired->wire_bytes, 0u);
  EXPECT_EQ(requests(), before);
  expect_live(agent_->half_of(receiver_->current()->id));
  EXPECT_EQ(commit_pull().mode, PullMode::delta);
}

/// What is wrong in both comes from the agent, into both.
TEST_P(ShadowPull, AWrongShadowIsRepairedToo) {
  start_shadowed();
  commit_pull();
  const Tensor& t = model_.layout->tensors()[tensor("up")];
  const Tile tile = model_.layout->tile(t.first_tile);
  std::vector<std::byte> scratch;
  *receiver_->target()->kept_tile(tile, scratch)->first ^= std::byte{1};
  engine_->flip(place("up", 0, 0), 0);
  engine_->flip(place("norm", 0, 5), 0);
  const auto wrong = attest(*receiver_->target(), in_time());
  ASSERT_TRUE(wrong.ok());
  const auto repaired = repair(*receiver_, *wrong, in_ms(60'000));
  ASSERT_TRUE(repaired.ok()) << repaired.error().to_string();
  EXPECT_EQ(repaired->tiles, 2u);
  EXPECT_EQ(repaired->fetched, 1u);
  expect_live(model_.half);
  engine_->scramble(std::byte{0x77});
  ASSERT_TRUE(restore_live(*receiver_, in_ms(60'000)).ok());
  expect_live(model_.half);
}

/// The scrub looks at live memory, not at the shadow; what it distrusts is trusted again once it is repaired.
TEST_P(ShadowPull, TheScrubSeesLiveMemory) {
  options_.scrub_tiles = 1000;
  for (const bool all : {true, false}) {
    SCOPED_TRACE(all);
    start_shadowed();
    commit_pull();
    engine_->flip(place("up", 3, 4), 2);
    engine_->flip(place("norm", 0, 4), 2);
    step(0.0);
    const auto refused = pull();
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), Errc::corrupt);
    EXPECT_THAT(refused.error().message(), HasSubstr("(up) and 1 more"));
    const auto wrong = attest(*receiver_->target(), in_time());
    ASSERT_TRUE(wrong.ok());
    ASSERT_EQ(wrong->size(), 2u);
    ASSERT_TRUE(repair(*receiver_, std::span(*wrong).first(all ? 2 : 1), in_ms(60'000)).ok());
    EXPECT_EQ(commit_pull().mode, all ? PullMode::delta : PullMode::full);
    receiver_.reset();
  }
}

TEST_P(ShadowPull, AFullUpdateIsStagedBesideTheShadow) {
  FakeAgent::Setup setup;
  setup.ring_deltas = 0;  // never a delta
  start_shadowed(setup);
  commit_pull();
  const std::vector<std::byte> before = model_.half;
  step(0.5);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  EXPECT_EQ((*staged)->report().mode, PullMode::full);
  expect_live(before);
  ASSERT_TRUE((*staged)->commit().ok());
  expect_live(model_.half);
  ASSERT_TRUE((*staged)->rollback().ok());
  expect_live(before);
}

TEST_P(ShadowPull, TooLittleHostMemoryIsSaid) {
  start();
  engine_.emplace(made_.engine, made_.plan, GetParam(), 5);
  auto target = make_shadowed_target(*engine_->make(model_.layout), {.bytes_max = 100'000});
  ASSERT_TRUE(target.ok());
  const Status bound = receiver_->bind(*std::move(target), engine_->placement()->subscription(), in_ms(60'000));
  ASSERT_FALSE(bound.ok());
  EXPECT_EQ(bound.error().code(), Errc::no_space);
  EXPECT_THAT(bound.error().message(), HasSubstr("a shadow of "));
  EXPECT_THAT(bound.error().message(), HasSubstr("100000 are allowed"));
}

TEST_P(ShadowPull, WithoutAShadowThereIsNothingToWakeWith) {
  start();
  EXPECT_EQ(give_up_live(*receiver_, in_ms(60'000)).error().code(), Errc::unsupported);
  EXPECT_EQ(restore_live(*receiver_, in_ms(1000)).error().code(), Errc::unsupported);
}

INSTANTIATE_TEST_SUITE_P(Where, ShadowPull,
                         testing::Values(AnyEngine::Where::host, AnyEngine::Where::device, AnyEngine::Where::both),
                         [](const auto& param_info) { return name_of(param_info.param); });

/// A launch that does not end: nobody knows what live memory has, and the shadow has the version before.
class ShadowOfADevice : public ShadowPull {};

TEST_P(ShadowOfADevice, ADeviceThatHangsLosesLiveMemoryAlone) {
  patience_ = std::chrono::milliseconds(400);
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
  const auto restored = restore_live(*receiver_, in_ms(60'000));
  ASSERT_TRUE(restored.ok()) << restored.error().to_string();
  EXPECT_EQ(restored->version, held);
  expect_live(before);
  EXPECT_EQ(commit_pull().mode, PullMode::delta);
}

/// The engine frees what was given up: what a commit that timed out has left in the streams must not come later.
TEST_P(ShadowOfADevice, WhatADeviceMayStillWriteIsNotGivenUp) {
  patience_ = std::chrono::milliseconds(400);
  start_shadowed();
  commit_pull();
  const std::vector<std::byte> before = model_.half;
  step(0.02);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  engine_->fake()->fail(Call::endless_launch, 1);
  ASSERT_FALSE((*staged)->commit().ok());
  EXPECT_EQ(engine_->fake()->forget_faults(), 0u);
  const Status early = give_up_live(*receiver_, in_ms(20));
  ASSERT_FALSE(early.ok());
  EXPECT_EQ(early.error().code(), Errc::timed_out) << early.error().to_string();
  EXPECT_THAT(early.error().message(), HasSubstr("may still write to live memory"));
  std::stop_source stop;
  stop.request_stop();
  EXPECT_EQ(give_up_live(*receiver_, in_ms(60'000), stop.get_token()).error().code(), Errc::cancelled);
  EXPECT_FALSE(shadow_of(*receiver_->target())->live_given_up);
  engine_->fake()->hang(false);
  const Status given_up = give_up_live(*receiver_, in_ms(60'000));
  ASSERT_TRUE(given_up.ok()) << given_up.error().to_string();
  EXPECT_TRUE(engine_->fake()->idle());
  EXPECT_TRUE(shadow_of(*receiver_->target())->live_given_up);
  engine_->scramble(std::byte{0x33});
  ASSERT_TRUE(restore_live(*receiver_, in_ms(60'000)).ok());
  expect_live(before);
}

/// Nor what an attestation that timed out still reads, of copies in streams of their own.
TEST_P(ShadowOfADevice, ReadersOfCopiesAreWaitedFor) {
  patience_ = std::chrono::milliseconds(400);
  start_shadowed();
  commit_pull();
  Target& target = *receiver_->target();
  ASSERT_TRUE(target.prepare_copies(in_time()).ok());
  std::vector<std::uint64_t> tiles(static_cast<std::size_t>(model_.layout->tile_count()));
  std::iota(tiles.begin(), tiles.end(), 0);
  std::vector<std::uint64_t> digests(tiles.size());
  const std::uint64_t before = engine_->fake()->counts().launches;
  ASSERT_TRUE(target.live_digests(tiles, digests, in_time()).ok());
  const std::uint64_t of_live = engine_->fake()->counts().launches - before;
  engine_->fake()->fail(Call::endless_launch, of_live + 1);
  EXPECT_EQ(attest(target, in_time()).error().code(), Errc::timed_out);
  EXPECT_EQ(engine_->fake()->forget_faults(), 0u);
  EXPECT_EQ(give_up_live(*receiver_, in_ms(20)).error().code(), Errc::timed_out);
  engine_->fake()->hang(false);
  ASSERT_FALSE(engine_->fake()->idle()) << "nothing is read: this test proves nothing";
  ASSERT_TRUE(give_up_live(*receiver_, in_ms(60'000)).ok());
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

INSTANTIATE_TEST_SUITE_P(Where, ShadowOfADevice, testing::Values(AnyEngine::Where::device),
                         [](const auto& param_info) { return name_of(param_info.param); });

}  // namespace
}  // namespace deltasync::test
