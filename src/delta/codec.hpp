// The codecs of tiles (delta_format.md "Tile payloads"), one row for each: who handles records asks what a codec needs
// and gives, not which one it is.
#pragma once

#include "delta/delta.hpp"
#include "delta/geometry.hpp"
#include "delta/kernels.hpp"
#include "delta/rice.hpp"

namespace deltasync::delta {

struct CodecTraits {
  const char* name = "unknown";
  bool whole_tile = false;      ///< gives every element, whatever was there; else those that changed
  bool differences = false;     ///< its numbers are added to the old elements; else they replace them
  bool needs_old_tile = false;  ///< where the elements are follows from the old tile, so undoing needs a list of them
  bool floats_only = false;
  bool own_header = false;   ///< how long a payload is says its own header; else its record
  unsigned record_sums = 0;  ///< of quotient_sum and gamma_bits: how many a record has
  /// Lists the changed elements in a scratch memory of the calling thread that lives until its next decode; null for
  /// whole tiles. Total over hostile payloads: `corrupt` names the bound. `old` is the old tile's first element, and is
  /// looked at where needs_old_tile says so. The record's fields must have passed parse_frame.
  Result<DecodedTile> (*decode)(const Kernels& kernels, const TileShape& shape, const TileRecord& record,
                                const std::byte* old, std::size_t row_stride) = nullptr;

  /// The record itself brings the tile back to what it was.
  bool inverts() const noexcept { return differences && !needs_old_tile; }
  /// Its changes can be listed without the tile.
  bool decodes_alone() const noexcept { return !whole_tile && !needs_old_tile; }
  /// What agents keep and merge. The others are made of these when a receiver on a slow link asks.
  bool kept() const noexcept { return !own_header; }
};

extern const CodecTraits kCodecTraits[kCodecEnd];

/// A codec that is none has the traits of raw under another name; parse_frame lets none through.
inline const CodecTraits& traits(Codec codec) noexcept {
  const auto i = static_cast<std::size_t>(codec);
  return kCodecTraits[i < kCodecEnd ? i : 0];
}

/// Decodes a record of a codec that decodes_alone(), with this process's kernels or others.
inline Result<DecodedTile> decode_alone(const Kernels& kernels, const TileShape& shape, const TileRecord& record) {
  return traits(record.codec).decode(kernels, shape, record, nullptr, 0);
}

}  // namespace deltasync::delta
