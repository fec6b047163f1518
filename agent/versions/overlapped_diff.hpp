// The overlapped diff: batches of a version are diffed and encoded while the version is still being offloaded, each as
// soon as it is whole. So little is left to do after the seal. Nothing is published before the seal.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "agent/background.hpp"
#include "agent/metrics.hpp"
#include "agent/versions/generation.hpp"
#include "delta/delta.hpp"

namespace deltasync::agent {

/// An open fill, and the version that it is diffed against. That version's half does not change meanwhile.
struct OverlappedDiffJob {
  GenerationPtr generation;
  shm::FillView fill;
  unsigned base_half = 0;
  std::uint64_t base_sequence = 0;
  std::shared_ptr<const std::vector<std::uint64_t>> base_digests;
  delta::ValueForm form = delta::ValueForm::ulp;
};

/// What was encoded during a fill; `encoding` borrows from the job's generation.
struct OverlappedDiffWork {
  OverlappedDiffJob job;
  std::unique_ptr<delta::Encoding> encoding;
};

/// Follows one fill at a time, on background threads of its own. Called by one thread, the publisher. It never waits
/// for them, since on a busy machine a thread of low priority may not run for seconds: what they are at when a job ends
/// is discarded once they finish it.
class OverlappedDiff {
 public:
  /// With 0 threads it does nothing. `diffed` counts batches as they are done, those of aborted fills included.
  /// `before_round`: for tests, called on the background thread once it has taken some batches. Throws
  /// std::system_error if a thread cannot be started.
  OverlappedDiff(unsigned threads, Metrics::Counter& diffed, std::function<void()> before_round = {});
  /// Ends, and waits for the batches at hand.
  ~OverlappedDiff();
  OverlappedDiff(const OverlappedDiff&) = delete;
  OverlappedDiff& operator=(const OverlappedDiff&) = delete;

  bool enabled() const noexcept { return thread_.joinable(); }
  /// The job that is followed, or null.
  const OverlappedDiffJob* job() const noexcept { return followed_ ? &followed_->job : nullptr; }
  /// Holds the fill and follows it; does nothing if the fill is over already. end() was called for the job before.
  void begin(OverlappedDiffJob job);
  /// Stops at once and releases the fill. A thread that is still in a batch may then read bytes that are being written;
  /// its result is discarded. Null if no fill was followed.
  std::shared_ptr<OverlappedDiffWork> end();

 private:
  struct Work : OverlappedDiffWork {
    // The thread's:
    std::vector<std::uint32_t> pending;  ///< batches that were not whole yet, in no order
    std::size_t next = 0;                ///< the one of them that is looked at next
  };

  void work(ThreadPool& pool);
  /// Diffs what has become whole, a few batches; false if nothing has.
  bool advance(Work& work, ThreadPool& pool);
  static std::vector<std::uint32_t> take_whole(Work& work, std::size_t most);

  std::shared_ptr<Work> followed_;  // the caller's

  std::mutex mutex_;
  std::condition_variable changed_;
  bool closing_ = false;        // protected by mutex_, as the next one
  std::shared_ptr<Work> work_;  // that the thread is to follow

  Metrics::Counter& diffed_;
  const std::function<void()> before_round_;
  std::thread thread_;
};

/// Checks `tiles` tiles of a half, from `cursor` on, which advances. The first that differs from its digest, or
/// nothing.
std::optional<std::uint64_t> spot_check(const Generation& generation, unsigned half,
                                        const std::vector<std::uint64_t>& digests, std::uint64_t tiles,
                                        std::uint64_t& cursor);

}  // namespace deltasync::agent
