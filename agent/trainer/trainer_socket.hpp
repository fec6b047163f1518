// The Unix socket itself: how it is claimed, and who is at the other end of a connection.
#pragma once

#include <string>

#include "base/fd.hpp"
#include "base/process.hpp"
#include "deltasync/result.hpp"

namespace deltasync::agent {

/// A listening, non-blocking socket at `path` with mode 0600. A socket file that nobody answers on is replaced;
/// already_exists if somebody does, or if the file is no socket.
Result<UniqueFd> listen_unix(const std::string& path);

/// The process that connected, from the kernel (SO_PEERCRED), watched from now on. permission for another user's
/// process, and for one that this PID namespace cannot see; peer_died.
Result<ProcessWatch> watch_peer(int connection);

}  // namespace deltasync::agent
