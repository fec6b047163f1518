// Tiles as the delta code sees them: shapes, walks over their elements and words, and strips, the pieces of a half
// that are scanned in memory order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "delta/delta.hpp"
#include "format/tiling.hpp"

namespace deltasync::delta {

/// What decoding needs to know of a tile.
struct TileShape {
  std::uint32_t rows = 0;
  std::uint32_t cols = 0;
  std::uint32_t element_bytes = 0;
  bool is_float = false;
  std::uint8_t mantissa_bits = 0;  ///< of a float: the exponent stands above them, below the sign

  std::uint32_t elements() const noexcept { return rows * cols; }
  std::size_t row_bytes() const noexcept { return std::size_t{cols} * element_bytes; }
  std::size_t raw_bytes() const noexcept { return rows * row_bytes(); }
  std::uint32_t words_per_row() const noexcept { return static_cast<std::uint32_t>((row_bytes() + 7) / 8); }
  /// 0 … 3: index into the kernels' tables.
  unsigned width_log2() const noexcept { return static_cast<unsigned>(__builtin_ctz(element_bytes)); }
};

TileShape tile_shape(const Layout& layout, std::uint64_t tile);
/// Of the float dtypes; 0 for all others.
std::uint8_t mantissa_bits(Dtype dtype) noexcept;
/// "tile 88 of model.layers.3.mlp.down_proj.weight"
std::string tile_name(const Layout& layout, std::uint64_t tile);

/// Calls fn.operator()<U, kFloat>() for a tile's element type.
template <class Fn>
decltype(auto) with_element(const TileShape& shape, Fn&& fn) {
  switch (shape.width_log2() * 2 + (shape.is_float ? 1 : 0)) {
    case 0: return fn.template operator()<std::uint8_t, false>();
    case 1: return fn.template operator()<std::uint8_t, true>();
    case 2: return fn.template operator()<std::uint16_t, false>();
    case 3: return fn.template operator()<std::uint16_t, true>();
    case 4: return fn.template operator()<std::uint32_t, false>();
    case 5: return fn.template operator()<std::uint32_t, true>();
    case 6: return fn.template operator()<std::uint64_t, false>();
    default: return fn.template operator()<std::uint64_t, true>();
  }
}

/// A tile in memory as the walks below see it: where rows are whole words and lie one after the other, the tile is a
/// single long row, which saves the row arithmetic.
struct RowGeometry {
  std::uint32_t cols = 0;
  std::uint32_t words_per_row = 0;
  std::size_t row_stride = 0;
  std::size_t row_bytes = 0;
  bool is_flat = false;  ///< a single long row

  RowGeometry(const TileShape& shape, std::size_t stride)
      : cols(shape.cols), words_per_row(shape.words_per_row()), row_stride(stride), row_bytes(shape.row_bytes()) {
    if ((stride == row_bytes || shape.rows == 1) && row_bytes % 8 == 0) {
      is_flat = true;
      cols = shape.elements();
      words_per_row *= shape.rows;
      row_bytes = shape.raw_bytes();
    }
  }
};

/// Follows ascending positions through the rows of a tile; divides only where the row changes.
class RowCursor {
 public:
  explicit RowCursor(const RowGeometry& geometry) : g_(geometry) {}
  /// Moves to `position`, not before the last one. Returns its column.
  std::uint32_t seek(std::uint32_t position) noexcept {
    if (position - first_ >= g_.cols) {
      row_ = position / g_.cols;
      first_ = row_ * g_.cols;
    }
    return position - first_;
  }
  std::uint32_t row() const noexcept { return row_; }
  /// Position of the row's first element.
  std::uint32_t first() const noexcept { return first_; }
  /// Bytes from the tile's first element to the row's.
  std::size_t offset() const noexcept { return row_ * g_.row_stride; }

 private:
  const RowGeometry& g_;
  std::uint32_t row_ = 0;
  std::uint32_t first_ = 0;
};

/// The same where the tile is a single long row.
class FlatCursor {
 public:
  explicit FlatCursor(const RowGeometry& /*all of it is one row*/) {}
  static std::uint32_t seek(std::uint32_t position) noexcept { return position; }
  static std::size_t offset() noexcept { return 0; }
};

/// Calls fn.operator()<Cursor>() with the cheapest one.
template <class Fn>
decltype(auto) with_cursor(const RowGeometry& geometry, Fn&& fn) {
  if (geometry.is_flat) return fn.template operator()<FlatCursor>();
  return fn.template operator()<RowCursor>();
}

/// Asks for the cache lines of changed elements, many of them at once and into the second cache: it can wait for
/// many more lines than the first, whose few outstanding misses would make each wait for the one before (measured at
/// 1% changed: half the time of prefetching into the first cache, some way ahead or tile by tile). Where changes are
/// dense it asks for none.
class ElementPrefetcher {
 public:
  /// `positions`: `count` ascending ones of 16 bits each, at any address.
  ElementPrefetcher(const RowGeometry& geometry, const void* positions, std::uint32_t count, const std::byte* first,
                    std::uint32_t element_bytes)
      : cursor_(geometry),
        positions_(static_cast<const std::byte*>(positions)),
        count_(count),
        first_(first),
        element_bytes_(element_bytes),
        next_(closer_than_lines() ? count : 0) {}
  /// Before elements up to number `i` are used. Best asked in small steps: what is asked for then comes while elements
  /// are worked on.
  void reach(std::uint32_t i) noexcept {
    const std::uint32_t end = std::min(count_, i + kAhead);
    for (; next_ < end; ++next_) {
      const std::uint32_t col = cursor_.seek(position(next_));
      __builtin_prefetch(first_ + cursor_.offset() + std::size_t{col} * element_bytes_, 0, 2);
    }
  }

 private:
  static constexpr std::uint32_t kAhead = 768;  ///< elements
  static constexpr std::size_t kLine = 64;

  std::uint16_t position(std::uint32_t i) const noexcept {
    std::uint16_t position;
    std::memcpy(&position, positions_ + std::size_t{i} * sizeof position, sizeof position);
    return position;
  }
  /// Where most lines are needed the CPU finds them by itself, and asking for each costs more than it gains (measured:
  /// a fifth of all of the work at 5% of 16-bit elements; a gain of a tenth at 3%, of two fifths at 1%).
  bool closer_than_lines() const noexcept {
    return count_ != 0 && (std::size_t{position(count_ - 1)} + 1) * element_bytes_ <= count_ * kLine;
  }

  RowCursor cursor_;
  const std::byte* positions_;
  std::uint32_t count_;
  const std::byte* first_;
  std::uint32_t element_bytes_;
  std::uint32_t next_;
};

/// Calls fn(i, byte offset from the tile's first element) for each of `count` ascending positions.
template <class U, class Fn>
void for_each_position(const RowGeometry& geometry, const std::uint16_t* positions, std::uint32_t count, Fn&& fn) {
  RowCursor cursor(geometry);
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t col = cursor.seek(positions[i]);
    fn(i, cursor.offset() + std::size_t{col} * sizeof(U));
  }
}

/// A digest word that holds changed elements: those numbered [first, end) in the list of positions.
struct ChangedWord {
  std::uint32_t first = 0;
  std::uint32_t end = 0;
  std::uint32_t index = 0;    ///< of the word in the tile's digest
  std::uint32_t bytes = 0;    ///< real ones; fewer than 8 at the end of a row
  std::size_t offset = 0;     ///< from the tile's first element
  std::uint32_t element = 0;  ///< position of the word's first element
};

/// Calls fn(word) for each digest word that holds one of `count` ascending positions.
template <class U, class Fn>
void for_each_changed_word(const RowGeometry& geometry, const std::uint16_t* positions, std::uint32_t count, Fn&& fn) {
  constexpr std::uint32_t kLanes = 8 / sizeof(U);
  RowCursor cursor(geometry);
  std::uint32_t i = 0;
  while (i < count) {
    const std::uint32_t col = cursor.seek(positions[i]);
    const std::uint32_t word = col / kLanes;
    const std::uint32_t lanes = std::min(kLanes, geometry.cols - word * kLanes);
    ChangedWord out;
    out.first = i;
    out.element = cursor.first() + word * kLanes;
    const std::uint32_t element_end = out.element + lanes;
    do ++i;
    while (i < count && positions[i] < element_end);
    out.end = i;
    out.index = cursor.row() * geometry.words_per_row + word;
    out.bytes = lanes * static_cast<std::uint32_t>(sizeof(U));
    out.offset = cursor.offset() + std::size_t{word} * 8;
    fn(out);
  }
}

/// Neighbouring tiles of one band of one tensor: a run of panels, scanned row by row over all of them.
struct Strip {
  const Tensor* tensor = nullptr;
  std::uint64_t first_tile = 0;
  std::uint64_t row = 0;
  std::uint64_t rows = 0;
  std::uint32_t panels = 0;
  const std::uint64_t* panel_starts = nullptr;  ///< panels + 1 columns

  TileShape shape(std::uint32_t panel) const noexcept {
    return {static_cast<std::uint32_t>(rows), static_cast<std::uint32_t>(panel_starts[panel + 1] - panel_starts[panel]),
            tensor->element_bytes, dtype_is_float(tensor->spec.dtype), mantissa_bits(tensor->spec.dtype)};
  }
  /// Bytes from the start of a half to the first element of a panel's tile.
  std::uint64_t offset(std::uint32_t panel) const noexcept {
    return tensor->offset + row * tensor->row_bytes() + panel_starts[panel] * tensor->element_bytes;
  }
};

/// Calls fn(strip) for the strips that make up the tiles [first, end), in tile order.
template <class Fn>
void for_each_strip(const Layout& layout, std::uint64_t first, std::uint64_t end, Fn&& fn) {
  if (first >= end) return;
  std::uint32_t index = layout.tensor_of_tile(first);
  for (std::uint64_t tile = first; tile < end; ++index) {
    const Tensor& tensor = layout.tensors()[index];
    if (tensor.tile_count == 0) continue;
    Strip strip;
    strip.tensor = &tensor;
    if (tensor.tile_count == 1) {
      // Models of very many small tensors live here: no grid is built for them.
      const std::uint64_t whole[2] = {0, tensor.cols};
      strip.first_tile = tile++;
      strip.rows = tensor.rows;
      strip.panels = 1;
      strip.panel_starts = whole;
      fn(static_cast<const Strip&>(strip));
      continue;
    }
    const TileGrid grid = grid_of(layout, index);
    const std::uint64_t tensor_end = std::min(end, tensor.first_tile + tensor.tile_count);
    while (tile < tensor_end) {
      const std::uint64_t local = tile - tensor.first_tile;
      const std::uint64_t panel = local % grid.panels();
      const auto [row, rows] = grid.band(local / grid.panels());
      strip.first_tile = tile;
      strip.row = row;
      strip.rows = rows;
      strip.panels = static_cast<std::uint32_t>(std::min(grid.panels() - panel, tensor_end - tile));
      strip.panel_starts = grid.panel_starts.data() + panel;
      fn(static_cast<const Strip&>(strip));
      tile += strip.panels;
    }
  }
}

}  // namespace deltasync::delta
