// Every wait in deltasync ends at a Deadline; none "proceeds anyway" after it. Where a caller sets no limit, it is one
// that no process lives to see.
#pragma once

#include <algorithm>
#include <chrono>

#include "deltasync/result.hpp"

namespace deltasync {

/// A point on the steady clock. There is no infinite one on purpose: what is left can be computed with, and sent.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after(std::chrono::nanoseconds from_now) { return Deadline(Clock::now() + from_now); }
  /// A call's; without one it is many years away.
  static Deadline of(const CallOptions& call) {
    return Deadline(std::min(call.deadline, Clock::now() + std::chrono::hours(24 * 365 * 30)));
  }
  explicit Deadline(Clock::time_point at) : at_(at) {}

  Clock::time_point at() const noexcept { return at_; }
  bool passed() const noexcept { return Clock::now() >= at_; }
  /// Never negative.
  std::chrono::nanoseconds remaining() const noexcept {
    return std::max(std::chrono::nanoseconds(0),
                    std::chrono::duration_cast<std::chrono::nanoseconds>(at_ - Clock::now()));
  }
  std::chrono::milliseconds remaining_ms() const noexcept {
    return std::chrono::duration_cast<std::chrono::milliseconds>(remaining());
  }
  /// For calls inside that take what a user gives.
  operator CallOptions() const { return {.deadline = at_}; }  // NOLINT(google-explicit-constructor)
  Deadline earlier(Deadline other) const noexcept { return Deadline(std::min(at_, other.at_)); }

 private:
  Clock::time_point at_;
};

}  // namespace deltasync
