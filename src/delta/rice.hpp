// The Rice codecs of a tile's payload: planes of gaps and of values (delta_format.md "Tile payloads").
#pragma once

#include <cstdint>

#include "base/bytes.hpp"
#include "delta/delta.hpp"
#include "delta/geometry.hpp"
#include "delta/kernels.hpp"

namespace deltasync::delta {

inline constexpr unsigned kRiceKMax = 15;  ///< of gaps and of exponent classes alike

/// Bytes of the planes of a payload, in the order in which they lie.
struct PlaneSizes {
  std::size_t gap_low = 0;
  std::size_t gap_quotient = 0;
  std::size_t sign = 0;         ///< rice_ulp
  std::size_t gamma_unary = 0;  ///< rice_ulp
  std::size_t gamma_low = 0;    ///< rice_ulp
  std::size_t values = 0;       ///< rice_absolute

  std::size_t total() const noexcept { return gap_low + gap_quotient + sign + gamma_unary + gamma_low + values; }
};
PlaneSizes plane_sizes(Codec codec, std::uint32_t changed, unsigned k, std::uint32_t quotient_sum,
                       std::uint32_t gamma_bits, std::uint32_t element_bytes) noexcept;

/// Working memory of the encoder, one per worker.
struct RiceScratch {
  std::vector<std::uint16_t> gaps = std::vector<std::uint16_t>(kTileElementsMax + kSlack);
  std::vector<std::uint16_t> exceptions = std::vector<std::uint16_t>(kTileElementsMax + kSlack);
  std::vector<std::byte> signs = std::vector<std::byte>(kTileElementsMax / 8 + kSlack);
  std::vector<std::byte> numbers;  ///< of dense_ulp; grows with the tiles
};

/// The changed elements of one tile, as scanned.
struct ChangedElements {
  const std::uint16_t* positions = nullptr;
  const std::byte* diffs = nullptr;
  std::uint32_t count = 0;
};

/// Appends the payload of a changed tile to `out` in the smallest codec that `form` allows (differences rather than a
/// rice_absolute that is hardly smaller), and fills in the record's
/// codec, rice_k, changed, quotient_sum and gamma_bits. `after` is the tile's first element in the new half; the
/// absolute form reads no `changed.diffs`.
void encode_payload(const Kernels& kernels, const TileShape& shape, const ChangedElements& changed,
                    const std::byte* after, std::size_t row_stride, ValueForm form, RiceScratch& scratch,
                    TileRecord& record, std::vector<std::byte>& out);
/// The same with new elements only (rice_absolute), or with differences only (the smaller of rice_ulp and dense_ulp);
/// false, and nothing appended, if that is longer than the raw tile. The first reads no `changed.diffs`.
bool encode_elements(const Kernels& kernels, const TileShape& shape, const ChangedElements& changed,
                     const std::byte* after, std::size_t row_stride, RiceScratch& scratch, TileRecord& record,
                     std::vector<std::byte>& out);
bool encode_differences(const Kernels& kernels, const TileShape& shape, const ChangedElements& changed,
                        RiceScratch& scratch, TileRecord& record, std::vector<std::byte>& out);

/// A decoded payload, in a scratch memory of the calling thread that lives until its next decode.
struct DecodedTile {
  const std::uint16_t* positions = nullptr;  ///< ascending, all inside the tile
  std::byte* values = nullptr;               ///< new elements (rice_absolute) or differences (all others)
  std::uint32_t count = 0;
};
/// Total over hostile payloads: fails with `corrupt`, naming the bound, or returns positions inside the tile. The
/// record's fields and payload size must have passed parse_frame.
Result<DecodedTile> decode_rice(const TileShape& shape, const TileRecord& record);

}  // namespace deltasync::delta
