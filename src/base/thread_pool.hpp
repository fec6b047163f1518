// A fixed set of named threads that run index ranges. The caller's thread takes part, so a pool of 1 starts none.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/fork_guard.hpp"

namespace deltasync {

class ThreadPool {
 public:
  /// `threads` ≥ 1 in all, the caller of run() included. Threads are named "<name>-<i>"; `enter` is called on each that
  /// the pool starts, before any work.
  ThreadPool(unsigned threads, const std::string& name, const std::function<void()>& enter = {});
  /// In a forked child the threads do not exist: there it leaves all as it is.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  unsigned size() const noexcept { return threads_; }

  /// Calls fn(index, worker) once for each index in [0, count), indices handed out in order one at a time, worker in
  /// [0, size()). Returns when all are done. One run at a time. What fn throws (bad_alloc) is thrown here once all
  /// calls that have begun are done; no others begin. On the timeline each index is a part of the span that the caller
  /// is in.
  void run(std::uint64_t count, const std::function<void(std::uint64_t index, unsigned worker)>& fn);

 private:
  struct Shared;

  const unsigned threads_;
  const ForkGuard fork_guard_;
  std::unique_ptr<Shared> shared_;
};

/// Names the calling thread (15 bytes are kept).
void set_thread_name(const std::string& name);

}  // namespace deltasync
