#include "agent/trainer/trainer_socket.hpp"

#include <sys/socket.h>
#include <sys/stat.h>

#include <cerrno>

#include "base/user.hpp"
#include "net/blocking.hpp"
#include "net/peer_user.hpp"

namespace deltasync::agent {
namespace {

constexpr int kBacklog = 128;

/// Removes what a dead agent left at `path`.
Status remove_stale(const std::string& path) {
  struct stat found {};
  if (::lstat(path.c_str(), &found) != 0) {
    if (errno == ENOENT) return {};
    return Error::from_errno(path, errno);
  }
  if (!S_ISSOCK(found.st_mode))
    return Error(Errc::already_exists, path + " is in the way: it is not a socket" + describe_stranger(path));
  auto answer = net::connect_unix(path, Deadline::after(std::chrono::seconds(1)));
  if (answer || answer.error().code() == Errc::timed_out) {
    return Error(Errc::already_exists, "another agent answers on " + path + describe_stranger(path) +
                                           ": end that one first, or give this one another --socket");
  }
  if (answer.error().code() != Errc::connection) return std::move(answer).error();
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return Error::from_errno("remove " + path + describe_stranger(path), errno);
  }
  return {};
}

}  // namespace

Result<UniqueFd> listen_unix(const std::string& path) {
  sockaddr_un address;
  DS_ASSIGN(UniqueFd fd, net::make_unix_socket(path, address));
  // Before bind, so that the file never exists with a wider mode.
  if (::fchmod(fd.get(), S_IRUSR | S_IWUSR) != 0) return Error::from_errno("mode of " + path, errno);
  const auto bind = [&] { return ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address); };
  if (bind() != 0) {
    if (errno != EADDRINUSE) return Error::from_errno("bind " + path, errno);
    DS_TRY(remove_stale(path));
    if (bind() != 0) return Error::from_errno("bind " + path, errno);
  }
  if (::listen(fd.get(), kBacklog) != 0) return Error::from_errno("listen on " + path, errno);
  return fd;
}

Result<ProcessWatch> watch_peer(int connection) {
  DS_ASSIGN(const pid_t pid, net::check_peer_user(connection, "the trainer", "this agent"));
  if (pid == 0) {
    return Error(Errc::permission, "the trainer's process is not visible here: share a PID namespace with the agent");
  }
  DS_ASSIGN(const ProcessId id, ProcessId::of(pid));
  return ProcessWatch::open(id);
}

}  // namespace deltasync::agent
