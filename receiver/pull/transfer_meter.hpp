// How far a full update is: for a progress bar, and in the log while it takes long.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace deltasync::receiver {

class TransferMeter {
 public:
  /// `every`: between two lines of the log, and before the first.
  explicit TransferMeter(std::chrono::milliseconds every) : every_(every) {}

  /// By the pull, while no stream runs. `had` of `total` bytes of tiles are verified already.
  void begin(const std::string& version, std::uint64_t had, std::uint64_t total);
  void end() noexcept {
    say_at_ = Clock::time_point::max();
    total_ = 0;
  }
  /// These bytes of tiles are verified. Any stream.
  void add(std::uint64_t bytes);

  /// Bytes of tiles that are verified, and all of them; nothing of nothing while no full update is under way. Any
  /// thread.
  std::pair<std::uint64_t, std::uint64_t> look() const noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  const std::chrono::milliseconds every_;
  std::string version_;  // as the next two, changed by begin() alone
  std::uint64_t had_ = 0;
  Clock::time_point began_;
  std::atomic<Clock::time_point> say_at_{Clock::time_point::max()};
  std::atomic<std::uint64_t> done_{0};
  std::atomic<std::uint64_t> total_{0};
};

}  // namespace deltasync::receiver
