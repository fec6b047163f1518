// Receivers that are several versions late, against a whole agent: one merged delta for all of them, and the trainer's
// bytes whatever happens meanwhile.
#include <algorithm>
#include <atomic>
#include <thread>

#include "tests/integration/receivers.hpp"

namespace deltasync::agent {
namespace {

class LateReceiver : public ReceiverTest {
 protected:
  LateReceiver() { options_.core.ring_bytes_max = 64u << 20; }
};

TEST_F(LateReceiver, SeveralShareOneMergedDelta) {
  start_agent();
  next_version();
  const auto first = connect();
  const auto second = connect();
  pull(*first);
  pull(*second);
  std::uint64_t chain_bytes = 0;
  for (int i = 0; i < 6; ++i) {
    next_version(0.003);
    chain_bytes += served()->delta_bytes;
  }
  for (Receiver* const receiver : {first.get(), second.get()}) {
    const PullReport report = pull(*receiver);
    EXPECT_EQ(report.mode, PullMode::delta);
    EXPECT_LT(report.wire_bytes, chain_bytes);
    EXPECT_TRUE(held(*receiver) == model_.half);
  }
  EXPECT_EQ(metrics().merges, 1u);
  EXPECT_EQ(metrics().merge_hits, 1u);
  next_version(0.003);
  EXPECT_EQ(pull(*first).mode, PullMode::delta);
  EXPECT_TRUE(held(*first) == model_.half);
  EXPECT_EQ(metrics().merges, 1u) << "who is one version late needs none";
}

TEST_F(LateReceiver, APastVersionIsReachedToo) {
  options_.core.form = delta::ValueForm::absolute;
  start_agent();
  next_version();
  const auto receiver = connect();
  pull(*receiver);
  for (int i = 0; i < 3; ++i) next_version(0.003);
  const std::vector<std::byte> fourth = model_.half;
  for (int i = 0; i < 2; ++i) next_version(0.003);
  Want want;
  want.number = 4;
  const PullReport report = pull(*receiver, want);
  EXPECT_EQ(report.mode, PullMode::delta);
  EXPECT_EQ(report.version.id.number, 4u);
  EXPECT_TRUE(held(*receiver) == fourth);
  EXPECT_EQ(metrics().merges, 1u);
}

/// Every pull ends on a version as it was published (the receiver verifies each tile), the last one on the newest.
TEST_F(LateReceiver, ATrainerThatNeverPauses) {
  start_agent();
  next_version();
  std::atomic<bool> stop{false};
  std::thread trainer([&] {
    while (!stop) next_version(0.002);
  });
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<Receiver>> receivers;
  for (int i = 0; i < 3; ++i) receivers.push_back(connect());
  for (auto& receiver : receivers) {
    threads.emplace_back([&receiver] {
      for (int i = 0; i < 12; ++i) pull(*receiver);
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  trainer.join();
  for (auto& receiver : receivers) {
    EXPECT_NE(pull(*receiver).version.id.number, 0u);
    EXPECT_TRUE(held(*receiver) == model_.half);
  }
}

}  // namespace
}  // namespace deltasync::agent
