#include "delta/frame.hpp"

#include <cassert>
#include <cstring>
#include <utility>

#include "base/hash.hpp"
#include "delta/codec.hpp"
#include "delta/dense_codec.hpp"
#include "delta/raw_planes.hpp"
#include "delta/rice.hpp"
#include "format/tiling.hpp"

namespace deltasync::delta {

std::uint64_t hash_header(const FrameHeader& header) noexcept {
  return xxh3_64(bytes_of(header).first(offsetof(FrameHeader, header_hash)));
}

std::size_t varint_bytes(std::uint64_t value) noexcept {
  std::size_t bytes = 1;
  while (value >>= 7) ++bytes;
  return bytes;
}

const char* to_string(Codec codec) noexcept {
  return traits(codec).name;
}

std::size_t payload_bytes(const TileShape& shape, const TileRecord& record) noexcept {
  if (record.codec == Codec::raw) return shape.raw_bytes();
  if (record.codec == Codec::dense_ulp) return dense_plane_sizes(shape, dense_choice(record)).total();
  return plane_sizes(record.codec, record.changed, record.rice_k, record.quotient_sum, record.gamma_bits,
                     shape.element_bytes)
      .total();
}

std::size_t record_bytes(const TileRecord& record, std::size_t payload_size) noexcept {
  std::size_t bytes = 1 + varint_bytes(record.changed) + varint_bytes(payload_size) + 8;
  if (traits(record.codec).record_sums >= 1) bytes += varint_bytes(record.quotient_sum);
  if (traits(record.codec).record_sums >= 2) bytes += varint_bytes(record.gamma_bits);
  if (record.codec == Codec::dense_ulp) ++bytes;  // k
  return bytes;
}

void add_to_stats(const TileRecord& record, CodecStats (&stats)[kCodecEnd]) noexcept {
  CodecStats& of_codec = stats[static_cast<unsigned>(record.codec)];
  ++of_codec.tiles;
  of_codec.changed += record.changed;
  of_codec.bytes += record.payload.size();
}

void add_to_stats(const CodecStats (&from)[kCodecEnd], CodecStats (&stats)[kCodecEnd]) noexcept {
  for (unsigned c = 0; c < kCodecEnd; ++c) {
    stats[c].tiles += from[c].tiles;
    stats[c].changed += from[c].changed;
    stats[c].bytes += from[c].bytes;
  }
}

void take_frames(std::vector<Frame>& frames, Delta& delta) {
  for (Frame& frame : frames) {
    if (frame.tiles == 0) continue;
    delta.changed += frame.changed;
    delta.frame_bytes += frame.bytes.size();
    delta.frames.push_back(std::move(frame));
  }
}

std::byte* copy_tile(const Layout& layout, ByteSpan half, std::uint64_t index, std::byte* out) noexcept {
  const Tile tile = tile_of(layout, index);
  const Tensor& tensor = layout.tensors()[tile.tensor];
  const std::size_t row_bytes = tile.rect.cols * tensor.element_bytes;
  const std::byte* row =
      half.data() + tensor.offset + tile.rect.row * tensor.row_bytes() + tile.rect.col * tensor.element_bytes;
  for (std::uint64_t r = 0; r < tile.rect.rows; ++r, row += tensor.row_bytes(), out += row_bytes) {
    std::memcpy(out, row, row_bytes);
  }
  return out;
}

void FrameBuilder::add(const TileRecord& record) {
  if (tiles_ == 0) first_tile_ = last_tile_ = record.tile;
  assert(tiles_ == 0 || record.tile > last_tile_);
  if (tiles_ != 0 && tiles_ % kFrameMarkRecords == 0) {
    marks_.push_back(
        {last_tile_ + 1, static_cast<std::uint32_t>(table_.size()), static_cast<std::uint32_t>(payload_end_)});
  }
  const std::size_t payload_size = payloads_.size() - payload_end_;
  payload_end_ = payloads_.size();
  ByteWriter out(table_);
  out.put_varint(tiles_ == 0 ? 0 : record.tile - last_tile_ - 1);
  const bool dense = record.codec == Codec::dense_ulp;  // its k may be above 15
  out.put<std::uint8_t>(
      static_cast<std::uint8_t>(static_cast<unsigned>(record.codec) | (dense ? 0U : record.rice_k) << 4));
  out.put_varint(record.changed);
  out.put_varint(payload_size);
  if (traits(record.codec).record_sums >= 1) out.put_varint(record.quotient_sum);
  if (traits(record.codec).record_sums >= 2) out.put_varint(record.gamma_bits);
  if (dense) out.put<std::uint8_t>(record.rice_k);
  out.put<std::uint64_t>(record.digest_after);
  last_tile_ = record.tile;
  ++tiles_;
  changed_ += record.changed;
}

Frame FrameBuilder::finish() {
  Frame frame;
  if (tiles_ != 0) {
    FrameHeader header;
    header.first_tile = first_tile_;
    header.tiles = tiles_;
    header.table_bytes = static_cast<std::uint32_t>(table_.size());
    header.changed = changed_;
    header.body_bytes = table_.size() + payloads_.size();
    frame.bytes.resize(sizeof(header) + header.body_bytes);
    std::byte* const body = frame.bytes.data() + sizeof(header);
    std::memcpy(body, table_.data(), table_.size());
    if (!payloads_.empty()) std::memcpy(body + table_.size(), payloads_.data(), payloads_.size());
    header.body_hash = xxh3_64({body, static_cast<std::size_t>(header.body_bytes)});
    header.header_hash = hash_header(header);
    store(frame.bytes.data(), header);
    frame.first_tile = first_tile_;
    frame.last_tile = last_tile_;
    frame.tiles = tiles_;
    frame.changed = static_cast<std::uint32_t>(changed_);
    frame.marks = marks_;
  }
  table_.clear();
  payloads_.clear();
  marks_.clear();
  payload_end_ = 0;
  tiles_ = 0;
  changed_ = 0;
  return frame;
}

std::size_t tile_bytes(const Layout& layout, std::span<const std::uint64_t> tiles) noexcept {
  std::size_t bytes = 0;
  for (const std::uint64_t tile : tiles) bytes += tile_shape(layout, tile).raw_bytes();
  return bytes;
}

namespace {

TileRecord raw_record(const TileShape& shape, std::uint64_t tile, std::uint64_t digest) {
  TileRecord record;
  record.tile = tile;
  record.codec = Codec::raw;
  record.changed = shape.elements();
  record.digest_after = digest;
  return record;
}

}  // namespace

Frame raw_frame(const Layout& layout, ByteSpan half, std::span<const std::uint64_t> tiles,
                std::span<const std::uint64_t> digests) {
  FrameBuilder builder;
  std::vector<std::byte>& payloads = builder.payloads();
  for (const std::uint64_t tile : tiles) {
    const TileShape shape = tile_shape(layout, tile);
    const std::size_t begin = payloads.size();
    payloads.resize(begin + shape.raw_bytes());
    copy_tile(layout, half, tile, payloads.data() + begin);
    builder.add(raw_record(shape, tile, digests[tile]));
  }
  return builder.finish();
}

Frame packed_frame_of_copy(const Layout& layout, ByteSpan copy, std::span<const std::uint64_t> tiles,
                           std::span<const std::uint64_t> digests) {
  FrameBuilder builder;
  std::vector<std::byte>& payloads = builder.payloads();
  for (const std::uint64_t tile : tiles) {
    const TileShape shape = tile_shape(layout, tile);
    const ByteSpan raw = copy.first(shape.raw_bytes());
    copy = copy.subspan(raw.size());
    TileRecord record = raw_record(shape, tile, digests[tile]);
    if (!encode_planes(shape, raw, record, payloads)) payloads.insert(payloads.end(), raw.begin(), raw.end());
    builder.add(record);
  }
  return builder.finish();
}

Frame packed_frame(const Layout& layout, ByteSpan half, std::span<const std::uint64_t> tiles,
                   std::span<const std::uint64_t> digests) {
  std::vector<std::byte> copy(tile_bytes(layout, tiles));
  std::byte* out = copy.data();
  for (const std::uint64_t tile : tiles) out = copy_tile(layout, half, tile, out);
  return packed_frame_of_copy(layout, copy, tiles, digests);
}

}  // namespace deltasync::delta
