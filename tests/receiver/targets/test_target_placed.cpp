// What the target in an engine's memory does beyond what every target promises (test_target_conformance.cpp): where it
// reads, and how it treats weights that are served before it has a version.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <optional>

#include "base/deadline.hpp"
#include "deltasync/target.hpp"
#include "format/tiling.hpp"
#include "placement/regions.hpp"
#include "receiver/targets/target.hpp"
#include "tests/placement/plan_fixture.hpp"
#include "tests/receiver/trainer_model.hpp"

namespace deltasync::test {
namespace {

/// A tied weight is read where its first place is, and written to both.
TEST(PlacedTarget, TiedTilesAreReadInPlace) {
  const std::vector<TensorSpec> specs{{"tied", Dtype::bf16, {300, 512}, {}, {}}};
  TrainerModel trainer(7, specs);
  const std::uint64_t bytes = std::uint64_t{300} * 512 * 2;
  Engine engine;
  PlacementPlan plan;
  plan.memories.push_back(engine.add("weights", 2 * bytes));
  plan.slices.push_back({"tied", {0, 0, 300, 512}, 0, 0, 1024, 2});
  plan.slices.push_back({"tied", {0, 0, 300, 512}, 0, bytes, 1024, 2});
  const auto placement = Placement::build(trainer.layout(), plan);
  ASSERT_TRUE(placement.ok()) << placement.error().to_string();
  auto target = make_placed_target(*placement);
  ASSERT_TRUE(target.ok()) << target.error().to_string();
  ThreadPool pool(2, "tied");
  ASSERT_TRUE((*target)->open(pool, in_time()).ok());
  const Reference first = trainer.now();
  ASSERT_TRUE(commit_whole(**target, first).ok());
  std::vector<std::byte> scratch;
  for (std::uint64_t i = 0; i < trainer.layout()->tile_count(); ++i) {
    const Tile tile = tile_of(*trainer.layout(), i);
    const auto rows = (*target)->live_tile(tile, scratch);
    ASSERT_TRUE(rows.ok());
    EXPECT_EQ(rows->first, engine.base(0) + tile.rect.row * 1024 + tile.rect.col * 2);
  }
  EXPECT_TRUE(scratch.empty());
  const Reference second = trainer.step(0.05);
  std::vector<StagedStep> steps;
  steps.push_back(trainer.delta(first, second));
  ASSERT_TRUE((*target)->commit_delta(std::move(steps), second.state, in_time()).ok());
  EXPECT_EQ(engine.contents(), placed_contents(engine, *trainer.layout(), plan, second.half));
}

/// Slices that cut through tiles leave a rest, for which memory is taken when the target is opened.
TEST(PlacedTarget, TheMemoryForTheRestIsTakenAtTheBinding) {
  const std::vector<TensorSpec> specs{{"cut", Dtype::bf16, {4096, 1024}, {}, {}}};
  TrainerModel trainer(7, specs);
  Engine engine;
  PlacementPlan plan;
  plan.memories.push_back(engine.add("m", std::uint64_t{4096} * 256 * 2));
  plan.slices.push_back({"cut", {0, 0, 4096, 256}, 0, 0, 512, 2});
  plan.ignored.push_back({"cut", Rect{0, 256, 4096, 768}});
  const auto placement = Placement::build(trainer.layout(), plan);
  ASSERT_TRUE(placement.ok()) << placement.error().to_string();
  ASSERT_GT((*placement)->rest_bytes(), 0u);
  auto target = make_placed_target(*placement);
  ASSERT_TRUE(target.ok()) << target.error().to_string();
  ThreadPool pool(2, "rest");
  const Status late = (*target)->open(pool, Deadline::after(std::chrono::seconds(0)));
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Errc::timed_out);
  EXPECT_THAT(late.error().message(), testing::HasSubstr("the rest of tiles"));
  ASSERT_TRUE((*target)->open(pool, in_time()).ok());
  ASSERT_TRUE(commit_whole(**target, trainer.now()).ok());
  EXPECT_EQ(read_live(**target), trainer.now().half);
}

/// Bound over memory that an engine computes with.
class ServedMemory : public testing::Test {
 protected:
  void SetUp() override { start(/*live=*/true); }

  void start(bool live) {
    target_.reset();
    made_.emplace(*trainer_.layout(), 11, RandomPlan::Ignore::parts_of_tiles);
    write_by_plan(*trainer_.layout(), made_->plan, make_model(99).half);
    served_ = made_->engine.contents();
    const auto placement = Placement::build(trainer_.layout(), made_->plan);
    ASSERT_TRUE(placement.ok()) << placement.error().to_string();
    auto target = make_placed_target(*placement, {.live = live});
    ASSERT_TRUE(target.ok()) << target.error().to_string();
    target_ = *std::move(target);
    ASSERT_TRUE(subscribe(*target_, parts_of(*(*placement)).tiles).ok());
    ASSERT_TRUE(target_->open(pool_, in_time()).ok());
  }
  void fill(const Reference& reference) { fill_full(*target_, reference); }
  bool is_served() const { return made_->engine.contents() == served_; }
  bool has(const Reference& reference) {
    return made_->engine.contents() == placed_contents(made_->engine, *trainer_.layout(), made_->plan, reference.half);
  }

  ThreadPool pool_{2, "served"};
  TrainerModel trainer_{7};
  std::optional<RandomPlan> made_;
  std::vector<std::vector<std::uint64_t>> served_;
  std::unique_ptr<Target> target_;
};

TEST_F(ServedMemory, IsRefusedWhenTold) {
  const Status refused = target_->begin_full(FullUpdatePolicy::refuse, in_time());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::no_space);
  EXPECT_THAT(refused.error().message(), testing::HasSubstr("live memory that is in use"));
  EXPECT_TRUE(is_served());
}

TEST_F(ServedMemory, IsStagedOverAndBroughtBack) {
  const Reference first = trainer_.now();
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::stage, in_time()).ok());
    EXPECT_FALSE(target_->capabilities().shared->shares_memory());
    EXPECT_EQ(target_->committed(), nullptr);
    fill(first);
    EXPECT_TRUE(is_served());
    if (i == 0) {
      target_->discard_full();
      EXPECT_TRUE(is_served());
    }
  }
  ASSERT_TRUE(target_->commit_full(first.state, in_time()).ok());
  EXPECT_TRUE(has(first));
  ASSERT_TRUE(roll_back(*target_).ok());
  EXPECT_TRUE(is_served());
  EXPECT_EQ(target_->committed(), nullptr);
  EXPECT_EQ(target_->begin_full(FullUpdatePolicy::refuse, in_time()).error().code(), Errc::no_space)
      << "it is served again";
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  EXPECT_TRUE(has(first));
  const Reference second = trainer_.step(0.1);
  std::vector<StagedStep> steps;
  steps.push_back(trainer_.delta(first, second));
  ASSERT_TRUE(target_->commit_delta(std::move(steps), second.state, in_time()).ok());
  EXPECT_TRUE(has(second));
}

TEST_F(ServedMemory, IsOverwrittenInPlace) {
  const Reference first = trainer_.now();
  ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::in_place, in_time()).ok());
  EXPECT_TRUE(target_->capabilities().shared->shares_memory());
  fill(first);
  EXPECT_TRUE(has(first));
  target_->discard_full();
  // Parts of a version are in it: nothing is to be kept any more.
  ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::refuse, in_time()).ok());
  fill(first);
  ASSERT_TRUE(target_->commit_full(first.state, in_time()).ok());
  EXPECT_TRUE(has(first));
}

TEST_F(ServedMemory, IsNoneUnlessSaid) {
  start(/*live=*/false);
  const Reference first = trainer_.now();
  ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::refuse, in_time()).ok());
  fill(first);
  EXPECT_TRUE(has(first));
}

}  // namespace
}  // namespace deltasync::test
