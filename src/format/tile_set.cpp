#include "format/tile_set.hpp"

#include <algorithm>
#include <utility>

#include "base/hash.hpp"
#include "format/tiling.hpp"

namespace deltasync {
namespace {

/// Elements of a tensor in the tiles before its tile number `local`.
std::uint64_t elements_before(const Tensor& tensor, const TileGrid& grid, std::uint64_t local) {
  if (local == tensor.tile_count) return tensor.rows * tensor.cols;
  const auto [row, rows] = grid.band(local / grid.panels());
  return row * tensor.cols + rows * grid.panel_starts[local % grid.panels()];
}

std::string describe(const Rect& rect) {
  return "rows " + std::to_string(rect.row) + " to " + std::to_string(rect.row + rect.rows) + ", columns " +
         std::to_string(rect.col) + " to " + std::to_string(rect.col + rect.cols);
}

bool inside(const Rect& rect, const Tensor& tensor) {
  return rect.row <= tensor.rows && rect.rows <= tensor.rows - rect.row && rect.col <= tensor.cols &&
         rect.cols <= tensor.cols - rect.col;
}

/// The tiles that a rectangle with elements cuts: one range, or one for each band.
void add_tiles(const Layout& layout, std::uint32_t index, const Rect& rect, std::vector<wire::TileRange>& out) {
  const Tensor& tensor = layout.tensors()[index];
  if (rect.rows == tensor.rows && rect.cols == tensor.cols) {
    out.push_back({tensor.first_tile, tensor.first_tile + tensor.tile_count});
    return;
  }
  const TileGrid grid = grid_of(layout, index);
  const auto panel_of = [&](std::uint64_t col) {
    const auto after = std::upper_bound(grid.panel_starts.begin(), grid.panel_starts.end(), col);
    return static_cast<std::uint64_t>(after - grid.panel_starts.begin() - 1);
  };
  const std::uint64_t panels = grid.panels();
  const std::uint64_t first_panel = panel_of(rect.col);
  const std::uint64_t end_panel = panel_of(rect.col + rect.cols - 1) + 1;
  const std::uint64_t first_band = grid.band_of(rect.row);
  const std::uint64_t end_band = grid.band_of(rect.row + rect.rows - 1) + 1;
  if (first_panel == 0 && end_panel == panels) {
    out.push_back({tensor.first_tile + first_band * panels, tensor.first_tile + end_band * panels});
    return;
  }
  for (std::uint64_t band = first_band; band < end_band; ++band) {
    const std::uint64_t first = tensor.first_tile + band * panels;
    out.push_back({first + first_panel, first + end_panel});
  }
}

/// Sorts, and joins what overlaps or touches.
void join(std::vector<wire::TileRange>& ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::size_t last = 0;
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first <= ranges[last].end) {
      ranges[last].end = std::max(ranges[last].end, ranges[i].end);
    } else {
      ranges[++last] = ranges[i];
    }
  }
  if (!ranges.empty()) ranges.resize(last + 1);
}

struct RankSlice {
  std::uint32_t tensor = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

Result<std::uint32_t> find_tensor(const Layout& layout, std::string_view name) {
  const auto index = layout.find(name);
  if (!index) return Error(Errc::not_found, "the layout has no tensor '" + std::string(name) + "'");
  return *index;
}

Result<RankSlice> rank_slice(const Layout& layout, std::string_view name, std::uint64_t index, std::uint64_t count,
                             bool by_row) {
  DS_ASSIGN(const std::uint32_t tensor, find_tensor(layout, name));
  if (index >= count) {
    return Error(Errc::invalid_argument, "slice " + std::to_string(index) + " of " + std::to_string(count) + " of '" +
                                             std::string(name) + "': slices are numbered from 0");
  }
  const Tensor& t = layout.tensors()[tensor];
  const std::uint64_t length = by_row ? t.rows : t.cols;
  if (count > length && length != 0) {
    return Error(Errc::invalid_argument, "'" + std::string(name) + "' has " + std::to_string(length) +
                                             (by_row ? " rows" : " columns") + ", too few for " +
                                             std::to_string(count) + " slices");
  }
  const auto at = [&](std::uint64_t i) { return i * (length / count) + std::min(i, length % count); };
  return RankSlice{tensor, at(index), at(index + 1)};
}

}  // namespace

/// Only the tensors that are cut are looked at closely.
std::uint64_t bytes_of_tiles(const Layout& layout, const std::vector<wire::TileRange>& ranges) {
  std::uint64_t bytes = 0;
  std::optional<std::uint32_t> cut;  // whose grid this is
  TileGrid grid;
  for (const wire::TileRange& range : ranges) {
    std::uint32_t index = layout.tensor_of_tile(range.first);
    for (std::uint64_t tile = range.first; tile < range.end; ++index) {
      const Tensor& tensor = layout.tensors()[index];
      if (tensor.tile_count == 0) continue;
      const std::uint64_t first = tile - tensor.first_tile;
      const std::uint64_t end = std::min(range.end - tensor.first_tile, tensor.tile_count);
      tile = tensor.first_tile + end;
      if (first == 0 && end == tensor.tile_count) {
        bytes += tensor.bytes;
        continue;
      }
      if (cut != index) grid = grid_of(layout, index);
      cut = index;
      bytes += (elements_before(tensor, grid, end) - elements_before(tensor, grid, first)) * tensor.element_bytes;
    }
  }
  return bytes;
}

// ---- slices ------------------------------------------------------------------------------------------------------

Result<Slice> row_slice(const Layout& layout, std::string_view tensor, std::uint64_t index, std::uint64_t count) {
  DS_ASSIGN(const RankSlice s, rank_slice(layout, tensor, index, count, true));
  return Slice{std::string(tensor), Rect{s.begin, 0, s.end - s.begin, layout.tensors()[s.tensor].cols}};
}

Result<Slice> col_slice(const Layout& layout, std::string_view tensor, std::uint64_t index, std::uint64_t count) {
  DS_ASSIGN(const RankSlice s, rank_slice(layout, tensor, index, count, false));
  return Slice{std::string(tensor), Rect{0, s.begin, layout.tensors()[s.tensor].rows, s.end - s.begin}};
}

// ---- sets --------------------------------------------------------------------------------------------------------

TileSet TileSet::whole(const Layout& layout) {
  TileSet set;
  set.whole_ = true;
  set.layout_ = layout.digest();
  set.tiles_ = layout.tile_count();
  set.bytes_ = layout.model_bytes();
  if (set.tiles_ != 0) {
    set.ranges_.push_back({0, set.tiles_});
    set.before_.push_back(0);
  }
  return set;
}

Result<TileSet> TileSet::make(const Layout& layout, const std::vector<wire::TileRange>& ranges) {
  if (ranges.empty()) return Error(Errc::invalid_argument, "a subscription without a tile");
  if (ranges.back().end > layout.tile_count()) {
    return Error(Errc::out_of_range, "tiles " + std::to_string(ranges.back().first) + " to " +
                                         std::to_string(ranges.back().end) + " of " +
                                         std::to_string(layout.tile_count()));
  }
  wire::Subscribe named{layout.digest(), {}};
  for (const wire::TileRange& range : ranges) {
    if (!named.ranges.empty() && named.ranges.back().end == range.first) {
      named.ranges.back().end = range.end;
    } else {
      named.ranges.push_back(range);
    }
  }
  if (named.ranges.front() == wire::TileRange{0, layout.tile_count()}) return whole(layout);
  TileSet set;
  set.layout_ = named.layout;
  set.digest_ = xxh3_128(named.encode());
  set.ranges_ = std::move(named.ranges);
  set.ranges_.shrink_to_fit();  // agents keep one for each subscription
  set.before_.reserve(set.ranges_.size());
  for (const wire::TileRange& range : set.ranges_) {
    set.before_.push_back(set.tiles_);
    set.tiles_ += range.end - range.first;
  }
  set.bytes_ = bytes_of_tiles(layout, set.ranges_);
  return set;
}

Result<TileSet> TileSet::of(const Layout& layout, const std::vector<Slice>& subscription) {
  if (subscription.empty()) return whole(layout);
  std::vector<wire::TileRange> ranges;
  for (const Slice& slice : subscription) {
    DS_ASSIGN(const std::uint32_t index, find_tensor(layout, slice.tensor));
    const Tensor& tensor = layout.tensors()[index];
    const Rect rect = slice.rect.value_or(Rect{0, 0, tensor.rows, tensor.cols});
    if (!inside(rect, tensor)) {
      return Error(Errc::out_of_range, "slice of '" + slice.tensor + "': " + describe(rect) + " of a tensor with " +
                                           std::to_string(tensor.rows) + " rows and " + std::to_string(tensor.cols) +
                                           " columns");
    }
    if (rect.rows != 0 && rect.cols != 0) add_tiles(layout, index, rect, ranges);
  }
  if (ranges.empty()) return Error(Errc::invalid_argument, "none of the slices has an element");
  join(ranges);
  return make(layout, ranges);
}

bool TileSet::contains(std::uint64_t tile) const noexcept {
  const auto after = std::upper_bound(ranges_.begin(), ranges_.end(), tile,
                                      [](std::uint64_t t, const wire::TileRange& r) { return t < r.end; });
  return after != ranges_.end() && after->first <= tile;
}

std::optional<std::uint64_t> TileSet::rank(std::uint64_t tile, std::size_t& hint) const noexcept {
  while (hint < ranges_.size() && ranges_[hint].end <= tile) ++hint;
  if (hint == ranges_.size() || ranges_[hint].first > tile) return std::nullopt;
  return before_[hint] + (tile - ranges_[hint].first);
}

std::optional<std::uint64_t> TileSet::rank(std::uint64_t tile) const noexcept {
  const auto after = std::upper_bound(ranges_.begin(), ranges_.end(), tile,
                                      [](std::uint64_t t, const wire::TileRange& r) { return t < r.end; });
  if (after == ranges_.end() || after->first > tile) return std::nullopt;
  return before_[static_cast<std::size_t>(after - ranges_.begin())] + (tile - after->first);
}

std::vector<wire::TileRange> TileSet::intersect(const std::vector<wire::TileRange>& ranges) const {
  std::vector<wire::TileRange> out;
  auto own = ranges_.begin();
  for (const wire::TileRange& range : ranges) {
    own = std::upper_bound(own, ranges_.end(), range.first,
                           [](std::uint64_t tile, const wire::TileRange& r) { return tile < r.end; });
    for (auto r = own; r != ranges_.end() && r->first < range.end; ++r) {
      out.push_back({std::max(r->first, range.first), std::min(r->end, range.end)});
    }
  }
  return out;
}

std::vector<wire::TileRange> TileSet::windows(const std::vector<wire::TileRange>& ranges) const {
  std::vector<wire::TileRange> out;
  std::size_t hint = 0;
  std::uint64_t next = 0;  // rank of the set's tile after the last range
  for (const wire::TileRange& range : ranges) {
    const std::uint64_t first = *rank(range.first, hint);
    if (!out.empty() && first == next) {
      out.back().end = range.end;
    } else {
      out.push_back(range);
    }
    next = first + (range.end - range.first);
  }
  return out;
}

std::uint64_t TileSet::nth(std::uint64_t index) const noexcept {
  const auto after = std::upper_bound(before_.begin(), before_.end(), index);
  const auto range = static_cast<std::size_t>(after - before_.begin() - 1);
  return ranges_[range].first + (index - before_[range]);
}

std::vector<std::uint64_t> TileSet::gather(std::span<const std::uint64_t> all) const {
  std::vector<std::uint64_t> out;
  out.reserve(static_cast<std::size_t>(tiles_));
  for (const wire::TileRange& range : ranges_) {
    const auto part =
        all.subspan(static_cast<std::size_t>(range.first), static_cast<std::size_t>(range.end - range.first));
    out.insert(out.end(), part.begin(), part.end());
  }
  return out;
}

void TileSet::scatter(std::span<const std::uint64_t> from, std::span<std::uint64_t> all) const {
  for (std::size_t i = 0; i < ranges_.size(); ++i) {
    const auto part =
        from.subspan(static_cast<std::size_t>(before_[i]), static_cast<std::size_t>(ranges_[i].end - ranges_[i].first));
    std::copy(part.begin(), part.end(), all.begin() + static_cast<std::ptrdiff_t>(ranges_[i].first));
  }
}

Digest128 TileSet::root(std::span<const std::uint64_t> all) const {
  if (whole_) return xxh3_128(std::as_bytes(all));
  const std::vector<std::uint64_t> own = gather(all);
  return xxh3_128(std::as_bytes(std::span(own)));
}

}  // namespace deltasync
