// Where the copies of placed elements lie (tied weights, replicas): the places that are written and never read.
#pragma once

#include <vector>

#include "deltasync/placement.hpp"

namespace deltasync::placement {

/// Some of the copies, as a placement in which they are what is read: a tile that has one in this layer is made of the
/// copy's elements, and of those of the first placement's places where the copy has none. So its state digest is the
/// tile's own if the copy, and these, are right; but for a tile with a rest, whose elements are elsewhere.
struct CopyLayer {
  std::shared_ptr<const Placement> placement;  ///< of the same memories; of no tile but these
  std::vector<std::uint64_t> tiles;            ///< that have a copy in it, ascending
  std::vector<bool> has_rest;                  ///< by tile
};

/// All copies, each in one layer: as many layers as an element has copies, or few more. None if nothing is placed
/// twice.
Result<std::vector<CopyLayer>> copy_layers(const Placement& placement);

}  // namespace deltasync::placement
