// What ends behind all that runs on any device: CUDA's calls that give memory back wait for an engine's work, without a
// deadline. So a thread of the process makes them, for which nobody waits.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

#include "deltasync/result.hpp"

namespace deltasync::gpu {

/// Thread-safe.
class EndsLater {
 public:
  /// Outlives all devices, and is never joined: the driver may keep its thread until the process is gone.
  static EndsLater& of_process();
  /// Before the first put(). no_space: the system gives no thread.
  Status start();
  void put(std::function<void()> end);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable change_;
  std::deque<std::function<void()>> ends_;  ///< protected by mutex_
  bool is_started_ = false;                 ///< protected by mutex_
};

}  // namespace deltasync::gpu
