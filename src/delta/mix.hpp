// The word mixer of the state digest (delta_format.md "State digest") and the map from bit patterns to
// monotone integers. Everything here is `static`: the kernel files are compiled for different instruction sets, and a
// merged inline function would run AVX-512 code on a CPU without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/host_device.hpp"

namespace deltasync::delta {

inline constexpr std::uint64_t kDigestStep = 0x9E3779B97F4A7C15;
inline constexpr std::uint64_t kMixFirst = 0xBF58476D1CE4E5B9;
inline constexpr std::uint64_t kMixSecond = 0x94D049BB133111EB;

/// A bijection of 64-bit words, so that a change inside one word always changes the sum.
DS_HD static inline std::uint64_t mix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * kMixFirst;
  x = (x ^ (x >> 27)) * kMixSecond;
  return x ^ (x >> 31);
}
/// What word `index` of a tile adds to the tile's digest.
DS_HD static inline std::uint64_t mix_word(std::uint64_t word, std::uint64_t index) noexcept {
  return mix(word + (index + 1) * kDigestStep);
}

/// The ulp map: sign-magnitude patterns to integers in the same order. Its own inverse. Integers map to themselves.
template <class U, bool kFloat>
DS_HD static inline U ulp_map(U x) noexcept {
  if constexpr (!kFloat) {
    return x;
  } else {
    using S = std::make_signed_t<U>;
    constexpr unsigned kBits = sizeof(U) * 8;
    const auto sign = static_cast<U>(static_cast<S>(x) >> (kBits - 1));
    return static_cast<U>(x ^ (sign & (static_cast<U>(~U{0}) >> 1)));
  }
}

/// The element that is `diff` steps of the ulp map (of integers: that much) above `old`, modulo 2^w.
template <class U, bool kFloat>
DS_HD static inline U add_ulps(U old, U diff) noexcept {
  return ulp_map<U, kFloat>(static_cast<U>(ulp_map<U, kFloat>(old) + diff));
}

template <class T>
static inline T load_raw(const void* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}
template <class T>
static inline void store_raw(void* to, T value) noexcept {
  std::memcpy(to, &value, sizeof(T));
}
/// Up to 8 bytes, zero-padded to a word.
static inline std::uint64_t load_word(const void* from, std::size_t bytes) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, from, bytes < 8 ? bytes : 8);
  return word;
}

}  // namespace deltasync::delta
