// What a shadow beside live memory is for (deltasync/target.hpp): deltas, sleep, repair.
#include "deltasync/receiver.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/shadow/shadowed_target.hpp"
#include "tests/receiver/shadow_fixture.hpp"

namespace deltasync::test {
namespace {

using testing::HasSubstr;

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
  EXPECT_EQ(receiver_->restore(in_ms(60'000)).error().code(), Errc::not_found);
  commit_pull();
  step(0.02);
  commit_pull();
  const Version held = *receiver_->current();
  const ShadowState asleep_before = *shadow_of(*receiver_->target());
  EXPECT_GE(asleep_before.bytes, model_.layout->model_bytes());
  EXPECT_FALSE(asleep_before.released);
  ASSERT_TRUE(receiver_->release(in_ms(60'000)).ok());
  EXPECT_FALSE(receiver_->current().has_value());
  EXPECT_EQ(shadow_of(*receiver_->target())->version, held);
  EXPECT_TRUE(shadow_of(*receiver_->target())->released);
  EXPECT_EQ(receiver_->attest(in_time()).error().code(), Errc::not_found);
  engine_->scramble(std::byte{0xA5});
  const auto early = pull();
  ASSERT_FALSE(early.ok());
  EXPECT_EQ(early.error().code(), Errc::invalid_argument) << early.error().to_string();
  EXPECT_THAT(early.error().message(), HasSubstr("restored first"));
  const std::uint64_t before = requests();
  const auto restored = receiver_->restore(in_ms(60'000));
  ASSERT_TRUE(restored.ok()) << restored.error().to_string();
  EXPECT_EQ(requests(), before);
  EXPECT_EQ(restored->version, held);
  EXPECT_EQ(restored->bytes, model_.layout->model_bytes());
  EXPECT_GT(restored->total_s, restored->attest_s);
  EXPECT_GT(restored->attest_s, 0);
  EXPECT_EQ(receiver_->current(), held);
  EXPECT_FALSE(shadow_of(*receiver_->target())->released);
  expect_live(model_.half);
  step(0.02);
  EXPECT_EQ(commit_pull().mode, PullMode::delta);
}

TEST_P(ShadowPull, WithoutAShadowItWakesAsTheNewestVersion) {
  start();
  engine_.emplace(made_.engine, made_.plan, GetParam(), 5);
  engine_->device_timeout = device_timeout_;
  auto target = engine_->make(model_.layout);
  ASSERT_TRUE(target.ok()) << target.error().to_string();
  const Status bound = receiver_->bind(*std::move(target), engine_->placement()->slices(), in_ms(60'000));
  ASSERT_TRUE(bound.ok()) << bound.error().to_string();
  auto staged = pull();
  ASSERT_TRUE(staged.ok() && (*staged)->commit().ok());
  ASSERT_TRUE(receiver_->release(in_ms(60'000)).ok());
  EXPECT_FALSE(receiver_->current().has_value());
  engine_->scramble(std::byte{0xA5});
  const auto early = pull();
  ASSERT_FALSE(early.ok());
  EXPECT_THAT(early.error().message(), HasSubstr("restored first"));
  step(0.02);
  const auto restored = receiver_->restore(in_ms(60'000));
  ASSERT_TRUE(restored.ok()) << restored.error().to_string();
  EXPECT_EQ(restored->version, receiver_->current());
  EXPECT_EQ(restored->bytes, model_.layout->model_bytes());
  EXPECT_EQ(restored->fetched, restored->tiles);
  expect_live(model_.half);
  step(0.02);
  staged = pull();
  ASSERT_TRUE(staged.ok() && (*staged)->commit().ok());
  EXPECT_EQ((*staged)->report().mode, PullMode::delta);
  expect_live(model_.half);
}

/// What was under way is forgotten: it stood on memory that is not there any more.
TEST_P(ShadowPull, SleepForgetsWhatWasUnderWay) {
  start_shadowed();
  commit_pull();
  const std::vector<std::byte> before = model_.half;
  step(0.02);
  auto staged = pull();
  ASSERT_TRUE(staged.ok());
  ASSERT_TRUE(receiver_->release(in_ms(60'000)).ok());
  EXPECT_FALSE((*staged)->commit().ok());
  engine_->scramble(std::byte{0x11});
  ASSERT_TRUE(receiver_->restore(in_ms(60'000)).ok());
  expect_live(before);
  staged = pull();
  ASSERT_TRUE(staged.ok() && (*staged)->commit().ok());
  ASSERT_TRUE(receiver_->restore(in_ms(60'000)).ok());
  EXPECT_FALSE((*staged)->rollback().ok());
  expect_live(model_.half);
}

TEST_P(ShadowPull, RepairsComeFromTheShadow) {
  start_shadowed();
  commit_pull();
  engine_->flip(place("up", 77, 500), 3);
  engine_->flip(place("tied", 7, 50, 1), 1);
  step(0.02);  // and the agent has moved on
  const auto wrong = receiver_->attest(in_time());
  ASSERT_TRUE(wrong.ok()) << wrong.error().to_string();
  ASSERT_EQ(wrong->size(), 2u);
  EXPECT_EQ((*wrong)[0].copy_in, "head");
  const std::uint64_t before = requests();
  const auto repaired = receiver_->repair(*wrong, in_ms(60'000));
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
  const Tile tile = tile_of(*model_.layout, t.first_tile);
  std::vector<std::byte> scratch;
  *receiver_->target()->capabilities().sleep->kept_tile(tile, scratch)->first ^= std::byte{1};
  engine_->flip(place("up", 0, 0), 0);
  engine_->flip(place("norm", 0, 5), 0);
  const auto wrong = receiver_->attest(in_time());
  ASSERT_TRUE(wrong.ok());
  const auto repaired = receiver_->repair(*wrong, in_ms(60'000));
  ASSERT_TRUE(repaired.ok()) << repaired.error().to_string();
  EXPECT_EQ(repaired->tiles, 2u);
  EXPECT_EQ(repaired->fetched, 1u);
  expect_live(model_.half);
  engine_->scramble(std::byte{0x77});
  ASSERT_TRUE(receiver_->restore(in_ms(60'000)).ok());
  expect_live(model_.half);
}

/// The scrub looks at live memory, not at the shadow; what it invalidates is valid again once it is repaired.
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
    const auto wrong = receiver_->attest(in_time());
    ASSERT_TRUE(wrong.ok());
    ASSERT_EQ(wrong->size(), 2u);
    ASSERT_TRUE(receiver_->repair(std::span(*wrong).first(all ? 2 : 1), in_ms(60'000)).ok());
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
  const Status bound = receiver_->bind(*std::move(target), engine_->placement()->slices(), in_ms(60'000));
  ASSERT_FALSE(bound.ok());
  EXPECT_EQ(bound.error().code(), Errc::no_space);
  EXPECT_THAT(bound.error().message(), HasSubstr("a shadow of "));
  EXPECT_THAT(bound.error().message(), HasSubstr("100000 are allowed"));
}

TEST_P(ShadowPull, WithoutAShadowThereIsNothingToWakeWith) {
  start();
  EXPECT_EQ(receiver_->release(in_ms(60'000)).error().code(), Errc::unsupported);
  EXPECT_EQ(receiver_->restore(in_ms(1000)).error().code(), Errc::unsupported);
}

INSTANTIATE_TEST_SUITE_P(Where, ShadowPull,
                         testing::Values(AnyEngine::Where::host, AnyEngine::Where::device, AnyEngine::Where::both),
                         [](const auto& param_info) { return name_of(param_info.param); });

}  // namespace
}  // namespace deltasync::test
