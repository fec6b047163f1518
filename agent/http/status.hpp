// What the agent says about itself: pure text from its parts, for the HTTP pages and for tests.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "agent/core.hpp"
#include "agent/serve/pull_server.hpp"
#include "agent/trainer/trainer_server.hpp"

namespace deltasync::agent {

/// The parts of one agent. Not owned; `trainer_server` may be null.
struct AgentParts {
  AgentCore& core;
  const PullServer& pull_server;
  const TrainerServer* trainer_server = nullptr;
  std::uint64_t instance = 0;
  std::chrono::steady_clock::time_point started_at;
  net::Tls* tls = nullptr;  ///< may be null
};

/// A receiver, and how far behind what is served now is what it has committed.
struct ReceiverStatus {
  ReceiverRow row;
  Behind behind;
  double behind_s() const { return std::chrono::duration<double>(behind.since).count(); }
};
std::vector<ReceiverStatus> receiver_status(const AgentParts& parts);

/// Writers that are attached now: a trainer's ranks, or a relay.
std::size_t writers_attached(const AgentParts& parts);

/// No newer version comes, and since when: what Origin knows of relays, or the trainer is gone, and a receiver of
/// `receivers` holds a version of a newer epoch, which came from elsewhere.
std::optional<Origin::CutOff> cut_off(const AgentParts& parts, const std::vector<ReceiverStatus>& receivers);

/// GET /v1/status.
std::string status_json(const AgentParts& parts);
/// GET /v1/layout; with `tensors` every tensor is listed. Empty if there is no layout yet.
std::string layout_json(const AgentParts& parts, bool tensors);

}  // namespace deltasync::agent
