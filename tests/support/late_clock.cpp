#include "tests/support/late_clock.hpp"

#include <dlfcn.h>
#include <pthread.h>
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

/// In place of the C library's, which knows the machine's clock only: a wait until a point of the clock that is ahead
/// would last longer by that.
extern "C" int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                      const timespec* until) {
  using Wait = int(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static auto* const wait = reinterpret_cast<Wait*>(::dlsym(RTLD_NEXT, "pthread_cond_clockwait"));
  timespec at = *until;
  if (clock == CLOCK_MONOTONIC) {
    const std::lock_guard<std::mutex> lock(clock_mutex);
    const auto then = std::chrono::seconds(at.tv_sec) + std::chrono::nanoseconds(at.tv_nsec) - ahead;
    at.tv_sec = std::chrono::floor<std::chrono::seconds>(then).count();
    at.tv_nsec = (then - std::chrono::seconds(at.tv_sec)).count();
  }
  return wait(condition, mutex, clock, &at);
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
