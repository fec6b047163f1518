// Requests for the bytes of a plan, and its release.
#include "format/wire_codec.hpp"

namespace deltasync::wire {
namespace {

std::vector<TileRange> get_message_ranges(Decoder& in) {
  auto ranges = get_ranges(in.in());
  if (!ranges.ok()) {
    in.reject("ranges", "not a sorted list of disjoint tile ranges");
    return {};
  }
  return std::move(ranges).value();
}

Result<RangesHead> get_ranges_head(Decoder& in, RangesHead head) {
  head.ranges = in.in().get_varint();
  if (in.in().failed()) return Error(Errc::corrupt, "tile ranges: truncated");
  return head;
}

std::vector<std::byte> encode_plan_only(std::uint64_t plan) {
  std::vector<std::byte> bytes;
  ByteWriter(bytes).put(plan);
  return bytes;
}

}  // namespace

void put_ranges(ByteWriter& out, const std::vector<TileRange>& ranges) {
  out.put_varint(ranges.size());
  std::uint64_t end = 0;
  for (const TileRange& range : ranges) {
    if (range.first < end || range.end <= range.first) {
      detail::die_on_wrong_result("put_ranges", "ranges are not sorted, disjoint and non-empty");
    }
    out.put_varint(range.first - end);
    out.put_varint(range.end - range.first);
    end = range.end;
  }
}

Result<std::vector<TileRange>> get_ranges(ByteReader& in) {
  const Error wrong(Errc::corrupt, "tile ranges: truncated, empty or overflowing");
  const std::uint64_t count = in.get_varint();
  // Two bytes a range at least: a count that lies allocates nothing.
  if (in.failed() || count > in.remaining() / 2) return in.fail(), Error(wrong);
  std::vector<TileRange> ranges;
  ranges.reserve(static_cast<std::size_t>(count));
  std::uint64_t end = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t gap = in.get_varint();
    const std::uint64_t length = in.get_varint();
    TileRange range;
    if (in.failed() || length == 0 || __builtin_add_overflow(end, gap, &range.first) ||
        __builtin_add_overflow(range.first, length, &range.end)) {
      return in.fail(), Error(wrong);
    }
    end = range.end;
    ranges.push_back(range);
  }
  return ranges;
}

std::vector<std::byte> Subscribe::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  put_digest(out, layout);
  put_ranges(out, ranges);
  return bytes;
}
Result<RangesHead> Subscribe::decode_head(ByteSpan payload) {
  Decoder in(payload, "subscribe");
  in.digest();
  return get_ranges_head(in, {});
}
Result<Subscribe> Subscribe::decode(ByteSpan payload) {
  Decoder in(payload, "subscribe");
  Subscribe m;
  m.layout = in.digest();
  m.ranges = get_message_ranges(in);
  return in.finish(std::move(m));
}

std::vector<std::byte> GetDigests::encode() const {
  return encode_plan_only(plan);
}
Result<GetDigests> GetDigests::decode(ByteSpan payload) {
  Decoder in(payload, "get_digests");
  GetDigests m;
  m.plan = in.get<std::uint64_t>();
  return in.finish(m);
}

std::vector<std::byte> GetExtent::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(plan);
  out.put(tiles.first);
  out.put(tiles.end);
  return bytes;
}
Result<GetExtent> GetExtent::decode(ByteSpan payload) {
  Decoder in(payload, "get_extent");
  GetExtent m;
  m.plan = in.get<std::uint64_t>();
  m.tiles.first = in.get<std::uint64_t>();
  m.tiles.end = in.get<std::uint64_t>();
  if (m.tiles.end <= m.tiles.first) in.reject("tiles", "an empty range");
  return in.finish(m);
}

std::vector<std::byte> GetFrames::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(plan);
  out.put(step);
  put_ranges(out, ranges);
  return bytes;
}
Result<RangesHead> GetFrames::decode_head(ByteSpan payload) {
  Decoder in(payload, "get_frames");
  RangesHead head;
  head.plan = in.get<std::uint64_t>();
  in.get<std::uint32_t>();  // step
  return get_ranges_head(in, head);
}
Result<GetFrames> GetFrames::decode(ByteSpan payload) {
  Decoder in(payload, "get_frames");
  GetFrames m;
  m.plan = in.get<std::uint64_t>();
  m.step = in.get<std::uint32_t>();
  m.ranges = get_message_ranges(in);
  return in.finish(std::move(m));
}

std::vector<std::byte> GetRawTiles::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(plan);
  out.put(code_of(form));
  put_ranges(out, ranges);
  return bytes;
}
Result<RangesHead> GetRawTiles::decode_head(ByteSpan payload) {
  Decoder in(payload, "get_raw_tiles");
  RangesHead head;
  head.plan = in.get<std::uint64_t>();
  in.get<std::uint8_t>();  // form
  return get_ranges_head(in, head);
}
Result<GetRawTiles> GetRawTiles::decode(ByteSpan payload) {
  Decoder in(payload, "get_raw_tiles");
  GetRawTiles m;
  m.plan = in.get<std::uint64_t>();
  m.form = in.enumerator(RawForm::plain, RawForm::packed, "form");
  m.ranges = get_message_ranges(in);
  return in.finish(std::move(m));
}

std::vector<std::byte> CheckTiles::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(plan);
  put_ranges(out, ranges);
  return bytes;
}
Result<RangesHead> CheckTiles::decode_head(ByteSpan payload) {
  Decoder in(payload, "check_tiles");
  RangesHead head;
  head.plan = in.get<std::uint64_t>();
  return get_ranges_head(in, head);
}
Result<CheckTiles> CheckTiles::decode(ByteSpan payload) {
  Decoder in(payload, "check_tiles");
  CheckTiles m;
  m.plan = in.get<std::uint64_t>();
  m.ranges = get_message_ranges(in);
  return in.finish(std::move(m));
}

std::vector<std::byte> TilesChecked::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter(bytes).put(plan_again);
  return bytes;
}
Result<TilesChecked> TilesChecked::decode(ByteSpan payload) {
  Decoder in(payload, "tiles_checked");
  TilesChecked m;
  m.plan_again = in.flag("plan_again");
  return in.finish(m);
}

std::vector<std::byte> Release::encode() const {
  return encode_plan_only(plan);
}
Result<Release> Release::decode(ByteSpan payload) {
  Decoder in(payload, "release");
  Release m;
  m.plan = in.get<std::uint64_t>();
  return in.finish(m);
}

}  // namespace deltasync::wire
