// The checks of a plan that look at one memory or one slice at a time, and at what slices share.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "deltasync/placement.hpp"
#include "deltasync/writer.hpp"
#include "placement/regions.hpp"

namespace deltasync {

/// "slice 17 (model.x rows 0..512, into 'qkv_proj.weight' at byte 4096)": how messages name a slice of the plan.
std::string describe(const PlacementPlan& plan, std::size_t slice);

Status check_memories(std::span<const LiveMemory> memories);

/// The rectangle, or all of the tensor, if it is inside of it. `what` and `index` name it in errors.
Result<TensorSlice> find_slice(const Layout& layout, const std::string& tensor, const std::optional<Rect>& rect,
                               const char* what, std::size_t index);

/// The plan's slices with elements, each inside its tensor and its memory and valid in itself.
Result<std::vector<BoundSlice>> bind_slices(const Layout& layout, const PlacementPlan& plan);
/// The same of what is ignored.
Result<std::vector<TensorSlice>> bind_ignored(const Layout& layout, const PlacementPlan& plan);

/// No byte takes two elements.
Status check_destinations(const Layout& layout, const PlacementPlan& plan, std::span<const BoundSlice> slices);

}  // namespace deltasync
