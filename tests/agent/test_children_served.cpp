// A place at an agent with --children-max is free again once its child has said goodbye or is silent, though its
// connection stays: a forked child may hold it, and a stopped process keeps it.
#include <thread>

#include "format/wire_report.hpp"
#include "tests/agent/agent_harness.hpp"

namespace deltasync::agent {
namespace {

class ServedChildren : public AgentTest {
 protected:
  void start(std::chrono::milliseconds silence) {
    options_.pull.limits.admission.children_max = 1;
    options_.pull.limits.child_silence = silence;
    start_agent();
    next_version();
  }
  /// Asked until it is given one or the time has passed.
  bool has_place(Client& peer, std::chrono::milliseconds within) const {
    const Deadline deadline = Deadline::after(within);
    for (;;) {
      const auto reply = peer.plan(ask());
      if (reply) return peer.release(reply->plan).ok();
      if (deadline.passed()) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
};

constexpr auto kNow = std::chrono::milliseconds(0);

TEST_F(ServedChildren, AGoodbyeFreesThePlace) {
  start(std::chrono::hours(1));
  auto leaver = client();
  auto next = client();
  ASSERT_TRUE(has_place(leaver, kNow));
  ASSERT_FALSE(has_place(next, kNow));
  ASSERT_TRUE(leaver.socket.send(wire::Type::end, 99, {}, test_deadline()));
  EXPECT_TRUE(has_place(next, kTestLimit));
  EXPECT_EQ(agent_->pull_server().children().count(), 1u);
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 1; })) << "nothing comes on the other one";
}

TEST_F(ServedChildren, OneThatAsksNothingDoesNotKeepItsPlaceFromOthers) {
  start(std::chrono::milliseconds(1500));
  auto stopped = client();
  ASSERT_TRUE(has_place(stopped, kNow));
  std::this_thread::sleep_for(std::chrono::milliseconds(1700));
  EXPECT_TRUE(has_place(stopped, kNow)) << "nobody else has come";
  auto next = client();
  EXPECT_FALSE(has_place(next, kNow));
  EXPECT_TRUE(has_place(next, kTestLimit));
  EXPECT_FALSE(has_place(stopped, kNow)) << "it asks as any other";
}

/// The agent's own words that an answer comes are no sign of the peer.
TEST_F(ServedChildren, NorDoesOneThatWasStoppedWhileItWaited) {
  start(std::chrono::milliseconds(1500));
  auto stopped = client();
  ASSERT_TRUE(stopped.socket.send(1, wire::KeepAlive{20}, test_deadline()));
  wire::PlanRequest newer = ask_from_served();
  newer.want = wire::WantKind::newer;
  newer.wait_ms = 3'600'000;
  ASSERT_TRUE(stopped.socket.send(2, newer, test_deadline()));
  ASSERT_TRUE(eventually([&] { return agent_->pull_server().children().count() == 1; }));
  auto next = client();
  EXPECT_FALSE(has_place(next, kNow));
  EXPECT_TRUE(has_place(next, kTestLimit));
}

/// Over other connections than the one that has the place.
TEST_F(ServedChildren, OneThatPullsKeepsIt) {
  start(std::chrono::milliseconds(1500));
  auto puller = client();
  const auto reply = puller.plan(ask());
  ASSERT_TRUE(reply);
  auto data = client(wire::Role::data);
  auto next = client();
  for (const Deadline deadline = Deadline::after(std::chrono::seconds(3)); !deadline.passed();) {
    ASSERT_TRUE(data.extent(reply->plan, {0, model_.layout->tile_count()}));
    ASSERT_FALSE(has_place(next, kNow));
  }
}

}  // namespace
}  // namespace deltasync::agent
