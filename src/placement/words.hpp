// One element of a tile and its places in live memory: what a thread of a scatter, gather or exchange kernel does, and
// what the host does where an element is not one of a dense row. Plain structs and pointers, so that a table of them
// can be copied to a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/host_device.hpp"

namespace deltasync::placement {

/// A rectangle of a tensor's 2-D view at an address (Region, with its memory looked up).
struct WordRegion {
  std::uint64_t row = 0;
  std::uint64_t col = 0;
  std::uint64_t rows = 0;
  std::uint64_t cols = 0;
  std::byte* first = nullptr;  ///< of element (row, col); null: in memory that this table is not for
  std::uint64_t row_stride = 0;
  std::uint64_t col_stride = 0;
};

struct WordTile {
  std::uint64_t row = 0;  ///< of its first element in the tensor
  std::uint64_t col = 0;
  std::uint32_t cols = 0;  ///< of the tile
  std::uint32_t element_bytes = 0;
  std::uint32_t first = 0;      ///< of its regions
  std::uint32_t primaries = 0;  ///< as in TileRegions
  std::uint32_t copies = 0;
};

struct WordTable {
  const WordTile* tiles = nullptr;  ///< by rank in the placement's set
  const WordRegion* regions = nullptr;
};

/// Addresses are aligned to the element's width (Placement::build), which a device's loads need.
template <class U>
DS_HD inline U load_element(const std::byte* at) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const U*>(at);
#else
  U value;
  std::memcpy(&value, at, sizeof(U));
  return value;
#endif
}
template <class U>
DS_HD inline void store_element(std::byte* at, U value) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<U*>(at) = value;
#else
  std::memcpy(at, &value, sizeof(U));
#endif
}

/// A row of a table, which nothing writes while a kernel runs: devices keep it in registers and in the cache for what
/// is only read, whatever else the kernel writes.
template <class T>
DS_HD inline T load_row(const T* at) {
#ifdef __CUDA_ARCH__
  static_assert(sizeof(T) % sizeof(unsigned long long) == 0 && alignof(T) >= alignof(unsigned long long));
  constexpr int kWords = static_cast<int>(sizeof(T) / sizeof(unsigned long long));
  unsigned long long words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __ldg(reinterpret_cast<const unsigned long long*>(at) + i);
  T row;
  std::memcpy(&row, words, sizeof row);
  return row;
#else
  return *at;
#endif
}

/// A number of such a row, or of a list that nothing writes either.
template <class T>
DS_HD inline T load_number(const T* at) {
#ifdef __CUDA_ARCH__
  return __ldg(at);
#else
  return *at;
#endif
}

/// Null if the element is not one of the region, or the region is not in this table's memory. What lies before its
/// first row or column wraps to a large number.
DS_HD inline std::byte* element_in(const WordRegion& region, std::uint64_t row, std::uint64_t col) {
  const std::uint64_t r = row - region.row;
  const std::uint64_t c = col - region.col;
  if (r >= region.rows || c >= region.cols || region.first == nullptr) return nullptr;
  return region.first + r * region.row_stride + c * region.col_stride;
}

/// Where an element is read: its one place among the primaries. Those that begin at one row are a band, no other begins
/// before the band ends, and within it they are sorted by columns: so the element is in the last region that begins at
/// or before its column, of the last band that begins at or before its row.
DS_HD inline std::byte* primary_of(const WordTable& table, const WordTile& tile, std::uint64_t row, std::uint64_t col) {
  const WordRegion* const primaries = table.regions + tile.first;
  std::uint32_t end = tile.primaries;  // of the band
  for (std::uint32_t low = 0; low < end;) {
    const std::uint32_t middle = low + (end - low) / 2;
    if (load_number(&primaries[middle].row) <= row) {
      low = middle + 1;
    } else {
      end = middle;
    }
  }
  if (end == 0) return nullptr;
  const std::uint64_t band = load_number(&primaries[end - 1].row);
  for (std::uint32_t low = 0; low < end;) {
    const std::uint32_t middle = low + (end - low) / 2;
    if (load_number(&primaries[middle].row) < band || load_number(&primaries[middle].col) <= col) {
      low = middle + 1;
    } else {
      end = middle;
    }
  }
  return end == 0 ? nullptr : element_in(primaries[end - 1], row, col);
}

/// Calls fn(address) for each place of element `local` (row by row within the tile) that this table has: the primary
/// first.
template <class Fn>
DS_HD inline void for_each_place(const WordTable& table, std::uint64_t tile_rank, std::uint32_t local, const Fn& fn) {
  const WordTile& tile = table.tiles[tile_rank];
  const std::uint32_t tile_row = local / tile.cols;
  const std::uint64_t row = tile.row + tile_row;
  const std::uint64_t col = tile.col + (local - tile_row * tile.cols);
  if (std::byte* const at = primary_of(table, tile, row, col)) fn(at);
  const WordRegion* const copies = table.regions + tile.first + tile.primaries;
  for (std::uint32_t i = 0; i < tile.copies; ++i) {
    if (std::byte* const at = element_in(copies[i], row, col)) fn(at);
  }
}

/// Null if it is in memory that this table is not for.
DS_HD inline std::byte* word_address(const WordTable& table, std::uint64_t tile_rank, std::uint32_t local) {
  const WordTile& tile = table.tiles[tile_rank];
  const std::uint32_t tile_row = local / tile.cols;
  return primary_of(table, tile, tile.row + tile_row, tile.col + (local - tile_row * tile.cols));
}

/// Only where word_address is not null.
template <class U>
DS_HD inline U gather_word(const WordTable& table, std::uint64_t tile_rank, std::uint32_t local) {
  return load_element<U>(word_address(table, tile_rank, local));
}

/// To all of its places.
template <class U>
DS_HD inline void scatter_word(const WordTable& table, std::uint64_t tile_rank, std::uint32_t local, U value) {
  for_each_place(table, tile_rank, local, [value](std::byte* at) { store_element<U>(at, value); });
}

/// scatter_word; returns what the primary had. Only where word_address is not null.
template <class U>
DS_HD inline U exchange_word(const WordTable& table, std::uint64_t tile_rank, std::uint32_t local, U value) {
  const U old = gather_word<U>(table, tile_rank, local);
  scatter_word<U>(table, tile_rank, local, value);
  return old;
}

}  // namespace deltasync::placement
