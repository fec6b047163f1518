// Tiles of memory in which tensors lie as in a half: contiguous rows.
#pragma once

#include <cstddef>
#include <vector>

#include "base/thread_pool.hpp"
#include "format/tile_set.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/host_memory.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync {

/// The rows that have tiles of the set, as sorted, disjoint ranges of a half. Memory comes in pages: what lies less
/// than a huge page apart is one range. A slice of columns has all rows of its tensor.
std::vector<HostMemory::Part> memory_parts(const Layout& layout, const TileSet& tiles);

/// A tile of a tensor.
TileRows tile_rows(const Layout& layout, const Tile& tile, const delta::TensorMemory& tensor);
/// Nothing if they are the same.
void copy_tile_rows(const Layout& layout, const Tile& tile, const TileRows& from, const TileRows& to);

/// Exchanges the elements of the set's tiles between two halves, and no other byte.
void swap_tiles(const Layout& layout, const TileSet& tiles, std::byte* a, std::byte* b, ThreadPool& pool);

}  // namespace deltasync
