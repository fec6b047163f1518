#include "tests/gpu/emulator/streams.hpp"

#include <chrono>
#include <string>
#include <utility>

#include "base/thread_pool.hpp"

namespace deltasync::emulator {

void Mark::reach() {
  const std::lock_guard lock(mutex_);
  reached_ = true;
  change_.notify_all();
}

void Mark::wait() {
  std::unique_lock lock(mutex_);
  change_.wait(lock, [&] { return reached_; });
}

bool Mark::reached() const {
  const std::lock_guard lock(mutex_);
  return reached_;
}

Stream::Stream(int device_of, bool blocking, std::uint64_t seed)
    : device(device_of), is_blocking(blocking), random_(seed), thread_([this] { run(); }) {}

Stream::~Stream() {
  end();
  thread_.join();
}

void Stream::put(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  work_.push_back(std::move(work));
  change_.notify_all();
}

std::shared_ptr<Mark> Stream::put_mark() {
  auto mark = std::make_shared<Mark>();
  put([mark] { mark->reach(); });
  return mark;
}

void Stream::put_wait(std::shared_ptr<Mark> mark) {
  put([mark = std::move(mark)] { mark->wait(); });
}

void Stream::drain() {
  std::unique_lock lock(mutex_);
  change_.wait(lock, [&] { return work_.empty(); });
}

void Stream::end() {
  const std::lock_guard lock(mutex_);
  ending_ = true;
  change_.notify_all();
}

bool Stream::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

void Stream::run() {
  set_thread_name("cuda-stream-" + std::to_string(device));
  std::unique_lock lock(mutex_);
  for (;;) {
    change_.wait(lock, [&] { return ending_ || !work_.empty(); });
    if (work_.empty()) break;
    const std::function<void()> work = std::move(work_.front());
    lock.unlock();
    if (random_() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
    work();
    lock.lock();
    work_.pop_front();
    change_.notify_all();
  }
  ended_ = true;
}

}  // namespace deltasync::emulator
