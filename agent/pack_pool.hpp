// The threads that pack tiles for receivers on slow links, at low priority. A conversation has several frames packed
// ahead of what it sends, so that threads and socket are busy together.
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

#include "delta/delta.hpp"
#include "deltasync/result.hpp"

namespace deltasync::agent {

/// A frame and the hash of its bytes.
struct PackedFrame {
  delta::Frame frame;
  std::uint64_t hash = 0;
};

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
  /// Ends the threads after the jobs at hand. Whoever they hand their results to must still be there. Idempotent.
  void stop();

 private:
  friend class PackAhead;
  void work(unsigned index);

  const unsigned count_;
  std::atomic<std::size_t> frames_{0};  ///< being packed, or packed and not yet sent: of all conversations
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void(bool)>> jobs_;  // protected by mutex_, as below
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

/// The frames of one answer, in order. Its conversation's strand.
class PackAhead {
 public:
  PackAhead(PackPool& pool, boost::asio::any_io_executor home) : pool_(pool), home_(std::move(home)) {}
  /// As drop() of all.
  ~PackAhead();
  PackAhead(const PackAhead&) = delete;
  PackAhead& operator=(const PackAhead&) = delete;

  /// One is always allowed; more, up to kAheadMax, as long as all conversations together keep the threads busy only.
  bool may_begin() const noexcept;
  bool empty() const noexcept { return slots_.empty(); }
  /// `pack` is called on one of the pool's threads, unless the frame has been dropped by then.
  void begin(std::function<Result<PackedFrame>()> pack);
  /// Until the oldest one is there, for `limit` at most. Whether it is.
  boost::asio::awaitable<bool> wait(std::chrono::nanoseconds limit);
  /// The oldest one, which is there.
  Result<PackedFrame> take();
  /// Of the oldest one nobody hears any more.
  void drop();
  /// Since the oldest one was begun.
  std::chrono::nanoseconds age() const;

 private:
  static constexpr std::size_t kAheadMax = 4;
  using Clock = std::chrono::steady_clock;

  struct Slot {
    Slot(const boost::asio::any_io_executor& home, std::function<Result<PackedFrame>()> work)
        : pack(std::move(work)), timer(home) {}
    const std::function<Result<PackedFrame>()> pack;
    const Clock::time_point begun = Clock::now();
    boost::asio::steady_timer timer;            // home's, as the next one
    std::optional<Result<PackedFrame>> result;  // nothing: not there yet
  };

  PackPool& pool_;
  const boost::asio::any_io_executor home_;
  std::deque<std::shared_ptr<Slot>> slots_;
};

}  // namespace deltasync::agent
