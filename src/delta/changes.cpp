#include "delta/changes.hpp"

#include <cstring>

#include "delta/codec.hpp"

namespace deltasync::delta {

Result<NumberKind> decode_changes(const Layout& layout, const TileRecord& record, MutByteSpan out) {
  if (!traits(record.codec).decodes_alone()) {
    return Error(Errc::unsupported,
                 tile_name(layout, record.tile) + ": " + to_string(record.codec) + " is not decoded without the tile");
  }
  const TileShape shape = tile_shape(layout, record.tile);
  Result<DecodedTile> decoded = decode_alone(active_kernels(), shape, record);
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
  if (!traits(record.codec).differences) return NumberKind::elements;
  return shape.is_float ? NumberKind::ulp_differences : NumberKind::differences;
}

}  // namespace deltasync::delta
