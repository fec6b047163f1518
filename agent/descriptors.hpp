// How many file descriptors the agent may need, and what it does if the system allows fewer.
#pragma once

#include <cstdint>

#include "agent/agent.hpp"
#include "deltasync/result.hpp"

namespace deltasync::agent {

/// With as many connections as these options let in.
std::uint64_t descriptors_needed(const AgentOptions& options);

/// Makes the options fit this many descriptors: it lowers the limits of connections, and logs that. If the user named
/// the number of receivers: invalid_argument instead, with the number of descriptors that is needed.
Status fit_connections(std::uint64_t descriptors, bool asked, AgentOptions& options);

/// The same with what this process may have: raises its soft limit to the hard one first.
Status fit_connections(bool asked, AgentOptions& options);

}  // namespace deltasync::agent
