#include "net/peer_user.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "base/user.hpp"

namespace deltasync::net {

Result<pid_t> check_peer_user(int connection, const std::string& peer, const std::string& self) {
  ucred found{};
  socklen_t size = sizeof found;
  if (::getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &found, &size) != 0) {
    return Error::from_errno("peer credentials", errno);
  }
  if (found.uid == ::geteuid()) return found.pid;
  return Error(Errc::permission, peer + " runs as " + describe_user(found.uid) + ", " + self + " as " +
                                     describe_user(::geteuid()) + ": both must be one user's");
}

}  // namespace deltasync::net
