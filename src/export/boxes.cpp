#include "export/boxes.hpp"

#include <algorithm>
#include <utility>

namespace deltasync::exporting {
namespace {

using Box = std::vector<AxisRange>;

/// Positions that the axes after the i-th reach over.
std::uint64_t reach_after(std::span<const Axis> axes, std::size_t i) {
  std::uint64_t reach = 1;
  for (++i; i < axes.size(); ++i) reach += (axes[i].extent - 1) * axes[i].source_stride;
  return reach;
}

void add_boxes(std::span<const Axis> axes, std::size_t i, std::uint64_t begin, std::uint64_t end, Box& outer,
               std::vector<Box>& out) {
  if (i == axes.size()) {
    out.push_back(outer);
    return;
  }
  const std::uint64_t stride = axes[i].source_stride;
  const std::uint64_t reach = reach_after(axes, i);
  const auto part = [&](std::uint64_t number) {
    const std::uint64_t at = number * stride;
    outer.push_back({number, 1});
    add_boxes(axes, i + 1, begin > at ? begin - at : 0, std::min(end - at, reach), outer, out);
    outer.pop_back();
  };
  // Numbers that touch the range, and those of them that lie in it whole.
  std::uint64_t number = begin < reach ? 0 : (begin - reach) / stride + 1;
  const auto touches = [&] { return number < axes[i].extent && number * stride < end; };
  const auto whole = [&] { return number * stride >= begin && end - number * stride >= reach; };
  while (touches() && !whole()) part(number++);
  const std::uint64_t first = number;
  if (touches()) number = std::min(axes[i].extent, (end - reach) / stride + 1);
  if (number > first) {
    Box box = outer;
    box.push_back({first, number - first});
    for (std::size_t inner = i + 1; inner < axes.size(); ++inner) box.push_back({0, axes[inner].extent});
    out.push_back(std::move(box));
  }
  while (touches()) part(number++);
}

/// Steps of one number go, and two that are one longer become that.
void simplify(std::vector<CopyStep>& steps) {
  std::erase_if(steps, [](const CopyStep& step) { return step.count == 1; });
  std::sort(steps.begin(), steps.end(),
            [](const CopyStep& a, const CopyStep& b) { return a.target_stride > b.target_stride; });
  for (std::size_t i = 1; i < steps.size();) {
    const CopyStep& inner = steps[i];
    CopyStep& outer = steps[i - 1];
    if (outer.source_stride == inner.count * inner.source_stride &&
        outer.target_stride == inner.count * inner.target_stride) {
      outer = {outer.count * inner.count, inner.source_stride, inner.target_stride};
      steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(i));
      if (i > 1) --i;
    } else {
      ++i;
    }
  }
}

}  // namespace

std::vector<std::vector<AxisRange>> boxes_in(std::span<const Axis> axes, std::uint64_t begin, std::uint64_t end) {
  std::vector<Box> out;
  Box outer;
  const bool none = std::any_of(axes.begin(), axes.end(), [](const Axis& axis) { return axis.extent == 0; });
  if (begin < end && !none) {
    if (axes.empty()) {
      if (begin == 0) out.emplace_back();
    } else {
      add_boxes(axes, 0, begin, end, outer, out);
    }
  }
  return out;
}

std::vector<ExportCopy> copies_of(const ElementMap& map, const ShardPiece& piece) {
  const std::size_t dims = piece.shape.size();
  std::vector<std::uint64_t> local_stride(dims, 1);
  for (std::size_t dim = dims; dim-- > 1;) local_stride[dim - 1] = local_stride[dim] * piece.shape[dim];

  std::vector<ExportCopy> copies(1);
  copies.front().target_offset = map.target_begin();
  std::size_t first_axis = 0;
  for (std::size_t dim = 0; dim < dims; ++dim) {
    std::size_t end_axis = first_axis;
    while (end_axis < map.axes.size() && map.axes[end_axis].source_dim == dim) ++end_axis;
    const std::span<const Axis> axes(map.axes.data() + first_axis, end_axis - first_axis);
    first_axis = end_axis;
    const std::uint64_t base = map.source_begins[dim];
    const std::uint64_t begin = piece.offset[dim];
    const std::uint64_t end = begin + piece.shape[dim];
    if (end <= base) return {};
    const auto boxes = boxes_in(axes, begin > base ? begin - base : 0, end - base);
    std::vector<ExportCopy> next;
    for (const ExportCopy& copy : copies) {
      for (const Box& box : boxes) {
        ExportCopy more = copy;
        std::uint64_t position = base;
        for (std::size_t i = 0; i < box.size(); ++i) {
          position += box[i].first * axes[i].source_stride;
          more.target_offset += box[i].first * axes[i].target_stride;
          more.steps.push_back({box[i].count, axes[i].source_stride * local_stride[dim], axes[i].target_stride});
        }
        more.source_offset += (position - begin) * local_stride[dim];
        next.push_back(std::move(more));
      }
    }
    copies = std::move(next);
  }
  for (ExportCopy& copy : copies) simplify(copy.steps);
  return copies;
}

}  // namespace deltasync::exporting
