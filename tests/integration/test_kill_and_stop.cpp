// kill -9 and SIGSTOP of trainer, agent and receiver at many points. Whatever dies or stands still: what a reader finds
// in the output directory is always a whole published version, and once everybody is back the newest one arrives.
#include <thread>

#include "base/deadline.hpp"
#include "tests/integration/cluster.hpp"

namespace deltasync::integration {
namespace {

constexpr int kLast = kVersions - 1;
constexpr int kExitDeadline = 4;  // cli.md

void sleep_ms(std::uint64_t ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

bool has_ended(const bench::Child& child) {
  siginfo_t info{};  // WNOWAIT: the child stays for its owner to reap
  return ::waitid(P_PID, static_cast<id_t>(child.pid()), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
}

TEST_F(Cluster, ThreeProcessesDeliverTheNewestVersion) {
  auto receiver = follow("out");
  EXPECT_EQ(wait(publish(0, kVersions, 20)), 0);
  EXPECT_TRUE(becomes("out", kLast));
}

TEST_F(Cluster, ManyReceiversAtDifferentVersions) {
  auto early = follow("early");
  ASSERT_EQ(wait(publish(0, 2, 0)), 0);
  ASSERT_TRUE(becomes("early", 1));
  ASSERT_EQ(pull_once("late"), 0);  // holds version 1, and then falls behind
  ASSERT_EQ(wait(publish(2, kVersions, 0)), 0);
  EXPECT_TRUE(becomes("early", kLast));
  EXPECT_EQ(current("late"), 1);
  EXPECT_EQ(pull_once("late"), 0);
  EXPECT_EQ(current("late"), kLast);
  EXPECT_EQ(pull_once("fresh"), 0);
  EXPECT_EQ(current("fresh"), kLast);
}

TEST_F(Cluster, ReceiverKilledAtManyPoints) {
  test::Random random(11);
  auto trainer = publish(0, kVersions, 60);
  for (int round = 0; round < 12; ++round) {
    auto receiver = follow("out");
    sleep_ms(random.below(120));
    ::kill(receiver.pid(), SIGKILL);
    EXPECT_NE(current("out"), kTorn) << "round " << round;
  }
  EXPECT_EQ(wait(std::move(trainer)), 0) << "a dead receiver held the trainer up";
  EXPECT_EQ(pull_once("out"), 0);
  EXPECT_EQ(current("out"), kLast);
}

TEST_F(Cluster, TrainerKilledAtManyPoints) {
  test::Random random(12);
  auto receiver = follow("out");
  for (int round = 0; round < 12; ++round) {
    auto trainer = publish(0, kVersions, 0);
    sleep_ms(random.below(150));
    ::kill(trainer.pid(), SIGKILL);
    EXPECT_NE(current("out"), kTorn) << "round " << round;
  }
  // The next incarnation starts from an older step: a new epoch makes it the newest.
  EXPECT_EQ(wait(publish(2, 4, 0)), 0);
  EXPECT_TRUE(becomes("out", 3));
}

TEST_F(Cluster, AgentKilledAtManyPoints) {
  test::Random random(13);
  auto receiver = follow("out");
  ASSERT_EQ(wait(publish(0, 1, 0)), 0);
  ASSERT_TRUE(becomes("out", 0)) << "an agent that dies in a first handshake ends the reader (cli.md)";
  for (int round = 0; round < 6; ++round) {
    auto trainer = publish(0, kVersions, 10);
    sleep_ms(random.below(200));
    kill_agent();
    sleep_ms(random.below(30));
    start_agent();
    EXPECT_NE(current("out"), kTorn) << "round " << round;
    EXPECT_EQ(wait(std::move(trainer)), 0) << "the trainer did not survive the agent's restart, round " << round;
  }
  EXPECT_TRUE(becomes("out", kLast));
}

/// The ring of deltas outlives its agent: a restart does not cost a late receiver the whole model.
TEST_F(Cluster, ALateReceiverPullsADeltaFromTheAgentAfterTheKilledOne) {
  kill_agent();
  start_agent({"--ring-mib", "64"});
  ASSERT_EQ(wait(publish(0, 1, 0)), 0);
  ASSERT_EQ(pull_mode("late"), "full");
  ASSERT_EQ(wait(publish(1, 4, 0)), 0);
  ASSERT_TRUE(keeps_deltas(3));
  kill_agent();
  start_agent({"--ring-mib", "64"});
  EXPECT_EQ(pull_mode("late"), "delta");
  EXPECT_EQ(current("late"), 3);
  // And on: what is published now goes on from it.
  ASSERT_EQ(wait(publish(4, kVersions, 0)), 0);
  ASSERT_TRUE(keeps_deltas(5));
  kill_agent();
  start_agent({"--ring-mib", "64"});
  EXPECT_EQ(pull_mode("late"), "delta");
  EXPECT_EQ(current("late"), kLast);
}

TEST_F(Cluster, StoppedReceiverHoldsNobodyUp) {
  test::Random random(14);
  auto receiver = follow("out");
  for (int round = 0; round < 3; ++round) {
    auto trainer = publish(0, kVersions, 5);
    sleep_ms(random.below(60));
    ::kill(receiver.pid(), SIGSTOP);
    EXPECT_EQ(wait(std::move(trainer)), 0) << "round " << round;
    EXPECT_NE(current("out"), kTorn);
    ::kill(receiver.pid(), SIGCONT);
    EXPECT_TRUE(becomes("out", kLast)) << "round " << round;
  }
}

TEST_F(Cluster, StoppedAgentEndsInADeadlineAndGoesOn) {
  ASSERT_EQ(wait(publish(0, 2, 0)), 0);
  ::kill(agent_.pid(), SIGSTOP);
  EXPECT_EQ(wait(publish(2, 3, 0, 2)), kExitDeadline);
  ::kill(agent_.pid(), SIGCONT);
  EXPECT_EQ(wait(publish(2, 4, 0)), 0);
  EXPECT_EQ(pull_once("out"), 0);
  EXPECT_EQ(current("out"), 3);
}

TEST_F(Cluster, StoppedTrainerIsNamedAndItsDeathFreesTheSegment) {
  test::Random random(15);
  constexpr int kRounds = 4;
  bool named = false;
  for (int round = 0; round < kRounds; ++round) {
    // The last one has so much to wait for between its versions that it is sure to be stopped before its end.
    auto stopped = publish(0, kVersions, round + 1 < kRounds ? 0 : 30'000);
    const Deadline deadline = Deadline::after(kLimit);
    while (!is_attached(stopped) && !has_ended(stopped)) {
      ASSERT_FALSE(deadline.passed()) << "round " << round;
      sleep_ms(1);
    }
    sleep_ms(random.below(120));
    ::kill(stopped.pid(), SIGSTOP);
    const int now = pull_once("out");
    EXPECT_TRUE(now == 0 || now == kExitDeadline) << now;
    EXPECT_NE(current("out"), kTorn);
    // While it has its slot it may still write, so nobody else may.
    if (is_attached(stopped)) {
      named = true;
      EXPECT_NE(wait(publish(0, 1, 0, 1)), 0) << "round " << round;
    }
    ::kill(stopped.pid(), SIGKILL);
    ::kill(stopped.pid(), SIGCONT);
    static_cast<void>(wait(std::move(stopped)));  // until it is dead the slot is its own
    EXPECT_EQ(wait(publish(1, 3, 0)), 0) << "round " << round;
    EXPECT_EQ(pull_once("out"), 0);
    EXPECT_EQ(current("out"), 2);
  }
  EXPECT_TRUE(named) << "no trainer was stopped while it was attached: this test proves nothing";
}

}  // namespace
}  // namespace deltasync::integration
