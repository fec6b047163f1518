// One named thread for work that is too long for the threads that serve connections. A coroutine awaits the work and
// goes on where it was.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>

#include <atomic>
#include <exception>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

#include "base/thread_pool.hpp"
#include "deltasync/result.hpp"

namespace deltasync::net {

/// Works run one at a time, in the order of the calls. Nothing but the number of callers bounds the queue: a server
/// bounds it by its connections, each of which awaits one work at a time.
class WorkThread {
 public:
  /// Throws std::system_error where no thread is to be had.
  explicit WorkThread(const std::string& name) : pool_(1) {
    boost::asio::post(pool_, [name] { set_thread_name(name); });
  }
  /// join()
  ~WorkThread() { join(); }
  WorkThread(const WorkThread&) = delete;
  WorkThread& operator=(const WorkThread&) = delete;

  /// Calls `work()`, which returns a Result or a Status, on the thread, and resumes the awaiting coroutine on its own
  /// executor. `work` stays the caller's: a named variable of the coroutine. What it throws becomes an error: no_space
  /// for want of memory, else internal. connection if stop() came first.
  template <class Work>
  boost::asio::awaitable<std::invoke_result_t<Work&>> run(Work& work) {
    if (stopped_) co_return shutting_down();  // there may be no thread any more
    const auto home = co_await boost::asio::this_coro::executor;
    co_await boost::asio::post(boost::asio::bind_executor(pool_.get_executor(), boost::asio::use_awaitable));
    auto result = call(work);
    co_await boost::asio::post(boost::asio::bind_executor(home, boost::asio::use_awaitable));
    co_return result;
  }

  /// Destroys `thing` on the thread, for what is large (or here, if there is no memory to do so).
  template <class Thing>
  void discard(Thing thing) noexcept {
    try {
      boost::asio::post(pool_, [thing = std::move(thing)] {});
    } catch (const std::exception&) {
    }
  }

  /// Any thread: what has not begun yet fails.
  void stop() noexcept { stopped_ = true; }
  /// stop(), then waits for the work at hand.
  void join() {
    stop();
    pool_.join();
  }

 private:
  static Error shutting_down() { return {Errc::connection, "shutting down"}; }

  template <class Work>
  auto call(Work& work) -> std::invoke_result_t<Work&> {
    if (stopped_) return shutting_down();
    try {
      return work();
    } catch (const std::bad_alloc&) {
      return Error(Errc::no_space, "out of memory");
    } catch (const std::exception& e) {
      return Error(Errc::internal, e.what());
    }
  }

  std::atomic<bool> stopped_{false};
  boost::asio::thread_pool pool_;
};

}  // namespace deltasync::net
