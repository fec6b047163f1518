// A trainer that never pauses against a full pull that needs many of its steps: each time the half is reclaimed, the
// receiver keeps what it has verified, advances it by ring deltas, and still ends on a whole version.
#include <atomic>
#include <thread>

#include "deltasync/receiver.hpp"
#include "receiver/targets/target.hpp"
#include "tests/agent/agent_harness.hpp"
#include "tests/support/rationed_link.hpp"

namespace deltasync::agent {
namespace {

class SlowFullPull : public AgentTest {
 protected:
  SlowFullPull() {
    options_.core.lease_grace = std::chrono::milliseconds(300);
    options_.core.ring_bytes_max = 256u << 20;
    model_ = test::make_model(3, {{"w", Dtype::bf16, {8192, 1024}, {}, {}}});  // 16 MiB
  }
};

TEST_F(SlowFullPull, EndsOnAWholeVersionAfterMoreThanFiveSteps) {
  start_agent();
  next_version();
  constexpr std::size_t kRation = 2u << 20;  // a step's worth: the model takes eight
  test::RationedLink link(port());
  link.grant(kRation);
  ReceiverOptions options;
  options.endpoint = "127.0.0.1:" + std::to_string(link.port());
  options.streams = 2;
  options.local = false;  // the link is what is slow
  auto receiver = Receiver::connect(options, test_deadline());
  ASSERT_TRUE(receiver) << receiver.error().to_string();
  ASSERT_TRUE((*receiver)->bind(make_host_target(model_.layout), test_deadline()));

  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> steps{0};
  std::thread trainer([&] {
    while (!stop) {
      next_version(0.0005);
      ++steps;
      link.grant(kRation);
    }
  });
  auto staged = (*receiver)->pull({}, test_deadline());
  const std::uint64_t steps_taken = steps;
  stop = true;
  trainer.join();
  link.grant(std::size_t{1} << 40);
  ASSERT_TRUE(staged) << staged.error().to_string();
  ASSERT_TRUE((*staged)->commit());
  EXPECT_GT(steps_taken, 5U);
  EXPECT_GT((*staged)->report().replans, 0U) << "no lease was revoked: the test did not test";

  // What arrived is what the trainer published under that number, and the newest follows from it.
  auto newest = (*receiver)->pull({}, test_deadline());
  ASSERT_TRUE(newest) << newest.error().to_string();
  EXPECT_NE((*newest)->report().mode, PullMode::full) << "it replaced what it had to follow from";
  ASSERT_TRUE((*newest)->commit());
  const auto memory = host_target_memory(*(*receiver)->target());
  EXPECT_TRUE(std::equal(memory.begin(), memory.end(), model_.half.begin(), model_.half.end()));
}

}  // namespace
}  // namespace deltasync::agent
