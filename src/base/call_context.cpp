#include "base/call_context.hpp"

#include <condition_variable>
#include <mutex>
#include <string>

namespace deltasync {

Error cancelled_while(std::string_view what) {
  return {Errc::cancelled, "stopped while " + std::string(what)};
}

Status CallContext::check(std::string_view what) const {
  if (stop_.stop_requested()) return cancelled_while(what);
  if (deadline_.passed()) return Error(Errc::timed_out, "deadline passed while " + std::string(what));
  return {};
}

void CallContext::pause(std::chrono::nanoseconds time) const {
  std::mutex mutex;
  std::condition_variable_any stopped;
  std::unique_lock lock(mutex);
  stopped.wait_until(lock, stop_, deadline_.earlier(Deadline::after(time)).at(), [] { return false; });
}

}  // namespace deltasync
