// Decoding records over a tile's memory: verify, apply, commit, undo.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <type_traits>

#include "delta/changed_words.hpp"
#include "delta/codec.hpp"
#include "delta/delta.hpp"
#include "delta/geometry.hpp"
#include "delta/mix.hpp"
#include "delta/raw_planes.hpp"
#include "delta/rice.hpp"

namespace deltasync::delta {

namespace {

constexpr std::uint32_t kRun = 64;  ///< elements that are looked at together, in the nearest cache

Error bad_digest() {
  return {Errc::corrupt, "the state digest after it differs: a wrong base or damaged bytes"};
}

/// A record that gives no whole tile over the old one at `first`.
Result<DecodedTile> decode_record(const TileShape& shape, const TileRecord& record, const std::byte* first,
                                  std::size_t row_stride) {
  return traits(record.codec).decode(active_kernels(), shape, record, first, row_stride);
}

template <class U, bool kFloat>
constexpr ValueKind value_kind(Codec codec) noexcept {
  if (!traits(codec).differences) return ValueKind::element;
  return kFloat ? ValueKind::ulp_difference : ValueKind::difference;
}

/// In a loop that loads from places all over a tile: compilers that make vectors of such loads for SSE2, which has no
/// gather, take them apart and put them together again, at twice the time.
inline void keep_scalar() noexcept {
  asm volatile("");
}

/// Where the run of elements that begins at number `i` ends: behind a word, so that its elements stay together.
template <class U>
std::uint32_t run_end(const DecodedTile& tile, std::uint32_t i) noexcept {
  constexpr std::uint32_t kLanes = 8 / sizeof(U);
  std::uint32_t end = std::min(tile.count, i + kRun);
  while (end < tile.count && tile.positions[end] / kLanes == tile.positions[end - 1] / kLanes) ++end;
  return end;
}

/// Turns differences into new elements (in `tile.values`) and returns how the digest changes. Reads only. For tiles
/// whose rows are whole words.
template <class U, bool kFloat, class Cursor>
std::uint64_t resolve_at(const RowGeometry& geometry, const DecodedTile& tile, Codec codec, const std::byte* first) {
  constexpr unsigned kWidth = sizeof(U) == 1 ? 0 : sizeof(U) == 2 ? 1 : sizeof(U) == 4 ? 2 : 3;
  const auto kernel = active_kernels().decode.resolve[kWidth][static_cast<unsigned>(value_kind<U, kFloat>(codec))];
  std::uint64_t before[kRun + 8];  // a run goes on to the end of its last word
  ElementPrefetcher prefetcher(geometry, tile.positions, tile.count, first, sizeof(U));
  Cursor cursor(geometry);
  std::uint64_t sum = 0;
  for (std::uint32_t i = 0; i < tile.count;) {
    const std::uint32_t end = run_end<U>(tile, i);
    prefetcher.reach(end);
    for (std::uint32_t j = i; j < end; ++j) {
      const std::size_t col = cursor.seek(tile.positions[j]);
      before[j - i] = load_raw<std::uint64_t>(first + cursor.offset() + (col * sizeof(U) & ~std::size_t{7}));
      keep_scalar();
    }
    sum += kernel(before, tile.positions + i, tile.values + std::size_t{i} * sizeof(U), end - i);
    i = end;
  }
  return sum;
}
template <class U, bool kFloat>
std::uint64_t resolve(const RowGeometry& geometry, const DecodedTile& tile, Codec codec, const std::byte* first) {
  return with_cursor(geometry,
                     [&]<class Cursor>() { return resolve_at<U, kFloat, Cursor>(geometry, tile, codec, first); });
}

/// The same for tiles whose rows end within a word.
template <class U, bool kFloat>
std::uint64_t resolve_ragged(const RowGeometry& geometry, const DecodedTile& tile, Codec codec,
                             const std::byte* first) {
  ChangedWordSum sum(active_kernels());
  U* const values = reinterpret_cast<U*>(tile.values);
  ElementPrefetcher prefetcher(geometry, tile.positions, tile.count, first, sizeof(U));
  for_each_changed_word<U>(geometry, tile.positions, tile.count, [&](const ChangedWord& w) {
    prefetcher.reach(w.end);
    const std::uint64_t before = load_word(first + w.offset, w.bytes);
    std::uint64_t after = before;
    for (std::uint32_t i = w.first; i < w.end; ++i) {
      const unsigned shift = (tile.positions[i] - w.element) * static_cast<unsigned>(sizeof(U)) * 8;
      const U old = static_cast<U>(before >> shift);
      if (traits(codec).differences) values[i] = add_ulps<U, kFloat>(old, values[i]);
      after ^= static_cast<std::uint64_t>(static_cast<U>(old ^ values[i])) << shift;
    }
    sum.add(before, after, w.index);
  });
  return sum.finish();
}

/// A new tile of this thread, row by row without padding.
std::byte* new_tile() {
  struct Memory {
    alignas(64) std::byte bytes[kTileElementsMax * 8];
  };
  thread_local const std::unique_ptr<Memory> memory(new Memory);
  return memory->bytes;
}

/// Where so many elements change that most words do, the whole new tile is made and its digest taken again: one mix for
/// each of its words instead of two for each change.
bool is_dense(const TileShape& shape, std::uint32_t changed) noexcept {
  return std::size_t{changed} * 8 >= shape.raw_bytes();
}

/// As resolve(), but makes the new tile. Returns its bytes.
template <class U, bool kFloat>
ByteSpan resolve_whole(const TileShape& shape, const DecodedTile& tile, Codec codec, const std::byte* first,
                       std::size_t row_stride) {
  std::byte* const whole = new_tile();
  for (std::uint32_t r = 0; r < shape.rows; ++r) {
    std::memcpy(whole + r * shape.row_bytes(), first + r * row_stride, shape.row_bytes());
  }
  U* const values = reinterpret_cast<U*>(tile.values);
  U* const elements = reinterpret_cast<U*>(whole);
  const bool differences = traits(codec).differences;
  for (std::uint32_t i = 0; i < tile.count; ++i) {
    U& element = elements[tile.positions[i]];
    element = values[i] = differences ? add_ulps<U, kFloat>(element, values[i]) : values[i];
  }
  return {whole, shape.raw_bytes()};
}

template <class U>
void write_elements(const RowGeometry& geometry, const DecodedTile& tile, std::byte* first) {
  const U* const values = reinterpret_cast<const U*>(tile.values);
  ElementPrefetcher prefetcher(geometry, tile.positions, tile.count, first, sizeof(U));
  for_each_position<U>(geometry, tile.positions, tile.count, [&](std::uint32_t i, std::size_t offset) {
    prefetcher.reach(i);
    store_raw(first + offset, values[i]);
  });
}

void write_rows(const TileShape& shape, ByteSpan packed, std::byte* first, std::size_t row_stride) {
  const std::size_t row_bytes = shape.row_bytes();
  for (std::uint32_t r = 0; r < shape.rows; ++r) {
    std::memcpy(first + r * row_stride, packed.data() + r * row_bytes, row_bytes);
  }
}

/// What a record decodes to.
struct NewElements {
  ByteSpan whole;       ///< the new tile, where the record gives it or it was made
  DecodedTile changed;  ///< of all records that do not give the whole tile
};

/// The digest after the record, checked. `decoded` then holds the new elements.
Result<std::uint64_t> check_record(const TileShape& shape, const TileRecord& record, const std::byte* first,
                                   std::size_t row_stride, std::uint64_t digest_before, NewElements& out) {
  std::uint64_t digest = 0;
  if (traits(record.codec).whole_tile) {
    DS_ASSIGN(out.whole, whole_tile_bytes(shape, record));
    digest = tile_digest(out.whole.data(), shape.row_bytes(), shape.rows, shape.row_bytes());
  } else {
    DS_ASSIGN(out.changed, decode_record(shape, record, first, row_stride));
    DecodedTile& decoded = out.changed;
    const RowGeometry geometry(shape, row_stride);
    digest = with_element(shape, [&]<class U, bool kFloat>() {
      if (is_dense(shape, decoded.count)) {
        out.whole = resolve_whole<U, kFloat>(shape, decoded, record.codec, first, row_stride);
        return tile_digest(out.whole.data(), shape.row_bytes(), shape.rows, shape.row_bytes());
      }
      return digest_before + (geometry.row_bytes % 8 == 0
                                  ? resolve<U, kFloat>(geometry, decoded, record.codec, first)
                                  : resolve_ragged<U, kFloat>(geometry, decoded, record.codec, first));
    });
  }
  if (digest != record.digest_after) return bad_digest();
  return digest;
}

template <class T>
T known_valid(const Layout& layout, const TileRecord& record, Result<T> decoded) {
  if (!decoded.ok()) {
    std::fprintf(stderr, "deltasync: %s: a record that was not verified: %s\n", tile_name(layout, record.tile).c_str(),
                 decoded.error().message().c_str());
    std::abort();
  }
  return *std::move(decoded);
}

/// Decodes a record that is known to be valid.
DecodedTile decode_again(const Layout& layout, const TileShape& shape, const TileRecord& record, const std::byte* first,
                         std::size_t row_stride) {
  return known_valid(layout, record, decode_record(shape, record, first, row_stride));
}

/// Adds (or, to undo, subtracts) the differences in place: a run is loaded, then added to, then stored, so that no load
/// waits behind the stores of the elements before it.
template <class U, bool kFloat>
void add_in_place(const RowGeometry& geometry, const DecodedTile& tile, std::byte* first, bool subtract) {
  const U* const diffs = reinterpret_cast<const U*>(tile.values);
  ElementPrefetcher prefetcher(geometry, tile.positions, tile.count, first, sizeof(U));
  RowCursor cursor(geometry);
  const U negated = subtract ? static_cast<U>(~U{0}) : U{0};
  U elements[kRun];
  std::size_t offsets[kRun];
  for (std::uint32_t i = 0; i < tile.count;) {
    const std::uint32_t run = std::min(tile.count - i, kRun);
    prefetcher.reach(i + run);
    for (std::uint32_t j = 0; j < run; ++j) {
      const std::size_t col = cursor.seek(tile.positions[i + j]);
      offsets[j] = cursor.offset() + col * sizeof(U);
      elements[j] = load_raw<U>(first + offsets[j]);
    }
    for (std::uint32_t j = 0; j < run; ++j) {
      elements[j] = add_ulps<U, kFloat>(elements[j], static_cast<U>((diffs[i + j] ^ negated) - negated));
    }
    for (std::uint32_t j = 0; j < run; ++j) store_raw(first + offsets[j], elements[j]);
    i += run;
  }
}

/// `resolved` holds `count` positions and then as many elements, at any address. Those of mutable bytes get the old
/// ones.
template <class U, class Cursor, class Byte>
void put_resolved(const RowGeometry& geometry, std::uint32_t count, std::byte* first, std::span<Byte> resolved) {
  const std::byte* const positions = resolved.data();
  Byte* const elements = resolved.data() + std::size_t{count} * sizeof(std::uint16_t);
  ElementPrefetcher prefetcher(geometry, positions, count, first, sizeof(U));
  Cursor cursor(geometry);
  for (std::uint32_t i = 0; i < count;) {
    const std::uint32_t end = std::min(count, i + kRun);
    prefetcher.reach(end);
    for (; i < end; ++i) {
      const std::size_t col = cursor.seek(load_raw<std::uint16_t>(positions + std::size_t{i} * sizeof(std::uint16_t)));
      std::byte* const place = first + cursor.offset() + col * sizeof(U);
      Byte* const element = elements + std::size_t{i} * sizeof(U);
      if constexpr (std::is_const_v<Byte>) {
        store_raw(place, load_raw<U>(element));
      } else {
        const U old = load_raw<U>(place);
        store_raw(place, load_raw<U>(element));
        store_raw(element, old);
      }
    }
  }
}

template <class Byte>
void put_resolved(const Layout& layout, const TileRecord& record, std::byte* first, std::size_t row_stride,
                  std::span<Byte> resolved) {
  if (traits(record.codec).whole_tile) return;
  const TileShape shape = tile_shape(layout, record.tile);
  const RowGeometry geometry(shape, row_stride);
  with_element(shape, [&]<class U, bool kFloat>() {
    with_cursor(geometry, [&]<class Cursor>() { put_resolved<U, Cursor>(geometry, record.changed, first, resolved); });
  });
}

}  // namespace

Result<std::uint64_t> verify_tile(const Layout& layout, const TileRecord& record, const std::byte* first,
                                  std::size_t row_stride, std::uint64_t digest_before) {
  NewElements decoded;
  Result<std::uint64_t> digest =
      check_record(tile_shape(layout, record.tile), record, first, row_stride, digest_before, decoded);
  if (!digest.ok()) return std::move(digest).error().with_context(tile_name(layout, record.tile));
  return digest;
}

std::size_t resolved_bytes(const Layout& layout, const TileRecord& record) {
  if (traits(record.codec).whole_tile) return 0;
  return std::size_t{record.changed} * (sizeof(std::uint16_t) + tile_shape(layout, record.tile).element_bytes);
}

Result<std::uint64_t> resolve_tile(const Layout& layout, const TileRecord& record, const std::byte* first,
                                   std::size_t row_stride, std::uint64_t digest_before, MutByteSpan out) {
  const TileShape shape = tile_shape(layout, record.tile);
  NewElements elements_after;
  Result<std::uint64_t> digest = check_record(shape, record, first, row_stride, digest_before, elements_after);
  if (!digest.ok()) return std::move(digest).error().with_context(tile_name(layout, record.tile));
  const DecodedTile& decoded = elements_after.changed;
  const std::size_t position_bytes = std::size_t{decoded.count} * sizeof(std::uint16_t);
  const std::size_t element_bytes = std::size_t{decoded.count} * shape.element_bytes;
  if (out.size() != position_bytes + element_bytes) {
    return Error(Errc::invalid_argument, tile_name(layout, record.tile) + ": room for " + std::to_string(out.size()) +
                                             " bytes of changes, " + std::to_string(position_bytes + element_bytes) +
                                             " are there");
  }
  if (decoded.count == 0) return digest;
  std::memcpy(out.data(), decoded.positions, position_bytes);
  std::memcpy(out.data() + position_bytes, decoded.values, element_bytes);
  return digest;
}

void exchange_tile(const Layout& layout, const TileRecord& record, std::byte* first, std::size_t row_stride,
                   MutByteSpan resolved) {
  put_resolved(layout, record, first, row_stride, resolved);
}

void write_resolved(const Layout& layout, const TileRecord& record, std::byte* first, std::size_t row_stride,
                    ByteSpan resolved) {
  put_resolved(layout, record, first, row_stride, resolved);
}

Result<std::uint64_t> apply_tile(const Layout& layout, const TileRecord& record, std::byte* first,
                                 std::size_t row_stride, std::uint64_t digest_before) {
  const TileShape shape = tile_shape(layout, record.tile);
  NewElements decoded;
  Result<std::uint64_t> digest = check_record(shape, record, first, row_stride, digest_before, decoded);
  if (!digest.ok()) return std::move(digest).error().with_context(tile_name(layout, record.tile));
  if (!decoded.whole.empty()) {
    write_rows(shape, decoded.whole, first, row_stride);
  } else {
    const RowGeometry geometry(shape, row_stride);
    with_element(shape, [&]<class U, bool kFloat>() { write_elements<U>(geometry, decoded.changed, first); });
  }
  return digest;
}

void commit_tile(const Layout& layout, const TileRecord& record, std::byte* first, std::size_t row_stride) {
  const TileShape shape = tile_shape(layout, record.tile);
  if (traits(record.codec).whole_tile) {
    write_rows(shape, known_valid(layout, record, whole_tile_bytes(shape, record)), first, row_stride);
    return;
  }
  const DecodedTile decoded = decode_again(layout, shape, record, first, row_stride);
  const RowGeometry geometry(shape, row_stride);
  with_element(shape, [&]<class U, bool kFloat>() {
    if (traits(record.codec).differences) {
      add_in_place<U, kFloat>(geometry, decoded, first, false);
    } else {
      write_elements<U>(geometry, decoded, first);
    }
  });
}

void save_undo(const Layout& layout, const TileRecord& record, const std::byte* first, std::size_t row_stride,
               std::vector<std::byte>& out) {
  if (traits(record.codec).inverts()) return;
  const TileShape shape = tile_shape(layout, record.tile);
  if (traits(record.codec).whole_tile) {
    for (std::uint32_t r = 0; r < shape.rows; ++r) {
      out.insert(out.end(), first + r * row_stride, first + r * row_stride + shape.row_bytes());
    }
    return;
  }
  const DecodedTile decoded = decode_again(layout, shape, record, first, row_stride);
  const RowGeometry geometry(shape, row_stride);
  if (traits(record.codec).needs_old_tile) {
    const ByteSpan positions = std::as_bytes(std::span(decoded.positions, decoded.count));
    out.insert(out.end(), positions.begin(), positions.end());
  }
  const std::size_t begin = out.size();
  out.resize(begin + std::size_t{decoded.count} * shape.element_bytes);
  with_element(shape, [&]<class U, bool kFloat>() {
    for_each_position<U>(geometry, decoded.positions, decoded.count, [&](std::uint32_t i, std::size_t offset) {
      std::memcpy(out.data() + begin + std::size_t{i} * sizeof(U), first + offset, sizeof(U));
    });
  });
}

void undo_tile(const Layout& layout, const TileRecord& record, std::byte* first, std::size_t row_stride,
               ByteSpan undo) {
  const TileShape shape = tile_shape(layout, record.tile);
  if (traits(record.codec).whole_tile) {
    write_rows(shape, undo, first, row_stride);
    return;
  }
  const RowGeometry geometry(shape, row_stride);
  // The positions that the old tile told stand before the elements; the record itself can no longer be decoded.
  std::vector<std::uint16_t> positions;
  DecodedTile decoded;
  if (traits(record.codec).needs_old_tile) {
    positions.resize(record.changed);
    std::memcpy(positions.data(), undo.data(), positions.size() * sizeof(std::uint16_t));
    undo = undo.subspan(positions.size() * sizeof(std::uint16_t));
    decoded = {positions.data(), nullptr, record.changed};
  } else {
    decoded = decode_again(layout, shape, record, first, row_stride);
  }
  with_element(shape, [&]<class U, bool kFloat>() {
    if (traits(record.codec).inverts()) {
      add_in_place<U, kFloat>(geometry, decoded, first, true);
      return;
    }
    for_each_position<U>(geometry, decoded.positions, decoded.count, [&](std::uint32_t i, std::size_t offset) {
      std::memcpy(first + offset, undo.data() + std::size_t{i} * sizeof(U), sizeof(U));
    });
  });
}

}  // namespace deltasync::delta
