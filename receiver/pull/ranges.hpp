// Arithmetic on tile ranges and the work items made of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "delta/delta.hpp"
#include "deltasync/layout.hpp"
#include "format/tiling.hpp"
#include "format/wire.hpp"
#include "receiver/pull/fetch_round.hpp"

namespace deltasync::receiver {

using Ranges = std::vector<wire::TileRange>;

/// First byte of a tile in a half, and the end of the last row of its band (all panels of a band end there).
std::uint64_t band_first_byte(const Layout& layout, const Tile& tile);
std::uint64_t band_end_byte(const Layout& layout, const Tile& tile);

/// Drops all tiles before `first`.
void drop_before(Ranges& ranges, std::uint64_t first);
/// True if `tile` is in one of the ranges; `hint` moves forward with ascending tiles (start at 0).
bool contains(const Ranges& ranges, std::uint64_t tile, std::size_t& hint);
std::uint64_t tiles_in(const Ranges& ranges);

/// Runs of tiles that `wanted(tile)` names, within these.
template <class F>
Ranges collect_ranges(const Ranges& within, F wanted) {
  Ranges out;
  for (const wire::TileRange& range : within) {
    for (std::uint64_t t = range.first; t < range.end; ++t) {
      if (!wanted(t)) continue;
      if (!out.empty() && out.back().end == t) {
        ++out.back().end;
      } else {
        out.push_back({t, t + 1});
      }
    }
  }
  return out;
}

/// Divides `missing`, ranges within the ranges of `subscribed`, into tiles whose bands are subscribed to as a whole and
/// others.
void split_bands(const Layout& layout, const Ranges& subscribed, const Ranges& missing, Ranges& bands, Ranges& others);

/// Takes the first tiles off `ranges`: about `bytes` of tile data, up to the end of a band.
Ranges take_front(const Layout& layout, Ranges& ranges, std::uint64_t bytes);

/// Widens ranges to whole bands and cuts them into items of about `item_bytes`, each one contiguous range of bands.
std::vector<Item> extent_items(const Layout& layout, const Ranges& missing, std::uint64_t item_bytes);

/// Splits ranges over `parts` items of one step at batch borders, so that no frame is cut for it: all that is wanted of
/// a batch is in one item.
std::vector<Item> frame_items(std::span<const delta::Batch> batches, const Ranges& ranges, std::uint32_t step,
                              std::uint64_t parts);

}  // namespace deltasync::receiver
