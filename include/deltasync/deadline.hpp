// Every wait in deltasync ends at a Deadline; none "proceeds anyway" after it.
#pragma once

#include <algorithm>
#include <chrono>

namespace deltasync {

/// A point on the steady clock. There is no infinite deadline on purpose.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after(std::chrono::nanoseconds from_now) { return Deadline(Clock::now() + from_now); }
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
  Deadline earlier(Deadline other) const noexcept { return Deadline(std::min(at_, other.at_)); }

 private:
  Clock::time_point at_;
};

}  // namespace deltasync
