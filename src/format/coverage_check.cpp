// Coverage of a layout by a list of slices: one sweep over each tensor's rows.
#include <algorithm>
#include <map>
#include <numeric>
#include <optional>

#include "format/coverage.hpp"

namespace deltasync {
namespace {

Rect intersection(const Rect& a, const Rect& b) {
  const auto row = std::max(a.row, b.row);
  const auto col = std::max(a.col, b.col);
  return {row, col, std::min(a.row + a.rows, b.row + b.rows) - row, std::min(a.col + a.cols, b.col + b.cols) - col};
}

std::string range_text(const char* kind, std::uint64_t start, std::uint64_t count) {
  return std::string(kind) + " " + std::to_string(start) + ".." + std::to_string(start + count);
}

/// Walks the rows of one tensor from top to bottom and keeps the column ranges of the rectangles that the current row
/// crosses. Disjoint ranges that add up to all columns, at every row where anything changes, are coverage.
class RowSweep {
 public:
  explicit RowSweep(const Tensor& tensor) : tensor_(tensor) {}

  /// `rects` are those of the tensor, not empty. With `whole`, a hole is an error too.
  Status run(std::span<const Rect> rects, bool whole) {
    events_.clear();
    for (const auto& r : rects) {
      events_.push_back({r.row, true, &r});
      events_.push_back({r.row + r.rows, false, &r});
    }
    std::sort(events_.begin(), events_.end(), [](const Event& a, const Event& b) {
      return a.row != b.row ? a.row < b.row : a.begins < b.begins;  // what ends at a row goes before what begins there
    });
    if (events_.empty() || events_.front().row > 0) note_hole(0, events_.empty() ? tensor_.rows : events_.front().row);
    for (std::size_t i = 0; i < events_.size(); ++i) {
      DS_TRY(take(events_[i]));
      const auto next_row = i + 1 < events_.size() ? events_[i + 1].row : tensor_.rows;
      if (next_row > events_[i].row) note_hole(events_[i].row, next_row);
    }
    if (whole && hole_) return Error(Errc::coverage, "never written: " + describe_slice(tensor_, *hole_));
    return {};
  }

 private:
  struct Event {
    std::uint64_t row = 0;
    bool begins = false;
    const Rect* rect = nullptr;
  };

  Status take(const Event& event) {
    const Rect& rect = *event.rect;
    if (!event.begins) {
      active_.erase(rect.col);
      active_cols_ -= rect.cols;
      return {};
    }
    const auto next = active_.lower_bound(rect.col);
    if (next != active_.end() && next->first < rect.col + rect.cols) return twice(rect, *next->second);
    if (next != active_.begin()) {
      const Rect& before = *std::prev(next)->second;
      if (before.col + before.cols > rect.col) return twice(rect, before);
    }
    active_.emplace_hint(next, rect.col, &rect);
    active_cols_ += rect.cols;
    return {};
  }

  Status twice(const Rect& a, const Rect& b) const {
    return Error(Errc::coverage, "written twice: " + describe_slice(tensor_, intersection(a, b)));
  }

  /// Rows [row, end) are covered by what is active now: remembers the first part that is not.
  void note_hole(std::uint64_t row, std::uint64_t end) {
    if (hole_ || active_cols_ == tensor_.cols) return;
    std::uint64_t col = 0;
    auto it = active_.begin();
    for (; it != active_.end() && it->first == col; ++it) col += it->second->cols;
    hole_ = Rect{row, col, end - row, (it == active_.end() ? tensor_.cols : it->first) - col};
  }

  const Tensor& tensor_;
  std::vector<Event> events_;
  std::map<std::uint64_t, const Rect*> active_;  ///< by first column
  std::uint64_t active_cols_ = 0;
  std::optional<Rect> hole_;
};

Status check_slices(const Layout& layout, std::span<const TensorSlice> slices, bool whole) {
  const auto tensors = layout.tensors();
  // Counting sort by tensor: rectangles of tensor t are rects[starts[t]] to rects[starts[t + 1]].
  std::vector<std::size_t> starts(tensors.size() + 1);
  for (const auto& slice : slices) {
    DS_TRY(check_slice(layout, slice));
    if (slice.rect.elements() != 0) ++starts[slice.tensor + 1];
  }
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  std::vector<Rect> rects(starts.back());
  auto cursors = starts;
  for (const auto& slice : slices) {
    if (slice.rect.elements() != 0) rects[cursors[slice.tensor]++] = slice.rect;
  }
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const auto of_tensor = std::span<const Rect>(rects).subspan(starts[t], starts[t + 1] - starts[t]);
    const Tensor& tensor = tensors[t];
    if (tensor.tile_count == 0) continue;
    if (of_tensor.size() == 1 && of_tensor[0] == Rect{0, 0, tensor.rows, tensor.cols}) continue;
    if (of_tensor.empty() && !whole) continue;
    DS_TRY(RowSweep(tensor).run(of_tensor, whole));
  }
  return {};
}

}  // namespace

std::string describe_slice(const Tensor& tensor, const Rect& rect) {
  std::string text = tensor.spec.name;
  const char* separator = " ";
  if (rect.row != 0 || rect.rows != tensor.rows) {
    text += separator + range_text("rows", rect.row, rect.rows);
    separator = ", ";
  }
  if (rect.col != 0 || rect.cols != tensor.cols) text += separator + range_text("columns", rect.col, rect.cols);
  return text;
}

Status check_slice(const Layout& layout, const TensorSlice& slice) {
  if (slice.tensor >= layout.tensors().size()) {
    return Error(Errc::out_of_range,
                 "tensor " + std::to_string(slice.tensor) + " of " + std::to_string(layout.tensors().size()));
  }
  const Tensor& t = layout.tensors()[slice.tensor];
  const Rect& r = slice.rect;
  if (r.row > t.rows || r.rows > t.rows - r.row || r.col > t.cols || r.cols > t.cols - r.col) {
    return Error(Errc::out_of_range, t.spec.name + " has " + std::to_string(t.rows) + " rows and " +
                                         std::to_string(t.cols) + " columns; " + std::to_string(r.rows) + "×" +
                                         std::to_string(r.cols) + " at row " + std::to_string(r.row) + ", column " +
                                         std::to_string(r.col) + " is not inside");
  }
  return {};
}

Status check_disjoint(const Layout& layout, std::span<const TensorSlice> slices) {
  return check_slices(layout, slices, false);
}

Status check_coverage(const Layout& layout, std::span<const TensorSlice> slices) {
  return check_slices(layout, slices, true);
}

}  // namespace deltasync
