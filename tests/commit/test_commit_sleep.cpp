// What the ranks of a group do while no participant has their receivers: their engines sleep and wake, and live memory
// is repaired. commit_protocol.md, "Sleep and repair", says how.
#include <future>

#include "deltasync/receiver.hpp"
#include "tests/commit/real_group.hpp"

namespace deltasync::commit {
namespace {

class CommitAsleep : public CommitReal {
 protected:
  void SetUp() override {
    CommitReal::SetUp();
    shadows_ = true;
    begin_all();
    expect_update();
    publish();
    expect_update();
  }
  /// The receiver and the engine are the caller's again.
  void leave(std::uint32_t r) {
    Member& m = members_[r];
    m.rank.reset();
    ASSERT_TRUE(m.engine->pause(test_deadline()));
  }
  void fall_asleep(std::uint32_t r) {
    leave(r);
    Member& m = members_[r];
    const Status asleep = m.receiver->release(test_deadline());
    ASSERT_TRUE(asleep) << asleep.error().to_string();
    m.share->overwrite(~std::size_t{0});
  }
  void wake(std::uint32_t r) {
    const auto restored = members_[r].receiver->restore(test_deadline());
    ASSERT_TRUE(restored) << restored.error().to_string();
    join(r);
  }
};

TEST_P(CommitAsleep, RanksThatSleptServeWhatTheyServedBefore) {
  for (std::uint32_t r = 0; r < kRanks; ++r) fall_asleep(r);
  EXPECT_FALSE(ledger_.served_by(0) || ledger_.served_by(1));
  for (std::uint32_t r = 0; r < kRanks; ++r) wake(r);
  expect_all_serve(number_);
  publish();
  expect_update();
  for (const Member& m : members_) EXPECT_EQ(m.receiver->mode, PullMode::delta);
}

TEST_P(CommitAsleep, AnUpdateWaitsForARankThatSleeps) {
  fall_asleep(1);
  publish();
  auto update = std::async(std::launch::async, [&] { return coordinator_->update(Want(), test_deadline()); });
  EXPECT_TRUE(eventually([&] { return members_[0].rank->report().phase == Phase::staged; }));
  EXPECT_TRUE(serves(0, number_ - 1)) << "the other serves on";
  wake(1);
  const auto version = update.get();
  ASSERT_TRUE(version) << version.error().to_string();
  EXPECT_EQ(version->id.number, number_);
  expect_all_serve(number_);
  for (const Member& m : members_) EXPECT_EQ(m.receiver->mode, PullMode::delta);
}

TEST_P(CommitAsleep, LiveMemoryIsRepairedInBetween) {
  leave(1);
  Member& m = members_[1];
  m.share->overwrite(1);
  const auto wrong = m.receiver->attest(test_deadline());
  ASSERT_TRUE(wrong) << wrong.error().to_string();
  EXPECT_FALSE(wrong->empty());
  const auto repaired = m.receiver->repair(*wrong, test_deadline());
  ASSERT_TRUE(repaired) << repaired.error().to_string();
  EXPECT_EQ(repaired->tiles, wrong->size());
  EXPECT_TRUE(serves(0, number_));
  join(1);
  expect_all_serve(number_);
}

INSTANTIATE_TEST_SUITE_P(Targets, CommitAsleep, testing::Values(Placed(true, true)),
                         [](const auto& /*one*/) { return "Placed"; });

}  // namespace
}  // namespace deltasync::commit
