// A fixed set of named threads that run index ranges. The caller's thread takes part, so a pool of 1 starts none.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace deltasync {

class ThreadPool {
 public:
  /// `threads` ≥ 1 in all, the caller of run() included. Threads are named "<name>-<i>".
  ThreadPool(unsigned threads, std::string name);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  unsigned size() const noexcept { return threads_; }

  /// Calls fn(index, worker) once for each index in [0, count), indices handed out in order one at a time, worker in
  /// [0, size()). Returns when all are done. One run at a time; fn must not throw.
  void run(std::uint64_t count, const std::function<void(std::uint64_t index, unsigned worker)>& fn);

 private:
  void work(unsigned worker);
  void drain(unsigned worker);

  const unsigned threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  const std::function<void(std::uint64_t, unsigned)>* fn_ = nullptr;  // protected by mutex_, as all below
  std::uint64_t next_ = 0;
  std::uint64_t count_ = 0;
  std::uint64_t round_ = 0;
  unsigned busy_ = 0;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

/// Names the calling thread (15 bytes are kept).
void set_thread_name(const std::string& name);

}  // namespace deltasync
