// Which tile lies where (layout_format.md "Tiling"). All of it is arithmetic on shapes and cuts: no tile is
// ever enumerated to count or to find one, so a model of many terabytes costs what its tensor list costs.
#include <algorithm>
#include <cassert>

#include "format/layout_index.hpp"
#include "format/tiling.hpp"

namespace deltasync {
namespace {

/// Panel widths are multiples of this many elements, but for the last panel of a column segment.
constexpr std::uint64_t kPanelWidthMultiple = 8;

constexpr std::uint64_t ceil_div(std::uint64_t n, std::uint64_t d) {
  return n / d + (n % d != 0 ? 1 : 0);
}

/// Width of all panels but the last of a column segment of this width.
std::uint64_t panel_width(std::uint64_t segment_cols) {
  const auto panels = ceil_div(segment_cols, kTileElementsMax);
  return ceil_div(ceil_div(segment_cols, panels), kPanelWidthMultiple) * kPanelWidthMultiple;
}

/// Calls fn(start, length) for the segments of [0, length) between cuts, in order, until it returns false.
template <class Fn>
void for_each_segment(std::uint64_t length, const std::vector<std::uint64_t>& cuts, Fn&& fn) {
  std::uint64_t start = 0;
  for (const auto cut : cuts) {
    if (!fn(start, cut - start)) return;
    start = cut;
  }
  if (start < length) fn(start, length - start);
}

struct Interval {
  std::uint64_t start = 0;
  std::uint64_t length = 0;
};

/// The interval number `index` of [0, length) when each segment is split into pieces of step_of(segment length).
template <class StepOf>
Interval locate(std::uint64_t length, const std::vector<std::uint64_t>& cuts, std::uint64_t index, StepOf&& step_of) {
  Interval interval;
  for_each_segment(length, cuts, [&](std::uint64_t start, std::uint64_t segment) {
    const auto step = step_of(segment);
    const auto pieces = ceil_div(segment, step);
    if (index >= pieces) {
      index -= pieces;
      return true;
    }
    interval = {start + index * step, std::min(step, segment - index * step)};
    return false;
  });
  return interval;
}

}  // namespace

TileGeometry tile_geometry(const TensorSpec& spec, std::uint64_t rows, std::uint64_t cols) {
  TileGeometry g;
  if (rows == 0 || cols == 0) return g;
  std::uint64_t widest = 0;
  for_each_segment(cols, spec.col_cuts, [&](std::uint64_t, std::uint64_t segment) {
    const auto width = panel_width(segment);
    g.panels += ceil_div(segment, width);
    widest = std::max(widest, std::min(width, segment));
    return true;
  });
  g.band_rows = std::max<std::uint64_t>(1, kTileElementsMax / widest);
  for_each_segment(rows, spec.row_cuts, [&](std::uint64_t, std::uint64_t segment) {
    g.bands += ceil_div(segment, g.band_rows);
    return true;
  });
  return g;
}

std::uint32_t Layout::tensor_of_tile(std::uint64_t index) const {
  assert(index < tile_count_);
  // The last tensor that begins at or before it: empty tensors share their successor's first tile.
  const auto& first = index_->first_tile;
  const auto after = std::upper_bound(first.begin(), first.end(), index);
  return static_cast<std::uint32_t>(after - first.begin() - 1);
}

Tile tile_of(const Layout& layout, std::uint64_t index) {
  Tile tile;
  tile.index = index;
  tile.tensor = layout.tensor_of_tile(index);
  const Tensor& t = layout.tensors_[tile.tensor];
  const TileGeometry& g = layout.index_->geometry[tile.tensor];
  const auto local = index - t.first_tile;
  const auto band = locate(t.rows, t.spec.row_cuts, local / g.panels, [&](std::uint64_t) { return g.band_rows; });
  const auto panel = locate(t.cols, t.spec.col_cuts, local % g.panels, panel_width);
  tile.rect = {band.start, panel.start, band.length, panel.length};
  return tile;
}

TileGrid grid_of(const Layout& layout, std::uint32_t tensor) {
  const Tensor& t = layout.tensors_[tensor];
  TileGrid grid;
  if (t.tile_count == 0) return grid;
  const TileGeometry& g = layout.index_->geometry[tensor];
  grid.band_rows = g.band_rows;
  grid.row_segments.reserve(t.spec.row_cuts.size() + 2);
  grid.band_base.reserve(t.spec.row_cuts.size() + 2);
  std::uint64_t bands = 0;
  for_each_segment(t.rows, t.spec.row_cuts, [&](std::uint64_t start, std::uint64_t segment) {
    grid.row_segments.push_back(start);
    grid.band_base.push_back(bands);
    bands += ceil_div(segment, g.band_rows);
    return true;
  });
  grid.row_segments.push_back(t.rows);
  grid.band_base.push_back(bands);
  grid.panel_starts.reserve(g.panels + 1);
  for_each_segment(t.cols, t.spec.col_cuts, [&](std::uint64_t start, std::uint64_t segment) {
    const auto width = panel_width(segment);
    for (std::uint64_t col = 0; col < segment; col += width) grid.panel_starts.push_back(start + col);
    return true;
  });
  grid.panel_starts.push_back(t.cols);
  return grid;
}

std::pair<std::uint64_t, std::uint64_t> TileGrid::band(std::uint64_t index) const {
  assert(index < bands());
  const auto after = std::upper_bound(band_base.begin(), band_base.end(), index);
  const auto segment = static_cast<std::size_t>(after - band_base.begin() - 1);
  const auto first = row_segments[segment] + (index - band_base[segment]) * band_rows;
  return {first, std::min(band_rows, row_segments[segment + 1] - first)};
}

std::uint64_t TileGrid::band_of(std::uint64_t row) const {
  assert(!row_segments.empty() && row < row_segments.back());
  const auto after = std::upper_bound(row_segments.begin(), row_segments.end(), row);
  const auto segment = static_cast<std::size_t>(after - row_segments.begin() - 1);
  return band_base[segment] + (row - row_segments[segment]) / band_rows;
}

}  // namespace deltasync
