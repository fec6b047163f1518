#include "shm/bell.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <ctime>

namespace deltasync::shm {

std::uint32_t bell_count(Bell& bell) noexcept {
  return std::atomic_ref<std::uint32_t>(bell.rings).load();
}

void ring(Bell& bell) noexcept {
  std::atomic_ref<std::uint32_t>(bell.rings).fetch_add(1);
  // Not FUTEX_PRIVATE: the sleepers are in other processes.
  ::syscall(SYS_futex, &bell.rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void sleep_on(Bell& bell, std::uint32_t seen, Deadline deadline) noexcept {
  const auto slice = std::min<std::chrono::nanoseconds>(deadline.remaining(), kBellSlice);
  if (slice.count() <= 0) return;
  const timespec timeout{0, static_cast<long>(slice.count())};
  ::syscall(SYS_futex, &bell.rings, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

}  // namespace deltasync::shm
