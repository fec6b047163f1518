// AVX-512 kernels of the decoder (F, BW, DQ, VL, VBMI, VBMI2). The rules of kernel_avx2.cpp hold here too.
#include "delta/avx512.hpp"
#include "delta/decode_scalar.hpp"

namespace deltasync::delta {

namespace {

// ---- positions -------------------------------------------------------------------------------------------------

/// Lists the set bits of a plane, modulo 2^16. Returns the last one, exactly.
std::uint64_t list_ones(const std::byte* plane, std::size_t size, std::uint16_t* ones) {
  std::uint64_t last = 0;
  const __m512i first_half = iota16();
  const __m512i second_half = _mm512_add_epi16(first_half, _mm512_set1_epi16(32));
  for (std::size_t at = 0; at < size; at += 8) {
    const std::uint64_t word = plane_word(plane, at, size);
    const __m512i base = _mm512_set1_epi16(static_cast<short>(at * 8));
    const auto low = static_cast<__mmask32>(word);
    const auto high = static_cast<__mmask32>(word >> 32);
    _mm512_storeu_si512(ones, _mm512_add_epi16(_mm512_maskz_compress_epi16(low, first_half), base));
    ones += _mm_popcnt_u32(low);
    _mm512_storeu_si512(ones, _mm512_add_epi16(_mm512_maskz_compress_epi16(high, second_half), base));
    ones += _mm_popcnt_u32(high);
    if (word != 0) last = at * 8 + log2_floor(word);
  }
  return last;
}

/// Thirty-two fields of k bits at a time: each is inside the 32 bits from its first byte on, the two halves of which
/// are put beside each other.
class LowBits {
 public:
  explicit LowBits(unsigned k)
      : stride_(std::size_t{4} * k), mask_(_mm512_set1_epi16(static_cast<short>((1U << k) - 1))) {
    const __m512i bit = _mm512_mullo_epi16(iota16(), _mm512_set1_epi16(static_cast<short>(k)));
    const __m512i byte = _mm512_srli_epi16(bit, 3);
    low_bytes_ = _mm512_or_si512(byte, _mm512_slli_epi16(_mm512_add_epi16(byte, _mm512_set1_epi16(1)), 8));
    high_bytes_ = _mm512_add_epi8(low_bytes_, _mm512_set1_epi8(2));
    shift_ = _mm512_and_si512(bit, _mm512_set1_epi16(7));
  }
  /// Fields 32 · `block` and on; reads 64 bytes.
  __m512i load(const std::byte* plane, std::size_t block) const {
    const __m512i bytes = _mm512_loadu_si512(plane + block * stride_);
    const __m512i low = _mm512_permutexvar_epi8(low_bytes_, bytes);
    const __m512i high = _mm512_permutexvar_epi8(high_bytes_, bytes);
    return _mm512_and_si512(_mm512_shrdv_epi16(low, high, shift_), mask_);
  }

 private:
  std::size_t stride_;
  __m512i mask_;
  __m512i low_bytes_;
  __m512i high_bytes_;
  __m512i shift_;
};

/// Each 16-bit lane, and all before it.
class PrefixSum {
 public:
  __m512i operator()(__m512i x) const {
    x = _mm512_add_epi16(x, _mm512_bslli_epi128(x, 2));
    x = _mm512_add_epi16(x, _mm512_bslli_epi128(x, 4));
    x = _mm512_add_epi16(x, _mm512_bslli_epi128(x, 8));
    x = _mm512_add_epi16(x, _mm512_maskz_permutexvar_epi16(0xFF00FF00, before_odd_, x));
    return _mm512_add_epi16(x, _mm512_maskz_permutexvar_epi16(0xFFFF0000, _mm512_set1_epi16(15), x));
  }

 private:
  /// The last lane of the 128 bits before, for the second and the fourth 128 bits.
  const __m512i before_odd_ = _mm512_mask_mov_epi16(_mm512_set1_epi16(7), 0xFFFF0000, _mm512_set1_epi16(23));
};

std::uint64_t positions_avx512(const std::byte* lows, const std::byte* quotients, std::size_t size, unsigned k,
                               std::uint32_t count, std::uint16_t* positions) {
  const std::uint64_t last_stop = list_ones(quotients, size, positions);
  const LowBits low_bits(k);
  const PrefixSum prefix_sum;
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(k));
  const __m512i one = _mm512_set1_epi16(1);
  __m512i index = iota16();
  __m512i before = _mm512_setzero_si512();  // sum of the low bits of all blocks before, in every lane
  __m512i exact = before;                   // the same in 32 bits, spread over the lanes
  for (std::uint32_t i = 0; i < count; i += 32) {
    const __mmask32 lanes = count - i >= 32 ? ~__mmask32{0} : (__mmask32{1} << (count - i)) - 1;
    const __m512i low = _mm512_maskz_mov_epi16(lanes, low_bits.load(lows, i / 32));
    exact = _mm512_add_epi32(exact, _mm512_madd_epi16(low, one));  // k ≤ 15: no lane is negative
    const __m512i sum = _mm512_add_epi16(prefix_sum(low), before);
    before = _mm512_permutexvar_epi16(_mm512_set1_epi16(31), sum);
    // The zeros before stop bit i are the sum of the quotients up to i.
    const __m512i zeros = _mm512_sub_epi16(_mm512_loadu_si512(positions + i), index);
    const __m512i position = _mm512_add_epi16(_mm512_add_epi16(_mm512_sll_epi16(zeros, shift), sum), index);
    _mm512_storeu_si512(positions + i, position);
    index = _mm512_add_epi16(index, _mm512_set1_epi16(32));
  }
  const __m512i pairs = _mm512_add_epi64(_mm512_and_si512(exact, set_all(0xFFFFFFFF)), _mm512_srli_epi64(exact, 32));
  return ((last_stop - (count - 1)) << k) + sum_lanes(pairs) + (count - 1);
}

// ---- values ----------------------------------------------------------------------------------------------------

template <class U>
void unit_values_avx512(const std::byte* signs, std::uint32_t count, std::byte* values) {
  constexpr std::uint32_t kElements = 64 / sizeof(U);
  for (std::uint32_t i = 0; i < count; i += kElements, values += 64) {
    const auto negative = load_raw<std::uint64_t>(signs + i / 8);
    __m512i ones;
    if constexpr (sizeof(U) == 1) {
      ones = _mm512_mask_mov_epi8(_mm512_set1_epi8(1), negative, _mm512_set1_epi8(-1));
    } else if constexpr (sizeof(U) == 2) {
      ones = _mm512_mask_mov_epi16(_mm512_set1_epi16(1), static_cast<__mmask32>(negative), _mm512_set1_epi16(-1));
    } else if constexpr (sizeof(U) == 4) {
      ones = _mm512_mask_mov_epi32(_mm512_set1_epi32(1), static_cast<__mmask16>(negative), _mm512_set1_epi32(-1));
    } else {
      ones = _mm512_mask_mov_epi64(_mm512_set1_epi64(1), static_cast<__mmask8>(negative), _mm512_set1_epi64(-1));
    }
    _mm512_storeu_si512(values, ones);
  }
}

// ---- new elements and their digest -----------------------------------------------------------------------------

/// Eight elements in the low ends of 64-bit lanes, to and from memory; lanes that are left out are not touched.
template <std::size_t kBytes>
inline __m512i load_elements(__mmask8 lanes, const std::byte* from) {
  if constexpr (kBytes == 1) return _mm512_cvtepu8_epi64(_mm_maskz_loadu_epi8(lanes, from));
  if constexpr (kBytes == 2) return _mm512_cvtepu16_epi64(_mm_maskz_loadu_epi16(lanes, from));
  if constexpr (kBytes == 4) return _mm512_cvtepu32_epi64(_mm256_maskz_loadu_epi32(lanes, from));
  return _mm512_maskz_loadu_epi64(lanes, from);
}
template <std::size_t kBytes>
inline void store_elements(__mmask8 lanes, std::byte* to, __m512i x) {
  if constexpr (kBytes == 1) _mm512_mask_cvtepi64_storeu_epi8(to, lanes, x);
  if constexpr (kBytes == 2) _mm512_mask_cvtepi64_storeu_epi16(to, lanes, x);
  if constexpr (kBytes == 4) _mm512_mask_cvtepi64_storeu_epi32(to, lanes, x);
  if constexpr (kBytes == 8) _mm512_mask_storeu_epi64(to, lanes, x);
}

/// new_element in the low w bits of each lane; what is above is of no use.
template <class U, ValueKind kKind>
inline __m512i new_elements(__m512i old, __m512i value) {
  if constexpr (kKind == ValueKind::element) return value;
  if constexpr (kKind == ValueKind::difference) return _mm512_add_epi64(old, value);
  constexpr unsigned kBits = sizeof(U) * 8;
  const __m512i sign = set_all(std::uint64_t{1} << (kBits - 1));
  const __m512i rest = set_all((std::uint64_t{1} << (kBits - 1)) - 1);
  const auto map = [&](__m512i x) { return _mm512_mask_xor_epi64(x, _mm512_test_epi64_mask(x, sign), x, rest); };
  return map(_mm512_add_epi64(map(old), value));
}

/// One lane for each changed element. Of elements that share a word, each adds the step from the word as the elements
/// before it leave it to the word with its own change too; the steps of a word add up to its whole change.
template <class U, ValueKind kKind>
class Resolver {
 public:
  void add(__mmask8 lanes, const std::uint64_t* before, const std::uint16_t* positions, std::byte* values) {
    constexpr std::size_t kBytes = sizeof(U);
    constexpr unsigned kLanesLog2 = 3 - kBytesLog2;
    const __m512i position = _mm512_cvtepu16_epi64(_mm_maskz_loadu_epi16(lanes, positions));
    const __m512i word = _mm512_srli_epi64(position, kLanesLog2);
    const __m512i lane = _mm512_and_si512(position, set_all((1U << kLanesLog2) - 1));
    const __m512i shift = _mm512_slli_epi64(lane, 3 + kBytesLog2);
    const __m512i old_word = _mm512_maskz_loadu_epi64(lanes, before);
    const __m512i old = _mm512_srlv_epi64(old_word, shift);
    const __m512i element = new_elements<U, kKind>(old, load_elements<kBytes>(lanes, values));
    if (kKind != ValueKind::element) store_elements<kBytes>(lanes, values, element);
    const __m512i flipped = _mm512_and_si512(_mm512_xor_si512(old, element), set_all(static_cast<U>(~U{0})));
    const __m512i own = _mm512_sllv_epi64(flipped, shift);
    const __m512i through = xor_within_words(own, word);
    const __m512i offset = _mm512_mullo_epi64(_mm512_add_epi64(word, set_all(1)), set_all(kDigestStep));
    const __m512i after = _mm512_xor_si512(old_word, through);
    const __m512i step = _mm512_sub_epi64(mix_lanes(_mm512_add_epi64(after, offset)),
                                          mix_lanes(_mm512_add_epi64(_mm512_xor_si512(after, own), offset)));
    sum_ = _mm512_mask_add_epi64(sum_, lanes, sum_, step);
    last_word_ = word;
  }
  std::uint64_t sum() const { return sum_lanes(sum_); }

 private:
  static constexpr unsigned kBytesLog2 = sizeof(U) == 1 ? 0 : sizeof(U) == 2 ? 1 : sizeof(U) == 4 ? 2 : 3;

  /// x of the lanes of the same word up to this one. The lanes of a word follow each other, and may have begun in the
  /// vector before: so doubling the reach a few times, with what each step had there, covers the 8 / sizeof(U) of them.
  __m512i xor_within_words(__m512i x, __m512i word) {
    if constexpr (kBytesLog2 < 3) x = reach<1>(x, word, last_[0]);
    if constexpr (kBytesLog2 < 2) x = reach<2>(x, word, last_[1]);
    if constexpr (kBytesLog2 < 1) x = reach<4>(x, word, last_[2]);
    return x;
  }
  template <int kReach>
  __m512i reach(__m512i x, __m512i word, __m512i& last) const {
    const __m512i earlier = _mm512_alignr_epi64(x, last, 8 - kReach);
    const __mmask8 same = _mm512_cmpeq_epi64_mask(word, _mm512_alignr_epi64(word, last_word_, 8 - kReach));
    last = x;
    return _mm512_mask_xor_epi64(x, same, x, earlier);
  }

  __m512i sum_ = _mm512_setzero_si512();
  __m512i last_word_ = _mm512_set1_epi64(-1);
  __m512i last_[3] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
};

template <class U, ValueKind kKind>
std::uint64_t resolve_avx512(const std::uint64_t* before, const std::uint16_t* positions, std::byte* values,
                             std::uint32_t count) {
  Resolver<U, kKind> resolver;
  std::uint32_t i = 0;
  for (; i + 8 <= count; i += 8) resolver.add(0xFF, before + i, positions + i, values + std::size_t{i} * sizeof(U));
  if (i < count) {
    const auto lanes = static_cast<__mmask8>((1U << (count - i)) - 1);
    resolver.add(lanes, before + i, positions + i, values + std::size_t{i} * sizeof(U));
  }
  return resolver.sum();
}

struct Isa {
  static constexpr auto positions = positions_avx512;
  template <class U>
  static constexpr auto unit_values = unit_values_avx512<U>;
  template <class U, ValueKind kKind>
  static constexpr auto resolve = resolve_avx512<U, kKind>;
};

}  // namespace

DecodeKernels avx512_decode_kernels() {
  return decode_kernels<Isa>();
}

}  // namespace deltasync::delta
