// What the frame and container targets share: fixed layouts of every element width, and the full decode of a frame.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/hash.hpp"
#include "delta/codec.hpp"
#include "delta/delta.hpp"
#include "delta/frame.hpp"
#include "format/tiling.hpp"

namespace deltasync::fuzz {

inline const Layout& layout() {
  static const LayoutPtr layout = Layout::build({{"bf16", Dtype::bf16, {64, 40}, {32}, {8, 24}},
                                                 {"f32", Dtype::f32, {33, 7}, {}, {}},
                                                 {"i64", Dtype::i64, {5}, {}, {}},
                                                 {"f64", Dtype::f64, {}, {}, {}},
                                                 {"f8", Dtype::f8_e4m3, {300, 300}, {}, {}},
                                                 {"empty", Dtype::bf16, {0, 4}, {}, {}}})
                                      .value();
  return *layout;
}

/// Each width with rows that are whole words, which the decoder treats otherwise. Frames name no layout: the frame
/// target decodes them over both.
inline const Layout& aligned_layout() {
  static const LayoutPtr layout = Layout::build({{"f8", Dtype::f8_e4m3, {60, 304}, {32}, {}},
                                                 {"u8", Dtype::u8, {30, 128}, {}, {}},
                                                 {"i16", Dtype::i16, {50, 64}, {}, {16}},
                                                 {"f16", Dtype::f16, {20, 100}, {}, {}},
                                                 {"f32", Dtype::f32, {40, 64}, {}, {}},
                                                 {"i32", Dtype::i32, {9, 30}, {}, {}},
                                                 {"f64", Dtype::f64, {10, 64}, {}, {}},
                                                 {"i64", Dtype::i64, {700}, {}, {}}})
                                      .value();
  return *layout;
}

/// A base of many exponents, for the codecs that depend on them: in each 16 bits an arbitrary low byte below 0x3C to
/// 0x3F.
inline const std::vector<std::byte>& patterned_bytes() {
  static const std::vector<std::byte> half = [] {
    std::vector<std::byte> bytes(std::max(layout().half_bytes(), aligned_layout().half_bytes()));
    std::uint32_t state = 1;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      state = state * 1664525 + 1013904223;
      bytes[i] = static_cast<std::byte>(i % 2 == 0 ? state >> 24 : 0x3C + (state >> 30));
    }
    return bytes;
  }();
  return half;
}
inline ByteSpan patterned_half(const Layout& layout) {
  return ByteSpan(patterned_bytes()).first(layout.half_bytes());
}

/// To the standard library a std::byte is no integer, and two vectors of them are compared one by one.
inline bool same(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

/// Decodes a record over a tile; what verifies must apply to the same digest, and undo must bring the base back.
inline void decode_record(const Layout& layout, const delta::TileRecord& record, const std::vector<std::byte>& base,
                          std::size_t row_bytes, std::uint64_t rows) {
  std::vector<std::byte> memory = base;
  const std::uint64_t before = delta::tile_digest(memory.data(), row_bytes, rows, row_bytes);
  const auto verified = delta::verify_tile(layout, record, memory.data(), row_bytes, before);
  if (!same(memory, base)) std::abort();
  std::vector<std::byte> resolved(delta::resolved_bytes(layout, record));
  const auto again = delta::resolve_tile(layout, record, memory.data(), row_bytes, before, resolved);
  if (!same(memory, base) || again.ok() != verified.ok()) std::abort();
  if (!verified) return;
  std::vector<std::byte> undo;
  delta::save_undo(layout, record, memory.data(), row_bytes, undo);
  const auto applied = delta::apply_tile(layout, record, memory.data(), row_bytes, before);
  if (!applied || *applied != *verified) std::abort();
  if (delta::tile_digest(memory.data(), row_bytes, rows, row_bytes) != *applied) std::abort();
  const std::vector<std::byte> after = memory;
  delta::undo_tile(layout, record, memory.data(), row_bytes, undo);
  if (!same(memory, base)) std::abort();
  if (delta::traits(record.codec).whole_tile) return;
  delta::exchange_tile(layout, record, memory.data(), row_bytes, resolved);
  if (!same(memory, after)) std::abort();
  delta::exchange_tile(layout, record, memory.data(), row_bytes, resolved);
  if (!same(memory, base)) std::abort();
}

/// Every record over zeros and over the patterned half.
inline void decode_frame(const Layout& layout, ByteSpan bytes) {
  const auto records = delta::parse_frame(layout, bytes);
  if (!records) return;
  for (const auto& record : *records) {
    const Tile tile = tile_of(layout, record.tile);
    const Tensor& tensor = layout.tensors()[tile.tensor];
    const auto row_bytes = static_cast<std::size_t>(tile.rect.cols * tensor.element_bytes);
    std::vector<std::byte> base(row_bytes * tile.rect.rows);
    decode_record(layout, record, base, row_bytes, tile.rect.rows);
    const std::byte* row = patterned_half(layout).data() + tensor.offset + tile.rect.row * tensor.row_bytes() +
                           tile.rect.col * tensor.element_bytes;
    for (std::uint64_t r = 0; r < tile.rect.rows; ++r, row += tensor.row_bytes()) {
      std::copy(row, row + row_bytes, base.begin() + static_cast<std::ptrdiff_t>(r * row_bytes));
    }
    decode_record(layout, record, base, row_bytes, tile.rect.rows);
  }
}

/// Makes body hash, body length and header hash fit the bytes, if there is a header at all.
inline void repair_hashes(std::vector<std::byte>& bytes) {
  if (bytes.size() < sizeof(delta::FrameHeader)) return;
  auto header = load<delta::FrameHeader>(bytes.data());
  const ByteSpan body = ByteSpan(bytes).subspan(sizeof(header));
  header.magic = delta::kFrameMagic;
  header.version = delta::kFrameVersion;
  header.flags = 0;
  header.reserved = 0;
  header.body_bytes = body.size();
  header.body_hash = xxh3_64(body);
  header.header_hash = xxh3_64(bytes_of(header).first(offsetof(delta::FrameHeader, header_hash)));
  store(bytes.data(), header);
}

}  // namespace deltasync::fuzz
