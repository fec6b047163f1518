// Tile by tile, so that each line of the source is read once while it is in the cache, and each of the destination
// written whole: a tile is gathered into a small buffer in the order of the source, and leaves it in rows.
#include "writer/copy_transposed.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace deltasync {
namespace {

constexpr std::size_t kTile = kTransposedTile;

/// Rows [row, row + rows) and columns [col, col + cols) of the job.
template <std::size_t kWidth>
void copy_tile(const CopyJob& job, std::uint64_t row, std::size_t rows, std::size_t col, std::size_t cols) noexcept {
  std::array<std::byte, kTile * kTile * kWidth> tile;
  const std::byte* const from = job.from + row * job.from_stride + col * job.from_col_stride;
  const auto take = [&](std::size_t r, std::size_t c) {
    std::memcpy(tile.data() + (r * kTile + c) * kWidth, from + r * job.from_stride + c * job.from_col_stride, kWidth);
  };
  if (job.from_stride < job.from_col_stride) {
    for (std::size_t c = 0; c < cols; ++c) {
      for (std::size_t r = 0; r < rows; ++r) take(r, c);
    }
  } else {
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t c = 0; c < cols; ++c) take(r, c);
    }
  }
  std::byte* const to = job.to + row * job.to_stride + col * kWidth;
  for (std::size_t r = 0; r < rows; ++r) {
    std::memcpy(to + r * job.to_stride, tile.data() + r * kTile * kWidth, cols * kWidth);
  }
}

template <std::size_t kWidth>
void copy_tiles(const CopyJob& job) noexcept {
  for (std::uint64_t row = 0; row < job.rows; row += kTile) {
    const auto rows = static_cast<std::size_t>(std::min<std::uint64_t>(kTile, job.rows - row));
    for (std::size_t col = 0; col < job.cols(); col += kTile) {
      copy_tile<kWidth>(job, row, rows, col, std::min(kTile, job.cols() - col));
    }
  }
}

}  // namespace

void copy_transposed(const CopyJob& job) noexcept {
  switch (job.element_bytes) {
    case 1: return copy_tiles<1>(job);
    case 2: return copy_tiles<2>(job);
    case 4: return copy_tiles<4>(job);
    default: return copy_tiles<8>(job);
  }
}

}  // namespace deltasync
