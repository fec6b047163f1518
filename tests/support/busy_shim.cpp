// LD_PRELOAD=…/libdeltasync_busy_shim.so DELTASYNC_TEST_BUSY=7 program: as if the machine were busy with other things.
// Its threads stand still for some milliseconds at moments that the seed 7 chooses: when a thread begins, around
// sockets and waits, and right after a clock was read. What holds then holds on a busy machine.
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace {

// One of so many calls is followed by a pause.
constexpr std::uint64_t kThreads = 4;
constexpr std::uint64_t kCalls = 25;
constexpr std::uint64_t kClocks = 120;
constexpr std::uint64_t kLocks = 500;
constexpr std::uint64_t kPauseMaxNs = 150'000'000;

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

std::uint64_t seed() {
  static const std::uint64_t value = [] {
    const char* text = std::getenv("DELTASYNC_TEST_BUSY");
    return text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
  }();
  return value;
}

/// Of this thread: a xorshift generator.
std::uint64_t random_number() {
  thread_local std::uint64_t state = seed() * 0x9E3779B97F4A7C15 ^ static_cast<std::uint64_t>(::syscall(SYS_gettid));
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

void maybe_pause(std::uint64_t one_of) {
  thread_local bool inside = false;
  if (seed() == 0 || inside) return;
  inside = true;
  if (random_number() % one_of == 0) {
    const int error = errno;
    const timespec pause{0, static_cast<long>(random_number() % kPauseMaxNs)};
    ::syscall(SYS_nanosleep, &pause, nullptr);
    errno = error;
  }
  inside = false;
}

/// Calls the real one, with a chance of a pause before and after.
template <class Function, class... Args>
auto delayed(Function* real, Args... args) {
  maybe_pause(kCalls);
  const auto result = real(args...);
  maybe_pause(kCalls);
  return result;
}

struct Beginning {
  void* (*run)(void*);
  void* argument;
};

void* begin_late(void* raw) {
  const std::unique_ptr<Beginning> beginning(static_cast<Beginning*>(raw));
  maybe_pause(kThreads);
  return beginning->run(beginning->argument);
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* out) noexcept {
  static auto* const real = next<int(clockid_t, timespec*)>("clock_gettime");
  const int status = real(clock, out);
  if (clock == CLOCK_MONOTONIC) maybe_pause(kClocks);
  return status;
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) noexcept {
  static auto* const real = next<decltype(pthread_create)>("pthread_create");
  auto beginning = std::make_unique<Beginning>(Beginning{run, argument});
  const int status = real(thread, attributes, begin_late, beginning.get());
  if (status == 0) static_cast<void>(beginning.release());
  return status;
}

int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept {
  static auto* const real = next<int(pthread_mutex_t*)>("pthread_mutex_unlock");
  const int status = real(mutex);
  maybe_pause(kLocks);
  return status;
}

int pthread_cond_signal(pthread_cond_t* condition) noexcept {
  static auto* const real = next<int(pthread_cond_t*)>("pthread_cond_signal");
  return delayed(real, condition);
}

int pthread_cond_broadcast(pthread_cond_t* condition) noexcept {
  static auto* const real = next<int(pthread_cond_t*)>("pthread_cond_broadcast");
  return delayed(real, condition);
}

ssize_t send(int fd, const void* bytes, size_t size, int flags) {
  static auto* const real = next<decltype(send)>("send");
  return delayed(real, fd, bytes, size, flags);
}

ssize_t recv(int fd, void* bytes, size_t size, int flags) {
  static auto* const real = next<decltype(recv)>("recv");
  return delayed(real, fd, bytes, size, flags);
}

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  static auto* const real = next<decltype(sendmsg)>("sendmsg");
  return delayed(real, fd, message, flags);
}

ssize_t recvmsg(int fd, msghdr* message, int flags) {
  static auto* const real = next<decltype(recvmsg)>("recvmsg");
  return delayed(real, fd, message, flags);
}

int poll(pollfd* list, nfds_t count, int timeout_ms) {
  static auto* const real = next<decltype(poll)>("poll");
  return delayed(real, list, count, timeout_ms);
}

int epoll_wait(int fd, epoll_event* events, int count, int timeout_ms) {
  static auto* const real = next<decltype(epoll_wait)>("epoll_wait");
  return delayed(real, fd, events, count, timeout_ms);
}

}  // extern "C"
