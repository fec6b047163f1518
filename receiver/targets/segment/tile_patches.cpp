#include "receiver/targets/segment/tile_patches.hpp"

#include <algorithm>

#include "delta/codec.hpp"
#include "format/tiling.hpp"

namespace deltasync::relay {

void TilePatches::add(const Layout& layout, std::span<const StagedStep> steps) {
  for (const StagedStep& step : steps) {
    for (const StagedFrame& frame : step.frames) {
      const bool decoded = !frame.resolved.empty();
      ByteSpan rest(frame.resolved);
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

std::vector<std::uint64_t> TilePatches::tiles() const {
  std::vector<std::uint64_t> tiles;
  for (const Patch& patch : patches_) {
    if (tiles.empty() || tiles.back() != patch.tile) tiles.push_back(patch.tile);
  }
  return tiles;
}

Result<std::uint64_t> TilePatches::apply(const Layout& layout, std::uint64_t tile, std::byte* rows,
                                         std::size_t row_stride, std::uint64_t digest) const {
  for (auto patch = find(tile); patch != patches_.end() && patch->tile == tile; ++patch) {
    if (patch->decoded) {
      delta::write_resolved(layout, *patch->record, rows, row_stride, patch->changes);
      digest = patch->record->digest_after;
    } else {
      DS_ASSIGN(digest, delta::apply_tile(layout, *patch->record, rows, row_stride, digest));
    }
  }
  return digest;
}

}  // namespace deltasync::relay
