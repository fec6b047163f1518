// What the AVX2 kernels share. Only files that are compiled for AVX2 may include it; all of it is of their own, for the
// reason given in mix.hpp.
#pragma once

#include <immintrin.h>

#include "delta/kernel_scalar.hpp"

namespace deltasync::delta {

/// The scans that ask for memory so many bytes ahead, or not at all (scan_avx2.cpp).
inline constexpr std::size_t kScanAheadBytes = 1024;
template <std::size_t kAheadBytes>
ScanTable avx2_scans();

namespace {

inline __m256i set_all(std::uint64_t x) {
  return _mm256_set1_epi64x(static_cast<long long>(x));
}

/// 64-bit products from 32-bit ones; `factor_high` is factor >> 32.
inline __m256i multiply(__m256i x, __m256i factor, __m256i factor_high) {
  const __m256i cross =
      _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), factor), _mm256_mul_epu32(x, factor_high));
  return _mm256_add_epi64(_mm256_mul_epu32(x, factor), _mm256_slli_epi64(cross, 32));
}

class Mixer {
 public:
  __m256i operator()(__m256i x) const {
    x = multiply(_mm256_xor_si256(x, _mm256_srli_epi64(x, 30)), first_, first_high_);
    x = multiply(_mm256_xor_si256(x, _mm256_srli_epi64(x, 27)), second_, second_high_);
    return _mm256_xor_si256(x, _mm256_srli_epi64(x, 31));
  }

 private:
  const __m256i first_ = _mm256_set1_epi64x(static_cast<long long>(kMixFirst));
  const __m256i first_high_ = _mm256_set1_epi64x(static_cast<long long>(kMixFirst >> 32));
  const __m256i second_ = _mm256_set1_epi64x(static_cast<long long>(kMixSecond));
  const __m256i second_high_ = _mm256_set1_epi64x(static_cast<long long>(kMixSecond >> 32));
};

inline __m256i load256(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

inline std::uint64_t sum_lanes(__m256i x) {
  const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(half)) + static_cast<std::uint64_t>(_mm_extract_epi64(half, 1));
}

}  // namespace

}  // namespace deltasync::delta
