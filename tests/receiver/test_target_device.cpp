// What only targets on devices do: fail half-way, wait for streams, and say which tile somebody wrote to.
#include "receiver/target_device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "deltasync/attest.hpp"
#include "gpu/fake_device.hpp"
#include "receiver/attest.hpp"
#include "receiver/verify.hpp"
#include "tests/receiver/device_place.hpp"
#include "tests/receiver/trainer_model.hpp"

namespace deltasync::test {
namespace {

using gpu::FakeDevice;
using testing::HasSubstr;
using Call = FakeDevice::Call;

std::vector<TensorSpec> few_specs() {
  std::vector<TensorSpec> specs = sample_specs();
  std::erase_if(specs, [](const TensorSpec& spec) { return spec.name == "wide.row" || spec.name == "ffn.down"; });
  return specs;
}

constexpr std::uint64_t kStagingBytes = std::uint64_t{2} << 20;

class DeviceTarget : public testing::TestWithParam<std::uint64_t> {
 protected:
  DeviceTarget() : trainer_(GetParam(), few_specs()) {}
  void SetUp() override { start({}); }
  void TearDown() override { target_.reset(); }

  void start(DeviceTargetOptions options, bool engine_stream = false) {
    target_.reset();
    FakeDevice::Options fake;
    fake.seed = GetParam();
    auto device = std::make_unique<FakeDevice>(fake);
    fake_ = device.get();
    DeviceEngine::Devices devices;
    devices.push_back(std::move(device));
    engine_.emplace(*trainer_.layout(), GetParam(), RandomPlan::Ignore::parts_of_tiles, std::move(devices), false);
    allocations_before_ = fake_->counts().allocations;
    options.staging_bytes = kStagingBytes;
    if (engine_stream) {
      stream_ = fake_->engine_stream();
      options.engine_streams.push_back({0, stream_.raw});
    }
    auto target = engine_->make(trainer_.layout(), options);
    ASSERT_TRUE(target.ok()) << target.error().to_string();
    target_ = *std::move(target);
    ASSERT_TRUE(target_->open(pool_, in_time()).ok());
  }
  testing::AssertionResult holds(const Reference& reference) {
    const TargetState* const state = target_->committed();
    if (state == nullptr || !(state->version == reference.state.version)) {
      return testing::AssertionFailure() << "another version, or none";
    }
    const std::string differences = engine_->differences(*trainer_.layout(), reference.half);
    if (!differences.empty()) return testing::AssertionFailure() << differences;
    return testing::AssertionSuccess();
  }
  /// With decoded changes of some frames.
  std::vector<StagedStep> resolved_step(const Reference& before, const Reference& after, std::uint64_t budget_bytes) {
    std::vector<StagedStep> steps;
    steps.push_back(trainer_.delta(before, after));
    ResolvedBudget budget(budget_bytes);
    std::vector<std::uint64_t> digests = before.state.digests;
    for (StagedFrame& frame : steps[0].frames) {
      const Status status = verify_frame(*target_, frame, before.state.digests, digests, budget);
      EXPECT_TRUE(status.ok()) << status.error().to_string();
    }
    return steps;
  }
  static constexpr std::uint64_t kEverything = std::uint64_t{1} << 40;

  ThreadPool pool_{3, "target"};
  TrainerModel trainer_;
  std::optional<DeviceEngine> engine_;
  FakeDevice* fake_ = nullptr;
  gpu::StreamHandle stream_;
  std::uint64_t allocations_before_ = 0;
  TargetPtr target_;
};

/// Each call of a commit and of a rollback fails once: the version before is there, whole, and goes on from there.
TEST_P(DeviceTarget, AFailedCallTakesTheCommitBack) {
  const Reference first = trainer_.now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_.step(0.2);
  for (const std::uint64_t budget : {kEverything, std::uint64_t{0}}) {
    for (const Call call : {Call::copy, Call::launch, Call::allocate}) {
      for (std::uint64_t n = 1;; n += 1 + n / 4) {
        SCOPED_TRACE("call " + std::to_string(static_cast<int>(call)) + " number " + std::to_string(n));
        auto steps = resolved_step(first, second, budget);
        fake_->fail(call, n);
        const Status status = target_->commit_delta(std::move(steps), second.state, in_time());
        if (status.ok()) {
          fake_->fail(call, std::uint64_t{1} << 40);
          EXPECT_GT(n, call == Call::allocate && budget == 0 ? 0u : 1u);
          ASSERT_TRUE(holds(second));
          ASSERT_TRUE(target_->rollback().ok());
          ASSERT_TRUE(holds(first));
          break;
        }
        EXPECT_THAT(status.error().message(), HasSubstr(fake_->name()));
        ASSERT_TRUE(holds(first)) << status.error().to_string();
      }
    }
  }
}

TEST_P(DeviceTarget, AFailedCallTakesAStagedFullBack) {
  const Reference first = trainer_.now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_.step(0.9);
  for (const Call call : {Call::copy, Call::launch}) {
    for (std::uint64_t n = 1;; n += 1 + n / 2) {
      ASSERT_TRUE(target_->begin_full(FullOverLive::stage, in_time()).ok());
      fill_full(*target_, second);
      fake_->fail(call, n);
      const Status status = target_->commit_full(second.state);
      fake_->fail(call, std::uint64_t{1} << 40);
      if (status.ok()) {
        ASSERT_TRUE(holds(second));
        ASSERT_TRUE(target_->rollback().ok());
        ASSERT_TRUE(holds(first));
        break;
      }
      ASSERT_TRUE(holds(first)) << status.error().to_string();
      target_->discard_full();
    }
  }
}

/// An engine that loads its own weights after a pull that was given up keeps them.
TEST_P(DeviceTarget, WhatIsGivenUpIsNotWrittenLater) {
  const Reference first = trainer_.now();
  ASSERT_TRUE(target_->begin_full(FullOverLive::stage, in_time()).ok());
  fill_full(*target_, first);
  target_->discard_full();
  const LiveMemory& memory = engine_->plan().memories.front();
  const std::vector<std::byte> loaded(memory.bytes, std::byte{0x5A});
  fake_->poke(memory.base, loaded.data(), loaded.size());
  ASSERT_TRUE(target_->begin_full(FullOverLive::stage, in_time()).ok());  // all that was asked for before has happened
  std::vector<std::byte> kept(memory.bytes);
  fake_->peek(memory.base, kept.data(), kept.size());
  EXPECT_TRUE(kept == loaded);
  target_->discard_full();
}

TEST(DeviceTargets, OnlyTilesThatAreKeptAreAttested) {
  ThreadPool pool(1, "target");
  TrainerModel trainer(1, {{"a", Dtype::bf16, {8, 16}, {}, {}}, {"b", Dtype::bf16, {8, 16}, {}, {}}});
  const TargetPtr target = make_host_target(trainer.layout());
  ASSERT_TRUE(target->subscribe(*TileSet::make(*trainer.layout(), {{0, 1}})).ok());
  ASSERT_TRUE(target->open(pool, in_time()).ok());
  const auto refused = attest(*target, TileSet::whole(*trainer.layout()), in_time());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::invalid_argument);
  EXPECT_THAT(refused.error().message(), HasSubstr("tile 1 (b)"));
}

/// Who puts tiles is told which one did not get there, and can put it again.
TEST_P(DeviceTarget, AFirstFullIsWholeOrNothing) {
  const Reference first = trainer_.now();
  for (const Call call : {Call::copy, Call::launch}) {
    ASSERT_TRUE(target_->begin_full(FullOverLive::stage, in_time()).ok());
    fake_->fail(call, 3);
    int failed = 0;
    for (std::uint64_t i = 0; i < trainer_.layout()->tile_count(); ++i) {
      const Tile tile = trainer_.layout()->tile(i);
      const Status put = put_from_half(*target_, first, tile);
      if (put.ok()) continue;
      ++failed;
      EXPECT_THAT(put.error().message(), HasSubstr(fake_->name()));
      EXPECT_THAT(put.error().message(), HasSubstr(trainer_.layout()->tensors()[tile.tensor].spec.name));
      ASSERT_TRUE(put_from_half(*target_, first, tile).ok());
    }
    EXPECT_EQ(failed, 1);
    EXPECT_EQ(target_->committed(), nullptr);
    ASSERT_TRUE(target_->commit_full(first.state).ok());
    ASSERT_TRUE(holds(first));
    ASSERT_TRUE(target_->rollback().ok());
  }
}

TEST_P(DeviceTarget, WhatCannotBeReadIsNoCorruption) {
  const Reference first = trainer_.now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_.step(0.2);
  StagedStep step = trainer_.delta(first, second);
  ResolvedBudget budget(kEverything);
  std::vector<std::uint64_t> digests = first.state.digests;
  fake_->fail(Call::launch, 1);
  const Status status = verify_frame(*target_, step.frames[0], first.state.digests, digests, budget);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), Errc::io);
  EXPECT_THAT(status.error().message(), HasSubstr(fake_->name()));
  EXPECT_TRUE(verify_frame(*target_, step.frames[0], first.state.digests, digests, budget).ok());
}

/// Decoded changes are resolved where the tiles are: these do not come to the host.
TEST_P(DeviceTarget, TilesAreVerifiedWhereTheyAre) {
  const Reference first = trainer_.now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_.step(0.01);
  const std::uint64_t before = fake_->counts().bytes_copied;
  auto steps = resolved_step(first, second, kEverything);
  EXPECT_LT(fake_->counts().bytes_copied - before, trainer_.layout()->model_bytes() / 2);
  ASSERT_TRUE(target_->commit_delta(std::move(steps), second.state, in_time()).ok());
  ASSERT_TRUE(holds(second));
}

TEST_P(DeviceTarget, AWrongBaseIsRefused) {
  const Reference first = trainer_.now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_.step(0.3);
  const Reference third = trainer_.step(0.3);
  StagedStep step = trainer_.delta(second, third);  // over the first
  std::vector<std::uint64_t> digests = first.state.digests;
  ResolvedBudget budget(kEverything);
  const Status status = verify_frame(*target_, step.frames[0], first.state.digests, digests, budget);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), Errc::corrupt);
  EXPECT_TRUE(step.frames[0].resolved.empty());
}

/// Long for a device that is played here, and short for those who wait for one that hangs.
DeviceTargetOptions impatient() {
  DeviceTargetOptions options;
  options.patience = std::chrono::milliseconds(400);
  return options;
}

/// A launch that does not end: nobody knows what is in live memory, so there is no version. A full update brings one,
/// behind whatever still happens in the stream.
TEST_P(DeviceTarget, AStreamThatDoesNotEndLeavesNoTornVersion) {
  start(impatient());
  const Reference first = trainer_.now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_.step(0.2);
  const bool all_at_once = GetParam() % 2 == 0;
  auto steps = resolved_step(first, second, all_at_once ? kEverything : 0);
  fake_->fail(Call::endless_launch, all_at_once ? 1 : 9);
  const Status status = target_->commit_delta(std::move(steps), second.state, in_time());
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), Errc::timed_out) << status.error().to_string();
  EXPECT_EQ(target_->committed(), nullptr);
  EXPECT_EQ(target_->rollback().error().code(), Errc::unsupported);
  fake_->hang(false);
  ASSERT_TRUE(fake_->drain());
  const Reference third = trainer_.step(0.2);
  const Status again = commit_whole(*target_, third);
  ASSERT_TRUE(again.ok()) << again.error().to_string();
  EXPECT_TRUE(holds(third));
}

TEST_P(DeviceTarget, AHangingDeviceDoesNotHoldUpTheEnd) {
  start(impatient());
  ASSERT_TRUE(commit_whole(*target_, trainer_.now()).ok());
  fake_->hang(true);
  std::vector<std::byte> scratch;
  EXPECT_EQ(target_->live_tile(trainer_.layout()->tile(0), scratch).error().code(), Errc::timed_out);
  target_.reset();
  fake_->hang(false);
  fake_->drain();  // what is left may still use its memory
}

/// The engine's own work before a commit sees the old weights, what it begins afterwards the new ones.
TEST_P(DeviceTarget, CommitsStandInTheEnginesStream) {
  start({}, true);
  const Reference first = trainer_.now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_.step(1.0);
  const LiveMemory& memory = engine_->plan().memories[0];
  std::vector<std::vector<std::byte>> seen(3);
  const auto look = [&](std::size_t i) {
    fake_->engine_work(stream_, [&, i] { seen[i].assign(memory.base, memory.base + memory.bytes); });
  };
  auto steps = resolved_step(first, second, 20'000);
  look(0);
  ASSERT_TRUE(target_->commit_delta(std::move(steps), second.state, in_time()).ok());
  look(1);
  ASSERT_TRUE(target_->rollback().ok());
  look(2);
  ASSERT_TRUE(fake_->drain());
  ASSERT_TRUE(holds(first));
  EXPECT_EQ(seen[0], seen[2]);
  EXPECT_NE(seen[0], seen[1]);
  std::vector<std::byte> now(memory.bytes);
  fake_->peek(memory.base, now.data(), now.size());
  EXPECT_EQ(seen[2], now);
}

TEST_P(DeviceTarget, TakesNoMoreMemoryThanItSays) {
  const Reference first = trainer_.now();
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const Reference second = trainer_.step(0.5);
  auto steps = resolved_step(first, second, kEverything);
  const std::uint64_t allocations = fake_->counts().allocations;
  ASSERT_TRUE(target_->commit_delta(std::move(steps), second.state, in_time()).ok());
  EXPECT_EQ(fake_->counts().allocations, allocations + 1) << "the changes, for a rollback";
  target_->forget_rollback();
  EXPECT_EQ(fake_->counts().allocations, allocations);
  target_.reset();
  EXPECT_EQ(fake_->counts().allocations, allocations_before_);
  EXPECT_EQ(fake_->counts().pinned_bytes, 0u);
  EXPECT_LE(fake_->counts().pinned_bytes_most, kStagingBytes + (std::uint64_t{64} << 20)) << "with the test's own";
}

TEST_P(DeviceTarget, AFlippedBitIsFoundAndNamed) {
  const Reference first = trainer_.now();
  const TileSet all = TileSet::whole(*trainer_.layout());
  EXPECT_EQ(attest(*target_, all, in_time()).error().code(), Errc::not_found);
  ASSERT_TRUE(commit_whole(*target_, first).ok());
  const auto sound = attest(*target_, all, in_time());
  ASSERT_TRUE(sound.ok()) << sound.error().to_string();
  EXPECT_TRUE(sound->empty());
  Random random(GetParam());
  for (std::uint64_t i = 0; i < trainer_.layout()->tile_count(); ++i) {
    const Tile tile = trainer_.layout()->tile(i);
    const Tensor& tensor = trainer_.layout()->tensors()[tile.tensor];
    const auto places = places_of(engine_->plan(), tensor.spec.name, tile.rect.row + random.below(tile.rect.rows),
                                  tile.rect.col + random.below(tile.rect.cols));
    if (places.empty()) continue;  // its rest is the target's own
    std::byte* const at = places[0] + random.below(tensor.element_bytes);
    std::byte byte{};
    fake_->peek(at, &byte, 1);
    const std::byte flipped = byte ^ static_cast<std::byte>(1u << random.below(8));
    fake_->poke(at, &flipped, 1);
    const auto found = attest(*target_, all, in_time());
    ASSERT_TRUE(found.ok()) << found.error().to_string();
    EXPECT_THAT(*found, testing::ElementsAre(WrongTile{i, tensor.spec.name, {}}));
    fake_->poke(at, &byte, 1);
  }
  fake_->fail(Call::launch, 1);
  EXPECT_EQ(attest(*target_, all, in_time()).error().code(), Errc::io);
}

INSTANTIATE_TEST_SUITE_P(Seeds, DeviceTarget, testing::Range<std::uint64_t>(1, 5));

TEST(DeviceTargets, WithoutADeviceThereIsNone) {
  TrainerModel trainer(1, {{"a", Dtype::bf16, {8, 16}, {}, {}}});
  alignas(8) static std::byte elsewhere[512];
  PlacementPlan plan;
  plan.memories = {{"a", elsewhere, 512, {77}, {}}};
  plan.slices = {{"a", {0, 0, 8, 16}, 0, 0, 32, 2}};
  const auto placement = Placement::build(trainer.layout(), plan);
  ASSERT_TRUE(placement.ok());
  const auto target = make_device_target(*placement);
  ASSERT_FALSE(target.ok());
  EXPECT_EQ(target.error().code(), Errc::unsupported);
  EXPECT_THAT(target.error().message(), HasSubstr("device target: cuda:77"));
}

}  // namespace
}  // namespace deltasync::test
