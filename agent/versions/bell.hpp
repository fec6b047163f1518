// What the publisher waits for. Writers ring the bell of their segment; everybody else rings here, which rings at the
// segment too, since one thread cannot wait at both.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "agent/versions/generation.hpp"

namespace deltasync::agent {

/// Thread-safe. Its mutex is the last in every order: leases ring while others hold theirs.
class Bell {
 public:
  /// Wakes the publisher, or keeps it from going to sleep.
  void ring() {
    GenerationPtr generation;
    {
      const std::lock_guard lock(mutex_);
      rung_ = true;
      generation = newest_;
    }
    rung_cv_.notify_all();
    if (generation) generation->role->wake();
  }

  /// From now on the publisher hears the writers of this generation. Null: there are none.
  void follow(GenerationPtr newest) {
    {
      const std::lock_guard lock(mutex_);
      rung_ = true;
      newest_.swap(newest);
    }
    rung_cv_.notify_all();
    if (newest) newest->role->wake();  // it may be waiting there
  }

  /// For the publisher: the generation at whose bell it is to wait. While there is none, waits for ring() or `limit`,
  /// and returns null.
  GenerationPtr wait_for_generation(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    if (!newest_) rung_cv_.wait_for(lock, limit, [this] { return rung_; });
    rung_ = false;
    return newest_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable rung_cv_;
  bool rung_ = false;     // protected by mutex_
  GenerationPtr newest_;  // protected by mutex_
};

}  // namespace deltasync::agent
