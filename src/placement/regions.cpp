#include "placement/regions.hpp"

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "format/rect_set.hpp"
#include "format/tiling.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kRestAlignment = 8;  ///< bytes; the widest element's

/// The part of a region that has these elements.
Region part_of(const Region& whole, const Rect& rect) {
  Region part = whole;
  part.rect = rect;
  part.offset += (rect.row - whole.rect.row) * whole.row_stride + (rect.col - whole.rect.col) * whole.col_stride;
  return part;
}

/// Calls fn(tile) for each tile of the tensor that has an element of the rectangle.
template <class Fn>
void for_each_tile(const TileGrid& grid, const Rect& rect, const Fn& fn) {
  const auto panel_of = [&](std::uint64_t col) {
    const auto after = std::upper_bound(grid.panel_starts.begin(), grid.panel_starts.end(), col);
    return static_cast<std::uint64_t>(after - grid.panel_starts.begin() - 1);
  };
  const std::uint64_t panels = grid.panels();
  const std::uint64_t first_panel = panel_of(rect.col);
  const std::uint64_t last_panel = panel_of(rect.col + rect.cols - 1);
  const std::uint64_t last_band = grid.band_of(rect.row + rect.rows - 1);
  for (std::uint64_t band = grid.band_of(rect.row); band <= last_band; ++band) {
    for (std::uint64_t panel = first_panel; panel <= last_panel; ++panel) fn(band * panels + panel);
  }
}

/// The regions that each tile of a tensor needs, in the order of `regions`: thousands of slices may lie in each of
/// hundreds of tiles, so they are counted and not sorted.
class Needs {
 public:
  Needs(const TileGrid& grid, std::span<const Region> regions) : starts_(grid.bands() * grid.panels() + 1) {
    for (const Region& region : regions) for_each_tile(grid, region.rect, [&](std::uint64_t t) { ++starts_[t + 1]; });
    std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
    list_.resize(starts_.back());
    std::vector<std::size_t> next(starts_.begin(), starts_.end() - 1);
    for (const Region& region : regions)
      for_each_tile(grid, region.rect, [&](std::uint64_t t) { list_[next[t]++] = &region; });
  }
  std::span<const Region* const> of(std::uint64_t tile) const {
    return std::span(list_).subspan(starts_[tile], starts_[tile + 1] - starts_[tile]);
  }

 private:
  std::vector<std::size_t> starts_;
  std::vector<const Region*> list_;
};

Rect tile_rect(const TileGrid& grid, std::uint64_t tile) {
  const auto [row, rows] = grid.band(tile / grid.panels());
  const std::uint64_t panel = tile % grid.panels();
  return {row, grid.panel_starts[panel], rows, grid.panel_starts[panel + 1] - grid.panel_starts[panel]};
}

/// The elements of a tile that nobody placed, one rectangle behind the other in rest memory.
void add_rest(const Rect& tile, const RectSet& placed, std::uint32_t element_bytes, std::uint64_t& rest_bytes,
              std::vector<Region>& list) {
  std::vector<Rect> inside;
  std::vector<Rect> outside;
  placed.split(tile, inside, outside);
  for (const Rect& rect : outside) {
    list.push_back({rect, kRestMemory, rest_bytes, rect.cols * element_bytes, element_bytes});
    const std::uint64_t bytes = rect.elements() * element_bytes;
    rest_bytes += (bytes + kRestAlignment - 1) / kRestAlignment * kRestAlignment;
  }
}

bool before(const Region& a, const Region& b) {
  return a.rect.row != b.rect.row ? a.rect.row < b.rect.row : a.rect.col < b.rect.col;
}

/// Of a sorted list: see TileRegions::primaries. `end`: behind the tile's last row.
bool are_in_bands(const std::vector<Region>& list, std::uint64_t end) {
  std::uint64_t band_end = 0;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Rect& rect = list[i].rect;
    if (i > 0 && rect.row != list[i - 1].rect.row && rect.row < band_end) return false;
    band_end = std::max(band_end, std::min(rect.row + rect.rows, end));
  }
  return true;
}

/// Cuts what the regions have of the tile wherever one of them begins: at most as many as the tile has elements.
void cut_into_bands(const Rect& tile, std::vector<Region>& list) {
  std::vector<std::uint64_t> starts;
  starts.reserve(list.size());
  for (const Region& region : list) starts.push_back(region.rect.row);
  std::sort(starts.begin(), starts.end());
  std::vector<Region> cut;
  for (const Region& region : list) {
    const Rect both = intersection(region.rect, tile);
    const std::uint64_t end = both.row + both.rows;
    for (std::uint64_t row = both.row; row < end;) {
      const auto next = std::upper_bound(starts.begin(), starts.end(), row);
      const std::uint64_t until = next == starts.end() ? end : std::min(end, *next);
      cut.push_back(part_of(region, {row, both.col, until - row, both.cols}));
      row = until;
    }
  }
  list = std::move(cut);
}

void sort_into_bands(const Rect& tile, std::vector<Region>& list) {
  std::sort(list.begin(), list.end(), before);
  if (are_in_bands(list, tile.row + tile.rows)) return;
  cut_into_bands(tile, list);
  std::sort(list.begin(), list.end(), before);
}

/// The lists of one tensor, which its tiles share: rows of tiles often repeat what is in the row above.
class Lists {
 public:
  explicit Lists(PlacementParts& parts) : parts_(parts) {}

  /// Ends the parts with a list for one more tile: one that is there already, if it is the same.
  void add(const std::vector<Region>& list, std::uint32_t primaries) {
    const auto copies = static_cast<std::uint32_t>(list.size()) - primaries;
    auto [at, end] = by_key_.equal_range(key(list));
    for (; at != end; ++at) {
      const TileRegions& known = at->second;
      if (known.primaries != primaries || known.copies != copies) continue;
      if (!std::equal(list.begin(), list.end(), parts_.regions.begin() + known.first)) continue;
      parts_.of_tile.push_back(known);
      return;
    }
    parts_.of_tile.push_back({static_cast<std::uint32_t>(parts_.regions.size()), primaries, copies});
    parts_.regions.insert(parts_.regions.end(), list.begin(), list.end());
    by_key_.emplace(key(list), parts_.of_tile.back());
  }

 private:
  static std::uint64_t key(const std::vector<Region>& list) {
    std::uint64_t sum = list.size();
    for (const Region& r : list) {
      for (const std::uint64_t v : {r.rect.row, r.rect.col, std::uint64_t{r.memory}, r.offset}) {
        sum = (sum ^ v) * 0x9e3779b97f4a7c15ull;
        sum ^= sum >> 32;
      }
    }
    return sum;
  }

  PlacementParts& parts_;
  std::unordered_multimap<std::uint64_t, TileRegions> by_key_;
};

}  // namespace

Rect intersection(const Rect& a, const Rect& b) noexcept {
  const std::uint64_t row = std::max(a.row, b.row);
  const std::uint64_t col = std::max(a.col, b.col);
  const std::uint64_t row_end = std::min(a.row + a.rows, b.row + b.rows);
  const std::uint64_t col_end = std::min(a.col + a.cols, b.col + b.cols);
  if (row_end <= row || col_end <= col) return {};
  return {row, col, row_end - row, col_end - col};
}

TensorRegions make_tensor_regions(std::span<const BoundSlice> slices, RectSet& placed) {
  TensorRegions regions;
  std::vector<Rect> inside;
  std::vector<Rect> outside;
  for (const BoundSlice& slice : slices) {
    inside.clear();
    outside.clear();
    placed.split(slice.place.rect, inside, outside);
    for (const Rect& rect : outside) {
      placed.insert(rect);
      regions.primaries.push_back(part_of(slice.place, rect));
    }
    for (const Rect& rect : inside) regions.copies.push_back(part_of(slice.place, rect));
  }
  return regions;
}

void add_tiles(const Layout& layout, std::uint32_t tensor, const TensorRegions& regions, const RectSet& placed,
               PlacementParts& parts, std::uint64_t& rest_bytes) {
  const TileGrid grid = grid_of(layout, tensor);
  if (regions.primaries.empty()) return;
  const Needs primaries(grid, regions.primaries);
  const Needs copies(grid, regions.copies);
  Lists lists(parts);
  std::vector<Region> list;
  for (std::uint64_t tile = 0; tile < grid.bands() * grid.panels(); ++tile) {
    if (primaries.of(tile).empty()) continue;
    const Rect rect = tile_rect(grid, tile);
    list.clear();
    std::uint64_t elements = 0;
    for (const Region* region : primaries.of(tile)) {
      list.push_back(*region);
      elements += intersection(region->rect, rect).elements();
    }
    if (elements != rect.elements()) {
      add_rest(rect, placed, layout.tensors()[tensor].element_bytes, rest_bytes, list);
    }
    sort_into_bands(rect, list);
    const auto first_copy = static_cast<std::uint32_t>(list.size());
    for (const Region* region : copies.of(tile)) list.push_back(*region);
    lists.add(list, first_copy);
  }
}

}  // namespace deltasync
