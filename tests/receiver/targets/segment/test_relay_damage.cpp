// A stray write into the segment that a relay fills: what the relay brought stays the truth, and nobody commits
// anything else.
#include "agent/http/health.hpp"
#include "tests/receiver/targets/segment/relay_node.hpp"

namespace deltasync::agent {
namespace {

class RelayDamage : public RelayNode {
 protected:
  /// As many versions as it takes until halves are changed in place.
  void settle() {
    node_options_.core.scrub.pass = std::chrono::milliseconds(0);
    start();
    for (int i = 0; i < 4; ++i) {
      if (i != 0) next_version(0.01);
      hand_on();
    }
  }
  void flip(unsigned half) {
    const Tensor& tensor = model_.layout->tensors().back();
    node_served()->generation->segment->half(half)[tensor.offset + 1] ^= std::byte{0x40};
  }
  std::unique_ptr<Receiver> joiner() const {
    auto receiver = connect_to(node_->port());
    EXPECT_TRUE(receiver->bind(make_host_target(receiver->layout()), test_deadline()));
    return receiver;
  }
  bool withdrawn() const { return !node_served()->damaged.empty(); }
  testing::AssertionResult pulls_nothing(Receiver& receiver) const {
    const auto staged = receiver.pull({}, Deadline::after(std::chrono::seconds(3)));
    if (staged) return testing::AssertionFailure() << to_string((*staged)->report().version);
    const std::string why = staged.error().message();
    if (why.find("damaged") == std::string::npos) return testing::AssertionFailure() << why;
    return testing::AssertionSuccess();
  }
  net::HttpPage health() const {
    return health_page({node_->core(), node_->pull_server(), nullptr, 1, std::chrono::steady_clock::now()});
  }
  /// The node has the next version, no matter who held what before.
  void goes_on(std::vector<std::unique_ptr<Receiver>>& ranks, Receiver& joins) {
    next_version(0.01);
    pull(*relay_);
    ASSERT_TRUE(receiver::wait_served(*relay_, test_deadline()));
    EXPECT_EQ(node_served()->version, AgentTest::served()->version);
    EXPECT_EQ(node_served()->root, AgentTest::served()->root);
    EXPECT_FALSE(withdrawn());
    EXPECT_EQ(health().status, 200);
    all_pull(ranks, PullMode::delta);
    pull(joins);
    EXPECT_TRUE(held(joins) == model_.half);
    next_version(0.01);
    pull(*relay_);
    ASSERT_TRUE(receiver::wait_served(*relay_, test_deadline()));
    EXPECT_EQ(node_served()->root, AgentTest::served()->root);
    all_pull(ranks, PullMode::delta);
  }
};

TEST_F(RelayDamage, OfTheVersionThatIsServed) {
  settle();
  auto ranks = siblings();
  all_pull(ranks, PullMode::full);
  const ServedPtr served = node_served();
  flip(served->half.half);
  const auto late = joiner();
  EXPECT_TRUE(pulls_nothing(*late));
  EXPECT_TRUE(withdrawn());
  EXPECT_EQ(node_served()->root, AgentTest::served()->root) << "its digests are the trainer's";
  EXPECT_EQ(health().status, 503);
  for (auto& rank : ranks) EXPECT_EQ(pull(*rank).mode, PullMode::up_to_date) << "what they hold is right";

  const Status heard = receiver::wait_served(*relay_, test_deadline());
  ASSERT_FALSE(heard);
  EXPECT_EQ(heard.error().code(), Errc::corrupt) << heard.error().to_string();
  EXPECT_FALSE(relay_->current());
  goes_on(ranks, *late);
}

/// The half that the next version goes into is changed in place: its other tiles are not looked at before it is sealed.
TEST_F(RelayDamage, OfTheHalfThatTheNextVersionGoesInto) {
  settle();
  auto ranks = siblings();
  all_pull(ranks, PullMode::full);
  flip(1 - node_served()->half.half);
  next_version(0.0);
  pull(*relay_);
  ASSERT_TRUE(eventually([&] { return node_served()->version == AgentTest::served()->version; }));
  const auto late = joiner();
  EXPECT_TRUE(pulls_nothing(*late));
  EXPECT_EQ(node_served()->root, AgentTest::served()->root) << "its digests are the trainer's";
  all_pull(ranks, PullMode::delta);
  EXPECT_FALSE(receiver::wait_served(*relay_, test_deadline()));
  goes_on(ranks, *late);
}

TEST_F(RelayDamage, OfMuchOfAHalfIsFoundBeforeAnybodyAsks) {
  settle();
  const auto half = node_served()->generation->segment->half(1 - node_served()->half.half);
  for (std::size_t at = 1; at < half.size(); at += 512) half[at] ^= std::byte{0x40};
  next_version(0.0);
  pull(*relay_);
  ASSERT_TRUE(eventually([&] { return node_served()->version == AgentTest::served()->version; }));
  EXPECT_TRUE(withdrawn());
}

/// A version that the agent has no delta of, and takes the digests of itself.
TEST_F(RelayDamage, BeforeAVersionThatIsNotHandedOver) {
  options_.core.merge_steps_min = 0;
  settle();
  auto ranks = siblings();
  all_pull(ranks, PullMode::full);
  flip(1 - node_served()->half.half);
  next_version(0.0);
  next_version(0.01);
  const PullReport report = pull(*relay_);
  EXPECT_EQ(report.delta_steps, 2u);
  ASSERT_TRUE(eventually([&] { return node_served()->version == AgentTest::served()->version; }));
  EXPECT_EQ(node_served()->root, AgentTest::served()->root);
  const auto late = joiner();
  pull(*late);
  EXPECT_TRUE(held(*late) == model_.half);
  all_pull(ranks, PullMode::delta);
}

}  // namespace
}  // namespace deltasync::agent
