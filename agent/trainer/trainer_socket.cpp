#include "agent/trainer/trainer_socket.hpp"

#include "net/peer_user.hpp"

namespace deltasync::agent {

Result<ProcessWatch> watch_peer(int connection) {
  DS_ASSIGN(const pid_t pid, net::check_peer_user(connection, "the trainer", "this agent"));
  if (pid == 0) {
    return Error(Errc::permission, "the trainer's process is not visible here: share a PID namespace with the agent");
  }
  DS_ASSIGN(const ProcessId id, ProcessId::of(pid));
  return ProcessWatch::open(id);
}

}  // namespace deltasync::agent
