// Both sides of a group in few lines (commit_protocol.md "Use"), and what they do.
#include "commit/commit.hpp"

#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "base/deadline.hpp"
#include "tests/commit/fake_receiver.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync {
namespace {

/// In the engine's driver, on a thread of its own: all ranks come to each version that the trainer publishes. Ends when
/// the coordinator is destroyed, or has to be started again.
Status follow_trainer(commit::Coordinator& coordinator) {
  const Want newer{.newer = true};
  for (;;) {
    const auto version = coordinator.update(newer, Deadline::after(std::chrono::minutes(5)));
    if (version) continue;  // all ranks serve it
    const Errc why = version.error().code();
    if (why == Errc::cancelled || why == Errc::io) return version.error();
    std::this_thread::sleep_for(std::chrono::seconds(1));  // the error names who is late, or what failed
  }
}

/// In each rank's process, beside the receiver from whose target the engine serves.
Result<std::unique_ptr<commit::Participant>> join_group(const std::string& driver, std::uint32_t rank,
                                                        std::uint32_t ranks, Receiver& receiver,
                                                        commit::Engine& engine) {
  commit::ParticipantOptions options;
  options.coordinator = driver;  // "10.0.0.1:7700"; beyond loopback with options.token or options.tls
  options.rank = rank;
  options.ranks = ranks;
  return commit::Participant::start(std::move(options), receiver, engine);
}

class Runs final : public commit::Engine {
 public:
  Status pause(Deadline /*at once*/) override { return {}; }
  Status resume(const Version& version, Deadline /*at once*/) override {
    serves = version.id.number;
    return {};
  }
  std::atomic<std::uint64_t> serves{0};
};

TEST(CommitExample, BringsAllRanksToEachVersion) {
  const test::TempDir dir;
  commit::CoordinatorOptions options;
  options.ranks = 2;
  options.log = dir.path() / "commit.log";
  auto coordinator = commit::Coordinator::start(options);
  ASSERT_TRUE(coordinator) << coordinator.error().to_string();
  const std::string driver = "127.0.0.1:" + std::to_string((*coordinator)->port());
  commit::FakeTrainer trainer;
  commit::FakeReceiver receivers[] = {commit::FakeReceiver(trainer), commit::FakeReceiver(trainer)};
  Runs engines[2];
  std::unique_ptr<commit::Participant> ranks[2];
  trainer.publish("one");
  for (std::uint32_t r = 0; r < 2; ++r) {
    auto joined = join_group(driver, r, 2, receivers[r], engines[r]);
    ASSERT_TRUE(joined) << joined.error().to_string();
    ranks[r] = *std::move(joined);
  }
  auto following = std::async(std::launch::async, [&] { return follow_trainer(**coordinator); });
  for (std::uint64_t number = 1; number < 4; ++number) {
    const Deadline deadline = Deadline::after(std::chrono::seconds(60));
    while ((engines[0].serves != number || engines[1].serves != number) && !deadline.passed()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(engines[0].serves, number);
    EXPECT_EQ(engines[1].serves, number);
    trainer.publish("next");
  }
  for (auto& rank : ranks) rank.reset();
  coordinator->reset();
  EXPECT_EQ(following.get().error().code(), Errc::cancelled);
}

}  // namespace
}  // namespace deltasync
