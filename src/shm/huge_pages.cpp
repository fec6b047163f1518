#include "shm/huge_pages.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

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

}  // namespace

void fill_with_huge_pages(int fd, std::byte* base, std::uint64_t begin, std::uint64_t end) noexcept {
  for (std::uint64_t at = begin; at < end; at += kPieceBytes) {
    const std::uint64_t piece = std::min(kPieceBytes, end - at);
    if (allocate_first_pages(fd, at, at + piece) != 0) return;
    const int failed = ::madvise(base + at, static_cast<std::size_t>(piece), MADV_COLLAPSE);
    // EAGAIN: some page was in use for a moment. Anything else will not get better: no support, no huge page left.
    if (failed != 0 && errno != EAGAIN) return;
  }
}

}  // namespace deltasync::shm
