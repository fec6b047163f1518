// Who is at the other end of a Unix socket, as the kernel says (SO_PEERCRED): who connected, or who listens.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "base/process.hpp"
#include "deltasync/result.hpp"

namespace deltasync::net {

/// The peer's pid, 0 if this PID namespace cannot see it. permission if it is another user's than this process; `peer`
/// and `self` are for that message: "the trainer", "this agent".
Result<pid_t> check_peer_user(int connection, const std::string& peer, const std::string& self);

/// On that process, so that its death is known though a forked child keeps the connection open; none if this PID
/// namespace cannot see it. `connection` if it is dead already; permission as above.
Result<std::optional<ProcessWatch>> watch_peer(int connection, const std::string& peer, const std::string& self);

}  // namespace deltasync::net
