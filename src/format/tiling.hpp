// Which tile lies where (layout_format.md "Tiling").
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "deltasync/layout.hpp"

namespace deltasync {

/// Where a tile lies. `rect` is in the tensor's 2-D view.
struct Tile {
  std::uint64_t index = 0;   ///< global
  std::uint32_t tensor = 0;  ///< index in the layout
  Rect rect;                 ///< rect.elements() ≤ kTileElementsMax
};
/// The tile with this global index (< layout.tile_count()). O(log tensors + cuts).
Tile tile_of(const Layout& layout, std::uint64_t index);

/// Tile geometry of one tensor, for loops over many of its tiles: bands × panels, numbered band by band. All panels of
/// a band share its rows, so a band is a contiguous byte range of a half. Band height and panel widths follow from the
/// shape and the cuts alone.
struct TileGrid {
  std::uint64_t band_rows = 0;              ///< rows of a full band
  std::vector<std::uint64_t> row_segments;  ///< 0, row cuts …, rows
  std::vector<std::uint64_t> band_base;     ///< first band of each row segment, then the number of bands
  std::vector<std::uint64_t> panel_starts;  ///< 0 … cols: one entry per panel, then cols
  std::uint64_t bands() const noexcept { return band_base.empty() ? 0 : band_base.back(); }
  std::uint64_t panels() const noexcept { return panel_starts.empty() ? 0 : panel_starts.size() - 1; }
  /// Rows of a band: {first row, number of rows}.
  std::pair<std::uint64_t, std::uint64_t> band(std::uint64_t index) const;
  /// The band that has this row.
  std::uint64_t band_of(std::uint64_t row) const;
};
/// Computed on demand from the spec: O(cuts + panels).
TileGrid grid_of(const Layout& layout, std::uint32_t tensor);

}  // namespace deltasync
