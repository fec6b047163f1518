// Pulls into the live memory of an engine: only what is placed is asked for, and only its places are written. And what
// others write into memory that a target shares with them.
#include <gmock/gmock-matchers.h>

#include <atomic>
#include <optional>
#include <stop_token>

#include "base/call_context.hpp"
#include "deltasync/target.hpp"
#include "placement/regions.hpp"
#include "tests/placement/plan_fixture.hpp"
#include "tests/receiver/pull_fixture.hpp"

namespace deltasync::test {
namespace {

using testing::HasSubstr;
using wire::Type;

class PlacedPull : public PullTest {
 protected:
  void SetUp() override {
    std::vector<TensorSpec> specs = pull_specs();
    // Panels of 16 columns, so bands of 5 MiB: too long to be buffered.
    TensorSpec tall{"tall.bands", Dtype::bf16, {4096, 640}, {}, {}};
    for (std::uint64_t col = 16; col < 640; col += 16) tall.col_cuts.push_back(col);
    specs.push_back(tall);
    model_ = make_model(7, specs);
  }

  void start_placed(RandomPlan::Ignore ignore, FakeAgent::Setup setup = FakeAgent::Setup(),
                    receiver::Tuning tuning = quick()) {
    start(std::move(setup), tuning);
    bind_placed(ignore, 5);
  }
  void bind_placed(RandomPlan::Ignore ignore, std::uint64_t seed, const PlacedTargetOptions& options = {}) {
    made_.emplace(*model_.layout, seed, ignore);
    const auto placement = Placement::build(model_.layout, made_->plan);
    ASSERT_TRUE(placement.ok()) << placement.error().to_string();
    placement_ = *placement;
    auto target = make_placed_target(placement_, options);
    ASSERT_TRUE(target.ok()) << target.error().to_string();
    const Status bound = receiver_->bind(*std::move(target), placement_->slices(), in_ms(60'000));
    ASSERT_TRUE(bound.ok()) << bound.error().to_string();
  }
  void expect_placed(const std::vector<std::byte>& half) {
    EXPECT_TRUE(made_->engine.contents() == placed_contents(made_->engine, *model_.layout, made_->plan, half));
  }
  /// Ends by a stop while four streams wait for bands.
  void pull_a_part() {
    std::stop_source stop;
    int stalled = 0;
    agent_->on_request([&](const Request& r) {
      if (r.type != Type::get_extent || r.ordinal < 12) return Fault::none;
      if (++stalled == 4) stop.request_stop();
      return Fault::stall;
    });
    const auto part = receiver_->pull({}, CallContext(in_ms(60'000), stop.get_token()));
    agent_->on_request(nullptr);
    ASSERT_FALSE(part.ok());
    ASSERT_EQ(part.error().code(), Errc::cancelled) << part.error().to_string();
  }
  PullReport pull_placed() {
    auto staged = pull();
    EXPECT_TRUE(staged.ok()) << staged.error().to_string();
    if (!staged) return {};
    const Status committed = (*staged)->commit();
    EXPECT_TRUE(committed.ok()) << committed.error().to_string();
    expect_placed(agent_->half_of((*staged)->report().version.id));
    return (*staged)->report();
  }

  std::optional<RandomPlan> made_;
  std::shared_ptr<const Placement> placement_;
};

TEST_F(PlacedPull, FullThenDeltas) {
  start_placed(RandomPlan::Ignore::some);
  const PullReport full = pull_placed();
  EXPECT_EQ(full.mode, PullMode::full);
  EXPECT_EQ(full.full_bytes, parts_of(*placement_).tiles.bytes());
  EXPECT_EQ(full.tiles, parts_of(*placement_).tiles.tiles());
  for (const double density : {0.01, 0.05, 0.001}) {
    step(density);
    EXPECT_EQ(pull_placed().mode, PullMode::delta);
  }
  step(0.01);
  step(0.01);
  const PullReport chain = pull_placed();
  EXPECT_EQ(chain.mode, PullMode::delta);
  EXPECT_EQ(chain.delta_steps, 2u);
}

TEST_F(PlacedPull, WholeModelsComeInBands) {
  start_placed(RandomPlan::Ignore::nothing);
  EXPECT_EQ(pull_placed().mode, PullMode::full);
  EXPECT_FALSE(agent_->extents_asked().empty());
  const Tensor& tall = model_.layout->tensors()[tensor("tall.bands")];
  for (const wire::TileRange& range : agent_->extents_asked()) {
    EXPECT_TRUE(range.end <= tall.first_tile || range.first >= tall.first_tile + tall.tile_count);
  }
}

TEST_F(PlacedPull, RollbackBitForBit) {
  start_placed(RandomPlan::Ignore::some);
  pull_placed();
  const std::vector<std::byte> before = model_.half;
  step(0.1);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  expect_placed(before);  // pulling and staging write nothing
  ASSERT_TRUE((*staged)->commit().ok());
  expect_placed(model_.half);
  ASSERT_TRUE((*staged)->rollback().ok());
  expect_placed(before);
}

TEST_F(PlacedPull, AFullUpdateOverALiveVersionIsStaged) {
  FakeAgent::Setup setup;
  setup.ring_deltas = 0;  // never a delta
  start_placed(RandomPlan::Ignore::some, setup);
  pull_placed();
  const std::vector<std::byte> before = model_.half;
  step(0.1);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  EXPECT_EQ((*staged)->report().mode, PullMode::full);
  expect_placed(before);
  ASSERT_TRUE((*staged)->commit().ok());
  expect_placed(model_.half);
  ASSERT_TRUE((*staged)->rollback().ok());
  expect_placed(before);
}

/// A receiver that starts over weights which its engine serves already.
TEST_F(PlacedPull, WeightsThatAreServedAreNotTouchedBeforeTheCommit) {
  start_placed(RandomPlan::Ignore::some);
  bind_placed(RandomPlan::Ignore::some, 9, {.live = true});
  std::vector<std::byte> served = model_.half;
  mutate(served, *model_.layout, 1.0, 99);
  write_by_plan(*model_.layout, made_->plan, served);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  EXPECT_EQ((*staged)->report().mode, PullMode::full);
  expect_placed(served);
  EXPECT_FALSE(receiver_->current().has_value());
  ASSERT_TRUE((*staged)->commit().ok());
  expect_placed(model_.half);
  ASSERT_TRUE((*staged)->rollback().ok());
  expect_placed(served);
  staged->reset();
  EXPECT_EQ(pull_placed().mode, PullMode::full);
  step(0.01);
  EXPECT_EQ(pull_placed().mode, PullMode::delta);
}

TEST_F(PlacedPull, ScribblesOverLiveMemoryAreFound) {
  start_placed(RandomPlan::Ignore::nothing);
  options_.scrub_tiles = model_.layout->tile_count();
  connect();
  bind_placed(RandomPlan::Ignore::nothing, 6);
  pull_placed();
  *element_of(made_->plan, made_->plan.slices[0], made_->plan.slices[0].rect.row, made_->plan.slices[0].rect.col) ^=
      std::byte{1};
  step(0.0);  // no tile comes: only the scrub looks
  const auto staged = pull();
  ASSERT_FALSE(staged.ok());
  EXPECT_EQ(staged.error().code(), Errc::corrupt);
  EXPECT_THAT(staged.error().message(), HasSubstr(made_->plan.slices[0].tensor));
  EXPECT_EQ(pull_placed().mode, PullMode::full);
}

TEST_F(PlacedPull, BindsWithItsOwnSubscriptionOnly) {
  start_placed(RandomPlan::Ignore::some);
  auto target = make_placed_target(placement_);
  ASSERT_TRUE(target.ok());
  const Status bound = receiver_->bind(*std::move(target), in_ms(60'000));
  ASSERT_FALSE(bound.ok());
  EXPECT_EQ(bound.error().code(), Errc::invalid_argument);
  EXPECT_THAT(bound.error().message(), HasSubstr("the placement's own subscription"));
}

TEST_F(PlacedPull, BrokenStreamsAreTakenUpAgain) {
  for (const Type type : {Type::get_raw_tiles, Type::get_extent}) {
    SCOPED_TRACE(static_cast<int>(type));
    start_placed(RandomPlan::Ignore::some);
    agent_->on_request(fault_on(type, Fault::drop_midway, 2, 3));
    const PullReport report = pull_placed();
    EXPECT_EQ(report.mode, PullMode::full);
    EXPECT_GT(report.stream_restarts, 0u);
  }
}

TEST_F(PlacedPull, BadTilesAreRepaired) {
  start_placed(RandomPlan::Ignore::nothing);
  agent_->on_request(fault_on(Type::get_extent, Fault::flip_at_source, 1, 4));
  const PullReport report = pull_placed();
  EXPECT_EQ(report.mode, PullMode::full);
  EXPECT_GT(report.repaired_tiles, 0u);
}

/// Parameters are the engine's own: what it writes between two attempts is found before anything is published.
TEST_F(PlacedPull, WhatAnEngineWroteBetweenTwoPullsComesAgain) {
  options_.streams = 4;
  for (const bool written : {false, true}) {
    SCOPED_TRACE(written);
    start_placed(RandomPlan::Ignore::nothing);
    ASSERT_NO_FATAL_FAILURE(pull_a_part());
    if (written) made_->engine.wipe();
    const PullReport report = pull_placed();
    EXPECT_EQ(report.mode, PullMode::full);
    if (written) {
      EXPECT_GE(report.tiles, model_.layout->tile_count());
    } else {
      EXPECT_LT(report.tiles, model_.layout->tile_count()) << "nothing was held: this test proves nothing";
    }
  }
}

/// So is the memory that a user lends to a host target.
TEST_F(PlacedPull, WhatAUserWroteBetweenTwoPullsComesAgain) {
  options_.streams = 4;
  start();
  std::vector<std::byte> memory(model_.layout->half_bytes());
  ASSERT_TRUE(receiver_->bind(make_host_target(model_.layout, memory), in_ms(60'000)).ok());
  ASSERT_NO_FATAL_FAILURE(pull_a_part());
  for (const Tensor& tensor : model_.layout->tensors()) {
    if (tensor.bytes != 0) memory[tensor.offset] = ~model_.half[tensor.offset];
  }
  pull_and_commit();
  EXPECT_EQ(agent_->plans().back().partial, 1) << "what nobody wrote to is still held";
  receiver_.reset();
}

/// What was verified before a lease ended is read back from its places and advanced.
TEST_F(PlacedPull, VerifiedTilesAreAdvancedWhenALeaseEnds) {
  receiver::Tuning tuning = quick();
  tuning.item_bytes = 64u << 10;
  start_placed(RandomPlan::Ignore::nothing, FakeAgent::Setup(), tuning);
  std::atomic<int> revoked{0};
  agent_->revoke_after(model_.layout->half_bytes() / 4, [&] {
    step(0.01);
    if (++revoked == 2) agent_->revoke_after(0, nullptr);
  });
  const PullReport report = pull_placed();
  EXPECT_EQ(report.mode, PullMode::full);
  EXPECT_GT(report.delta_steps, 0u);
  EXPECT_GT(report.replans, 0u);
}

}  // namespace
}  // namespace deltasync::test
