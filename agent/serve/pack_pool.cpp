#include "agent/serve/pack_pool.hpp"

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

Result<PackedFramePtr> call(const std::function<Result<PackedFrame>()>& pack) {
  try {
    DS_ASSIGN(PackedFrame made, pack());
    return PackedFramePtr(std::make_shared<const PackedFrame>(std::move(made)));
  } catch (const std::bad_alloc&) {
    return Error(Errc::no_space, "no memory");  // so short that it needs none itself
  } catch (...) {
    return Error(Errc::internal, "not packed");
  }
}

/// The conversation waits for nothing: at its limit it sends the tiles raw.
void log_lost(const std::exception& why) {
  log::error("packed_frame_lost error=\"{}\"", why.what());
}

}  // namespace

PackAhead::~PackAhead() {
  for (const auto& slot : slots_) uncount(*slot);
}

bool PackAhead::may_begin() const noexcept {
  if (slots_.empty()) return true;
  return slots_.size() < kAheadMax && pool_.wanted_ < 3 * std::size_t{pool_.count_} + kAheadMax &&
         pool_.made_ < kMadeMax;
}

/// On any thread, while its conversation may drop it: what is counted first is never missing.
void PackAhead::count_made(PackPool& pool, Slot& slot) noexcept {
  ++pool.made_;
  Stage stage = Stage::wanted;
  --(slot.stage.compare_exchange_strong(stage, Stage::made) ? pool.wanted_ : pool.made_);
}

void PackAhead::uncount(Slot& slot) noexcept {
  --(slot.stage.exchange(Stage::dropped) == Stage::wanted ? pool_.wanted_ : pool_.made_);
}

void PackAhead::begin(std::shared_ptr<const Tiles> tiles, std::function<Result<PackedFrame>()> pack) {
  const auto slot = std::make_shared<Slot>(executor_, std::move(tiles), std::move(pack));
  slots_.push_back(slot);
  ++pool_.wanted_;
  if (PackedFramePtr here = cache_->find(*slot->tiles)) {
    slot->result.emplace(std::move(here));
    count_made(pool_, *slot);
  } else {
    hand_to_pool(slot);
  }
}

/// The pool's job has no share in the slot until it begins, so that what nobody wants any more is free at once.
void PackAhead::hand_to_pool(const std::shared_ptr<Slot>& slot) {
  pool_.add([&pool = pool_, weak = std::weak_ptr(slot), cache = cache_, executor = executor_](bool go) {
    const std::shared_ptr<Slot> wanted = weak.lock();
    if (!wanted) return;
    const auto deliver = [&pool, wanted, executor](const Result<PackedFramePtr>& made) {
      count_made(pool, *wanted);
      try {
        asio::post(executor, [wanted, made] {
          wanted->result.emplace(made);
          wanted->timer.cancel();
        });
      } catch (const std::exception& e) {
        log_lost(e);
      }
    };
    try {
      if (!go) return deliver(Error(Errc::connection, "the agent is shutting down"));
      cache->get(
          *wanted->tiles, [wanted] { return call(wanted->pack); }, deliver);
    } catch (const std::exception& e) {
      log_lost(e);
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

Result<PackedFramePtr> PackAhead::take() {
  const std::shared_ptr<Slot> slot = slots_.front();
  drop();
  return std::move(*slot->result);
}

void PackAhead::drop() {
  uncount(*slots_.front());
  slots_.pop_front();
}

std::chrono::nanoseconds PackAhead::age() const {
  return Clock::now() - slots_.front()->begun;
}

}  // namespace deltasync::agent
