#include "shm/huge_pages.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/fd.hpp"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace deltasync::shm {
namespace {

constexpr std::uint64_t kHugePageBytes = std::uint64_t{2} << 20;
constexpr std::uint64_t kPieceBytes = std::uint64_t{256} << 20;

/// A page in the place of each huge page of [at, end).
int allocate_first_pages(int fd, std::uint64_t at, std::uint64_t end) noexcept {
  for (; at < end; at += kHugePageBytes) {
    int error = EINTR;
    while (error == EINTR) error = ::posix_fallocate(fd, static_cast<off_t>(at), 4096);
    if (error != 0) return error;
  }
  return 0;
}

/// Addresses for two huge pages, so that a whole one lies there wherever the system puts it.
class Reservation {
 public:
  Reservation() : at_(::mmap(nullptr, 2 * kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~Reservation() {
    if (at_ != MAP_FAILED) ::munmap(at_, 2 * kHugePageBytes);
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  /// Where a huge page may lie; null if there is no room.
  std::byte* aligned() const noexcept {
    if (at_ == MAP_FAILED) return nullptr;
    const auto beyond = reinterpret_cast<std::uintptr_t>(at_) % kHugePageBytes;
    return static_cast<std::byte*>(at_) + (beyond == 0 ? 0 : kHugePageBytes - beyond);
  }

 private:
  void* const at_;
};

}  // namespace

int fill_with_huge_pages(int fd, std::byte* base, std::uint64_t begin, std::uint64_t end) noexcept {
  for (std::uint64_t at = begin; at < end; at += kPieceBytes) {
    const std::uint64_t piece = std::min(kPieceBytes, end - at);
    if (const int error = allocate_first_pages(fd, at, at + piece); error != 0) return error;
    const int failed = ::madvise(base + at, static_cast<std::size_t>(piece), MADV_COLLAPSE);
    // EAGAIN: some page was in use for a moment. Anything else will not get better: no support, no huge page left.
    if (failed != 0 && errno != EAGAIN) return errno;
  }
  return 0;
}

void* aligned_hint(std::uint64_t bytes) noexcept {
  void* reserved =
      ::mmap(nullptr, bytes + kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  ::munmap(reserved, bytes + kHugePageBytes);
  const auto beyond = reinterpret_cast<std::uintptr_t>(reserved) % kHugePageBytes;
  return static_cast<std::byte*>(reserved) + (beyond == 0 ? 0 : kHugePageBytes - beyond);
}

Status try_huge_page(const std::filesystem::path& dir) {
  const UniqueFd file(::open(dir.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!file || ::ftruncate(file.get(), kHugePageBytes) != 0) return Error::from_errno(dir.string(), errno);
  const Reservation address;
  if (address.aligned() == nullptr || ::mmap(address.aligned(), kHugePageBytes, PROT_READ | PROT_WRITE,
                                             MAP_SHARED | MAP_FIXED, file.get(), 0) == MAP_FAILED) {
    return Error::from_errno("map a huge page", errno);
  }
  const int error = fill_with_huge_pages(file.get(), address.aligned(), 0, kHugePageBytes);
  if (error == EINVAL) return Error(Errc::unsupported, dir.string() + ": the system makes no huge pages of its files");
  if (error == ENOMEM) return Error(Errc::no_space, "no huge page is free now");
  if (error != 0) return Error::from_errno("a huge page in " + dir.string(), error);
  return {};
}

}  // namespace deltasync::shm
