// What the frame and container targets share: a fixed layout of every element width, and the full decode of a frame.
#pragma once

#include <cstdlib>
#include <vector>

#include "base/hash.hpp"
#include "delta/delta.hpp"
#include "delta/frame.hpp"

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

/// Decodes every record over zeros; what verifies must apply to the same digest, and undo must bring the zeros back.
inline void decode_frame(ByteSpan bytes) {
  const auto records = delta::parse_frame(layout(), bytes);
  if (!records) return;
  for (const auto& record : *records) {
    const Tile tile = layout().tile(record.tile);
    const std::size_t row_bytes = tile.rect.cols * layout().tensors()[tile.tensor].element_bytes;
    std::vector<std::byte> memory(row_bytes * tile.rect.rows);
    const auto zeros = memory;
    const std::uint64_t before = delta::tile_digest(memory.data(), row_bytes, tile.rect.rows, row_bytes);
    const auto verified = delta::verify_tile(layout(), record, memory.data(), row_bytes, before);
    if (memory != zeros) std::abort();
    if (!verified) continue;
    std::vector<std::byte> undo;
    delta::save_undo(layout(), record, memory.data(), row_bytes, undo);
    const auto applied = delta::apply_tile(layout(), record, memory.data(), row_bytes, before);
    if (!applied || *applied != *verified) std::abort();
    if (delta::tile_digest(memory.data(), row_bytes, tile.rect.rows, row_bytes) != *applied) std::abort();
    delta::undo_tile(layout(), record, memory.data(), row_bytes, undo);
    if (memory != zeros) std::abort();
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
