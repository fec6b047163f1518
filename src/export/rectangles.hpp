// Copies as rectangles of their tensor's 2-D view, which is what a writer takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "deltasync/export.hpp"

namespace deltasync::exporting {

/// Of one copy; more are elements that lie apart.
inline constexpr std::size_t kRectanglesMax = 1 << 16;

/// Where elements of a rectangle are in a piece; offset and strides in elements.
struct Run {
  std::uint32_t piece = 0;
  std::uint64_t offset = 0;
  std::uint64_t row_stride = 0;
  std::uint64_t col_stride = 0;
};

/// A rectangle of a tensor. Of several runs its columns are from each in turn, as those of gate and up may be.
struct Rectangle {
  std::uint32_t tensor = 0;
  Rect rect;
  std::vector<Run> runs;
  double add = 0;
};

struct Rectangles {
  std::vector<Rectangle> made;
  /// A copy that takes more than `most` rectangles; `made` is of no use then.
  const ExportCopy* apart = nullptr;
};

/// Of copies to one tensor, whose 2-D view has `cols` columns.
Rectangles rectangles_of(std::span<const ExportCopy> copies, std::uint64_t cols, std::size_t most = kRectanglesMax);

}  // namespace deltasync::exporting
