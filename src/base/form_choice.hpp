// Several forms of one loop do the same; which is the fastest depends on the processor, the memory and its pages. So it
// is not guessed from the processor's name, but measured at the work itself: for a while pieces of it are done by each
// form in turn and timed, and then the fastest does them all. That costs next to nothing, and sees the memory, the
// threads and the load that there really are.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <optional>
#include <vector>

namespace deltasync {

class FormChoice {
 public:
  static constexpr std::size_t kTimedBytesMin = 128u << 10;  ///< shorter pieces are not timed
  static constexpr unsigned kTimesEach = 15;                 ///< odd, so that the median is one of them
  /// Another form than the usual one must be faster by this: less is not told from chance, and hardly worth having.
  static constexpr double kGainMin = 1.05;

  /// `usual`: what is used until there is a choice.
  explicit FormChoice(unsigned forms, unsigned usual) : times_(forms), usual_(usual) {}

  /// Calls work(form) once. Any thread. `steady`: false for work that takes longer for another reason, such as memory
  /// that is touched for the first time; it is not timed.
  template <class Work>
  void run(std::size_t bytes, bool steady, Work&& work) {
    const int chosen = chosen_.load(std::memory_order_relaxed);
    if (chosen >= 0) return work(static_cast<unsigned>(chosen));
    if (!steady || bytes < kTimedBytesMin) return work(usual_);
    const unsigned form = turn_.fetch_add(1, std::memory_order_relaxed) % forms();
    const auto start = std::chrono::steady_clock::now();
    work(form);
    record(form, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() /
                     static_cast<double>(bytes));
  }

  unsigned forms() const noexcept { return static_cast<unsigned>(times_.size()); }
  unsigned usual() const noexcept { return usual_; }
  /// Nothing until each form has been timed often enough.
  std::optional<unsigned> chosen() const noexcept {
    const int chosen = chosen_.load(std::memory_order_relaxed);
    return chosen < 0 ? std::nullopt : std::optional<unsigned>(static_cast<unsigned>(chosen));
  }

  /// What run() records of a piece. Of a form that was timed often enough nothing more is kept.
  void record(unsigned form, double seconds_per_byte) {
    const std::scoped_lock lock(mutex_);
    std::vector<double>& times = times_[form];
    if (times.size() >= kTimesEach) return;
    times.push_back(seconds_per_byte);
    const auto is_known = [](const std::vector<double>& some) { return some.size() >= kTimesEach; };
    if (std::all_of(times_.begin(), times_.end(), is_known)) choose();
  }

 private:
  void choose() {
    std::vector<double> medians;
    for (std::vector<double>& times : times_) {
      const auto middle = times.begin() + kTimesEach / 2;
      std::nth_element(times.begin(), middle, times.end());
      medians.push_back(*middle);
    }
    const auto best = std::min_element(medians.begin(), medians.end());
    const bool gains = *best * kGainMin <= medians[usual_];
    chosen_.store(gains ? static_cast<int>(best - medians.begin()) : static_cast<int>(usual_),
                  std::memory_order_relaxed);
  }

  std::mutex mutex_;
  std::vector<std::vector<double>> times_;  ///< seconds a byte, by form
  const unsigned usual_;
  std::atomic<unsigned> turn_{0};
  std::atomic<int> chosen_{-1};
};

}  // namespace deltasync
