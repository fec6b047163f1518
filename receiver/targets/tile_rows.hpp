// Where the rows of a tile are.
#pragma once

#include <cstddef>

namespace deltasync {

/// A tile in memory: its element (r, c) at first + r·row_stride + c·element_bytes.
struct TileRows {
  std::byte* first = nullptr;
  std::size_t row_stride = 0;
};

}  // namespace deltasync
