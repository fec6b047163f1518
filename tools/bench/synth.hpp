// The synthetic model of the benchmarks: a bf16 decoder whose weights follow an fp32 master, w ~ N(0, 0.02), that takes
// Adam-like steps: every element moves by step_size × (a normal-like ratio of moments), and the bf16 copy changes
// where rounding lets it. Seeded; the step size is calibrated so that the wanted fraction of bf16 elements changes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.hpp"
#include "deltasync/layout.hpp"

namespace deltasync::bench {

/// A decoder-like layout of about `model_bytes` (at least 1 MiB): embedding, attention and MLP matrices, norms. bf16,
/// or f32 for the master itself.
Result<LayoutPtr> decoder_layout(std::uint64_t model_bytes, Dtype dtype = Dtype::bf16);

class SyntheticModel {
 public:
  /// Keeps an fp32 master of every element (4 bytes each).
  SyntheticModel(LayoutPtr layout, double density, std::uint64_t seed, ThreadPool& pool);

  const LayoutPtr& layout() const noexcept { return layout_; }
  /// Writes the current weights as a half (layout offsets). `half` has layout->half_bytes().
  void write_half(std::span<std::byte> half) const;
  /// One optimizer step of the master.
  void step();
  double step_size() const noexcept { return step_size_; }

 private:
  LayoutPtr layout_;
  std::uint64_t seed_;
  std::uint64_t steps_ = 0;
  ThreadPool& pool_;
  std::vector<float> master_;  ///< elements in half order, without padding
  float step_size_ = 0;
};

}  // namespace deltasync::bench
