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

std::vector<FilePart> parts_of(const SegmentPlan& plan, const HomeNodes& home_nodes) {
  std::vector<FilePart> parts{{0, plan.half_offset[0], 0}};
  for (unsigned h = 0; h < kHalves; ++h) {
    const std::uint64_t half_end = h + 1 < kHalves ? plan.half_offset[h + 1] : plan.segment_bytes;
    for (std::uint64_t at = plan.half_offset[h]; at < half_end; at += HomeNodes::kStripeBytes) {
      parts.push_back(
          {at, std::min(at + HomeNodes::kStripeBytes, half_end), home_nodes.home_of(at - plan.half_offset[h])});
    }
  }
  return parts;
}

int reserve_file(int fd, std::byte* base, const SegmentPlan& plan, const HomeNodes* home_nodes) {
  const bool huge = plan.segment_bytes >= kHugeBytesMin;
  if (home_nodes == nullptr) return reserve_range(fd, base, 0, plan.segment_bytes, huge);
  const std::vector<FilePart> parts = parts_of(plan, *home_nodes);
  std::atomic<int> failed{0};
  const auto take_home = [&](unsigned home) {
    set_thread_name("reserve-" + std::to_string(home));
    home_nodes->enter(home);
    home_nodes->prefer_memory_of(home);
    for (const FilePart& part : parts) {
      if (failed != 0) return;
      if (part.home != home) continue;
      if (const int error = reserve_range(fd, base, part.begin, part.end, huge); error != 0) failed = error;
    }
  };
  std::vector<std::thread> threads;
  try {
    for (unsigned home = 0; home < home_nodes->homes(); ++home) threads.emplace_back(take_home, home);
  } catch (const std::system_error& e) {
    failed = e.code().value();
  }
  for (std::thread& thread : threads) thread.join();
  return failed;
}

}  // namespace deltasync::shm
