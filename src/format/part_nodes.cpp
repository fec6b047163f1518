// What the writers of a node hold together, and whether all nodes hold the layout.
#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "format/coverage.hpp"
#include "format/part.hpp"
#include "format/rect_set.hpp"

namespace deltasync {
namespace {

/// One of two that touch along an edge, as one; false if that is no rectangle.
bool join(Rect& a, const Rect& b) {
  if (a.col == b.col && a.cols == b.cols && a.row + a.rows == b.row) {
    a.rows += b.rows;
    return true;
  }
  if (a.row == b.row && a.rows == b.rows && a.col + a.cols == b.col) {
    a.cols += b.cols;
    return true;
  }
  return false;
}

template <class Less>
bool join_neighbours(std::vector<Rect>& rects, Less&& less) {
  std::sort(rects.begin(), rects.end(), less);
  std::vector<Rect> joined;
  for (const Rect& rect : rects) {
    if (joined.empty() || !join(joined.back(), rect)) joined.push_back(rect);
  }
  const bool fewer = joined.size() < rects.size();
  rects = std::move(joined);
  return fewer;
}

/// As few rectangles as neighbours make, in order of rows, then columns.
void join_all(std::vector<Rect>& rects) {
  const auto below = [](const Rect& a, const Rect& b) {
    return std::tie(a.col, a.cols, a.row) < std::tie(b.col, b.cols, b.row);
  };
  const auto beside = [](const Rect& a, const Rect& b) {
    return std::tie(a.row, a.rows, a.col) < std::tie(b.row, b.rows, b.col);
  };
  bool fewer = true;
  while (fewer) {
    fewer = join_neighbours(rects, below);
    fewer = join_neighbours(rects, beside) || fewer;
  }
  std::sort(rects.begin(), rects.end(),
            [](const Rect& a, const Rect& b) { return std::tie(a.row, a.col) < std::tie(b.row, b.col); });
}

using NodeSlices = std::pair<std::string, std::vector<TensorSlice>>;

/// Nodes of a message.
constexpr std::size_t kNodesNamed = 8;

Error nobody_holds(const Layout& whole, std::uint32_t index, const Rect& hole, std::span<const NodeSlices> nodes) {
  const Tensor& tensor = whole.tensors()[index];
  std::string others;
  std::size_t count = 0;
  for (const auto& [name, slices] : nodes) {
    const auto of_tensor = [&](const TensorSlice& s) { return s.tensor == index && s.rect.elements() != 0; };
    const auto slice = std::find_if(slices.begin(), slices.end(), of_tensor);
    if (slice == slices.end() || ++count > kNodesNamed) continue;
    others += (count == 1 ? "" : "; ") + name + " holds " + describe_slice(tensor, slice->rect);
    if (std::any_of(slice + 1, slices.end(), of_tensor)) others += " and more";
  }
  if (count > kNodesNamed) others += "; " + std::to_string(count - kNodesNamed) + " more hold parts";
  return {Errc::coverage,
          "no node holds " + describe_slice(tensor, hole) + (others.empty() ? "" : " (" + others + ")")};
}

}  // namespace

Result<std::vector<TensorSlice>> join_slices(const Layout& layout, std::span<const TensorSlice> slices) {
  DS_TRY(check_disjoint(layout, slices));
  std::map<std::uint32_t, std::vector<Rect>> rects;
  for (const TensorSlice& slice : slices) {
    if (slice.rect.elements() != 0) rects[slice.tensor].push_back(slice.rect);
  }
  std::vector<TensorSlice> joined;
  for (auto& [tensor, list] : rects) {
    join_all(list);
    for (const Rect& rect : list) joined.push_back({tensor, rect});
  }
  return joined;
}

Status check_nodes(const Layout& whole, std::span<const NodeSlices> nodes) {
  std::vector<RectSet> held(whole.tensors().size());
  for (const auto& [name, slices] : nodes) {
    for (const TensorSlice& slice : slices) {
      DS_TRY(check_slice(whole, slice).with_context("node " + name));
      if (slice.rect.elements() != 0) held[slice.tensor].add(slice.rect);
    }
  }
  for (std::uint32_t i = 0; i < held.size(); ++i) {
    const Tensor& tensor = whole.tensors()[i];
    if (held[i].elements() == tensor.rows * tensor.cols) continue;
    const auto hole = held[i].first_hole(tensor.rows, tensor.cols);
    return nobody_holds(whole, i, hole.value_or(Rect{0, 0, tensor.rows, tensor.cols}), nodes);
  }
  return {};
}

}  // namespace deltasync
