#include "tests/support/late_clock.hpp"

#include <time.h>

#include <chrono>
#include <mutex>

namespace {

using Time = std::chrono::steady_clock::time_point;

std::mutex clock_mutex;        ///< protects all of the following
std::uint64_t looks_left = 0;  ///< 0: no more count
Time passes_at;
Time::duration ahead{};  ///< of the machine's clock

Time machine_time() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return Time(std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec));
}

}  // namespace

/// In place of the standard library's.
std::chrono::steady_clock::time_point std::chrono::steady_clock::now() noexcept {  // NOLINT(cert-dcl58-cpp)
  const std::lock_guard<std::mutex> lock(clock_mutex);
  const Time now = machine_time();
  if (looks_left != 0 && --looks_left == 0 && now < passes_at) ahead = passes_at - now;
  return now + ahead;
}

namespace deltasync::test {

LateClock::LateClock(Deadline deadline, std::uint64_t look) {
  const std::lock_guard<std::mutex> lock(clock_mutex);
  passes_at = deadline.at();
  looks_left = look;
}

LateClock::~LateClock() {
  const std::lock_guard<std::mutex> lock(clock_mutex);
  looks_left = 0;
  ahead = {};
}

}  // namespace deltasync::test
