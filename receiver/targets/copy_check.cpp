#include "receiver/targets/copy_check.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "format/tiling.hpp"
#include "placement/regions.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync {

Result<CopyCheck> CopyCheck::make(const Placement& placement, const Open& open, const CallContext& until) {
  DS_ASSIGN(std::vector<placement::CopyLayer> layers, placement::copy_layers(placement));
  CopyCheck check;
  for (placement::CopyLayer& layer : layers) {
    DS_TRY(until.check("preparing to read copies of tiles"));
    DS_ASSIGN(std::unique_ptr<Reader> reader, open(layer.placement, until));
    check.layers_.push_back({std::move(layer), std::move(reader)});
  }
  return check;
}

Result<std::vector<std::uint64_t>> CopyCheck::suspects(const Target& target, Layer& layer,
                                                       std::span<const std::uint64_t> tiles, const CallContext& until) {
  std::vector<std::uint64_t> suspects;
  std::vector<std::uint64_t> told;  // by their digests
  std::vector<std::uint64_t> ranks;
  auto next = tiles.begin();
  for (std::size_t i = 0; i < layer.of.tiles.size(); ++i) {
    const std::uint64_t tile = layer.of.tiles[i];
    next = std::lower_bound(next, tiles.end(), tile);
    if (next == tiles.end()) break;
    if (*next != tile) continue;
    if (layer.of.has_rest[i]) {
      suspects.push_back(tile);
      continue;
    }
    told.push_back(tile);
    ranks.push_back(parts_of(*layer.of.placement).tiles.rank(tile).value());
  }
  std::vector<std::uint64_t> digests(told.size());
  DS_TRY(layer.reader->digests(ranks, digests, until));
  for (std::size_t i = 0; i < told.size(); ++i) {
    if (digests[i] != target.committed()->digests[static_cast<std::size_t>(told[i])]) suspects.push_back(told[i]);
  }
  return suspects;
}

Result<std::uint32_t> CopyCheck::differing(const Target& target, Layer& layer, std::uint64_t tile,
                                           const CallContext& until) {
  const Layout& layout = *target.layout();
  const Tile of = tile_of(layout, tile);
  const std::uint64_t width = layout.tensors()[of.tensor].element_bytes;
  const PlacementParts& parts = parts_of(*layer.of.placement);
  const std::uint64_t rank = parts.tiles.rank(tile).value();
  std::vector<std::byte> copy;
  std::vector<std::byte> scratch;
  DS_TRY(layer.reader->gather(rank, copy, until));
  DS_ASSIGN(const TileRows read, target.live_tile(of, scratch));
  for (const Region& region : parts.primaries(parts.of_tile[static_cast<std::size_t>(rank)])) {
    if (region.memory == kRestMemory) continue;
    const Rect both = intersection(region.rect, of.rect);
    const std::uint64_t col = (both.col - of.rect.col) * width;
    for (std::uint64_t row = both.row - of.rect.row; row < both.row - of.rect.row + both.rows; ++row) {
      const std::byte* const a = copy.data() + row * of.rect.cols * width + col;
      const std::byte* const b = read.first + row * read.row_stride + col;
      if (std::memcmp(a, b, static_cast<std::size_t>(both.cols * width)) != 0) return region.memory;
    }
  }
  return kRestMemory;
}

Result<std::vector<WrongCopy>> CopyCheck::find(const Target& target, std::span<const std::uint64_t> tiles,
                                               const CallContext& until) {
  std::vector<WrongCopy> wrong;
  for (Layer& layer : layers_) {
    DS_ASSIGN(const std::vector<std::uint64_t> list, suspects(target, layer, tiles, until));
    for (const std::uint64_t tile : list) {
      DS_TRY(until.check("comparing copies of tiles"));
      DS_ASSIGN(const std::uint32_t memory, differing(target, layer, tile, until));
      if (memory == kRestMemory) continue;
      const bool named = std::any_of(wrong.begin(), wrong.end(), [&](const auto& w) { return w.tile == tile; });
      if (!named) wrong.push_back({tile, layer.of.placement->memories()[memory].name});
    }
  }
  return wrong;
}

Status CopyCheck::finish(const CallContext& until) {
  for (Layer& layer : layers_) DS_TRY(layer.reader->finish(until));
  return {};
}

}  // namespace deltasync
