// Decoding must be total, as in rice_decode.cpp: parse_frame has proved that the payload is as long as its planes; the
// unary plane is proved to have one stop bit for each element before these are turned into quotients; and the escapes
// are counted as they are read.
#include <cstring>
#include <memory>

#include "delta/dense_codec.hpp"
#include "delta/plane_bits.hpp"

namespace deltasync::delta {

namespace {

struct DenseDecodeScratch {
  std::uint16_t stops[kTileElementsMax + kSlack];
  std::uint16_t quotients[kTileElementsMax + kSlack];
  std::uint16_t positions[kTileElementsMax];
  alignas(64) std::byte diffs[kTileElementsMax * 8];
  alignas(64) std::byte listed[kTileElementsMax * 8];
  alignas(64) std::byte payload[kTileElementsMax * 8 + kSlack];
};

DenseDecodeScratch& dense_decode_scratch() {
  thread_local const std::unique_ptr<DenseDecodeScratch> scratch(new DenseDecodeScratch);
  return *scratch;
}

}  // namespace

Result<DecodedTile> decode_dense(const Kernels& kernels, const TileShape& shape, const TileRecord& record) {
  DenseDecodeScratch& scratch = dense_decode_scratch();
  const unsigned width = shape.element_bytes * 8;
  const std::uint32_t n = shape.elements();
  const DenseChoice choice = dense_choice(record);
  if (n == 0 || choice.k >= width || record.payload.size() > shape.raw_bytes()) {
    return bad_payload("its record breaks a bound");
  }
  const DensePlaneSizes sizes = dense_plane_sizes(shape, choice);
  if (sizes.total() != record.payload.size()) return bad_payload("its size does not follow from the record");
  // A copy with readable slack behind it lets all planes be read in whole words.
  std::memcpy(scratch.payload, record.payload.data(), record.payload.size());
  std::memset(scratch.payload + record.payload.size(), 0, kSlack);
  const std::byte* const low = scratch.payload;
  const std::byte* const unary = low + sizes.low;
  const std::byte* const escape = unary + sizes.unary;
  if (!padding_ok(low, std::uint64_t{n} * choice.k))
    return bad_payload("the plane of low bits has bits behind its end");
  if (!unary_plane_ok(kernels.decode, unary, n + choice.sums.quotients, n)) {
    return bad_payload("the quotient plane does not end with its data");
  }
  if (!padding_ok(escape, std::uint64_t{choice.sums.escapes} * (width - choice.k))) {
    return bad_payload("the plane of escapes has bits behind its end");
  }
  // As gaps of which nothing stands in low bits, the quotients lead from one stop bit to the next.
  kernels.decode.positions(low, unary, sizes.unary, 0, n, scratch.stops);
  kernels.gaps(scratch.stops, n, scratch.quotients);
  const DensePlanes planes{choice.k, low, scratch.quotients, escape, choice.sums.quotients, choice.sums.escapes};
  if (const char* wrong = kernels.dense.join[shape.width_log2()](planes, n, scratch.diffs)) return bad_payload(wrong);
  const std::uint32_t changed =
      kernels.dense.list[shape.width_log2()](scratch.diffs, n, scratch.positions, scratch.listed);
  if (changed != record.changed) return bad_payload("its record says another number of changed elements");
  return DecodedTile{scratch.positions, scratch.listed, changed};
}

}  // namespace deltasync::delta
