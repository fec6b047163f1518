#include "receiver/targets/segment/tile_patches.hpp"

#include <algorithm>

#include "delta/codec.hpp"
#include "format/tiling.hpp"

namespace deltasync::relay {

TilePatches::TilePatches(const Layout& layout, std::vector<StagedStep>& steps) {
  for (StagedStep& step : steps) {
    for (StagedFrame& frame : step.frames) {
      const bool decoded = !frame.resolved.empty();
      MutByteSpan rest(frame.resolved);
      for (const delta::TileRecord& record : frame.records) {
        Patch patch{record.tile, &record, decoded && !delta::traits(record.codec).whole_tile, {}};
        if (decoded) {
          patch.changes = rest.first(delta::resolved_bytes(layout, record));
          rest = rest.subspan(patch.changes.size());
        }
        patches_.push_back(patch);
      }
    }
  }
  std::stable_sort(patches_.begin(), patches_.end(), [](const Patch& a, const Patch& b) { return a.tile < b.tile; });
}

std::vector<TilePatches::Patch>::const_iterator TilePatches::find(std::uint64_t tile) const noexcept {
  return std::lower_bound(patches_.begin(), patches_.end(), tile,
                          [](const Patch& patch, std::uint64_t wanted) { return patch.tile < wanted; });
}

bool TilePatches::has(std::uint64_t tile) const noexcept {
  const auto first = find(tile);
  return first != patches_.end() && first->tile == tile;
}

Status TilePatches::apply(const Layout& layout, std::uint64_t tile, std::byte* rows, std::uint64_t digest) const {
  const Tensor& tensor = layout.tensors()[layout.tensor_of_tile(tile)];
  const std::size_t row_bytes = static_cast<std::size_t>(tile_of(layout, tile).rect.cols) * tensor.element_bytes;
  for (auto patch = find(tile); patch != patches_.end() && patch->tile == tile; ++patch) {
    if (patch->decoded) {
      delta::exchange_tile(layout, *patch->record, rows, row_bytes, patch->changes);
      digest = patch->record->digest_after;
    } else {
      DS_ASSIGN(digest, delta::apply_tile(layout, *patch->record, rows, row_bytes, digest));
    }
  }
  return {};
}

}  // namespace deltasync::relay
