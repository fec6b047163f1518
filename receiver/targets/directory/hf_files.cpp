#include "receiver/targets/directory/hf_files.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "base/log.hpp"

namespace deltasync {
namespace fs = std::filesystem;

Error file_error(const char* what, const fs::path& path, int errnum) {
  const std::string text = std::string(what) + " " + path.string();
  if (errnum == EFBIG) return Error(Errc::no_space, text + ": larger than the limit on file sizes");
  return Error::from_errno(text, errnum);
}

namespace {

/// Where the filesystem cannot reserve, the C library writes every block: a piece must not take long.
constexpr std::uint64_t kReservePieceBytes = 256u << 20;

Result<UniqueFd> create_new(const fs::path& path) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!fd) return file_error("creating", path, errno);
  return fd;
}

Status reserve(int fd, std::uint64_t at, std::uint64_t bytes, const fs::path& path) {
  if (bytes == 0) return {};
  int error;
  do {  // returns the error, does not set errno
    error = posix_fallocate(fd, static_cast<off_t>(at), static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error == 0) return {};
  return file_error(("reserving " + std::to_string(bytes) + " bytes for").c_str(), path, error);
}

}  // namespace

Result<UniqueFd> create_reserved(const fs::path& path, std::uint64_t bytes, const CallContext& until) {
  DS_ASSIGN(UniqueFd fd, create_new(path));
  const std::string what = "reserving " + std::to_string(bytes) + " bytes for";
  for (std::uint64_t at = 0; at < bytes; at += kReservePieceBytes) {
    Status status = until.check(what + " " + path.string());
    if (status) status = reserve(fd.get(), at, std::min(kReservePieceBytes, bytes - at), path);
    if (status) continue;
    ::unlink(path.c_str());
    return std::move(status).error();
  }
  return fd;
}

void remove_tree(const fs::path& path) noexcept {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) log::warn("hf_target cannot_remove path={} error={}", path.string(), error.message());
}

Status remove_tree(const fs::path& path, const CallContext& until) {
  DS_TRY(until.check("removing " + path.string()));
  std::error_code error;
  // The iterator would enter what a symbolic link leads to.
  if (fs::is_directory(fs::symlink_status(path, error))) {
    for (fs::recursive_directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
      DS_TRY(until.check("removing " + path.string()));
      std::error_code ignored;  // what is left is the business of remove_all
      if (!it->is_directory(ignored) || it->is_symlink(ignored)) ::unlink(it->path().c_str());
    }
  }
  remove_tree(path);
  return {};
}

Result<UniqueFd> open_file(const fs::path& path, bool writable) {
  // O_NONBLOCK: a FIFO or a file that somebody else leases must not make us wait.
  UniqueFd fd(::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd) return file_error("opening", path, errno);
  return fd;
}

Result<std::uint64_t> file_bytes(int fd, const fs::path& path) {
  struct stat st {};
  if (fstat(fd, &st) != 0) return file_error("looking at", path, errno);
  if (!S_ISREG(st.st_mode)) return Error(Errc::corrupt, path.string() + " is no regular file");
  return static_cast<std::uint64_t>(st.st_size);
}

Status read_at(int fd, std::uint64_t offset, MutByteSpan to, const fs::path& path) {
  while (!to.empty()) {
    const ssize_t n = pread(fd, to.data(), to.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return file_error("reading", path, errno);
    if (n == 0) return Error(Errc::corrupt, path.string() + " ends at byte " + std::to_string(offset));
    to = to.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
  return {};
}

Status write_at(int fd, std::uint64_t offset, ByteSpan from, const fs::path& path) {
  while (!from.empty()) {
    const ssize_t n = pwrite(fd, from.data(), from.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return file_error("writing", path, errno);
    from = from.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
  return {};
}

Status write_new_file(const fs::path& path, ByteSpan bytes) {
  DS_ASSIGN(const UniqueFd fd, create_new(path));
  Status status = reserve(fd.get(), 0, bytes.size(), path);
  if (status) return write_at(fd.get(), 0, bytes, path);
  ::unlink(path.c_str());
  return status;
}

Status replace_file(const fs::path& path, ByteSpan bytes) {
  const fs::path fresh = path.string() + ".new";
  ::unlink(fresh.c_str());  // left by a process that died here
  Status status = write_new_file(fresh, bytes);
  if (status.ok()) status = rename_path(fresh, path);
  if (!status.ok()) ::unlink(fresh.c_str());
  return status;
}

Result<std::string> read_small_file(const fs::path& path, std::uint64_t bytes_max) {
  DS_ASSIGN(const UniqueFd fd, open_file(path, false));
  DS_ASSIGN(const std::uint64_t bytes, file_bytes(fd.get(), path));
  if (bytes > bytes_max) return Error(Errc::corrupt, path.string() + " is larger than it can be");
  std::string text(static_cast<std::size_t>(bytes), '\0');
  DS_TRY(read_at(fd.get(), 0, std::as_writable_bytes(std::span(text)), path));
  return text;
}

bool file_equals(const fs::path& path, ByteSpan bytes) {
  const auto text = read_small_file(path, bytes.size());
  if (!text.ok()) return false;
  const ByteSpan found = bytes_of(std::string_view(*text));
  return std::equal(found.begin(), found.end(), bytes.begin(), bytes.end());
}

Status flush_path(const fs::path& path) {
  DS_ASSIGN(const UniqueFd fd, open_file(path, false));
  while (::fsync(fd.get()) != 0) {
    if (errno == EINTR) continue;
    if (errno == EINVAL || errno == EROFS) return {};
    return file_error("flushing", path, errno);
  }
  return {};
}

Status make_directories(const fs::path& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) return file_error("creating directory", path, error.value());
  return {};
}

Status rename_path(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    return file_error(("renaming " + from.string() + " to").c_str(), to, errno);
  }
  return {};
}

Result<FileMapping> FileMapping::map(int fd, std::uint64_t bytes, bool writable, const fs::path& path) {
  if (bytes == 0) return Error(Errc::corrupt, path.string() + " is empty");
  void* const at = mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return file_error("mapping", path, errno);
  // A forked child that kept the mapping would look like a reader of the version for as long as it lives.
  madvise(at, bytes, MADV_DONTFORK);
  return FileMapping(static_cast<std::byte*>(at), bytes);
}

FileMapping::~FileMapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace deltasync
