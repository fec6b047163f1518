// The scalar truth of the decoder's kernels as templates, `static` for the reason given in mix.hpp.
#pragma once

#include "delta/kernel_scalar.hpp"
#include "delta/plane_bits.hpp"

namespace deltasync::delta {

static inline std::uint64_t count_ones_scalar(const std::byte* plane, std::size_t size) noexcept {
  std::uint64_t ones = 0;
  std::size_t at = 0;
  for (; at + 8 <= size; at += 8)
    ones += static_cast<unsigned>(__builtin_popcountll(load_raw<std::uint64_t>(plane + at)));
  if (at < size) ones += static_cast<unsigned>(__builtin_popcountll(load_word(plane + at, size - at)));
  return ones;
}

/// Eight bytes of a plane of `size` from `at` on; zero behind its end, where readable slack is.
static inline std::uint64_t plane_word(const std::byte* plane, std::size_t at, std::size_t size) noexcept {
  const auto word = load_raw<std::uint64_t>(plane + at);
  return size - at >= 8 ? word : word & ((std::uint64_t{1} << ((size - at) * 8)) - 1);
}

/// `positions` holds the low bits of the gaps, and then the positions.
static inline std::uint64_t positions_from_lows(const std::byte* quotients, std::size_t size, unsigned k,
                                                std::uint16_t* positions) noexcept {
  std::uint64_t sum = 0;  // of the low bits so far
  std::uint64_t i = 0;
  std::uint64_t position = 0;
  for (std::size_t at = 0; at < size; at += 8) {
    for (std::uint64_t word = plane_word(quotients, at, size); word != 0; word &= word - 1) {
      // The zeros before stop bit i are the sum of the quotients up to i.
      const std::uint64_t zeros = at * 8 + static_cast<unsigned>(__builtin_ctzll(word)) - i;
      sum += positions[i];
      position = (zeros << k) + sum + i;
      positions[i++] = static_cast<std::uint16_t>(position);
    }
  }
  return position;
}

static inline std::uint64_t positions_scalar(const std::byte* lows, const std::byte* quotients, std::size_t size,
                                             unsigned k, std::uint32_t count, std::uint16_t* positions) noexcept {
  unpack_low_scalar(lows, count, k, positions);
  return positions_from_lows(quotients, size, k, positions);
}

template <class U>
static inline void unit_values_scalar(const std::byte* signs, std::uint32_t count, std::byte* values) noexcept {
  for (std::uint32_t i = 0; i < count; ++i) {
    const unsigned negative = (static_cast<unsigned>(signs[i / 8]) >> (i % 8)) & 1;
    store_raw(values + std::size_t{i} * sizeof(U), static_cast<U>(U{1} - U{2} * static_cast<U>(negative)));
  }
}

/// Finds the runs of zeros in the length plane: few magnitudes are above 1, so most words have none.
template <class U>
static inline const char* magnitudes_scalar(const std::byte* lengths, std::uint64_t bits, const std::byte* low,
                                            std::byte* values) noexcept {
  constexpr unsigned kBits = sizeof(U) * 8;
  std::uint64_t low_at = 0;
  std::uint64_t stops_before = 0;  // stop bits before the current word
  unsigned run = 0;                // zeros that reach into the current word
  const std::size_t size = (bits + 7) / 8;
  for (std::size_t at = 0; at < size; at += 8) {
    const auto valid = static_cast<unsigned>(bits - at * 8 < 64 ? bits - at * 8 : 64);
    const std::uint64_t word = plane_word(lengths, at, size);
    std::uint64_t stops_after_zero = word & ~(word << 1 | (run == 0 ? 1U : 0U));
    while (stops_after_zero != 0) {
      const auto bit = static_cast<unsigned>(__builtin_ctzll(stops_after_zero));
      const std::uint64_t below = word & ((std::uint64_t{1} << bit) - 1);
      const unsigned length = below == 0 ? run + bit : bit - 1 - log2_floor(below);
      if (length >= kBits) return "a magnitude has more bits than the element";
      const std::uint64_t i = stops_before + static_cast<unsigned>(__builtin_popcountll(below));
      const std::uint64_t m = std::uint64_t{1} << length | read_bits(low, low_at, length);
      low_at += length;
      std::byte* const value = values + i * sizeof(U);
      const U unit = load_raw<U>(value);  // 1 or -1
      if (length == kBits - 1 && (unit == U{1} || m != std::uint64_t{1} << length)) {
        return "a magnitude is above half of the element's range";
      }
      store_raw(value, static_cast<U>(m * unit));  // no branch: signs cannot be predicted
      stops_after_zero &= stops_after_zero - 1;
    }
    run = word == 0 ? run + valid : valid - 1 - log2_floor(word);
    stops_before += static_cast<unsigned>(__builtin_popcountll(word));
  }
  return nullptr;
}

template <class U, ValueKind kKind>
static inline U new_element(U old, U value) noexcept {
  if constexpr (kKind == ValueKind::element) return value;
  constexpr bool kFloat = kKind == ValueKind::ulp_difference;
  return add_ulps<U, kFloat>(old, static_cast<U>(value));
}

/// Calls pair(before, after, word) for each changed word, having turned its values into new elements.
template <class U, ValueKind kKind, class Pair>
static inline void resolve_words(const std::uint64_t* before, const std::uint16_t* positions, std::byte* values,
                                 std::uint32_t count, const Pair& pair) noexcept {
  constexpr std::uint32_t kLanes = 8 / sizeof(U);
  for (std::uint32_t i = 0; i < count;) {
    const std::uint64_t old_word = before[i];
    const std::uint32_t word = positions[i] / kLanes;
    std::uint64_t new_word = old_word;
    do {
      const unsigned shift = positions[i] % kLanes * static_cast<unsigned>(sizeof(U)) * 8;
      const U old = static_cast<U>(old_word >> shift);
      std::byte* const value = values + std::size_t{i} * sizeof(U);
      const U element = new_element<U, kKind>(old, load_raw<U>(value));
      store_raw(value, element);
      new_word ^= static_cast<std::uint64_t>(static_cast<U>(old ^ element)) << shift;
      ++i;
    } while (i < count && positions[i] / kLanes == word);
    pair(old_word, new_word, word);
  }
}

template <class U, ValueKind kKind>
static inline std::uint64_t resolve_scalar(const std::uint64_t* before, const std::uint16_t* positions,
                                           std::byte* values, std::uint32_t count) noexcept {
  std::uint64_t sum = 0;
  resolve_words<U, kKind>(before, positions, values, count,
                          [&](std::uint64_t old_word, std::uint64_t new_word, std::uint32_t word) {
                            sum += mix_word(new_word, word) - mix_word(old_word, word);
                          });
  return sum;
}

/// The table of one instruction set. `Isa`, a type of that file's unnamed namespace, names its own kernels; the others
/// are the scalar ones, compiled for its CPU.
template <class Isa>
static DecodeKernels decode_kernels() {
  using std::uint16_t;
  using std::uint32_t;
  using std::uint64_t;
  using std::uint8_t;
  constexpr auto kDifference = ValueKind::difference;
  constexpr auto kUlpDifference = ValueKind::ulp_difference;
  constexpr auto kElement = ValueKind::element;
  return {
      .count_ones = count_ones_scalar,
      .positions = Isa::positions,
      .unit_values = {Isa::template unit_values<uint8_t>, Isa::template unit_values<uint16_t>,
                      Isa::template unit_values<uint32_t>, Isa::template unit_values<uint64_t>},
      .magnitudes = {magnitudes_scalar<uint8_t>, magnitudes_scalar<uint16_t>, magnitudes_scalar<uint32_t>,
                     magnitudes_scalar<uint64_t>},
      .resolve = {{Isa::template resolve<uint8_t, kDifference>, Isa::template resolve<uint8_t, kUlpDifference>,
                   Isa::template resolve<uint8_t, kElement>},
                  {Isa::template resolve<uint16_t, kDifference>, Isa::template resolve<uint16_t, kUlpDifference>,
                   Isa::template resolve<uint16_t, kElement>},
                  {Isa::template resolve<uint32_t, kDifference>, Isa::template resolve<uint32_t, kUlpDifference>,
                   Isa::template resolve<uint32_t, kElement>},
                  {Isa::template resolve<uint64_t, kDifference>, Isa::template resolve<uint64_t, kUlpDifference>,
                   Isa::template resolve<uint64_t, kElement>}},
  };
}

}  // namespace deltasync::delta
