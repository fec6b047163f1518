// Reads what is served again, tile by tile, all in turn, on a thread of low priority: what changed in memory without a
// writer (a stray write, a flipped bit) is found in bounded time, whether anyone pulls or not.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "agent/versions/leases.hpp"

namespace deltasync::agent {

struct Generation;

struct ScrubOptions {
  std::chrono::milliseconds pass = std::chrono::minutes(10);  ///< for all tiles of a half; 0: nothing is read again
  double cpu = 0.02;                                          ///< of one core, at most: a pass takes longer then
};

/// What is to be read, and who hears of what is wrong.
struct ScrubSource {
  /// What is served now; `read` is called with it if there is something.
  struct Half {
    const Generation& generation;
    HalfKey key;
    const std::vector<std::uint64_t>& digests;
  };
  std::function<void(const std::function<void(const Half&)>& read)> with_served;
  std::function<void(const HalfKey& half, std::span<const std::uint64_t> tiles)> found;
  std::function<void(std::uint64_t bytes, bool pass_done)> counted;
};

class Scrub {
 public:
  /// Throws std::system_error if a thread is not to be had.
  Scrub(const ScrubOptions& options, ScrubSource source);
  ~Scrub();
  Scrub(const Scrub&) = delete;
  Scrub& operator=(const Scrub&) = delete;

  /// Ends the thread after the tiles at hand. Idempotent.
  void stop();

 private:
  struct Step {
    std::uint64_t bytes = 0;
    std::uint64_t half_bytes = 0;
  };
  void work();
  Step read_some();
  std::chrono::nanoseconds pause_after(const Step& step, std::chrono::nanoseconds cpu) const;

  const ScrubOptions options_;
  const ScrubSource source_;
  std::uint64_t cursor_ = 0;  // the next tile; the thread's
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;  // protected by mutex_
  std::thread thread_;
};

}  // namespace deltasync::agent
