#include "format/rect_set.hpp"

#include <algorithm>
#include <iterator>

namespace deltasync {

std::optional<Rect> RectSet::overlap(const Rect& rect) const {
  const auto row_end = rect.row + rect.rows;
  const auto col_end = rect.col + rect.cols;
  auto it = bands_.upper_bound(rect.row);
  if (it != bands_.begin() && std::prev(it)->second.end > rect.row) --it;
  for (; it != bands_.end() && it->first < row_end; ++it) {
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
