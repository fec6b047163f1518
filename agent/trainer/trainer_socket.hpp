// Who is at the other end of a connection to the trainers' socket.
#pragma once

#include "base/process.hpp"
#include "deltasync/result.hpp"

namespace deltasync::agent {

/// The process that connected, from the kernel (SO_PEERCRED), watched from now on. permission for another user's
/// process, and for one that this PID namespace cannot see; peer_died.
Result<ProcessWatch> watch_peer(int connection);

}  // namespace deltasync::agent
