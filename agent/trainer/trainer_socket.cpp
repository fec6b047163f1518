#include "agent/trainer/trainer_socket.hpp"

#include <optional>
#include <utility>

#include "net/peer_user.hpp"

namespace deltasync::agent {

Result<ProcessWatch> watch_peer(int connection) {
  DS_ASSIGN(std::optional<ProcessWatch> watch, net::watch_peer(connection, "the trainer", "this agent"));
  if (!watch) {
    return Error(Errc::permission, "the trainer's process is not visible here: share a PID namespace with the agent");
  }
  return *std::move(watch);
}

}  // namespace deltasync::agent
