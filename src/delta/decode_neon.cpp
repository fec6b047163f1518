// NEON kernels of the decoder. What makes digests stays scalar, as in kernel_neon.cpp.
#include "delta/decode_scalar.hpp"
#include "delta/neon.hpp"

namespace deltasync::delta {

namespace {

std::uint64_t count_ones_neon(const std::byte* plane, std::size_t size) {
  constexpr std::size_t kVectorsMax = 31;  // of which a byte can hold the ones
  uint64x2_t sum = vdupq_n_u64(0);
  std::size_t at = 0;
  while (size - at >= 16) {
    const std::size_t vectors = size - at > kVectorsMax * 16 ? kVectorsMax : (size - at) / 16;
    uint8x16_t ones = vdupq_n_u8(0);
    for (const std::size_t end = at + vectors * 16; at < end; at += 16) {
      ones = vaddq_u8(ones, vcntq_u8(load128(plane + at)));
    }
    sum = vpadalq_u32(sum, vpaddlq_u16(vpaddlq_u8(ones)));
  }
  return vaddvq_u64(sum) + count_ones_scalar(plane + at, size - at);
}

std::uint64_t positions_neon(const std::byte* lows, const std::byte* quotients, std::size_t size, unsigned k,
                             std::uint32_t count, std::uint16_t* positions) {
  neon_kernels().unpack_low(lows, count, k, positions);
  return positions_from_lows(quotients, size, k, positions);
}

/// A vector has the elements of some bits of a byte, two bytes or a part of one.
template <class U>
void unit_values_neon(const std::byte* signs, std::uint32_t count, std::byte* values) {
  using L = Lanes<sizeof(U)>;
  constexpr std::uint32_t kElements = 16 / sizeof(U);
  const uint8x16_t one = L::set(1);
  const uint8x16_t bits = L::bit_of_lane();
  for (std::uint32_t i = 0; i < count; i += kElements, values += 16) {
    const std::uint32_t of_lanes = load_raw<std::uint16_t>(signs + i / 8) >> (i % 8);
    uint8x16_t spread = L::set(static_cast<U>(of_lanes));
    if constexpr (sizeof(U) == 1) {
      spread = vcombine_u8(vdup_n_u8(static_cast<std::uint8_t>(of_lanes)),
                           vdup_n_u8(static_cast<std::uint8_t>(of_lanes >> 8)));
    }
    const uint8x16_t negative = L::equal(vandq_u8(spread, bits), bits);
    store128(values, vorrq_u8(negative, one));
  }
}

struct IsaNeon {
  static constexpr auto positions = positions_neon;
  template <class U>
  static constexpr auto unit_values = unit_values_neon<U>;
  template <class U, ValueKind kKind>
  static constexpr auto resolve = resolve_scalar<U, kKind>;
};

}  // namespace

DecodeKernels neon_decode_kernels() {
  DecodeKernels kernels = decode_kernels<IsaNeon>();
  kernels.count_ones = count_ones_neon;
  return kernels;
}

}  // namespace deltasync::delta
