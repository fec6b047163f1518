// Where each HF slice is in the memory of a running engine: fused, stacked, transposed, sliced over ranks.
// placement.md is the guide, and normative for what may be passed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

/// A range of addresses that an engine keeps weights in: one parameter, or one storage that several share. Two of them
/// have no byte in common. Not owned; stays mapped and in its place for as long as the placement is used.
struct LiveMemory {
  std::string name = {};  ///< as the engine has it, for messages: "model.layers.0.self_attn.qkv_proj.weight"
  std::byte* base = nullptr;
  std::uint64_t bytes = 0;
  Device device = {};
  std::optional<Dtype> dtype = std::nullopt;  ///< if said, that of all tensors placed in it
  /// Each of its bytes has to be placed: weights that nothing but updates writes, without padding. What of them no
  /// slice has would stay old without a word.
  bool whole = false;
};

/// A rectangle of an HF tensor's 2-D view (see TensorSpec) and where its elements are: (row, col) of the tensor at
/// offset + (row − rect.row)·row_stride + (col − rect.col)·col_stride in the memory, as wide as the tensor's dtype.
/// There are no negative strides. The stride of a single row or column does not matter.
struct PlacedSlice {
  std::string tensor = {};  ///< its name
  Rect rect = {};
  std::uint32_t memory = 0;      ///< index in PlacementPlan::memories
  std::uint64_t offset = 0;      ///< bytes
  std::uint64_t row_stride = 0;  ///< bytes
  std::uint64_t col_stride = 0;  ///< bytes
};

/// What is to become a Placement: the engine's memories, what is where in them, and what is nowhere.
struct PlacementPlan {
  std::vector<LiveMemory> memories;
  /// An element of a tensor may be placed several times (tied, replicated), a byte of memory takes one element only.
  std::vector<PlacedSlice> slices;
  /// What has no place here: other ranks' slices, tensors that the engine does not use. Said, so that nothing is
  /// forgotten. May overlap each other, but no placed slice.
  std::vector<Slice> ignored;
};

/// A plan that was found valid, and what follows from it. Immutable: threads share it by a const pointer without locks.
/// The live memories are not owned.
///
/// ```cpp
/// std::vector<float> qk(2 * 64 * 64);  // the engine's: q_proj above k_proj
/// PlacementPlan plan;
/// plan.memories = {{.name = "qk", .base = reinterpret_cast<std::byte*>(qk.data()), .bytes = qk.size() * 4}};
/// plan.slices = {{.tensor = "q_proj", .rect = {0, 0, 64, 64}, .row_stride = 256, .col_stride = 4},
///                {.tensor = "k_proj", .rect = {0, 0, 64, 64}, .offset = 64 * 256, .row_stride = 256, .col_stride =
///                4}};
/// DS_ASSIGN(plan.ignored, unplaced(*layout, plan.slices));
/// DS_ASSIGN(const auto built, Placement::build(layout, plan));
/// ```
class Placement {
 public:
  /// Checks a plan. Errors name the tensor, the slice and the memory:
  ///   - Errc::not_found, Errc::out_of_range: no such tensor, or a rectangle outside it or its memory.
  ///   - Errc::invalid_argument: memories that overlap, dtypes that differ, addresses that are not aligned, strides
  ///     that fold a slice onto itself, nothing placed at all.
  ///   - Errc::coverage: two slices in one place; an element both placed and ignored; tensors (up to eight are named)
  ///     of which an element is neither; memories that are said to be whole of which a byte is not placed.
  static Result<std::shared_ptr<const Placement>> build(LayoutPtr layout, PlacementPlan plan);

  const LayoutPtr& layout() const noexcept { return layout_; }
  std::span<const LiveMemory> memories() const noexcept { return memories_; }
  /// The placed slices, for Receiver::bind(): a tile is pulled only if one of them needs it.
  const std::vector<Slice>& slices() const noexcept { return slices_; }
  /// What a full update writes in live memory; an element that is placed twice counts twice.
  std::uint64_t placed_bytes() const noexcept { return placed_bytes_; }
  /// Host memory for elements that are pulled and have no place: the rest of tiles that a slice cuts through. 0 where
  /// the layout has cuts at the slices' borders (add_cuts).
  std::uint64_t rest_bytes() const noexcept { return rest_bytes_; }
  /// Which tensors each live memory has elements of: its name and the tensor's, each pair once, in order.
  std::vector<std::pair<std::string, std::string>> live_names() const;

  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;
  ~Placement();

 private:
  friend const struct PlacementParts& parts_of(const Placement& placement) noexcept;  // src/placement/regions.hpp
  Placement();
  LayoutPtr layout_;
  std::vector<LiveMemory> memories_;
  std::vector<Slice> slices_;
  std::uint64_t placed_bytes_ = 0;
  std::uint64_t rest_bytes_ = 0;
  std::unique_ptr<struct PlacementParts> parts_;
};

/// The slices' rectangles, without their places.
std::vector<Slice> slices_of(std::span<const PlacedSlice> slices);

/// What of the layout none of the slices places, as disjoint rectangles; whole tensors have none. Look through it
/// before it goes into PlacementPlan::ignored. Errors name the slice:
///   - Errc::not_found, Errc::out_of_range.
Result<std::vector<Slice>> unplaced(const Layout& layout, std::span<const PlacedSlice> slices);

/// Adds cuts where the slices begin and end, so that they become whole tiles. For the layout of the trainer: with the
/// slices of all ranks. Errors name the slice:
///   - Errc::not_found, Errc::out_of_range.
Status add_cuts(std::vector<TensorSpec>& specs, std::span<const Slice> slices);

}  // namespace deltasync
