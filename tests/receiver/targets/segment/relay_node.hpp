// A node: the trainer's agent, a relay that pulls from it, the node's own agent that the relay writes to, and receivers
// of slices that pull from that one.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.hpp"
#include "format/tile_set.hpp"
#include "format/tiling.hpp"
#include "receiver/receiver_impl.hpp"
#include "receiver/standing.hpp"
#include "receiver/targets/segment/relay.hpp"
#include "tests/integration/receivers.hpp"
#include "tests/support/held_port.hpp"

namespace deltasync::agent {

inline constexpr std::uint64_t kRanks = 4;

inline std::vector<TensorSpec> cut_specs() {
  auto specs = test::sample_specs();
  specs.push_back({"model.layers.0.mlp.up_proj.weight", Dtype::bf16, {1024, 512}, {}, {}});
  specs.push_back({"model.layers.0.mlp.down_proj.weight", Dtype::bf16, {512, 1024}, {}, {}});
  add_even_cuts(specs, kRanks);
  return specs;
}

class RelayNode : public ReceiverTest {
 protected:
  RelayNode() {
    model_ = test::make_model(5, cut_specs());
    options_.core.ring_bytes_max = 64u << 20;
    node_options_.core.name = "node";
    node_options_.core.shm_dir = node_dir_.path();
    node_options_.core.ring_bytes_max = 64u << 20;
    node_options_.pull.listen.port = node_port_.number();  // a restarted one is found at the same place
    node_options_.trainer.socket_path = (node_dir_.path() / "agent.sock").string();
    guard_ = std::chrono::minutes(1);
  }
  ~RelayNode() override {
    relay_.reset();
    node_.reset();
  }

  void start() {
    start_agent();
    start_node();
    next_version();
    start_relay();
  }
  void start_node() {
    handed_ = 0;
    auto agent = Agent::start(node_options_);
    ASSERT_TRUE(agent) << agent.error().to_string();
    node_ = std::move(agent).value();
  }
  /// As a relay process does, which may have been there before.
  void start_relay() {
    relay_.reset();
    relay_ = connect_to(port());
    ASSERT_NE(relay_, nullptr);
    RelayTargetOptions options;
    options.agent_socket = node_options_.trainer.socket_path;
    options.threads = 2;
    options.guard_limit = guard_;
    options.pulled_from = receiver::agent_instance_of(*relay_);
    auto target = make_relay_target(relay_->layout(), relay_->sidecar(), options, test_deadline());
    ASSERT_TRUE(target) << target.error().to_string();
    const Status bound = relay_->bind(std::move(target).value(), test_deadline());
    ASSERT_TRUE(bound) << bound.error().to_string();
  }
  static std::unique_ptr<Receiver> connect_to(std::uint16_t port) {
    ReceiverOptions options;
    options.endpoint = "127.0.0.1:" + std::to_string(port);
    options.streams = 2;
    options.threads = 2;
    auto receiver = Receiver::connect(options, test_deadline());
    EXPECT_TRUE(receiver) << receiver.error().to_string();
    return receiver ? std::move(receiver).value() : nullptr;
  }
  /// Relays what is newest and waits until the node's agent serves it, and its root is the trainer's.
  PullReport hand_on() {
    const PullReport report = pull(*relay_);
    const Status served = receiver::wait_served(*relay_, test_deadline());
    EXPECT_TRUE(served) << served.error().to_string();
    EXPECT_EQ(node_served()->version, AgentTest::served()->version);
    EXPECT_EQ(node_served()->root, AgentTest::served()->root);
    if (report.mode == PullMode::delta && report.delta_steps == 1) ++handed_;
    EXPECT_EQ(node_->core().metrics().handed_deltas, handed_) << "the node's agent need not compare halves";
    return report;
  }
  static receiver::Tuning quick_looks() {
    receiver::Tuning tuning;
    tuning.preferred_look = std::chrono::milliseconds(0);
    tuning.parents_look = std::chrono::milliseconds(0);
    return tuning;
  }
  ServedPtr node_served() const { return node_->core().versions().snapshot()->served; }

  std::vector<Slice> share(const Layout& layout, std::uint64_t rank) const {
    std::vector<Slice> subscription;
    for (const Tensor& tensor : layout.tensors()) {
      const std::string& name = tensor.spec.name;
      if (tensor.rows % kRanks == 0 && tensor.rows > kRanks) {
        subscription.push_back(*row_slice(layout, name, rank, kRanks));
      } else if (tensor.cols % kRanks == 0 && tensor.cols > kRanks) {
        subscription.push_back(*col_slice(layout, name, rank, kRanks));
      } else {
        subscription.push_back({name, std::nullopt});
      }
    }
    return subscription;
  }
  std::unique_ptr<Receiver> sibling(std::uint64_t rank) {
    auto receiver = connect_to(node_->port());
    if (receiver == nullptr) return nullptr;
    const Status bound =
        receiver->bind(make_host_target(receiver->layout()), share(*receiver->layout(), rank), test_deadline());
    EXPECT_TRUE(bound) << bound.error().to_string();
    return receiver;
  }
  std::vector<std::unique_ptr<Receiver>> siblings() {
    std::vector<std::unique_ptr<Receiver>> all;
    for (std::uint64_t rank = 0; rank < kRanks; ++rank) all.push_back(sibling(rank));
    return all;
  }
  /// Its tiles are those of the trainer's newest version.
  testing::AssertionResult has_its_slices(Receiver& receiver, std::uint64_t rank) const {
    const Layout& layout = *receiver.layout();
    if (receiver.current() != AgentTest::served()->version) return testing::AssertionFailure() << "another version";
    const auto tiles = TileSet::of(layout, share(layout, rank));
    const auto memory = host_target_memory(*receiver.target());
    for (std::uint64_t i = 0; i < tiles->tiles(); ++i) {
      const Tile tile = tile_of(layout, tiles->nth(i));
      const Tensor& tensor = layout.tensors()[tile.tensor];
      for (std::uint64_t row = tile.rect.row; row < tile.rect.row + tile.rect.rows; ++row) {
        const std::uint64_t at = tensor.offset + row * tensor.row_bytes() + tile.rect.col * tensor.element_bytes;
        if (std::memcmp(memory.data() + at, model_.half.data() + at, tile.rect.cols * tensor.element_bytes) != 0) {
          return testing::AssertionFailure() << "tile " << tile.index << " of " << tensor.spec.name;
        }
      }
    }
    return testing::AssertionSuccess();
  }
  void all_pull(std::vector<std::unique_ptr<Receiver>>& all, PullMode mode) {
    for (std::uint64_t rank = 0; rank < all.size(); ++rank) {
      EXPECT_EQ(pull(*all[rank]).mode, mode) << "rank " << rank;
      EXPECT_TRUE(has_its_slices(*all[rank], rank)) << "rank " << rank;
    }
  }

  test::TempDir node_dir_;
  const test::HeldPort node_port_;
  AgentOptions node_options_;
  std::uint64_t handed_ = 0;  // deltas that the relay has handed over to node_
  std::chrono::nanoseconds guard_;
  std::unique_ptr<Agent> node_;
  std::unique_ptr<Receiver> relay_;
};

}  // namespace deltasync::agent
