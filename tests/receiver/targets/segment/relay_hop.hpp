// A node of a chain: an agent, and a relay that writes to it.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include "tests/receiver/targets/segment/relay_node.hpp"

namespace deltasync::agent {

/// An agent, and a relay that writes to it. It goes on by itself until it is ended.
class Hop {
 public:
  /// `tune`: of its agent.
  explicit Hop(const std::string& from, std::function<void(AgentOptions&)> tune = {}) : tune_(std::move(tune)) {
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
    if (tune_) tune_(options);
    auto agent = Agent::start(options);
    ASSERT_TRUE(agent) << agent.error().to_string();
    agent_ = std::move(*agent);
  }
  /// As after a node's reboot that its relay survived.
  void start_agent_without_segment() {
    const shm::SegmentPath segment = now()->generation->segment->path();
    agent_.reset();
    ASSERT_EQ(::unlink((segment.dir / segment.name).c_str()), 0);
    start_agent();
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
        const auto soon = [this] { return CallOptions::within(pull_limit_.load(), stop_.get_token()); };
        auto staged = relay_->pull(Want{.newer = true}, soon());
        ++pulls_ended_;
        while (staged && hold_commits_ && !stop_.stop_requested()) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        if (staged && !stop_.stop_requested() && (*staged)->commit())
          static_cast<void>(receiver::wait_served(*relay_, soon()));
      }
    });
  }
  /// As when its process dies: what it was writing is given up.
  void end_relay() {
    stop_.request_stop();
    if (thread_.joinable()) thread_.join();
    relay_.reset();
  }

  /// The relay keeps what it has pulled to itself.
  void hold_commits(bool hold) { hold_commits_ = hold; }

  void limit_pulls(std::chrono::milliseconds limit) { pull_limit_ = limit; }
  /// Whatever came of them.
  unsigned pulls_ended() const { return pulls_ended_; }

  std::string endpoint() const { return port_.endpoint(); }
  std::uint16_t port() const { return agent_->port(); }
  SnapshotPtr now() const { return agent_->core().versions().snapshot(); }
  bool cut_off() const { return agent_->core().origin().cut_off().has_value(); }
  bool serves() const { return now()->served != nullptr; }
  /// Of tiles, to receivers.
  std::uint64_t sent() const {
    const Metrics& metrics = agent_->core().metrics();
    return metrics.bytes_extent + metrics.bytes_raw_tiles;
  }
  std::uint64_t frame_bytes_sent() const { return agent_->core().metrics().bytes_frames; }
  AgentCore& core() { return agent_->core(); }

 private:
  const std::function<void(AgentOptions&)> tune_;
  test::TempDir dir_;
  const test::HeldPort port_;
  std::unique_ptr<Agent> agent_;
  std::unique_ptr<Receiver> relay_;
  std::stop_source stop_;
  std::atomic<bool> hold_commits_{false};
  std::atomic<std::chrono::milliseconds> pull_limit_{std::chrono::seconds(30)};
  std::atomic<unsigned> pulls_ended_{0};
  std::thread thread_;
};

}  // namespace deltasync::agent
