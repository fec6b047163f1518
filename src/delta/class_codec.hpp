// The codec rice_class (delta_format.md "Exponent classes"): the changed positions of a tile of floats, named
// class by class of the old exponents, which the decoder has and which say most about where a small step changes an
// element.
//
// Both directions first lay the exponents of the tile out as bytes and mark the elements of each class in a mask; from
// there on all work is per changed element and per word of a mask. The loops over all elements are kernels.
#pragma once

#include <memory>

#include "delta/class_tile.hpp"
#include "delta/rice.hpp"

namespace deltasync::delta {

/// Working memory of the encoder, one per thread: about 0.5 MiB, and the differences of the densest tile so far.
struct ClassEncodeScratch {
  std::vector<std::uint8_t> exponents = std::vector<std::uint8_t>(kTileElementsMax);
  std::vector<std::uint64_t> mask = std::vector<std::uint64_t>(kTileMaskWords);  ///< of one class
  // Class after class.
  std::vector<std::uint16_t> positions = std::vector<std::uint16_t>(kTileElementsMax);
  std::vector<std::uint16_t> gaps = std::vector<std::uint16_t>(kTileElementsMax);
  std::vector<std::byte> diffs;
  std::vector<std::byte> signs = std::vector<std::byte>(kTileElementsMax / 8 + kSlack);
  std::vector<std::uint16_t> exceptions = std::vector<std::uint16_t>(kTileElementsMax + kSlack);
  std::vector<std::byte> header;
};

/// Encodes the changed elements of a tile of floats; `before` is the tile's first element in the old state. If the
/// record and payload together take fewer than `limit` bytes (without the record's tile gap), appends the payload to
/// `out`, fills in the record's codec, rice_k, changed, quotient_sum and gamma_bits, and returns true. Else, or if the
/// dtype has no exponents, changes nothing. The result does not depend on the kernels.
bool encode_class(const Kernels& kernels, const TileShape& shape, const ChangedElements& changed,
                  const std::byte* before, std::size_t row_stride, std::size_t limit, ClassEncodeScratch& scratch,
                  TileRecord& record, std::vector<std::byte>& out);
/// With those of this process.
bool encode_class(const TileShape& shape, const ChangedElements& changed, const std::byte* before,
                  std::size_t row_stride, std::size_t limit, ClassEncodeScratch& scratch, TileRecord& record,
                  std::vector<std::byte>& out);

/// Decodes a payload over the old tile at `first`, which is only read, into ascending positions and ulp differences, in
/// a scratch memory of the calling thread (about 2.7 MiB) that lives until its next decode. Total over hostile payloads
/// and over any old tile: fails with `corrupt`, naming the bound, in time proportional to the tile. The record's fields
/// must have passed parse_frame.
Result<DecodedTile> decode_class(const Kernels& kernels, const TileShape& shape, const TileRecord& record,
                                 const std::byte* first, std::size_t row_stride);

}  // namespace deltasync::delta
