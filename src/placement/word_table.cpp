#include "placement/word_table.hpp"
#include "format/tiling.hpp"
#include "placement/regions.hpp"

namespace deltasync::placement {

WordTables make_word_tables(const Placement& placement,
                            const std::function<std::byte*(std::uint32_t memory)>& base_of) {
  const PlacementParts& parts = parts_of(placement);
  const Layout& layout = *placement.layout();
  WordTables tables;
  tables.regions.reserve(parts.regions.size());
  for (const Region& region : parts.regions) {
    std::byte* const base = base_of(region.memory);
    const Rect& r = region.rect;
    tables.regions.push_back({r.row, r.col, r.rows, r.cols, base == nullptr ? nullptr : base + region.offset,
                              region.row_stride, region.col_stride});
  }
  tables.tiles.reserve(parts.of_tile.size());
  for (const wire::TileRange& range : parts.tiles.ranges()) {
    for (std::uint64_t index = range.first; index < range.end; ++index) {
      const Tile tile = tile_of(layout, index);
      const TileRegions& of = parts.of_tile[tables.tiles.size()];
      tables.tiles.push_back({tile.rect.row, tile.rect.col, static_cast<std::uint32_t>(tile.rect.cols),
                              layout.tensors()[tile.tensor].element_bytes, of.first, of.primaries, of.copies});
    }
  }
  return tables;
}

}  // namespace deltasync::placement
