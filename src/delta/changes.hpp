// The changes of a record, decoded without the tile that it applies to: for callers that have that tile elsewhere.
#pragma once

#include <optional>

#include "delta/delta.hpp"

namespace deltasync::delta {

enum class NumberKind : std::uint8_t {
  elements,         ///< new elements
  differences,      ///< of integers, modulo 2^w
  ulp_differences,  ///< of floats: steps of the ulp map
};

/// Decodes a record of a codec that decodes_alone() (codec.hpp) into `out`, which has exactly resolved_bytes():
/// ascending positions inside the tile, then as many numbers. `corrupt`, naming the tile, if the payload breaks a
/// bound; unsupported if it cannot be decoded alone. Nothing is said of the digest.
Result<NumberKind> decode_changes(const Layout& layout, const TileRecord& record, MutByteSpan out);

}  // namespace deltasync::delta
