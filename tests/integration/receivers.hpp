// Receivers of a whole agent in the test's process.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "receiver/receiver_impl.hpp"
#include "tests/agent/agent_harness.hpp"

namespace deltasync::agent {

class ReceiverTest : public AgentTest {
 protected:
  ReceiverOptions options() const {
    ReceiverOptions options;
    options.endpoint = "127.0.0.1:" + std::to_string(port());
    options.streams = 2;
    options.local = local_;
    return options;
  }
  /// Holds nothing yet, and keeps its version in memory of its own.
  std::unique_ptr<Receiver> connect(const receiver::Tuning& tuning = {}) const {
    auto receiver = receiver::ReceiverImpl::connect(options(), tuning, test_deadline());
    EXPECT_TRUE(receiver) << receiver.error().to_string();
    EXPECT_TRUE((*receiver)->bind(make_host_target(model_.layout), test_deadline()));
    return std::move(receiver).value();
  }
  /// Pulls, commits, and says how.
  static PullReport pull(Receiver& receiver, const Want& want = {}) {
    auto staged = receiver.pull(want, test_deadline());
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

  std::optional<bool> local_;  ///< of receivers that connect from now on
};

}  // namespace deltasync::agent
