#include "delta/frame.hpp"

#include <cassert>
#include <cstring>
#include <utility>

#include "base/hash.hpp"
#include "delta/dense_codec.hpp"
#include "delta/raw_planes.hpp"
#include "delta/rice.hpp"

namespace deltasync::delta {

namespace {

constexpr std::size_t kHashedHeaderBytes = offsetof(FrameHeader, header_hash);
/// Tile gap, codec, changed, payload bytes, digest: no record is shorter. Bounds what a header makes a reader allocate.
constexpr std::size_t kRecordBytesMin = 12;

Error bad_frame(const std::string& what) {
  return {Errc::corrupt, "frame: " + what};
}

std::size_t varint_bytes(std::uint64_t value) noexcept {
  std::size_t bytes = 1;
  while (value >>= 7) ++bytes;
  return bytes;
}

/// What a record has between its payload's size and its digest.
bool has_quotient_sum(Codec codec) noexcept {
  return codec == Codec::rice_absolute || codec == Codec::rice_ulp || codec == Codec::dense_ulp;
}
bool has_second_sum(Codec codec) noexcept {
  return codec == Codec::rice_ulp || codec == Codec::dense_ulp;
}

std::uint64_t hash_header(const FrameHeader& header) {
  return xxh3_64(bytes_of(header).first(kHashedHeaderBytes));
}

}  // namespace

const char* to_string(Codec codec) noexcept {
  switch (codec) {
    case Codec::raw: return "raw";
    case Codec::rice_absolute: return "rice_absolute";
    case Codec::rice_ulp: return "rice_ulp";
    case Codec::rice_class: return "rice_class";
    case Codec::dense_ulp: return "dense_ulp";
    case Codec::raw_planes: return "raw_planes";
  }
  return "unknown";
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
  if (has_quotient_sum(record.codec)) bytes += varint_bytes(record.quotient_sum);
  if (has_second_sum(record.codec)) bytes += varint_bytes(record.gamma_bits);
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
  const Tile tile = layout.tile(index);
  const Tensor& tensor = layout.tensors()[tile.tensor];
  const std::size_t row_bytes = tile.rect.cols * tensor.element_bytes;
  const std::byte* row =
      half.data() + tensor.offset + tile.rect.row * tensor.row_bytes() + tile.rect.col * tensor.element_bytes;
  for (std::uint64_t r = 0; r < tile.rect.rows; ++r, row += tensor.row_bytes(), out += row_bytes) {
    std::memcpy(out, row, row_bytes);
  }
  return out;
}

// ---- writing ---------------------------------------------------------------------------------------------------

void FrameBuilder::add(const TileRecord& record) {
  if (tiles_ == 0) first_tile_ = last_tile_ = record.tile;
  assert(tiles_ == 0 || record.tile > last_tile_);
  const std::size_t payload_size = payloads_.size() - payload_end_;
  payload_end_ = payloads_.size();
  ByteWriter out(table_);
  out.put_varint(tiles_ == 0 ? 0 : record.tile - last_tile_ - 1);
  const bool dense = record.codec == Codec::dense_ulp;  // its k may be above 15
  out.put<std::uint8_t>(
      static_cast<std::uint8_t>(static_cast<unsigned>(record.codec) | (dense ? 0U : record.rice_k) << 4));
  out.put_varint(record.changed);
  out.put_varint(payload_size);
  if (has_quotient_sum(record.codec)) out.put_varint(record.quotient_sum);
  if (has_second_sum(record.codec)) out.put_varint(record.gamma_bits);
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
  }
  table_.clear();
  payloads_.clear();
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

// ---- reading ---------------------------------------------------------------------------------------------------

Result<FrameHeader> read_frame_header(ByteSpan bytes) {
  if (bytes.size() < sizeof(FrameHeader)) return bad_frame("truncated header");
  const auto header = load<FrameHeader>(bytes.data());
  if (header.magic != kFrameMagic) return bad_frame("wrong magic");
  if (header.header_hash != hash_header(header)) return bad_frame("header hash differs");
  if (header.version != kFrameVersion) {
    return Error(Errc::unsupported, "frame: format version " + std::to_string(header.version));
  }
  if (header.flags != 0 || header.reserved != 0) return bad_frame("reserved fields are not zero");
  if (header.tiles == 0) return bad_frame("no tiles");
  if (header.table_bytes > header.body_bytes) return bad_frame("the table is longer than the body");
  if (header.tiles > header.table_bytes / kRecordBytesMin) return bad_frame("the table is too short for its tiles");
  return header;
}

namespace {

/// A record as it stands in the table, behind its tile gap: nothing of it is believed yet.
struct RecordFields {
  Codec codec = Codec::raw;
  std::uint8_t rice_k = 0;
  std::uint64_t changed = 0;
  std::uint64_t payload_bytes = 0;
  std::uint64_t quotient_sum = 0;
  std::uint64_t gamma_bits = 0;
  std::uint64_t digest_after = 0;
};

Result<RecordFields> read_record_fields(ByteReader& table) {
  RecordFields fields;
  const auto codec = table.get<std::uint8_t>();
  fields.codec = static_cast<Codec>(codec & 15);
  fields.rice_k = static_cast<std::uint8_t>(codec >> 4);
  fields.changed = table.get_varint();
  fields.payload_bytes = table.get_varint();
  if (!table.failed()) {
    switch (fields.codec) {
      case Codec::raw:
      case Codec::raw_planes:
        if (fields.rice_k != 0) return bad_frame("a raw tile has a Rice parameter");
        break;
      case Codec::rice_absolute: fields.quotient_sum = table.get_varint(); break;
      case Codec::rice_ulp:
        fields.quotient_sum = table.get_varint();
        fields.gamma_bits = table.get_varint();
        break;
      case Codec::rice_class: break;
      case Codec::dense_ulp:
        if (fields.rice_k != 0) return bad_frame("a dense tile has its Rice parameter in the wrong place");
        fields.quotient_sum = table.get_varint();
        fields.gamma_bits = table.get_varint();
        fields.rice_k = table.get<std::uint8_t>();
        break;
      default: return Error(Errc::unsupported, "frame: codec " + std::to_string(codec & 15));
    }
  }
  fields.digest_after = table.get<std::uint64_t>();
  if (table.failed()) return bad_frame("truncated record");
  return fields;
}

/// Reads the records of a table one after the other, checking each against the layout.
class TableReader {
 public:
  TableReader(const Layout& layout, const FrameHeader& header, ByteSpan body)
      : layout_(layout),
        header_(header),
        table_(body.first(header.table_bytes)),
        payloads_(body.subspan(header.table_bytes)) {}

  Result<TileRecord> next() {
    TileRecord record;
    const std::uint64_t gap = table_.get_varint();
    const std::uint64_t base = read_ == 0 ? header_.first_tile : last_tile_ + 1;
    if (table_.failed()) return bad_frame("record " + std::to_string(read_) + ": truncated");
    if (read_ == 0 && gap != 0) return bad_frame("its first record is not its first tile");
    if (base >= layout_.tile_count() || gap >= layout_.tile_count() - base) {
      return bad_frame("record " + std::to_string(read_) + " names a tile outside of the layout");
    }
    record.tile = last_tile_ = base + gap;
    ++read_;
    DS_TRY(read_fields(record).with_context(tile_name(layout_, record.tile)));
    return record;
  }
  /// All read, nothing left over.
  Status finish() {
    DS_TRY(table_.finish("frame: table"));
    if (!payloads_.empty()) return bad_frame(std::to_string(payloads_.size()) + " bytes behind the last payload");
    if (changed_ != header_.changed) return bad_frame("its records do not add up to its number of changed elements");
    return {};
  }

 private:
  Status read_fields(TileRecord& record) {
    const TileShape shape = tile_shape(layout_, record.tile);
    DS_ASSIGN(const RecordFields fields, read_record_fields(table_));
    if (fields.changed == 0) return bad_frame("a record without changed elements");
    if (fields.changed > shape.elements()) return bad_frame("more changed elements than elements");
    if (gives_whole_tile(fields.codec) && fields.changed != shape.elements()) {
      return bad_frame("a raw tile that does not count all of its elements");
    }
    if (fields.codec == Codec::rice_class && !shape.is_float) {
      return bad_frame("exponent classes in a tensor without exponents");
    }
    if (fields.codec == Codec::dense_ulp) {
      DS_TRY(check_dense(shape, fields));
    } else if (fields.quotient_sum > (shape.elements() - fields.changed) >> fields.rice_k) {
      return bad_frame("the gap quotients lead outside of the tile");
    } else if (fields.gamma_bits > fields.changed * (shape.element_bytes * 8 - 1)) {
      return bad_frame("more magnitude bits than the elements have");
    }
    record.codec = fields.codec;
    record.rice_k = fields.rice_k;
    record.changed = static_cast<std::uint32_t>(fields.changed);
    record.quotient_sum = static_cast<std::uint32_t>(fields.quotient_sum);
    record.gamma_bits = static_cast<std::uint32_t>(fields.gamma_bits);
    record.digest_after = fields.digest_after;
    return take_payload(shape, fields.payload_bytes, record);
  }

  static Status check_dense(const TileShape& shape, const RecordFields& fields) {
    if (fields.rice_k >= shape.element_bytes * 8) return bad_frame("a Rice parameter as long as the element");
    if (fields.quotient_sum > std::uint64_t{kDenseEscape} * shape.elements()) {
      return bad_frame("more quotients than the elements have");
    }
    if (fields.gamma_bits > fields.quotient_sum / kDenseEscape)
      return bad_frame("more escapes than its quotients have");
    return {};
  }

  Status take_payload(const TileShape& shape, std::uint64_t size, TileRecord& record) {
    if (size > shape.raw_bytes()) return bad_frame("a payload is longer than the raw tile");
    if (record.codec == Codec::raw_planes && size == shape.raw_bytes()) {
      return bad_frame("a packed tile is as long as the raw one");
    }
    // What such payloads have to be long follows from their own headers, which their decoders read.
    const bool own_header = record.codec == Codec::rice_class || record.codec == Codec::raw_planes;
    if (!own_header && size != payload_bytes(shape, record))
      return bad_frame("a payload size that does not follow from its record");
    if (size > payloads_.size()) return bad_frame("truncated payload");
    record.payload = payloads_.first(static_cast<std::size_t>(size));
    payloads_ = payloads_.subspan(static_cast<std::size_t>(size));
    changed_ += record.changed;
    return {};
  }

  const Layout& layout_;
  const FrameHeader& header_;
  ByteReader table_;
  ByteSpan payloads_;
  std::uint64_t last_tile_ = 0;
  std::uint64_t changed_ = 0;
  std::uint32_t read_ = 0;
};

}  // namespace

namespace {

/// Calls fn(record) for the records of one of our own frames whose tiles are wanted.
template <class Fn>
void for_each_wanted(const Frame& frame, std::span<const Batch> wanted, Fn&& fn) {
  if (frame.bytes.empty()) return;
  const auto header = load<FrameHeader>(frame.bytes.data());
  const ByteSpan body = ByteSpan(frame.bytes).subspan(sizeof(header));
  ByteReader table(body.first(header.table_bytes));
  ByteSpan payloads = body.subspan(header.table_bytes);
  std::uint64_t next = header.first_tile;
  for (std::uint32_t i = 0; i < header.tiles; ++i) {
    TileRecord record;
    record.tile = next + table.get_varint();
    next = record.tile + 1;
    const RecordFields fields = read_record_fields(table).value();
    record.payload = payloads.first(static_cast<std::size_t>(fields.payload_bytes));
    payloads = payloads.subspan(record.payload.size());
    while (!wanted.empty() && wanted.front().end <= record.tile) wanted = wanted.subspan(1);
    if (wanted.empty()) return;
    if (record.tile < wanted.front().first) continue;
    record.codec = fields.codec;
    record.rice_k = fields.rice_k;
    record.changed = static_cast<std::uint32_t>(fields.changed);
    record.quotient_sum = static_cast<std::uint32_t>(fields.quotient_sum);
    record.gamma_bits = static_cast<std::uint32_t>(fields.gamma_bits);
    record.digest_after = fields.digest_after;
    fn(static_cast<const TileRecord&>(record));
  }
}

}  // namespace

Frame cut_frame(const Frame& frame, std::span<const Batch> wanted) {
  FrameBuilder builder;
  for_each_wanted(frame, wanted, [&](const TileRecord& record) {
    builder.payloads().insert(builder.payloads().end(), record.payload.begin(), record.payload.end());
    builder.add(record);
  });
  return builder.finish();
}

CutSize cut_size(const Frame& frame, std::span<const Batch> wanted) {
  CutSize size;
  std::uint64_t next = 0;  // after the last tile
  for_each_wanted(frame, wanted, [&](const TileRecord& record) {
    const std::uint64_t gap = size.tiles == 0 ? 0 : record.tile - next;
    if (size.tiles == 0) size.bytes = sizeof(FrameHeader);
    size.bytes += varint_bytes(gap) + record_bytes(record, record.payload.size()) + record.payload.size();
    size.changed += record.changed;
    ++size.tiles;
    next = record.tile + 1;
  });
  return size;
}

Result<std::vector<TileRecord>> parse_frame(const Layout& layout, ByteSpan frame) {
  DS_ASSIGN(const FrameHeader header, read_frame_header(frame));
  if (header.body_bytes != frame.size() - sizeof(header)) return bad_frame("its size is not what its header says");
  const ByteSpan body = frame.subspan(sizeof(header));
  if (xxh3_64(body) != header.body_hash) return bad_frame("body hash differs");
  std::vector<TileRecord> records;
  records.reserve(header.tiles);
  TableReader table(layout, header, body);
  for (std::uint32_t i = 0; i < header.tiles; ++i) {
    DS_ASSIGN(auto record, table.next());
    records.push_back(record);
  }
  DS_TRY(table.finish());
  return records;
}

}  // namespace deltasync::delta
