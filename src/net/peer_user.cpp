#include "net/peer_user.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

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

Result<std::optional<ProcessWatch>> watch_peer(int connection, const std::string& peer, const std::string& self) {
  DS_ASSIGN(const pid_t pid, check_peer_user(connection, peer, self));
  if (pid == 0) return std::optional<ProcessWatch>();
  const auto id = ProcessId::of(pid);
  auto watch = id ? ProcessWatch::open(*id) : Result<ProcessWatch>(id.error());
  if (watch) return std::optional<ProcessWatch>(*std::move(watch));
  const Errc code = watch.error().code();
  if (code != Errc::peer_died && code != Errc::not_found) return std::move(watch).error();
  return Error(Errc::connection, peer + " is dead: " + watch.error().message());
}

}  // namespace deltasync::net
