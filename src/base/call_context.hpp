// When a call has to end: at its deadline, or as soon as its caller asks for it.
#pragma once

#include <chrono>
#include <stop_token>
#include <string_view>
#include <utility>

#include "base/deadline.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

/// Cheap to copy. Any thread may ask it.
class CallContext {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): a deadline alone will do
  CallContext(Deadline deadline, std::stop_token stop = {}) : deadline_(deadline), stop_(std::move(stop)) {}
  /// What the user of the library said.
  CallContext(const CallOptions& call)  // NOLINT(google-explicit-constructor): one is the other
      : CallContext(Deadline::of(call), call.stop) {}
  // NOLINTNEXTLINE(google-explicit-constructor)
  operator CallOptions() const { return {.deadline = deadline_.at(), .stop = stop_}; }

  Deadline deadline() const noexcept { return deadline_; }
  const std::stop_token& stop() const noexcept { return stop_; }
  bool stop_requested() const noexcept { return stop_.stop_requested(); }
  bool over() const noexcept { return stop_requested() || deadline_.passed(); }
  /// The same stop, with the earlier one of both deadlines.
  CallContext earlier(Deadline other) const { return {deadline_.earlier(other), stop_}; }

  /// cancelled or timed_out, naming `what` was being done, once the end has come. For loops over work: call it between
  /// pieces of some milliseconds.
  Status check(std::string_view what) const;

  /// Sleeps, but not past the end.
  void pause(std::chrono::nanoseconds time) const;

 private:
  Deadline deadline_;
  std::stop_token stop_;
};

/// "stopped while …"
Error cancelled_while(std::string_view what);

}  // namespace deltasync
