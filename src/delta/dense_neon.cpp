// NEON kernels of dense_ulp, where elements are of 8 or 16 bits; wider ones are as good as they get with the scalar
// ones.
#include "delta/dense_scalar.hpp"
#include "delta/neon.hpp"

namespace deltasync::delta {

namespace {

/// Eight numbers, in lanes of 16 bits, from and to elements of that size or of bytes.
template <class U>
inline uint16x8_t load_numbers(const std::byte* from) {
  if constexpr (sizeof(U) == 2) return vreinterpretq_u16_u8(load128(from));
  return vmovl_u8(vld1_u8(reinterpret_cast<const std::uint8_t*>(from)));
}
template <class U>
inline void store_numbers(std::byte* to, uint16x8_t x) {
  if constexpr (sizeof(U) == 2) {
    store128(to, vreinterpretq_u8_u16(x));
  } else {
    vst1_u8(reinterpret_cast<std::uint8_t*>(to), vmovn_u16(x));
  }
}

inline int16x8_t right_by(unsigned k) {
  return vdupq_n_s16(static_cast<std::int16_t>(-static_cast<int>(k)));
}

/// One pass with a sum for each length.
template <class U>
void lengths_neon(const std::byte* numbers, std::uint32_t elements, std::uint32_t* counts) {
  constexpr unsigned kLengths = sizeof(U) * 8 + 1;
  constexpr std::uint32_t kOneSumMax = 255;
  const auto zeros_of_sixteen = [&](std::uint32_t i) {
    const std::byte* const from = numbers + std::size_t{i} * sizeof(U);
    if constexpr (sizeof(U) == 1) return vclzq_u8(load128(from));
    const auto zeros = [&](std::size_t at) { return vreinterpretq_u8_u16(vclzq_u16(load_numbers<U>(from + at))); };
    return vuzp1q_u8(zeros(0), zeros(16));
  };
  const std::uint32_t vectors = elements / 16;
  count_lengths<U>(numbers + std::size_t{vectors} * 16 * sizeof(U), elements % 16, counts);
  for (std::uint32_t v = 0; v < vectors;) {
    const std::uint32_t end = vectors - v > kOneSumMax ? v + kOneSumMax : vectors;
    uint8x16_t sums[kLengths];
    for (uint8x16_t& sum : sums) sum = vdupq_n_u8(0);
    for (; v < end; ++v) {
      const uint8x16_t zeros = zeros_of_sixteen(v * 16);
#pragma GCC unroll 17
      for (unsigned b = 0; b < kLengths; ++b) {
        sums[b] = vsubq_u8(sums[b], vceqq_u8(zeros, vdupq_n_u8(static_cast<std::uint8_t>(kLengths - 1 - b))));
      }
    }
    for (unsigned b = 0; b < kLengths; ++b) counts[b] += vaddlvq_u8(sums[b]);
  }
}

template <class U>
DenseSums sums_neon(const std::byte* numbers, std::uint32_t elements, unsigned k) {
  const int16x8_t right = right_by(k);
  const uint16x8_t escape = vdupq_n_u16(kDenseEscape);
  uint32x4_t quotients = vdupq_n_u32(0);
  uint16x8_t escapes = vdupq_n_u16(0);
  std::uint32_t i = 0;
  for (; i + 8 <= elements; i += 8) {
    const uint16x8_t q = vshlq_u16(load_numbers<U>(numbers + std::size_t{i} * sizeof(U)), right);
    quotients = vpadalq_u16(quotients, vminq_u16(q, escape));
    escapes = vsubq_u16(escapes, vcgeq_u16(q, escape));  // at most 2^13 in a lane
  }
  DenseSums out = sum_quotients<U>(numbers + std::size_t{i} * sizeof(U), elements - i, k);
  out.quotients += vaddlvq_u32(quotients);
  out.escapes += vaddlvq_u16(escapes);
  return out;
}

template <class U>
void pack_low_numbers_neon(const std::byte* numbers, std::uint32_t elements, unsigned k, std::byte* plane) {
  if (k == 0) return;
  const FieldPacker pack(k);
  std::uint32_t i = 0;
  for (; i + 8 <= elements; i += 8, plane += k) pack(load_numbers<U>(numbers + std::size_t{i} * sizeof(U)), plane);
  pack_numbers_low<U>(numbers + std::size_t{i} * sizeof(U), elements - i, k, plane);
}

/// Eight at a time, unless one of them has an escape or is wrong: then, and at the end, the scalar truth.
template <class U>
const char* join_neon(const DensePlanes& planes, std::uint32_t elements, std::byte* diffs) {
  constexpr unsigned kBits = sizeof(U) * 8;
  const unsigned k = planes.k;
  const unsigned quotient_limit = kBits - k < 4 ? 1U << (kBits - k) : kDenseEscape;
  const int16x8_t left = vdupq_n_s16(static_cast<std::int16_t>(k));
  const uint16x8_t one = vdupq_n_u16(1);
  const FieldUnpacker unpack(k);
  const std::byte* low = planes.low;
  DenseMet met;
  uint32x4_t sum = vdupq_n_u32(0);
  std::uint32_t i = 0;
  for (; i + 8 <= elements; i += 8, low += k) {
    const uint16x8_t q = vld1q_u16(planes.quotients + i);
    if (vmaxvq_u16(q) >= quotient_limit) {
      if (const char* wrong = join_some<U>(planes, i, i + 8, met, diffs)) return wrong;
      continue;
    }
    sum = vpadalq_u16(sum, q);
    const uint16x8_t number = vorrq_u16(vshlq_u16(q, left), unpack(low));
    const uint16x8_t sign = vreinterpretq_u16_s16(vnegq_s16(vreinterpretq_s16_u16(vandq_u16(number, one))));
    store_numbers<U>(diffs + std::size_t{i} * sizeof(U), veorq_u16(vshrq_n_u16(number, 1), sign));
  }
  met.quotients += vaddlvq_u32(sum);
  if (const char* wrong = join_some<U>(planes, i, elements, met, diffs)) return wrong;
  return wrong_sums(planes, met);
}

/// Eight, or as many as a vector has: what append_lanes() stores lies in front of what is still to be looked at.
template <class U>
std::uint32_t list_neon(const std::byte* diffs, std::uint32_t elements, std::uint16_t* positions, std::byte* listed) {
  using L = Lanes<sizeof(U)>;
  constexpr unsigned kLanes = kTogether<sizeof(U)>;
  static constexpr std::uint16_t kIota[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  uint16x8_t numbers = vld1q_u16(kIota);
  std::uint32_t count = 0;
  std::uint32_t i = 0;
  for (; i + 8 <= elements; i += kLanes) {
    uint8x16_t x;
    if constexpr (sizeof(U) == 1) {
      x = vcombine_u8(vld1_u8(reinterpret_cast<const std::uint8_t*>(diffs + i)), vdup_n_u8(0));
    } else {
      x = load128(diffs + std::size_t{i} * sizeof(U));
    }
    append_lanes<sizeof(U)>(L::bits(vmvnq_u8(L::equal(x, vdupq_n_u8(0)))), x, numbers, positions, listed, count);
    numbers = vaddq_u16(numbers, vdupq_n_u16(kLanes));
  }
  for (; i < elements; ++i) {
    const U x = load_raw<U>(diffs + std::size_t{i} * sizeof(U));
    positions[count] = static_cast<std::uint16_t>(i);
    store_raw(listed + std::size_t{count} * sizeof(U), x);
    count += x != 0 ? 1 : 0;
  }
  return count;
}

}  // namespace

DenseKernels neon_dense_kernels() {
  using std::uint16_t;
  using std::uint32_t;
  using std::uint8_t;
  DenseKernels kernels = dense_kernels();
  kernels.lengths[0] = lengths_neon<uint8_t>;
  kernels.lengths[1] = lengths_neon<uint16_t>;
  kernels.sums[0] = sums_neon<uint8_t>;
  kernels.sums[1] = sums_neon<uint16_t>;
  kernels.pack_low[0] = pack_low_numbers_neon<uint8_t>;
  kernels.pack_low[1] = pack_low_numbers_neon<uint16_t>;
  kernels.join[0] = join_neon<uint8_t>;
  kernels.join[1] = join_neon<uint16_t>;
  kernels.list[0] = list_neon<uint8_t>;
  kernels.list[1] = list_neon<uint16_t>;
  kernels.list[2] = list_neon<uint32_t>;
  return kernels;
}

}  // namespace deltasync::delta
