#include "python/bindings/calls.hpp"

#include <cxxabi.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/fork_guard.hpp"

namespace deltasync::python {
namespace {

constexpr auto kSignalLook = std::chrono::milliseconds(20);
constexpr auto kCallEnd = std::chrono::hours(1);  ///< a call that was asked to end is waited for, however long it takes
constexpr double kTimeoutMaxS = 1e9;

/// Only Python's main thread runs signal handlers.
bool on_main_thread() {
  const auto threading = nb::module_::import_("threading");
  const nb::object here = threading.attr("current_thread")();
  const nb::object main = threading.attr("main_thread")();
  return here.ptr() == main.ptr();
}

/// Makes the calls of Python's main thread, which handles signals meanwhile. One for all of them, for good: what a call
/// records of its time stays one row of the timeline, and no call fails for lack of a thread.
class CallThread {
 public:
  /// The thread, made when it is first asked for; null if there is none to be had, or if it is in a call, which is
  /// when a handler of a signal makes one more. Called by the main thread only.
  static CallThread* free() {
    static CallThread* here = nullptr;  // never destroyed: it may be in a call when the process ends
    try {
      // A forked child has none of its parent's threads.
      if (here == nullptr || !here->fork_guard_.same_process()) here = new CallThread;
    } catch (const std::system_error&) {
      return nullptr;
    }
    return here->call_ == nullptr ? here : nullptr;
  }

  void begin(const std::function<void()>& call) {
    const std::lock_guard lock(mutex_);
    call_ = &call;
    changed_.notify_all();
  }
  /// True once the call has ended. Without the GIL while it waits.
  bool wait_for(std::chrono::milliseconds time) {
    const nb::gil_scoped_release release;
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, [&] { return done_; });
  }
  /// What the call, which has ended, threw.
  std::exception_ptr end() {
    const std::lock_guard lock(mutex_);
    call_ = nullptr;
    done_ = false;
    return std::exchange(thrown_, nullptr);
  }

 private:
  CallThread() : thread_([this] { run(); }) {}

  [[noreturn]] void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return call_ != nullptr && !done_; });
      lock.unlock();
      std::exception_ptr thrown;
      try {
        (*call_)();
      } catch (...) {
        thrown = std::current_exception();
      }
      lock.lock();
      thrown_ = std::move(thrown);
      done_ = true;
      changed_.notify_all();
    }
  }

  const ForkGuard fork_guard_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Protected by mutex_; the main thread alone sets call_, and reads it without.
  const std::function<void()>* call_ = nullptr;
  bool done_ = false;
  std::exception_ptr thrown_;
  std::thread thread_;  // the last one: it uses the others
};

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Failure& failure) {
    try {
      const auto make = nb::module_::import_("deltasync.errors").attr("from_code");
      const std::string code(to_string(failure.error.code()));
      const nb::object exception = make(code, failure.error.message());
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    } catch (nb::python_error& e) {
      e.restore();
    }
  }
}

}  // namespace

void register_failures(nb::module_&) {
  nb::register_exception_translator(translate, nullptr);
}

std::chrono::nanoseconds limit_of(double timeout, const char* what) {
  if (std::isnan(timeout)) throw Failure{Error(Errc::invalid_argument, std::string(what) + " is not a number")};
  const double seconds = std::min(std::max(timeout, 0.0), kTimeoutMaxS);
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
}

CallOptions options_after(double timeout, const char* what) {
  return CallOptions::within(limit_of(timeout, what));
}

void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

void detail::retake_gil(PyThreadState* state) noexcept {
  try {
    PyEval_RestoreThread(state);
  } catch (const abi::__forced_unwind&) {  // Python's pthread_exit(); from 3.14 on it stays inside by itself
    for (;;) ::pause();
  }
}

void detail::run_stoppable(const std::function<void()>& call, std::stop_source& stop) {
  CallThread* thread = on_main_thread() ? CallThread::free() : nullptr;
  if (thread == nullptr) return released(call);
  thread->begin(call);
  bool interrupted = false;
  while (!thread->wait_for(interrupted ? kCallEnd : kSignalLook)) {
    if (interrupted || PyErr_CheckSignals() == 0) continue;
    interrupted = true;  // the exception stays set, and is thrown once the call has ended
    stop.request_stop();
  }
  const std::exception_ptr thrown = thread->end();
  if (interrupted) throw nb::python_error();
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace deltasync::python
