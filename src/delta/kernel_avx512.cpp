// AVX-512 kernels (F, BW, DQ, VL, VBMI2). The rules of kernel_avx2.cpp hold here too.
#include <immintrin.h>

#include "delta/kernel_scalar.hpp"

namespace deltasync::delta {

namespace {

inline __m512i set_all(std::uint64_t x) {
  return _mm512_set1_epi64(static_cast<long long>(x));
}

inline __m512i mix_lanes(__m512i x) {
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)), set_all(kMixFirst));
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), set_all(kMixSecond));
  return _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
}

/// Modulo 2^64. _mm512_reduce_add_epi64 adds signed numbers in g++'s header, so that wrapping would be undefined.
inline std::uint64_t sum_lanes(__m512i x) {
  alignas(64) std::uint64_t lanes[8];
  _mm512_store_si512(lanes, x);
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

/// (index + 1) · kDigestStep of eight words from `index` on.
inline __m512i offsets_from(std::uint64_t index) {
  const __m512i lanes = _mm512_setr_epi64(1, 2, 3, 4, 5, 6, 7, 8);
  return _mm512_mullo_epi64(_mm512_add_epi64(lanes, set_all(index)), set_all(kDigestStep));
}

/// The first `bytes` ≤ 64 bytes, zero-padded.
inline __m512i load_part(const std::byte* from, std::size_t bytes) {
  return _mm512_maskz_loadu_epi8(bytes >= 64 ? ~__mmask64{0} : (__mmask64{1} << bytes) - 1, from);
}

std::uint64_t digest_run_avx512(const std::byte* bytes, std::size_t size, std::uint64_t word) {
  const __m512i advance = set_all(8 * kDigestStep);
  __m512i offsets = offsets_from(word);
  __m512i sum = _mm512_setzero_si512();
  __m512i other = sum;
  std::size_t at = 0;
  for (; at + 128 <= size; at += 128) {
    const __m512i next = _mm512_add_epi64(offsets, advance);
    sum = _mm512_add_epi64(sum, mix_lanes(_mm512_add_epi64(_mm512_loadu_si512(bytes + at), offsets)));
    other = _mm512_add_epi64(other, mix_lanes(_mm512_add_epi64(_mm512_loadu_si512(bytes + at + 64), next)));
    offsets = _mm512_add_epi64(next, advance);
  }
  for (; at < size; at += 64) {
    const std::size_t left = size - at;
    const __m512i mixed = mix_lanes(_mm512_add_epi64(load_part(bytes + at, left), offsets));
    const auto words = static_cast<__mmask8>(left >= 64 ? 0xFF : (1U << ((left + 7) / 8)) - 1);
    sum = _mm512_mask_add_epi64(sum, words, sum, mixed);
    offsets = _mm512_add_epi64(offsets, advance);
  }
  return sum_lanes(_mm512_add_epi64(sum, other));
}

std::uint64_t digest_pairs_avx512(const std::uint64_t* before, const std::uint64_t* after, const std::uint32_t* words,
                                  std::uint32_t count) {
  __m512i sum = _mm512_setzero_si512();
  for (std::uint32_t i = 0; i < count; i += 8) {
    const auto lanes = static_cast<__mmask8>(count - i >= 8 ? 0xFF : (1U << (count - i)) - 1);
    const __m512i index = _mm512_cvtepu32_epi64(_mm256_maskz_loadu_epi32(lanes, words + i));
    const __m512i offset = _mm512_mullo_epi64(_mm512_add_epi64(index, set_all(1)), set_all(kDigestStep));
    const __m512i new_mix = mix_lanes(_mm512_add_epi64(_mm512_maskz_loadu_epi64(lanes, after + i), offset));
    const __m512i old_mix = mix_lanes(_mm512_add_epi64(_mm512_maskz_loadu_epi64(lanes, before + i), offset));
    sum = _mm512_add_epi64(sum, _mm512_sub_epi64(new_mix, old_mix));  // both mixes of a lane left out are equal
  }
  return sum_lanes(sum);
}

// ---- scan ------------------------------------------------------------------------------------------------------

/// A compare mask, widened. g++ 12 merges a compare with the widening of its mask, and may then spill the narrow mask
/// register but load all 64 bits back; so the widening is an instruction that it cannot see through.
template <class M>
inline std::uint64_t bits_of(M mask) {
  std::uint64_t bits = 0;
  if constexpr (sizeof(M) == 1) asm("kmovb %1, %k0" : "=r"(bits) : "k"(mask));
  if constexpr (sizeof(M) == 2) asm("kmovw %1, %k0" : "=r"(bits) : "k"(mask));
  if constexpr (sizeof(M) == 4) asm("kmovd %1, %k0" : "=r"(bits) : "k"(mask));
  if constexpr (sizeof(M) == 8) bits = mask;
  return bits;
}

/// What differs between element widths: the compare mask, the difference and the compressing store.
template <std::size_t kBytes>
struct Lanes;

template <>
struct Lanes<1> {
  static std::uint64_t differ(__m512i a, __m512i b) { return bits_of(_mm512_cmpneq_epi8_mask(a, b)); }
  static __m512i subtract(__m512i a, __m512i b) { return _mm512_sub_epi8(a, b); }
  static __m512i map(__m512i x) {
    const __mmask64 negative = _mm512_movepi8_mask(x);
    return _mm512_xor_si512(x, _mm512_maskz_mov_epi8(negative, _mm512_set1_epi8(0x7F)));
  }
  static __m512i compress(std::uint64_t mask, __m512i x) { return _mm512_maskz_compress_epi8(mask, x); }
  static void store_positions(std::uint64_t mask, std::uint32_t position, std::uint16_t* out) {
    const auto low = static_cast<__mmask32>(mask);
    const auto high = static_cast<__mmask32>(mask >> 32);
    const __m512i first = _mm512_add_epi16(kIota16(), _mm512_set1_epi16(static_cast<short>(position)));
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(32));
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi16(low, first));
    _mm512_storeu_si512(out + _mm_popcnt_u32(low), _mm512_maskz_compress_epi16(high, second));
  }
  static __m512i kIota16() {
    return _mm512_cvtepu8_epi16(_mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19,
                                                 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31));
  }
};

template <>
struct Lanes<2> {
  static std::uint64_t differ(__m512i a, __m512i b) { return bits_of(_mm512_cmpneq_epi16_mask(a, b)); }
  static __m512i subtract(__m512i a, __m512i b) { return _mm512_sub_epi16(a, b); }
  static __m512i map(__m512i x) { return _mm512_xor_si512(x, _mm512_srli_epi16(_mm512_srai_epi16(x, 15), 1)); }
  static __m512i compress(std::uint64_t mask, __m512i x) {
    return _mm512_maskz_compress_epi16(static_cast<__mmask32>(mask), x);
  }
  static void store_positions(std::uint64_t mask, std::uint32_t position, std::uint16_t* out) {
    const __m512i lanes = _mm512_add_epi16(Lanes<1>::kIota16(), _mm512_set1_epi16(static_cast<short>(position)));
    _mm512_storeu_si512(out, compress(mask, lanes));
  }
};

template <>
struct Lanes<4> {
  static std::uint64_t differ(__m512i a, __m512i b) { return bits_of(_mm512_cmpneq_epi32_mask(a, b)); }
  static __m512i subtract(__m512i a, __m512i b) { return _mm512_sub_epi32(a, b); }
  static __m512i map(__m512i x) { return _mm512_xor_si512(x, _mm512_srli_epi32(_mm512_srai_epi32(x, 31), 1)); }
  static __m512i compress(std::uint64_t mask, __m512i x) {
    return _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), x);
  }
  static void store_positions(std::uint64_t mask, std::uint32_t position, std::uint16_t* out) {
    const __m256i lanes =
        _mm256_add_epi16(_mm512_castsi512_si256(Lanes<1>::kIota16()), _mm256_set1_epi16(static_cast<short>(position)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm256_maskz_compress_epi16(static_cast<__mmask16>(mask), lanes));
  }
};

template <>
struct Lanes<8> {
  static std::uint64_t differ(__m512i a, __m512i b) { return bits_of(_mm512_cmpneq_epi64_mask(a, b)); }
  static __m512i subtract(__m512i a, __m512i b) { return _mm512_sub_epi64(a, b); }
  static __m512i map(__m512i x) { return _mm512_xor_si512(x, _mm512_srli_epi64(_mm512_srai_epi64(x, 63), 1)); }
  static __m512i compress(std::uint64_t mask, __m512i x) {
    return _mm512_maskz_compress_epi64(static_cast<__mmask8>(mask), x);
  }
  static void store_positions(std::uint64_t mask, std::uint32_t position, std::uint16_t* out) {
    const __m128i lanes =
        _mm_add_epi16(_mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7), _mm_set1_epi16(static_cast<short>(position)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_maskz_compress_epi16(static_cast<__mmask8>(mask), lanes));
  }
};

/// Changed words waiting to be mixed, eight at a time.
class PendingWords {
 public:
  void add(__mmask8 changed, __m512i before, __m512i after, __m512i offsets) {
    _mm512_storeu_si512(before_ + count_, _mm512_maskz_compress_epi64(changed, before));
    _mm512_storeu_si512(after_ + count_, _mm512_maskz_compress_epi64(changed, after));
    _mm512_storeu_si512(offsets_ + count_, _mm512_maskz_compress_epi64(changed, offsets));
    count_ += static_cast<unsigned>(_mm_popcnt_u32(static_cast<unsigned>(bits_of(changed))));
  }
  /// Σ mix(after) − Σ mix(before) of all that was added; empties it.
  std::uint64_t drain() {
    __m512i sum = _mm512_setzero_si512();
    for (unsigned i = 0; i < count_; i += 8) {
      const __m512i offset = _mm512_loadu_si512(offsets_ + i);
      const __m512i new_mix = mix_lanes(_mm512_add_epi64(_mm512_loadu_si512(after_ + i), offset));
      const __m512i old_mix = mix_lanes(_mm512_add_epi64(_mm512_loadu_si512(before_ + i), offset));
      const auto lanes = static_cast<__mmask8>(count_ - i >= 8 ? 0xFF : (1U << (count_ - i)) - 1);
      sum = _mm512_mask_add_epi64(sum, lanes, sum, _mm512_sub_epi64(new_mix, old_mix));
    }
    count_ = 0;
    return sum_lanes(sum);
  }
  static constexpr unsigned kVectors = 32;

 private:
  alignas(64) std::uint64_t before_[kVectors * 8 + 8];
  alignas(64) std::uint64_t after_[kVectors * 8 + 8];
  alignas(64) std::uint64_t offsets_[kVectors * 8 + 8];
  unsigned count_ = 0;
};

/// How far ahead the scan asks for memory: the hardware's own prefetch pauses while changed vectors are looked at, and
/// stops at the end of each small page. Into the second cache, which can wait for more lines at a time than the first.
constexpr std::size_t kPrefetchBytes = 8192;

/// A run of vectors is compared first, which lists the changed ones without a branch; then only those are looked at,
/// while they are in the nearest cache.
template <class U, bool kFloat>
class Scanner {
 public:
  Scanner(std::uint32_t first_position, std::uint64_t first_word, ScanOutput& out)
      : position_(first_position), word_offsets_(offsets_from(first_word)), out_(out) {}

  void block(const std::byte* before, const std::byte* after, std::uint32_t vectors) {
    std::uint8_t changed[PendingWords::kVectors];
    std::uint32_t count = 0;
    for (std::uint32_t v = 0; v < vectors; ++v) {
      _mm_prefetch(reinterpret_cast<const char*>(before + v * 64 + kPrefetchBytes), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(after + v * 64 + kPrefetchBytes), _MM_HINT_T1);
      const __mmask8 differs =
          _mm512_cmpneq_epi64_mask(_mm512_loadu_si512(before + v * 64), _mm512_loadu_si512(after + v * 64));
      changed[count] = static_cast<std::uint8_t>(v);
      count += differs != 0 ? 1 : 0;
    }
    for (std::uint32_t c = 0; c < count; ++c) {
      const std::uint32_t v = changed[c];
      vector(_mm512_loadu_si512(before + v * 64), _mm512_loadu_si512(after + v * 64), v);
    }
    out_.digest_change += pending_.drain();
    position_ += vectors * kElements;
    word_offsets_ = _mm512_add_epi64(word_offsets_, set_all(vectors * 8 * kDigestStep));
  }
  void tail(const std::byte* before, const std::byte* after, std::size_t size) {
    vector(load_part(before, size), load_part(after, size), 0);
    out_.digest_change += pending_.drain();
  }

 private:
  static constexpr std::uint32_t kElements = 64 / sizeof(U);

  void vector(__m512i before, __m512i after, std::uint32_t v) {
    using L = Lanes<sizeof(U)>;
    const std::uint64_t mask = L::differ(before, after);
    const __m512i diff = kFloat ? L::subtract(L::map(after), L::map(before)) : L::subtract(after, before);
    L::store_positions(mask, position_ + v * kElements, out_.positions + out_.count);
    _mm512_storeu_si512(out_.diffs + std::size_t{out_.count} * sizeof(U), L::compress(mask, diff));
    out_.count += static_cast<std::uint32_t>(_mm_popcnt_u64(mask));
    pending_.add(_mm512_cmpneq_epi64_mask(before, after), before, after,
                 _mm512_add_epi64(word_offsets_, set_all(v * 8 * kDigestStep)));
  }

  std::uint32_t position_;
  __m512i word_offsets_;
  ScanOutput& out_;
  PendingWords pending_;
};

template <class U, bool kFloat>
void scan_avx512(const std::byte* before, const std::byte* after, std::uint32_t elements, std::uint32_t first_position,
                 std::uint64_t first_word, ScanOutput& out) {
  Scanner<U, kFloat> scanner(first_position, first_word, out);
  const std::size_t size = std::size_t{elements} * sizeof(U);
  std::size_t at = 0;
  while (size - at >= 64) {
    const std::size_t left = (size - at) / 64;
    const auto vectors = static_cast<std::uint32_t>(left < PendingWords::kVectors ? left : PendingWords::kVectors);
    scanner.block(before + at, after + at, vectors);
    at += std::size_t{vectors} * 64;
  }
  if (at < size) scanner.tail(before + at, after + at, size - at);
}

// ---- planes ----------------------------------------------------------------------------------------------------

void gaps_avx512(const std::uint16_t* positions, std::uint32_t count, std::uint16_t* gaps) {
  if (count == 0) return;
  gaps[0] = positions[0];
  const __m512i one = _mm512_set1_epi16(1);
  for (std::uint32_t i = 1; i < count; i += 32) {
    const __mmask32 lanes = count - i >= 32 ? ~__mmask32{0} : (__mmask32{1} << (count - i)) - 1;
    const __m512i here = _mm512_maskz_loadu_epi16(lanes, positions + i);
    const __m512i last = _mm512_maskz_loadu_epi16(lanes, positions + i - 1);
    _mm512_mask_storeu_epi16(gaps + i, lanes, _mm512_sub_epi16(_mm512_sub_epi16(here, last), one));
  }
}

std::uint64_t quotient_sum_avx512(const std::uint16_t* gaps, std::uint32_t count, unsigned k) {
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(k));
  __m512i sum = _mm512_setzero_si512();
  for (std::uint32_t i = 0; i < count; i += 32) {
    const __mmask32 lanes = count - i >= 32 ? ~__mmask32{0} : (__mmask32{1} << (count - i)) - 1;
    const __m512i q = _mm512_srl_epi16(_mm512_maskz_loadu_epi16(lanes, gaps + i), shift);
    const __m512i pairs = _mm512_add_epi32(_mm512_and_si512(q, _mm512_set1_epi32(0xFFFF)), _mm512_srli_epi32(q, 16));
    sum = _mm512_add_epi32(sum, pairs);  // gaps of a tile add up to less than 2^16: no lane overflows
  }
  return static_cast<std::uint32_t>(_mm512_reduce_add_epi32(sum));
}

template <class U>
struct SignLanes;
template <>
struct SignLanes<std::uint8_t> {
  static std::uint64_t negative(__m512i d) { return bits_of(_mm512_movepi8_mask(d)); }
  static std::uint64_t exception(__m512i d) {
    return bits_of(_mm512_cmpneq_epi8_mask(_mm512_abs_epi8(d), _mm512_set1_epi8(1)));
  }
};
template <>
struct SignLanes<std::uint16_t> {
  static std::uint64_t negative(__m512i d) { return bits_of(_mm512_movepi16_mask(d)); }
  static std::uint64_t exception(__m512i d) {
    return bits_of(_mm512_cmpneq_epi16_mask(_mm512_abs_epi16(d), _mm512_set1_epi16(1)));
  }
};
template <>
struct SignLanes<std::uint32_t> {
  static std::uint64_t negative(__m512i d) { return bits_of(_mm512_movepi32_mask(d)); }
  static std::uint64_t exception(__m512i d) {
    return bits_of(_mm512_cmpneq_epi32_mask(_mm512_abs_epi32(d), _mm512_set1_epi32(1)));
  }
};
template <>
struct SignLanes<std::uint64_t> {
  static std::uint64_t negative(__m512i d) { return bits_of(_mm512_movepi64_mask(d)); }
  static std::uint64_t exception(__m512i d) {
    return bits_of(_mm512_cmpneq_epi64_mask(_mm512_abs_epi64(d), set_all(1)));
  }
};

template <class U>
SignSplit split_signs_avx512(const std::byte* diffs, std::uint32_t count, std::byte* signs, std::uint16_t* exceptions) {
  constexpr std::uint32_t kElements = 64 / sizeof(U);
  SignSplit out;
  std::uint32_t i = 0;
  for (; i + kElements <= count; i += kElements) {
    const __m512i d = _mm512_loadu_si512(diffs + std::size_t{i} * sizeof(U));
    store_raw(signs + i / 8, SignLanes<U>::negative(d));  // 8 bytes; the next vector overwrites what is too much
    for (std::uint64_t left = SignLanes<U>::exception(d); left != 0; left &= left - 1) {
      const std::uint32_t at = i + static_cast<std::uint32_t>(__builtin_ctzll(left));
      exceptions[out.exceptions++] = static_cast<std::uint16_t>(at);
      out.gamma_bits += log2_floor(magnitude(load_raw<U>(diffs + std::size_t{at} * sizeof(U))));
    }
  }
  split_signs_tail<U>(diffs, i, count, signs, exceptions, out);
  return out;
}

}  // namespace

const Kernels& avx512_kernels() {
  // pext and pdep are as fast as anything for packing; those two are shared with AVX2.
  static const Kernels kKernels{
      .name = "avx512",
      .scan = {{scan_avx512<std::uint8_t, false>, scan_avx512<std::uint8_t, true>},
               {scan_avx512<std::uint16_t, false>, scan_avx512<std::uint16_t, true>},
               {scan_avx512<std::uint32_t, false>, scan_avx512<std::uint32_t, true>},
               {scan_avx512<std::uint64_t, false>, scan_avx512<std::uint64_t, true>}},
      .digest_run = digest_run_avx512,
      .digest_pairs = digest_pairs_avx512,
      .gaps = gaps_avx512,
      .quotient_sum = quotient_sum_avx512,
      .pack_low = avx2_kernels().pack_low,
      .unpack_low = avx2_kernels().unpack_low,
      .split_signs = {split_signs_avx512<std::uint8_t>, split_signs_avx512<std::uint16_t>,
                      split_signs_avx512<std::uint32_t>, split_signs_avx512<std::uint64_t>},
      .decode = avx512_decode_kernels(),
      .classes = avx512_class_kernels(),
      .dense = avx512_dense_kernels(),
  };
  return kKernels;
}

}  // namespace deltasync::delta
