// Processes that die while a forked child of theirs keeps open what they had: no socket closes then. And one that
// stands still before its first word.
#include <gmock/gmock-matchers.h>

#include "tests/bucket/raw_peers.hpp"

namespace deltasync::test {
namespace {

using testing::HasSubstr;

class BucketDeaths : public BucketChannel {
 protected:
  ~BucketDeaths() override {
    for (int i = 0; i < 2; ++i) over_.give();
  }
  /// Kills this process, whose child lives until the test is over.
  [[noreturn]] void die_leaving_a_child() const {
    if (::fork() == 0) {
      ::alarm(60);
      over_.wait();
      ::_exit(0);
    }
    ::raise(SIGKILL);
    std::abort();
  }

  Signal over_;
};

TEST_F(BucketDeaths, ATrainerThatDiesAmidAVersion) {
  Child first([&]() -> int {
    auto sender = open();
    if (!sender || !(*sender)->begin(version_of(1), soon())) return 1;
    die_leaving_a_child();
  });
  const auto receiver = connect();
  ASSERT_TRUE(receiver.ok()) << receiver.error().message();
  const Status torn = take(**receiver, 1);
  ASSERT_FALSE(torn.ok());
  EXPECT_EQ(torn.error().code(), Errc::connection) << torn.error().message();
  EXPECT_THAT(torn.error().message(), HasSubstr("rank 0 (trainer): the peer's process has died"));
  EXPECT_EQ(first.wait(), -SIGKILL);
}

TEST_F(BucketDeaths, ATrainerThatDiesBetweenVersionsIsInNobodysWay) {
  Child first([&]() -> int {
    auto sender = open();
    if (!sender || !send(**sender, model_.half, 1)) return 1;
    die_leaving_a_child();
  });
  const auto receiver = connect();
  ASSERT_TRUE(receiver.ok()) << receiver.error().message();
  EXPECT_TRUE(take(**receiver, 1).ok());
  EXPECT_EQ(first.wait(), -SIGKILL);
  std::thread second([&] {
    auto sender = open();
    ASSERT_TRUE(sender.ok()) << sender.error().message();
    EXPECT_TRUE(send(**sender, model_.half, 2).ok());
  });
  EXPECT_TRUE(take(**receiver, 2).ok());
  second.join();
}

TEST_F(BucketDeaths, AnEngineThatDiesBetweenVersionsIsFoundAgainAtItsPath) {
  Child first([&]() -> int {
    const auto receiver = connect();
    if (!receiver || !take(**receiver, 1)) return 1;
    die_leaving_a_child();
  });
  const auto sender = open();
  ASSERT_TRUE(sender.ok()) << sender.error().message();
  EXPECT_TRUE(send(**sender, model_.half, 1).ok());
  EXPECT_EQ(first.wait(), -SIGKILL);
  Child second([&] {
    const auto receiver = connect();
    return receiver && take(**receiver, 2) && has(**receiver, model_.half) ? 0 : 1;
  });
  const Status sent = send(**sender, model_.half, 2);
  EXPECT_TRUE(sent.ok()) << sent.error().message();
  EXPECT_EQ(second.wait(), 0);
}

TEST_F(BucketDeaths, AnEngineThatDiesInsteadOfAnAnswer) {
  Child engine([&]() -> int {
    RawEngine raw(path());
    raw.accept();
    raw.answer(raw.next());
    raw.next();
    die_leaving_a_child();
  });
  const auto sender = open();
  ASSERT_TRUE(sender.ok()) << sender.error().message();
  const Status begun = (*sender)->begin(version_of(1), soon());
  ASSERT_FALSE(begun.ok());
  EXPECT_EQ(begun.error().code(), Errc::connection) << begun.error().message();
  EXPECT_THAT(begun.error().message(), HasSubstr("the peer's process has died"));
  EXPECT_EQ(engine.wait(), -SIGKILL);
}

TEST_F(BucketDeaths, ATrainerThatStandsStillBeforeItsFirstWordIsHeardWhenItGoesOn) {
  RawTrainer still(model_.layout);
  std::thread trainer([&] {
    ASSERT_TRUE(still.reach(path()).ok());
    {
      auto sender = open();
      ASSERT_TRUE(sender.ok()) << sender.error().message();
      EXPECT_TRUE(send(**sender, model_.half, 1).ok());
    }
    const Status welcome = still.greet(still.memory->descriptor());
    EXPECT_TRUE(welcome.ok()) << welcome.error().message();
    still.socket.close();
    auto sender = open();
    ASSERT_TRUE(sender.ok()) << sender.error().message();
    EXPECT_TRUE(send(**sender, model_.half, 2).ok());
  });
  const auto receiver = connect();
  ASSERT_TRUE(receiver.ok()) << receiver.error().message();
  for (std::uint64_t v = 1; v < 3; ++v) EXPECT_TRUE(take(**receiver, v).ok());
  trainer.join();
}

TEST_F(BucketDeaths, OfManyThatStandStillTheOldestIsDropped) {
  std::vector<RawTrainer> still;
  for (int i = 0; i < 65; ++i) still.emplace_back(model_.layout);
  std::thread trainer([&] {
    for (RawTrainer& one : still) ASSERT_TRUE(one.reach(path()).ok());
    EXPECT_EQ(still[0].heard(1).error().code(), Errc::connection);
    EXPECT_FALSE(still[1].socket.peer_closed());
    auto sender = open();
    ASSERT_TRUE(sender.ok()) << sender.error().message();
    EXPECT_TRUE(send(**sender, model_.half, 1).ok());
  });
  const auto receiver = connect();
  EXPECT_TRUE(receiver.ok() && take(**receiver, 1).ok());
  trainer.join();
}

}  // namespace
}  // namespace deltasync::test
