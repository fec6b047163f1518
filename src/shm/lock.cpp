// One agent per segment name: an flock that the kernel drops with its process.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>
#include <utility>

#include "base/fd.hpp"
#include "shm/segment.hpp"

namespace deltasync::shm {

Result<AgentLock> AgentLock::acquire(const std::filesystem::path& dir, const std::string& name) {
  DS_TRY(check_segment_name(name));
  const auto file = dir / (name + ".lock");
  // The file is never removed: a lock on a removed file would exclude nobody who comes later.
  UniqueFd fd(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return Error::from_errno("open " + file.string(), errno);
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return Error::from_errno("lock " + file.string(), errno);
    std::array<char, 32> text{};
    const auto n = ::pread(fd.get(), text.data(), text.size() - 1, 0);
    std::string pid(text.data(), n > 0 ? static_cast<std::size_t>(n) : 0);
    while (!pid.empty() && (pid.back() < '0' || pid.back() > '9')) pid.pop_back();
    return Error(Errc::already_exists, "another agent owns " + (dir / name).string() + ": pid " +
                                           (pid.empty() ? std::string("unknown") : pid) + " holds " + file.string());
  }
  const auto pid = std::to_string(::getpid()) + "\n";
  if (::ftruncate(fd.get(), 0) != 0 ||
      ::pwrite(fd.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return Error::from_errno("write " + file.string(), errno);
  }
  return AgentLock(fd.release());
}

AgentLock::AgentLock(AgentLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

AgentLock& AgentLock::operator=(AgentLock&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

AgentLock::~AgentLock() {
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace deltasync::shm
