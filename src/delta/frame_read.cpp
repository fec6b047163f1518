// Frames from outside, of which nothing is believed before it is checked, and parts of our own.
#include <utility>

#include "base/hash.hpp"
#include "delta/codec.hpp"
#include "delta/frame.hpp"
#include "delta/kernels.hpp"

namespace deltasync::delta {

namespace {

/// Tile gap, codec, changed, payload bytes, digest: no record is shorter. Bounds what a header makes a reader allocate.
constexpr std::size_t kRecordBytesMin = 12;

Error bad_frame(const std::string& what) {
  return {Errc::corrupt, "frame: " + what};
}

}  // namespace

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
    if (traits(fields.codec).whole_tile && fields.changed != shape.elements()) {
      return bad_frame("a raw tile that does not count all of its elements");
    }
    if (traits(fields.codec).floats_only && !shape.is_float) {
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
    if (!traits(record.codec).own_header && size != payload_bytes(shape, record))
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

/// Calls fn(record) for the records of one of our own frames whose tiles are wanted.
template <class Fn>
void for_each_wanted(const Frame& frame, std::span<const Batch> wanted, Fn&& fn) {
  if (frame.bytes.empty()) return;
  const auto header = load<FrameHeader>(frame.bytes.data());
  const ByteSpan body = ByteSpan(frame.bytes).subspan(sizeof(header));
  ByteReader table(body.first(header.table_bytes));
  ByteSpan payloads = body.subspan(header.table_bytes);
  std::uint64_t next = header.first_tile;
  std::uint32_t passed = 0;  // marks
  for (std::uint32_t i = 0; i < header.tiles && !wanted.empty(); ++i) {
    const std::uint32_t before = passed;
    while (passed < frame.marks.size() && frame.marks[passed].next <= wanted.front().first) ++passed;
    if (passed != before && passed * kFrameMarkRecords > i) {
      const FrameMark& mark = frame.marks[passed - 1];
      table = ByteReader(body.first(header.table_bytes).subspan(mark.table));
      payloads = body.subspan(header.table_bytes + std::size_t{mark.payloads});
      next = mark.next;
      i = passed * kFrameMarkRecords;
    }
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

void cut_into(FrameBuilder& builder, const Frame& frame, std::span<const Batch> wanted) {
  for_each_wanted(frame, wanted, [&](const TileRecord& record) {
    builder.payloads().insert(builder.payloads().end(), record.payload.begin(), record.payload.end());
    builder.add(record);
  });
}

Frame cut_frame(const Frame& frame, std::span<const Batch> wanted) {
  FrameBuilder builder;
  cut_into(builder, frame, wanted);
  return builder.finish();
}

CutSize cut_size(const Frame& frame, std::span<const Batch> wanted, CutSize before) {
  CutSize size = before;
  for_each_wanted(frame, wanted, [&](const TileRecord& record) {
    const std::uint64_t gap = size.tiles == 0 ? 0 : record.tile - size.next;
    if (size.tiles == 0) size.bytes = sizeof(FrameHeader);
    size.bytes += varint_bytes(gap) + record_bytes(record, record.payload.size()) + record.payload.size();
    size.changed += record.changed;
    ++size.tiles;
    size.next = record.tile + 1;
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
