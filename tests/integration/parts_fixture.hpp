// A model that several trainer nodes hold parts of: an agent and a writer for each node, all in this process.
#pragma once

#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.hpp"
#include "deltasync/part.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/writer.hpp"
#include "format/part.hpp"
#include "receiver/receiver_impl.hpp"
#include "tests/support/held_port.hpp"
#include "tests/support/model.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::integration {

class PartsTest : public ::testing::Test {
 protected:
  static Deadline limit() { return Deadline::after(std::chrono::seconds(60)); }
  static Deadline soon(int ms) { return Deadline::after(std::chrono::milliseconds(ms)); }

  struct Node {
    test::HeldPort port;
    std::string endpoint = port.endpoint();  ///< as the members know it
    test::TempDir dir;
    std::vector<TensorSlice> held;  ///< of the whole layout
    LayoutPtr layout;
    Sidecar sidecar;
    std::unique_ptr<agent::Agent> agent;
    std::unique_ptr<Writer> writer;
  };

  PartsTest() {
    spdlog::set_level(spdlog::level::err);
    specs_ = test::sample_specs();
    specs_.push_back({.name = "rows", .dtype = Dtype::bf16, .shape = {3000, 257}});
    specs_.push_back({.name = "columns", .dtype = Dtype::bf16, .shape = {900, 1024}});
    specs_.push_back({.name = "norm", .dtype = Dtype::f32, .shape = {1024}});
  }

  /// Every tensor goes to one node in turn, but for `rows`, which is divided by rows, and `columns`, by columns.
  void divide(std::size_t count) {
    const auto plain = Layout::build(specs_);
    ASSERT_TRUE(plain.ok());
    nodes_.clear();
    for (std::size_t n = 0; n < count; ++n) nodes_.push_back(std::make_unique<Node>());
    for (std::uint32_t t = 0; t < (*plain)->tensors().size(); ++t) {
      const Tensor& tensor = (*plain)->tensors()[t];
      if (tensor.tile_count == 0) continue;
      for (std::uint64_t n = 0; n < count; ++n) {
        Rect rect{0, 0, tensor.rows, tensor.cols};
        if (tensor.spec.name == "rows") {
          rect.row = tensor.rows * n / count;
          rect.rows = tensor.rows * (n + 1) / count - rect.row;
        } else if (tensor.spec.name == "columns") {
          rect.col = tensor.cols * n / count;
          rect.cols = tensor.cols * (n + 1) / count - rect.col;
        } else if (t % count != n) {
          continue;
        }
        nodes_[n]->held.push_back({t, rect});
      }
    }
  }

  /// Another node that holds what this one does.
  void add_replica_of(std::size_t node) {
    nodes_.push_back(std::make_unique<Node>());
    nodes_.back()->held = nodes_[node]->held;
  }

  /// Makes the parts, and starts agents and writers.
  void start() {
    for (const auto& node : nodes_) ASSERT_TRUE(add_cuts(specs_, node->held).ok());
    model_ = test::make_model(7, specs_);
    make_parts();
    for (const auto& node : nodes_) {
      start_agent(*node);
      attach(*node);
    }
  }

  void make_parts() {
    std::vector<std::pair<std::string, std::string>> members;
    for (const auto& node : nodes_) members.emplace_back("node" + std::to_string(members.size()), node->endpoint);
    for (std::uint32_t n = 0; n < nodes_.size(); ++n) {
      Node& node = *nodes_[n];
      auto part = make_part(model_.layout, make_sidecar(*model_.layout), node.held, members, n);
      ASSERT_TRUE(part.ok()) << part.error().to_string();
      std::tie(node.layout, node.sidecar) = *std::move(part);
    }
  }

  void start_agent(Node& node) const {
    agent::AgentOptions options;
    options.core.name = "part";
    options.core.shm_dir = node.dir.path();
    options.core.ring_bytes_max = std::uint64_t{64} << 20;
    options.core.lease_grace = lease_grace_;
    options.trainer.socket_path = (node.dir.path() / "agent.sock").string();
    options.pull.listen = {"127.0.0.1", node.port.number()};
    auto agent = agent::Agent::start(options);
    ASSERT_TRUE(agent.ok()) << agent.error().to_string();
    node.agent = *std::move(agent);
  }

  /// As when its host dies.
  static void end(Node& node) {
    node.writer.reset();
    node.agent.reset();
  }

  static void attach(Node& node) {
    WriterOptions options;
    options.agent_socket = (node.dir.path() / "agent.sock").string();
    options.threads = 1;
    auto writer = Writer::attach(node.layout, node.sidecar, options, limit());
    ASSERT_TRUE(writer.ok()) << writer.error().to_string();
    node.writer = *std::move(writer);
  }

  /// Of the model as it is now, what the node holds.
  static std::vector<std::byte> bytes_of(const test::TestModel& model, const Node& node) {
    const auto part = decode_part(node.sidecar.part, *node.layout);
    EXPECT_TRUE(part.ok());
    std::vector<std::byte> half(node.layout->half_bytes());
    for (std::size_t i = 0; i < node.layout->tensors().size(); ++i) {
      const Tensor& mine = node.layout->tensors()[i];
      const Part::Origin& origin = part->origins[i];
      const Tensor& whole = model.layout->tensors()[origin.tensor];
      for (std::uint64_t r = 0; r < mine.rows; ++r) {
        std::memcpy(
            half.data() + mine.offset + r * mine.row_bytes(),
            model.half.data() + whole.offset + (origin.row + r) * whole.row_bytes() + origin.col * whole.element_bytes,
            mine.row_bytes());
      }
    }
    return half;
  }

  void seal(Node& node, std::uint64_t number) {
    const std::vector<std::byte> half = bytes_of(model_, node);
    std::vector<std::pair<std::string, Source>> tensors;
    for (const Tensor& tensor : node.layout->tensors()) {
      tensors.emplace_back(tensor.spec.name, Source{half.data() + tensor.offset});
    }
    const Version version{{epoch_, number}, "step_" + std::to_string(number)};
    const auto report = node.writer->offload(version, tensors, limit());
    ASSERT_TRUE(report.ok()) << report.error().to_string();
    ASSERT_TRUE(node.writer->wait_ready(version.id, limit()).ok());
  }

  /// The model changes, and all nodes but `without` seal it as the next version.
  void next_version(const Node* without = nullptr, double density = 0.01) {
    ++number_;
    if (number_ > 1) test::mutate(model_.half, *model_.layout, density, number_);
    for (const auto& node : nodes_) {
      if (node.get() != without) seal(*node, number_);
    }
    halves_[number_] = model_.half;
  }

  ReceiverOptions options() const {
    ReceiverOptions options;
    options.endpoint = nodes_.front()->endpoint;
    options.threads = 2;
    return options;
  }
  Result<std::unique_ptr<Receiver>> connect() const { return Receiver::connect(options(), {.deadline = limit().at()}); }
  std::unique_ptr<Receiver> bound(const std::vector<Slice>& slices = {}) const {
    auto receiver = connect();
    EXPECT_TRUE(receiver.ok()) << receiver.error().to_string();
    const Status bound = (*receiver)->bind(make_host_target((*receiver)->layout()), slices, {.deadline = limit().at()});
    EXPECT_TRUE(bound.ok()) << bound.error().to_string();
    return *std::move(receiver);
  }
  static PullReport pull(Receiver& receiver, const Want& want = {}) {
    auto staged = receiver.pull(want, {.deadline = limit().at()});
    EXPECT_TRUE(staged.ok()) << staged.error().to_string();
    if (!staged.ok()) return {};
    const Status done = (*staged)->commit();
    EXPECT_TRUE(done.ok()) << done.error().to_string();
    return (*staged)->report();
  }

  /// What the receiver holds is this version, in every byte of its slices.
  void expect_holds(Receiver& receiver, std::uint64_t number) const {
    ASSERT_TRUE(receiver.current().has_value());
    EXPECT_EQ(receiver.current()->id, (VersionId{epoch_, number}));
    const auto memory = host_target_memory(*receiver.target());
    const std::vector<std::byte>& half = halves_.at(number);
    const TileSet tiles = *TileSet::of(*model_.layout, receiver.slices());
    for (const wire::TileRange& range : tiles.ranges()) {
      for (std::uint64_t t = range.first; t < range.end; ++t) {
        const Tile tile = tile_of(*model_.layout, t);
        const Tensor& tensor = model_.layout->tensors()[tile.tensor];
        for (std::uint64_t r = 0; r < tile.rect.rows; ++r) {
          const std::uint64_t at =
              tensor.offset + (tile.rect.row + r) * tensor.row_bytes() + tile.rect.col * tensor.element_bytes;
          ASSERT_EQ(std::memcmp(memory.data() + at, half.data() + at, tile.rect.cols * tensor.element_bytes), 0)
              << tensor.spec.name << ", tile " << t << ", row " << r;
        }
      }
    }
  }

  std::chrono::milliseconds lease_grace_{1'000};
  std::vector<TensorSpec> specs_;
  test::TestModel model_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::uint64_t epoch_ = make_epoch();
  std::uint64_t number_ = 0;
  std::map<std::uint64_t, std::vector<std::byte>> halves_;  ///< by number
};

}  // namespace deltasync::integration
