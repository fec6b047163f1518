// A named thread, or several, for work that is too long for the threads that serve connections. A coroutine awaits the
// work and goes on where it was.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/async_result.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "base/deadline.hpp"
#include "base/log.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/result.hpp"

namespace deltasync::net {

/// Works run one at a time on each thread, and begin in the order of the calls. Nothing but the number of callers
/// bounds the queue: a server bounds it by its connections, each of which awaits one work at a time.
class WorkThread {
 public:
  /// Throws boost::system::system_error where no thread is to be had.
  explicit WorkThread(const std::string& name, std::size_t threads = 1) : pool_(threads) {
    for (std::size_t i = 0; i < threads; ++i) boost::asio::post(pool_, [name] { set_thread_name(name); });
  }
  /// join()
  ~WorkThread() { join(); }
  WorkThread(const WorkThread&) = delete;
  WorkThread& operator=(const WorkThread&) = delete;

  /// Calls `work()`, which returns a Result or a Status, on the thread, and resumes the awaiting coroutine on its own
  /// executor. `work` stays the caller's: a named variable of the coroutine. What it throws becomes an error: no_space
  /// for lack of memory, else internal. timed_out if it has not begun by `begin_by`, and then it never does; work that
  /// has begun is awaited to its end. connection if stop() came first.
  ///
  /// Without memory to resume the coroutine the process ends: nobody would ever learn what became of the
  /// work, and on this thread the coroutine must not go on.
  template <class Work>
  boost::asio::awaitable<std::invoke_result_t<Work&>> run(Work& work, std::optional<Deadline> begin_by = std::nullopt) {
    using Outcome = std::invoke_result_t<Work&>;
    if (stopped_) co_return shutting_down();  // there may be no thread any more
    const auto executor = co_await boost::asio::this_coro::executor;
    boost::asio::steady_timer timer(executor);
    // Its captures end with the coroutine's wait, which may be over before it returns: copies first.
    auto begin = [this, executor, begin_by, at = &timer, what = &work](auto handler) noexcept {
      WorkThread* const self = this;
      Work* const named = what;
      std::shared_ptr<Job<Outcome, decltype(handler)>> job;
      try {
        job = std::make_shared<Job<Outcome, decltype(handler)>>(executor, std::move(handler));
        if (begin_by) {
          at->expires_at(begin_by->at());
          at->async_wait([job](const boost::system::error_code& ec) {
            if (!ec && job->take())
              job->finish(Error(Errc::timed_out, "it waited behind other work until its deadline"));
          });
        }
        boost::asio::post(self->pool_, [self, named, job] {
          if (job->take()) job->finish(self->call(*named));
        });
      } catch (...) {
        if (!job) cannot_return();
        if (job->take()) job->finish(Error(Errc::no_space, "out of memory"));
      }
    };
    co_return co_await boost::asio::async_initiate<const boost::asio::use_awaitable_t<>, void(Outcome)>(
        std::move(begin), boost::asio::use_awaitable);
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
  /// One work: begun by the thread or given up at its deadline, whichever takes it first.
  template <class Outcome, class Handler>
  class Job {
   public:
    Job(boost::asio::any_io_executor executor, Handler handler)
        : executor_(std::move(executor)), handler_(std::move(handler)) {}
    /// True once.
    bool take() noexcept { return !taken_.exchange(true); }
    /// By the one who took it.
    void finish(Outcome outcome) noexcept {
      try {
        boost::asio::post(executor_, [handler = std::move(handler_), result = std::move(outcome)]() mutable {
          std::move(handler)(std::move(result));
        });
      } catch (...) {
        cannot_return();
      }
    }

   private:
    const boost::asio::any_io_executor executor_;
    Handler handler_;
    std::atomic<bool> taken_{false};
  };

  static Error shutting_down() { return {Errc::connection, "shutting down"}; }
  [[noreturn]] static void cannot_return() noexcept {
    log::critical("work_thread_failed error=\"no memory to hand back what was done\"");
    std::abort();
  }

  template <class Work>
  auto call(Work& work) -> std::invoke_result_t<Work&> {
    if (stopped_) return shutting_down();
    try {
      return work();
    } catch (const std::bad_alloc&) {
      return Error(Errc::no_space, "out of memory");
    } catch (const std::exception& e) {
      return Error(Errc::internal, e.what());
    } catch (...) {
      return Error(Errc::internal, "it threw something that is no std::exception");
    }
  }

  std::atomic<bool> stopped_{false};
  boost::asio::thread_pool pool_;
};

}  // namespace deltasync::net
