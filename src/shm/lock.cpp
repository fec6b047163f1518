// One agent per segment name: an flock that the kernel drops with its process.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>
#include <string_view>
#include <utility>

#include "base/fd.hpp"
#include "base/file_name.hpp"
#include "base/user.hpp"
#include "shm/segment.hpp"

namespace deltasync::shm {

namespace {

constexpr std::size_t kNoteBytesMax = 4096;

/// Of the file: the owner's pid, and its note.
struct Lines {
  std::string pid;
  std::string note;
};

/// Whatever else stands there is nobody's note.
Lines read_lines(int fd) {
  std::array<char, 32 + kNoteBytesMax> text{};
  const auto n = ::pread(fd, text.data(), text.size(), 0);
  const std::string_view all(text.data(), n > 0 ? static_cast<std::size_t>(n) : 0);
  Lines lines;
  lines.pid = all.substr(0, all.find_first_not_of("0123456789"));
  const auto first = all.find('\n');
  if (first == std::string_view::npos) return lines;
  const auto last = all.find('\n', first + 1);
  if (last != std::string_view::npos) lines.note = all.substr(first + 1, last - first - 1);
  return lines;
}

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
  const std::string pid = read_lines(fd).pid;
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
  AgentLock lock(fd.release(), file);
  lock.note_ = read_lines(lock.fd_).note;
  DS_TRY(lock.write());
  return lock;
}

Status AgentLock::write_note(std::string note) {
  if (note.size() > kNoteBytesMax || note.find('\n') != std::string::npos) {
    return Error(Errc::invalid_argument, "a note is one line of at most " + std::to_string(kNoteBytesMax) + " bytes");
  }
  note_ = std::move(note);
  return write();
}

/// Whole lines over those that were there: a process that ends in between leaves the lines of one of the two.
Status AgentLock::write() const {
  const std::string text = std::to_string(::getpid()) + "\n" + (note_.empty() ? "" : note_ + "\n");
  const auto bytes = static_cast<ssize_t>(text.size());
  if (::pwrite(fd_, text.data(), text.size(), 0) != bytes || ::ftruncate(fd_, bytes) != 0) {
    return Error::from_errno("write " + file_.string(), errno);
  }
  return {};
}

AgentLock::AgentLock(AgentLock&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      file_(std::move(other.file_)),
      note_(std::move(other.note_)),
      remove_(other.remove_) {}

AgentLock& AgentLock::operator=(AgentLock&& other) noexcept {
  if (this != &other) {
    release();
    fd_ = std::exchange(other.fd_, -1);
    file_ = std::move(other.file_);
    note_ = std::move(other.note_);
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
