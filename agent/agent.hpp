// One whole agent: the core, its three servers and their threads.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "agent/core.hpp"
#include "agent/options.hpp"
#include "agent/serve/pull_server.hpp"
#include "agent/trainer/trainer_server.hpp"
#include "net/http_server.hpp"

namespace deltasync::agent {

struct AgentOptions {
  CoreOptions core;
  TrainerServerOptions trainer;  ///< socket_path
  PullServerOptions pull;        ///< `instance` is chosen by the agent
  std::optional<net::HttpOptions> http = net::HttpOptions();
  unsigned net_threads = 2;
  std::filesystem::path ready_file;  ///< empty: none
  bool remove_segment_on_exit = false;
  std::filesystem::path trace_file;  ///< written at the start, and at the end where that can be waited for; empty: none
};

class Agent {
 public:
  /// Starts everything; when it returns, the agent accepts trainers and receivers, and the ready file is there.
  static Result<std::unique_ptr<Agent>> start(const AgentOptions& options);
  /// stop() with a deadline of its own.
  ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  std::uint16_t port() const noexcept;
  std::uint16_t http_port() const noexcept;  ///< 0: off
  AgentCore& core() noexcept;
  const PullServer& pull_server() const noexcept;

  /// Accepts no more, ends all conversations and leases, joins all threads. The segment stays, unless the options say
  /// otherwise. A diff in progress is finished first.
  void stop();
  /// For a process that must exit before stop() is done: removes the segments if the options say so. `names` is of this
  /// agent's core, and was taken before stop().
  static void abandon(const AgentOptions& options, const AgentFiles::Names& names);

 private:
  struct Impl;
  explicit Agent(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace deltasync::agent
