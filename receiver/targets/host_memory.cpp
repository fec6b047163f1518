#include "receiver/targets/host_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "receiver/targets/target_checks.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kPrefaultBytes = 64u << 20;  ///< per work item: a multiple of the huge page

std::uint64_t mapped_bytes(std::uint64_t bytes) {
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return std::max<std::uint64_t>((bytes + page - 1) / page * page, page);
}

/// Parts widened to huge pages, cut into pieces of work.
std::vector<HostMemory::Part> pieces_of(const std::vector<HostMemory::Part>& parts, std::uint64_t mapped) {
  constexpr std::uint64_t kPage = HostMemory::kHugePageBytes;
  std::vector<HostMemory::Part> pieces;
  std::uint64_t done = 0;
  for (const HostMemory::Part& part : parts) {
    const std::uint64_t end = std::min((part.end + kPage - 1) / kPage * kPage, mapped);
    for (std::uint64_t at = std::max(part.first / kPage * kPage, done); at < end;) {
      const std::uint64_t piece_end = std::min((at / kPrefaultBytes + 1) * kPrefaultBytes, end);
      pieces.push_back({at, piece_end});
      at = piece_end;
    }
    done = std::max(done, end);
  }
  return pieces;
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

Result<HostMemory> HostMemory::map(std::uint64_t bytes, ThreadPool& pool, const CallContext& until,
                                   const CgroupFiles& cgroup) {
  return map_parts(bytes, {{0, mapped_bytes(bytes)}}, pool, until, cgroup);
}

Result<HostMemory> HostMemory::map_parts(std::uint64_t bytes, const std::vector<Part>& parts, ThreadPool& pool,
                                         const CallContext& until, const CgroupFiles& cgroup) {
  const std::uint64_t mapped = mapped_bytes(bytes);
  const std::vector<Part> pieces = pieces_of(parts, mapped);
  std::uint64_t needed = 0;
  for (const Part& piece : pieces) needed += piece.end - piece.first;
  DS_TRY(check_memory_room(std::min(needed, bytes), cgroup).with_context("mapping host memory"));
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
    madvise(first, mapped, MADV_HUGEPAGE);  // a hint: without it the pages are small
  }
  HostMemory memory(first, bytes);
  DS_TRY(run_all(pool, pieces.size(), until, "filling host memory with pages", [&](std::uint64_t i, unsigned) {
    return populate(first + pieces[i].first, pieces[i].end - pieces[i].first);
  }));
  return memory;
}

void HostMemory::keep_from_children() const noexcept {
  if (data_ != nullptr) madvise(data_, mapped_bytes(bytes_), MADV_DONTFORK);
}

HostMemory::~HostMemory() {
  if (data_ != nullptr) munmap(data_, mapped_bytes(bytes_));
}

}  // namespace deltasync
