// What the NEON kernels share. All of it is of each file's own, as in avx2.hpp.
#pragma once

#include <arm_neon.h>

#include "delta/kernel_scalar.hpp"
#include "delta/shuffles.hpp"

namespace deltasync::delta {

/// The scans that ask for memory so many bytes ahead, or not at all (scan_neon.cpp).
inline constexpr std::size_t kNeonAheadBytes = 1024;
template <std::size_t kAheadBytes>
ScanTable neon_scans();

namespace {

/// Ones of a byte: NEON counts them in vectors only.
struct ByteOnes {
  std::uint8_t of[256] = {};
  constexpr ByteOnes() {
    for (unsigned byte = 0; byte < 256; ++byte) {
      for (unsigned bit = 0; bit < 8; ++bit) of[byte] = static_cast<std::uint8_t>(of[byte] + (byte >> bit & 1));
    }
  }
};
constexpr ByteOnes kByteOnes;

inline uint8x16_t load128(const void* from) {
  return vld1q_u8(static_cast<const std::uint8_t*>(from));
}
inline void store128(void* to, uint8x16_t x) {
  vst1q_u8(static_cast<std::uint8_t*>(to), x);
}

/// What differs between element widths. Masks of vectors have lanes that are 0 or −1.
template <std::size_t kBytes>
struct Lanes;

template <>
struct Lanes<1> {
  static uint8x16_t equal(uint8x16_t a, uint8x16_t b) { return vceqq_u8(a, b); }
  static uint8x16_t subtract(uint8x16_t a, uint8x16_t b) { return vsubq_u8(a, b); }
  static uint8x16_t negative(uint8x16_t x) { return vcltzq_s8(vreinterpretq_s8_u8(x)); }
  static uint8x16_t magnitude(uint8x16_t x) { return vreinterpretq_u8_s8(vabsq_s8(vreinterpretq_s8_u8(x))); }
  static uint8x16_t set(std::uint8_t x) { return vdupq_n_u8(x); }
  /// A bit for each lane, the first one lowest; of bytes, for each half of the vector.
  static uint8x16_t bit_of_lane() {
    static constexpr std::uint8_t kBits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    return vld1q_u8(kBits);
  }
  /// Those of the lanes that a mask has; of bytes, the second half's come behind the first one's.
  static unsigned bits(uint8x16_t mask) {
    uint8x16_t sums = vandq_u8(mask, bit_of_lane());
    for (int i = 0; i < 3; ++i) sums = vpaddq_u8(sums, sums);
    return vgetq_lane_u16(vreinterpretq_u16_u8(sums), 0);
  }
};

template <>
struct Lanes<2> {
  static uint8x16_t equal(uint8x16_t a, uint8x16_t b) {
    return vreinterpretq_u8_u16(vceqq_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
  }
  static uint8x16_t subtract(uint8x16_t a, uint8x16_t b) {
    return vreinterpretq_u8_u16(vsubq_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
  }
  static uint8x16_t negative(uint8x16_t x) { return vreinterpretq_u8_u16(vcltzq_s16(vreinterpretq_s16_u8(x))); }
  static uint8x16_t magnitude(uint8x16_t x) { return vreinterpretq_u8_s16(vabsq_s16(vreinterpretq_s16_u8(x))); }
  static uint8x16_t set(std::uint16_t x) { return vreinterpretq_u8_u16(vdupq_n_u16(x)); }
  static uint8x16_t bit_of_lane() {
    static constexpr std::uint16_t kBits[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    return load128(kBits);
  }
  static unsigned bits(uint8x16_t mask) { return vaddvq_u16(vreinterpretq_u16_u8(vandq_u8(mask, bit_of_lane()))); }
};

template <>
struct Lanes<4> {
  static uint8x16_t equal(uint8x16_t a, uint8x16_t b) {
    return vreinterpretq_u8_u32(vceqq_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
  }
  static uint8x16_t subtract(uint8x16_t a, uint8x16_t b) {
    return vreinterpretq_u8_u32(vsubq_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
  }
  static uint8x16_t negative(uint8x16_t x) { return vreinterpretq_u8_u32(vcltzq_s32(vreinterpretq_s32_u8(x))); }
  static uint8x16_t magnitude(uint8x16_t x) { return vreinterpretq_u8_s32(vabsq_s32(vreinterpretq_s32_u8(x))); }
  static uint8x16_t set(std::uint32_t x) { return vreinterpretq_u8_u32(vdupq_n_u32(x)); }
  static uint8x16_t bit_of_lane() {
    static constexpr std::uint32_t kBits[4] = {1, 2, 4, 8};
    return load128(kBits);
  }
  static unsigned bits(uint8x16_t mask) { return vaddvq_u32(vreinterpretq_u32_u8(vandq_u8(mask, bit_of_lane()))); }
};

template <>
struct Lanes<8> {
  static uint8x16_t equal(uint8x16_t a, uint8x16_t b) {
    return vreinterpretq_u8_u64(vceqq_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
  }
  static uint8x16_t subtract(uint8x16_t a, uint8x16_t b) {
    return vreinterpretq_u8_u64(vsubq_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
  }
  static uint8x16_t negative(uint8x16_t x) { return vreinterpretq_u8_u64(vcltzq_s64(vreinterpretq_s64_u8(x))); }
  static uint8x16_t magnitude(uint8x16_t x) { return vreinterpretq_u8_s64(vabsq_s64(vreinterpretq_s64_u8(x))); }
  static uint8x16_t set(std::uint64_t x) { return vreinterpretq_u8_u64(vdupq_n_u64(x)); }
  static uint8x16_t bit_of_lane() {
    static constexpr std::uint64_t kBits[2] = {1, 2};
    return load128(kBits);
  }
  static unsigned bits(uint8x16_t mask) {
    return static_cast<unsigned>(vaddvq_u64(vreinterpretq_u64_u8(vandq_u8(mask, bit_of_lane()))));
  }
};

/// The map of floats, of each lane.
template <std::size_t kBytes, bool kFloat>
inline uint8x16_t map_ulps(uint8x16_t x) {
  using U = std::conditional_t<
      kBytes == 1, std::uint8_t,
      std::conditional_t<kBytes == 2, std::uint16_t, std::conditional_t<kBytes == 4, std::uint32_t, std::uint64_t>>>;
  if constexpr (!kFloat) return x;
  constexpr U kMost = static_cast<U>(~U{0}) >> 1;
  return veorq_u8(x, vandq_u8(Lanes<kBytes>::negative(x), Lanes<kBytes>::set(kMost)));
}

/// Appends those of kTogether lanes that `mask` has to a list. Stores eight positions and 16 bytes of values, 8 if they
/// are bytes.
template <std::size_t kBytes>
inline void append_lanes(unsigned mask, uint8x16_t values, uint16x8_t positions, std::uint16_t* to_positions,
                         std::byte* to_values, std::uint32_t& count) {
  const uint8x16_t front = load128(kShuffles<kBytes>.of_mask[mask]);
  const uint8x16_t positions_front = load128(kShuffles<2>.of_mask[mask]);
  const uint8x16_t chosen = vqtbl1q_u8(values, front);
  std::byte* const to = to_values + std::size_t{count} * kBytes;
  if constexpr (kBytes == 1) {
    vst1_u8(reinterpret_cast<std::uint8_t*>(to), vget_low_u8(chosen));
  } else {
    store128(to, chosen);
  }
  store128(to_positions + count, vqtbl1q_u8(vreinterpretq_u8_u16(positions), positions_front));
  count += kByteOnes.of[mask];
}

/// Shifts of lanes, to the left, or to the right if negative: of the first of two, and of the second.
inline int16x8_t shifts16(unsigned first, unsigned second) {
  return vreinterpretq_s16_u32(vdupq_n_u32((second & 0xFFFF) << 16 | (first & 0xFFFF)));
}
inline int32x4_t shifts32(unsigned first, unsigned second) {
  return vreinterpretq_s32_u64(vdupq_n_u64(std::uint64_t{second} << 32 | first));
}

/// Packs the k ≤ 15 low bits of eight numbers into k bytes: the first of two moves to where the second begins, so that
/// they are one number of twice the bits; so do these, and those.
class FieldPacker {
 public:
  explicit FieldPacker(unsigned k)
      : k_(k),
        mask_(vdupq_n_u16(static_cast<std::uint16_t>((1U << k) - 1))),
        fields_(shifts16(16 - k, 0)),
        pairs_(shifts32(16 - k, k - 16)),
        fours_(vdupq_n_s64(2 * static_cast<int>(k) - 32)) {}

  /// k ≥ 1. Garbage of up to 8 bytes follows.
  void operator()(uint16x8_t numbers, std::byte* out) const {
    const uint32x4_t fields = vreinterpretq_u32_u16(vshlq_u16(vandq_u16(numbers, mask_), fields_));
    const uint64x2_t pairs = vreinterpretq_u64_u32(vshlq_u32(fields, pairs_));
    const uint64x2_t fours = vshlq_u64(pairs, fours_);
    const std::uint64_t second = vgetq_lane_u64(fours, 1);
    store_raw(out, vgetq_lane_u64(fours, 0) | second << (4 * k_));
    if (k_ > 8) store_raw(out + 8, second >> (64 - 4 * k_));
  }

 private:
  const unsigned k_;
  const uint16x8_t mask_;
  const int16x8_t fields_;
  const int32x4_t pairs_;
  const int64x2_t fours_;
};

/// The inverse. Reads up to 16 bytes.
class FieldUnpacker {
 public:
  explicit FieldUnpacker(unsigned k)
      : second_(k / 2),
        mask_(vdupq_n_u16(static_cast<std::uint16_t>((1U << k) - 1))),
        fields_(shifts16(k - 16, 0)),
        pairs_(shifts32(k - 16, 16 - k)),
        // The second four begin at bit 4k, which is in the middle of a byte where k is odd.
        fours_{32 - 2 * static_cast<int>(k), 32 - 2 * static_cast<int>(k) - 4 * static_cast<int>(k % 2)} {}

  uint16x8_t operator()(const std::byte* in) const {
    const uint64x2_t fours = {load_raw<std::uint64_t>(in), load_raw<std::uint64_t>(in + second_)};
    const uint32x4_t pairs = vreinterpretq_u32_u64(vshlq_u64(fours, fours_));
    const uint16x8_t fields = vreinterpretq_u16_u32(vshlq_u32(pairs, pairs_));
    return vandq_u16(vshlq_u16(fields, fields_), mask_);
  }

 private:
  const std::size_t second_;
  const uint16x8_t mask_;
  const int16x8_t fields_;
  const int32x4_t pairs_;
  const int64x2_t fours_;
};

}  // namespace

}  // namespace deltasync::delta
