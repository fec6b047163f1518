// A receiver with a host-memory target against the fake agent, with waits short enough for tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.hpp"
#include "format/tiling.hpp"
#include "receiver/receiver_impl.hpp"
#include "receiver/targets/target.hpp"
#include "tests/receiver/fake_agent.hpp"
#include "tests/support/model.hpp"

namespace deltasync::test {

inline Deadline in_ms(int ms) {
  return Deadline::after(std::chrono::milliseconds(ms));
}

/// Misbehaves on requests of one type, from the nth on, so many times.
inline std::function<Fault(const Request&)> fault_on(wire::Type type, Fault fault, std::uint64_t first,
                                                     std::uint64_t times = 1) {
  return [=](const Request& r) {
    return r.type == type && r.ordinal >= first && r.ordinal - first < times ? fault : Fault::none;
  };
}
inline constexpr std::uint64_t kAlways = ~std::uint64_t{0};

/// Every awkward shape, and enough large tensors that several streams have something to do.
inline std::vector<TensorSpec> pull_specs() {
  std::vector<TensorSpec> specs = sample_specs();
  for (int i = 0; i < 6; ++i) {
    TensorSpec s;
    s.name = "big." + std::to_string(i);
    s.dtype = Dtype::bf16;
    s.shape = {512, 1024};
    specs.push_back(s);
  }
  for (int i = 0; i < 300; ++i) {
    TensorSpec s;
    s.name = "norm." + std::to_string(i);
    s.dtype = i % 2 == 0 ? Dtype::bf16 : Dtype::f32;
    s.shape = {static_cast<std::uint64_t>(33 + i)};
    specs.push_back(s);
  }
  return specs;
}

class PullTest : public ::testing::Test {
 protected:
  static receiver::Tuning quick() {
    receiver::Tuning t;
    t.handshake = std::chrono::seconds(20);
    t.silence = std::chrono::seconds(20);
    t.wait_slice = std::chrono::milliseconds(100);
    t.release = std::chrono::milliseconds(500);
    t.backoff_first = std::chrono::milliseconds(1);
    t.backoff_max = std::chrono::milliseconds(20);
    t.item_bytes = 192u << 10;
    t.refused_plans = 2;
    t.frame_item_bytes = 8u << 10;
    t.piece_bytes = 64u << 10;
    return t;
  }

  /// For tests whose peer falls silent. Long enough that the other streams of a loaded machine do not.
  static receiver::Tuning impatient() {
    receiver::Tuning t = quick();
    t.silence = std::chrono::seconds(4);
    return t;
  }

  void SetUp() override { model_ = make_model(7, pull_specs()); }

  /// Agent with one version, receiver bound to a host target that holds nothing.
  void start(FakeAgent::Setup setup = FakeAgent::Setup(), receiver::Tuning tuning = quick()) {
    options_.token = setup.token;
    agent_ = std::make_unique<FakeAgent>(model_.layout, setup);
    agent_->publish(model_.half, "one");
    connect(tuning);
  }
  void connect(receiver::Tuning tuning = quick()) {
    options_.endpoint = agent_->endpoint();
    auto made = receiver::ReceiverImpl::connect(options_, tuning, in_ms(60'000));
    ASSERT_TRUE(made.ok()) << made.error().to_string();
    receiver_ = std::move(*made);
    bind();
  }
  void bind() {
    const Status bound = receiver_->bind(make_host_target(receiver_->layout()), in_ms(60'000));
    ASSERT_TRUE(bound.ok()) << bound.error().to_string();
  }

  /// The trainer makes a step. Any thread: the agent's hooks call it too.
  VersionId step(double density = 0.01, const std::string& label = {}) {
    const std::lock_guard lock(trainer_);
    mutate(model_.half, *model_.layout, density, ++seed_);
    return agent_->publish(model_.half, label);
  }

  Result<std::unique_ptr<StagedUpdate>> pull(Want want = {}, int ms = 60'000) {
    return receiver_->pull(want, in_ms(ms));
  }
  /// Pulls, commits, and checks that every byte is that of the delivered version.
  PullReport pull_and_commit(Want want = {}) {
    auto staged = pull(want);
    EXPECT_TRUE(staged.ok()) << staged.error().to_string();
    if (!staged) return {};
    const Status committed = (*staged)->commit();
    EXPECT_TRUE(committed.ok()) << committed.error().to_string();
    EXPECT_EQ(receiver_->current(), (*staged)->report().version);
    expect_memory(agent_->half_of((*staged)->report().version.id));
    return (*staged)->report();
  }
  void expect_holds_newest() {
    ASSERT_TRUE(receiver_->current().has_value());
    EXPECT_EQ(*receiver_->current(), agent_->newest_version());
    expect_memory(agent_->newest());
  }
  void expect_memory(const std::vector<std::byte>& half) {
    const auto memory = host_target_memory(*receiver_->target());
    ASSERT_EQ(memory.size(), half.size());
    EXPECT_EQ(std::memcmp(memory.data(), half.data(), half.size()), 0) << "memory differs from the published half";
  }
  /// Somebody scribbles over live memory.
  std::byte& live_byte(std::uint32_t tensor, std::uint64_t offset = 0) {
    std::vector<std::byte> scratch;
    const Tile tile = tile_of(*model_.layout, model_.layout->tensors()[tensor].first_tile);
    return *(receiver_->target()->live_tile(tile, scratch)->first + offset);
  }
  std::uint32_t tensor(const std::string& name) const { return *model_.layout->find(name); }

  std::mutex trainer_;
  TestModel model_;
  std::uint64_t seed_ = 100;
  ReceiverOptions options_;
  std::unique_ptr<FakeAgent> agent_;
  std::unique_ptr<receiver::ReceiverImpl> receiver_;
};

}  // namespace deltasync::test
