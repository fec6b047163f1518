// NEON kernels of the decoder.
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

// ---- new elements and their digest -----------------------------------------------------------------------------

/// The old elements of 16 bits of eight digest words.
inline uint16x8_t old_elements(const std::uint64_t* before, uint16x8_t positions) {
  static constexpr std::uint16_t kFirstBytes[8] = {0x0100, 0x0908, 0x1110, 0x1918, 0x2120, 0x2928, 0x3130, 0x3938};
  const uint8x16x4_t words = {{load128(before), load128(before + 2), load128(before + 4), load128(before + 6)}};
  const uint16x8_t lane = vandq_u16(positions, vdupq_n_u16(3));
  const uint16x8_t bytes = vmlaq_u16(vld1q_u16(kFirstBytes), lane, vdupq_n_u16(0x0202));
  return vreinterpretq_u16_u8(vqtbl4q_u8(words, vreinterpretq_u8_u16(bytes)));
}

/// The new elements first, eight at a time; then their words, whose products are of 64 bits.
template <ValueKind kKind>
class Resolver16 {
 public:
  static constexpr std::uint32_t kRun = 64;

  /// As many as kRun; what is read and written goes on to a multiple of eight.
  void add(const std::uint64_t* before, const std::uint16_t* positions, std::byte* values, std::uint32_t count) {
    std::uint16_t flipped[kRun];
    for (std::uint32_t i = 0; i < count; i += 8) {
      const uint8x16_t old = vreinterpretq_u8_u16(old_elements(before + i, vld1q_u16(positions + i)));
      const uint8x16_t value = load128(values + i * std::size_t{2});
      const uint8x16_t element = new_elements(old, value);
      store128(values + i * std::size_t{2}, element);
      store128(flipped + i, veorq_u8(old, element));
    }
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint32_t word = positions[i] / 4U;
      if (word != word_) begin_word(word, before[i]);
      new_word_ ^= std::uint64_t{flipped[i]} << positions[i] % 4 * 16;
    }
  }
  std::uint64_t finish() {
    begin_word(0, 0);
    return sum_;
  }

 private:
  static uint8x16_t new_elements(uint8x16_t old, uint8x16_t value) {
    if constexpr (kKind == ValueKind::element) return value;
    constexpr bool kFloat = kKind == ValueKind::ulp_difference;
    const uint16x8_t mapped = vreinterpretq_u16_u8(map_ulps<2, kFloat>(old));
    return map_ulps<2, kFloat>(vreinterpretq_u8_u16(vaddq_u16(mapped, vreinterpretq_u16_u8(value))));
  }
  /// Ends the one before.
  void begin_word(std::uint32_t word, std::uint64_t before) {
    sum_ += mix_word(new_word_, word_) - mix_word(old_word_, word_);
    word_ = word;
    old_word_ = new_word_ = before;
  }

  std::uint64_t sum_ = 0;
  std::uint32_t word_ = ~0U;
  std::uint64_t old_word_ = 0;
  std::uint64_t new_word_ = 0;
};

template <ValueKind kKind>
std::uint64_t resolve16(const std::uint64_t* before, const std::uint16_t* positions, std::byte* values,
                        std::uint32_t count) {
  constexpr std::uint32_t kRun = Resolver16<kKind>::kRun;
  Resolver16<kKind> resolver;
  const std::uint32_t whole = count / 8 * 8;
  for (std::uint32_t i = 0; i < whole; i += kRun) {
    resolver.add(before + i, positions + i, values + std::size_t{i} * 2, whole - i < kRun ? whole - i : kRun);
  }
  if (const std::uint32_t left = count - whole; left != 0) {
    std::uint64_t words[8] = {};
    std::uint16_t places[8] = {};
    std::byte elements[16] = {};
    std::byte* const rest = values + std::size_t{whole} * 2;
    std::memcpy(words, before + whole, left * sizeof(words[0]));
    std::memcpy(places, positions + whole, left * sizeof(places[0]));
    std::memcpy(elements, rest, left * std::size_t{2});
    resolver.add(words, places, elements, left);
    std::memcpy(rest, elements, left * std::size_t{2});
  }
  return resolver.finish();
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
  kernels.resolve[1][static_cast<unsigned>(ValueKind::difference)] = resolve16<ValueKind::difference>;
  kernels.resolve[1][static_cast<unsigned>(ValueKind::ulp_difference)] = resolve16<ValueKind::ulp_difference>;
  kernels.resolve[1][static_cast<unsigned>(ValueKind::element)] = resolve16<ValueKind::element>;
  return kernels;
}

}  // namespace deltasync::delta
