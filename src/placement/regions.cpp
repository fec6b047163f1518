#include "placement/regions.hpp"

#include <algorithm>

#include "format/rect_set.hpp"

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

/// A region that is needed for a tile of the tensor. Both count within the tensor, copies behind all primaries.
struct Need {
  std::uint64_t tile = 0;
  std::uint32_t region = 0;
};

void add_needs(const Layout::Grid& grid, const Rect& rect, std::uint32_t region, std::vector<Need>& needs) {
  const auto panel_of = [&](std::uint64_t col) {
    const auto after = std::upper_bound(grid.panel_starts.begin(), grid.panel_starts.end(), col);
    return static_cast<std::uint64_t>(after - grid.panel_starts.begin() - 1);
  };
  const std::uint64_t panels = grid.panels();
  const std::uint64_t first_panel = panel_of(rect.col);
  const std::uint64_t last_panel = panel_of(rect.col + rect.cols - 1);
  const std::uint64_t last_band = grid.band_of(rect.row + rect.rows - 1);
  for (std::uint64_t band = grid.band_of(rect.row); band <= last_band; ++band) {
    for (std::uint64_t panel = first_panel; panel <= last_panel; ++panel) {
      needs.push_back({band * panels + panel, region});
    }
  }
}

Rect tile_rect(const Layout::Grid& grid, std::uint64_t tile) {
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

/// Ends the parts with a list for one more tile: the last one again if it is the same.
void add_list(const std::vector<Region>& list, std::uint32_t primaries, Placement::Parts& parts) {
  const auto copies = static_cast<std::uint32_t>(list.size()) - primaries;
  if (!parts.of_tile.empty()) {
    const TileRegions& last = parts.of_tile.back();
    if (last.primaries == primaries && last.copies == copies &&
        std::equal(list.begin(), list.end(), parts.regions.begin() + last.first)) {
      parts.of_tile.push_back(last);
      return;
    }
  }
  parts.of_tile.push_back({static_cast<std::uint32_t>(parts.regions.size()), primaries, copies});
  parts.regions.insert(parts.regions.end(), list.begin(), list.end());
}

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
               Placement::Parts& parts, std::uint64_t& rest_bytes) {
  const Layout::Grid grid = layout.grid(tensor);
  const auto primaries = static_cast<std::uint32_t>(regions.primaries.size());
  std::vector<Need> needs;
  for (std::uint32_t i = 0; i < primaries; ++i) add_needs(grid, regions.primaries[i].rect, i, needs);
  for (std::uint32_t i = 0; i < regions.copies.size(); ++i) {
    add_needs(grid, regions.copies[i].rect, primaries + i, needs);
  }
  std::sort(needs.begin(), needs.end(),
            [](const Need& a, const Need& b) { return a.tile != b.tile ? a.tile < b.tile : a.region < b.region; });
  std::vector<Region> list;
  for (std::size_t i = 0; i < needs.size();) {
    const std::uint64_t tile = needs[i].tile;
    const Rect rect = tile_rect(grid, tile);
    list.clear();
    std::uint64_t elements = 0;
    for (; i < needs.size() && needs[i].tile == tile && needs[i].region < primaries; ++i) {
      list.push_back(regions.primaries[needs[i].region]);
      elements += intersection(list.back().rect, rect).elements();
    }
    if (elements != rect.elements()) {
      add_rest(rect, placed, layout.tensors()[tensor].element_bytes, rest_bytes, list);
    }
    std::sort(list.begin(), list.end(), [](const Region& a, const Region& b) {
      return a.rect.row != b.rect.row ? a.rect.row < b.rect.row : a.rect.col < b.rect.col;
    });
    const auto first_copy = static_cast<std::uint32_t>(list.size());
    for (; i < needs.size() && needs[i].tile == tile; ++i) list.push_back(regions.copies[needs[i].region - primaries]);
    add_list(list, first_copy, parts);
  }
}

}  // namespace deltasync
