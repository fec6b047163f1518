#include "format/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "base/fd.hpp"

namespace deltasync {
namespace {

struct OpenFile {
  UniqueFd fd;
  std::uint64_t bytes = 0;
};

Result<OpenFile> open_regular(const std::filesystem::path& path) {
  OpenFile file;
  // O_NONBLOCK: opening a FIFO that somebody put there must not wait for its writer.
  file.fd.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.fd) return Error::from_errno("open " + path.string(), errno);
  struct stat st {};
  if (::fstat(file.fd.get(), &st) != 0) return Error::from_errno("stat " + path.string(), errno);
  if (!S_ISREG(st.st_mode)) return Error(Errc::invalid_argument, path.string() + ": not a regular file");
  file.bytes = static_cast<std::uint64_t>(st.st_size);
  return file;
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::filesystem::path& path) {
  DS_ASSIGN(const auto file, open_regular(path));
  if (file.bytes == 0) return MappedFile();
  void* data = ::mmap(nullptr, file.bytes, PROT_READ, MAP_SHARED, file.fd.get(), 0);
  if (data == MAP_FAILED) return Error::from_errno("map " + path.string(), errno);
  return MappedFile(static_cast<const std::byte*>(data), file.bytes);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), bytes_);
}

Result<std::vector<std::byte>> read_file(const std::filesystem::path& path, std::uint64_t bytes_max) {
  DS_ASSIGN(const auto file, open_regular(path));
  if (file.bytes > bytes_max) {
    return Error(Errc::no_space,
                 path.string() + ": " + std::to_string(file.bytes) + " bytes, more than " + std::to_string(bytes_max));
  }
  std::vector<std::byte> bytes(file.bytes);
  std::size_t done = 0;
  while (done < bytes.size()) {
    const auto n = ::read(file.fd.get(), bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Error::from_errno("read " + path.string(), errno);
    if (n == 0) return Error(Errc::io, path.string() + ": became shorter while it was read");
    done += static_cast<std::size_t>(n);
  }
  return bytes;
}

}  // namespace deltasync
