// How the tiles that a placement needs lie in memory: each tile has a list of *regions*, rectangles of its tensor with
// an affine place each. A list is shared by the tiles that lie alike, so a tensor in one piece has one region, however
// many tiles.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "deltasync/placement.hpp"
#include "format/tile_set.hpp"

namespace deltasync {

/// Stands for the memory of elements that have no place: the executor's own, on the host.
inline constexpr std::uint32_t kRestMemory = std::numeric_limits<std::uint32_t>::max();

/// Elements of `rect` (of the tensor's 2-D view): (row, col) is at offset + (row − rect.row)·row_stride + (col −
/// rect.col)·col_stride in its memory.
struct Region {
  Rect rect;
  std::uint32_t memory = 0;  ///< index in Placement::memories(), or kRestMemory
  std::uint64_t offset = 0;
  std::uint64_t row_stride = 0;
  std::uint64_t col_stride = 0;

  bool operator==(const Region&) const = default;
};

/// The regions of one tile, which may reach beyond it.
struct TileRegions {
  std::uint32_t first = 0;
  /// Disjoint, and within the tile they have every element. Sorted by first row and column, in bands: none begins
  /// between the first and the last row that another has in the tile. So an element is found by two searches.
  std::uint32_t primaries = 0;
  /// Behind them: further places of some elements, which are written and never read.
  std::uint32_t copies = 0;
};

struct PlacementParts {
  TileSet tiles;
  std::vector<TileRegions> of_tile;  ///< by the tile's rank in the set
  std::vector<Region> regions;

  std::span<const Region> primaries(const TileRegions& t) const {
    return std::span(regions).subspan(t.first, t.primaries);
  }
  std::span<const Region> copies(const TileRegions& t) const {
    return std::span(regions).subspan(t.first + t.primaries, t.copies);
  }
};

/// How tiles lie in a placement's memories.
const PlacementParts& parts_of(const Placement& placement) noexcept;

/// A placed slice whose names have been looked up. Not empty.
struct BoundSlice {
  std::uint32_t tensor = 0;
  std::uint32_t index = 0;  ///< in the plan
  Region place;
};

/// What the slices of one tensor make of it.
struct TensorRegions {
  std::vector<Region> primaries;  ///< disjoint
  std::vector<Region> copies;
};

class RectSet;
/// The first slice that has an element decides where that is read; `placed` (empty before) gets all that have a place.
TensorRegions make_tensor_regions(std::span<const BoundSlice> slices, RectSet& placed);

/// Appends the needed tiles of one tensor to `parts`, and the rest memory that they take to `rest_bytes`.
void add_tiles(const Layout& layout, std::uint32_t tensor, const TensorRegions& regions, const RectSet& placed,
               PlacementParts& parts, std::uint64_t& rest_bytes);

/// What both have; nothing in it if they are disjoint.
Rect intersection(const Rect& a, const Rect& b) noexcept;

}  // namespace deltasync
