#include "agent/background.hpp"

#include <sys/resource.h>

#include <exception>
#include <future>
#include <optional>
#include <system_error>
#include <utility>

namespace deltasync::agent {

std::thread start_background(const std::string& name, unsigned threads, std::function<void(ThreadPool&)> work) {
  std::promise<void> started;
  auto outcome = started.get_future();
  std::thread thread([name, threads, work = std::move(work), started = std::move(started)]() mutable {
    set_thread_name(name);
    ::setpriority(PRIO_PROCESS, 0, kBackgroundNice);  // of this thread, and of those that it starts
    std::optional<ThreadPool> pool;
    try {
      pool.emplace(threads, name);
    } catch (const std::system_error&) {
      return started.set_exception(std::current_exception());
    }
    started.set_value();
    work(*pool);
  });
  try {
    outcome.get();
  } catch (const std::system_error&) {
    thread.join();
    throw;
  }
  return thread;
}

}  // namespace deltasync::agent
