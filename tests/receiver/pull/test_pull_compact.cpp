// Deltas in exponent classes: asked for by slow links alone, and as good as any other delta once they are.
#include <gmock/gmock-matchers.h>

#include "format/tile_set.hpp"
#include "tests/receiver/hf_fixture.hpp"
#include "tests/receiver/pull_fixture.hpp"
#include "tests/receiver/trainer_model.hpp"

namespace deltasync::test {
namespace {

using wire::Type;

class CompactPull : public PullTest {
 protected:
  static receiver::Tuning slow_link() {
    receiver::Tuning t = quick();
    t.compact = true;
    return t;
  }
  void start_slow(FakeAgent::Setup setup = FakeAgent::Setup()) {
    setup.compact = true;
    start(setup, slow_link());
  }
  VersionId small_step(double density = 0.01) {
    const std::lock_guard lock(trainer_);
    step_small(model_.half, *model_.layout, density, ++seed_);
    return agent_->publish(model_.half);
  }
  /// What the plain delta from there to the newest version takes.
  std::uint64_t plain_bytes(const std::vector<std::byte>& before) const { return plain_bytes(before, model_.half); }
  std::uint64_t plain_bytes(const std::vector<std::byte>& before, const std::vector<std::byte>& after) const {
    ThreadPool pool(1, "test");
    std::vector<std::uint64_t> digests(model_.layout->tile_count());
    delta::half_digests(*model_.layout, before, digests, pool);
    return delta::encode(*model_.layout, before, after, digests, {}, pool).frame_bytes;
  }
  /// Room for the frames of the next steps, but not for their changes in decoded form.
  std::uint64_t too_little_for(int steps, double density) const {
    std::uint64_t bytes = 0;
    std::vector<std::byte> half = model_.half;
    for (int i = 1; i <= steps; ++i) {
      const std::vector<std::byte> before = half;
      step_small(half, *model_.layout, density, seed_ + static_cast<std::uint64_t>(i));
      bytes += plain_bytes(before, half);
    }
    return bytes * 3 / 2;
  }
  static std::uint64_t frame_bytes(const PullReport& report) { return report.wire_bytes - report.metadata_bytes; }
  std::uint64_t asked_compact() const {
    const auto plans = agent_->plans();
    return static_cast<std::uint64_t>(
        std::count_if(plans.begin(), plans.end(), [](const wire::PlanRequest& p) { return p.compact != 0; }));
  }
};

TEST_F(CompactPull, IsSmallerAndRolledBackBitForBit) {
  start_slow();
  EXPECT_EQ(pull_and_commit().mode, PullMode::full);
  for (int i = 0; i < 3; ++i) {
    const std::vector<std::byte> before = model_.half;
    small_step();
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    EXPECT_EQ((*staged)->report().mode, PullMode::delta);
    EXPECT_LT(frame_bytes((*staged)->report()), plain_bytes(before) * 9 / 10);
    expect_memory(before);
    ASSERT_TRUE((*staged)->commit().ok());
    expect_holds_newest();
    ASSERT_TRUE((*staged)->rollback().ok());
    expect_memory(before);
    staged->reset();
    pull_and_commit();
  }
}

TEST_F(CompactPull, IsAskedForOnceADeltaToldThatItPays) {
  FakeAgent::Setup setup;
  setup.compact = true;
  options_.link_gbps = 1e-6;  // believed, though bytes come faster
  start(setup);
  EXPECT_EQ(pull_and_commit().mode, PullMode::full);
  small_step();
  EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
  EXPECT_EQ(asked_compact(), 0u) << "how much a step changes was not known";
  const std::vector<std::byte> before = model_.half;
  small_step();
  const PullReport report = pull_and_commit();
  EXPECT_EQ(asked_compact(), 1u);
  EXPECT_LT(frame_bytes(report), plain_bytes(before) * 9 / 10);
}

/// Which waits for half of what a plan allows.
TEST_F(CompactPull, ItsPlanAllowsTheAgentTimeToMakeIt) {
  FakeAgent::Setup setup;
  setup.compact = true;
  receiver::Tuning tuning = slow_link();
  tuning.wait_slice = std::chrono::milliseconds(1);
  start(setup, tuning);
  pull_and_commit();
  small_step();
  pull_and_commit();
  const auto allowed_ms = static_cast<std::uint64_t>(receiver::classes_plan_s(model_.layout->half_bytes()) * 1000);
  ASSERT_GT(allowed_ms, 1u) << "the case is none";
  EXPECT_EQ(agent_->plans().back().wait_ms, allowed_ms);
}

TEST_F(CompactPull, IsNotAskedForOverAFastLink) {
  FakeAgent::Setup setup;
  setup.compact = true;
  options_.link_gbps = 100;
  start(setup);
  pull_and_commit();
  for (int i = 0; i < 2; ++i) {
    small_step();
    EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
  }
  EXPECT_EQ(asked_compact(), 0u);
}

/// A version that arrives at the agent comes as fast as it comes there.
TEST_F(CompactPull, AVersionThatArrivesSaysNothingOfTheLink) {
  for (const bool arrives : {false, true}) {
    FakeAgent::Setup setup;
    setup.compact = true;
    setup.bytes_per_s = 4e6;
    setup.arriving = arrives;
    receiver::Tuning tuning = quick();
    tuning.link_sample_bytes = 512u << 10;
    tuning.item_bytes = 1u << 20;
    start(setup, tuning);
    EXPECT_EQ(pull_and_commit().mode, PullMode::full);
    for (int i = 0; i < 2; ++i) {
      step(0.1);
      EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
    }
    EXPECT_EQ(asked_compact(), arrives ? 0u : 1u) << "an agent without packing threads says as much as any other";
    receiver_.reset();
  }
}

TEST_F(CompactPull, SeveralStepsAndBack) {
  start_slow();
  pull_and_commit();
  const std::vector<std::byte> before = model_.half;
  for (int i = 0; i < 3; ++i) small_step();
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  EXPECT_EQ((*staged)->report().delta_steps, 3u);
  ASSERT_TRUE((*staged)->commit().ok());
  expect_holds_newest();
  ASSERT_TRUE((*staged)->rollback().ok());
  expect_memory(before);
  staged->reset();
  EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
}

TEST_F(CompactPull, WhoDoesNotAskGetsNone) {
  FakeAgent::Setup setup;
  setup.compact = true;
  start(setup);
  pull_and_commit();
  const std::vector<std::byte> before = model_.half;
  small_step();
  EXPECT_EQ(frame_bytes(pull_and_commit()), plain_bytes(before));
  EXPECT_EQ(asked_compact(), 0u);
}

/// Neither for a full update nor for what finishes one.
TEST_F(CompactPull, IsAskedForFromAWholeVersionOnly) {
  start_slow();
  agent_->revoke_after(model_.layout->half_bytes() / 3, [this] {
    small_step();
    agent_->revoke_after(0, nullptr);
  });
  EXPECT_EQ(pull_and_commit().mode, PullMode::full);
  const auto plans = agent_->plans();
  ASSERT_GE(plans.size(), 2u);
  for (const wire::PlanRequest& plan : plans) EXPECT_EQ(plan.compact, plan.partial != 0 ? 0 : 1);
  EXPECT_TRUE(std::any_of(plans.begin(), plans.end(), [](const wire::PlanRequest& p) { return p.partial != 0; }));
}

TEST_F(CompactPull, IntoADirectory) {
  start_slow();
  TempDir dir;
  const Sidecar sidecar = receiver_->sidecar();
  auto target = make_hf_target(receiver_->layout(), sidecar, dir.path() / "out");
  ASSERT_TRUE(target.ok()) << target.error().to_string();
  ASSERT_TRUE(receiver_->bind(*std::move(target), in_ms(60'000)).ok());
  const auto expect_files = [&](const std::vector<std::byte>& half) {
    EXPECT_EQ(compare_directory(dir.path() / "out" / "current", *model_.layout, sidecar, half), "");
  };
  for (int i = 0; i < 5; ++i) {  // from the second delta on the version before is patched forward
    const std::vector<std::byte> before = model_.half;
    if (i > 0) small_step();
    if (i == 3) small_step();
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    EXPECT_EQ((*staged)->report().mode, i == 0 ? PullMode::full : PullMode::delta);
    if (i > 0) {
      EXPECT_LT(frame_bytes((*staged)->report()), plain_bytes(before) * (i == 3 ? 2 : 1));
    }
    ASSERT_TRUE((*staged)->commit().ok());
    expect_files(model_.half);
    if (i == 4) {
      ASSERT_TRUE((*staged)->rollback().ok());
      expect_files(before);
    }
  }
}

TEST_F(CompactPull, OfSomeTiles) {
  start_slow();
  std::vector<Slice> some;
  some.push_back(*row_slice(*model_.layout, "big.0", 1, 4));
  some.push_back(*col_slice(*model_.layout, "ffn.down", 1, 2));
  std::vector<std::byte> memory(model_.layout->half_bytes());
  ASSERT_TRUE(receiver_->bind(make_host_target(receiver_->layout(), memory), some, in_ms(60'000)).ok());
  const TileSet tiles = *TileSet::of(*model_.layout, some);
  for (int i = 0; i < 3; ++i) {
    if (i > 0) small_step(0.03);
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    EXPECT_EQ((*staged)->report().mode, i == 0 ? PullMode::full : PullMode::delta);
    ASSERT_TRUE((*staged)->commit().ok());
    for (std::uint64_t n = 0; n < tiles.tiles(); ++n) {
      const std::uint64_t tile = tiles.nth(n);
      ASSERT_EQ(delta::tile_digest(*model_.layout, memory, tile),
                delta::tile_digest(*model_.layout, model_.half, tile));
    }
  }
}

/// Classes go by the old elements: over others they place the changes elsewhere, which the digests show.
TEST_F(CompactPull, WrongBaseIsFoundAndReplaced) {
  for (const int steps : {1, 2}) {
    options_.scrub_tiles = 0;
    start_slow();
    pull_and_commit();
    const std::uint32_t big = tensor("big.2");
    for (std::uint64_t i = 1; i < model_.layout->tensors()[big].bytes; i += 2) live_byte(big, i) ^= std::byte{0x22};
    for (int i = 0; i < steps; ++i) small_step(0.05);
    EXPECT_EQ(pull_and_commit().mode, PullMode::full);
    EXPECT_EQ(agent_->plans().back().compact, 0) << "no delta is wanted at all";
    small_step();
    EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
    receiver_.reset();
  }
}

/// Between pull and commit: changes of several steps are decoded again at the commit, over what is there then.
TEST_F(CompactPull, WhatSomebodyWroteBeforeTheCommitIsFound) {
  start_slow();
  pull_and_commit();
  small_step();
  small_step();
  const auto version = receiver_->current();
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  ASSERT_EQ((*staged)->report().delta_steps, 2u);
  const std::uint32_t big = tensor("big.3");
  for (std::uint64_t i = 1; i < 65536; i += 2) live_byte(big, i) ^= std::byte{0x2A};
  const Status status = (*staged)->commit();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), Errc::corrupt);
  EXPECT_THAT(status.error().message(), testing::HasSubstr("big.3"));
  EXPECT_EQ(receiver_->current(), version);
  staged->reset();
  // What it has is not trusted any more, and is replaced without another look.
  const PullReport report = pull_and_commit();
  EXPECT_EQ(report.mode, PullMode::full);
  EXPECT_EQ(report.replans, 0u);
  small_step();
  EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
}

TEST_F(CompactPull, DamagedOnesAreAskedForAgain) {
  start_slow();
  pull_and_commit();
  small_step();
  agent_->on_request(fault_on(Type::get_frames, Fault::flip_at_source, 0, 1));
  EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
  small_step();
  agent_->on_request(fault_on(Type::get_frames, Fault::drop_midway, 0, 3));
  EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
}

/// Undoing them takes memory that nobody sees in the size of their frames.
TEST_F(CompactPull, TooManyChangesComePlain) {
  for (const int steps : {1, 2}) {
    options_.delta_bytes_max = too_little_for(steps, 0.005);
    start_slow();
    pull_and_commit();
    for (int i = 0; i < steps; ++i) small_step(0.005);
    const PullReport report = pull_and_commit();
    EXPECT_EQ(report.mode, PullMode::delta);
    EXPECT_GE(report.replans, 1u);
    EXPECT_EQ(agent_->plans().back().compact, 0);
    receiver_.reset();
  }
}

TEST_F(CompactPull, AgentsThatHideThemAreFound) {
  for (const int steps : {1, 2}) {
    options_.delta_bytes_max = too_little_for(steps, 0.005);
    FakeAgent::Setup setup;
    setup.hides_changes = true;
    start_slow(setup);
    pull_and_commit();
    for (int i = 0; i < steps; ++i) small_step(0.005);
    EXPECT_EQ(pull_and_commit().mode, PullMode::full) << steps;
    receiver_.reset();
  }
}

}  // namespace
}  // namespace deltasync::test
