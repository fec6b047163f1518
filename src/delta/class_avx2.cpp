// AVX2 and BMI kernels of rice_class. The rules of kernel_avx2.cpp hold here too.
#include "delta/class_bmi.hpp"

namespace deltasync::delta {

namespace {

inline __m256i load256(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
inline void store256(void* to, __m256i x) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), x);
}
inline __m256i set_byte(unsigned x) {
  return _mm256_set1_epi8(static_cast<char>(x));
}

void exponents8(const std::byte* first, std::uint32_t elements, unsigned mantissa_bits, std::uint32_t base,
                std::uint8_t* out) {
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(mantissa_bits));
  const __m256i keep = set_byte(0x7FU >> mantissa_bits);
  std::uint32_t i = 0;
  for (; i + 32 <= elements; i += 32) {
    store256(out + i, _mm256_and_si256(_mm256_srl_epi16(load256(first + i), shift), keep));
  }
  exponents_scalar<std::uint8_t>(first + i, elements - i, mantissa_bits, base, out + i);
}

void exponents16(const std::byte* first, std::uint32_t elements, unsigned mantissa_bits, std::uint32_t base,
                 std::uint8_t* out) {
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(mantissa_bits));
  const __m256i magnitude = _mm256_set1_epi16(0x7FFF);
  const auto load = [&](std::uint32_t i) {
    return _mm256_srl_epi16(_mm256_and_si256(load256(first + std::size_t{i} * 2), magnitude), shift);
  };
  std::uint32_t i = 0;
  for (; i + 32 <= elements; i += 32) {
    // Packing takes 128 bits of the one and the other in turn.
    store256(out + i, _mm256_permute4x64_epi64(_mm256_packus_epi16(load(i), load(i + 16)), 0xD8));
  }
  exponents_scalar<std::uint16_t>(first + std::size_t{i} * 2, elements - i, mantissa_bits, base, out + i);
}

void exponents32(const std::byte* first, std::uint32_t elements, unsigned mantissa_bits, std::uint32_t base,
                 std::uint8_t* out) {
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(mantissa_bits));
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const auto load = [&](std::uint32_t i) {
    return _mm256_srl_epi32(_mm256_and_si256(load256(first + std::size_t{i} * 4), magnitude), shift);
  };
  std::uint32_t i = 0;
  for (; i + 32 <= elements; i += 32) {
    const __m256i low = _mm256_packs_epi32(load(i), load(i + 8));
    const __m256i high = _mm256_packs_epi32(load(i + 16), load(i + 24));
    store256(out + i, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order));
  }
  exponents_scalar<std::uint32_t>(first + std::size_t{i} * 4, elements - i, mantissa_bits, base, out + i);
}

/// Ones in 32 bytes that are 0 or −1 each, summed over up to 255 vectors.
template <class Equal>
std::uint32_t count_equal(const std::uint8_t* exponents, std::uint32_t vectors, const Equal& equal) {
  __m256i sum = _mm256_setzero_si256();
  for (std::uint32_t v = 0; v < vectors;) {
    const std::uint32_t end = vectors - v > 255 ? v + 255 : vectors;
    __m256i bytes = _mm256_setzero_si256();
    for (; v < end; ++v) bytes = _mm256_sub_epi8(bytes, equal(load256(exponents + std::size_t{v} * 32)));
    sum = _mm256_add_epi64(sum, _mm256_sad_epu8(bytes, _mm256_setzero_si256()));
  }
  const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si64(half) + _mm_extract_epi64(half, 1));
}

/// One pass for each exponent, as long as these are so few that a table of counts is slower.
void count_avx2(const std::uint8_t* exponents, std::uint32_t elements, unsigned lowest, unsigned top,
                std::uint32_t* counts) {
  constexpr unsigned kPassesMax = 40;
  if (top - lowest >= kPassesMax) {
    count_exponents_scalar(exponents, elements, lowest, top, counts);
    return;
  }
  const std::uint32_t vectors = elements / 32;
  const __m256i least = set_byte(lowest);
  counts[0] =
      count_equal(exponents, vectors, [&](__m256i x) { return _mm256_cmpeq_epi8(_mm256_min_epu8(x, least), x); });
  for (unsigned e = lowest + 1; e <= top; ++e) {
    const __m256i wanted = set_byte(e);
    counts[e - lowest] = count_equal(exponents, vectors, [&](__m256i x) { return _mm256_cmpeq_epi8(x, wanted); });
  }
  for (std::uint32_t i = vectors * 32; i < elements; ++i) {
    if (exponents[i] <= top) ++counts[exponents[i] < lowest ? 0 : exponents[i] - lowest];
  }
}

void mask_avx2(const std::uint8_t* exponents, std::uint32_t words, ExponentRange range, std::uint64_t* mask) {
  const __m256i low = set_byte(range.low);
  const __m256i width = set_byte(static_cast<unsigned>(range.high - range.low));
  const auto inside = [&](std::uint32_t i) {
    const __m256i above = _mm256_sub_epi8(load256(exponents + i), low);
    const __m256i yes = _mm256_cmpeq_epi8(_mm256_min_epu8(above, width), above);
    return static_cast<std::uint32_t>(_mm256_movemask_epi8(yes));
  };
  for (std::uint32_t w = 0; w < words; ++w) {
    mask[w] = inside(w * 64) | static_cast<std::uint64_t>(inside(w * 64 + 32)) << 32;
  }
}

}  // namespace

ClassKernels avx2_class_kernels() {
  return {
      .exponents = {exponents8, exponents16, exponents32, exponents_scalar<std::uint64_t>},
      .count = count_avx2,
      .mask = mask_avx2,
      .gaps = gaps_in_mask,
      .select = select_bmi,
  };
}

}  // namespace deltasync::delta
