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
#include "base/file_name.hpp"
#include "base/user.hpp"
#include "shm/segment.hpp"

namespace deltasync::shm {

namespace {

/// What a stranger left or holds says nothing about this user's agents.
Status check_owner(int fd, const std::filesystem::path& file) {
  struct stat found {};
  if (::fstat(fd, &found) != 0) return Error::from_errno(file.string(), errno);
  if (found.st_uid == ::geteuid()) return {};
  return Error(Errc::permission, file.string() + " belongs to " + describe_user(found.st_uid) + ", not to " +
                                     describe_user(::geteuid()) +
                                     ": have it removed, or choose another --name or --shm-dir");
}

Error owned_by_another(int fd, const std::filesystem::path& segment, const std::filesystem::path& file) {
  std::array<char, 32> text{};
  const auto n = ::pread(fd, text.data(), text.size() - 1, 0);
  std::string pid(text.data(), n > 0 ? static_cast<std::size_t>(n) : 0);
  while (!pid.empty() && (pid.back() < '0' || pid.back() > '9')) pid.pop_back();
  return {Errc::already_exists, "another agent owns " + segment.string() + ": pid " +
                                    (pid.empty() ? std::string("unknown") : pid) + " holds " + file.string() +
                                    ": end that one first, or give this one another --name"};
}

}  // namespace

Result<AgentLock> AgentLock::acquire(const std::filesystem::path& dir, const std::string& name) {
  DS_TRY(check_segment_name(name));
  const auto file = dir / (name + ".lock");
  UniqueFd fd;
  do {  // again only if the owner before removed the file between our open and our lock
    fd = UniqueFd(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd) return Error::from_errno("open " + file.string() + describe_stranger(file), errno);
    DS_TRY(check_owner(fd.get(), file));
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return Error::from_errno("lock " + file.string(), errno);
      return owned_by_another(fd.get(), dir / name, file);
    }
  } while (!is_name_of(file, fd.get()));  // a lock on a file that has been removed excludes nobody who comes later
  const auto pid = std::to_string(::getpid()) + "\n";
  if (::ftruncate(fd.get(), 0) != 0 ||
      ::pwrite(fd.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return Error::from_errno("write " + file.string(), errno);
  }
  return AgentLock(fd.release(), file);
}

AgentLock::AgentLock(AgentLock&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), file_(std::move(other.file_)), remove_(other.remove_) {}

AgentLock& AgentLock::operator=(AgentLock&& other) noexcept {
  if (this != &other) {
    release();
    fd_ = std::exchange(other.fd_, -1);
    file_ = std::move(other.file_);
    remove_ = other.remove_;
  }
  return *this;
}

AgentLock::~AgentLock() {
  release();
}

bool AgentLock::in_place() const {
  return is_name_of(file_, fd_);
}

void AgentLock::remove() noexcept {
  if (in_place()) ::unlink(file_.c_str());
}

void AgentLock::release() noexcept {
  if (fd_ < 0) return;
  if (remove_) remove();  // while we hold it: the next process makes a new file
  ::close(std::exchange(fd_, -1));
}

}  // namespace deltasync::shm
