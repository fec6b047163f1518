// A fixed set of named threads that run index ranges. The caller's thread takes part, so a pool of 1 starts none.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/fork_guard.hpp"

namespace deltasync {

/// Which of several groups (memory nodes, say) each thread of a pool belongs to.
struct ThreadNodes {
  std::vector<std::uint32_t> of_worker;           ///< one for each thread; empty: all are alike
  std::function<void(std::uint32_t node)> enter;  ///< called on each thread that the pool starts, before any work
};

class ThreadPool {
 public:
  /// `threads` ≥ 1 in all, the caller of run() included. Threads are named "<name>-<i>".
  ThreadPool(unsigned threads, const std::string& name, ThreadNodes nodes = {});
  /// In a forked child the threads do not exist: there it leaves all as it is.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  unsigned size() const noexcept { return threads_; }
  /// Of each worker; empty if all are alike.
  std::span<const std::uint32_t> worker_nodes() const noexcept;

  /// Calls fn(index, worker) once for each index in [0, count), indices handed out in order one at a time, worker in
  /// [0, size()). Returns when all are done. One run at a time; fn must not throw. On the timeline each index is a part
  /// of the span that the caller is in.
  void run(std::uint64_t count, const std::function<void(std::uint64_t index, unsigned worker)>& fn) {
    run(count, fn, {});
  }
  /// The same where the indices have nodes too, one each: a worker takes those of its own first, in order, and then
  /// the last of what is left of the others'.
  void run(std::uint64_t count, const std::function<void(std::uint64_t index, unsigned worker)>& fn,
           std::span<const std::uint32_t> nodes);

 private:
  struct Shared;

  const unsigned threads_;
  const ForkGuard fork_guard_;
  std::unique_ptr<Shared> shared_;
};

/// Names the calling thread (15 bytes are kept).
void set_thread_name(const std::string& name);

}  // namespace deltasync
