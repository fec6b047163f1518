// Decoding must be total: the bytes come from a peer. The order of the checks is what makes the unchecked loops safe:
// parse_frame has proved that the payload is exactly as long as its planes; the popcount of a unary plane is proved
// to be the element count before its stop bits are turned into entries; the last position is proved to be inside the
// tile before any position is used, and positions only grow.
#include <memory>

#include "delta/plane_bits.hpp"
#include "delta/rice.hpp"

namespace deltasync::delta {

namespace {

/// Working memory of the decoder. One per thread, since verify_tile and apply_tile are called from many threads with
/// no place to keep it; about 1.5 MiB, touched only as far as tiles are dense.
struct DecodeScratch {
  std::uint16_t positions[kTileElementsMax + kSlack];
  std::uint16_t lows[kTileElementsMax + kSlack];
  alignas(64) std::byte values[kTileElementsMax * 8 + kSlack];
  alignas(64) std::byte payload[kTileElementsMax * 8 + kSlack];
};

DecodeScratch& decode_scratch() {
  thread_local const std::unique_ptr<DecodeScratch> scratch(new DecodeScratch);
  return *scratch;
}

Error bad_payload(const char* what) {
  return {Errc::corrupt, std::string("payload: ") + what};
}

/// Turns the quotient plane and the low bits into positions. Returns the last one.
std::uint64_t decode_positions(const std::byte* quotients, std::size_t size, unsigned k, const std::uint16_t* lows,
                               std::uint16_t* positions) {
  std::uint64_t sum = 0;  // of the low bits and the stop bits so far
  std::uint64_t i = 0;
  std::uint64_t position = 0;
  for (std::size_t at = 0; at < size; at += 8) {
    std::uint64_t word = load_word(quotients + at, size - at);
    while (word != 0) {
      // The zeros before stop bit i are the sum of the quotients up to i.
      const std::uint64_t zeros = at * 8 + static_cast<unsigned>(__builtin_ctzll(word)) - i;
      sum += lows[i];
      position = (zeros << k) + sum + i;
      positions[i++] = static_cast<std::uint16_t>(position);
      word &= word - 1;
    }
  }
  return position;
}

/// ±1 for every element, by its sign bit.
template <class U>
void fill_signs(const std::byte* signs, std::uint32_t count, std::byte* values) {
  for (std::uint32_t i = 0; i < count; ++i) {
    const unsigned negative = (static_cast<unsigned>(signs[i / 8]) >> (i % 8)) & 1;
    store_raw(values + std::size_t{i} * sizeof(U), static_cast<U>(U{1} - U{2} * static_cast<U>(negative)));
  }
}

/// Finds the runs of zeros in the γ length plane and puts the magnitudes above 1 in place.
template <class U>
const char* decode_exceptions(const std::byte* unary, std::uint64_t unary_bits, const std::byte* low,
                              std::byte* values) {
  constexpr unsigned kBits = sizeof(U) * 8;
  std::uint64_t low_at = 0;
  std::uint64_t stops_before = 0;  // stop bits before the current word
  unsigned run = 0;                // zeros that reach into the current word
  const std::size_t size = (unary_bits + 7) / 8;
  for (std::size_t at = 0; at < size; at += 8) {
    const auto valid = static_cast<unsigned>(std::min<std::uint64_t>(64, unary_bits - at * 8));
    const std::uint64_t word = load_word(unary + at, size - at);
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
      const bool negative = magnitude(load_raw<U>(value)) != load_raw<U>(value);
      if (length == kBits - 1 && (!negative || m != std::uint64_t{1} << length)) {
        return "a magnitude is above half of the element's range";
      }
      store_raw(value, static_cast<U>(negative ? std::uint64_t{0} - m : m));
      stops_after_zero &= stops_after_zero - 1;
    }
    run = word == 0 ? run + valid : valid - 1 - log2_floor(word);
    stops_before += static_cast<unsigned>(__builtin_popcountll(word));
  }
  return nullptr;
}

/// Decodes the value planes of rice_ulp into differences. Returns what is wrong, or nullptr.
template <class U>
const char* decode_ulp_values(const std::byte* planes, const PlaneSizes& sizes, const TileRecord& record,
                              std::byte* values) {
  const std::byte* const unary = planes + sizes.sign;
  const std::byte* const low = unary + sizes.gamma_unary;
  const std::uint64_t unary_bits = std::uint64_t{record.changed} + record.gamma_bits;
  if (!padding_ok(planes, record.changed)) return "the sign plane has bits behind its end";
  if (!unary_plane_ok(unary, unary_bits, record.changed))
    return "the magnitude length plane does not end with its data";
  if (!padding_ok(low, record.gamma_bits)) return "the magnitude plane has bits behind its end";
  fill_signs<U>(planes, record.changed, values);
  return decode_exceptions<U>(unary, unary_bits, low, values);
}

const char* decode_values(const TileShape& shape, const std::byte* planes, const PlaneSizes& sizes,
                          const TileRecord& record, std::byte* values) {
  if (record.codec == Codec::rice_absolute) {
    std::memcpy(values, planes, sizes.values);
    return nullptr;
  }
  switch (shape.element_bytes) {
    case 1: return decode_ulp_values<std::uint8_t>(planes, sizes, record, values);
    case 2: return decode_ulp_values<std::uint16_t>(planes, sizes, record, values);
    case 4: return decode_ulp_values<std::uint32_t>(planes, sizes, record, values);
    default: return decode_ulp_values<std::uint64_t>(planes, sizes, record, values);
  }
}

}  // namespace

Result<DecodedTile> decode_rice(const TileShape& shape, const TileRecord& record) {
  DecodeScratch& scratch = decode_scratch();
  const std::uint32_t n = record.changed;
  const unsigned k = record.rice_k;
  const PlaneSizes sizes = plane_sizes(record.codec, n, k, record.quotient_sum, record.gamma_bits, shape.element_bytes);
  if (n == 0 || n > shape.elements() || k > kRiceKMax || sizes.total() != record.payload.size() ||
      record.payload.size() > shape.raw_bytes()) {
    return bad_payload("its size does not follow from the record");
  }
  // A copy with readable slack behind it lets all planes be read in whole words.
  std::memcpy(scratch.payload, record.payload.data(), record.payload.size());
  std::memset(scratch.payload + record.payload.size(), 0, kSlack);
  const std::byte* const lows = scratch.payload;
  const std::byte* const quotients = lows + sizes.gap_low;
  if (!padding_ok(lows, std::uint64_t{n} * k)) return bad_payload("the gap plane has bits behind its end");
  if (!unary_plane_ok(quotients, std::uint64_t{n} + record.quotient_sum, n)) {
    return bad_payload("the gap quotient plane does not end with its data");
  }
  active_kernels().unpack_low(lows, n, k, scratch.lows);
  const std::uint64_t last = decode_positions(quotients, sizes.gap_quotient, k, scratch.lows, scratch.positions);
  if (last >= shape.elements()) return bad_payload("a position is outside of the tile");
  if (const char* wrong = decode_values(shape, quotients + sizes.gap_quotient, sizes, record, scratch.values)) {
    return bad_payload(wrong);
  }
  return DecodedTile{scratch.positions, scratch.values, n};
}

}  // namespace deltasync::delta
