// AVX-512 kernels of rice_class (F, BW, VL). The rules of kernel_avx2.cpp hold here too. Compare masks are of 64 bytes
// throughout, so that none is widened (see bits_of in kernel_avx512.cpp).
#include "delta/class_bmi.hpp"

namespace deltasync::delta {

namespace {

inline __m512i set_byte(unsigned x) {
  return _mm512_set1_epi8(static_cast<char>(x));
}

void exponents8(const std::byte* first, std::uint32_t elements, unsigned mantissa_bits, std::uint32_t base,
                std::uint8_t* out) {
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(mantissa_bits));
  const __m512i keep = set_byte(0x7FU >> mantissa_bits);
  std::uint32_t i = 0;
  for (; i + 64 <= elements; i += 64) {
    const __m512i x = _mm512_srl_epi16(_mm512_loadu_si512(first + i), shift);
    _mm512_storeu_si512(out + i, _mm512_and_si512(x, keep));
  }
  exponents_scalar<std::uint8_t>(first + i, elements - i, mantissa_bits, base, out + i);
}

void exponents16(const std::byte* first, std::uint32_t elements, unsigned mantissa_bits, std::uint32_t base,
                 std::uint8_t* out) {
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(mantissa_bits));
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
  std::uint32_t i = 0;
  for (; i + 32 <= elements; i += 32) {
    const __m512i x = _mm512_and_si512(_mm512_loadu_si512(first + std::size_t{i} * 2), magnitude);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_cvtepi16_epi8(_mm512_srl_epi16(x, shift)));
  }
  exponents_scalar<std::uint16_t>(first + std::size_t{i} * 2, elements - i, mantissa_bits, base, out + i);
}

void exponents32(const std::byte* first, std::uint32_t elements, unsigned mantissa_bits, std::uint32_t base,
                 std::uint8_t* out) {
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(mantissa_bits));
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  std::uint32_t i = 0;
  for (; i + 16 <= elements; i += 16) {
    const __m512i x = _mm512_and_si512(_mm512_loadu_si512(first + std::size_t{i} * 4), magnitude);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtepi32_epi8(_mm512_srl_epi32(x, shift)));
  }
  exponents_scalar<std::uint32_t>(first + std::size_t{i} * 4, elements - i, mantissa_bits, base, out + i);
}

inline std::uint32_t ones(__mmask64 mask) {
  return static_cast<std::uint32_t>(_mm_popcnt_u64(mask));
}

/// Eight vectors at a time, which stay in registers, compared with each exponent, as long as these are so few that a
/// table of counts is slower.
void count_avx512(const std::uint8_t* exponents, std::uint32_t elements, unsigned lowest, unsigned top,
                  std::uint32_t* counts) {
  constexpr unsigned kComparesMax = 40;
  constexpr std::uint32_t kVectors = 8;
  if (top - lowest >= kComparesMax) {
    count_exponents_scalar(exponents, elements, lowest, top, counts);
    return;
  }
  for (unsigned e = lowest; e <= top; ++e) counts[e - lowest] = 0;
  std::uint32_t i = 0;
  for (; i + kVectors * 64 <= elements; i += kVectors * 64) {
    __m512i x[kVectors];
    for (std::uint32_t v = 0; v < kVectors; ++v) x[v] = _mm512_loadu_si512(exponents + i + v * 64);
    const __m512i least = set_byte(lowest);
    for (std::uint32_t v = 0; v < kVectors; ++v) counts[0] += ones(_mm512_cmple_epu8_mask(x[v], least));
    for (unsigned e = lowest + 1; e <= top; ++e) {
      const __m512i wanted = set_byte(e);
      std::uint32_t sum = 0;
      for (std::uint32_t v = 0; v < kVectors; ++v) sum += ones(_mm512_cmpeq_epi8_mask(x[v], wanted));
      counts[e - lowest] += sum;
    }
  }
  for (; i < elements; ++i) {
    if (exponents[i] <= top) ++counts[exponents[i] < lowest ? 0 : exponents[i] - lowest];
  }
}

void mask_avx512(const std::uint8_t* exponents, std::uint32_t words, ExponentRange range, std::uint64_t* mask) {
  const __m512i low = set_byte(range.low);
  const __m512i width = set_byte(static_cast<unsigned>(range.high - range.low));
  for (std::uint32_t w = 0; w < words; ++w) {
    const __m512i above = _mm512_sub_epi8(_mm512_loadu_si512(exponents + std::size_t{w} * 64), low);
    mask[w] = _mm512_cmple_epu8_mask(above, width);
  }
}

}  // namespace

ClassKernels avx512_class_kernels() {
  return {
      .exponents = {exponents8, exponents16, exponents32, exponents_scalar<std::uint64_t>},
      .count = count_avx512,
      .mask = mask_avx512,
      .gaps = gaps_in_mask,
      .select = select_bmi,
  };
}

}  // namespace deltasync::delta
