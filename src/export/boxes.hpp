// The part of an element map that lies in a box of the source: as boxes of its axes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "export/element_map.hpp"
#include "export/plan.hpp"

namespace deltasync::exporting {

/// One axis of a box: its numbers [first, first + count).
struct AxisRange {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

/// Boxes of axes, which are those of one source dimension, the largest stride first: together all combinations whose
/// position, the sum of number * stride, is in [begin, end). They are disjoint, and few: cuts of a border make at most
/// two for each axis.
std::vector<std::vector<AxisRange>> boxes_in(std::span<const Axis> axes, std::uint64_t begin, std::uint64_t end);

/// The copies that bring what `piece` has of the map to the target; only their steps and offsets are set.
std::vector<ExportCopy> copies_of(const ElementMap& map, const ShardPiece& piece);

}  // namespace deltasync::exporting
