#include "gpu/ends_later.hpp"

#include <system_error>
#include <thread>
#include <utility>

#include "base/thread_pool.hpp"

namespace deltasync::gpu {

EndsLater& EndsLater::of_process() {
  static auto* const made = new EndsLater;
  return *made;
}

Status EndsLater::start() {
  const std::lock_guard lock(mutex_);
  if (is_started_) return {};
  try {
    std::thread([this] { run(); }).detach();
  } catch (const std::system_error& e) {
    return Error(Errc::no_space, std::string("the thread that gives memory back to CUDA: ") + e.what());
  }
  is_started_ = true;
  return {};
}

void EndsLater::put(std::function<void()> end) {
  const std::lock_guard lock(mutex_);
  ends_.push_back(std::move(end));
  change_.notify_all();
}

void EndsLater::run() {
  set_thread_name("gpu-ends");
  std::unique_lock lock(mutex_);
  for (;;) {
    change_.wait(lock, [&] { return !ends_.empty(); });
    const std::function<void()> end = std::move(ends_.front());
    ends_.pop_front();
    lock.unlock();
    end();
    lock.lock();
  }
}

}  // namespace deltasync::gpu
