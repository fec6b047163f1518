#include "delta/changes.hpp"

#include <cstring>

#include "delta/dense_codec.hpp"
#include "delta/rice.hpp"

namespace deltasync::delta {

bool decodes_alone(Codec codec) noexcept {
  return codec == Codec::rice_absolute || codec == Codec::rice_ulp || codec == Codec::dense_ulp;
}

Result<NumberKind> decode_changes(const Layout& layout, const TileRecord& record, MutByteSpan out) {
  if (!decodes_alone(record.codec)) {
    return Error(Errc::unsupported,
                 tile_name(layout, record.tile) + ": " + to_string(record.codec) + " is not decoded without the tile");
  }
  const TileShape shape = tile_shape(layout, record.tile);
  Result<DecodedTile> decoded =
      record.codec == Codec::dense_ulp ? decode_dense(active_kernels(), shape, record) : decode_rice(shape, record);
  if (!decoded.ok()) return std::move(decoded).error().with_context(tile_name(layout, record.tile));
  const std::size_t position_bytes = std::size_t{decoded->count} * sizeof(std::uint16_t);
  const std::size_t number_bytes = std::size_t{decoded->count} * shape.element_bytes;
  if (out.size() != position_bytes + number_bytes) {
    return Error(Errc::corrupt, tile_name(layout, record.tile) + ": " + std::to_string(decoded->count) +
                                    " changes, its record says " + std::to_string(record.changed));
  }
  if (decoded->count != 0) {
    std::memcpy(out.data(), decoded->positions, position_bytes);
    std::memcpy(out.data() + position_bytes, decoded->values, number_bytes);
  }
  if (record.codec == Codec::rice_absolute) return NumberKind::elements;
  return shape.is_float ? NumberKind::ulp_differences : NumberKind::differences;
}

}  // namespace deltasync::delta
