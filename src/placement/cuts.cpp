#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "deltasync/placement.hpp"

namespace deltasync {
namespace {

/// Of the 2-D view (TensorSpec).
struct Extent {
  std::uint64_t rows = 1;
  std::uint64_t cols = 1;
};

Extent extent_of(const TensorSpec& spec) {
  Extent extent;
  for (std::size_t d = 0; d < spec.shape.size(); ++d) {
    if (spec.shape[d] == 0) return {0, 0};
    (d + 1 == spec.shape.size() ? extent.cols : extent.rows) *= spec.shape[d];
  }
  extent.cols /= dtype_packed(spec.dtype);
  return extent;
}

void add_ends(std::vector<std::uint64_t>& cuts, std::uint64_t first, std::uint64_t count, std::uint64_t length) {
  for (const std::uint64_t at : {first, first + count}) {
    if (at != 0 && at != length) cuts.push_back(at);
  }
}

void sort_unique(std::vector<std::uint64_t>& cuts) {
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
}

}  // namespace

Status add_cuts(std::vector<TensorSpec>& specs, std::span<const Slice> slices) {
  std::unordered_map<std::string_view, TensorSpec*> by_name;
  for (TensorSpec& spec : specs) by_name.emplace(spec.name, &spec);
  for (const Slice& slice : slices) {
    const auto found = by_name.find(slice.tensor);
    if (found == by_name.end()) return Error(Errc::not_found, "there is no tensor '" + slice.tensor + "'");
    if (!slice.rect || slice.rect->rows == 0 || slice.rect->cols == 0) continue;
    const Rect& r = *slice.rect;
    const auto [rows, cols] = extent_of(*found->second);
    if (r.row > rows || r.rows > rows - r.row || r.col > cols || r.cols > cols - r.col) {
      return Error(Errc::out_of_range, "a slice of '" + slice.tensor + "' is not inside of its " +
                                           std::to_string(rows) + " rows and " + std::to_string(cols) + " columns");
    }
    add_ends(found->second->row_cuts, r.row, r.rows, rows);
    add_ends(found->second->col_cuts, r.col, r.cols, cols);
  }
  for (TensorSpec& spec : specs) {
    sort_unique(spec.row_cuts);
    sort_unique(spec.col_cuts);
  }
  return {};
}

}  // namespace deltasync
