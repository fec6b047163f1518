#include <algorithm>

#include "delta/dense_codec.hpp"

namespace deltasync::delta {

namespace {

/// What the payload is about to take in half bits, from how many numbers have how many bits: one of b bits, whose
/// highest is known, has on average half of the rest.
std::uint64_t estimated_half_bits(const std::uint32_t* counts, unsigned width, unsigned k) {
  std::uint64_t sum = 0;
  for (unsigned b = 0; b <= width; ++b) {
    const std::uint64_t low_and_stop = 2 * (k + 1);
    std::uint64_t zeros = 0;  // 1.5 × 2^(b − k − 1) − 0.5
    if (b > k) zeros = b - k > 4 ? 2 * (std::uint64_t{kDenseEscape} + width - k) : (3ULL << (b - k - 1)) - 1;
    sum += counts[b] * (low_and_stop + zeros);
  }
  return sum;
}

}  // namespace

DensePlaneSizes dense_plane_sizes(const TileShape& shape, const DenseChoice& choice) noexcept {
  const auto bytes = [](std::uint64_t bits) { return static_cast<std::size_t>((bits + 7) / 8); };
  const std::uint64_t elements = shape.elements();
  DensePlaneSizes sizes;
  sizes.low = bytes(elements * choice.k);
  sizes.unary = bytes(elements + choice.sums.quotients);
  sizes.escape = bytes(std::uint64_t{choice.sums.escapes} * (shape.element_bytes * 8 - choice.k));
  return sizes;
}

DenseChoice dense_choice(const TileRecord& record) noexcept {
  return {record.rice_k, {record.quotient_sum, record.gamma_bits}};
}

DenseChoice measure_dense(const DenseKernels& kernels, const TileShape& shape, const ChangedElements& changed,
                          std::vector<std::byte>& numbers) {
  const unsigned width = shape.element_bytes * 8;
  numbers.resize(std::max(numbers.size(), shape.raw_bytes()));
  kernels.spread[shape.width_log2()](changed.positions, changed.diffs, changed.count, shape.elements(), numbers.data());
  std::uint32_t counts[65];
  kernels.lengths[shape.width_log2()](numbers.data(), shape.elements(), counts);
  DenseChoice best;
  std::uint64_t best_bits = ~std::uint64_t{0};
  for (unsigned k = 0; k < width; ++k) {
    const std::uint64_t bits = estimated_half_bits(counts, width, k);
    if (bits >= best_bits) continue;
    best_bits = bits;
    best.k = k;
  }
  best.sums = kernels.sums[shape.width_log2()](numbers.data(), shape.elements(), best.k);
  return best;
}

void append_dense(const DenseKernels& kernels, const TileShape& shape, const DenseChoice& choice,
                  const std::vector<std::byte>& numbers, std::uint32_t changed, TileRecord& record,
                  std::vector<std::byte>& out) {
  const unsigned w = shape.width_log2();
  const DensePlaneSizes sizes = dense_plane_sizes(shape, choice);
  record.codec = Codec::dense_ulp;
  record.rice_k = static_cast<std::uint8_t>(choice.k);
  record.changed = changed;
  record.quotient_sum = static_cast<std::uint32_t>(choice.sums.quotients);
  record.gamma_bits = choice.sums.escapes;
  const std::size_t begin = out.size();
  out.resize(begin + sizes.total() + kSlack);  // each plane overwrites the garbage behind the one before
  std::byte* plane = out.data() + begin;
  kernels.pack_low[w](numbers.data(), shape.elements(), choice.k, plane);
  plane += sizes.low;
  kernels.pack_unary[w](numbers.data(), shape.elements(), choice.k, plane);
  plane += sizes.unary;
  if (choice.sums.escapes != 0) kernels.pack_escapes[w](numbers.data(), shape.elements(), choice.k, plane);
  out.resize(begin + sizes.total());
}

}  // namespace deltasync::delta
