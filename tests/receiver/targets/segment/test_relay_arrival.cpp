// The first version streams through relays: who pulls from a relay's agent has tiles of it before the relay has it
// whole. Whatever happens to one of them meanwhile, all end with the trainer's bytes.
#include <algorithm>
#include <atomic>
#include <stop_token>
#include <thread>

#include "tests/receiver/targets/segment/relay_node.hpp"
#include "tests/support/rationed_link.hpp"

namespace deltasync::agent {
namespace {

constexpr std::size_t kSomeBytes = 11u << 20;  ///< over two streams, each of which needs four for a batch
constexpr std::size_t kAllBytes = std::size_t{1} << 40;
constexpr std::uint64_t kTold = 1u << 20;  ///< more than what an agent says beside tiles

/// An agent, and a relay that writes to it. It goes on by itself until it is ended.
class Hop {
 public:
  explicit Hop(const std::string& from) {
    start_agent();
    start_relay(from);
  }
  ~Hop() {
    end_relay();
    agent_.reset();
  }
  /// Again: what it finds is the segment, and the relay that writes to it.
  void start_agent() {
    agent_.reset();
    AgentOptions options;
    options.core.name = "hop";
    options.core.shm_dir = dir_.path();
    options.core.ring_bytes_max = 64u << 20;
    options.pull.listen.port = port_.number();
    options.trainer.socket_path = (dir_.path() / "agent.sock").string();
    auto agent = Agent::start(options);
    ASSERT_TRUE(agent) << agent.error().to_string();
    agent_ = std::move(*agent);
  }
  void start_relay(const std::string& from) {
    ReceiverOptions options;
    options.endpoint = from;
    options.streams = 2;
    options.threads = 2;
    options.local = false;
    auto relay = Receiver::connect(options, test_deadline());
    ASSERT_TRUE(relay) << relay.error().to_string();
    RelayTargetOptions target_options;
    target_options.agent_socket = (dir_.path() / "agent.sock").string();
    auto target = make_relay_target((*relay)->layout(), (*relay)->sidecar(), target_options, test_deadline());
    ASSERT_TRUE(target) << target.error().to_string();
    ASSERT_TRUE((*relay)->bind(std::move(*target), test_deadline()));
    relay_ = std::move(*relay);
    stop_ = std::stop_source();
    thread_ = std::thread([this] {
      while (!stop_.stop_requested()) {
        const auto soon = [this] { return CallOptions::within(std::chrono::seconds(30), stop_.get_token()); };
        auto staged = relay_->pull(Want{.newer = true}, soon());
        if (staged && (*staged)->commit()) static_cast<void>(receiver::wait_served(*relay_, soon()));
      }
    });
  }
  /// As when its process dies: what it was writing is given up.
  void end_relay() {
    stop_.request_stop();
    if (thread_.joinable()) thread_.join();
    relay_.reset();
  }

  std::string endpoint() const { return port_.endpoint(); }
  SnapshotPtr now() const { return agent_->core().versions().snapshot(); }
  bool serves() const { return now()->served != nullptr; }
  /// Of tiles, to receivers.
  std::uint64_t sent() const {
    const Metrics& metrics = agent_->core().metrics();
    return metrics.bytes_extent + metrics.bytes_raw_tiles;
  }

 private:
  test::TempDir dir_;
  const test::HeldPort port_;
  std::unique_ptr<Agent> agent_;
  std::unique_ptr<Receiver> relay_;
  std::stop_source stop_;
  std::thread thread_;
};

class RelayArrival : public ReceiverTest {
 protected:
  RelayArrival() {
    model_ = test::make_model(3, {{"w", Dtype::bf16, {8192, 1024}, {}, {}}});  // 16 MiB
    options_.core.lease_grace = std::chrono::milliseconds(100);
    options_.core.ring_bytes_max = 256u << 20;
    options_.pull.listen.port = port_.number();  // found at the same place after a restart
  }
  void SetUp() override {
    start_agent();
    next_version();
    link_ = std::make_unique<test::RationedLink>(port());
    link_->grant(kSomeBytes);
  }
  ~RelayArrival() override {
    if (child_.joinable()) child_.join();
  }

  /// Pulls until it has a version.
  void start_child(const std::string& from, std::optional<bool> local = false) {
    ReceiverOptions options;
    options.endpoint = from;
    options.streams = 2;
    options.local = local;
    auto receiver = Receiver::connect(options, test_deadline());
    ASSERT_TRUE(receiver) << receiver.error().to_string();
    receiver_ = std::move(*receiver);
    ASSERT_TRUE(receiver_->bind(make_host_target(model_.layout), test_deadline()));
    child_ = std::thread([this] { report_ = pull(*receiver_); });
  }
  void child_has_newest() {
    child_.join();
    EXPECT_EQ(report_.version.id.number, number_);
    EXPECT_EQ(report_.root, served()->root);
    EXPECT_TRUE(held(*receiver_) == model_.half);
  }
  static bool becomes(const std::function<bool()>& condition) { return eventually(condition); }

  const test::HeldPort port_;
  std::unique_ptr<test::RationedLink> link_;
  std::unique_ptr<Receiver> receiver_;
  PullReport report_;
  std::thread child_;
};

TEST_F(RelayArrival, AChildHasTilesBeforeTheRelayHasThemAll) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint());
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  EXPECT_FALSE(hop.serves());
  link_->grant(kAllBytes);
  child_has_newest();
  EXPECT_EQ(report_.replans, 0u) << "it waits for tiles, and does not ask again and again";
  EXPECT_TRUE(becomes([&] { return hop.serves(); }));
  EXPECT_EQ(hop.now()->served->root, served()->root);
}

/// Nobody looks into a half that is being filled but by the agent.
TEST_F(RelayArrival, AChildOnTheSameHostHasThemOverItsConnection) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint(), std::nullopt);
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  EXPECT_FALSE(hop.serves());
  link_->grant(kAllBytes);
  child_has_newest();
}

TEST_F(RelayArrival, ThroughAChainOfThree) {
  Hop first(link_->endpoint());
  Hop second(first.endpoint());
  Hop third(second.endpoint());
  start_child(third.endpoint());
  ASSERT_TRUE(becomes([&] { return third.sent() > kTold; }));
  EXPECT_FALSE(first.serves());
  link_->grant(kAllBytes);
  child_has_newest();
  for (const Hop* hop : {&first, &second, &third}) {
    EXPECT_TRUE(becomes([&] { return hop->serves(); }));
    EXPECT_EQ(hop->now()->served->root, served()->root);
  }
}

TEST_F(RelayArrival, TheRelayDiesInTheMiddle) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint());
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  hop.end_relay();
  EXPECT_TRUE(becomes([&] { return hop.now()->arriving == nullptr; }));
  EXPECT_FALSE(hop.serves());
  link_->grant(kAllBytes);
  hop.start_relay(link_->endpoint());
  child_has_newest();
  EXPECT_GT(report_.replans, 0u);
  EXPECT_LT(hop.sent(), 2 * model_.half.size()) << "what it had stays";
}

TEST_F(RelayArrival, TheNodesAgentDiesInTheMiddle) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint());
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  hop.start_agent();
  EXPECT_TRUE(becomes([&] { return hop.now()->arriving != nullptr; })) << "the relay goes on with its fill";
  link_->grant(kAllBytes);
  child_has_newest();
  EXPECT_TRUE(becomes([&] { return hop.serves(); }));
  EXPECT_EQ(hop.now()->served->root, served()->root);
}

TEST_F(RelayArrival, TheAgentAboveDiesInTheMiddle) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint());
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  writer_.reset();
  stop_agent();
  EXPECT_FALSE(hop.serves());
  start_agent();
  ASSERT_TRUE(becomes([&] { return served() != nullptr; }));
  link_->grant(kAllBytes);
  child_has_newest();
  EXPECT_LT(hop.sent(), model_.half.size() + kSomeBytes) << "what arrives is the same version still";
}

TEST_F(RelayArrival, ANewerVersionComesInTheMiddle) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint());
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  const std::uint64_t first = hop.now()->arriving->version.id.number;
  next_version();
  next_version();  // takes the half that the relay was reading
  link_->grant(kSomeBytes);
  EXPECT_TRUE(becomes([&] {
    const SnapshotPtr now = hop.now();
    return now->served || (now->arriving && now->arriving->version.id.number > first);
  }));
  link_->grant(kAllBytes);
  child_has_newest();
  EXPECT_GT(report_.replans, 0u);
}

/// The relay finds out, and who trusts the relay gets nothing of it.
TEST_F(RelayArrival, AWrongTileIsNotPassedOn) {
  const ServedPtr version = served();
  const std::uint64_t last = model_.layout->tile_count() - 1;
  const Tensor& tensor = model_.layout->tensors()[0];
  version->generation->segment->half(version->half.half)[tensor.bytes - 1] ^= std::byte{1};
  Hop hop(link_->endpoint());
  start_child(hop.endpoint());
  link_->grant(kAllBytes);
  child_.join();
  // The agent above has published it again, as it is; that is what everybody has.
  EXPECT_NE(served()->root, version->root);
  EXPECT_EQ(report_.root, served()->root);
  const std::vector<std::byte> got = held(*receiver_);
  EXPECT_EQ(delta::tile_digest(*model_.layout, got, last), (*served()->digests)[static_cast<std::size_t>(last)]);
  EXPECT_TRUE(becomes([&] { return hop.serves(); }));
  EXPECT_EQ(hop.now()->served->root, served()->root);
}

}  // namespace
}  // namespace deltasync::agent
