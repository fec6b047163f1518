#include "receiver/parts/shares.hpp"

#include <cstdint>
#include <limits>
#include <string>

#include "format/coverage.hpp"
#include "format/tiling.hpp"

namespace deltasync::receiver {
namespace {

constexpr std::uint32_t kNobody = std::numeric_limits<std::uint32_t>::max();

/// The rows from the first tile without a holder on, as far as they are of one tensor.
Error nobody_has(const Layout& whole, const TileSet& wanted, const std::vector<std::uint32_t>& holders) {
  for (const wire::TileRange& range : wanted.ranges()) {
    for (std::uint64_t t = range.first; t < range.end; ++t) {
      if (holders[t] != kNobody) continue;
      const Tile first = tile_of(whole, t);
      Rect rect = first.rect;
      for (std::uint64_t next = t + 1; next < range.end && holders[next] == kNobody; ++next) {
        const Tile tile = tile_of(whole, next);
        if (tile.tensor != first.tensor) break;
        if (tile.rect.col == rect.col) rect.rows = tile.rect.row + tile.rect.rows - rect.row;
      }
      return {Errc::coverage, "no member has " + describe_slice(whole.tensors()[first.tensor], rect)};
    }
  }
  return {Errc::internal, "each tile has a holder"};
}

}  // namespace

Result<std::vector<std::vector<wire::TileRange>>> divide(const Layout& whole, const TileSet& wanted,
                                                         std::span<const PartMap* const> parts) {
  std::vector<std::uint32_t> holders(static_cast<std::size_t>(whole.tile_count()), kNobody);
  std::vector<std::uint64_t> loads(parts.size(), 0);  // bytes
  std::uint64_t held = 0;
  for (std::uint32_t m = 0; m < parts.size(); ++m) {
    if (parts[m] == nullptr) continue;
    const Layout& layout = *parts[m]->layout();
    for (std::uint64_t t = 0; t < layout.tile_count(); ++t) {
      const std::uint64_t there = parts[m]->tile_in_whole(t);
      if (!wanted.contains(there)) continue;
      const Tile tile = tile_of(layout, t);
      const std::uint64_t bytes = tile.rect.elements() * layout.tensors()[tile.tensor].element_bytes;
      std::uint32_t& holder = holders[there];
      if (holder == kNobody) {
        ++held;
      } else if (loads[holder] >= loads[m] + 2 * bytes) {
        loads[holder] -= bytes;
      } else {
        continue;
      }
      holder = m;
      loads[m] += bytes;
    }
  }
  if (held < wanted.tiles()) return nobody_has(whole, wanted, holders);
  std::vector<std::vector<wire::TileRange>> shares(parts.size());
  for (std::uint32_t m = 0; m < parts.size(); ++m) {
    if (parts[m] == nullptr) continue;
    for (std::uint64_t t = 0; t < parts[m]->layout()->tile_count(); ++t) {
      if (holders[parts[m]->tile_in_whole(t)] != m) continue;
      auto& ranges = shares[m];
      if (!ranges.empty() && ranges.back().end == t) {
        ++ranges.back().end;
      } else {
        ranges.push_back({t, t + 1});
      }
    }
  }
  return shares;
}

}  // namespace deltasync::receiver
