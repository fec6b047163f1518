// Whether a plan is valid, in this order: memories, slices one by one, destinations, then tensor by tensor that every
// HF element is either placed or ignored. What follows from it on the way: the regions of each tile.
#include "deltasync/placement.hpp"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "format/coverage.hpp"
#include "format/rect_set.hpp"
#include "placement/bind.hpp"
#include "placement/destinations.hpp"
#include "placement/regions.hpp"

namespace deltasync {
namespace {

/// Entries of one tensor follow each other; of(t) are tensor t's, in the order in which they came.
template <class T>
class ByTensor {
 public:
  ByTensor(std::size_t tensors, std::vector<T> list) : list_(std::move(list)), starts_(tensors + 1) {
    std::stable_sort(list_.begin(), list_.end(), [](const T& a, const T& b) { return a.tensor < b.tensor; });
    for (const T& entry : list_) ++starts_[entry.tensor + 1];
    std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
  }
  std::span<const T> of(std::uint32_t tensor) const {
    return std::span<const T>(list_).subspan(starts_[tensor], starts_[tensor + 1] - starts_[tensor]);
  }

 private:
  std::vector<T> list_;
  std::vector<std::size_t> starts_;
};

Status check_ignored(const PlacementPlan& plan, const Tensor& tensor, std::span<const BoundSlice> slices,
                     std::span<const TensorSlice> ignored, const RectSet& placed) {
  for (const TensorSlice& slice : ignored) {
    const auto both = placed.overlap(slice.rect);
    if (!both) continue;
    const auto in_it = std::find_if(slices.begin(), slices.end(), [&](const BoundSlice& s) {
      return intersection(s.place.rect, *both).elements() != 0;
    });
    return Error(Errc::coverage,
                 "ignored, but placed: " + describe_slice(tensor, *both) + " by " + describe(plan, in_it->index));
  }
  return {};
}

/// Things that lack something, for one error that names the first of them.
class Lacking {
 public:
  void add(const std::string& what) {
    if (++count_ <= kNamed) names_ += (count_ == 1 ? "" : ", ") + what;
  }
  Status status(const std::string& lack, const char* of) const {
    if (count_ == 0) return {};
    const std::string more = count_ > kNamed ? " and " + std::to_string(count_ - kNamed) + " more" : "";
    return Error(Errc::coverage, lack + std::to_string(count_) + of + ": " + names_ + more);
  }

 private:
  static constexpr std::size_t kNamed = 8;
  std::size_t count_ = 0;
  std::string names_;
};

/// Notes the tensor if an element of it is not in `known`, once the ignored ones have been added to that.
void note_forgotten(const Tensor& tensor, std::span<const TensorSlice> ignored, RectSet& known, Lacking& forgotten) {
  for (const TensorSlice& slice : ignored) known.add(slice.rect);
  const auto hole = known.first_hole(tensor.rows, tensor.cols);
  if (hole) forgotten.add(describe_slice(tensor, *hole));
}

/// Since no byte takes two elements, a memory is covered when its slices have as many bytes as it has.
Status check_whole(const Layout& layout, const PlacementPlan& plan, std::span<const BoundSlice> slices) {
  std::vector<std::uint64_t> placed(plan.memories.size());
  for (const BoundSlice& slice : slices) {
    placed[slice.place.memory] += slice.place.rect.elements() * layout.tensors()[slice.tensor].element_bytes;
  }
  Lacking lacking;
  for (std::size_t m = 0; m < placed.size(); ++m) {
    const LiveMemory& memory = plan.memories[m];
    if (!memory.whole || placed[m] == memory.bytes) continue;
    lacking.add("'" + memory.name + "' (" + std::to_string(memory.bytes - placed[m]) + " of " +
                std::to_string(memory.bytes) + " bytes)");
  }
  return lacking.status("bytes without a slice in memory that is to be whole, in ", " of the memories");
}

}  // namespace

Placement::Placement() : parts_(std::make_unique<PlacementParts>()) {}
Placement::~Placement() = default;

std::vector<std::pair<std::string, std::string>> Placement::live_names() const {
  std::set<std::pair<std::uint32_t, std::uint32_t>> found;  // memory, tensor
  std::uint64_t rank = 0;
  for (const wire::TileRange& range : parts_->tiles.ranges()) {
    for (std::uint64_t tile = range.first; tile < range.end; ++tile, ++rank) {
      const TileRegions& of_tile = parts_->of_tile[rank];
      const std::uint32_t tensor = layout_->tensor_of_tile(tile);
      for (std::uint32_t i = 0; i < of_tile.primaries + of_tile.copies; ++i) {
        const std::uint32_t memory = parts_->regions[of_tile.first + i].memory;
        if (memory != kRestMemory) found.emplace(memory, tensor);
      }
    }
  }
  std::set<std::pair<std::string, std::string>> names;
  for (const auto& [memory, tensor] : found)
    names.emplace(memories_[memory].name, layout_->tensors()[tensor].spec.name);
  return {names.begin(), names.end()};
}

const PlacementParts& parts_of(const Placement& placement) noexcept {
  return *placement.parts_;
}

std::string to_string(Device device) {
  return device.is_host() ? "host" : "cuda:" + std::to_string(device.ordinal);
}

std::vector<Slice> slices_of(std::span<const PlacedSlice> slices) {
  std::vector<Slice> out;
  out.reserve(slices.size());
  for (const PlacedSlice& slice : slices) out.push_back({slice.tensor, slice.rect});
  return out;
}

Result<std::shared_ptr<const Placement>> Placement::build(LayoutPtr layout, PlacementPlan plan) {
  DS_TRY(check_memories(plan.memories));
  DS_ASSIGN(std::vector<BoundSlice> bound, bind_slices(*layout, plan));
  if (bound.empty() && layout->elements() != 0) {
    return Error(Errc::invalid_argument, "the placement has no slice with an element");
  }
  DS_TRY(check_destinations(*layout, plan, bound));
  DS_TRY(check_whole(*layout, plan, bound));
  DS_ASSIGN(std::vector<TensorSlice> ignored_list, bind_ignored(*layout, plan));

  std::shared_ptr<Placement> placement(new Placement());
  PlacementParts& parts = *placement->parts_;
  const std::size_t tensors = layout->tensors().size();
  for (const BoundSlice& slice : bound) {
    placement->placed_bytes_ += slice.place.rect.elements() * layout->tensors()[slice.tensor].element_bytes;
  }
  if (!bound.empty()) placement->slices_ = slices_of(plan.slices);
  DS_ASSIGN(parts.tiles, TileSet::of(*layout, placement->slices_));
  const ByTensor<BoundSlice> slices(tensors, std::move(bound));
  const ByTensor<TensorSlice> ignored(tensors, std::move(ignored_list));
  Lacking forgotten;
  parts.of_tile.reserve(static_cast<std::size_t>(parts.tiles.tiles()));
  for (std::uint32_t t = 0; t < tensors; ++t) {
    const Tensor& tensor = layout->tensors()[t];
    if (tensor.tile_count == 0) continue;
    RectSet known;
    const TensorRegions regions = make_tensor_regions(slices.of(t), known);
    DS_TRY(check_ignored(plan, tensor, slices.of(t), ignored.of(t), known));
    add_tiles(*layout, t, regions, known, parts, placement->rest_bytes_);
    note_forgotten(tensor, ignored.of(t), known, forgotten);
  }
  DS_TRY(forgotten.status("elements without a place that are not said to be ignored, in ", " of the tensors"));
  if (parts.of_tile.size() != parts.tiles.tiles()) {
    return Error(Errc::internal, "the placement has " + std::to_string(parts.of_tile.size()) + " tiles, its set " +
                                     std::to_string(parts.tiles.tiles()));
  }
  placement->layout_ = std::move(layout);
  placement->memories_ = std::move(plan.memories);
  return std::shared_ptr<const Placement>(std::move(placement));
}

Result<std::vector<Slice>> unplaced(const Layout& layout, std::span<const PlacedSlice> slices) {
  std::vector<TensorSlice> list;
  list.reserve(slices.size());
  for (std::size_t i = 0; i < slices.size(); ++i) {
    DS_ASSIGN(const TensorSlice slice, find_slice(layout, slices[i].tensor, slices[i].rect, "slice", i));
    list.push_back(slice);
  }
  const ByTensor<TensorSlice> by_tensor(layout.tensors().size(), std::move(list));
  std::vector<Slice> out;
  for (std::uint32_t t = 0; t < layout.tensors().size(); ++t) {
    const Tensor& tensor = layout.tensors()[t];
    if (tensor.tile_count == 0) continue;
    RectSet placed;
    for (const TensorSlice& slice : by_tensor.of(t)) placed.add(slice.rect);
    for (const Rect& rect : placed.add({0, 0, tensor.rows, tensor.cols})) out.push_back({tensor.spec.name, rect});
  }
  return out;
}

}  // namespace deltasync
