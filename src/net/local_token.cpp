#include "net/local_token.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <arpa/inet.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <optional>
#include <system_error>
#include <thread>

#include "base/file_name.hpp"
#include "base/runtime_dir.hpp"
#include "net/auth.hpp"

namespace deltasync::net {
namespace {

constexpr const char* kExtension = ".token";
constexpr int kAttempts = 50;  ///< while another process is removing what a dead owner left under the same name
constexpr auto kPause = std::chrono::milliseconds(2);

/// The same address is another agent's in each network namespace, and they may share a runtime directory.
std::string file_name(const Endpoint& at) {
  struct stat net {};
  const bool known = ::stat("/proc/self/ns/net", &net) == 0;
  return to_string(at) + "-" + std::to_string(known ? net.st_ino : 0) + kExtension;
}

/// Nothing: not of TCP. connection: it has ended.
Result<std::optional<Endpoint>> peer_of(int connection) {
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  if (::getpeername(connection, reinterpret_cast<sockaddr*>(&peer), &size) != 0) {
    return Error(Errc::connection, "the connection has ended");
  }
  char text[INET6_ADDRSTRLEN] = {};
  if (peer.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(peer);
    ::inet_ntop(AF_INET, &v4.sin_addr, text, sizeof text);
    return std::optional(Endpoint{text, ntohs(v4.sin_port)});
  }
  if (peer.ss_family != AF_INET6) return std::optional<Endpoint>();
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(peer);
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    ::inet_ntop(AF_INET, &v6.sin6_addr.s6_addr[12], text, sizeof text);
  } else {
    ::inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof text);
  }
  return std::optional(Endpoint{text, ntohs(v6.sin6_port)});
}

// The lock of a file's owner belongs to the open file: the kernel drops it with the process. Whether somebody has it
// can be asked without taking it, so that those who look are in nobody's way.

bool take_lock(int fd) {
  struct flock whole {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  return ::fcntl(fd, F_OFD_SETLK, &whole) == 0;
}

bool is_locked(int fd) {
  struct flock whole {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  return ::fcntl(fd, F_OFD_GETLK, &whole) == 0 && whole.l_type != F_UNLCK;
}

/// Of dead owners. Under the lock of each, and no name is ever given to another file while it has one: so that none
/// goes that has just been made.
void remove_stale(const std::filesystem::path& dir) {
  std::error_code ec;
  for (std::filesystem::directory_iterator it(dir, ec), end; !ec && it != end; it.increment(ec)) {
    const std::filesystem::path& file = it->path();
    if (file.extension() != kExtension) continue;
    const UniqueFd fd(::open(file.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (fd && take_lock(fd.get()) && is_name_of(file, fd.get())) ::unlink(file.c_str());
  }
}

}  // namespace

std::string make_token() {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string token;
  for (const std::uint8_t byte : make_nonce()) {
    token += kDigits[byte >> 4];
    token += kDigits[byte & 15];
  }
  return token;
}

Result<LocalToken> LocalToken::publish(const Endpoint& at, std::string_view token) {
  DS_ASSIGN(const std::filesystem::path dir, make_runtime_dir());
  remove_stale(dir);
  const std::filesystem::path file = dir / file_name(at);
  const std::string part = file.string() + "." + std::to_string(::getpid()) + ".tmp";
  const auto failed = [&](int error) {
    ::unlink(part.c_str());
    return Error::from_errno("token file " + file.string(), error);
  };
  ::unlink(part.c_str());  // of a process that had this pid
  UniqueFd fd(::open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return failed(errno);
  // Locked and whole before it has its name, so that nobody finds it otherwise.
  if (!take_lock(fd.get())) return failed(errno);
  const ssize_t written = ::write(fd.get(), token.data(), token.size());
  if (written != static_cast<ssize_t>(token.size())) return failed(written < 0 ? errno : ENOSPC);
  for (int left = kAttempts; ::link(part.c_str(), file.c_str()) != 0; --left) {
    if (errno != EEXIST || left == 0) return failed(errno);
    remove_stale(dir);
    std::this_thread::sleep_for(kPause);
  }
  ::unlink(part.c_str());
  UniqueFd held(::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (held) ::flock(held.get(), LOCK_SH | LOCK_NB);  // best effort
  return LocalToken(std::move(held), std::move(fd), file);
}

LocalToken::~LocalToken() {
  if (fd_ && is_name_of(file_, fd_.get())) ::unlink(file_.c_str());
}

Result<std::string> find_local_token(int connection) {
  DS_ASSIGN(const std::optional<Endpoint> peer, peer_of(connection));
  if (!peer || !is_loopback(peer->host)) return std::string();
  for (const std::filesystem::path& dir : find_runtime_dirs()) {
    const std::filesystem::path file = dir / file_name(*peer);
    const UniqueFd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (fd && is_locked(fd.get())) return read_token(fd.get(), file);
  }
  return std::string();
}

}  // namespace deltasync::net
