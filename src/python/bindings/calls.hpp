// How calls from Python run: errors become exceptions, blocking calls release the GIL, and Ctrl-C ends them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>  // every file has the same casters
#include <nanobind/stl/string_view.h>

#include <chrono>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>

#include "deltasync/result.hpp"

namespace deltasync::python {

namespace nb = nanobind;

/// A failed call on its way to Python, where it becomes the class of deltasync.errors that belongs to its code.
struct Failure {
  Error error;
};

/// What Failure becomes; called once when the module is made.
void register_failures(nb::module_& module);

template <class T>
T unwrap(Result<T> result) {
  if (!result.ok()) throw Failure{std::move(result).error()};
  return std::move(result).value();
}
inline void unwrap(Status status) {
  if (!status.ok()) throw Failure{std::move(status).error()};
}

/// `timeout` in seconds; `what` is named where it is no such number.
std::chrono::nanoseconds limit_of(double timeout, const char* what = "timeout");
/// Until `timeout` seconds from now; `what` is named where it is no such number.
CallOptions options_after(double timeout, const char* what = "timeout");

namespace detail {
/// Takes the GIL again. A daemon thread that comes back after Python has ended stays inside, since Python would unwind
/// it through frames that let nothing through.
void retake_gil(PyThreadState* state) noexcept;

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { retake_gil(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};
}  // namespace detail

/// Without the GIL. `call` touches no Python object.
template <class F>
auto released(F&& call) {
  const detail::WithoutGil released;
  return std::forward<F>(call)();
}

/// Runs handlers of signals that have come, on Python's main thread (elsewhere it does nothing); what they raise is
/// thrown. With the GIL.
void check_signals();

namespace detail {
/// Runs `call` on another thread if this is Python's main thread, which handles signals meanwhile and asks `stop` for
/// the call's end as soon as a handler raises; else, and where a handler calls, on this one. Without the GIL inside
/// `call`.
void run_stoppable(const std::function<void()>& call, std::stop_source& stop);
}  // namespace detail

/// `call(CallOptions)` may block for `timeout` seconds, touches no Python object and ends soon after its stop says so.
template <class F>
auto stoppable_until(double timeout, F&& call) {
  CallOptions options = options_after(timeout);
  using R = decltype(call(options));
  std::stop_source stop;
  options.stop = stop.get_token();
  std::optional<R> result;
  detail::run_stoppable([&] { result.emplace(call(options)); }, stop);
  return std::move(*result);
}

}  // namespace deltasync::python
