#include "bucket/memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "base/fork_guard.hpp"
#include "base/memory_room.hpp"
#include "bucket/chunk.hpp"
#include "shm/space.hpp"

namespace deltasync::bucket {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

class HostBuckets final : public BucketMemory {
 public:
  HostBuckets(UniqueFd file, std::byte* base, std::uint64_t half_bytes, bool writes)
      : file_(std::move(file)), base_(base), half_bytes_(static_cast<std::size_t>(half_bytes)), writes_(writes) {}
  /// A forked child has no such mapping.
  ~HostBuckets() override {
    if (fork_guard_.same_process()) ::munmap(base_, 2 * half_bytes_);
  }
  HostBuckets(const HostBuckets&) = delete;
  HostBuckets& operator=(const HostBuckets&) = delete;

  std::uint64_t half_bytes() const noexcept override { return half_bytes_; }
  ByteSpan half(unsigned index) const noexcept override { return {base_ + index * half_bytes_, half_bytes_}; }
  MutByteSpan room(unsigned index) noexcept override {
    if (!writes_) return {};
    return {base_ + index * half_bytes_, half_bytes_};
  }
  int descriptor() const noexcept override { return file_.get(); }

 private:
  const UniqueFd file_;
  std::byte* const base_;
  const std::size_t half_bytes_;
  const bool writes_;
  const ForkGuard fork_guard_;
};

Result<std::unique_ptr<BucketMemory>> map(UniqueFd file, std::uint64_t half_bytes, bool writes) {
  const auto bytes = static_cast<std::size_t>(2 * half_bytes);
  void* const base = ::mmap(nullptr, bytes, writes ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, file.get(), 0);
  if (base == MAP_FAILED) return Error::from_errno("map the buckets", errno);
  ::madvise(base, bytes, MADV_DONTFORK);  // a forked child must not keep the memory
  return std::unique_ptr<BucketMemory>(
      new HostBuckets(std::move(file), static_cast<std::byte*>(base), half_bytes, writes));
}

Status check_size(std::uint64_t half_bytes) {
  if (half_bytes != 0 && half_bytes % kAlignment == 0 && half_bytes <= kHalfBytesMax) return {};
  return Error(Errc::invalid_argument, "buckets of " + std::to_string(half_bytes) + " bytes");
}

}  // namespace

Result<std::unique_ptr<BucketMemory>> make_host_buckets(std::uint64_t half_bytes) {
  DS_TRY(check_size(half_bytes));
  const std::uint64_t bytes = 2 * half_bytes;
  DS_TRY(check_memory_room(bytes).with_context("two buckets"));
  UniqueFd file(::memfd_create("deltasync-buckets", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) return Error::from_errno("memory for the buckets", errno);
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) return Error::from_errno("size of the buckets", errno);
  const int reserved = shm::reserve_pages(bytes, [&](std::uint64_t offset, std::uint64_t n) {
    return ::posix_fallocate(file.get(), static_cast<off_t>(offset), static_cast<off_t>(n));
  });
  if (reserved != 0) return Error::from_errno("two buckets of " + bytes_for_people(half_bytes), reserved);
  if (::fcntl(file.get(), F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) return Error::from_errno("seal the buckets", errno);
  return map(std::move(file), half_bytes, true);
}

Result<std::unique_ptr<BucketMemory>> open_host_buckets(UniqueFd file, std::uint64_t half_bytes) {
  if (!file) return Error(Errc::corrupt, "buckets: no descriptor came with the hello");
  DS_TRY(check_size(half_bytes));
  // The seals first: after them the size is what it stays.
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    return Error(Errc::corrupt, "buckets: the descriptor is of no memory whose size is sealed");
  }
  struct stat found {};
  if (::fstat(file.get(), &found) != 0) return Error::from_errno("buckets", errno);
  if (static_cast<std::uint64_t>(found.st_size) != 2 * half_bytes) {
    return Error(Errc::corrupt, "buckets: the descriptor has " + std::to_string(found.st_size) + " bytes, not twice " +
                                    std::to_string(half_bytes));
  }
  if (static_cast<std::uint64_t>(found.st_blocks) * 512 < 2 * half_bytes) {  // st_blocks has this unit
    return Error(Errc::corrupt, "buckets: pages of the descriptor's memory are not there");
  }
  return map(std::move(file), half_bytes, false);
}

}  // namespace deltasync::bucket
