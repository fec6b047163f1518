#include "base/home_process.hpp"

#include <pthread.h>
#include <unistd.h>

namespace deltasync {

pid_t OwnPid::look() noexcept {
  // Without room for the handler, every call looks.
  static const bool follows_forks =
      ::pthread_atfork(nullptr, nullptr, [] { known_.store(::getpid(), std::memory_order_relaxed); }) == 0;
  const pid_t pid = ::getpid();
  if (follows_forks) known_.store(pid, std::memory_order_relaxed);
  return pid;
}

}  // namespace deltasync
