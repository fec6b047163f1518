#include "net/unix_listener.hpp"

#include <sys/socket.h>
#include <sys/stat.h>

#include <cerrno>

#include "base/user.hpp"
#include "net/blocking.hpp"
#include "net/peer_user.hpp"

namespace deltasync::net {
namespace {

constexpr int kBacklog = 128;

/// A forked child of it may keep the socket, which then takes connections that nobody accepts.
bool listener_is_dead(int connection) {
  const auto watch = watch_peer(connection, "the listener", "this process");
  return watch ? *watch && (*watch)->dead() : watch.error().code() == Errc::connection;
}

/// Removes what a dead process left at `path`.
Status remove_stale(const std::string& path, const ListenerWords& words) {
  struct stat found {};
  if (::lstat(path.c_str(), &found) != 0) {
    if (errno == ENOENT) return {};
    return Error::from_errno(path, errno);
  }
  if (!S_ISSOCK(found.st_mode))
    return Error(Errc::already_exists, path + " is in the way: it is not a socket" + describe_stranger(path));
  auto answer = connect_unix(path, Deadline::after(std::chrono::seconds(1)));
  if (answer && listener_is_dead(answer->get())) answer = Error(Errc::connection, "its process is dead");
  if (answer || answer.error().code() == Errc::timed_out) {
    return Error(Errc::already_exists, "another " + words.who + " answers on " + path + describe_stranger(path) +
                                           ": end that one first, or give this one " + words.remedy);
  }
  if (answer.error().code() != Errc::connection) return std::move(answer).error();
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return Error::from_errno("remove " + path + describe_stranger(path), errno);
  }
  return {};
}

}  // namespace

Result<UniqueFd> listen_unix(const std::string& path, const ListenerWords& words) {
  sockaddr_un address;
  DS_ASSIGN(UniqueFd fd, make_unix_socket(path, address));
  // Before bind, so that the file never exists with a wider mode.
  if (::fchmod(fd.get(), S_IRUSR | S_IWUSR) != 0) return Error::from_errno("mode of " + path, errno);
  const auto bind = [&] { return ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address); };
  if (bind() != 0) {
    if (errno != EADDRINUSE) return Error::from_errno("bind " + path, errno);
    DS_TRY(remove_stale(path, words));
    if (bind() != 0) return Error::from_errno("bind " + path, errno);
  }
  if (::listen(fd.get(), kBacklog) != 0) return Error::from_errno("listen on " + path, errno);
  return fd;
}

}  // namespace deltasync::net
