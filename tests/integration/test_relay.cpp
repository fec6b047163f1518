// A node as real processes: the trainer's agent, a relay, the node's own agent, four receivers of slices and one that
// keeps directories. The relay and the node's agent are killed and stopped at many points: what a reader of the node
// finds is always a whole published version, and the newest one arrives.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

#include "base/deadline.hpp"
#include "deltasync/receiver.hpp"
#include "format/tile_set.hpp"
#include "tests/integration/cluster.hpp"
#include "tests/support/rationed_link.hpp"
#include "tools/cli/http_get.hpp"

namespace deltasync::integration {
namespace {

using Json = nlohmann::json;

constexpr int kLast = kVersions - 1;
constexpr std::uint64_t kRanks = 4;

void sleep_ms(std::uint64_t ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

Deadline in_time() {
  return Deadline::after(kLimit);
}

/// A tensor-parallel rank in this process.
class Rank {
 public:
  Rank(std::uint64_t index, const AgentProcess& agent) : index_(index) {
    ReceiverOptions options;
    options.endpoint = agent.endpoint();
    options.streams = 2;
    options.threads = 1;
    auto receiver = Receiver::connect(options, in_time());
    EXPECT_TRUE(receiver) << receiver.error().to_string();
    if (!receiver) return;
    receiver_ = std::move(receiver).value();
    const Status bound = receiver_->bind(make_host_target(receiver_->layout()), share(), in_time());
    EXPECT_TRUE(bound) << bound.error().to_string();
  }

  /// What is newest; its mode.
  std::optional<PullMode> pull() {
    auto staged = receiver_->pull({}, in_time());
    EXPECT_TRUE(staged) << staged.error().to_string();
    if (!staged) return std::nullopt;
    EXPECT_TRUE((*staged)->commit());
    return (*staged)->report().mode;
  }
  testing::AssertionResult has(const std::filesystem::path& published) const {
    const auto model = HfModel::open(published);
    if (!model) return testing::AssertionFailure() << model.error().to_string();
    const Layout& layout = *receiver_->layout();
    const auto memory = host_target_memory(*receiver_->target());
    for (const Slice& slice : share()) {
      const auto index = *layout.find(slice.tensor);
      const Tensor& tensor = layout.tensors()[index];
      const Rect rect = slice.rect.value_or(Rect{0, 0, tensor.rows, tensor.cols});
      for (std::uint64_t row = rect.row; row < rect.row + rect.rows; ++row) {
        const std::uint64_t at = row * tensor.row_bytes() + rect.col * tensor.element_bytes;
        if (std::memcmp(memory.data() + tensor.offset + at, model->tensor(index).data() + at,
                        rect.cols * tensor.element_bytes) != 0) {
          return testing::AssertionFailure() << "rank " << index_ << ": row " << row << " of " << slice.tensor;
        }
      }
    }
    return testing::AssertionSuccess();
  }

 private:
  std::vector<Slice> share() const {
    std::vector<Slice> subscription;
    const Layout& layout = *receiver_->layout();
    for (const Tensor& tensor : layout.tensors()) {
      const std::string& name = tensor.spec.name;
      if (tensor.rows >= kRanks) {
        subscription.push_back(*row_slice(layout, name, index_, kRanks));
      } else if (tensor.cols >= kRanks) {
        subscription.push_back(*col_slice(layout, name, index_, kRanks));
      } else {
        subscription.push_back({name, std::nullopt});
      }
    }
    return subscription;
  }
  const std::uint64_t index_;
  std::unique_ptr<Receiver> receiver_;
};

class RelayCluster : public Cluster {
 protected:
  void SetUp() override {
    Cluster::SetUp();
    kill_agent();
    start_agent({"--ring-mib", "64"});
    node_.start({"--ring-mib", "64"});
  }
  bench::Child relay(const std::vector<std::string>& more = {}) { return relay_from(agent_.endpoint(), more); }
  bench::Child relay_from(const std::string& from, const std::vector<std::string>& more = {}) {
    std::vector<std::string> argv = {DELTASYNC_CLI_BINARY, "--log-level", "off", "relay", "--from", from, "--agent",
                                     node_.socket(),       "--json"};
    argv.insert(argv.end(), more.begin(), more.end());
    return spawn(argv);
  }
  static Json line(bench::Child& child) {
    const auto text = child.read_line(in_time());
    EXPECT_TRUE(text) << text.error().to_string();
    return text ? Json::parse(*text) : Json::object();
  }
  std::vector<Rank> ranks() {
    std::vector<Rank> all;
    for (std::uint64_t i = 0; i < kRanks; ++i) all.emplace_back(i, node_);
    return all;
  }

  AgentProcess node_{files_.path(), "node"};
};

std::uint64_t tile_bytes(const Json& report) {
  return report.at("wire_bytes").get<std::uint64_t>() - report.at("metadata_bytes").get<std::uint64_t>();
}

/// It closes nothing and says nothing: with one agent a receiver waits for it for a quarter of a minute.
TEST_F(RelayCluster, WhoseAgentIsStoppedGoesOnAtTheNextOne) {
  auto relay_process = relay();
  ASSERT_EQ(wait(publish(0, 1, 0)), 0);
  EXPECT_EQ(line(relay_process).at("mode"), "full");
  const std::string from = node_.endpoint() + "," + agent_.endpoint();
  auto receiver = spawn({DELTASYNC_CLI_BINARY, "--log-level", "off", "pull", "--from", from, "--out",
                         out("both").string(), "--follow", "--json"});
  EXPECT_EQ(line(receiver).at("mode"), "full");
  ASSERT_EQ(::kill(node_.pid(), SIGSTOP), 0);
  ASSERT_EQ(wait(publish(1, 2, 0)), 0);
  const auto published = std::chrono::steady_clock::now();
  EXPECT_EQ(line(receiver).at("mode"), "delta");
  EXPECT_LT(std::chrono::steady_clock::now() - published, std::chrono::seconds(8));
  ASSERT_EQ(::kill(node_.pid(), SIGCONT), 0);
  EXPECT_EQ(line(relay_process).at("mode"), "delta");
  ASSERT_EQ(wait(publish(2, 3, 0)), 0);
  EXPECT_EQ(line(receiver).at("mode"), "delta");
  EXPECT_TRUE(becomes("both", 2));
}

TEST_F(RelayCluster, ANodeCostsTheTrainerWhatOneReceiverCosts) {
  auto relay_process = relay();
  auto direct = follow("direct", agent_);
  std::vector<Rank> all;
  for (int version = 0; version < kVersions; ++version) {
    ASSERT_EQ(wait(publish(version, version + 1, 0)), 0);
    const Json relayed = line(relay_process);
    const Json alone = line(direct);
    EXPECT_EQ(relayed.at("event"), "relayed");
    EXPECT_EQ(relayed.at("mode"), version == 0 ? "full" : "delta");
    EXPECT_EQ(relayed.at("id"), alone.at("id"));
    EXPECT_TRUE(relayed.at("served").get<bool>());
    EXPECT_EQ(tile_bytes(relayed), tile_bytes(alone));
    const auto headers = [](const Json& report) { return report.at("metadata_bytes").get<double>(); };
    EXPECT_LE(headers(relayed), 2 * headers(alone)) << "how many requests a pull is cut into depends on its streams";
    if (version == 0) all = ranks();
    for (Rank& rank : all) {
      EXPECT_EQ(rank.pull(), version == 0 ? PullMode::full : PullMode::delta);
      EXPECT_TRUE(rank.has(dir(version)));
    }
  }
  ::kill(relay_process.pid(), SIGTERM);
  const Json ended = line(relay_process);
  EXPECT_EQ(ended.at("event"), "ended");
  EXPECT_EQ(ended.at("versions"), kVersions);
  EXPECT_EQ(ended.at("full"), 1);
}

TEST_F(RelayCluster, TheRelayKilledAtManyPoints) {
  test::Random random(21);
  auto reader = follow("out", node_);
  auto first = relay();
  ASSERT_EQ(wait(publish(0, 1, 0)), 0);
  ASSERT_TRUE(becomes("out", 0));
  ::kill(first.pid(), SIGKILL);
  auto trainer = publish(0, kVersions, 60);
  for (int round = 0; round < 12; ++round) {
    auto killed = relay();
    sleep_ms(random.below(120));
    ::kill(killed.pid(), SIGKILL);
    EXPECT_NE(current("out"), kTorn) << "round " << round;
  }
  EXPECT_EQ(wait(std::move(trainer)), 0) << "a dead relay held the trainer up";
  ASSERT_EQ(wait(publish(1, 2, 0)), 0);
  auto last = relay();
  EXPECT_EQ(line(last).at("mode"), "delta") << "it goes on from what the node has";
  EXPECT_TRUE(becomes("out", 1));
}

TEST_F(RelayCluster, AStoppedRelayHoldsNobodyUp) {
  test::Random random(22);
  auto relay_process = relay();
  ASSERT_EQ(wait(publish(0, 2, 0)), 0);
  auto reader = follow("out", node_);
  ASSERT_TRUE(becomes("out", 1));
  auto all = ranks();
  for (int round = 0; round < 3; ++round) {
    const int last = kLast - round;  // another one each time, so that it is not there already
    auto trainer = publish(0, last + 1, 5);
    sleep_ms(random.below(60));
    ::kill(relay_process.pid(), SIGSTOP);
    EXPECT_EQ(wait(std::move(trainer)), 0) << "round " << round;
    EXPECT_NE(current("out"), kTorn);
    // The node serves what it has, whole.
    for (Rank& rank : all) EXPECT_NE(rank.pull(), std::nullopt);
    EXPECT_EQ(pull_once("fresh" + std::to_string(round), node_), 0);
    EXPECT_GE(current("fresh" + std::to_string(round)), 0);
    ::kill(relay_process.pid(), SIGCONT);
    EXPECT_TRUE(becomes("out", last)) << "round " << round;
    for (Rank& rank : all) {
      rank.pull();
      EXPECT_TRUE(rank.has(dir(last)));
    }
  }
}

TEST_F(RelayCluster, TheNodesAgentKilledAtManyPoints) {
  test::Random random(23);
  auto reader = follow("out", node_);
  auto relay_process = relay();
  ASSERT_EQ(wait(publish(0, 1, 0)), 0);
  ASSERT_TRUE(becomes("out", 0)) << "an agent that dies in a first handshake ends the reader (cli.md)";
  for (int round = 0; round < 6; ++round) {
    auto trainer = publish(0, kVersions, 10);
    sleep_ms(random.below(200));
    node_.kill();
    sleep_ms(random.below(30));
    node_.start({"--ring-mib", "64"});
    EXPECT_NE(current("out"), kTorn) << "round " << round;
    EXPECT_EQ(wait(std::move(trainer)), 0) << "round " << round;
  }
  EXPECT_TRUE(becomes("out", kLast));
}

TEST_F(RelayCluster, AStoppedAgentOfTheNodeEndsInADeadlineAndGoesOn) {
  auto reader = follow("out", node_);
  auto relay_process = relay({"--guard-s", "0.3"});
  ASSERT_EQ(wait(publish(0, 2, 0)), 0);
  ASSERT_TRUE(becomes("out", 1));
  ::kill(node_.pid(), SIGSTOP);
  ASSERT_EQ(wait(publish(2, kVersions, 100)), 0) << "the trainer knows nothing of it";
  ::kill(node_.pid(), SIGCONT);
  EXPECT_TRUE(becomes("out", kLast));
}

/// It ends no connection, and says nothing.
TEST_F(RelayCluster, AStoppedRelayIsLeftForAnotherAgent) {
  auto relay_process = relay();
  ASSERT_EQ(wait(publish(0, 1, 0)), 0);
  auto alone = follow("alone", node_);
  ASSERT_TRUE(becomes("alone", 0));
  auto reader = spawn({DELTASYNC_CLI_BINARY, "--log-level", "off", "pull", "--follow", "--from",
                       node_.endpoint() + "," + agent_.endpoint(), "--out", out("both").string()});
  ASSERT_TRUE(becomes("both", 0));
  ::kill(relay_process.pid(), SIGSTOP);
  const auto since = std::chrono::steady_clock::now();
  ASSERT_EQ(wait(publish(1, 2, 0)), 0);
  EXPECT_TRUE(becomes("both", 1));
  EXPECT_LT(std::chrono::steady_clock::now() - since, std::chrono::seconds(40)) << "the others are asked once a minute";
  EXPECT_EQ(current("alone"), 0);
  ::kill(relay_process.pid(), SIGCONT);
  EXPECT_TRUE(becomes("alone", 1));
}

TEST_F(RelayCluster, TheTrainersAgentDies) {
  auto relay_process = relay();
  auto reader = follow("out", node_);
  ASSERT_EQ(wait(publish(0, 2, 0)), 0);
  ASSERT_TRUE(becomes("out", 1));
  kill_agent();
  auto all = ranks();
  for (Rank& rank : all) {
    EXPECT_EQ(rank.pull(), PullMode::full);
    EXPECT_TRUE(rank.has(dir(1)));
  }
  start_agent({"--ring-mib", "64"});
  ASSERT_EQ(wait(publish(2, 4, 0)), 0);
  EXPECT_TRUE(becomes("out", 3));
}

/// The first version, of which the relay has some, and a child of the node has some of that.
class RelayStreams : public RelayCluster {
 protected:
  void SetUp() override {
    RelayCluster::SetUp();
    files_.write("token", std::string(64, 'a'));  // what an agent makes by itself is found by its own port only
    std::filesystem::permissions(token(), std::filesystem::perms::owner_read);
    kill_agent();
    start_agent({"--ring-mib", "64", "--token-file", token()});
    node_.kill();
    start_node();
    ASSERT_EQ(wait(publish(0, 1, 0)), 0);
    link_ = std::make_unique<test::RationedLink>(agent_.port());
    link_->grant(5u << 20);
    start_relay();
  }
  void start_relay() {
    relay_ = std::make_unique<bench::Child>(
        relay_from(link_->endpoint(), {"--streams", "1", "--local", "never", "--token-file", token()}));
  }
  void start_node() { node_.start({"--ring-mib", "64", "--token-file", token()}); }
  std::string token() const { return out("token").string(); }
  bench::Child pull(const std::string& from, const std::string& to) {
    return spawn({DELTASYNC_CLI_BINARY, "--log-level", "off", "pull", "--from", from, "--out", out(to).string(),
                  "--streams", "1", "--local", "never", "--json", "--token-file", token()});
  }
  void node_serves(int version) {
    EXPECT_EQ(wait(pull(node_.endpoint(), "later")), 0);
    EXPECT_EQ(current("later"), version);
  }
  void start_child(const std::string& from) {
    child_ = std::make_unique<bench::Child>(pull(from, "out"));
    const Deadline limit = in_time();
    while (sent_by_node() < (1u << 20) && !limit.passed()) sleep_ms(2);
    ASSERT_FALSE(limit.passed());
    ASSERT_EQ(current("out"), kNothing);
  }
  std::string both() const { return node_.endpoint() + "," + agent_.endpoint(); }
  std::uint64_t sent_by_node() const {
    const auto page = tools::http_get({{"127.0.0.1", node_.http_port()}, {}}, "/metrics", in_time());
    EXPECT_TRUE(page) << page.error().to_string();
    std::uint64_t sum = 0;
    std::istringstream lines(page ? *page : std::string());
    for (std::string text; std::getline(lines, text);) {
      if (text.rfind("deltasync_sent_bytes_total{", 0) != 0) continue;
      sum += static_cast<std::uint64_t>(std::stod(text.substr(text.rfind(' '))));
    }
    return sum;
  }
  void go_on() { link_->grant(std::size_t{1} << 40); }
  void child_has_all() {
    const Json report = line(*child_);
    EXPECT_EQ(report.at("mode"), "full");
    EXPECT_LT(report.at("wire_bytes").get<std::uint64_t>(), 14u << 20) << "of 9 MiB: what it had stays";
    EXPECT_EQ(current("out"), 0);
  }
  void child_has_all_within(std::chrono::seconds limit) {
    const auto since = std::chrono::steady_clock::now();
    child_has_all();
    EXPECT_LT(std::chrono::steady_clock::now() - since, limit);
  }

  std::unique_ptr<test::RationedLink> link_;
  std::unique_ptr<bench::Child> relay_;
  std::unique_ptr<bench::Child> child_;
};

TEST_F(RelayStreams, TheRelayIsStopped) {
  start_child(both());
  ::kill(relay_->pid(), SIGSTOP);
  go_on();
  child_has_all_within(std::chrono::seconds(15));  // five of them without a tile
  ::kill(relay_->pid(), SIGCONT);
  node_serves(0);
}

/// Its child knows no other agent.
TEST_F(RelayStreams, TheRelayIsStoppedAndGoesOn) {
  start_child(node_.endpoint());
  ::kill(relay_->pid(), SIGSTOP);
  go_on();
  sleep_ms(6'500);  // what arrives is not offered any more
  ASSERT_EQ(current("out"), kNothing);
  ::kill(relay_->pid(), SIGCONT);
  child_has_all();
}

TEST_F(RelayStreams, TheRelayIsKilled) {
  start_child(both());
  ::kill(relay_->pid(), SIGKILL);
  child_has_all_within(std::chrono::seconds(25));
}

TEST_F(RelayStreams, TheNodesAgentIsStopped) {
  start_child(both());
  ::kill(node_.pid(), SIGSTOP);
  child_has_all_within(std::chrono::seconds(25));
  ::kill(node_.pid(), SIGCONT);
}

TEST_F(RelayStreams, TheRelayIsKilledAndStartedAgain) {
  start_child(node_.endpoint());
  ::kill(relay_->pid(), SIGKILL);
  go_on();
  start_relay();
  child_has_all();
}

TEST_F(RelayStreams, TheNodesAgentIsKilledAndStartedAgain) {
  start_child(node_.endpoint());
  node_.kill();
  start_node();
  go_on();
  child_has_all();
  EXPECT_EQ(line(*relay_).at("mode"), "full");
  node_serves(0);
}

/// Both, and another version meanwhile.
TEST_F(RelayStreams, AllOfItsNodeIsKilledAndStartedAgain) {
  start_child(node_.endpoint());
  ::kill(relay_->pid(), SIGKILL);
  node_.kill();
  ASSERT_EQ(wait(publish(1, 2, 0)), 0);
  start_node();
  go_on();
  start_relay();
  EXPECT_EQ(line(*child_).at("mode"), "full");
  EXPECT_EQ(current("out"), 1);
  node_serves(1);
}

TEST_F(RelayCluster, ASecondRelayOfANodeIsRefused) {
  auto one = relay();
  ASSERT_EQ(wait(publish(0, 1, 0)), 0);
  EXPECT_EQ(line(one).at("mode"), "full");
  EXPECT_EQ(wait(relay()), 8);  // already_exists, cli.md
}

}  // namespace
}  // namespace deltasync::integration
