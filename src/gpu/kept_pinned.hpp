// Pinned host memory that was given back, for who wants some next: CUDA's way to end it waits for all that runs on any
// device, an engine's work among it, without a deadline. So it stays with the process.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace deltasync::gpu {

/// Thread-safe. Memory of all devices.
class KeptPinned {
 public:
  /// Outlives all devices.
  static KeptPinned& of_process() {
    static auto* const made = new KeptPinned;
    return *made;
  }
  /// What to take of the driver for so much, so that it fits others later.
  static std::uint64_t rounded(std::uint64_t bytes) {
    if (bytes <= kLarge) return std::bit_ceil(bytes < kSmall ? kSmall : bytes);
    return (bytes + kLarge - 1) / kLarge * kLarge;
  }
  /// Null if there is none.
  std::byte* take(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    std::vector<std::byte*>& fitting = kept_[rounded(bytes)];
    if (fitting.empty()) return nullptr;
    std::byte* const data = fitting.back();
    fitting.pop_back();
    return data;
  }
  /// `bytes` as in take().
  void keep(std::byte* data, std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    kept_[rounded(bytes)].push_back(data);
  }

 private:
  static constexpr std::uint64_t kSmall = 4096;
  static constexpr std::uint64_t kLarge = std::uint64_t{2} << 20;

  std::mutex mutex_;
  std::map<std::uint64_t, std::vector<std::byte*>> kept_;  ///< protected by mutex_; by rounded()
};

}  // namespace deltasync::gpu
