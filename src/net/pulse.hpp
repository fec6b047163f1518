// Whether a peer is there still, as all connections to it know together. One that stopped, or whose link was cut,
// closes nothing: it says no more, where it was to say something every now and then.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

namespace deltasync::net {

/// Thread-safe.
class Pulse {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Pulse(std::chrono::milliseconds patience) : first_(patience), patience_(patience) {}

  void heard() noexcept { heard_.store(Clock::now().time_since_epoch(), std::memory_order_relaxed); }
  /// When the peer is taken for gone by who has waited for it since `began`.
  Clock::time_point gone_at(Clock::time_point began) const noexcept {
    return std::max(began, Clock::time_point(heard_.load(std::memory_order_relaxed))) + patience();
  }
  bool is_gone() const noexcept { return Clock::now() >= gone_at({}); }

  std::chrono::milliseconds patience() const noexcept { return patience_.load(std::memory_order_relaxed); }
  /// It was taken for gone: where all peers are that slow, the next one gets more time.
  void be_patient(std::chrono::milliseconds max) noexcept { patience_ = std::min(patience() * 2, max); }
  /// One has answered.
  void be_quick() noexcept { patience_ = first_; }

 private:
  const std::chrono::milliseconds first_;
  std::atomic<std::chrono::milliseconds> patience_;
  std::atomic<Clock::duration> heard_{Clock::duration::zero()};
};

}  // namespace deltasync::net
