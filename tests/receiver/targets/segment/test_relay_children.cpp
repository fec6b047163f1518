// An agent that takes few children, and relays to whose agents it sends the others: all get every version, no matter
// who came first, and who dies.
#include <algorithm>
#include <stop_token>
#include <thread>

#include "tests/receiver/targets/segment/relay_node.hpp"

namespace deltasync::agent {
namespace {

const Want kNewer{.newer = true};

/// A relay and the agent that it writes to. It goes on by itself until it is ended.
class Hop {
 public:
  explicit Hop(const std::string& from, std::size_t children_max = 0, bool advertise = true) {
    AgentOptions options;
    options.core.name = "hop";
    options.core.shm_dir = dir_.path();
    options.core.ring_bytes_max = 64u << 20;
    options.trainer.socket_path = (dir_.path() / "agent.sock").string();
    options.pull.limits.admission.children_max = children_max;
    auto agent = Agent::start(options);
    EXPECT_TRUE(agent) << agent.error().to_string();
    agent_ = std::move(*agent);
    ReceiverOptions receiver_options;
    receiver_options.endpoint = from;
    receiver_options.streams = 2;
    auto relay = Receiver::connect(receiver_options, test_deadline());
    EXPECT_TRUE(relay) << relay.error().to_string();
    RelayTargetOptions target_options;
    target_options.agent_socket = options.trainer.socket_path;
    if (advertise) target_options.advertise = endpoint();
    auto target = make_relay_target((*relay)->layout(), (*relay)->sidecar(), target_options, test_deadline());
    EXPECT_TRUE(target) << target.error().to_string();
    EXPECT_TRUE((*relay)->bind(std::move(*target), test_deadline()));
    relay_ = std::move(*relay);
    thread_ = std::thread([this] {
      while (!stop_.stop_requested()) {
        auto staged = relay_->pull(kNewer, CallOptions::within(std::chrono::seconds(1), stop_.get_token()));
        if (staged && (*staged)->commit()) look();
      }
    });
  }
  ~Hop() { end(); }
  void look() {
    static_cast<void>(receiver::wait_served(*relay_, CallOptions::within(std::chrono::seconds(1), stop_.get_token())));
  }
  void end() {
    stop_.request_stop();
    if (thread_.joinable()) thread_.join();
    relay_.reset();
    agent_.reset();
  }

  std::string endpoint() const { return "127.0.0.1:" + std::to_string(agent_->port()); }
  bool serves(const VersionId& id) const {
    const ServedPtr served = agent_->core().versions().snapshot()->served;
    return served && served->version.id == id;
  }
  std::size_t children() const { return agent_->pull_server().children().count(); }
  Agent& agent() { return *agent_; }

 private:
  test::TempDir dir_;
  std::unique_ptr<Agent> agent_;
  std::unique_ptr<Receiver> relay_;
  std::stop_source stop_;
  std::thread thread_;
};

class ChildrenMax : public RelayNode {
 protected:
  void start_root(std::size_t children_max) {
    options_.pull.limits.admission.children_max = children_max;
    start_agent();
    next_version();
  }
  std::string root() const { return "127.0.0.1:" + std::to_string(port()); }
  const Children& children() const { return agent_->pull_server().children(); }
  std::unique_ptr<Receiver> child() const {
    auto receiver = connect_to(port());
    EXPECT_TRUE(receiver->bind(make_host_target(receiver->layout()), test_deadline()));
    return receiver;
  }
  bool takes(std::size_t relays) const {
    return eventually([&] { return children().endpoints().size() == relays; });
  }
  /// The newest, bit for bit, from any of them.
  void has_newest(Receiver& receiver) const {
    ASSERT_TRUE(eventually([&] {
      auto staged = receiver.pull({}, test_deadline());
      EXPECT_TRUE(staged) << staged.error().to_string();
      if (!staged) return true;
      EXPECT_TRUE((*staged)->commit());
      return receiver.current() == AgentTest::served()->version;
    }));
    EXPECT_TRUE(held(receiver) == model_.half);
  }
};

TEST_F(ChildrenMax, AllGetEveryVersionAndNoAgentHasMoreChildrenThanItMay) {
  start_root(2);
  Hop a(root());
  Hop b(root());
  ASSERT_TRUE(takes(2));
  std::vector<std::unique_ptr<Receiver>> all;
  for (int i = 0; i < 5; ++i) all.push_back(child());
  for (int version = 0; version < 4; ++version) {
    if (version != 0) next_version(0.01);
    for (auto& receiver : all) has_newest(*receiver);
    EXPECT_EQ(children().count(), 2u);
    EXPECT_EQ(a.children() + b.children(), 5u);
    EXPECT_GE(std::min(a.children(), b.children()), 2u) << "they are shared out";
  }
  EXPECT_EQ(metrics().sent_elsewhere, 5u) << "they stay where they were sent";
}

/// Receivers that came first are sent on once there is somewhere to go, in mid wait, too; and take no version twice.
TEST_F(ChildrenMax, RelaysTakeThePlacesOfReceiversThatCameFirst) {
  start_root(2);
  auto one = child();
  auto two = child();
  has_newest(*one);
  has_newest(*two);
  std::thread waits([&] {
    auto staged = two->pull(kNewer, test_deadline());
    ASSERT_TRUE(staged) << staged.error().to_string();
    EXPECT_EQ((*staged)->report().mode, PullMode::delta);
    ASSERT_TRUE((*staged)->commit());
  });
  Hop a(root());
  ASSERT_TRUE(takes(1));
  EXPECT_TRUE(eventually([&] { return a.children() == 1 && children().count() == 2; }));
  next_version(0.01);
  waits.join();
  EXPECT_TRUE(held(*two) == model_.half);
  EXPECT_EQ(a.children(), 1u);
  has_newest(*one);
  Hop b(root());
  ASSERT_TRUE(takes(2));
  EXPECT_EQ(pull(*one).mode, PullMode::up_to_date) << "an agent that is behind for a moment has nothing newer";
  next_version(0.01);
  has_newest(*one);
  has_newest(*two);
  EXPECT_EQ(children().count(), 2u);
}

/// The relay goes on for a moment without its agent, or the other way round.
TEST_F(ChildrenMax, TheReceiversOfAChildThatDiesGoOnAtAnother) {
  start_root(2);
  auto a = std::make_unique<Hop>(root());
  Hop b(root());
  ASSERT_TRUE(takes(2));
  std::vector<std::unique_ptr<Receiver>> all;
  for (int i = 0; i < 4; ++i) all.push_back(child());
  for (auto& receiver : all) has_newest(*receiver);
  EXPECT_EQ(a->children(), 2u);
  a->agent().stop();
  next_version(0.01);
  for (auto& receiver : all) has_newest(*receiver);
  EXPECT_EQ(b.children(), 4u);
  EXPECT_LE(children().count(), 2u);
  a.reset();
  next_version(0.01);
  for (auto& receiver : all) has_newest(*receiver);
  EXPECT_LE(children().count(), 2u);
}

/// A level further down, and what is said where nobody has a place.
TEST_F(ChildrenMax, AChildThatIsFullSendsOn) {
  start_root(1);
  Hop a(root(), 1);
  ASSERT_TRUE(takes(1));
  Hop b(root());  // is sent to a's agent
  ASSERT_TRUE(eventually([&] { return a.agent().pull_server().children().endpoints().size() == 1; }));
  auto one = child();
  auto two = child();
  for (int version = 0; version < 2; ++version) {
    next_version(0.01);
    has_newest(*one);
    has_newest(*two);
  }
  EXPECT_EQ(children().count(), 1u);
  EXPECT_EQ(a.children(), 1u);
  EXPECT_EQ(b.children(), 2u);
}

TEST_F(ChildrenMax, WhoFindsNoPlaceSaysSoAndTriesOn) {
  start_root(1);
  auto a = std::make_unique<Hop>(root(), 0, false);  // nobody can be sent there
  ASSERT_TRUE(eventually([&] { return children().count() == 1; }));
  auto one = child();
  const auto refused = one->pull({}, Deadline::after(std::chrono::seconds(2)));
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message().find("--children-max"), std::string::npos) << refused.error().message();
  a.reset();
  has_newest(*one);
  EXPECT_EQ(children().count(), 1u);
}

/// What a relay says may be anything.
TEST_F(ChildrenMax, WhomItIsSentToMayBeAnything) {
  start_root(1);
  auto liar = client();
  wire::Report report;
  report.receiver = 5;
  report.committed = AgentTest::served()->version;
  const auto claims = [&](const std::string& endpoint) {
    ASSERT_TRUE(liar.ask<wire::Parents>(wire::RelayTo{9, endpoint}));
    ASSERT_TRUE(liar.socket.send(1000, report, test_deadline()));
  };
  ASSERT_TRUE(liar.plan(ask()));
  for (const std::string& endpoint :
       {std::string("nobody"), std::string("127.0.0.1:0"), std::string("127.0.0.1:1"), root(), std::string(500, 'x')}) {
    claims(endpoint);
    ASSERT_TRUE(takes(1));
    auto one = child();
    const auto refused = one->pull({}, Deadline::after(std::chrono::milliseconds(700)));
    ASSERT_FALSE(refused) << endpoint;
    EXPECT_NE(refused.error().message().find("busy"), std::string::npos) << refused.error().message();
  }
}

}  // namespace
}  // namespace deltasync::agent
