#include "base/thread_pool.hpp"

#include <pthread.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/trace.hpp"

namespace deltasync {

void set_thread_name(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

struct ThreadPool::Shared {
  void work(unsigned worker);
  void drain(unsigned worker);
  void end() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    wake.notify_all();
    for (auto& t : workers) t.join();
  }

  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable done;
  const std::function<void(std::uint64_t, unsigned)>* fn = nullptr;  // protected by mutex, as all below
  std::uint64_t next = 0;
  std::uint64_t count = 0;
  std::exception_ptr thrown;  // the first
  trace::Context context;     // of the caller
  std::uint64_t round = 0;
  unsigned busy = 0;
  bool stop = false;
  std::vector<std::thread> workers;  // constant after construction
};

ThreadPool::ThreadPool(unsigned threads, const std::string& name, const std::function<void()>& enter)
    : threads_(threads < 1 ? 1 : threads), shared_(std::make_unique<Shared>()) {
  try {
    for (unsigned i = 1; i < threads_; ++i) {
      shared_->workers.emplace_back([shared = shared_.get(), i, enter, thread_name = name + "-" + std::to_string(i)] {
        set_thread_name(thread_name);
        if (enter) enter();
        shared->work(i);
      });
    }
  } catch (...) {
    shared_->end();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (!fork_guard_.same_process()) {
    // A join would fail, and the condition variable's destructor wait for waiters that are not there: left alone.
    static_cast<void>(shared_.release());
    return;
  }
  shared_->end();
}

void ThreadPool::run(std::uint64_t count, const std::function<void(std::uint64_t, unsigned)>& fn) {
  auto& s = *shared_;
  {
    const std::lock_guard lock(s.mutex);
    s.fn = &fn;
    s.next = 0;
    s.count = count;
    s.context = trace::context();
    s.busy = threads_ - 1;
    ++s.round;
  }
  s.wake.notify_all();
  s.drain(0);
  std::unique_lock lock(s.mutex);
  s.done.wait(lock, [&s] { return s.busy == 0; });
  s.fn = nullptr;
  if (s.thrown) std::rethrow_exception(std::exchange(s.thrown, nullptr));
}

void ThreadPool::Shared::work(unsigned worker) {
  std::uint64_t seen = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex);
      wake.wait(lock, [&] { return stop || round != seen; });
      if (stop) return;
      seen = round;
    }
    drain(worker);
    const std::lock_guard lock(mutex);
    if (--busy == 0) done.notify_one();
  }
}

void ThreadPool::Shared::drain(unsigned worker) {
  for (;;) {
    std::uint64_t index;
    const std::function<void(std::uint64_t, unsigned)>* call;
    trace::Context of;
    {
      const std::lock_guard lock(mutex);
      if (next >= count) return;
      index = next++;
      call = fn;
      of = context;
    }
    try {
      const trace::Span span(of, index);
      (*call)(index, worker);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!thrown) thrown = std::current_exception();
      next = count;
    }
  }
}

}  // namespace deltasync
