// A node whose relay is gone serves what it has. Who pulls from there hears that nothing newer comes, and who knows
// another agent goes on there.
#include <thread>

#include "agent/http/health.hpp"
#include "agent/http/metrics_page.hpp"
#include "agent/http/status.hpp"
#include "tests/receiver/targets/segment/relay_node.hpp"

namespace deltasync::agent {
namespace {

const Want kNewer{.newer = true};

class CutOff : public RelayNode {
 protected:
  std::string endpoint(std::uint16_t number) const { return "127.0.0.1:" + std::to_string(number); }
  std::unique_ptr<Receiver> child(const std::string& from) {
    ReceiverOptions options;
    options.endpoint = from;
    options.streams = 2;
    auto receiver = receiver::connect(options, quick_looks(), test_deadline());
    EXPECT_TRUE(receiver) << receiver.error().to_string();
    EXPECT_TRUE((*receiver)->bind(make_host_target((*receiver)->layout()), test_deadline()));
    return std::move(*receiver);
  }
  AgentParts node_parts() const {
    return {node_->core(), node_->pull_server(), nullptr, 1, std::chrono::steady_clock::now()};
  }
  bool cut_off(Agent& agent) const { return agent.core().origin().cut_off().has_value(); }
  bool metric_is_zero() const {
    return metrics_text(node_parts()).find("\ndeltasync_cut_off_seconds 0\n") != std::string::npos;
  }
};

TEST_F(CutOff, WhoKnowsAnotherAgentGoesOnThereWithADelta) {
  start();
  hand_on();
  const auto both = child(endpoint(node_->port()) + "," + endpoint(port()));
  const auto one = child(endpoint(node_->port()));
  EXPECT_EQ(pull(*both).mode, PullMode::full);
  EXPECT_EQ(pull(*one).mode, PullMode::full);
  const std::uint64_t node = receiver::agent_instance_of(*both);
  const std::uint64_t trainers = receiver::agent_instance_of(*relay_);
  EXPECT_EQ(ready_page(node_parts()).status, 200);
  EXPECT_TRUE(metric_is_zero());

  relay_.reset();
  ASSERT_TRUE(eventually([&] { return cut_off(*node_); }));
  EXPECT_EQ(ready_page(node_parts()).status, 503);
  EXPECT_NE(ready_page(node_parts()).body.find(endpoint(port()) + " is gone"), std::string::npos);
  EXPECT_NE(status_json(node_parts()).find("is gone"), std::string::npos);
  EXPECT_FALSE(metric_is_zero());

  // It waits there while nobody has anything newer, whether it asks for that or for what is newest.
  EXPECT_FALSE(both->pull(kNewer, Deadline::after(std::chrono::seconds(2))));
  EXPECT_NE(receiver::agent_instance_of(*both), trainers);
  next_version(0.01);
  EXPECT_EQ(pull(*both, kNewer).mode, PullMode::delta);
  EXPECT_TRUE(held(*both) == model_.half);
  EXPECT_EQ(receiver::agent_instance_of(*both), trainers);
  next_version(0.01);
  EXPECT_EQ(pull(*both, kNewer).mode, PullMode::delta);
  EXPECT_EQ(receiver::agent_instance_of(*both), trainers) << "the preferred one is looked at, and has nothing";

  const auto waited = one->pull(kNewer, Deadline::after(std::chrono::seconds(3)));
  ASSERT_FALSE(waited);
  EXPECT_NE(waited.error().message().find("the relay that brought its versions from " + endpoint(port()) + " is gone"),
            std::string::npos)
      << waited.error().message();
  EXPECT_EQ(pull(*one).mode, PullMode::up_to_date);  // no failure, but:
  const std::string why = one->lag(test_deadline()).last_error;
  EXPECT_NE(why.find(endpoint(node_->port())), std::string::npos) << why;
  EXPECT_NE(why.find("cut off"), std::string::npos) << why;

  start_relay();
  hand_on();
  EXPECT_EQ(pull(*one, kNewer).mode, PullMode::delta);
  EXPECT_TRUE(held(*one) == model_.half);
  EXPECT_FALSE(cut_off(*node_));
  EXPECT_EQ(ready_page(node_parts()).status, 200);
  next_version(0.01);
  hand_on();
  EXPECT_EQ(pull(*both, kNewer).mode, PullMode::delta);
  EXPECT_EQ(receiver::agent_instance_of(*both), node) << "the preferred one is as good as any";
}

/// Who asks for what is newest is told as well.
TEST_F(CutOff, AVersionThatIsNewestHereOnlyIsNotTakenForTheNewest) {
  start();
  hand_on();
  const auto both = child(endpoint(node_->port()) + "," + endpoint(port()));
  EXPECT_EQ(pull(*both).mode, PullMode::full);
  relay_.reset();
  ASSERT_TRUE(eventually([&] { return cut_off(*node_); }));
  EXPECT_EQ(pull(*both).mode, PullMode::up_to_date);
  next_version(0.01);
  ASSERT_TRUE(eventually([&] { return pull(*both).mode == PullMode::delta; }));
  EXPECT_TRUE(held(*both) == model_.half);
}

/// A relay that goes away with the one above it tells its own agent.
TEST_F(CutOff, TheRelaysBelowPassItOn) {
  start();
  hand_on();
  test::TempDir other_dir;
  AgentOptions options = node_options_;
  options.core.name = "other";
  options.core.shm_dir = other_dir.path();
  options.pull.listen.port = 0;
  options.trainer.socket_path = (other_dir.path() / "agent.sock").string();
  auto other = Agent::start(options);
  ASSERT_TRUE(other) << other.error().to_string();
  const auto below = [&](const std::string& from) {
    ReceiverOptions receiver_options;
    receiver_options.endpoint = from;
    auto relay = receiver::connect(receiver_options, quick_looks(), test_deadline());
    EXPECT_TRUE(relay) << relay.error().to_string();
    RelayTargetOptions target_options;
    target_options.agent_socket = options.trainer.socket_path;
    auto target = make_relay_target((*relay)->layout(), (*relay)->sidecar(), target_options, test_deadline());
    EXPECT_TRUE(target) << target.error().to_string();
    EXPECT_TRUE((*relay)->bind(std::move(target).value(), test_deadline()));
    return std::move(*relay);
  };
  auto second = below(endpoint(node_->port()));
  pull(*second);
  ASSERT_TRUE(receiver::wait_served(*second, test_deadline()));
  EXPECT_FALSE(cut_off(**other));
  relay_.reset();
  ASSERT_TRUE(eventually([&] {
    static_cast<void>(second->pull(kNewer, Deadline::after(std::chrono::milliseconds(500))));
    return cut_off(**other);
  }));
  const std::string why = (*other)->core().origin().cut_off()->why;
  EXPECT_NE(why.find(endpoint(node_->port())), std::string::npos) << why;
  next_version(0.01);
  start_relay();
  hand_on();
  EXPECT_EQ(pull(*second, kNewer).mode, PullMode::delta);
  ASSERT_TRUE(eventually([&] {
    static_cast<void>(second->pull(kNewer, Deadline::after(std::chrono::milliseconds(100))));
    return !cut_off(**other);
  }));
  // One that has another agent leaves the one that is cut off, too, with a delta.
  second.reset();
  second = below(endpoint(node_->port()) + "," + endpoint(port()));
  EXPECT_EQ(pull(*second).mode, PullMode::up_to_date);
  relay_.reset();
  next_version(0.01);
  EXPECT_EQ(pull(*second, kNewer).mode, PullMode::delta);
  EXPECT_FALSE(cut_off(**other));
}

/// The relay is there, and its parent is not.
TEST_F(CutOff, TheAgentAboveIsAway) {
  const test::HeldPort held;
  options_.pull.listen.port = held.number();
  start();
  hand_on();
  const std::string above = endpoint(port());
  const auto one = child(endpoint(node_->port()));
  EXPECT_EQ(pull(*one).mode, PullMode::full);
  const auto relay_asks = [&] {
    static_cast<void>(relay_->pull(kNewer, Deadline::after(std::chrono::milliseconds(500))));
  };
  relay_asks();
  EXPECT_FALSE(cut_off(*node_));
  stop_agent();
  ASSERT_TRUE(eventually([&] {
    relay_asks();
    return cut_off(*node_);
  }));
  EXPECT_NE(ready_page(node_parts()).body.find(above + ", from which that pulls, is away"), std::string::npos);
  const auto waited = one->pull(kNewer, Deadline::after(std::chrono::seconds(1)));
  ASSERT_FALSE(waited);
  EXPECT_NE(waited.error().message().find(above), std::string::npos) << waited.error().message();
  start_agent();
  ASSERT_TRUE(eventually([&] {
    relay_asks();
    return !cut_off(*node_);
  }));
}

/// Nobody is told before its relay had the time to find it.
TEST_F(CutOff, AnAgentThatIsStartedAgainRemembersItsRelay) {
  node_options_.core.relay_grace = std::chrono::seconds(1);
  start();
  hand_on();
  relay_.reset();
  node_.reset();
  start_node();
  EXPECT_FALSE(cut_off(*node_));
  ASSERT_TRUE(eventually([&] { return cut_off(*node_); }));
  const std::string why = "the relay that brought its versions from " + endpoint(port()) + " is gone";
  EXPECT_NE(ready_page(node_parts()).body.find(why), std::string::npos) << ready_page(node_parts()).body;
  const auto one = child(endpoint(node_->port()));
  EXPECT_EQ(pull(*one).mode, PullMode::full);
  const auto waited = one->pull(kNewer, Deadline::after(std::chrono::seconds(1)));
  ASSERT_FALSE(waited);
  EXPECT_NE(waited.error().message().find(why), std::string::npos) << waited.error().message();
  start_relay();
  next_version(0.01);
  pull(*relay_);
  ASSERT_TRUE(receiver::wait_served(*relay_, test_deadline()));
  EXPECT_FALSE(cut_off(*node_));
  EXPECT_NE(pull(*one, kNewer).mode, PullMode::up_to_date);
  EXPECT_TRUE(held(*one) == model_.half);

  // Once a trainer has written there is no relay to wait for.
  relay_.reset();
  {
    WriterOptions options;
    options.agent_socket = node_options_.trainer.socket_path;
    auto writer = Writer::attach(model_.layout, make_sidecar(*model_.layout), options, test_deadline());
    ASSERT_TRUE(writer) << writer.error().to_string();
    ASSERT_TRUE(offload(**writer, model_.half, number_ + 1));
    ASSERT_TRUE(eventually([&] { return node_->core().origin().source().empty(); }));
  }
  node_.reset();
  start_node();
  std::this_thread::sleep_for(2 * node_options_.core.relay_grace);
  EXPECT_FALSE(cut_off(*node_));
}

/// A trainer that writes to the agent itself brings versions, no matter who did before.
TEST_F(CutOff, ATrainerInPlaceOfTheRelay) {
  start();
  hand_on();
  relay_.reset();
  ASSERT_TRUE(eventually([&] { return cut_off(*node_); }));
  WriterOptions options;
  options.agent_socket = node_options_.trainer.socket_path;
  auto writer = Writer::attach(model_.layout, make_sidecar(*model_.layout), options, test_deadline());
  ASSERT_TRUE(writer) << writer.error().to_string();
  ASSERT_TRUE(offload(**writer, model_.half, number_ + 1));
  EXPECT_TRUE(eventually([&] { return !cut_off(*node_); }));
}

}  // namespace
}  // namespace deltasync::agent
