// Exponent classes of a tile (delta_format.md "Exponent classes"): the header of a rice_class payload, and which
// class an exponent is in. Encoder and decoder share it, so they cannot disagree about either.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.hpp"
#include "delta/geometry.hpp"
#include "delta/kernels.hpp"

namespace deltasync::delta {

inline constexpr unsigned kClassesMax = 15;
inline constexpr unsigned kClassShiftMax = 3;
inline constexpr std::uint32_t kExponentsMax = 1u << 11;  ///< of f64

/// Exponents that a tile's elements can have; 0 where the dtype has none.
inline std::uint32_t exponent_count(const TileShape& shape) noexcept {
  return shape.is_float ? 1u << (shape.element_bytes * 8 - 1 - shape.mantissa_bits) : 0;
}

/// The header of a rice_class payload. Class 0 has the smallest exponents.
struct ClassHeader {
  unsigned classes = 1;                       ///< 1 to kClassesMax
  unsigned shift = 0;                         ///< 2^shift exponents share a class
  std::uint32_t top = 0;                      ///< exponents above it have no class: none of their elements changed
  std::uint32_t exceptions = 0;               ///< changes by more than 1 ulp
  std::array<std::uint8_t, kClassesMax> k{};  ///< Rice parameter of each class
  std::array<std::uint32_t, kClassesMax> changed{};  ///< changed elements of each class
};

void write_class_header(const ClassHeader& header, std::vector<std::byte>& out);
/// Reads the header from the start of a payload whose record says `changed` elements; `payload` is advanced to what
/// follows. `corrupt` names the bound that is broken.
Result<ClassHeader> read_class_header(const TileShape& shape, std::uint32_t changed, ByteSpan& payload);

/// Where the parts of a payload's bits lie whose length the header gives; the unary part follows, then the magnitudes.
struct ClassBits {
  std::uint64_t signs = 0;          ///< first bit; the low bits of the gaps come before
  std::uint64_t exception_low = 0;  ///< first bit
  std::uint64_t unary = 0;          ///< first bit
};
/// `rice_k` as in the record.
ClassBits class_bits(const ClassHeader& header, std::uint32_t changed, unsigned rice_k) noexcept;

/// What is subtracted from exponents so that those of up to 254 below `top` fit a byte: what is further below has a
/// byte of 0, what is above `top` one above that of `top`.
inline std::uint32_t exponent_base(const TileShape& shape, std::uint32_t top) noexcept {
  return exponent_count(shape) <= 256 || top < 255 ? 0 : top - 254;
}

/// The exponent bytes of each class. Classes are disjoint; one that reaches below all exponents is empty.
std::array<ExponentRange, kClassesMax> class_ranges(const ClassHeader& header, std::uint32_t base) noexcept;

/// Writes the byte of each of the tile's exponents, row by row, to `out`. `first` is the tile's first element.
void read_exponents(const ClassKernels& kernels, const TileShape& shape, const std::byte* first, std::size_t row_stride,
                    std::uint32_t base, std::uint8_t* out);

}  // namespace deltasync::delta
