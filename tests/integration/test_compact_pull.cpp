// Receivers on slow links against a whole agent: fewer bytes, and the trainer's bytes all the same.
#include <atomic>
#include <thread>

#include "receiver/receiver_impl.hpp"
#include "tests/agent/agent_harness.hpp"

namespace deltasync::agent {
namespace {

class CompactPull : public AgentTest {
 protected:
  CompactPull() {
    options_.core.ring_bytes_max = 64u << 20;
    model_ = test::make_model(2, {{"a", Dtype::bf16, {1024, 1024}, {}, {}},
                                  {"b", Dtype::bf16, {3000}, {}, {}},
                                  {"c", Dtype::f32, {64, 512}, {}, {}}});
  }

  std::unique_ptr<receiver::ReceiverImpl> connect(bool slow) const {
    ReceiverOptions options;
    options.endpoint = "127.0.0.1:" + std::to_string(port());
    options.streams = 2;
    receiver::Tuning tuning;
    tuning.compact = slow;
    tuning.wait_slice = std::chrono::milliseconds(kTestLimit);  // half of it may be waited for a compact delta
    auto receiver = receiver::ReceiverImpl::connect(options, tuning, test_deadline());
    EXPECT_TRUE(receiver) << receiver.error().to_string();
    EXPECT_TRUE((*receiver)->bind(make_host_target(model_.layout), test_deadline()));
    return std::move(receiver).value();
  }
  void small_step() {
    test::step_small(model_.half, *model_.layout, 0.01, ++seed_);
    ASSERT_TRUE(offload(*writer_, model_.half, ++number_));
  }
  static PullReport pull(Receiver& receiver) {
    auto staged = receiver.pull({}, test_deadline());
    EXPECT_TRUE(staged) << staged.error().to_string();
    if (!staged) return {};
    EXPECT_TRUE((*staged)->commit());
    return (*staged)->report();
  }
  static std::vector<std::byte> held(Receiver& receiver) {
    const auto memory = host_target_memory(*receiver.target());
    return {memory.begin(), memory.end()};
  }
  const Metrics& metrics() const { return agent_->core().metrics(); }

  std::uint64_t seed_ = 900;
};

TEST_F(CompactPull, FewerBytesForTheSameVersion) {
  start_agent();
  next_version();
  const auto slow = connect(true);
  const auto fast = connect(false);
  pull(*slow);
  pull(*fast);
  for (const int steps : {1, 1, 3}) {
    for (int i = 0; i < steps; ++i) small_step();
    const PullReport compact = pull(*slow);
    const PullReport plain = pull(*fast);
    EXPECT_EQ(compact.mode, PullMode::delta);
    EXPECT_EQ(compact.changed, plain.changed);
    EXPECT_EQ(compact.delta_steps, 1u);
    EXPECT_LT(compact.wire_bytes, plain.wire_bytes * 9 / 10);
    EXPECT_TRUE(held(*slow) == model_.half);
    EXPECT_TRUE(held(*fast) == model_.half);
  }
  EXPECT_EQ(metrics().compacts, 3u);
  EXPECT_EQ(metrics().merges, 1u);
}

/// Every pull ends on a version as it was published (the receiver verifies each tile), the last one on the newest.
TEST_F(CompactPull, ATrainerThatNeverPauses) {
  start_agent();
  next_version();
  const auto slow = connect(true);
  pull(*slow);
  std::atomic<bool> stop{false};
  std::thread trainer([&] {
    while (!stop) small_step();
  });
  for (int i = 0; i < 20; ++i) pull(*slow);
  stop = true;
  trainer.join();
  pull(*slow);
  EXPECT_TRUE(held(*slow) == model_.half);
}

}  // namespace
}  // namespace deltasync::agent
