#include "python/bindings/calls.hpp"

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace deltasync::python {
namespace {

constexpr auto kSignalLook = std::chrono::milliseconds(20);
constexpr double kTimeoutMaxS = 1e9;

/// Only Python's main thread runs signal handlers.
bool on_main_thread() {
  const auto threading = nb::module_::import_("threading");
  const nb::object here = threading.attr("current_thread")();
  const nb::object main = threading.attr("main_thread")();
  return here.ptr() == main.ptr();
}

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

Deadline deadline_after(double timeout, const char* what) {
  if (std::isnan(timeout)) throw Failure{Error(Errc::invalid_argument, std::string(what) + " is not a number")};
  const double seconds = std::min(std::max(timeout, 0.0), kTimeoutMaxS);
  return Deadline::after(std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds)));
}

void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

void detail::run_stoppable(const std::function<void()>& call, std::stop_source& stop) {
  if (!on_main_thread()) return released(call);
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;
  std::exception_ptr thrown;
  std::thread worker;
  try {
    worker = std::thread([&] {
      try {
        call();
      } catch (...) {
        thrown = std::current_exception();
      }
      const std::lock_guard lock(mutex);
      done = true;
      ended.notify_one();
    });
  } catch (const std::system_error& e) {
    throw Failure{Error(Errc::no_space, std::string("start a thread for a call: ") + e.what())};
  }
  const auto wait = [&](auto until) {
    const nb::gil_scoped_release release;
    std::unique_lock lock(mutex);
    return until(lock);
  };
  bool interrupted = false;
  while (!wait([&](auto& lock) { return ended.wait_for(lock, kSignalLook, [&] { return done; }); })) {
    if (PyErr_CheckSignals() == 0) continue;
    interrupted = true;  // the exception stays set, and is thrown once the call has ended
    stop.request_stop();
    wait([&](auto& lock) {
      ended.wait(lock, [&] { return done; });
      return true;
    });
    break;
  }
  worker.join();
  if (interrupted) throw nb::python_error();
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace deltasync::python
