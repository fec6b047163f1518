// Decoding must be total: the bytes come from a peer. The order of the checks is what makes the unchecked loops safe:
// parse_frame has proved that the payload is exactly as long as its planes; the popcount of a unary plane is proved
// to be the element count before its stop bits are turned into entries; the last position is proved to be inside the
// tile before any position is used, and positions only grow (so those that the kernel gives modulo 2^16 are exact).
#include <memory>

#include "delta/plane_bits.hpp"
#include "delta/rice.hpp"

namespace deltasync::delta {

namespace {

/// Working memory of the decoder. One per thread, since verify_tile and apply_tile are called from many threads with
/// no place to keep it; about 1.5 MiB, touched only as far as tiles are dense.
struct RiceDecodeScratch {
  std::uint16_t positions[kTileElementsMax + kSlack];
  alignas(64) std::byte values[kTileElementsMax * 8 + kSlack];
  alignas(64) std::byte payload[kTileElementsMax * 8 + kSlack];
};

RiceDecodeScratch& rice_decode_scratch() {
  thread_local const std::unique_ptr<RiceDecodeScratch> scratch(new RiceDecodeScratch);
  return *scratch;
}

/// Decodes the value planes of rice_ulp into differences. Returns what is wrong, or nullptr.
const char* decode_ulp_values(const DecodeKernels& kernels, unsigned width_log2, const std::byte* planes,
                              const PlaneSizes& sizes, const TileRecord& record, std::byte* values) {
  const std::byte* const unary = planes + sizes.sign;
  const std::byte* const low = unary + sizes.gamma_unary;
  const std::uint64_t unary_bits = std::uint64_t{record.changed} + record.gamma_bits;
  if (!padding_ok(planes, record.changed)) return "the sign plane has bits behind its end";
  if (!unary_plane_ok(kernels, unary, unary_bits, record.changed))
    return "the magnitude length plane does not end with its data";
  if (!padding_ok(low, record.gamma_bits)) return "the magnitude plane has bits behind its end";
  kernels.unit_values[width_log2](planes, record.changed, values);
  return kernels.magnitudes[width_log2](unary, unary_bits, low, values);
}

const char* decode_values(const DecodeKernels& kernels, const TileShape& shape, const std::byte* planes,
                          const PlaneSizes& sizes, const TileRecord& record, std::byte* values) {
  if (record.codec == Codec::rice_ulp) {
    return decode_ulp_values(kernels, shape.width_log2(), planes, sizes, record, values);
  }
  std::memcpy(values, planes, sizes.values);
  return nullptr;
}

}  // namespace

Result<DecodedTile> decode_rice(const TileShape& shape, const TileRecord& record) {
  RiceDecodeScratch& scratch = rice_decode_scratch();
  const DecodeKernels& kernels = active_kernels().decode;
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
  if (!unary_plane_ok(kernels, quotients, std::uint64_t{n} + record.quotient_sum, n)) {
    return bad_payload("the gap quotient plane does not end with its data");
  }
  const std::uint64_t last = kernels.positions(lows, quotients, sizes.gap_quotient, k, n, scratch.positions);
  if (last >= shape.elements()) return bad_payload("a position is outside of the tile");
  const std::byte* const planes = quotients + sizes.gap_quotient;
  if (const char* wrong = decode_values(kernels, shape, planes, sizes, record, scratch.values)) {
    return bad_payload(wrong);
  }
  return DecodedTile{scratch.positions, scratch.values, n};
}

}  // namespace deltasync::delta
