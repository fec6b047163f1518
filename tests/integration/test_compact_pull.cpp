// Receivers on slow links against a whole agent: fewer bytes, and the trainer's bytes all the same.
#include <atomic>
#include <thread>

#include "tests/integration/receivers.hpp"

namespace deltasync::agent {
namespace {

class CompactPull : public ReceiverTest {
 protected:
  CompactPull() {
    options_.core.ring_bytes_max = 64u << 20;
    model_ = test::make_model(2, {{"a", Dtype::bf16, {1024, 1024}, {}, {}},
                                  {"b", Dtype::bf16, {3000}, {}, {}},
                                  {"c", Dtype::f32, {64, 512}, {}, {}}});
  }

  std::unique_ptr<Receiver> connect_over(bool slow) const {
    receiver::Tuning tuning;
    tuning.compact = slow;
    tuning.wait_slice = std::chrono::milliseconds(kTestLimit);  // half of it may be waited for a compact delta
    return connect(tuning);
  }
  void small_step() {
    test::step_small(model_.half, *model_.layout, 0.01, ++seed_);
    ASSERT_TRUE(offload(*writer_, model_.half, ++number_));
  }
  std::uint64_t seed_ = 900;
};

TEST_F(CompactPull, FewerBytesForTheSameVersion) {
  start_agent();
  next_version();
  const auto slow = connect_over(true);
  const auto fast = connect_over(false);
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
  const auto slow = connect_over(true);
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
