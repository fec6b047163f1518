#include "receiver/targets/tile_memory.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "delta/geometry.hpp"
#include "format/tiling.hpp"

namespace deltasync {
namespace {

constexpr std::size_t kSwapBlockBytes = 16u << 10;
constexpr std::uint64_t kSwapTiles = 32;  ///< of one work item

void swap_bytes(std::byte* a, std::byte* b, std::uint64_t bytes) {
  std::array<std::byte, kSwapBlockBytes> block;
  for (std::uint64_t at = 0; at < bytes; at += kSwapBlockBytes) {
    const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(kSwapBlockBytes, bytes - at));
    std::memcpy(block.data(), a + at, n);
    std::memcpy(a + at, b + at, n);
    std::memcpy(b + at, block.data(), n);
  }
}

void swap_strip(const delta::Strip& strip, std::byte* a, std::byte* b) {
  const std::uint64_t stride = strip.tensor->row_bytes();
  const std::uint64_t cols = strip.panel_starts[strip.panels] - strip.panel_starts[0];
  const std::uint64_t row_bytes = cols * strip.tensor->element_bytes;
  const std::uint64_t first = strip.offset(0);
  if (row_bytes == stride) return swap_bytes(a + first, b + first, strip.rows * stride);
  for (std::uint64_t r = 0; r < strip.rows; ++r) {
    swap_bytes(a + first + r * stride, b + first + r * stride, row_bytes);
  }
}

}  // namespace

std::vector<HostMemory::Part> memory_parts(const Layout& layout, const TileSet& tiles) {
  std::vector<HostMemory::Part> parts;
  for (const wire::TileRange& range : tiles.ranges()) {
    delta::for_each_strip(layout, range.first, range.end, [&](const delta::Strip& strip) {
      const std::uint64_t stride = strip.tensor->row_bytes();
      const std::uint64_t first = strip.tensor->offset + strip.row * stride;
      const std::uint64_t end = first + strip.rows * stride;
      if (parts.empty() || first >= parts.back().end + HostMemory::kHugePageBytes) {
        parts.push_back({first, end});
      } else {
        parts.back().end = std::max(parts.back().end, end);
      }
    });
  }
  return parts;
}

TileRows tile_rows(const Layout& layout, const Tile& tile, const delta::TensorMemory& tensor) {
  return {delta::tile_address(tensor, tile, layout.tensors()[tile.tensor].element_bytes), tensor.row_stride};
}

void copy_tile_rows(const Layout& layout, const Tile& tile, const TileRows& from, const TileRows& to) {
  if (from.first == to.first) return;
  const auto row_bytes = static_cast<std::size_t>(tile.rect.cols) * layout.tensors()[tile.tensor].element_bytes;
  for (std::uint64_t r = 0; r < tile.rect.rows; ++r) {
    std::memcpy(to.first + r * to.row_stride, from.first + r * from.row_stride, row_bytes);
  }
}

void swap_tiles(const Layout& layout, const TileSet& tiles, std::byte* a, std::byte* b, ThreadPool& pool) {
  const std::uint64_t items = (tiles.tiles() + kSwapTiles - 1) / kSwapTiles;
  pool.run(items, [&](std::uint64_t item, unsigned) {
    const std::uint64_t end = std::min((item + 1) * kSwapTiles, tiles.tiles());
    for (std::uint64_t i = item * kSwapTiles; i < end;) {
      // The tiles that follow each other from here on.
      const std::uint64_t first = tiles.nth(i);
      std::uint64_t n = 1;
      while (i + n < end && tiles.nth(i + n) == first + n) ++n;
      delta::for_each_strip(layout, first, first + n, [&](const delta::Strip& strip) { swap_strip(strip, a, b); });
      i += n;
    }
  });
}

}  // namespace deltasync
