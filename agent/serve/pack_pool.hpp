// Threads of low priority that pack tiles for receivers on slow links. A conversation has several frames packed ahead
// of what it sends, so that it packs and sends at the same time.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/steady_timer.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "agent/plans/packed_frame_cache.hpp"
#include "deltasync/result.hpp"

namespace deltasync::agent {

class PackPool {
 public:
  /// 0 threads: nothing can be packed. Throws std::system_error where no thread is to be had.
  explicit PackPool(unsigned threads);
  /// stop()
  ~PackPool();
  PackPool(const PackPool&) = delete;
  PackPool& operator=(const PackPool&) = delete;

  unsigned threads() const noexcept { return count_; }

  /// Calls job(true) on a thread, in the order of the calls; job(false) instead, on some thread, once stopped.
  void add(std::function<void(bool go)> job);
  /// Ends the threads after the jobs at hand. Those who get their results must still be there. Idempotent.
  void stop();

 private:
  friend class PackAhead;
  void work(unsigned index);

  const unsigned count_;
  // Frames of all conversations.
  std::atomic<std::size_t> wanted_{0};  ///< and not made yet
  std::atomic<std::size_t> made_{0};    ///< and waiting for their peers
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void(bool)>> jobs_;  // protected by mutex_, as below
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

/// The frames of one answer, in order. Used on its conversation's strand.
class PackAhead {
 public:
  using Tiles = PackedFrameCache::Tiles;

  /// `cache`: of the version whose tiles these are.
  PackAhead(PackPool& pool, std::shared_ptr<PackedFrameCache> cache, boost::asio::any_io_executor executor)
      : pool_(pool), cache_(std::move(cache)), executor_(std::move(executor)) {}
  /// As drop() of all.
  ~PackAhead();
  PackAhead(const PackAhead&) = delete;
  PackAhead& operator=(const PackAhead&) = delete;

  /// Whether another frame may be begun. One always may. More, up to kAheadMax, only while the frames that all
  /// conversations have asked for are no more than it takes to keep the threads busy. Frames that are packed and wait
  /// for their peer do not count for that, so a peer that does not read holds up nobody; but beyond kMadeMax of these
  /// in all, each conversation has one frame at a time.
  bool may_begin() const noexcept;
  bool empty() const noexcept { return slots_.empty(); }
  /// `pack` is called on one of the pool's threads, unless the frame has been dropped by then, is in the cache, or is
  /// being packed for somebody else.
  void begin(std::shared_ptr<const Tiles> tiles, std::function<Result<PackedFrame>()> pack);
  /// Waits until the oldest one is there, for `limit` at most. Returns whether it is.
  boost::asio::awaitable<bool> wait(std::chrono::nanoseconds limit);
  /// The oldest one, which is there.
  Result<PackedFramePtr> take();
  const Tiles& front_tiles() const { return *slots_.front()->tiles; }
  /// Drops the oldest one; its result goes nowhere.
  void drop();
  /// Time since the oldest one was begun.
  std::chrono::nanoseconds age() const;

 private:
  static constexpr std::size_t kAheadMax = 4;
  static constexpr std::size_t kMadeMax = 128;  ///< half a GiB
  using Clock = std::chrono::steady_clock;
  enum class Stage : std::uint8_t { wanted, made, dropped };

  struct Slot {
    Slot(const boost::asio::any_io_executor& executor, std::shared_ptr<const Tiles> of,
         std::function<Result<PackedFrame>()> work)
        : tiles(std::move(of)), pack(std::move(work)), timer(executor) {}
    const std::shared_ptr<const Tiles> tiles;
    const std::function<Result<PackedFrame>()> pack;
    const Clock::time_point begun = Clock::now();
    std::atomic<Stage> stage{Stage::wanted};       // as the pool counts it
    boost::asio::steady_timer timer;               // executor's, as the next one
    std::optional<Result<PackedFramePtr>> result;  // nothing: not there yet
  };

  static void count_made(PackPool& pool, Slot& slot) noexcept;
  void uncount(Slot& slot) noexcept;
  void hand_to_pool(const std::shared_ptr<Slot>& slot);

  PackPool& pool_;
  const std::shared_ptr<PackedFrameCache> cache_;
  const boost::asio::any_io_executor executor_;
  std::deque<std::shared_ptr<Slot>> slots_;
};

}  // namespace deltasync::agent
