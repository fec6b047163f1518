// The loops of dense_ulp over all elements of a tile, as templates that each instruction set's file compiles for
// itself; `static` for the reason given in mix.hpp.
#pragma once

#include "delta/kernel_scalar.hpp"
#include "delta/plane_bits.hpp"

namespace deltasync::delta {

/// A difference as a number that is small where the difference is: 0, −1, 1, −2 … are 0, 1, 2, 3 …
template <class U>
static inline U zigzag(U difference) noexcept {
  using S = std::make_signed_t<U>;
  constexpr unsigned kBits = sizeof(U) * 8;
  return static_cast<U>(static_cast<U>(difference << 1) ^ static_cast<U>(static_cast<S>(difference) >> (kBits - 1)));
}
template <class U>
static inline U from_zigzag(U number) noexcept {
  return static_cast<U>(static_cast<U>(number >> 1) ^ static_cast<U>(U{0} - static_cast<U>(number & 1)));
}

template <class U>
static inline void spread_numbers(const std::uint16_t* positions, const std::byte* diffs, std::uint32_t count,
                                  std::uint32_t elements, std::byte* numbers) noexcept {
  U* const out = reinterpret_cast<U*>(numbers);
  if (count == elements) {
    for (std::uint32_t i = 0; i < count; ++i) out[i] = zigzag(load_raw<U>(diffs + std::size_t{i} * sizeof(U)));
    return;
  }
  std::memset(numbers, 0, std::size_t{elements} * sizeof(U));
  for (std::uint32_t i = 0; i < count; ++i) {
    out[positions[i]] = zigzag(load_raw<U>(diffs + std::size_t{i} * sizeof(U)));
  }
}

template <class U>
static inline void count_lengths(const std::byte* numbers, std::uint32_t elements, std::uint32_t* counts) noexcept {
  const U* const in = reinterpret_cast<const U*>(numbers);
  std::uint32_t of[2][66] = {};  // equal neighbours would wait for each other's count
  const auto length = [](U x) { return x == 0 ? 0U : log2_floor(x) + 1; };
  std::uint32_t i = 0;
  for (; i + 2 <= elements; i += 2) {
    ++of[0][length(in[i])];
    ++of[1][length(in[i + 1])];
  }
  if (i < elements) ++of[0][length(in[i])];
  for (unsigned b = 0; b <= sizeof(U) * 8; ++b) counts[b] = of[0][b] + of[1][b];
}

template <class U>
static inline DenseSums sum_quotients(const std::byte* numbers, std::uint32_t elements, unsigned k) noexcept {
  const U* const in = reinterpret_cast<const U*>(numbers);
  DenseSums out;
  for (std::uint32_t i = 0; i < elements; ++i) {
    const U q = static_cast<U>(in[i] >> k);
    out.quotients += q < kDenseEscape ? static_cast<std::uint32_t>(q) : kDenseEscape;
    out.escapes += q < kDenseEscape ? 0U : 1U;
  }
  return out;
}

/// Two numbers at a time: a packer waits for itself once for both.
template <class U>
static inline void pack_numbers_low(const std::byte* numbers, std::uint32_t elements, unsigned k,
                                    std::byte* plane) noexcept {
  const U* const in = reinterpret_cast<const U*>(numbers);
  if (k == 0) return;
  BitPacker out(plane);
  const std::uint64_t mask = (std::uint64_t{1} << k) - 1;
  std::uint32_t i = 0;
  if (k <= 28) {
    for (; i + 2 <= elements; i += 2) out.put((in[i] & mask) | (in[i + 1] & mask) << k, 2 * k);
  }
  for (; i < elements; ++i) {
    const std::uint64_t low = in[i] & mask;
    if (k <= 32) {
      out.put(low, k);
    } else {
      out.put(low & 0xFFFFFFFF, 32);
      out.put(low >> 32, k - 32);
    }
  }
}

template <class U>
static inline void pack_numbers_unary(const std::byte* numbers, std::uint32_t elements, unsigned k,
                                      std::byte* plane) noexcept {
  const U* const in = reinterpret_cast<const U*>(numbers);
  const auto zeros = [&](std::uint32_t i) {
    const U q = static_cast<U>(in[i] >> k);
    return q < kDenseEscape ? static_cast<unsigned>(q) : kDenseEscape;
  };
  BitPacker out(plane);
  std::uint32_t i = 0;
  for (; i + 2 <= elements; i += 2) {
    const unsigned first = zeros(i);
    const unsigned both = first + 1 + zeros(i + 1);
    out.put(std::uint64_t{1} << first | std::uint64_t{1} << both, both + 1);
  }
  if (i < elements) out.put(std::uint64_t{1} << zeros(i), zeros(i) + 1);
}

template <class U>
static inline void pack_escapes(const std::byte* numbers, std::uint32_t elements, unsigned k,
                                std::byte* plane) noexcept {
  const U* const in = reinterpret_cast<const U*>(numbers);
  const unsigned bits = sizeof(U) * 8 - k;
  BitPacker out(plane);
  for (std::uint32_t i = 0; i < elements; ++i) {
    const std::uint64_t q = static_cast<U>(in[i] >> k);
    if (q < kDenseEscape) continue;
    if (bits <= 32) {
      out.put(q, bits);
    } else {
      out.put(q & 0xFFFFFFFF, 32);
      out.put(q >> 32, bits - 32);
    }
  }
}

/// Up to 64 bits.
static inline std::uint64_t read_long(const std::byte* plane, std::uint64_t at, unsigned bits) noexcept {
  if (bits <= 32) return read_bits(plane, at, bits);
  return read_bits(plane, at, 32) | read_bits(plane, at + 32, bits - 32) << 32;
}

/// What joining has met so far.
struct DenseMet {
  std::uint64_t quotients = 0;
  std::uint32_t escapes = 0;
};

template <class U>
static inline const char* join_some(const DensePlanes& planes, std::uint32_t first, std::uint32_t end, DenseMet& met,
                                    std::byte* diffs) noexcept {
  constexpr unsigned kBits = sizeof(U) * 8;
  U* const out = reinterpret_cast<U*>(diffs);
  const unsigned k = planes.k;
  const std::uint64_t mask = (std::uint64_t{1} << k) - 1;
  std::uint64_t at = std::uint64_t{first} * k;
  for (std::uint32_t i = first; i < end; ++i, at += k) {
    std::uint64_t q = planes.quotients[i];
    std::uint64_t low = 0;
    if constexpr (sizeof(U) == 8) {
      low = read_bits(planes.low, at, k);
    } else {
      low = load_raw<std::uint64_t>(planes.low + (at >> 3)) >> (at & 7) & mask;  // k < 32
    }
    met.quotients += q;
    if (q >= kDenseEscape) {
      if (q > kDenseEscape) return "a quotient is longer than an escape";
      if (met.escapes == planes.escapes) return "more escapes than its record says";
      q = read_long(planes.escape, std::uint64_t{met.escapes++} * (kBits - k), kBits - k);
      if (q < kDenseEscape) return "an escape that is none";
    } else if (kBits - k < 5 && q >> (kBits - k) != 0) {
      return "a number longer than the element";
    }
    out[i] = from_zigzag(static_cast<U>(q << k | low));
  }
  return nullptr;
}

/// The quotients are known modulo 2^16 only: a longer one leaves the sum short.
static inline const char* wrong_sums(const DensePlanes& planes, const DenseMet& met) noexcept {
  const bool right = met.quotients == planes.quotient_sum && met.escapes == planes.escapes;
  return right ? nullptr : "its quotients are not what its record says";
}

template <class U>
static inline const char* join_numbers(const DensePlanes& planes, std::uint32_t elements, std::byte* diffs) noexcept {
  DenseMet met;
  const char* const wrong = join_some<U>(planes, 0, elements, met, diffs);
  return wrong != nullptr ? wrong : wrong_sums(planes, met);
}

template <class U>
static inline std::uint32_t list_changed(const std::byte* diffs, std::uint32_t elements, std::uint16_t* positions,
                                         std::byte* listed) noexcept {
  const U* const in = reinterpret_cast<const U*>(diffs);
  U* const out = reinterpret_cast<U*>(listed);
  std::uint32_t count = 0;
  for (std::uint32_t i = 0; i < elements; ++i) {
    positions[count] = static_cast<std::uint16_t>(i);
    out[count] = in[i];
    count += in[i] != 0 ? 1 : 0;
  }
  return count;
}

/// The table of one instruction set: the same loops, compiled for it.
static inline DenseKernels dense_kernels() {
  using std::uint16_t;
  using std::uint32_t;
  using std::uint64_t;
  using std::uint8_t;
  return {
      .spread = {spread_numbers<uint8_t>, spread_numbers<uint16_t>, spread_numbers<uint32_t>, spread_numbers<uint64_t>},
      .lengths = {count_lengths<uint8_t>, count_lengths<uint16_t>, count_lengths<uint32_t>, count_lengths<uint64_t>},
      .sums = {sum_quotients<uint8_t>, sum_quotients<uint16_t>, sum_quotients<uint32_t>, sum_quotients<uint64_t>},
      .pack_low = {pack_numbers_low<uint8_t>, pack_numbers_low<uint16_t>, pack_numbers_low<uint32_t>,
                   pack_numbers_low<uint64_t>},
      .pack_unary = {pack_numbers_unary<uint8_t>, pack_numbers_unary<uint16_t>, pack_numbers_unary<uint32_t>,
                     pack_numbers_unary<uint64_t>},
      .pack_escapes = {pack_escapes<uint8_t>, pack_escapes<uint16_t>, pack_escapes<uint32_t>, pack_escapes<uint64_t>},
      .join = {join_numbers<uint8_t>, join_numbers<uint16_t>, join_numbers<uint32_t>, join_numbers<uint64_t>},
      .list = {list_changed<uint8_t>, list_changed<uint16_t>, list_changed<uint32_t>, list_changed<uint64_t>},
  };
}

}  // namespace deltasync::delta
