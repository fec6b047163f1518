#include "format/rect_set.hpp"

#include <algorithm>
#include <iterator>

namespace deltasync {
namespace {

/// Parts that lie below each other become one, if there are not too many between them.
void add_part(std::vector<Rect>& parts, const Rect& part) {
  constexpr std::size_t kLookBack = 8;
  const std::size_t end = parts.size() - std::min(parts.size(), kLookBack);
  for (std::size_t i = parts.size(); i-- > end;) {
    Rect& above = parts[i];
    if (above.row + above.rows != part.row || above.col != part.col || above.cols != part.cols) continue;
    above.rows += part.rows;
    return;
  }
  parts.push_back(part);
}

}  // namespace

/// The first band that ends behind `row`.
RectSet::Bands::const_iterator RectSet::first_band(std::uint64_t row) const {
  auto it = bands_.upper_bound(row);
  if (it != bands_.begin() && std::prev(it)->second.end > row) --it;
  return it;
}

std::optional<Rect> RectSet::overlap(const Rect& rect) const {
  const auto row_end = rect.row + rect.rows;
  const auto col_end = rect.col + rect.cols;
  for (auto it = first_band(rect.row); it != bands_.end() && it->first < row_end; ++it) {
    const auto& ranges = it->second.ranges;
    const auto range = std::upper_bound(ranges.begin(), ranges.end(), rect.col,
                                        [](std::uint64_t col, const Range& r) { return col < r.end; });
    if (range == ranges.end() || range->start >= col_end) continue;
    const auto row = std::max(rect.row, it->first);
    const auto col = std::max(rect.col, range->start);
    return Rect{row, col, std::min(row_end, it->second.end) - row, std::min(col_end, range->end) - col};
  }
  return std::nullopt;
}

void RectSet::split(const Rect& rect, std::vector<Rect>& inside, std::vector<Rect>& outside) const {
  const auto row_end = rect.row + rect.rows;
  const auto col_end = rect.col + rect.cols;
  if (rect.cols == 0) return;
  auto row = rect.row;
  for (auto it = first_band(row); row < row_end;) {
    if (it == bands_.end() || it->first > row) {  // rows that no band has
      const auto end = it == bands_.end() ? row_end : std::min(row_end, it->first);
      add_part(outside, {row, rect.col, end - row, rect.cols});
      row = end;
      continue;
    }
    const auto rows = std::min(row_end, it->second.end) - row;
    const auto& ranges = it->second.ranges;
    auto col = rect.col;
    for (auto range = std::upper_bound(ranges.begin(), ranges.end(), col,
                                       [](std::uint64_t c, const Range&r) { return c < r.end; });
         range != ranges.end() && range->start < col_end; ++range) {
      if (range->start > col) add_part(outside, {row, col, rows, range->start - col});
      col = std::max(col, range->start);
      const auto end = std::min(range->end, col_end);
      add_part(inside, {row, col, rows, end - col});
      col = end;
    }
    if (col < col_end) add_part(outside, {row, col, rows, col_end - col});
    row += rows;
    ++it;
  }
}

std::vector<Rect> RectSet::add(const Rect& rect) {
  std::vector<Rect> inside;
  std::vector<Rect> outside;
  split(rect, inside, outside);
  for (const Rect& part : outside) insert(part);
  return outside;
}

/// Makes `row` a border between bands, if it lies inside of one.
void RectSet::split_at(std::uint64_t row) {
  auto it = bands_.lower_bound(row);
  if (it == bands_.begin()) return;
  --it;
  if (it->second.end <= row) return;
  bands_.emplace_hint(std::next(it), row, it->second);
  it->second.end = row;
}

void RectSet::add_range(std::vector<Range>& ranges, Range range) {
  auto next = std::lower_bound(ranges.begin(), ranges.end(), range.start,
                               [](const Range& r, std::uint64_t start) { return r.start < start; });
  const bool joins_next = next != ranges.end() && next->start == range.end;
  if (next != ranges.begin() && std::prev(next)->end == range.start) {
    const auto before = std::prev(next);
    before->end = joins_next ? next->end : range.end;
    if (joins_next) ranges.erase(next);
  } else if (joins_next) {
    next->start = range.start;
  } else {
    ranges.insert(next, range);
  }
}

std::optional<Rect> RectSet::insert(const Rect& rect) {
  if (auto both = overlap(rect)) return both;
  const auto row_end = rect.row + rect.rows;
  const Range range{rect.col, rect.col + rect.cols};
  split_at(rect.row);
  split_at(row_end);
  auto row = rect.row;
  for (auto it = bands_.lower_bound(row); row < row_end;) {
    if (it == bands_.end() || it->first > row) {  // rows that no band has yet, up to the next one
      const auto end = it == bands_.end() ? row_end : std::min(row_end, it->first);
      it = bands_.emplace_hint(it, row, Band{end, {}});
    }
    add_range(it->second.ranges, range);
    row = it->second.end;
    ++it;
  }
  elements_ += rect.elements();
  return std::nullopt;
}

std::optional<Rect> RectSet::first_hole(std::uint64_t rows, std::uint64_t cols) const {
  std::uint64_t row = 0;
  for (const auto& [start, band] : bands_) {
    if (start > row) return Rect{row, 0, start - row, cols};
    const auto& first = band.ranges.front();
    if (first.start > 0) return Rect{start, 0, band.end - start, first.start};
    if (first.end < cols) {
      const auto end = band.ranges.size() > 1 ? band.ranges[1].start : cols;
      return Rect{start, first.end, band.end - start, end - first.end};
    }
    row = band.end;
  }
  if (row < rows) return Rect{row, 0, rows - row, cols};
  return std::nullopt;
}

void RectSet::clear() {
  bands_.clear();
  elements_ = 0;
}

}  // namespace deltasync
