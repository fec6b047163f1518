// AVX2 and BMI kernels of the decoder. The rules of kernel_avx2.cpp hold here too. The others are the scalar truth,
// compiled for a CPU that counts and finds bits in one instruction: that alone is worth a factor of two.
#include "delta/avx2.hpp"
#include "delta/decode_scalar.hpp"

namespace deltasync::delta {

namespace {

std::uint64_t positions_avx2(const std::byte* lows, const std::byte* quotients, std::size_t size, unsigned k,
                             std::uint32_t count, std::uint16_t* positions) {
  avx2_kernels().unpack_low(lows, count, k, positions);
  return positions_from_lows(quotients, size, k, positions);
}

// ---- values ----------------------------------------------------------------------------------------------------

/// A lane for each bit of `bits`, of as many as 32 bytes have: −1 where it is set, else 0.
template <class U>
inline __m256i spread_bits(std::uint32_t bits) {
  const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
  if constexpr (sizeof(U) == 1) {
    const __m256i byte_of_lane = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = set_all(0x8040201008040201);
    return _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(all, byte_of_lane), bit), bit);
  } else if constexpr (sizeof(U) == 2) {
    const __m256i bit = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
    return _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(static_cast<short>(bits)), bit), bit);
  } else if constexpr (sizeof(U) == 4) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(all, bit), bit);
  } else {
    const __m256i bit = _mm256_setr_epi64x(1, 2, 4, 8);
    return _mm256_cmpeq_epi64(_mm256_and_si256(all, bit), bit);
  }
}

template <class U>
void unit_values_avx2(const std::byte* signs, std::uint32_t count, std::byte* values) {
  constexpr std::uint32_t kElements = 32 / sizeof(U);
  __m256i one = set_all(1);
  if constexpr (sizeof(U) == 1) one = _mm256_set1_epi8(1);
  if constexpr (sizeof(U) == 2) one = _mm256_set1_epi16(1);
  if constexpr (sizeof(U) == 4) one = _mm256_set1_epi32(1);
  for (std::uint32_t i = 0; i < count; i += kElements, values += 32) {
    const std::uint32_t bits = load_raw<std::uint32_t>(signs + i / 8) >> (i % 8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), _mm256_or_si256(spread_bits<U>(bits), one));
  }
}

// ---- new elements and their digest -----------------------------------------------------------------------------

/// Four elements in the low ends of 64-bit lanes, to and from memory.
template <std::size_t kBytes>
inline __m256i load_elements(const std::byte* from) {
  if constexpr (kBytes == 1) return _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(load_raw<int>(from)));
  if constexpr (kBytes == 2) return _mm256_cvtepu16_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  if constexpr (kBytes == 4) return _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return load256(from);
}
template <std::size_t kBytes>
inline void store_elements(std::byte* to, __m256i x) {
  if constexpr (kBytes == 8) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
  } else if constexpr (kBytes == 4) {
    const __m256i front = _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(front));
  } else {
    const __m256i pairs =
        _mm256_shuffle_epi8(x, kBytes == 2 ? set_all(0x0909080809080100) : set_all(0x0808080808080800));
    const auto low = static_cast<std::uint32_t>(_mm256_extract_epi32(pairs, 0));
    const auto high = static_cast<std::uint32_t>(_mm256_extract_epi32(pairs, 4));
    if constexpr (kBytes == 2) {
      store_raw(to, std::uint64_t{high} << 32 | low);
    } else {
      store_raw(to, static_cast<std::uint32_t>((high & 0xFFFF) << 16 | (low & 0xFFFF)));
    }
  }
}

/// new_element in the low w bits of each lane; what is above is of no use.
template <class U, ValueKind kKind>
inline __m256i new_elements(__m256i old, __m256i value) {
  if constexpr (kKind == ValueKind::element) return value;
  if constexpr (kKind == ValueKind::difference) return _mm256_add_epi64(old, value);
  constexpr int kBits = sizeof(U) * 8;
  const __m256i rest = set_all((std::uint64_t{1} << (kBits - 1)) - 1);
  const auto map = [&](__m256i x) {
    const __m256i negative = _mm256_cmpgt_epi64(_mm256_setzero_si256(), _mm256_slli_epi64(x, 64 - kBits));
    return _mm256_xor_si256(x, _mm256_and_si256(negative, rest));
  };
  return map(_mm256_add_epi64(map(old), value));
}

/// The lanes that are kReach before those of x, of which the first are the last ones of `last`.
template <int kReach>
inline __m256i lanes_before(__m256i x, __m256i last) {
  if constexpr (kReach == 4) return last;
  const __m256i two = _mm256_permute2x128_si256(last, x, 0x21);
  if constexpr (kReach == 2) return two;
  return _mm256_alignr_epi8(x, two, 8);
}

/// One lane for each changed element, as in decode_avx512.cpp.
template <class U, ValueKind kKind>
class Resolver {
 public:
  /// `real`: −1 in the lanes that count.
  void add(__m256i real, const std::uint64_t* before, const std::uint16_t* positions, std::byte* values) {
    constexpr std::size_t kBytes = sizeof(U);
    constexpr int kLanesLog2 = 3 - kBytesLog2;
    const __m256i position = load_elements<2>(reinterpret_cast<const std::byte*>(positions));
    const __m256i word = _mm256_srli_epi64(position, kLanesLog2);
    const __m256i lane = _mm256_and_si256(position, set_all((1U << kLanesLog2) - 1));
    const __m256i shift = _mm256_slli_epi64(lane, 3 + kBytesLog2);
    const __m256i old_word = load256(before);
    const __m256i old = _mm256_srlv_epi64(old_word, shift);
    const __m256i element = new_elements<U, kKind>(old, load_elements<kBytes>(values));
    if (kKind != ValueKind::element) store_elements<kBytes>(values, element);
    const __m256i flipped = _mm256_and_si256(_mm256_xor_si256(old, element), set_all(static_cast<U>(~U{0})));
    const __m256i own = _mm256_sllv_epi64(flipped, shift);
    const __m256i after = _mm256_xor_si256(old_word, xor_within_words(own, word));
    const __m256i index = _mm256_add_epi64(word, set_all(1));  // of less than 32 bits
    const __m256i offset =
        _mm256_add_epi64(_mm256_mul_epu32(index, step_), _mm256_slli_epi64(_mm256_mul_epu32(index, step_high_), 32));
    const __m256i change = _mm256_sub_epi64(mixer_(_mm256_add_epi64(after, offset)),
                                            mixer_(_mm256_add_epi64(_mm256_xor_si256(after, own), offset)));
    sum_ = _mm256_add_epi64(sum_, _mm256_and_si256(change, real));
    last_word_ = word;
  }
  std::uint64_t sum() const { return sum_lanes(sum_); }

 private:
  static constexpr int kBytesLog2 = sizeof(U) == 1 ? 0 : sizeof(U) == 2 ? 1 : sizeof(U) == 4 ? 2 : 3;

  __m256i xor_within_words(__m256i x, __m256i word) {
    if constexpr (kBytesLog2 < 3) x = reach<1>(x, word, last_[0]);
    if constexpr (kBytesLog2 < 2) x = reach<2>(x, word, last_[1]);
    if constexpr (kBytesLog2 < 1) x = reach<4>(x, word, last_[2]);
    return x;
  }
  template <int kReach>
  __m256i reach(__m256i x, __m256i word, __m256i& last) const {
    const __m256i earlier = lanes_before<kReach>(x, last);
    const __m256i same = _mm256_cmpeq_epi64(word, lanes_before<kReach>(word, last_word_));
    last = x;
    return _mm256_xor_si256(x, _mm256_and_si256(earlier, same));
  }

  const Mixer mixer_{};
  const __m256i step_ = set_all(kDigestStep);
  const __m256i step_high_ = set_all(kDigestStep >> 32);
  __m256i sum_ = _mm256_setzero_si256();
  __m256i last_word_ = set_all(~std::uint64_t{0});
  __m256i last_[3] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
};

template <class U, ValueKind kKind>
std::uint64_t resolve_avx2(const std::uint64_t* before, const std::uint16_t* positions, std::byte* values,
                           std::uint32_t count) {
  Resolver<U, kKind> resolver;
  const __m256i all = set_all(~std::uint64_t{0});
  std::uint32_t i = 0;
  for (; i + 4 <= count; i += 4) {
    resolver.add(all, before + i, positions + i, values + std::size_t{i} * sizeof(U));
  }
  if (const std::uint32_t left = count - i; left != 0) {
    std::uint64_t words[4] = {};
    std::uint16_t places[4] = {};
    std::byte elements[4 * sizeof(U)] = {};
    std::byte* const rest = values + std::size_t{i} * sizeof(U);
    std::memcpy(words, before + i, left * sizeof(words[0]));
    std::memcpy(places, positions + i, left * sizeof(places[0]));
    std::memcpy(elements, rest, left * sizeof(U));
    resolver.add(_mm256_cmpgt_epi64(set_all(left), _mm256_setr_epi64x(0, 1, 2, 3)), words, places, elements);
    std::memcpy(rest, elements, left * sizeof(U));
  }
  return resolver.sum();
}

struct Isa {
  static constexpr auto positions = positions_avx2;
  template <class U>
  static constexpr auto unit_values = unit_values_avx2<U>;
  template <class U, ValueKind kKind>
  static constexpr auto resolve = resolve_avx2<U, kKind>;
};

}  // namespace

DecodeKernels avx2_decode_kernels() {
  return decode_kernels<Isa>();
}

}  // namespace deltasync::delta
