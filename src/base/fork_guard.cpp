#include "base/fork_guard.hpp"

#include <pthread.h>
#include <unistd.h>

namespace deltasync {

/// No function-local static: a fork while another thread is in its initializer would leave the child waiting for that
/// thread. Handlers that were registered twice do the same twice; without room for one, every call looks.
pid_t OwnPid::look() noexcept {
  const auto follow = [] { known_.store(::getpid(), std::memory_order_relaxed); };
  if (::pthread_atfork(nullptr, nullptr, follow) == 0) follow();
  return ::getpid();
}

}  // namespace deltasync
