#include "placement/copies.hpp"

#include <utility>

#include "format/rect_set.hpp"
#include "format/tiling.hpp"
#include "placement/regions.hpp"

namespace deltasync::placement {
namespace {

/// What the slices of one layer are made of.
struct Collected {
  std::vector<PlacedSlice> slices;
  CopyLayer layer;
};

class Collector {
 public:
  explicit Collector(const Placement& placement) : layout_(*placement.layout()), parts_(parts_of(placement)) {}

  void add(std::uint64_t index, const TileRegions& regions);
  std::vector<Collected> take() { return std::move(layers_); }

 private:
  /// The region's part of the tile, if it has one.
  void place(const Tile& tile, const Region& region, std::vector<PlacedSlice>& slices) const;

  const Layout& layout_;
  const PlacementParts& parts_;
  std::vector<Collected> layers_;
};

void Collector::place(const Tile& tile, const Region& region, std::vector<PlacedSlice>& slices) const {
  const Rect both = intersection(region.rect, tile.rect);
  if (both.elements() == 0) return;
  const std::uint64_t offset = region.offset + (both.row - region.rect.row) * region.row_stride +
                               (both.col - region.rect.col) * region.col_stride;
  slices.push_back(
      {layout_.tensors()[tile.tensor].spec.name, both, region.memory, offset, region.row_stride, region.col_stride});
}

/// Each copy goes into the first layer where no other one of the tile has its elements. What is placed first is what is
/// read, so the copies come before the places that the target reads.
void Collector::add(std::uint64_t index, const TileRegions& regions) {
  const Tile tile = tile_of(layout_, index);
  std::vector<RectSet> taken;  // by layer
  for (const Region& copy : parts_.copies(regions)) {
    const Rect both = intersection(copy.rect, tile.rect);
    if (both.elements() == 0) continue;
    std::size_t k = 0;
    while (k < taken.size() && taken[k].overlap(both)) ++k;
    if (k == taken.size()) taken.emplace_back();
    taken[k].insert(both);
    if (k == layers_.size()) layers_.emplace_back();
    place(tile, copy, layers_[k].slices);
  }
  for (std::size_t k = 0; k < taken.size(); ++k) {
    Collected& collected = layers_[k];
    collected.layer.tiles.push_back(index);
    collected.layer.has_rest.push_back(false);
    for (const Region& region : parts_.primaries(regions)) {
      if (region.memory == kRestMemory) {
        collected.layer.has_rest.back() = true;
      } else {
        place(tile, region, collected.slices);
      }
    }
  }
}

}  // namespace

Result<std::vector<CopyLayer>> copy_layers(const Placement& placement) {
  const PlacementParts& parts = parts_of(placement);
  Collector collector(placement);
  for (std::uint64_t rank = 0; rank < parts.tiles.tiles(); ++rank) {
    const TileRegions& regions = parts.of_tile[static_cast<std::size_t>(rank)];
    if (regions.copies != 0) collector.add(parts.tiles.nth(rank), regions);
  }
  std::vector<CopyLayer> layers;
  for (Collected& collected : collector.take()) {
    PlacementPlan plan;
    plan.memories.assign(placement.memories().begin(), placement.memories().end());
    for (LiveMemory& memory : plan.memories) memory.whole = false;  // a layer has its tiles only
    plan.slices = std::move(collected.slices);
    DS_ASSIGN(plan.ignored, unplaced(*placement.layout(), plan.slices));
    DS_ASSIGN(collected.layer.placement, Placement::build(placement.layout(), std::move(plan)));
    layers.push_back(std::move(collected.layer));
  }
  return layers;
}

}  // namespace deltasync::placement
