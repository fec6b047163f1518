#include "base/thread_pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/trace.hpp"

namespace deltasync {

void set_thread_name(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

struct ThreadPool::Shared {
  void work(unsigned worker);
  void drain(unsigned worker);
  std::optional<std::uint64_t> take_locked(unsigned worker);
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
  std::span<const std::uint32_t> index_nodes;  // empty: indices are handed out in order
  std::vector<std::uint8_t> taken;             // by index, where those have nodes
  std::vector<std::uint64_t> next_of;          // by worker: where its node's next is looked for
  trace::Context context;                      // of the caller
  std::uint64_t round = 0;
  unsigned busy = 0;
  bool stop = false;
  ThreadNodes nodes;  // constant after construction, as the next
  std::vector<std::thread> workers;
};

ThreadPool::ThreadPool(unsigned threads, const std::string& name, ThreadNodes nodes)
    : threads_(threads < 1 ? 1 : threads), shared_(std::make_unique<Shared>()) {
  shared_->nodes = std::move(nodes);
  try {
    for (unsigned i = 1; i < threads_; ++i) {
      shared_->workers.emplace_back([shared = shared_.get(), i, thread_name = name + "-" + std::to_string(i)] {
        set_thread_name(thread_name);
        if (shared->nodes.enter) shared->nodes.enter(shared->nodes.of_worker[i]);
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

std::span<const std::uint32_t> ThreadPool::worker_nodes() const noexcept {
  return shared_->nodes.of_worker;
}

void ThreadPool::run(std::uint64_t count, const std::function<void(std::uint64_t, unsigned)>& fn,
                     std::span<const std::uint32_t> nodes) {
  auto& s = *shared_;
  {
    const std::lock_guard lock(s.mutex);
    s.index_nodes = s.nodes.of_worker.empty() ? std::span<const std::uint32_t>() : nodes;
    if (!s.index_nodes.empty()) {
      s.taken.assign(static_cast<std::size_t>(count), 0);
      s.next_of.assign(threads_, 0);
    }
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
  s.index_nodes = {};
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

/// With nodes, `count` is where the last one that may be left ends.
std::optional<std::uint64_t> ThreadPool::Shared::take_locked(unsigned worker) {
  if (index_nodes.empty()) {
    if (next >= count) return std::nullopt;
    return next++;
  }
  std::uint64_t& at = next_of[worker];
  while (at < count && (taken[at] != 0 || index_nodes[at] != nodes.of_worker[worker])) ++at;
  if (at < count) {
    taken[at] = 1;
    return at++;
  }
  while (count > 0 && taken[count - 1] != 0) --count;
  if (count == 0) return std::nullopt;
  taken[--count] = 1;
  return count;
}

void ThreadPool::Shared::drain(unsigned worker) {
  for (;;) {
    std::uint64_t index;
    const std::function<void(std::uint64_t, unsigned)>* call;
    trace::Context of;
    {
      const std::lock_guard lock(mutex);
      const auto mine = take_locked(worker);
      if (!mine) return;
      index = *mine;
      call = fn;
      of = context;
    }
    const trace::Span span(of, index);
    (*call)(index, worker);
  }
}

}  // namespace deltasync
