// Planes of bits (delta_format.md "Tile payloads"): the checks and loads that every decoder of planes needs.
// `static` for the reason given in mix.hpp: the kernels use them too.
#pragma once

#include <cstdint>

#include "delta/kernel_scalar.hpp"

namespace deltasync::delta {

/// Whether a unary plane of `bits` ≥ 1 bits holds exactly `stops` stop bits, the last one at its end, and zero padding.
static inline bool unary_plane_ok(const DecodeKernels& kernels, const std::byte* plane, std::uint64_t bits,
                                  std::uint32_t stops) {
  const std::size_t size = (bits + 7) / 8;
  const auto last = static_cast<unsigned>(plane[size - 1]);
  // The byte that holds the last bit has nothing above it.
  return last >> ((bits - 1) % 8) == 1 && kernels.count_ones(plane, size) == stops;
}

/// Whether the bits behind the last valid one of a plane are zero.
static inline bool padding_ok(const std::byte* plane, std::uint64_t bits) {
  return bits % 8 == 0 || static_cast<unsigned>(plane[bits / 8]) >> (bits % 8) == 0;
}

/// Up to 63 bits from bit `at` of a plane with kSlack readable bytes behind it.
static inline std::uint64_t read_bits(const std::byte* plane, std::uint64_t at, unsigned bits) {
  const unsigned shift = at & 7;
  std::uint64_t value = load_raw<std::uint64_t>(plane + at / 8) >> shift;
  if (shift + bits > 64) value |= static_cast<std::uint64_t>(plane[at / 8 + 8]) << (64 - shift);
  return value & ((std::uint64_t{1} << bits) - 1);
}

}  // namespace deltasync::delta
