// A group of real receivers through all that may happen to it: commits that fail, ranks and coordinators that end.
#include <condition_variable>
#include <future>
#include <mutex>

#include "tests/commit/real_group.hpp"

namespace deltasync::commit {
namespace {

/// Where a rank waits until the test lets it go on.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    came_ = true;
    EXPECT_TRUE(changed_.wait_until(lock, test_deadline().at(), [&] { return open_; }));
  }
  bool came() const {
    const std::lock_guard lock(mutex_);
    return came_;
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool came_ = false;
  bool open_ = false;
};

TEST_P(CommitReal, TheFirstVersionAndDeltasAfterIt) {
  begin_all();
  EXPECT_FALSE(members_[0].rank->serving() || members_[1].rank->serving());
  expect_update();
  for (const Member& m : members_) EXPECT_EQ(m.receiver->mode, PullMode::full);
  for (const double density : {0.01, 0.05, 0.001, 0.02}) {
    publish(density);
    expect_update();
    for (const Member& m : members_) EXPECT_EQ(m.receiver->mode, PullMode::delta);
  }
  publish();
  publish();  // one that nobody serves
  expect_update();
  expect_update();  // nothing new
}

/// The other rank has written the new version by then, and rolls back bit for bit.
TEST_P(CommitReal, ACommitThatFailsIsRolledBackByTheOther) {
  for (std::uint32_t failing = 0; failing < kRanks; ++failing) {
    SCOPED_TRACE(failing);
    begin_with_one_that_fails(failing);
    ASSERT_FALSE(HasFatalFailure());
    expect_update();
    publish();
    expect_failed_update(failing);
    expect_all_serve(number_ - 1);
    EXPECT_EQ(coordinator_->served()->id.number, number_ - 1);
    expect_update();
    publish();
    expect_update();
    for (const Member& m : members_) EXPECT_EQ(m.receiver->mode, PullMode::delta);
    for (std::uint32_t r = 0; r < kRanks; ++r) end(r);
    coordinator_.reset();
  }
}

/// There is no version to go back to, and nobody serves.
TEST_P(CommitReal, AFirstCommitThatFails) {
  begin_with_one_that_fails(1);
  ASSERT_FALSE(HasFatalFailure());
  expect_failed_update(1);
  EXPECT_FALSE(members_[0].rank->serving() || members_[1].rank->serving());
  EXPECT_FALSE(ledger_.served_by(0) || ledger_.served_by(1));
  EXPECT_FALSE(coordinator_->served());
  expect_update();
  publish();
  expect_update();
}

TEST_P(CommitReal, ACoordinatorKilledAtEachStep) {
  start_coordinator_process();
  begin(0);
  begin(1);
  ASSERT_FALSE(HasFatalFailure());
  expect_all_serve(number_);
  for (const char* point : {"order stage", "order prepare", "log commit", "logged commit", "order commit", "log finish",
                            "logged finish", "order finish"}) {
    SCOPED_TRACE(point);
    arm(point);
    publish();
    ASSERT_TRUE(eventually([&] { return process_->has(WEXITED); })) << "it never came there";
    start_coordinator_process();
    ASSERT_FALSE(HasFatalFailure());
    expect_all_serve(number_);
  }
}

TEST_P(CommitReal, AFinishThatOnlyOneHasHeardIsSaidByTheNextCoordinator) {
  start_coordinator();
  begin(0);
  finish_comes_ = true;
  begin(1, {}, true);
  ASSERT_FALSE(HasFatalFailure());
  expect_update();
  publish();
  finish_comes_ = false;
  const auto version = coordinator_->update(Want(), test_deadline());
  ASSERT_TRUE(version) << version.error().to_string();
  ASSERT_TRUE(eventually([&] { return serves(0, number_) && finishes_lost_ > 0; })) << who_is_where();
  EXPECT_FALSE(members_[1].rank->serving());
  EXPECT_EQ(members_[1].rank->state(), RankState::committed_waiting);
  EXPECT_FALSE(ledger_.served_by(1));
  coordinator_.reset();
  finish_comes_ = true;
  start_coordinator();
  expect_all_serve(number_);
  EXPECT_EQ(coordinator_->served()->id.number, number_);
  publish();
  expect_update();
}

TEST_P(CommitReal, ARankMadeAgainServesOnlyOnceItHasCaughtUp) {
  begin_all();
  expect_update();
  publish();
  expect_update();
  for (std::uint32_t r = 0; r < kRanks; ++r) {
    SCOPED_TRACE(r);
    const auto gate = std::make_shared<Gate>();
    begin(r, [gate](const std::string& point) {
      if (point == "worked catch_up") gate->pass();
    });
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_TRUE(eventually([&] { return gate->came(); })) << who_is_where();
    EXPECT_FALSE(members_[r].rank->serving()) << "nobody has told it that it may";
    EXPECT_FALSE(ledger_.served_by(r));
    EXPECT_TRUE(serves(1 - r, number_)) << "the other serves on";
    gate->open();
    expect_all_serve(number_);
    publish();
    expect_update();
  }
}

/// A driver that follows its trainer has an update open always.
TEST_P(CommitReal, ARankMadeAgainWhileAnUpdateWaitsServesMeanwhile) {
  begin_all();
  expect_update();
  auto update = std::async(std::launch::async, [&] {
    const Want newer{.newer = true};
    return coordinator_->update(newer, test_deadline());
  });
  const auto pulls = [&](std::uint32_t r) { return members_[r].rank->report().phase == Phase::staging; };
  EXPECT_TRUE(eventually([&] { return pulls(0) && pulls(1); }));
  begin(1);
  expect_all_serve(number_);
  EXPECT_TRUE(eventually([&] { return pulls(1); })) << "it waits like the other";
  publish();
  const auto version = update.get();
  ASSERT_TRUE(version) << version.error().to_string();
  EXPECT_EQ(version->id.number, number_);
  expect_all_serve(number_);
}

/// The trainer has gone on: what the others serve is not to be had whole any more.
TEST_P(CommitReal, ARankMadeAgainTooLateComesWithTheNextUpdate) {
  begin_all();
  expect_update();
  publish();
  begin(1);
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_TRUE(eventually([&] { return !members_[1].rank->report().problem.empty(); }));
  EXPECT_EQ(members_[1].rank->report().code, Errc::gone) << who_is_where();
  EXPECT_FALSE(members_[1].rank->serving());
  EXPECT_TRUE(serves(0, number_ - 1));
  expect_update();
}

TEST_P(CommitReal, AnUpdateWaitsForARankThatIsAway) {
  begin_all();
  expect_update();
  end(1);
  publish();
  auto update = std::async(std::launch::async, [&] { return coordinator_->update(Want(), test_deadline()); });
  EXPECT_TRUE(eventually([&] { return members_[0].rank->report().phase == Phase::staged; }));
  EXPECT_TRUE(serves(0, number_ - 1)) << "staging disturbs nobody";
  begin(1);
  const auto version = update.get();
  ASSERT_TRUE(version) << version.error().to_string();
  EXPECT_EQ(version->id.number, number_);
  expect_all_serve(number_);
}

INSTANTIATE_TEST_SUITE_P(Targets, CommitReal,
                         testing::Values(Placed(false, true), Placed(true, true), Placed(false, false)),
                         [](const auto& of) {
                           return std::string(of.param.first ? "Placed" : "Host") +
                                  (of.param.second ? "Placed" : "Host");
                         });

}  // namespace
}  // namespace deltasync::commit
