// The digest's change from a list of changed positions: the words that hold them, before and after.
#pragma once

#include "delta/geometry.hpp"
#include "delta/kernels.hpp"

namespace deltasync::delta {

/// Collects words and hands them to the kernel in runs that stay in the nearest cache.
class ChangedWordSum {
 public:
  explicit ChangedWordSum(const Kernels& kernels) : kernels_(kernels) {}

  void add(std::uint64_t before, std::uint64_t after, std::uint32_t word) noexcept {
    before_[count_] = before;
    after_[count_] = after;
    words_[count_] = word;
    if (++count_ == kRun) flush();
  }
  /// Σ mix(after) − Σ mix(before) of all that was added.
  std::uint64_t finish() noexcept {
    flush();
    return sum_;
  }

 private:
  static constexpr std::uint32_t kRun = 512;
  void flush() noexcept {
    sum_ += kernels_.digest_pairs(before_, after_, words_, count_);
    count_ = 0;
  }
  const Kernels& kernels_;
  std::uint64_t sum_ = 0;
  std::uint32_t count_ = 0;
  std::uint64_t before_[kRun];
  std::uint64_t after_[kRun];
  std::uint32_t words_[kRun];
};

}  // namespace deltasync::delta
