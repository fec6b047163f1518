// The lock is a POSIX record lock on a file beside the log, since the log itself is replaced when it is rewritten: the
// kernel drops it when the process dies, and a forked child does not inherit it. It does not keep out a second owner in
// the same process, so the process keeps a table.
#include "commit/log_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <set>

#include "base/bytes.hpp"
#include "format/commit_log.hpp"

namespace deltasync::commit {
namespace {

constexpr std::size_t kRecordsMax = 4096;  ///< then the file is rewritten: a megabyte

std::mutex held_mutex;
std::set<std::string>& held() {  // protected by held_mutex
  static std::set<std::string> keys;
  return keys;
}

Error failure(const char* doing, const std::filesystem::path& path, int error) {
  return Error::from_errno(std::string(doing) + " " + path.string(), error);
}

Status write_all(int fd, ByteSpan bytes, std::uint64_t at, const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return failure("writing", path, n == 0 ? EIO : errno);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    at += static_cast<std::uint64_t>(n);
  }
  return {};
}

Status flush_directory(const std::filesystem::path& directory) {
  const UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd || ::fsync(fd.get()) != 0) return failure("flushing", directory, errno);
  return {};
}

/// `path` names the file that is open as `fd`.
Status same_file(int fd, const std::filesystem::path& path) {
  struct stat held {};
  struct stat named {};
  if (::fstat(fd, &held) != 0) return failure("looking at", path, errno);
  const bool there = ::stat(path.c_str(), &named) == 0;
  if (!there && errno != ENOENT) return failure("looking at", path, errno);
  if (there && held.st_dev == named.st_dev && held.st_ino == named.st_ino) return {};
  return Error(Errc::io, path.string() + (there ? " is another file now" : " was removed") + " while it was in use");
}

std::filesystem::path directory_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

/// The one name of the file: through a link, log and lock would lie elsewhere for those who come by another name, and
/// rewrite() would put a file in the link's place.
Result<std::filesystem::path> real_path(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::path real = std::filesystem::weakly_canonical(std::filesystem::absolute(path, error), error);
  if (error) return Error(Errc::io, "finding " + path.string() + ": " + error.message());
  if (std::filesystem::is_symlink(std::filesystem::symlink_status(real, error))) {
    return Error(Errc::not_found, path.string() + " is a symbolic link to nothing");
  }
  return real;
}

}  // namespace

LogFile::~LogFile() {
  if (key_.empty()) return;
  const std::lock_guard guard(held_mutex);
  lock_.reset();
  held().erase(key_);
}

Result<std::unique_ptr<LogFile>> LogFile::open(const std::filesystem::path& given) {
  DS_ASSIGN(std::filesystem::path path, real_path(given));
  std::unique_ptr<LogFile> log(new LogFile(std::move(path)));
  DS_TRY(log->lock());
  DS_TRY(log->read());
  DS_TRY(log->rewrite());
  return log;
}

Status LogFile::lock() {
  const std::filesystem::path path = path_.string() + ".lock";
  const std::lock_guard guard(held_mutex);
  // Asked before the file is opened: closing it again would drop the lock that this process has.
  struct stat st {};
  if (::stat(path.c_str(), &st) == 0 &&
      held().count(std::to_string(st.st_dev) + ":" + std::to_string(st.st_ino)) != 0) {
    return Error(Errc::already_exists, path_.string() + " is the log of another coordinator in this process");
  }
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!fd) return failure("opening", path, errno);
  struct flock wanted {};
  wanted.l_type = F_WRLCK;
  wanted.l_whence = SEEK_SET;
  if (::fcntl(fd.get(), F_SETLK, &wanted) != 0) {
    if (errno != EAGAIN && errno != EACCES) return failure("locking", path, errno);
    ::fcntl(fd.get(), F_GETLK, &wanted);
    return Error(Errc::already_exists,
                 path_.string() + " is the log of another coordinator (pid " + std::to_string(wanted.l_pid) + ")");
  }
  if (::fstat(fd.get(), &st) != 0) return failure("looking at", path, errno);
  key_ = std::to_string(st.st_dev) + ":" + std::to_string(st.st_ino);
  held().insert(key_);
  lock_ = std::move(fd);
  return {};
}

Status LogFile::read() {
  const UniqueFd fd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd && errno == ENOENT) return {};
  if (!fd) return failure("opening", path_, errno);
  struct stat st {};
  if (::fstat(fd.get(), &st) != 0) return failure("looking at", path_, errno);
  if (static_cast<std::uint64_t>(st.st_size) > kLogBytesMax) {
    return Error(Errc::corrupt, path_.string() + " has " + std::to_string(st.st_size) + " bytes: no log of ours");
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(st.st_size));
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = ::pread(fd.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failure("reading", path_, errno);
    if (n == 0) break;
    done += static_cast<std::size_t>(n);
  }
  bytes.resize(done);
  auto found = decode_log(bytes);
  if (!found) return std::move(found).error().with_context(path_.string());
  records_ = std::move(found->records);
  torn_bytes_ = found->torn_bytes;
  return {};
}

/// Into a new file that takes the old one's place when it is whole and durable.
Status LogFile::rewrite() {
  records_ = needed_records(records_);
  const std::filesystem::path path = path_.string() + ".new";
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!fd) return failure("opening", path, errno);
  for (std::size_t i = 0; i < records_.size(); ++i) {
    DS_TRY(write_all(fd.get(), bytes_of(encode_record(records_[i], i)), i * kLogRecordBytes, path));
  }
  if (::fsync(fd.get()) != 0) return failure("flushing", path, errno);
  if (::rename(path.c_str(), path_.c_str()) != 0) return failure("renaming", path, errno);
  DS_TRY(flush_directory(directory_of(path_)));
  file_ = std::move(fd);
  return {};
}

/// What somebody has moved away or replaced would take records for ever that no later coordinator sees.
Status LogFile::still_ours() const {
  DS_TRY(same_file(file_.get(), path_));
  return same_file(lock_.get(), path_.string() + ".lock");
}

Status LogFile::append(const Record& record) {
  if (failed_) return Error(Errc::io, path_.string() + " could not be written before; start the coordinator again");
  failed_ = true;        // unless all of this works
  DS_TRY(still_ours());  // before it is rewritten, in the place of what may be another one's
  if (records_.size() >= kRecordsMax) DS_TRY(rewrite());
  const std::size_t at = records_.size();
  DS_TRY(write_all(file_.get(), bytes_of(encode_record(record, at)), at * kLogRecordBytes, path_));
  if (::fdatasync(file_.get()) != 0) return failure("flushing", path_, errno);
  DS_TRY(still_ours());
  records_.push_back(record);
  failed_ = false;
  return {};
}

}  // namespace deltasync::commit
