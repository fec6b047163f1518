#include "writer/progress.hpp"
#include "format/tiling.hpp"

#include <algorithm>
#include <utility>

namespace deltasync {
namespace {

/// Length of what [a, a+n) and [b, b+m) have in common.
std::uint64_t overlap(std::uint64_t a, std::uint64_t n, std::uint64_t b, std::uint64_t m) {
  const std::uint64_t begin = std::max(a, b);
  const std::uint64_t end = std::min(a + n, b + m);
  return end > begin ? end - begin : 0;
}

}  // namespace

BatchCounter::BatchCounter(LayoutPtr layout) : layout_(std::move(layout)), batches_(delta::make_batches(*layout_)) {}

void BatchCounter::add_elements(std::uint64_t tile, std::uint64_t elements) {
  if (!parts_.empty() && tile >= here_.first && tile < here_.end) {
    parts_.back().elements += elements;
    return;
  }
  const auto after = std::upper_bound(batches_.begin(), batches_.end(), tile,
                                      [](std::uint64_t t, const delta::Batch& b) { return t < b.end; });
  here_ = *after;
  parts_.push_back({static_cast<std::uint64_t>(after - batches_.begin()), elements});
}

void BatchCounter::add_tiles(std::uint32_t tensor, const Rect& rect) {
  const Tensor& t = layout_->tensors()[tensor];
  if (t.tile_count == 1) return add_elements(t.first_tile, rect.elements());
  const TileGrid grid = grid_of(*layout_, tensor);
  const auto& starts = grid.panel_starts;
  // The first panel that ends behind the slice's first column, and the first that begins behind its last.
  const auto first =
      static_cast<std::uint64_t>(std::upper_bound(starts.begin() + 1, starts.end(), rect.col) - starts.begin() - 1);
  const auto end = static_cast<std::uint64_t>(std::lower_bound(starts.begin(), starts.end() - 1, rect.col + rect.cols) -
                                              starts.begin());
  for (std::uint64_t b = grid.band_of(rect.row); b < grid.bands(); ++b) {
    const auto [row, rows] = grid.band(b);
    if (row >= rect.row + rect.rows) break;
    const std::uint64_t common = overlap(row, rows, rect.row, rect.rows);
    for (std::uint64_t p = first; p < end; ++p) {
      add_elements(t.first_tile + b * grid.panels() + p,
                   common * overlap(starts[p], starts[p + 1] - starts[p], rect.col, rect.cols));
    }
  }
}

}  // namespace deltasync
