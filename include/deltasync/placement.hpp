// Where a receiver keeps each HF slice in the memory of a running engine: fused, stacked, transposed, sliced over
// ranks. placement.md is normative for what callers may pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "deltasync/subscription.hpp"

namespace deltasync {

/// Whose memory: the host's, or a CUDA device's.
struct Device {
  static constexpr std::int32_t kHost = -1;
  std::int32_t ordinal = kHost;  ///< CUDA ordinal within the process, or kHost

  bool is_host() const noexcept { return ordinal == kHost; }
  bool operator==(const Device&) const = default;
};
std::string to_string(Device device);  ///< "host", "cuda:1"

/// A range of addresses that an engine keeps weights in: one parameter, or one storage that several share. Two of them
/// have no byte in common. Not owned; stays mapped and in its place for as long as the placement is used.
struct LiveMemory {
  std::string name;  ///< as the engine has it, for messages: "model.layers.0.self_attn.qkv_proj.weight"
  std::byte* base = nullptr;
  std::uint64_t bytes = 0;
  Device device;
  std::optional<Dtype> dtype;  ///< if said, that of all tensors placed in it
  /// Each of its bytes has to be placed: weights that nothing but updates writes, without padding. What of them no
  /// slice has would stay old without a word.
  bool whole = false;
};

/// A rectangle of an HF tensor's 2-D view (see TensorSpec) and where its elements are: (row, col) of the tensor at
/// offset + (row − rect.row)·row_stride + (col − rect.col)·col_stride in the memory, as wide as the tensor's dtype.
/// There are no negative strides. The stride of a single row or column does not matter.
struct PlacedSlice {
  std::string tensor;  ///< its name
  Rect rect;
  std::uint32_t memory = 0;  ///< index in PlacementPlan::memories
  std::uint64_t offset = 0;  ///< bytes
  std::uint64_t row_stride = 0;
  std::uint64_t col_stride = 0;
};

struct PlacementPlan {
  std::vector<LiveMemory> memories;
  /// An element of a tensor may be placed several times (tied, replicated), a byte of memory takes one element only.
  std::vector<PlacedSlice> slices;
  /// What has no place here: other ranks' slices, tensors that the engine does not use. Said, so that nothing is
  /// forgotten. May overlap each other, but no placed slice.
  std::vector<Slice> ignored;
};

class Placement;
using PlacementPtr = std::shared_ptr<const Placement>;

/// A plan that was found sound, and what follows from it. Immutable; shared between threads without locks.
class Placement {
 public:
  /// Errors name the tensor, the slice and the memory: not_found, out_of_range, invalid_argument (memories that
  /// overlap, dtypes that differ, addresses that are not aligned, strides that fold a slice onto itself, nothing placed
  /// at all), coverage (two slices in one place, an element both placed and ignored; all tensors, up to eight by name,
  /// of which an element is neither; all memories that are said to be whole of which a byte is not placed).
  static Result<PlacementPtr> build(LayoutPtr layout, PlacementPlan plan);

  const LayoutPtr& layout() const noexcept { return layout_; }
  std::span<const LiveMemory> memories() const noexcept { return memories_; }
  /// The placed slices, for Receiver::bind: a tile is pulled only if one of them needs it.
  const Subscription& subscription() const noexcept { return subscription_; }
  /// What a full update writes in live memory; an element that is placed twice counts twice.
  std::uint64_t placed_bytes() const noexcept { return placed_bytes_; }
  /// Host memory for elements that are pulled and have no place: the rest of tiles that a slice cuts through. 0 where
  /// the layout has cuts at the slices' borders (add_cuts).
  std::uint64_t rest_bytes() const noexcept { return rest_bytes_; }

  /// How tiles lie in memory; for targets.
  struct Parts;
  const Parts& parts() const noexcept { return *parts_; }

  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;
  ~Placement();

 private:
  Placement();
  LayoutPtr layout_;
  std::vector<LiveMemory> memories_;
  Subscription subscription_;
  std::uint64_t placed_bytes_ = 0;
  std::uint64_t rest_bytes_ = 0;
  std::unique_ptr<Parts> parts_;
};

/// The slices' rectangles, without their places.
Subscription subscription_of(std::span<const PlacedSlice> slices);

/// What of the layout none of the slices places, as disjoint rectangles; whole tensors have none. Look through it
/// before it goes into PlacementPlan::ignored. Errors name the slice: not_found, out_of_range.
Result<std::vector<Slice>> unplaced(const Layout& layout, std::span<const PlacedSlice> slices);

/// Adds cuts where the slices begin and end, so that they become whole tiles. For the layout of the trainer: with the
/// slices of all ranks. Errors name the slice: not_found, out_of_range.
Status add_cuts(std::vector<TensorSpec>& specs, const Subscription& slices);

}  // namespace deltasync
