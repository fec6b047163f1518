// What devices do with placed tiles, and what measures them: a closed set of kernels, each a plain struct of numbers
// and device pointers, whose member run() or sum() is what one thread does. CUDA launches it (kernels.cu), the host and
// the tests' device call it in a loop: the same code everywhere. No thread depends on another of its launch, in
// whatever order they run.
//
// A table (placement/words.hpp) has the places on its own device. Where a tile has places elsewhere too, each device
// does its part: gathering leaves out elements that are read elsewhere, exchanging writes the places that are here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <variant>

#include "base/host_device.hpp"
#include "delta/mix.hpp"
#include "placement/words.hpp"

namespace deltasync::gpu {

inline constexpr std::uint32_t kBlockThreads = 256;
/// What a block does of a tile: 16 bytes a thread at a time, where the tile allows it.
inline constexpr std::uint32_t kUnitBytes = 16;
inline constexpr std::uint32_t kBlockBytes = kBlockThreads * kUnitBytes * 4;
/// What a thread loads before it needs the first of it: devices take as long for one as for several.
inline constexpr std::uint32_t kAhead = 4;
/// What a block does of a list of changed elements.
inline constexpr std::uint32_t kBlockWords = kBlockThreads * kAhead;
/// What it takes the digest of: more than a block that moves, since all that it has to look up first comes before.
inline constexpr std::uint32_t kDigestBlockBytes = kBlockBytes * 4;

/// A tile, and where it is in a staging area: its elements row by row without gaps.
struct StagedTile {
  std::uint64_t rank = 0;  ///< in the table
  std::uint64_t at = 0;    ///< bytes from the beginning of the area, a multiple of kUnitBytes
  std::uint32_t rows = 0;
  std::uint32_t unused = 0;
};
DS_HD inline std::uint32_t tile_bytes(const placement::WordTile& tile, std::uint32_t rows) {
  return rows * tile.cols * tile.element_bytes;  // 512 KiB at most
}

/// Blocks for each tile, of which the largest has so many bytes.
inline std::uint32_t blocks_for(std::uint64_t largest_tile_bytes, std::uint32_t block_bytes = kBlockBytes) {
  return static_cast<std::uint32_t>((largest_tile_bytes + block_bytes - 1) / block_bytes);
}

namespace detail {

/// Calls fn.operator()<U>() for elements of that width.
template <class Fn>
DS_HD inline void with_width(std::uint32_t element_bytes, const Fn& fn) {
  switch (element_bytes) {
    case 1: fn(std::uint8_t{}); break;
    case 2: fn(std::uint16_t{}); break;
    case 4: fn(std::uint32_t{}); break;
    default: fn(std::uint64_t{}); break;
  }
}

struct alignas(kUnitBytes) Unit {
  std::uint64_t words[2];
};

/// Whether a tile lies as a whole in one region, which is in this table's memory.
DS_HD inline bool only_region(const placement::WordTable& table, const placement::WordTile& tile,
                              placement::WordRegion& out) {
  if (tile.primaries != 1) return false;
  out = placement::load_row(table.regions + tile.first);
  return out.first != nullptr;
}

/// A tile all of which lies in one region, its rows without gaps. Rows that follow each other are one long row.
struct DenseRows {
  std::byte* first = nullptr;
  std::uint64_t row_stride = 0;  ///< 0: a single row
  std::uint32_t row_bytes = 0;   ///< a tile has 512 KiB at most

  DS_HD std::byte* at(std::uint32_t byte) const {
    if (row_stride == 0) return first + byte;
    const std::uint32_t row = byte / row_bytes;  // of 32 bits: devices divide wider numbers in a long loop
    return first + row * row_stride + (byte - row * row_bytes);
  }
};

/// Whether the tile can be used in pieces of `unit` bytes, each of them aligned.
DS_HD inline bool dense_rows(const placement::WordTable& table, const placement::WordTile& tile, std::uint32_t rows,
                             std::uint32_t unit, DenseRows& out) {
  placement::WordRegion region;
  if (!only_region(table, tile, region)) return false;
  if (region.col_stride != tile.element_bytes && tile.cols != 1) return false;
  out.first = placement::element_in(region, tile.row, tile.col);
  out.row_stride = region.row_stride;
  out.row_bytes = tile.cols * tile.element_bytes;
  if (rows == 1 || out.row_stride == out.row_bytes) {
    out.row_bytes *= rows;
    out.row_stride = 0;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(out.first);
  return (address | out.row_stride | out.row_bytes) % unit == 0;
}

/// Where the elements of a tile are that lies in one region as a whole.
struct OnePlace {
  std::byte* first = nullptr;
  std::uint64_t row_stride = 0;  ///< 0: rows follow each other as elements do
  std::uint64_t col_stride = 0;
  std::uint32_t cols = 0;

  DS_HD std::byte* at(std::uint32_t local) const {
    if (row_stride == 0) return first + local * col_stride;
    const std::uint32_t row = local / cols;
    return first + row * row_stride + (local - row * cols) * col_stride;
  }
  /// Whether each word of a digest is an aligned one there.
  DS_HD bool has_words(std::uint32_t element_bytes) const {
    const auto address = reinterpret_cast<std::uintptr_t>(first);
    return col_stride == element_bytes && (address | row_stride | cols * std::uint64_t{element_bytes}) % 8 == 0;
  }
};

DS_HD inline bool one_place(const placement::WordTable& table, const placement::WordTile& tile, OnePlace& out) {
  placement::WordRegion region;
  if (!only_region(table, tile, region)) return false;
  out.first = placement::element_in(region, tile.row, tile.col);
  out.col_stride = region.col_stride;
  out.cols = tile.cols;
  out.row_stride = region.row_stride == tile.cols * region.col_stride ? 0 : region.row_stride;
  return true;
}

/// Writes the element to all of its places in this table, and returns what the first of them had; `value` itself if it
/// has none here.
template <class U>
DS_HD inline U exchange_here(const placement::WordTable& table, std::uint64_t rank, std::uint32_t local, U value) {
  U old = value;
  bool is_first = true;
  placement::for_each_place(table, rank, local, [&](std::byte* at) {
    if (is_first) old = placement::load_element<U>(at);
    is_first = false;
    placement::store_element<U>(at, value);
  });
  return old;
}

}  // namespace detail

/// Whole tiles between their places and a staging area.
struct MoveTiles {
  enum class Way : std::uint32_t { gather, scatter, exchange };

  placement::WordTable table;
  const StagedTile* tiles = nullptr;  ///< each at most once
  std::byte* staging = nullptr;
  std::uint32_t count = 0;
  std::uint32_t blocks_per_tile = 0;
  Way way = Way::gather;

  std::uint64_t blocks() const { return std::uint64_t{count} * blocks_per_tile; }
  std::array<const void*, 4> pointers() const { return {table.tiles, table.regions, tiles, staging}; }

  DS_HD void run(std::uint64_t block, std::uint32_t thread) const {
    const auto staged = placement::load_row(tiles + block / blocks_per_tile);
    const auto tile = placement::load_row(table.tiles + staged.rank);
    const std::uint32_t bytes = tile_bytes(tile, staged.rows);
    const std::uint32_t begin = static_cast<std::uint32_t>(block % blocks_per_tile) * kBlockBytes;
    const std::uint32_t end = begin + kBlockBytes < bytes ? begin + kBlockBytes : bytes;
    detail::DenseRows rows;
    if ((tile.copies == 0 || way == Way::gather) && detail::dense_rows(table, tile, staged.rows, kUnitBytes, rows)) {
      for (std::uint32_t at = begin + thread * kUnitBytes; at < end; at += kBlockThreads * kUnitBytes) {
        move_unit(rows.at(at), staging + staged.at + at);
      }
      return;
    }
    detail::with_width(tile.element_bytes, [&](auto zero) {
      using U = decltype(zero);
      constexpr auto kWidth = static_cast<std::uint32_t>(sizeof(U));
      for (std::uint32_t at = begin + thread * kWidth; at < end; at += kBlockThreads * kWidth) {
        move_element<U>(staged.rank, at / kWidth, staging + staged.at + at);
      }
    });
  }

 private:
  DS_HD void move_unit(std::byte* live, std::byte* aside) const {
    using detail::Unit;
    using placement::load_element;
    using placement::store_element;
    if (way == Way::scatter) return store_element<Unit>(live, load_element<Unit>(aside));
    const Unit old = load_element<Unit>(live);
    if (way == Way::exchange) store_element<Unit>(live, load_element<Unit>(aside));
    store_element<Unit>(aside, old);
  }
  template <class U>
  DS_HD void move_element(std::uint64_t rank, std::uint32_t local, std::byte* aside) const {
    if (way == Way::gather) {
      const std::byte* const at = placement::word_address(table, rank, local);
      if (at != nullptr) placement::store_element<U>(aside, placement::load_element<U>(at));
      return;
    }
    const U value = placement::load_element<U>(aside);
    if (way == Way::scatter) return placement::scatter_word<U>(table, rank, local, value);
    placement::store_element<U>(aside, detail::exchange_here<U>(table, rank, local, value));
  }
};

/// What the numbers of a list of changes are.
enum class ChangeKind : std::uint32_t {
  elements,         ///< new elements
  differences,      ///< of integers, modulo 2^w
  ulp_differences,  ///< of floats: steps of the ulp map
};

/// The changes of one tile: ascending positions of 16 bits each, row by row within the tile, then as many numbers as
/// wide as its elements.
struct WordRun {
  std::uint64_t rank = 0;
  std::uint64_t at = 0;  ///< of the positions: bytes from the beginning of all changes, a multiple of 8
  std::uint32_t count = 0;
  ChangeKind kind = ChangeKind::elements;

  /// Of the numbers, from the beginning of the positions.
  static DS_HD std::uint64_t numbers_at(std::uint32_t count) { return (std::uint64_t{count} * 2 + 7) / 8 * 8; }
  /// What a run takes.
  static std::uint64_t bytes(std::uint32_t count, std::uint32_t element_bytes) {
    return numbers_at(count) + (std::uint64_t{count} * element_bytes + 7) / 8 * 8;
  }
};
/// What one block does: kBlockWords changes of a run at most.
struct alignas(8) WordPiece {
  std::uint32_t run = 0;
  std::uint32_t first = 0;
};

/// Exchanges the numbers of all runs, which are new elements, with what is at their places here: the first time that
/// commits, the next time it rolls the commit back.
struct ExchangeWords {
  placement::WordTable table;
  const WordRun* runs = nullptr;      ///< of different tiles
  const WordPiece* pieces = nullptr;  ///< every change in one of them
  std::byte* changes = nullptr;
  std::uint64_t count = 0;  ///< of the pieces

  std::uint64_t blocks() const { return count; }
  std::array<const void*, 5> pointers() const { return {table.tiles, table.regions, runs, pieces, changes}; }

  DS_HD void run(std::uint64_t block, std::uint32_t thread) const {
    const auto piece = placement::load_row(pieces + block);
    const auto of = placement::load_row(runs + piece.run);
    const auto tile = placement::load_row(table.tiles + of.rank);
    const std::uint32_t end = piece.first + kBlockWords < of.count ? piece.first + kBlockWords : of.count;
    const auto* const positions = reinterpret_cast<const std::uint16_t*>(changes + of.at);
    std::byte* const numbers = changes + of.at + WordRun::numbers_at(of.count);
    detail::OnePlace place;
    const bool is_one = tile.copies == 0 && detail::one_place(table, tile, place);
    detail::with_width(tile.element_bytes, [&](auto zero) {
      using U = decltype(zero);
      if (is_one) return exchange<U>(place, positions, numbers, piece.first + thread, end);
      for (std::uint32_t i = piece.first + thread; i < end; i += kBlockThreads) {
        std::byte* const number = numbers + std::uint64_t{i} * sizeof(U);
        const U value = placement::load_element<U>(number);
        placement::store_element<U>(
            number, detail::exchange_here<U>(table, of.rank, placement::load_number(positions + i), value));
      }
    });
  }

 private:
  /// All loads of a thread before its first store, behind which no other may begin.
  template <class U>
  static DS_HD void exchange(const detail::OnePlace& place, const std::uint16_t* positions, std::byte* numbers,
                             std::uint32_t first, std::uint32_t end) {
    std::byte* at[kAhead] = {};
    U number[kAhead] = {};
    U old[kAhead] = {};
    DS_UNROLL
    for (std::uint32_t k = 0; k < kAhead; ++k) {
      const std::uint32_t i = first + k * kBlockThreads;
      if (i >= end) continue;
      at[k] = place.at(placement::load_number(positions + i));
      number[k] = placement::load_element<U>(numbers + std::uint64_t{i} * sizeof(U));
    }
    DS_UNROLL
    for (std::uint32_t k = 0; k < kAhead; ++k) {
      if (at[k] != nullptr) old[k] = placement::load_element<U>(at[k]);
    }
    DS_UNROLL
    for (std::uint32_t k = 0; k < kAhead; ++k) {
      if (at[k] == nullptr) continue;
      placement::store_element<U>(at[k], number[k]);
      placement::store_element<U>(numbers + std::uint64_t{first + k * kBlockThreads} * sizeof(U), old[k]);
    }
  }
};

/// The state digests of tiles (delta_format.md), read where they are: sums[i] grows by that of tiles[i]. All
/// elements of these tiles are read on this device.
struct DigestTiles {
  placement::WordTable table;
  const StagedTile* tiles = nullptr;  ///< their `at` does not matter
  std::uint64_t* sums = nullptr;
  std::uint32_t count = 0;
  std::uint32_t blocks_per_tile = 0;

  std::uint64_t blocks() const { return std::uint64_t{count} * blocks_per_tile; }
  std::array<const void*, 4> pointers() const { return {table.tiles, table.regions, tiles, sums}; }
  DS_HD std::uint64_t* sum_of(std::uint64_t block) const { return sums + block / blocks_per_tile; }

  /// What the thread adds to *sum_of(block).
  DS_HD std::uint64_t sum(std::uint64_t block, std::uint32_t thread) const {
    const auto staged = placement::load_row(tiles + block / blocks_per_tile);
    const auto tile = placement::load_row(table.tiles + staged.rank);
    const std::uint32_t bytes = tile_bytes(tile, staged.rows);
    const std::uint32_t begin = static_cast<std::uint32_t>(block % blocks_per_tile) * kDigestBlockBytes;
    const std::uint32_t end = begin + kDigestBlockBytes < bytes ? begin + kDigestBlockBytes : bytes;
    detail::DenseRows rows;
    std::uint64_t sum = 0;
    if (tile.cols * tile.element_bytes % 8 == 0 && detail::dense_rows(table, tile, staged.rows, kUnitBytes, rows)) {
      constexpr std::uint32_t kStride = kBlockThreads * kUnitBytes;
      for (std::uint32_t at = begin + thread * kUnitBytes; at < end; at += kStride * kAhead) {
        detail::Unit units[kAhead] = {};
        DS_UNROLL
        for (std::uint32_t k = 0; k < kAhead; ++k) {
          if (at + k * kStride < end) units[k] = placement::load_element<detail::Unit>(rows.at(at + k * kStride));
        }
        DS_UNROLL
        for (std::uint32_t k = 0; k < kAhead; ++k) {
          const std::uint32_t word = (at + k * kStride) / 8;
          if (at + k * kStride >= end) continue;
          sum += delta::mix_word(units[k].words[0], word) + delta::mix_word(units[k].words[1], word + 1);
        }
      }
      return sum;
    }
    detail::with_width(tile.element_bytes, [&](auto zero) { sum = sum_words<decltype(zero)>(staged, block, thread); });
    return sum;
  }

  /// The word of `lanes` elements from position `local` on, the rest of it zero.
  template <class U>
  static DS_HD std::uint64_t word_at(const placement::WordTable& table, std::uint64_t rank, std::uint32_t local,
                                     std::uint32_t lanes) {
    std::uint64_t word = 0;
    for (std::uint32_t i = 0; i < lanes; ++i) {
      const std::byte* const at = placement::word_address(table, rank, local + i);
      if (at != nullptr) word |= std::uint64_t{placement::load_element<U>(at)} << (i * sizeof(U) * 8 % 64);
    }
    return word;
  }

 private:
  /// Rows that end within a word have more words than whole ones: blocks share them out again.
  template <class U>
  DS_HD std::uint64_t sum_words(const StagedTile& staged, std::uint64_t block, std::uint32_t thread) const {
    constexpr std::uint32_t kLanes = 8 / sizeof(U);
    const std::uint32_t cols = placement::load_number(&table.tiles[staged.rank].cols);
    const std::uint32_t words_per_row = (cols + kLanes - 1) / kLanes;
    const std::uint64_t words = std::uint64_t{staged.rows} * words_per_row;
    std::uint64_t sum = 0;
    for (std::uint64_t i = block % blocks_per_tile * kBlockThreads + thread; i < words;
         i += std::uint64_t{blocks_per_tile} * kBlockThreads) {
      const auto row = static_cast<std::uint32_t>(i / words_per_row);
      const auto col = static_cast<std::uint32_t>(i - std::uint64_t{row} * words_per_row) * kLanes;
      const std::uint32_t lanes = cols - col < kLanes ? cols - col : kLanes;
      sum += delta::mix_word(word_at<U>(table, staged.rank, row * cols + col, lanes), i);
    }
    return sum;
  }
};

/// Turns the numbers of all runs into new elements, and says how the digests change: sums[i] grows by what
/// runs[first_run + i] adds to its tile's. Live memory is only read; all elements of these tiles are read on this
/// device.
struct ResolveWords {
  placement::WordTable table;
  const WordRun* runs = nullptr;
  const WordPiece* pieces = nullptr;
  std::byte* changes = nullptr;
  std::uint64_t* sums = nullptr;
  std::uint64_t count = 0;      ///< of the pieces
  std::uint32_t first_run = 0;  ///< of these: the one that sums[0] is of

  std::uint64_t blocks() const { return count; }
  std::array<const void*, 6> pointers() const { return {table.tiles, table.regions, runs, pieces, changes, sums}; }
  DS_HD std::uint64_t* sum_of(std::uint64_t block) const {
    return sums + (placement::load_number(&pieces[block].run) - first_run);
  }

  DS_HD std::uint64_t sum(std::uint64_t block, std::uint32_t thread) const {
    const auto piece = placement::load_row(pieces + block);
    const auto of = placement::load_row(runs + piece.run);
    const auto tile = placement::load_row(table.tiles + of.rank);
    std::uint64_t sum = 0;
    detail::with_width(tile.element_bytes, [&](auto zero) { sum = resolve<decltype(zero)>(piece, of, tile, thread); });
    return sum;
  }

 private:
  template <class U>
  static DS_HD U resolved(ChangeKind kind, U old, U number) {
    if (kind == ChangeKind::elements) return number;
    return kind == ChangeKind::differences ? delta::add_ulps<U, false>(old, number)
                                           : delta::add_ulps<U, true>(old, number);
  }

  /// The thread that has the first change of a word does all of that word's.
  template <class U>
  DS_HD std::uint64_t resolve(const WordPiece& piece, const WordRun& of, const placement::WordTile& tile,
                              std::uint32_t thread) const {
    constexpr std::uint32_t kLanes = 8 / sizeof(U);
    const std::uint32_t cols = tile.cols;
    detail::OnePlace place;
    const bool has_words = detail::one_place(table, tile, place) && place.has_words(sizeof(U));
    const std::uint32_t words_per_row = (cols + kLanes - 1) / kLanes;
    const auto* const positions = reinterpret_cast<const std::uint16_t*>(changes + of.at);
    std::byte* const numbers = changes + of.at + WordRun::numbers_at(of.count);
    const std::uint32_t end = piece.first + kBlockWords < of.count ? piece.first + kBlockWords : of.count;
    std::uint64_t sum = 0;
    for (std::uint32_t i = piece.first + thread; i < end; i += kBlockThreads) {
      const std::uint32_t local = placement::load_number(positions + i);
      const std::uint32_t row = local / cols;
      const std::uint32_t first = row * cols + (local - row * cols) / kLanes * kLanes;  // of the word
      if (i != 0 && placement::load_number(positions + i - 1) >= first) continue;
      const std::uint32_t left = (row + 1) * cols - first;
      const std::uint32_t lanes = left < kLanes ? left : kLanes;
      const std::uint64_t before = has_words ? placement::load_element<std::uint64_t>(place.at(first))
                                             : DigestTiles::word_at<U>(table, of.rank, first, lanes);
      std::uint64_t after = before;
      for (std::uint32_t j = i; j < of.count; ++j) {
        const std::uint32_t at = placement::load_number(positions + j);
        if (at >= first + lanes) break;
        std::byte* const number = numbers + std::uint64_t{j} * sizeof(U);
        const std::uint32_t shift = (at - first) * static_cast<std::uint32_t>(sizeof(U)) * 8 % 64;
        const auto old = static_cast<U>(before >> shift);
        const U now = resolved<U>(of.kind, old, placement::load_element<U>(number));
        placement::store_element<U>(number, now);
        after ^= std::uint64_t{static_cast<U>(old ^ now)} << shift;
      }
      const std::uint64_t word = std::uint64_t{row} * words_per_row + (first - row * cols) / kLanes;
      sum += delta::mix_word(after, word) - delta::mix_word(before, word);
    }
    return sum;
  }
};

/// Reads memory and does nothing else: the most that the device's memory gives is how fast this runs. sums[i] grows by
/// all words of block i, so that nothing of it can be left out.
struct SumMemory {
  static constexpr std::uint32_t kLoads = 16;  ///< of a thread, none of which waits for another
  static constexpr std::uint32_t kStride = kBlockThreads * kUnitBytes;
  static constexpr std::uint32_t kBytes = kStride * kLoads;  ///< of a block

  const std::byte* memory = nullptr;  ///< aligned to kUnitBytes
  std::uint64_t bytes = 0;            ///< a multiple of kUnitBytes
  std::uint64_t* sums = nullptr;      ///< one for each block: threads of one launch would queue up at a single one

  std::uint64_t blocks() const { return (bytes + kBytes - 1) / kBytes; }
  std::array<const void*, 2> pointers() const { return {memory, sums}; }
  DS_HD std::uint64_t* sum_of(std::uint64_t block) const { return sums + block; }

  DS_HD std::uint64_t sum(std::uint64_t block, std::uint32_t thread) const {
    const std::byte* const first = memory + block * kBytes;
    const std::uint64_t left = bytes - block * kBytes;
    std::uint64_t sum = 0;
    if (left >= kBytes) {
      for (std::uint32_t i = 0; i < kLoads; ++i) sum += words_at(first + i * kStride + thread * kUnitBytes);
      return sum;
    }
    for (std::uint64_t at = thread * kUnitBytes; at < left; at += kStride) sum += words_at(first + at);
    return sum;
  }

 private:
  static DS_HD std::uint64_t words_at(const std::byte* at) {
    const auto unit = placement::load_element<detail::Unit>(at);
    return unit.words[0] + unit.words[1];
  }
};

/// A matrix whose columns lie apart, to one whose rows have no gaps. A block has a square of it, so that each line of
/// either is whole in one block; neighbouring threads read neighbours of the source.
struct GatherMatrix {
  static constexpr std::uint32_t kSide = 32;

  const std::byte* from = nullptr;  ///< first element
  std::byte* to = nullptr;          ///< aligned to an element
  std::uint64_t rows = 0;
  std::uint64_t cols = 0;
  std::uint64_t row_stride = 0;  ///< bytes, of the source, as is col_stride
  std::uint64_t col_stride = 0;
  std::uint32_t element_bytes = 0;

  static constexpr DS_HD std::uint64_t squares(std::uint64_t size) { return (size + kSide - 1) / kSide; }
  std::uint64_t blocks() const { return squares(rows) * squares(cols); }
  std::array<const void*, 2> pointers() const { return {from, to}; }

  DS_HD void run(std::uint64_t block, std::uint32_t thread) const {
    const std::uint64_t across = squares(cols);
    const std::uint64_t first_row = block / across * kSide;
    const std::uint64_t first_col = block % across * kSide;
    const bool by_rows = row_stride < col_stride;
    detail::with_width(element_bytes, [&](auto zero) {
      using U = decltype(zero);
      for (std::uint32_t i = thread; i < kSide * kSide; i += kBlockThreads) {
        const std::uint64_t row = first_row + (by_rows ? i % kSide : i / kSide);
        const std::uint64_t col = first_col + (by_rows ? i / kSide : i % kSide);
        if (row >= rows || col >= cols) continue;
        const std::byte* const at = from + row * row_stride + col * col_stride;
        placement::store_element<U>(to + (row * cols + col) * sizeof(U), placement::load_element<U>(at));
      }
    });
  }
};

/// Any of them.
using Kernel = std::variant<MoveTiles, ExchangeWords, DigestTiles, ResolveWords, SumMemory, GatherMatrix>;

}  // namespace deltasync::gpu
