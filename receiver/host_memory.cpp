#include "receiver/host_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "receiver/target_checks.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kHugePageBytes = 2u << 20;
constexpr std::uint64_t kPrefaultBytes = 64u << 20;  ///< per work item: a multiple of the huge page

std::uint64_t mapped_bytes(std::uint64_t bytes) {
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return std::max<std::uint64_t>((bytes + page - 1) / page * page, page);
}

/// Linux before 5.14 has no MADV_POPULATE_WRITE: there the pages are touched one by one.
Status populate(std::byte* first, std::uint64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  if (madvise(first, bytes, MADV_POPULATE_WRITE) == 0) return {};
  if (errno != EINVAL) {
    return Error::from_errno("filling " + std::to_string(bytes) + " bytes of host memory with pages", errno);
  }
#endif
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  for (std::uint64_t at = 0; at < bytes; at += page) *reinterpret_cast<volatile std::byte*>(first + at) = std::byte{0};
  return {};
}

}  // namespace

Result<HostMemory> HostMemory::map(std::uint64_t bytes, ThreadPool& pool, const Until& until,
                                   const CgroupFiles& cgroup) {
  DS_TRY(check_memory_room(bytes, cgroup).with_context("mapping host memory"));
  const std::uint64_t mapped = mapped_bytes(bytes);
  const std::uint64_t slack = mapped >= kHugePageBytes ? kHugePageBytes : 0;
  void* const at = mmap(nullptr, mapped + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return Error::from_errno("mapping " + std::to_string(bytes) + " bytes of host memory", errno);
  auto* first = static_cast<std::byte*>(at);
  if (slack != 0) {  // start at a huge page boundary; give back what lies outside
    const std::uint64_t skip =
        (kHugePageBytes - reinterpret_cast<std::uintptr_t>(at) % kHugePageBytes) % kHugePageBytes;
    if (skip != 0) munmap(first, skip);
    first += skip;
    if (skip != slack) munmap(first + mapped, slack - skip);
    madvise(first, mapped, MADV_HUGEPAGE);  // a wish: without it the pages are small
  }
  HostMemory memory(first, bytes);
  const std::uint64_t pieces = (mapped + kPrefaultBytes - 1) / kPrefaultBytes;
  DS_TRY(run_all(pool, pieces, until, "filling host memory with pages", [&](std::uint64_t i, unsigned) {
    const std::uint64_t from = i * kPrefaultBytes;
    return populate(first + from, std::min(kPrefaultBytes, mapped - from));
  }));
  return memory;
}

HostMemory::~HostMemory() {
  if (data_ != nullptr) munmap(data_, mapped_bytes(bytes_));
}

}  // namespace deltasync
