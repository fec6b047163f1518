#include "placement/host_executor.hpp"
#include "format/tiling.hpp"
#include "placement/regions.hpp"

#include <algorithm>
#include <new>
#include <string>

namespace deltasync::placement {
namespace {

template <class Fn>
void with_element(std::uint32_t element_bytes, const Fn& fn) {
  switch (element_bytes) {
    case 1: fn.template operator()<std::uint8_t>(); break;
    case 2: fn.template operator()<std::uint16_t>(); break;
    case 4: fn.template operator()<std::uint32_t>(); break;
    default: fn.template operator()<std::uint64_t>(); break;
  }
}

/// One side of a copy of rows × cols elements.
struct Strided {
  std::byte* first = nullptr;
  std::uint64_t row_stride = 0;
  std::uint64_t col_stride = 0;
};

/// The inner loop goes along `from` or `to`, whichever is live memory: its neighbours are to be met in turn, while a
/// tile's scratch stays in the cache.
template <class U>
void copy_elements(std::uint64_t outer, std::uint64_t inner, Strided from, Strided to) {
  for (std::uint64_t o = 0; o < outer; ++o) {
    const std::byte* source = from.first + o * from.row_stride;
    std::byte* target = to.first + o * to.row_stride;
    for (std::uint64_t i = 0; i < inner; ++i, source += from.col_stride, target += to.col_stride) {
      store_element<U>(target, load_element<U>(source));
    }
  }
}

/// `live` tells which side's strides decide the order.
void copy_rect(std::uint64_t rows, std::uint64_t cols, std::uint32_t element_bytes, Strided from, Strided to,
               const Strided& live) {
  if (from.col_stride == element_bytes && to.col_stride == element_bytes) {
    const std::size_t row_bytes = static_cast<std::size_t>(cols) * element_bytes;
    if (from.row_stride == row_bytes && to.row_stride == row_bytes) {
      std::memcpy(to.first, from.first, static_cast<std::size_t>(rows) * row_bytes);
      return;
    }
    for (std::uint64_t r = 0; r < rows; ++r) {
      std::memcpy(to.first + r * to.row_stride, from.first + r * from.row_stride, row_bytes);
    }
    return;
  }
  if (live.row_stride < live.col_stride) {
    std::swap(rows, cols);
    std::swap(from.row_stride, from.col_stride);
    std::swap(to.row_stride, to.col_stride);
  }
  with_element(element_bytes, [&]<class U>() { copy_elements<U>(rows, cols, from, to); });
}

/// A region's part of a tile, in live memory and in the tile's own bytes.
struct TilePart {
  std::uint64_t rows = 0;
  std::uint64_t cols = 0;
  Strided live;
  Strided scratch;
};

TilePart tile_part(const WordRegion& region, const Rect& tile, std::uint32_t element_bytes, Strided scratch) {
  const Rect both = intersection({region.row, region.col, region.rows, region.cols}, tile);
  if (both.rows == 0) return {};
  scratch.first += (both.row - tile.row) * scratch.row_stride + (both.col - tile.col) * element_bytes;
  return {
      both.rows, both.cols, {element_in(region, both.row, both.col), region.row_stride, region.col_stride}, scratch};
}

/// Positions ascend, so rows are passed and not divided for.
class RowOf {
 public:
  explicit RowOf(std::uint32_t cols) : cols_(cols) {}
  std::uint32_t row(std::uint32_t local) noexcept {
    if (local - begin_ >= cols_) {
      row_ = local / cols_;
      begin_ = row_ * cols_;
    }
    return row_;
  }
  std::uint32_t col(std::uint32_t local) const noexcept { return local - begin_; }

 private:
  const std::uint32_t cols_;
  std::uint32_t row_ = 0;
  std::uint32_t begin_ = 0;
};

std::uint16_t position_at(const std::byte* changes, std::uint32_t i) {
  std::uint16_t position = 0;
  std::memcpy(&position, changes + std::size_t{i} * sizeof position, sizeof position);
  return position;
}

/// A changed element that has been looked up.
struct Change {
  std::byte* primary = nullptr;
  std::uint64_t row = 0;
  std::uint64_t col = 0;
};

/// Calls fn(address, element i's number, is_primary) for each place of each changed element. Places are all over the
/// memory: each is looked up, and asked for, so many elements before it is its turn.
template <class Fn>
void for_each_change(const WordTable& table, std::uint64_t rank, std::uint32_t count, const std::byte* changes,
                     const Fn& fn) {
  constexpr std::uint32_t kAhead = 32;
  const WordTile& tile = table.tiles[rank];
  RowOf rows(tile.cols);
  const WordRegion& only = table.regions[tile.first];
  const bool one_region = tile.primaries == 1;
  std::byte* const first = one_region ? element_in(only, tile.row, tile.col) : nullptr;
  Change changed[kAhead];
  const std::uint32_t end = count == 0 ? 0 : count + kAhead;
  for (std::uint32_t n = 0; n < end; ++n) {
    Change& slot = changed[n % kAhead];
    if (n >= kAhead) {
      const std::uint32_t i = n - kAhead;
      fn(slot.primary, i, true);
      for (std::uint32_t c = 0; c < tile.copies; ++c) {
        const WordRegion& copy = table.regions[tile.first + tile.primaries + c];
        if (std::byte* const at = element_in(copy, slot.row, slot.col)) fn(at, i, false);
      }
    }
    if (n < count) {
      const std::uint32_t local = position_at(changes, n);
      const std::uint32_t row = rows.row(local);
      const std::uint32_t col = rows.col(local);
      slot.row = tile.row + row;
      slot.col = tile.col + col;
      slot.primary = one_region ? first + row * only.row_stride + col * only.col_stride
                                : primary_of(table, tile, slot.row, slot.col);
      __builtin_prefetch(slot.primary, 1);
    }
  }
}

}  // namespace

Result<HostExecutor> HostExecutor::make(std::shared_ptr<const Placement> placement, Rest rest) {
  for (const LiveMemory& memory : placement->memories()) {
    if (memory.device.is_host()) continue;
    return Error(Errc::unsupported,
                 "live memory '" + memory.name + "' is on " + to_string(memory.device) + ", this is for host memory");
  }
  HostExecutor executor;
  executor.tables_ = make_word_tables(*placement, [&](std::uint32_t memory) {
    return memory == kRestMemory ? nullptr : placement->memories()[memory].base;
  });
  executor.rows_.reserve(executor.tables_.tiles.size());
  for (const wire::TileRange& range : parts_of(*placement).tiles.ranges()) {
    for (std::uint64_t tile = range.first; tile < range.end; ++tile) {
      executor.rows_.push_back(static_cast<std::uint32_t>(tile_of(*placement->layout(), tile).rect.rows));
    }
  }
  executor.placement_ = std::move(placement);
  const auto rest_bytes = static_cast<std::size_t>(executor.placement_->rest_bytes());
  if (rest == Rest::given || rest_bytes == 0) return executor;
  executor.own_rest_.reset(new (std::nothrow) std::byte[rest_bytes]());
  if (!executor.own_rest_) {
    return Error(Errc::no_space, std::to_string(rest_bytes) + " bytes for the rest of tiles that slices cut through");
  }
  executor.set_rest(executor.own_rest_.get());
  return executor;
}

void HostExecutor::set_rest(std::byte* memory) noexcept {
  const std::vector<Region>& regions = parts_of(*placement_).regions;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    if (regions[i].memory == kRestMemory) tables_.regions[i].first = memory + regions[i].offset;
  }
}

Rect HostExecutor::rect_of(const WordTile& tile, std::uint64_t rank) const noexcept {
  return {tile.row, tile.col, rows_[rank], tile.cols};
}

std::uint64_t HostExecutor::tile_bytes(std::uint64_t rank) const noexcept {
  const WordTile& tile = tables_.tiles[rank];
  return std::uint64_t{rows_[rank]} * tile.cols * tile.element_bytes;
}

void HostExecutor::gather_tile(std::uint64_t rank, std::byte* to) const {
  const WordTile& tile = tables_.tiles[rank];
  const Rect rect = rect_of(tile, rank);
  const Strided rows{to, std::uint64_t{tile.cols} * tile.element_bytes, tile.element_bytes};
  for (std::uint32_t i = 0; i < tile.primaries; ++i) {
    const TilePart p = tile_part(tables_.regions[tile.first + i], rect, tile.element_bytes, rows);
    if (p.rows != 0) copy_rect(p.rows, p.cols, tile.element_bytes, p.live, p.scratch, p.live);
  }
}

void HostExecutor::scatter_tile(std::uint64_t rank, const std::byte* from, std::uint64_t row_stride) const {
  const WordTile& tile = tables_.tiles[rank];
  const Rect rect = rect_of(tile, rank);
  const Strided rows{const_cast<std::byte*>(from), row_stride, tile.element_bytes};  // only read
  for (std::uint32_t i = 0; i < tile.primaries + tile.copies; ++i) {
    const TilePart p = tile_part(tables_.regions[tile.first + i], rect, tile.element_bytes, rows);
    if (p.rows != 0) copy_rect(p.rows, p.cols, tile.element_bytes, p.scratch, p.live, p.live);
  }
}

void HostExecutor::exchange_tile(std::uint64_t rank, std::byte* bytes, std::vector<std::byte>& scratch) const {
  const WordTile& tile = tables_.tiles[rank];
  scratch.resize(static_cast<std::size_t>(tile_bytes(rank)));
  gather_tile(rank, scratch.data());
  scatter_tile(rank, bytes, std::uint64_t{tile.cols} * tile.element_bytes);
  std::memcpy(bytes, scratch.data(), scratch.size());
}

void HostExecutor::exchange_words(std::uint64_t rank, std::uint32_t count, MutByteSpan changes) const {
  std::byte* const elements = changes.data() + std::size_t{count} * sizeof(std::uint16_t);
  with_element(tables_.tiles[rank].element_bytes, [&]<class U>() {
    U now = 0;
    for_each_change(table(), rank, count, changes.data(), [&](std::byte* at, std::uint32_t i, bool primary) {
      if (primary) {
        std::byte* const element = elements + std::size_t{i} * sizeof(U);
        now = load_element<U>(element);
        store_element<U>(element, load_element<U>(at));
      }
      store_element<U>(at, now);
    });
  });
}

void HostExecutor::scatter_words(std::uint64_t rank, std::uint32_t count, ByteSpan changes) const {
  const std::byte* const elements = changes.data() + std::size_t{count} * sizeof(std::uint16_t);
  with_element(tables_.tiles[rank].element_bytes, [&]<class U>() {
    for_each_change(table(), rank, count, changes.data(), [&](std::byte* at, std::uint32_t i, bool) {
      store_element<U>(at, load_element<U>(elements + std::size_t{i} * sizeof(U)));
    });
  });
}

std::optional<HostExecutor::Rows> HostExecutor::rows_of(std::uint64_t rank) const noexcept {
  if (tables_.tiles[rank].copies != 0) return std::nullopt;
  return read_rows_of(rank);
}

std::optional<HostExecutor::Rows> HostExecutor::read_rows_of(std::uint64_t rank) const noexcept {
  const WordTile& tile = tables_.tiles[rank];
  const WordRegion& only = tables_.regions[tile.first];
  if (tile.primaries != 1) return std::nullopt;
  const bool dense = only.col_stride == tile.element_bytes || tile.cols == 1;
  if (!dense) return std::nullopt;
  return Rows{element_in(only, tile.row, tile.col), only.row_stride};
}

}  // namespace deltasync::placement
