// A node as real processes: the trainer's agent, a relay, the node's own agent, four receivers of slices and one that
// keeps directories. The relay and the node's agent are killed and stopped at many points: what a reader of the node
// finds is always a whole published version, and the newest one arrives.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "base/deadline.hpp"
#include "deltasync/receiver.hpp"
#include "format/tile_set.hpp"
#include "tests/integration/cluster.hpp"

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
  bench::Child relay(const std::vector<std::string>& more = {}) {
    std::vector<std::string> argv = {DELTASYNC_CLI_BINARY, "--log-level", "off",          "relay", "--from",
                                     agent_.endpoint(),    "--agent",     node_.socket(), "--json"};
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

TEST_F(RelayCluster, ASecondRelayOfANodeIsRefused) {
  auto one = relay();
  ASSERT_EQ(wait(publish(0, 1, 0)), 0);
  EXPECT_EQ(line(one).at("mode"), "full");
  EXPECT_EQ(wait(relay()), 8);  // already_exists, cli.md
}

}  // namespace
}  // namespace deltasync::integration
