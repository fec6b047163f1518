// The codec raw_planes (delta_format.md "Packed tiles"): a whole tile, its elements split into planes of bytes, so
// that those with the exponents, which hold few values, shrink by an entropy coder, and the others are left alone.
#pragma once

#include <vector>

#include "delta/delta.hpp"
#include "delta/geometry.hpp"

namespace deltasync::delta {

/// Packs a tile, `raw` row by row without padding. If that is smaller than the raw tile, appends the payload to `out`,
/// fills in the record's codec, rice_k and changed, and returns true. Else, or for lack of memory, changes nothing.
/// Works in memory of the calling thread: about 1 MiB for bf16.
bool encode_planes(const TileShape& shape, ByteSpan raw, TileRecord& record, std::vector<std::byte>& out);

/// The bytes of a tile whose record is raw (they are in the record's payload then) or raw_planes (in a scratch memory
/// of the calling thread that lives until its next call). Total over hostile payloads, in memory that the tile's size
/// bounds: fails with `corrupt`, naming the bound. The record's fields must have passed parse_frame.
Result<ByteSpan> whole_tile_bytes(const TileShape& shape, const TileRecord& record);

}  // namespace deltasync::delta
