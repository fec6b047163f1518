// The overlapped diff: while a version is still being offloaded, its batches are diffed and encoded as they
// become whole, so that little is left to do when it is sealed. Nothing of it is published before that.
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
#include "agent/generation.hpp"
#include "agent/metrics.hpp"
#include "delta/delta.hpp"

namespace deltasync::agent {

/// An open fill and the version that it is diffed against, whose half stays as it is meanwhile.
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

/// Follows one fill at a time, on background threads of its own. Called by one thread, the publisher, which
/// never waits for them: on a busy machine a thread of low priority may not run for seconds. What they are at when a
/// job ends is thrown away once they come to it, and so is what they read meanwhile.
class OverlappedDiff {
 public:
  /// With no threads it follows nothing. `diffed` counts batches as they are done, those of aborted fills too.
  /// `before_round`: for tests, on the thread that follows, which has taken some batches.
  /// Throws std::system_error if a thread is not to be had.
  OverlappedDiff(unsigned threads, Metrics::Counter& diffed, const NumaPlacementPtr& numa_placement = nullptr,
                 std::function<void()> before_round = {});
  /// Ends, and waits for the batches at hand.
  ~OverlappedDiff();
  OverlappedDiff(const OverlappedDiff&) = delete;
  OverlappedDiff& operator=(const OverlappedDiff&) = delete;

  bool enabled() const noexcept { return thread_.joinable(); }
  /// The job that is followed, or null.
  const OverlappedDiffJob* job() const noexcept { return followed_ ? &followed_->job : nullptr; }
  /// Takes hold of the fill and follows it; nothing if it is over already. The job before was ended.
  void begin(OverlappedDiffJob job);
  /// Stops following at once, and lets go of the fill: a thread that is still in a batch of it reads what may be
  /// written by then, for nothing. Null if no fill was followed.
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
  static std::vector<std::uint32_t> take_whole(Work& work, const ThreadPool& pool);
  static void take_whole(Work& work, std::vector<std::uint32_t>& whole, std::size_t most,
                         std::vector<unsigned>* room_of_node);

  std::shared_ptr<Work> followed_;  // the caller's

  std::mutex mutex_;
  std::condition_variable changed_;
  bool closing_ = false;        // protected by mutex_, as the next one
  std::shared_ptr<Work> work_;  // that the thread is to follow

  Metrics::Counter& diffed_;
  const std::function<void()> before_round_;
  std::thread thread_;
};

/// The first of some tiles of a half, all in turn from `cursor` on, that is not what `digests` says of it; or nothing.
std::optional<std::uint64_t> spot_check(const Generation& generation, unsigned half,
                                        const std::vector<std::uint64_t>& digests, std::uint64_t tiles,
                                        std::uint64_t& cursor);

}  // namespace deltasync::agent
