#include "shm/reserve.hpp"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

#include "base/thread_pool.hpp"
#include "shm/huge_pages.hpp"
#include "shm/space.hpp"

namespace deltasync::shm {
namespace {

int reserve_range(int fd, std::byte* base, std::uint64_t begin, std::uint64_t end, bool huge) {
  if (huge) fill_with_huge_pages(fd, base, begin, end);
  return reserve_pages(end - begin, [&](std::uint64_t offset, std::uint64_t piece) {
    return ::posix_fallocate(fd, static_cast<off_t>(begin + offset), static_cast<off_t>(piece));
  });
}

}  // namespace

std::vector<FilePart> parts_of(const SegmentPlan& plan, const NumaPlacement& numa_placement) {
  std::vector<FilePart> parts{{0, plan.half_offset[0], 0}};
  for (unsigned h = 0; h < kHalves; ++h) {
    const std::uint64_t half_end = h + 1 < kHalves ? plan.half_offset[h + 1] : plan.segment_bytes;
    for (std::uint64_t at = plan.half_offset[h]; at < half_end; at += NumaPlacement::kStripeBytes) {
      parts.push_back(
          {at, std::min(at + NumaPlacement::kStripeBytes, half_end), numa_placement.node_of(at - plan.half_offset[h])});
    }
  }
  return parts;
}

int reserve_file(int fd, std::byte* base, const SegmentPlan& plan, const NumaPlacement* numa_placement) {
  const bool huge = plan.segment_bytes >= kHugeBytesMin;
  if (numa_placement == nullptr) return reserve_range(fd, base, 0, plan.segment_bytes, huge);
  const std::vector<FilePart> parts = parts_of(plan, *numa_placement);
  std::atomic<int> failed{0};
  const auto take_node = [&](unsigned node) {
    set_thread_name("reserve-" + std::to_string(node));
    numa_placement->enter(node);
    numa_placement->prefer_memory_of(node);
    for (const FilePart& part : parts) {
      if (failed != 0) return;
      if (part.node != node) continue;
      if (const int error = reserve_range(fd, base, part.begin, part.end, huge); error != 0) failed = error;
    }
  };
  std::vector<std::thread> threads;
  try {
    for (unsigned node = 0; node < numa_placement->node_count(); ++node) threads.emplace_back(take_node, node);
  } catch (const std::system_error& e) {
    failed = e.code().value();
  }
  for (std::thread& thread : threads) thread.join();
  return failed;
}

}  // namespace deltasync::shm
