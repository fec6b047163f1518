// How many files the agent may come to hold open, and what it does where the system allows fewer.
#pragma once

#include <cstdint>

#include "agent/agent.hpp"
#include "deltasync/result.hpp"

namespace deltasync::agent {

/// With as many connections as these options let in.
std::uint64_t descriptors_needed(const AgentOptions& options);

/// Makes the options fit this many: fewer connections are let in, and the log says so. If the user asked for so many
/// receivers, invalid_argument in place of that; it names the number that is needed.
Status fit_connections(std::uint64_t descriptors, bool asked, AgentOptions& options);

/// The same with what this process may have: raises its soft limit to the hard one first.
Status fit_connections(bool asked, AgentOptions& options);

}  // namespace deltasync::agent
