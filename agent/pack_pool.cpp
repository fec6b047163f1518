#include "agent/pack_pool.hpp"

#include <sys/resource.h>

#include <boost/asio/post.hpp>

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "agent/background.hpp"
#include "base/log.hpp"
#include "base/thread_pool.hpp"
#include "net/coroutine.hpp"

namespace deltasync::agent {

namespace asio = boost::asio;

PackPool::PackPool(unsigned threads) : count_(threads) {
  try {
    for (unsigned i = 0; i < threads; ++i) threads_.emplace_back([this, i] { work(i); });
  } catch (const std::system_error&) {
    stop();
    throw;
  }
}

PackPool::~PackPool() {
  stop();
}

void PackPool::add(std::function<void(bool)> job) {
  {
    const std::lock_guard lock(mutex_);
    if (!stopped_ && count_ > 0) {
      jobs_.push_back(std::move(job));
      changed_.notify_one();
      return;
    }
  }
  job(false);
}

void PackPool::work(unsigned index) {
  set_thread_name("pack-" + std::to_string(index));
  ::setpriority(PRIO_PROCESS, 0, kBackgroundNice);  // of this thread
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopped_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    std::function<void(bool)> job = std::move(jobs_.front());
    jobs_.pop_front();
    const bool go = !stopped_;
    lock.unlock();
    job(go);
    job = nullptr;  // what it holds may be long to free
    lock.lock();
  }
}

void PackPool::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

// ---- one answer's frames -----------------------------------------------------------------------------------------

namespace {

Result<PackedFrame> call(const std::function<Result<PackedFrame>()>& pack) {
  try {
    return pack();
  } catch (const std::bad_alloc&) {
    return Error(Errc::no_space, "packing tiles: out of memory");
  }
}

}  // namespace

PackAhead::~PackAhead() {
  pool_.frames_ -= slots_.size();
}

bool PackAhead::may_begin() const noexcept {
  if (slots_.empty()) return true;
  return slots_.size() < kAheadMax && pool_.frames_ < 3 * std::size_t{pool_.count_} + kAheadMax;
}

/// The pool's job has no share in the slot until it begins, so that what nobody wants any more is free at once.
void PackAhead::begin(std::function<Result<PackedFrame>()> pack) {
  slots_.push_back(std::make_shared<Slot>(home_, std::move(pack)));
  ++pool_.frames_;
  pool_.add([weak = std::weak_ptr(slots_.back()), home = home_](bool go) {
    const std::shared_ptr<Slot> slot = weak.lock();
    if (!slot) return;
    Result<PackedFrame> made = go ? call(slot->pack) : Error(Errc::connection, "the agent is shutting down");
    try {
      asio::post(home, [slot, result = std::move(made)]() mutable {
        slot->result.emplace(std::move(result));
        slot->timer.cancel();
      });
    } catch (const std::exception& e) {
      // The conversation waits for nothing: at its limit it sends the tiles raw.
      spdlog::error("packed_frame_lost error=\"{}\"", e.what());
    }
  });
}

asio::awaitable<bool> PackAhead::wait(std::chrono::nanoseconds limit) {
  const std::shared_ptr<Slot> slot = slots_.front();
  if (!slot->result) {
    slot->timer.expires_after(limit);
    co_await slot->timer.async_wait(net::kAsTuple);
  }
  co_return slot->result.has_value();
}

Result<PackedFrame> PackAhead::take() {
  const std::shared_ptr<Slot> slot = slots_.front();
  drop();
  return std::move(*slot->result);
}

void PackAhead::drop() {
  slots_.pop_front();
  --pool_.frames_;
}

std::chrono::nanoseconds PackAhead::age() const {
  return Clock::now() - slots_.front()->begun;
}

}  // namespace deltasync::agent
