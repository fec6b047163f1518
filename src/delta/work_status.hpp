// What the batches of one piece of work have in common: the first thing that ends the whole.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <utility>

#include "deltasync/result.hpp"

namespace deltasync::delta {

class WorkStatus {
 public:
  /// `what` names the work in errors. `cancel` may be null; set once the result is not wanted any more.
  WorkStatus(std::string what, const std::atomic<bool>* cancel) : what_(std::move(what)), cancel_(cancel) {}

  bool over() const noexcept {
    return over_.load(std::memory_order_relaxed) || (cancel_ != nullptr && cancel_->load(std::memory_order_relaxed));
  }
  /// No error: it cannot be done.
  void end(Status status) {
    const std::lock_guard lock(mutex_);
    if (!over_.exchange(true)) status_ = std::move(status).with_context(what_);
  }
  void end_without_memory() { end(Error(Errc::no_space, "out of memory")); }
  /// After all have ended. False: it cannot be done.
  Result<bool> finish() {
    if (!status_) return std::move(status_).error();
    if (over_) return false;
    if (over()) return Error(Errc::cancelled, what_ + ": no longer wanted");
    return true;
  }

 private:
  const std::string what_;
  const std::atomic<bool>* const cancel_;
  std::atomic<bool> over_{false};
  std::mutex mutex_;
  Status status_;  // protected by mutex_ while the batches run
};

}  // namespace deltasync::delta
