#include <cmath>

#include "delta/dense_codec.hpp"
#include "delta/kernel_scalar.hpp"
#include "delta/rice.hpp"

namespace deltasync::delta {

PlaneSizes plane_sizes(Codec codec, std::uint32_t changed, unsigned k, std::uint32_t quotient_sum,
                       std::uint32_t gamma_bits, std::uint32_t element_bytes) noexcept {
  const auto bytes = [](std::uint64_t bits) { return static_cast<std::size_t>((bits + 7) / 8); };
  PlaneSizes sizes;
  sizes.gap_low = bytes(std::uint64_t{changed} * k);
  sizes.gap_quotient = bytes(std::uint64_t{changed} + quotient_sum);
  if (codec == Codec::rice_ulp) {
    sizes.sign = bytes(changed);
    sizes.gamma_unary = bytes(std::uint64_t{changed} + gamma_bits);
    sizes.gamma_low = bytes(gamma_bits);
  } else {
    sizes.values = std::size_t{changed} * element_bytes;
  }
  return sizes;
}

namespace {

struct RiceChoice {
  unsigned k = 0;
  std::uint32_t quotient_sum = 0;
};

/// The best parameter among the three around log2(0.693 × mean gap); the lowest of equals.
RiceChoice choose_k(const Kernels& kernels, const std::uint16_t* gaps, std::uint32_t count, std::uint32_t gap_sum) {
  const std::uint64_t scaled = std::uint64_t{gap_sum} * 693 / 1000 / count;
  const unsigned around = scaled == 0 ? 0 : std::min(log2_floor(scaled), kRiceKMax);
  RiceChoice best;
  std::uint64_t best_bits = ~std::uint64_t{0};
  for (unsigned k = around == 0 ? 0 : around - 1; k <= std::min(around + 1, kRiceKMax); ++k) {
    const std::uint64_t sum = k == 0 ? gap_sum : kernels.quotient_sum(gaps, count, k);
    const std::uint64_t bits = std::uint64_t{count} * k + sum;
    if (bits < best_bits) {
      best_bits = bits;
      best = {k, static_cast<std::uint32_t>(sum)};
    }
  }
  return best;
}

/// Magnitudes in Elias γ: ⌊log2⌋ zeros and a stop bit in one plane, the bits below the highest in the other. Nearly all
/// magnitudes are 1, a lone stop bit, so the plane starts as all ones and only the exceptions are written.
template <class U>
void write_gamma(const std::byte* diffs, std::uint32_t count, const std::uint16_t* exceptions, SignSplit split,
                 std::byte* unary, std::byte* low) {
  const std::uint64_t unary_bits = std::uint64_t{count} + split.gamma_bits;
  std::memset(unary, 0xFF, unary_bits / 8);
  if (unary_bits % 8 != 0) unary[unary_bits / 8] = static_cast<std::byte>((1U << (unary_bits % 8)) - 1);
  BitPacker packer(low);
  std::uint64_t zeros = 0;  // written so far
  for (std::uint32_t e = 0; e < split.exceptions; ++e) {
    const std::uint32_t i = exceptions[e];
    const std::uint64_t m = magnitude(load_raw<U>(diffs + std::size_t{i} * sizeof(U)));
    const unsigned length = log2_floor(m);
    for (unsigned left = length; left != 0;) {  // once, but for elements of 64 bits
      const unsigned run = std::min(left, 56U);
      std::byte* const at = unary + (i + zeros) / 8;
      const std::uint64_t cleared = ((std::uint64_t{1} << run) - 1) << ((i + zeros) % 8);
      store_raw(at, load_raw<std::uint64_t>(at) & ~cleared);
      zeros += run;
      left -= run;
    }
    const std::uint64_t below = m - (std::uint64_t{1} << length);
    if (length <= 32) {
      packer.put(below, length);
    } else {
      packer.put(below & 0xFFFFFFFF, 32);
      packer.put(below >> 32, length - 32);
    }
  }
}

template <class U>
void gather_values(const TileShape& shape, const ChangedElements& changed, const std::byte* after,
                   std::size_t row_stride, std::byte* out) {
  const RowGeometry geometry(shape, row_stride);
  for_each_position<U>(geometry, changed.positions, changed.count, [&](std::uint32_t i, std::size_t offset) {
    std::memcpy(out + std::size_t{i} * sizeof(U), after + offset, sizeof(U));
  });
}

void write_raw(const TileShape& shape, const std::byte* after, std::size_t row_stride, std::byte* out) {
  const std::size_t row_bytes = shape.row_bytes();
  for (std::uint32_t r = 0; r < shape.rows; ++r) std::memcpy(out + r * row_bytes, after + r * row_stride, row_bytes);
}

template <class U>
void write_values(const TileShape& shape, const ChangedElements& changed, const std::byte* after,
                  std::size_t row_stride, const PlaneSizes& sizes, const RiceScratch& scratch, SignSplit split,
                  Codec codec, std::byte* out) {
  if (codec == Codec::rice_absolute) {
    gather_values<U>(shape, changed, after, row_stride, out);
    return;
  }
  std::memcpy(out, scratch.signs.data(), sizes.sign);
  std::byte* const unary = out + sizes.sign;
  write_gamma<U>(changed.diffs, changed.count, scratch.exceptions.data(), split, unary, unary + sizes.gamma_unary);
}

/// What differences may be longer than rice_absolute and still be taken: for tiles with one or two changes it often is,
/// by a byte or two, and deltas of one kind merge without the version that they lead to.
constexpr std::size_t kUlpPreferredBytes = 8;

/// Where the values come from; `ulp_bytes` is of the smaller codec with differences.
enum class ValueSource : std::uint8_t { whole, elements, differences };

ValueSource choose_source(std::size_t ulp_bytes, std::size_t absolute_bytes, std::size_t raw_bytes, ValueForm form) {
  // Of equals, the plainer one.
  if (raw_bytes <= absolute_bytes && (form == ValueForm::absolute || raw_bytes <= ulp_bytes)) return ValueSource::whole;
  if (form == ValueForm::absolute) return ValueSource::elements;
  return ulp_bytes <= std::min(raw_bytes, absolute_bytes + kUlpPreferredBytes) ? ValueSource::differences
                                                                               : ValueSource::elements;
}

/// What is known of a tile's changes before a codec is chosen.
struct Measured {
  RiceChoice gaps;
  // With differences only.
  SignSplit split;
  DenseChoice dense;
  std::size_t difference_bytes = 0;  ///< of the smaller of the two codecs
  bool dense_is_smaller = false;

  PlaneSizes sizes(Codec codec, const TileShape& shape, std::uint32_t count) const {
    return plane_sizes(codec, count, gaps.k, gaps.quotient_sum, split.gamma_bits, shape.element_bytes);
  }
};

Measured measure(const Kernels& kernels, const TileShape& shape, const ChangedElements& changed, bool differences,
                 RiceScratch& scratch) {
  const std::uint32_t n = changed.count;
  kernels.gaps(changed.positions, n, scratch.gaps.data());
  Measured out;
  out.gaps = choose_k(kernels, scratch.gaps.data(), n, changed.positions[n - 1] + 1U - n);
  if (!differences) return out;
  out.split =
      kernels.split_signs[shape.width_log2()](changed.diffs, n, scratch.signs.data(), scratch.exceptions.data());
  out.difference_bytes = out.sizes(Codec::rice_ulp, shape, n).total();
  if (!dense_may_win(shape, n)) return out;
  out.dense = measure_dense(kernels.dense, shape, changed, scratch.numbers);
  const std::size_t dense_bytes = dense_plane_sizes(shape, out.dense).total();
  out.dense_is_smaller = dense_bytes < out.difference_bytes;
  out.difference_bytes = std::min(out.difference_bytes, dense_bytes);
  return out;
}

void append_raw(const TileShape& shape, const std::byte* after, std::size_t row_stride, TileRecord& record,
                std::vector<std::byte>& out) {
  record.codec = Codec::raw;
  record.rice_k = 0;
  record.changed = shape.elements();
  record.quotient_sum = 0;
  record.gamma_bits = 0;
  const std::size_t begin = out.size();
  out.resize(begin + shape.raw_bytes());
  write_raw(shape, after, row_stride, out.data() + begin);
}

void append_rice(Codec codec, const Kernels& kernels, const TileShape& shape, const ChangedElements& changed,
                 const std::byte* after, std::size_t row_stride, const RiceScratch& scratch, const Measured& measured,
                 TileRecord& record, std::vector<std::byte>& out) {
  const std::uint32_t n = changed.count;
  const std::uint16_t* const gaps = scratch.gaps.data();
  const RiceChoice& choice = measured.gaps;
  const SignSplit& split = measured.split;
  const PlaneSizes sizes = measured.sizes(codec, shape, n);
  record.codec = codec;
  record.rice_k = static_cast<std::uint8_t>(choice.k);
  record.changed = n;
  record.quotient_sum = choice.quotient_sum;
  record.gamma_bits = codec == Codec::rice_ulp ? split.gamma_bits : 0;
  const std::size_t begin = out.size();
  out.resize(begin + sizes.total() + kSlack);  // the kernels store whole vectors; each plane overwrites the slack
  std::byte* plane = out.data() + begin;
  kernels.pack_low(gaps, n, choice.k, plane);
  plane += sizes.gap_low;
  kernels.pack_unary(gaps, n, choice.k, plane);
  plane += sizes.gap_quotient;
  switch (shape.element_bytes) {
    case 1: write_values<std::uint8_t>(shape, changed, after, row_stride, sizes, scratch, split, codec, plane); break;
    case 2: write_values<std::uint16_t>(shape, changed, after, row_stride, sizes, scratch, split, codec, plane); break;
    case 4: write_values<std::uint32_t>(shape, changed, after, row_stride, sizes, scratch, split, codec, plane); break;
    default: write_values<std::uint64_t>(shape, changed, after, row_stride, sizes, scratch, split, codec, plane);
  }
  out.resize(begin + sizes.total());
}

void append_differences(const Kernels& kernels, const TileShape& shape, const ChangedElements& changed,
                        const RiceScratch& scratch, const Measured& measured, TileRecord& record,
                        std::vector<std::byte>& out) {
  if (measured.dense_is_smaller) {
    append_dense(kernels.dense, shape, measured.dense, scratch.numbers, changed.count, record, out);
  } else {
    append_rice(Codec::rice_ulp, kernels, shape, changed, nullptr, 0, scratch, measured, record, out);
  }
}

}  // namespace

void encode_payload(const Kernels& kernels, const TileShape& shape, const ChangedElements& changed,
                    const std::byte* after, std::size_t row_stride, ValueForm form, RiceScratch& scratch,
                    TileRecord& record, std::vector<std::byte>& out) {
  const Measured measured = measure(kernels, shape, changed, form == ValueForm::ulp, scratch);
  const std::size_t absolute_bytes = measured.sizes(Codec::rice_absolute, shape, changed.count).total();
  switch (choose_source(measured.difference_bytes, absolute_bytes, shape.raw_bytes(), form)) {
    case ValueSource::whole: append_raw(shape, after, row_stride, record, out); break;
    case ValueSource::differences: append_differences(kernels, shape, changed, scratch, measured, record, out); break;
    case ValueSource::elements:
      append_rice(Codec::rice_absolute, kernels, shape, changed, after, row_stride, scratch, measured, record, out);
  }
}

bool encode_elements(const Kernels& kernels, const TileShape& shape, const ChangedElements& changed,
                     const std::byte* after, std::size_t row_stride, RiceScratch& scratch, TileRecord& record,
                     std::vector<std::byte>& out) {
  const Measured measured = measure(kernels, shape, changed, false, scratch);
  if (measured.sizes(Codec::rice_absolute, shape, changed.count).total() > shape.raw_bytes()) return false;
  append_rice(Codec::rice_absolute, kernels, shape, changed, after, row_stride, scratch, measured, record, out);
  return true;
}

bool encode_differences(const Kernels& kernels, const TileShape& shape, const ChangedElements& changed,
                        RiceScratch& scratch, TileRecord& record, std::vector<std::byte>& out) {
  const Measured measured = measure(kernels, shape, changed, true, scratch);
  if (measured.difference_bytes > shape.raw_bytes()) return false;
  append_differences(kernels, shape, changed, scratch, measured, record, out);
  return true;
}

}  // namespace deltasync::delta
