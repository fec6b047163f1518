// A node: the trainer's agent, a relay that pulls from it, the node's own agent that the relay writes to, and receivers
// of slices that pull from that one. What the receivers keep is the trainer's, bit for bit, whichever agent they ask.
#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "tests/receiver/hf_fixture.hpp"
#include "tests/receiver/targets/segment/relay_node.hpp"

namespace deltasync::agent {
namespace {

TEST_F(RelayNode, ItsRanksTogetherCostTheTrainerOneReceiver) {
  start();
  const auto direct = connect();
  auto ranks = siblings();
  for (int i = 0; i < 5; ++i) {
    if (i > 0) next_version(0.01);
    const PullReport alone = pull(*direct);
    const PullReport relayed = hand_on();
    all_pull(ranks, i == 0 ? PullMode::full : PullMode::delta);
    EXPECT_EQ(relayed.mode, alone.mode);
    EXPECT_EQ(relayed.wire_bytes - relayed.metadata_bytes, alone.wire_bytes - alone.metadata_bytes);
    const std::uint64_t pulls = metrics().pulls_full + metrics().pulls_delta;
    EXPECT_EQ(pulls, 2u * static_cast<unsigned>(i + 1)) << "nobody else came to the trainer's agent";
    EXPECT_TRUE(held(*direct) == model_.half);
  }
}

/// Epoch, number and digests are the trainer's, so a base is valid at either agent.
TEST_F(RelayNode, AReceiverMayChangeAgentsAndStillGetsDeltas) {
  start();
  hand_on();
  const auto pull_from = [&](std::uint16_t port) {
    const auto receiver = connect_to(port);
    auto target = make_hf_target(receiver->layout(), receiver->sidecar(), dir_.path() / "out");
    EXPECT_TRUE(target) << target.error().to_string();
    EXPECT_TRUE(receiver->bind(std::move(target).value(), test_deadline()));
    const PullMode mode = pull(*receiver).mode;
    EXPECT_EQ(test::compare_directory(dir_.path() / "out" / "current", *model_.layout, make_sidecar(*model_.layout),
                                      model_.half),
              "");
    return mode;
  };
  EXPECT_EQ(pull_from(node_->port()), PullMode::full);
  for (int i = 0; i < 4; ++i) {
    next_version(0.01);
    hand_on();
    EXPECT_EQ(pull_from(i % 2 == 0 ? port() : node_->port()), PullMode::delta) << i;
  }
}

TEST_F(RelayNode, VersionsThatItMissedAreOneStep) {
  start();
  auto ranks = siblings();
  hand_on();
  all_pull(ranks, PullMode::full);
  for (int i = 0; i < 3; ++i) next_version(0.005);
  const PullReport report = hand_on();
  EXPECT_EQ(report.mode, PullMode::delta);
  EXPECT_EQ(report.version.id.number, 4u);
  all_pull(ranks, PullMode::delta);
}

TEST_F(RelayNode, ATrainerThatComesBackInANewEpoch) {
  start();
  auto ranks = siblings();
  hand_on();
  all_pull(ranks, PullMode::full);
  writer_.reset();
  epoch_ = make_epoch(epoch_);
  number_ = 0;
  test::mutate(model_.half, *model_.layout, 0.01, 99);
  next_version();
  EXPECT_EQ(hand_on().version.id, (VersionId{epoch_, 1}));
  all_pull(ranks, PullMode::delta);
}

TEST_F(RelayNode, ARestartedRelayGoesOnFromWhatTheNodeHas) {
  start();
  auto ranks = siblings();
  hand_on();
  all_pull(ranks, PullMode::full);
  for (int i = 0; i < 2; ++i) {
    start_relay();
    EXPECT_EQ(pull(*relay_).mode, PullMode::up_to_date);
    next_version(0.01);
    start_relay();
    EXPECT_EQ(hand_on().mode, PullMode::delta);
    all_pull(ranks, PullMode::delta);
  }
}

TEST_F(RelayNode, ANewLayoutAndNewSideFilesConnectAgain) {
  start();
  hand_on();
  auto ranks = siblings();
  all_pull(ranks, PullMode::full);
  // Other side files: the same layout.
  writer_.reset();
  Sidecar sidecar = make_sidecar(*model_.layout);
  sidecar.others.push_back({"config.json", {std::byte{'{'}, std::byte{'}'}}});
  WriterOptions options;
  options.agent_socket = options_.trainer.socket_path;
  auto writer = Writer::attach(model_.layout, sidecar, options, test_deadline());
  ASSERT_TRUE(writer) << writer.error().to_string();
  writer_ = std::move(writer).value();
  next_version(0.01);
  auto pulled = relay_->pull({}, test_deadline());
  ASSERT_FALSE(pulled);
  EXPECT_EQ(pulled.error().code(), Errc::layout_mismatch) << pulled.error().to_string();
  start_relay();
  EXPECT_EQ(hand_on().mode, PullMode::full);
  EXPECT_EQ(node_served()->generation->segment->sidecar_encoded().size(), sidecar.encode().size());
  all_pull(ranks, PullMode::full);
  // Another layout.
  writer_.reset();
  model_ = test::make_model(6, test::sample_specs());
  next_version();
  pulled = relay_->pull({}, test_deadline());
  ASSERT_FALSE(pulled);
  EXPECT_EQ(pulled.error().code(), Errc::layout_mismatch) << pulled.error().to_string();
  for (auto& rank : ranks) EXPECT_EQ(pull(*rank).mode, PullMode::up_to_date) << "the one before is served until then";
  start_relay();
  EXPECT_EQ(hand_on().mode, PullMode::full);
  EXPECT_FALSE(ranks[0]->pull({}, test_deadline())) << "they bind again, as with any agent";
  ranks = siblings();
  all_pull(ranks, PullMode::full);
}

TEST_F(RelayNode, TheNodesAgentIsRestarted) {
  start();
  auto ranks = siblings();
  hand_on();
  all_pull(ranks, PullMode::full);
  node_.reset();
  next_version(0.01);
  EXPECT_EQ(pull(*relay_).mode, PullMode::delta) << "a free half is all that it needs";
  EXPECT_FALSE(receiver::wait_served(*relay_, Deadline::after(std::chrono::milliseconds(50))));
  start_node();
  ASSERT_TRUE(receiver::wait_served(*relay_, test_deadline()));
  EXPECT_EQ(node_served()->root, AgentTest::served()->root);
  all_pull(ranks, PullMode::delta);  // the new agent found the version before, too
  next_version(0.01);
  EXPECT_EQ(hand_on().mode, PullMode::delta);
  all_pull(ranks, PullMode::delta);
}

TEST_F(RelayNode, TheNodesAgentIsRestartedWithoutItsSegment) {
  start();
  hand_on();
  node_->core().files().remove(node_->core().versions().generations());
  node_.reset();
  start_node();
  next_version(0.01);
  auto staged = relay_->pull({}, test_deadline());
  ASSERT_TRUE(staged) << staged.error().to_string();
  const Status committed = (*staged)->commit();
  ASSERT_FALSE(committed);
  EXPECT_EQ(committed.error().code(), Errc::aborted) << committed.error().to_string();
  EXPECT_FALSE(relay_->current());
  EXPECT_EQ(hand_on().mode, PullMode::full);
  auto ranks = siblings();
  all_pull(ranks, PullMode::full);
}

/// And no version comes that would show it.
TEST_F(RelayNode, WhatIsLostWhileTheTrainerPausesIsSeenAndComesAgain) {
  start();
  hand_on();
  node_->core().files().remove(node_->core().versions().generations());
  node_.reset();
  start_node();
  const Status lost = receiver::wait_served(*relay_, test_deadline());
  ASSERT_FALSE(lost);
  EXPECT_EQ(lost.error().code(), Errc::aborted) << lost.error().to_string();
  EXPECT_FALSE(relay_->current());
  const Want newer{.newer = true};
  auto staged = relay_->pull(newer, test_deadline());
  ASSERT_TRUE(staged) << staged.error().to_string();
  EXPECT_EQ((*staged)->report().mode, PullMode::full);
  ASSERT_TRUE((*staged)->commit());
  ASSERT_TRUE(receiver::wait_served(*relay_, test_deadline()));
  EXPECT_EQ(node_served()->root, AgentTest::served()->root);
  auto ranks = siblings();
  all_pull(ranks, PullMode::full);
}

TEST_F(RelayNode, WhyTheNodeIsNotServedIsTheLastErrorUntilItIs) {
  start();
  hand_on();
  const auto error = [&] { return relay_->lag(test_deadline()).last_error; };
  const auto trainers_agent_knows = [&](const std::string& text) {
    return eventually([&] {
      const auto rows = agent_->pull_server().receivers();
      return rows.size() == 1 && (text.empty() ? rows[0].error.empty() : rows[0].error.find(text) != std::string::npos);
    });
  };
  EXPECT_EQ(error(), "");
  node_.reset();
  ASSERT_FALSE(receiver::wait_served(*relay_, Deadline::after(std::chrono::milliseconds(50))));
  const std::string socket = node_options_.trainer.socket_path;
  EXPECT_NE(error().find("the agent on " + socket + " does not serve step_1"), std::string::npos) << error();
  EXPECT_TRUE(trainers_agent_knows(socket));
  next_version(0.01);
  EXPECT_EQ(pull(*relay_).mode, PullMode::delta);
  const std::string why = error();
  EXPECT_NE(why, "") << "a pull that succeeds is not served by that";
  std::stop_source stop;
  stop.request_stop();
  EXPECT_EQ(receiver::wait_served(*relay_, {test_deadline(), stop.get_token()}).error().code(), Errc::cancelled);
  EXPECT_EQ(error(), why) << "a stop says nothing of the node";
  start_node();
  ASSERT_TRUE(receiver::wait_served(*relay_, test_deadline()));
  EXPECT_EQ(error(), "");
  EXPECT_TRUE(trainers_agent_knows(""));
}

TEST_F(RelayNode, AnAgentIsNoRelayOfItself) {
  start_agent();
  next_version();
  writer_.reset();
  const auto receiver = connect_to(port());
  ASSERT_NE(receiver, nullptr);
  RelayTargetOptions options;
  options.agent_socket = options_.trainer.socket_path;
  options.pulled_from = receiver::agent_instance_of(*receiver);
  const auto target = make_relay_target(receiver->layout(), receiver->sidecar(), options, test_deadline());
  ASSERT_FALSE(target);
  EXPECT_EQ(target.error().code(), Errc::invalid_argument) << target.error().to_string();
  EXPECT_NE(target.error().message().find(options.agent_socket), std::string::npos);
}

/// Two relays, of which each has the other's agent for a second parent: when the trainer's agent is gone, neither takes
/// the other one's versions for new ones, and says why. When it is back both go on with a delta.
TEST_F(RelayNode, NoVersionGoesInACircle) {
  start_agent();
  start_node();
  test::TempDir other_dir;
  const test::HeldPort other_port;
  AgentOptions options = node_options_;
  options.core.name = "other";
  options.core.shm_dir = other_dir.path();
  options.pull.listen.port = other_port.number();
  options.trainer.socket_path = (other_dir.path() / "agent.sock").string();
  auto other = Agent::start(options);
  ASSERT_TRUE(other) << other.error().to_string();
  next_version();
  const auto endpoint = [](std::uint16_t number) { return "127.0.0.1:" + std::to_string(number); };
  const auto relay_of = [&](const std::string& socket, const std::string& from) {
    ReceiverOptions receiver_options;
    receiver_options.endpoint = from;
    auto relay = receiver::connect(receiver_options, quick_looks(), test_deadline());
    EXPECT_TRUE(relay) << relay.error().to_string();
    RelayTargetOptions target_options;
    target_options.agent_socket = socket;
    auto target = make_relay_target((*relay)->layout(), (*relay)->sidecar(), target_options, test_deadline());
    EXPECT_TRUE(target) << target.error().to_string();
    EXPECT_TRUE((*relay)->bind(std::move(target).value(), test_deadline()));
    return std::move(relay).value();
  };
  const std::uint16_t trainer_port = port();
  relay_ = relay_of(node_options_.trainer.socket_path, endpoint(trainer_port) + "," + endpoint(other_port.number()));
  hand_on();
  // From the node, and from itself.
  const std::string from = endpoint(node_port_.number()) + "," + endpoint(other_port.number());
  auto second = relay_of(options.trainer.socket_path, from);
  EXPECT_EQ(pull(*second).mode, PullMode::full);
  ASSERT_TRUE(receiver::wait_served(*second, test_deadline()));
  const std::uint64_t node = receiver::agent_instance_of(*second);

  stop_agent();
  const auto refused = relay_->pull({.newer = true}, Deadline::after(std::chrono::seconds(3)));
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message().find("cycle"), std::string::npos) << refused.error().message();
  EXPECT_NE(refused.error().message().find(endpoint(node_port_.number())), std::string::npos);

  options_.pull.listen.port = trainer_port;
  start_agent();
  next_version();
  EXPECT_EQ(hand_on().mode, PullMode::delta);
  EXPECT_EQ(pull(*second).mode, PullMode::delta);
  EXPECT_EQ(receiver::agent_instance_of(*second), node);

  node_.reset();  // now it has its own agent only
  const auto own = second->pull({.newer = true}, Deadline::after(std::chrono::seconds(3)));
  ASSERT_FALSE(own);
  EXPECT_NE(own.error().message().find("its own agent"), std::string::npos) << own.error().message();
}

TEST_F(RelayNode, WithoutTheTrainersAgentTheNodeServesOn) {
  start();
  hand_on();
  const ServedPtr newest = AgentTest::served();
  auto ranks = siblings();
  stop_agent();
  const Want newer{.newer = true};
  EXPECT_FALSE(relay_->pull(newer, Deadline::after(std::chrono::milliseconds(100))));
  for (auto& rank : ranks) EXPECT_EQ(pull(*rank).version, newest->version);
  start_agent();
  ASSERT_TRUE(eventually([&] { return AgentTest::served() != nullptr; }));
  for (std::uint64_t rank = 0; rank < kRanks; ++rank) EXPECT_TRUE(has_its_slices(*ranks[rank], rank));
}

/// Who reads a half that the relay needs keeps it for a moment, and then verifies what it has.
TEST_F(RelayNode, ASlowRankHoldsTheRelayUpForHalfOfItsGuardAtMost) {
  guard_ = std::chrono::milliseconds(1000);
  node_options_.core.lease_grace = std::chrono::minutes(10);
  start();
  hand_on();
  auto slow = Client::connect(node_->port(), wire::Role::control);
  ASSERT_TRUE(slow) << slow.error().to_string();
  const auto plan = slow->plan(ask());
  ASSERT_TRUE(plan) << plan.error().to_string();
  ASSERT_EQ(plan->mode, wire::PlanMode::full);
  for (int i = 0; i < 3; ++i) {
    next_version(0.01);
    hand_on();
  }
  EXPECT_TRUE(eventually([&] { return node_->core().metrics().leases_revoked == 1u; }));
}

/// A byte is flipped behind the relay's back, in the version that the next delta is made from. The relay finds it and
/// brings the model whole. The node's agent takes digests from version to version: it has a wrong one until it reads
/// the half itself, and until then no receiver takes the tile.
TEST_F(RelayNode, WhatSomebodyWroteIntoTheSegmentIsNeverTakenForTheTrainers) {
  start();
  auto ranks = siblings();
  hand_on();
  all_pull(ranks, PullMode::full);
  const ServedPtr served = node_served();
  const Tensor& tensor = model_.layout->tensors().back();
  served->generation->segment->half(served->half.half)[tensor.offset + 1] ^= std::byte{0x40};
  next_version(0.0);
  auto staged = relay_->pull({}, test_deadline());
  Status committed = staged ? (*staged)->commit() : Status(staged.error());
  ASSERT_FALSE(committed);
  EXPECT_EQ(committed.error().code(), Errc::corrupt) << committed.error().to_string();
  EXPECT_EQ(node_served()->version, served->version);
  EXPECT_EQ(pull(*relay_).mode, PullMode::full);
  ASSERT_TRUE(receiver::wait_served(*relay_, test_deadline()));
  const ServedPtr next = node_served();
  const auto half = next->generation->segment->half(next->half.half);
  EXPECT_TRUE(std::equal(model_.half.begin(), model_.half.end(), half.begin()));
  for (std::uint64_t rank = 0; rank < kRanks; ++rank) {
    auto pulled =
        ranks[rank]->pull({}, Deadline::after(std::chrono::seconds(1)));  // whom it is refused waits for the next
    if (!pulled || !(*pulled)->commit()) continue;
    EXPECT_TRUE(has_its_slices(*ranks[rank], rank)) << "rank " << rank;
  }
  node_.reset();
  start_node();
  ASSERT_TRUE(eventually([&] { return node_served() != nullptr; }));
  EXPECT_EQ(node_served()->root, AgentTest::served()->root);
  for (std::uint64_t rank = 0; rank < kRanks; ++rank) {
    pull(*ranks[rank]);
    EXPECT_TRUE(has_its_slices(*ranks[rank], rank)) << "rank " << rank;
  }
}

TEST_F(RelayNode, ARelayDoesNotRollBack) {
  start();
  hand_on();
  EXPECT_FALSE(relay_->supports_rollback());
}

/// Two agents that have the same versions: who loses one goes on at the other, and comes back to the preferred one.
TEST_F(RelayNode, AReceiverThatLosesItsAgentGoesOnAtTheNext) {
  start();
  hand_on();
  ReceiverOptions options;
  options.endpoint = "127.0.0.1:" + std::to_string(node_->port()) + ",127.0.0.1:" + std::to_string(port());
  options.streams = 2;
  receiver::Tuning tuning;
  tuning.preferred_look = std::chrono::milliseconds(0);
  auto connected = receiver::connect(options, tuning, test_deadline());
  ASSERT_TRUE(connected) << connected.error().to_string();
  Receiver& receiver = **connected;
  ASSERT_TRUE(receiver.bind(make_host_target(receiver.layout()), test_deadline()));
  EXPECT_EQ(pull(receiver).mode, PullMode::full);
  EXPECT_EQ(receiver::agent_instance_of(receiver), receiver::agent_instance_of(*connect_to(node_->port())));

  node_.reset();
  next_version();
  EXPECT_EQ(pull(receiver).mode, PullMode::delta);
  EXPECT_EQ(receiver.current(), AgentTest::served()->version);
  EXPECT_EQ(receiver::agent_instance_of(receiver), receiver::agent_instance_of(*relay_));

  start_node();
  start_relay();
  hand_on();
  next_version();
  hand_on();
  EXPECT_EQ(pull(receiver).mode, PullMode::delta);
  EXPECT_EQ(receiver.current(), AgentTest::served()->version);
  EXPECT_EQ(receiver::agent_instance_of(receiver), receiver::agent_instance_of(*connect_to(node_->port())));
}

}  // namespace
}  // namespace deltasync::agent
