#include "receiver/pull/ranges.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "format/tile_set.hpp"
#include "format/tiling.hpp"

namespace deltasync::receiver {
namespace {

/// The band that a tile belongs to, as a range of tiles.
wire::TileRange band_of(const Layout& layout, std::uint64_t index) {
  const Tile tile = tile_of(layout, index);
  const Tensor& tensor = layout.tensors()[tile.tensor];
  // The panels of a band share its rows and are numbered one after the other; the first begins at column 0.
  if (tile.rect.cols == tensor.cols) return {index, index + 1};
  const std::uint64_t panels = grid_of(layout, tile.tensor).panels();
  const std::uint64_t first = tensor.first_tile + (index - tensor.first_tile) / panels * panels;
  return {first, first + panels};
}

/// Ranges widened to whole bands, still sorted and disjoint.
Ranges whole_bands(const Layout& layout, const Ranges& ranges) {
  Ranges out;
  for (const wire::TileRange& r : ranges) {
    const wire::TileRange wide{band_of(layout, r.first).first, band_of(layout, r.end - 1).end};
    if (!out.empty() && wide.first <= out.back().end) {
      out.back().end = std::max(out.back().end, wide.end);
    } else {
      out.push_back(wide);
    }
  }
  return out;
}

/// First batch that ends after `tile`.
std::size_t batch_of(std::span<const delta::Batch> batches, std::uint64_t tile) {
  const auto it = std::upper_bound(batches.begin(), batches.end(), tile,
                                   [](std::uint64_t t, const delta::Batch& b) { return t < b.end; });
  return static_cast<std::size_t>(it - batches.begin());
}

}  // namespace

std::uint64_t band_first_byte(const Layout& layout, const Tile& tile) {
  const Tensor& tensor = layout.tensors()[tile.tensor];
  return tensor.offset + tile.rect.row * tensor.row_bytes();
}

std::uint64_t band_end_byte(const Layout& layout, const Tile& tile) {
  const Tensor& tensor = layout.tensors()[tile.tensor];
  return tensor.offset + (tile.rect.row + tile.rect.rows) * tensor.row_bytes();
}

void drop_before(Ranges& ranges, std::uint64_t first) {
  const auto keep = std::find_if(ranges.begin(), ranges.end(), [&](const wire::TileRange& r) { return r.end > first; });
  ranges.erase(ranges.begin(), keep);
  if (!ranges.empty()) ranges.front().first = std::max(ranges.front().first, first);
}

bool contains(const Ranges& ranges, std::uint64_t tile, std::size_t& hint) {
  while (hint < ranges.size() && ranges[hint].end <= tile) ++hint;
  return hint < ranges.size() && ranges[hint].first <= tile;
}

std::uint64_t tiles_in(const Ranges& ranges) {
  std::uint64_t sum = 0;
  for (const wire::TileRange& r : ranges) sum += r.end - r.first;
  return sum;
}

void split_bands(const Layout& layout, const Ranges& subscribed, const Ranges& missing, Ranges& bands, Ranges& others) {
  auto whole = subscribed.begin();
  std::uint64_t middle = 0;  // of *whole: where its whole bands begin and end
  std::uint64_t middle_end = 0;
  bool known = false;
  for (const wire::TileRange& range : missing) {
    for (; whole->end <= range.first; ++whole) known = false;
    if (!std::exchange(known, true)) {
      const wire::TileRange head = band_of(layout, whole->first);
      const wire::TileRange tail = band_of(layout, whole->end - 1);
      middle = head.first == whole->first ? whole->first : std::min(head.end, whole->end);
      middle_end = tail.end == whole->end ? whole->end : std::max(tail.first, middle);
    }
    const std::uint64_t first = std::clamp(middle, range.first, range.end);
    const std::uint64_t end = std::clamp(middle_end, first, range.end);
    if (range.first < first) others.push_back({range.first, first});
    if (first < end) bands.push_back({first, end});
    if (end < range.end) others.push_back({end, range.end});
  }
}

Ranges take_front(const Layout& layout, Ranges& ranges, std::uint64_t bytes) {
  Ranges front;
  std::uint64_t taken = 0;
  for (std::size_t i = 0; i < ranges.size() && taken < bytes; ++i) {
    wire::TileRange range{ranges[i].first, ranges[i].first};
    while (range.end < ranges[i].end && taken < bytes) {
      const wire::TileRange more{range.end, std::min(band_of(layout, range.end).end, ranges[i].end)};
      taken += bytes_of_tiles(layout, {more});
      range.end = more.end;
    }
    front.push_back(range);
  }
  if (!front.empty()) drop_before(ranges, front.back().end);
  return front;
}

std::vector<Item> extent_items(const Layout& layout, const Ranges& missing, std::uint64_t item_bytes) {
  std::vector<Item> items;
  for (const wire::TileRange& range : whole_bands(layout, missing)) {
    std::uint64_t first = range.first;
    while (first < range.end) {
      const std::uint64_t begin_byte = band_first_byte(layout, tile_of(layout, first));
      std::uint64_t end = first;
      std::uint64_t bytes = 0;
      while (end < range.end && bytes < item_bytes) {
        end = band_of(layout, end).end;
        bytes = band_end_byte(layout, tile_of(layout, end - 1)) - begin_byte;
      }
      items.push_back({0, {{first, end}}, 0});
      first = end;
    }
  }
  return items;
}

std::vector<Item> frame_items(std::span<const delta::Batch> batches, const Ranges& ranges, std::uint32_t step,
                              std::uint64_t parts) {
  std::vector<Item> items;
  if (ranges.empty()) return items;
  const std::uint64_t tiles_each =
      std::max<std::uint64_t>(1, (tiles_in(ranges) + parts - 1) / std::max<std::uint64_t>(1, parts));
  Ranges rest = ranges;
  std::size_t at = 0;  // in rest
  while (at < rest.size()) {
    Item item{step, {}, 0};
    std::uint64_t taken = 0;
    std::uint64_t group_end = 0;  // of the batch that holds the last tile
    while (at < rest.size() && (taken < tiles_each || rest[at].first < group_end)) {
      wire::TileRange& r = rest[at];
      const std::uint64_t want_end = std::min(r.end, r.first + (taken < tiles_each ? tiles_each - taken : 1));
      group_end = batches[batch_of(batches, want_end - 1)].end;
      const std::uint64_t end = std::min(r.end, group_end);
      item.ranges.push_back({r.first, end});
      taken += end - r.first;
      r.first = end;
      if (r.first == r.end) ++at;
    }
    items.push_back(std::move(item));
  }
  return items;
}

}  // namespace deltasync::receiver
