// Small random models for tests: layouts that have every awkward shape, halves, and successive versions of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "deltasync/layout.hpp"

namespace deltasync::test {

/// SplitMix64: the tests' only source of randomness, so that a seed names a case for good.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() noexcept;
  /// In [0, n); n ≥ 1.
  std::uint64_t below(std::uint64_t n) noexcept { return next() % n; }
  /// In [0, 1).
  double uniform() noexcept { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

/// Whether two ranges have the same bytes. std::equal and == of vectors compare std::byte one by one: that was half of
/// the time of some tests.
bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b);

struct TestModel {
  LayoutPtr layout;
  std::vector<std::byte> half;  ///< laid out like a half, padding zero
};

/// One tensor of every dtype up to U64, a scalar, empty tensors, a 1-D tensor, widths that leave the next tensor of a
/// safetensors file unaligned, tensors of several bands, of several panels, and with cuts.
std::vector<TensorSpec> sample_specs();

/// Random contents: floats near N(0, 0.02) (every fourth tensor: arbitrary bit patterns, NaNs included), other dtypes
/// uniform. Aborts if the specs are no layout.
TestModel make_model(std::uint64_t seed, std::vector<TensorSpec> specs = sample_specs());

/// The next version: about `density` of the elements of each tensor move, as an optimizer moves them (a few ulps either
/// way; one change in 64 is an arbitrary new bit pattern). Returns the number of elements that changed.
std::uint64_t mutate(std::vector<std::byte>& half, const Layout& layout, double density, std::uint64_t seed);

/// The next version after a small step: the smaller a float is, the likelier it moves, by one ulp; of weights near 0.02
/// about `density` do. Integers move as with mutate().
void step_small(std::vector<std::byte>& half, const Layout& layout, double density, std::uint64_t seed);

}  // namespace deltasync::test
