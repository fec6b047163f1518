// LD_PRELOAD=…/libdeltasync_clock_shim.so DELTASYNC_TEST_CLOCK_S=-3600 program: its wall clock is an hour behind. Other
// clocks (monotonic ones, processor time) are left alone.
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

#include <cstdlib>

namespace {

time_t offset() {
  static const time_t seconds = [] {
    const char* text = std::getenv("DELTASYNC_TEST_CLOCK_S");
    return text == nullptr ? 0 : static_cast<time_t>(std::strtoll(text, nullptr, 10));
  }();
  return seconds;
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* out) noexcept {
  static auto* const real = next<int(clockid_t, timespec*)>("clock_gettime");
  const int status = real(clock, out);
  if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) out->tv_sec += offset();
  return status;
}

int gettimeofday(timeval* __restrict out, void* __restrict zone) noexcept {
  static auto* const real = next<int(timeval*, void*)>("gettimeofday");
  const int status = real(out, zone);
  if (status == 0) out->tv_sec += offset();
  return status;
}

time_t time(time_t* out) noexcept {
  timespec now{};
  if (clock_gettime(CLOCK_REALTIME, &now) != 0) return -1;
  if (out != nullptr) *out = now.tv_sec;
  return now.tv_sec;
}

}  // extern "C"
