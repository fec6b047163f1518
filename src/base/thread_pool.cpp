#include "base/thread_pool.hpp"

#include <pthread.h>

namespace deltasync {

void set_thread_name(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

ThreadPool::ThreadPool(unsigned threads, std::string name) : threads_(threads < 1 ? 1 : threads) {
  for (unsigned i = 1; i < threads_; ++i) {
    workers_.emplace_back([this, i, thread_name = name + "-" + std::to_string(i)] {
      set_thread_name(thread_name);
      work(i);
    });
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& t : workers_) t.join();
}

void ThreadPool::run(std::uint64_t count, const std::function<void(std::uint64_t, unsigned)>& fn) {
  {
    const std::lock_guard lock(mutex_);
    fn_ = &fn;
    next_ = 0;
    count_ = count;
    busy_ = threads_ - 1;
    ++round_;
  }
  wake_.notify_all();
  drain(0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return busy_ == 0; });
  fn_ = nullptr;
}

void ThreadPool::work(unsigned worker) {
  std::uint64_t seen = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
    }
    drain(worker);
    const std::lock_guard lock(mutex_);
    if (--busy_ == 0) done_.notify_one();
  }
}

void ThreadPool::drain(unsigned worker) {
  for (;;) {
    std::uint64_t index;
    const std::function<void(std::uint64_t, unsigned)>* fn;
    {
      const std::lock_guard lock(mutex_);
      if (next_ >= count_) return;
      index = next_++;
      fn = fn_;
    }
    (*fn)(index, worker);
  }
}

}  // namespace deltasync
