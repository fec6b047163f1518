// What the files of AVX-512 kernels share. In an unnamed namespace for the reason given in mix.hpp.
#pragma once

#include <immintrin.h>

#include "delta/kernel_scalar.hpp"

namespace deltasync::delta {

/// In scan_avx512.cpp.
ScanTable avx512_scans();

namespace {

inline __m512i set_all(std::uint64_t x) {
  return _mm512_set1_epi64(static_cast<long long>(x));
}

inline __m512i mix_lanes(__m512i x) {
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)), set_all(kMixFirst));
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), set_all(kMixSecond));
  return _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
}

/// 0 to 31 in lanes of 16 bits.
inline __m512i iota16() {
  return _mm512_cvtepu8_epi16(_mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,
                                               21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31));
}

/// Modulo 2^64. _mm512_reduce_add_epi64 adds signed numbers in g++'s header, so that wrapping would be undefined.
inline std::uint64_t sum_lanes(__m512i x) {
  alignas(64) std::uint64_t lanes[8];
  _mm512_store_si512(lanes, x);
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

/// The first `bytes` ≤ 64 bytes, zero-padded.
inline __m512i load_part(const std::byte* from, std::size_t bytes) {
  return _mm512_maskz_loadu_epi8(bytes >= 64 ? ~__mmask64{0} : (__mmask64{1} << bytes) - 1, from);
}

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

}  // namespace

}  // namespace deltasync::delta
