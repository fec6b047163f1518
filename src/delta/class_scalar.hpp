// The scalar truth of the kernels of rice_class as templates, `static` for the reason given in mix.hpp.
#pragma once

#include "delta/kernel_scalar.hpp"

namespace deltasync::delta {

template <class U>
static inline void exponents_scalar(const std::byte* first, std::uint32_t elements, unsigned mantissa_bits,
                                    std::uint32_t base, std::uint8_t* out) noexcept {
  constexpr U kMagnitude = static_cast<U>(~U{0}) >> 1;
  for (std::uint32_t i = 0; i < elements; ++i) {
    const U x = load_raw<U>(first + std::size_t{i} * sizeof(U));
    auto exponent = static_cast<std::uint32_t>(static_cast<U>(x & kMagnitude) >> mantissa_bits);
    if constexpr (sizeof(U) == 8) {
      exponent = exponent < base ? 0 : exponent - base;
      exponent = exponent > 255 ? 255 : exponent;
    }
    out[i] = static_cast<std::uint8_t>(exponent);
  }
}

static inline void count_exponents_scalar(const std::uint8_t* exponents, std::uint32_t elements, unsigned lowest,
                                          unsigned top, std::uint32_t* counts) noexcept {
  std::uint32_t all[4][256] = {};  // equal neighbours would wait for each other's count
  std::uint32_t i = 0;
  for (; i + 4 <= elements; i += 4) {
    for (unsigned j = 0; j < 4; ++j) ++all[j][exponents[i + j]];
  }
  for (; i < elements; ++i) ++all[0][exponents[i]];
  for (unsigned e = 0; e <= top; ++e) {
    const std::uint32_t sum = all[0][e] + all[1][e] + all[2][e] + all[3][e];
    if (e <= lowest) {
      counts[0] = (e == 0 ? 0 : counts[0]) + sum;
    } else {
      counts[e - lowest] = sum;
    }
  }
}

static inline void class_mask_scalar(const std::uint8_t* exponents, std::uint32_t words, ExponentRange range,
                                     std::uint64_t* mask) noexcept {
  const auto width = static_cast<std::uint8_t>(range.high - range.low);
  for (std::uint32_t w = 0; w < words; ++w, exponents += 64) {
    std::uint8_t inside[64];
    for (unsigned b = 0; b < 64; ++b) {
      inside[b] = static_cast<std::uint8_t>(exponents[b] - range.low) <= width ? 1 : 0;
    }
    std::uint64_t word = 0;
    for (unsigned b = 0; b < 64; b += 8) {
      // The product has the lowest bit of byte i at bit 56 + i.
      word |= load_raw<std::uint64_t>(inside + b) * 0x0102040810204080U >> 56 << b;
    }
    mask[w] = word;
  }
}

static inline void gaps_in_mask(const std::uint64_t* mask, const std::uint16_t* positions, std::uint32_t count,
                                std::uint16_t* gaps) noexcept {
  std::uint32_t word = 0;
  std::uint32_t before = 0;  // ones in the words before
  std::uint32_t next = 0;    // ones up to the last position
  for (std::uint32_t i = 0; i < count; ++i) {
    for (; word < positions[i] / 64U; ++word) before += static_cast<unsigned>(__builtin_popcountll(mask[word]));
    const std::uint64_t below = mask[word] & ((std::uint64_t{1} << (positions[i] % 64)) - 1);
    const std::uint32_t rank = before + static_cast<unsigned>(__builtin_popcountll(below));
    gaps[i] = static_cast<std::uint16_t>(rank - next);
    next = rank + 1;
  }
}

/// `nth_one(word, n)` is the number of the n-th one (n from 0) of a word that has more than n.
template <class NthOne>
static inline bool select_in_mask(const std::uint64_t* mask, std::uint32_t words, const std::uint16_t* gaps,
                                  std::uint32_t count, std::uint16_t* positions, const NthOne& nth_one) noexcept {
  if (words == 0) return count == 0;
  std::uint32_t w = 0;
  std::uint64_t word = mask[0];
  auto ones = static_cast<std::uint32_t>(__builtin_popcountll(word));
  for (std::uint32_t i = 0; i < count; ++i) {
    std::uint32_t skip = gaps[i];
    while (skip >= ones) {
      skip -= ones;
      if (++w == words) return false;
      word = mask[w];
      ones = static_cast<std::uint32_t>(__builtin_popcountll(word));
    }
    const unsigned bit = nth_one(word, skip);
    positions[i] = static_cast<std::uint16_t>(w * 64 + bit);
    word &= ~std::uint64_t{1} << bit;  // what is behind it
    ones -= skip + 1;
  }
  return true;
}

}  // namespace deltasync::delta
