// Plans that end early: leases that are revoked, agents that restart, another layout.
#include <atomic>

#include "tests/receiver/pull_fixture.hpp"

namespace deltasync::test {
namespace {

using wire::Type;

TEST_F(PullTest, PullSlowerThanTheStepsEnds) {
  receiver::Tuning tuning = quick();
  tuning.item_bytes = 64u << 10;
  start({}, tuning);
  std::atomic<int> revoked{0};
  // Each plan gets an eighth of the model before two more trainer steps take its half away.
  agent_->revoke_after(model_.layout->half_bytes() / 8, [&] {
    ++revoked;
    step(0.01);
    step(0.01);
  });
  const PullReport report = pull_and_commit();
  EXPECT_EQ(report.mode, PullMode::full);
  EXPECT_GE(revoked.load(), 5) << "the test did not make the pull slow";
  EXPECT_GE(report.replans, 5u);
  EXPECT_GE(report.delta_steps, 10u);
  // That it ended at all shows that verified tiles stay: one plan alone never gets beyond an eighth.
}

TEST_F(PullTest, VerifiedTilesThatCannotBeAdvancedAreFetchedAgain) {
  for (const Fault fault : {Fault::flip_at_source, Fault::flip_in_transit, Fault::wrong_tiles}) {
    receiver::Tuning tuning = quick();
    tuning.item_bytes = 64u << 10;
    start({}, tuning);
    std::atomic<int> revoked{0};
    agent_->revoke_after(model_.layout->half_bytes() / 3, [&] {
      step(0.01);
      if (++revoked == 4) agent_->revoke_after(0, nullptr);
    });
    agent_->on_request(fault_on(Type::get_frames, fault, 0, kAlways));
    const PullReport report = pull_and_commit();
    EXPECT_EQ(report.mode, PullMode::full);
    EXPECT_GT(agent_->requests(Type::get_frames), 0u) << "nothing was to be advanced: this test proves nothing";
    receiver_.reset();
  }
}

TEST_F(PullTest, ShortPullsOverALiveVersionConverge) {
  FakeAgent::Setup setup;
  setup.ring_deltas = 0;
  start(setup);
  pull_and_commit();
  const auto before = agent_->newest();
  step(0.3);
  for (int pulls = 1;; ++pulls) {
    const std::uint64_t from = agent_->requests(Type::get_extent);
    agent_->on_request([from](const Request& r) {
      return r.type == Type::get_extent && r.ordinal >= from + 8 ? Fault::stall : Fault::none;
    });
    expect_memory(before);
    auto staged = pull({}, 400);
    if (staged.ok()) {
      EXPECT_GE(pulls, 3) << "each pull got too much: this test proves nothing";
      ASSERT_TRUE((*staged)->commit().ok());
      break;
    }
    ASSERT_EQ(staged.error().code(), Errc::timed_out) << staged.error().to_string();
    ASSERT_LT(pulls, 60) << "pulls make no progress";
  }
  expect_holds_newest();
}

TEST_F(PullTest, APartOfOneVersionDoesNotStandInTheWayOfAnother) {
  options_.delta_bytes_max = 1;  // the newest version comes as a full update
  start();
  pull_and_commit();
  const std::uint64_t first = receiver_->current()->id.number;
  step(0.01);
  step(0.01);
  for (const std::uint64_t wanted : {first, first + 1}) {
    const std::uint64_t from = agent_->requests(Type::get_extent);
    agent_->on_request([from](const Request& r) {
      return r.type == Type::get_extent && r.ordinal >= from + 8 ? Fault::stall : Fault::none;
    });
    const auto part = pull({}, 400);
    ASSERT_FALSE(part.ok());
    ASSERT_EQ(part.error().code(), Errc::timed_out) << part.error().to_string();
    agent_->on_request(nullptr);
    const PullReport report = pull_and_commit({.number = wanted});
    EXPECT_EQ(report.mode, wanted == first ? PullMode::up_to_date : PullMode::delta);
    EXPECT_EQ(receiver_->current()->id.number, wanted);
  }
}

TEST_F(PullTest, RevokedAndTheRingForgot) {
  FakeAgent::Setup setup;
  setup.ring_deltas = 1;
  receiver::Tuning tuning = quick();
  tuning.item_bytes = 64u << 10;
  start(setup, tuning);
  std::atomic<int> revoked{0};
  agent_->revoke_after(model_.layout->half_bytes() / 2, [&] {
    step(0.3);
    step(0.3);
    if (++revoked == 2) agent_->revoke_after(0, nullptr);
  });
  const PullReport report = pull_and_commit();
  EXPECT_GE(report.replans, 2u);
  EXPECT_EQ(report.delta_steps, 0u);
}

TEST_F(PullTest, RevokedOverALiveVersion) {
  FakeAgent::Setup setup;
  setup.ring_deltas = 2;
  start(setup);
  pull_and_commit();
  const auto before = agent_->newest();
  for (int i = 0; i < 5; ++i) step(0.05);  // out of the ring: full
  std::atomic<int> revoked{0};
  agent_->revoke_after(model_.layout->half_bytes() / 3, [&] {
    step(0.01);
    if (++revoked == 4) agent_->revoke_after(0, nullptr);
  });
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  EXPECT_EQ((*staged)->report().mode, PullMode::full);
  EXPECT_GE((*staged)->report().replans, 2u);
  expect_memory(before);
  ASSERT_TRUE((*staged)->commit().ok());
  expect_memory(agent_->half_of(receiver_->current()->id));
}

TEST_F(PullTest, AgentRestartsInTheMiddleOfAFullPull) {
  start();
  std::atomic<int> n{0};
  agent_->on_request([&](const Request& r) {
    if (r.type == Type::get_extent && ++n == 10) agent_->restart();
    return Fault::none;
  });
  const PullReport report = pull_and_commit();
  EXPECT_GE(report.replans, 1u);
  EXPECT_EQ(agent_->plans().back().partial, 1);
  // No more than what was verified while the connection broke comes again.
  EXPECT_LE(report.tiles, model_.layout->tile_count() + 8);
}

TEST_F(PullTest, AgentRestartsBetweenPlanAndFrames) {
  start();
  pull_and_commit();
  step();
  std::atomic<int> n{0};
  agent_->on_request([&](const Request& r) {
    if (r.type == Type::get_frames && ++n == 1) agent_->restart();
    return Fault::none;
  });
  // The new process has no ring: only a full update leads on.
  EXPECT_EQ(pull_and_commit().mode, PullMode::full);
}

TEST_F(PullTest, AnotherLayout) {
  start();
  pull_and_commit();
  const auto before = agent_->newest();
  agent_->change_layout(make_model(9).layout);
  agent_->restart();
  for (int i = 0; i < 2; ++i) {
    auto staged = pull({}, 60'000);
    ASSERT_FALSE(staged.ok());
    EXPECT_EQ(staged.error().code(), Errc::layout_mismatch) << staged.error().to_string();
  }
  expect_memory(before);
}

TEST_F(PullTest, BindChecksTheLayout) {
  start();
  auto other = make_host_target(make_model(9).layout);
  EXPECT_EQ(receiver_->bind(std::move(other), in_ms(1000)).error().code(), Errc::layout_mismatch);
  EXPECT_EQ(receiver_->bind(nullptr, in_ms(1000)).error().code(), Errc::invalid_argument);
}

}  // namespace
}  // namespace deltasync::test
