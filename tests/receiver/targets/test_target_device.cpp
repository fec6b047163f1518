// What only targets on devices do. Compiled twice: for a device that is played on the host, and for a real one (label
// gpu). What no real device does when it is asked to is in test_target_device_faults.cpp.
#include "deltasync/receiver.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/attest.hpp"
#include "tests/receiver/device_fixture.hpp"

namespace deltasync::test {
namespace {

using testing::HasSubstr;

/// An engine that loads its own weights after a pull that was given up keeps them.
TEST_P(DeviceTarget, WhatIsGivenUpIsNotWrittenLater) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::stage, in_time()).ok());
  fill_full(*target_, first);
  target_->discard_full();
  const LiveMemory& memory = engine_->plan().memories.front();
  const std::vector<std::byte> loaded(memory.bytes, std::byte{0x5A});
  poke(memory.base, loaded);
  ASSERT_TRUE(
      target_->begin_full(FullUpdatePolicy::stage, in_time()).ok());  // all that was asked for before has happened
  EXPECT_TRUE(peek(memory.base, memory.bytes) == loaded);
  target_->discard_full();
}

TEST(DeviceTargets, OnlyTilesThatAreKeptAreAttested) {
  ThreadPool pool(1, "target");
  TrainerModel trainer(1, {{"a", Dtype::bf16, {8, 16}, {}, {}}, {"b", Dtype::bf16, {8, 16}, {}, {}}});
  const std::unique_ptr<Target> target = make_host_target(trainer.layout());
  ASSERT_TRUE(subscribe(*target, *TileSet::make(*trainer.layout(), {{0, 1}})).ok());
  ASSERT_TRUE(target->open(pool, in_time()).ok());
  const auto refused = attest(*target, TileSet::whole(*trainer.layout()), in_time());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::invalid_argument);
  EXPECT_THAT(refused.error().message(), HasSubstr("tile 1 (b)"));
}

TEST_P(DeviceTarget, AWrongBaseIsRefused) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_->step(0.3);
  const Reference third = trainer_->step(0.3);
  StagedStep step = trainer_->delta(second, third);  // over the first
  std::vector<std::uint64_t> digests = first.state.digests;
  ResolvedBudget budget(kEverything);
  const Status status = verify_frame(*target_, step.frames[0], first.state.digests, digests, budget);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), Errc::corrupt);
  EXPECT_TRUE(step.frames[0].resolved.empty());
}

/// What was verified is on the device: its commit is a launch and nothing else, and so is its rollback.
TEST_P(DeviceTarget, CommitsBringNothingToTheDevice) {
  start_whole();
  Reference now = trainer_->now();
  ASSERT_TRUE(commit_whole(*target_, now).ok());
  std::uint64_t allocations = 0;
  const std::uint64_t a_launch = fake_ != nullptr ? 1 : 0;  // nobody counts a real device's
  for (int i = 0; i < 4; ++i) {
    const Reference next = trainer_->step(0.01);
    auto steps = resolved_step(now, next, kEverything);
    ASSERT_EQ(kept(steps), records(steps));
    for (const StagedFrame& frame : steps[0].frames) EXPECT_TRUE(frame.resolved.empty()) << "on the host as well";
    const gpu::FakeDevice::Counts before = counts();
    if (i != 0) {
      EXPECT_EQ(before.allocations, allocations) << "memory is kept from one update to the next";
    }
    allocations = before.allocations;
    ASSERT_TRUE(target_->commit_delta(std::move(steps), next.state, in_time()).ok());
    EXPECT_EQ(counts().copies, before.copies);
    EXPECT_EQ(counts().launches, before.launches + a_launch);
    ASSERT_TRUE(holds(next));
    const gpu::FakeDevice::Counts committed = counts();
    EXPECT_EQ(committed.allocations, before.allocations);
    if (i % 2 == 0) {
      ASSERT_TRUE(roll_back(*target_).ok());
      EXPECT_EQ(counts().launches, committed.launches + a_launch);
      ASSERT_TRUE(holds(now));
      steps = resolved_step(now, next, kEverything);  // the same update once more
      ASSERT_TRUE(target_->commit_delta(std::move(steps), next.state, in_time()).ok());
      ASSERT_TRUE(holds(next));
    }
    forget_rollback(*target_);
    now = next;
  }
}

/// Frames that are verified twice (the first one was given up), an update that nobody commits, and frames that are
/// given up between others: their changes are not committed.
TEST_P(DeviceTarget, ChangesThatAreGivenUpAreNotCommitted) {
  start_whole();
  const Reference first = trainer_->now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference other = trainer_->step(0.01);
  const Reference second = trainer_->step(0.01);
  { const auto given_up = resolved_step(first, other, kEverything); }
  auto mixed = resolved_step(first, other, kEverything);
  std::vector<StagedStep> steps = resolved_step(first, second, kEverything);
  ResolvedBudget budget(kEverything);
  std::vector<std::uint64_t> digests = first.state.digests;
  for (std::size_t i = 0; i < steps[0].frames.size(); i += 2) {
    StagedFrame again = std::move(steps[0].frames[i]);
    if (i < mixed[0].frames.size()) mixed[0].frames[i] = {};
    ASSERT_TRUE(verify_frame(*target_, again, first.state.digests, digests, budget).ok());
    steps[0].frames[i] = std::move(again);
  }
  ASSERT_EQ(kept(steps), records(steps));
  ASSERT_TRUE(target_->commit_delta(std::move(steps), second.state, in_time()).ok());
  ASSERT_TRUE(holds(second));
  mixed.clear();
  ASSERT_TRUE(roll_back(*target_).ok());
  ASSERT_TRUE(holds(first));
}

/// Where there is no room for changes they take the long way.
TEST_P(DeviceTarget, ChangesWithoutRoomComeWithTheCommit) {
  for (const bool device_is_full : {false, true}) {
    if (device_is_full && fake_ == nullptr) break;
    // Several frames, and room for one.
    trainer_ =
        std::make_unique<TrainerModel>(GetParam(), std::vector<TensorSpec>{{"a", Dtype::bf16, {4096, 1024}, {}, {}}});
    PlacedTargetOptions options;
    options.changes_bytes = std::uint64_t{150} << 10;
    start_whole(options);
    const Reference first = trainer_->now();
    ASSERT_TRUE(commit_whole(*target_, first).ok());
    const Reference second = trainer_->step(0.01);
    if (fake_ != nullptr) fake_->fill(device_is_full);
    auto steps = resolved_step(first, second, kEverything);
    EXPECT_LT(kept(steps), records(steps));
    EXPECT_EQ(kept(steps) == 0, device_is_full);
    if (fake_ != nullptr) fake_->fill(false);
    ASSERT_TRUE(target_->commit_delta(std::move(steps), second.state, in_time()).ok());
    ASSERT_TRUE(holds(second));
    ASSERT_TRUE(roll_back(*target_).ok());
    ASSERT_TRUE(holds(first));
    const Reference third = trainer_->step(0.01);
    target_->capabilities().devices->begin_pull(in_time());
    steps = resolved_step(first, third, kEverything);
    target_->capabilities().devices->end_pull();
    EXPECT_NE(kept(steps), 0u) << "there is room again";
    ASSERT_TRUE(target_->commit_delta(std::move(steps), third.state, in_time()).ok());
    ASSERT_TRUE(holds(third));
  }
}

/// Exponent classes are decoded on the host, over the tile: their changes go to the device all the same.
TEST_P(DeviceTarget, ChangesDecodedOnTheHostStayThereToo) {
  start_whole();
  const Reference first = trainer_->small_step(0.03);
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_->small_step(0.03);
  std::vector<StagedStep> steps;
  steps.push_back(trainer_->compact_delta(first, second));
  std::size_t classes = 0;
  ResolvedBudget budget(kEverything);
  std::vector<std::uint64_t> digests = first.state.digests;
  for (StagedFrame& frame : steps[0].frames) {
    const Status status = verify_frame(*target_, frame, first.state.digests, digests, budget);
    ASSERT_TRUE(status.ok()) << status.error().to_string();
    for (const delta::TileRecord& record : frame.records) classes += record.codec == delta::Codec::rice_class ? 1 : 0;
    EXPECT_TRUE(frame.resolved.empty());
  }
  EXPECT_GT(classes, 0u);
  EXPECT_EQ(kept(steps), records(steps));
  const std::uint64_t copies = counts().copies;
  ASSERT_TRUE(target_->commit_delta(std::move(steps), second.state, in_time()).ok());
  EXPECT_EQ(counts().copies, copies);
  ASSERT_TRUE(holds(second));
  ASSERT_TRUE(roll_back(*target_).ok());
  ASSERT_TRUE(holds(first));
}

TEST_P(DeviceTarget, AFlippedBitIsFoundAndNamed) {
  const Reference first = trainer_->now();
  const TileSet all = TileSet::whole(*trainer_->layout());
  EXPECT_EQ(attest(*target_, all, in_time()).error().code(), Errc::not_found);
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const auto intact = attest(*target_, all, in_time());
  ASSERT_TRUE(intact.ok()) << intact.error().to_string();
  EXPECT_TRUE(intact->empty());
  Random random(GetParam());
  for (std::uint64_t i = 0; i < trainer_->layout()->tile_count(); ++i) {
    const Tile tile = tile_of(*trainer_->layout(), i);
    const Tensor& tensor = trainer_->layout()->tensors()[tile.tensor];
    const auto places = places_of(engine_->plan(), tensor.spec.name, tile.rect.row + random.below(tile.rect.rows),
                                  tile.rect.col + random.below(tile.rect.cols));
    if (places.empty()) continue;  // its rest is the target's own
    std::byte* const at = places[0] + random.below(tensor.element_bytes);
    const std::byte byte = peek(at, 1)[0];
    const std::byte flipped = byte ^ static_cast<std::byte>(1u << random.below(8));
    poke(at, {&flipped, 1});
    const auto found = attest(*target_, all, in_time());
    ASSERT_TRUE(found.ok()) << found.error().to_string();
    EXPECT_THAT(*found, testing::ElementsAre(TileMismatch{i, tensor.spec.name, {}}));
    poke(at, {&byte, 1});
  }
}

/// As many at a time as little staging has room for, and several times while the first ones are under way.
TEST_P(DeviceTarget, TilesOfManyLaunchesAreAttested) {
  std::vector<TensorSpec> specs;
  constexpr std::uint64_t kTensors = 1'600;
  for (std::uint64_t i = 0; i < kTensors; ++i) specs.push_back({"t" + std::to_string(i), Dtype::bf16, {4, 8}, {}, {}});
  trainer_ = std::make_unique<TrainerModel>(GetParam(), specs);
  PlacedTargetOptions options;
  options.staging_bytes = 64u << 10;
  start_whole(options);
  ASSERT_TRUE(commit_whole(*target_, trainer_->now()).ok());
  const TileSet all = TileSet::whole(*trainer_->layout());
  std::vector<TileMismatch> wrong;
  for (std::uint64_t i = GetParam(); i < kTensors; i += kTensors / 8) {
    std::byte* const at = places_of(engine_->plan(), specs[i].name, 1, 1)[0];
    const std::byte flipped = peek(at, 1)[0] ^ std::byte{4};
    poke(at, {&flipped, 1});
    wrong.push_back({i, specs[i].name, {}});
    const std::uint64_t launches = counts().launches;
    const auto found = attest(*target_, all, in_time());
    ASSERT_TRUE(found.ok()) << found.error().to_string();
    EXPECT_EQ(*found, wrong);
    if (fake_ == nullptr) continue;
    EXPECT_GT(counts().launches - launches, 4u);
    fake_->fail(gpu::FakeDevice::Call::copy, 1 + wrong.size());  // in or out, of one launch or another
    EXPECT_FALSE(attest(*target_, all, in_time()).ok());
  }
  const auto found = attest(*target_, all, in_time());
  ASSERT_TRUE(found.ok()) << found.error().to_string();
  EXPECT_EQ(*found, wrong);
}

TEST(DeviceTargets, WithoutADeviceThereIsNone) {
  TrainerModel trainer(1, {{"a", Dtype::bf16, {8, 16}, {}, {}}});
  alignas(8) static std::byte elsewhere[512];
  PlacementPlan plan;
  plan.memories = {{"a", elsewhere, 512, {77}, {}}};
  plan.slices = {{"a", {0, 0, 8, 16}, 0, 0, 32, 2}};
  const auto placement = Placement::build(trainer.layout(), plan);
  ASSERT_TRUE(placement.ok());
  const auto target = make_placed_target(*placement);
  ASSERT_FALSE(target.ok());
  EXPECT_EQ(target.error().code(), Errc::unsupported);
  EXPECT_THAT(target.error().message(), HasSubstr("device target: cuda:77"));
}

INSTANTIATE_TEST_SUITE_P(Seeds, DeviceTarget, testing::Range<std::uint64_t>(1, kDeviceSeeds + 1));

}  // namespace
}  // namespace deltasync::test
