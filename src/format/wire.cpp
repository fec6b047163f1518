// Encoding and decoding of the wire messages. Each encode() and decode() lists the fields in the order of
// docs/wire_protocol.md; a decoder names the field that is wrong.
#include "format/wire.hpp"

#include <algorithm>

#include "base/hash.hpp"

namespace deltasync::wire {
namespace {

/// A ByteReader that remembers which field broke the rules, so that the error names it.
class Decoder {
 public:
  Decoder(ByteSpan payload, const char* message) : in_(payload), message_(message) {}

  ByteReader& in() { return in_; }
  template <std::integral T>
  T get() {
    return in_.get<T>();
  }
  template <std::integral T>
  T get_at_most(T max, const char* field) {
    const T value = in_.get<T>();
    return value <= max ? value : reject(field, std::to_string(value));
  }
  std::uint8_t flag(const char* field) { return get_at_most<std::uint8_t>(1, field); }
  std::uint64_t varint() { return in_.get_varint(); }
  template <class E>
  E enumerator(E first, E last, const char* field) {
    const auto value = in_.get<std::uint8_t>();
    if (value < static_cast<std::uint8_t>(first) || value > static_cast<std::uint8_t>(last)) {
      reject(field, std::to_string(value));
      return first;
    }
    return static_cast<E>(value);
  }
  template <std::size_t N>
  std::array<std::uint8_t, N> array() {
    std::array<std::uint8_t, N> out{};
    const ByteSpan from = in_.take(N);
    if (from.size() == N) std::memcpy(out.data(), from.data(), N);
    return out;
  }
  Digest128 digest() { return {array<16>()}; }
  VersionId version_id() {
    VersionId id;
    id.epoch = get<std::uint64_t>();
    id.number = get<std::uint64_t>();
    return id;
  }
  std::string string(std::size_t bytes_max, const char* field) {
    const auto n = in_.get<std::uint32_t>();
    if (n > bytes_max) reject(field, std::to_string(n) + " bytes");
    const ByteSpan s = in_.take(n);
    return {reinterpret_cast<const char*>(s.data()), s.size()};
  }
  /// u64 length, then the bytes. The length is checked against what is there before anything is allocated.
  std::vector<std::byte> blob() {
    const ByteSpan s = in_.take(in_.get<std::uint64_t>());
    return {s.begin(), s.end()};
  }
  Version version() {
    Version v;
    v.id = version_id();
    v.label = string(kLabelBytesMax, "label");
    return v;
  }

  /// Returns 0 for the convenience of callers.
  std::uint8_t reject(const char* field, const std::string& value) {
    if (problem_.empty() && !in_.failed()) problem_ = std::string(field) + " is " + value;
    in_.fail();
    return 0;
  }
  Status finish() const {
    if (!problem_.empty()) return Error(Errc::corrupt, std::string(message_) + ": " + problem_);
    return in_.finish(message_);
  }
  template <class T>
  Result<T> finish(T value) const {
    DS_TRY(finish());
    return value;
  }

 private:
  ByteReader in_;
  const char* message_;
  std::string problem_;
};

void put_digest(ByteWriter& out, const Digest128& digest) {
  out.append(bytes_of(digest.bytes));
}

void put_version_id(ByteWriter& out, const VersionId& id) {
  out.put(id.epoch);
  out.put(id.number);
}

void put_version(ByteWriter& out, const Version& version) {
  put_version_id(out, version.id);
  out.put_string(version.label);
}

void put_blob(ByteWriter& out, ByteSpan bytes) {
  out.put<std::uint64_t>(bytes.size());
  out.append(bytes);
}

/// At most `bytes_max` bytes, not cut inside a UTF-8 sequence.
std::string_view cut(std::string_view text, std::size_t bytes_max) {
  if (text.size() <= bytes_max) return text;
  std::size_t n = bytes_max;
  while (n > 0 && (static_cast<unsigned char>(text[n]) & 0xC0) == 0x80) --n;
  return text.substr(0, n);
}

template <class E>
std::uint8_t code_of(E value) {
  return static_cast<std::uint8_t>(value);
}

void put_layout_message(ByteWriter& out, const LayoutMessage& m) {
  out.put(m.layout_raw_bytes);
  out.put(m.sidecar_raw_bytes);
  put_blob(out, m.layout_zstd);
  put_blob(out, m.sidecar_zstd);
}

LayoutMessage get_layout_message(Decoder& in) {
  LayoutMessage m;
  m.layout_raw_bytes = in.get_at_most(kLayoutRawBytesMax, "layout_raw_bytes");
  m.sidecar_raw_bytes = in.get_at_most(kLayoutRawBytesMax, "sidecar_raw_bytes");
  m.layout_zstd = in.blob();
  m.sidecar_zstd = in.blob();
  return m;
}

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

// ---- headers -------------------------------------------------------------------------------------------------

std::uint64_t payload_bytes_max(std::uint16_t type) noexcept {
  switch (static_cast<Type>(type)) {
    case Type::hello:
    case Type::auth:
    case Type::welcome:
    case Type::error:
    case Type::end:
    case Type::get_layout:
    case Type::plan:
    case Type::plan_reply:
    case Type::get_digests:
    case Type::get_extent:
    case Type::release:
    case Type::watch:
    case Type::version_ready:
    case Type::trainer_welcome:
    case Type::trainer_plan_ok:
    case Type::trainer_notify:
    case Type::trainer_wait:
    case Type::trainer_ready: return kControlBytesMax;
    case Type::layout:
    case Type::trainer_hello: return kLayoutBytesMax;
    case Type::digests: return kDigestsBytesMax;
    case Type::extent: return kExtentBytesMax;
    case Type::frame: return kFrameBytesMax;
    case Type::get_frames:
    case Type::get_raw_tiles:
    case Type::trainer_plan: return kRangesBytesMax;
  }
  return 0;
}

Header make_header(Type type, std::uint64_t request, ByteSpan payload, std::uint64_t extent_bytes) {
  Header header;
  header.type = static_cast<std::uint16_t>(type);
  header.request = request;
  if (type == Type::extent) {
    header.payload_bytes = extent_bytes;
  } else {
    header.payload_bytes = payload.size();
    header.payload_hash = xxh3_64(payload);
  }
  header.header_hash = xxh3_64(bytes_of(header).first(offsetof(Header, header_hash)));
  return header;
}

Status check_header(const Header& header) {
  if (header.magic != kMagic) return Error(Errc::protocol, "message header: not the magic of this protocol");
  if (header.header_hash != xxh3_64(bytes_of(header).first(offsetof(Header, header_hash)))) {
    return Error(Errc::corrupt, "message header: its hash differs");
  }
  if (header.flags != 0 || header.reserved != 0) {
    return Error(Errc::protocol, "message header: reserved fields are not zero");
  }
  const std::uint64_t bytes_max = payload_bytes_max(header.type);
  const std::string name = "message of type " + std::to_string(header.type);
  if (bytes_max == 0) return Error(Errc::protocol, name + ": unknown type");
  if (header.payload_bytes > bytes_max) {
    return Error(Errc::protocol, name + ": claims " + std::to_string(header.payload_bytes) + " bytes, the limit is " +
                                     std::to_string(bytes_max));
  }
  if (header.type == static_cast<std::uint16_t>(Type::extent) && header.payload_hash != 0) {
    return Error(Errc::protocol, name + ": an extent has no payload hash");
  }
  return {};
}

// ---- handshake -----------------------------------------------------------------------------------------------

Status check_protocol(ByteSpan payload, const char* sender) {
  ByteReader in(payload);
  const auto protocol = in.get<std::uint16_t>();
  if (in.failed()) return Error(Errc::corrupt, std::string(sender) + " sent no protocol number");
  if (protocol == kProtocolVersion) return {};
  return Error(Errc::unsupported, std::string(sender) + " speaks protocol " + std::to_string(protocol) +
                                      ", this side " + std::to_string(kProtocolVersion));
}

std::vector<std::byte> Hello::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(protocol);
  out.put(auth_required);
  out.put(instance);
  out.append(bytes_of(nonce));
  return bytes;
}
Result<Hello> Hello::decode(ByteSpan payload) {
  Decoder in(payload, "hello");
  Hello m;
  m.protocol = in.get<std::uint16_t>();
  m.auth_required = in.flag("auth_required");
  m.instance = in.get<std::uint64_t>();
  m.nonce = in.array<32>();
  return in.finish(m);
}

std::vector<std::byte> Auth::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(protocol);
  out.put(code_of(role));
  out.append(bytes_of(nonce));
  out.append(bytes_of(proof));
  out.put_string(cut(name, kPeerNameBytesMax));
  return bytes;
}
Result<Auth> Auth::decode(ByteSpan payload) {
  Decoder in(payload, "auth");
  Auth m;
  m.protocol = in.get<std::uint16_t>();
  m.role = in.enumerator(Role::control, Role::watch, "role");
  m.nonce = in.array<32>();
  m.proof = in.array<32>();
  m.name = in.string(kPeerNameBytesMax, "name");
  return in.finish(std::move(m));
}

std::vector<std::byte> Welcome::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.append(bytes_of(proof));
  out.put(has_layout);
  put_digest(out, layout);
  return bytes;
}
Result<Welcome> Welcome::decode(ByteSpan payload) {
  Decoder in(payload, "welcome");
  Welcome m;
  m.proof = in.array<32>();
  m.has_layout = in.flag("has_layout");
  m.layout = in.digest();
  return in.finish(std::move(m));
}

std::vector<std::byte> ErrorMessage::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(code_of(code));
  out.put_string(cut(message, kErrorMessageBytesMax));
  return bytes;
}
Result<ErrorMessage> ErrorMessage::decode(ByteSpan payload) {
  Decoder in(payload, "error");
  ErrorMessage m;
  m.code = in.enumerator(Errc::invalid_argument, Errc::internal, "code");
  m.message = in.string(kErrorMessageBytesMax, "message");
  return in.finish(std::move(m));
}

Result<Empty> Empty::decode(ByteSpan payload) {
  if (!payload.empty()) {
    return Error(Errc::corrupt, std::to_string(payload.size()) + " bytes in a message that has none");
  }
  return Empty{};
}

// ---- layout and plan -----------------------------------------------------------------------------------------

std::vector<std::byte> LayoutMessage::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  put_layout_message(out, *this);
  return bytes;
}
Result<LayoutMessage> LayoutMessage::decode(ByteSpan payload) {
  Decoder in(payload, "layout");
  LayoutMessage m = get_layout_message(in);
  return in.finish(std::move(m));
}

std::vector<std::byte> Plan::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  put_digest(out, layout);
  put_version_id(out, base);
  put_digest(out, base_root);
  out.put(code_of(want));
  out.put(number);
  out.put_string(label);
  out.put(wait_ms);
  out.put(partial);
  out.put(full_only);
  return bytes;
}
Result<Plan> Plan::decode(ByteSpan payload) {
  Decoder in(payload, "plan");
  Plan m;
  m.layout = in.digest();
  m.base = in.version_id();
  m.base_root = in.digest();
  m.want = in.enumerator(WantKind::newest, WantKind::label, "want");
  m.number = in.get<std::uint64_t>();
  m.label = in.string(kLabelBytesMax, "label");
  m.wait_ms = in.get<std::uint64_t>();
  m.partial = in.flag("partial");
  m.full_only = in.flag("full_only");
  return in.finish(std::move(m));
}

std::vector<std::byte> PlanReply::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(code_of(mode));
  out.put(plan);
  put_version(out, target);
  put_digest(out, target_root);
  out.put(full_bytes);
  out.put<std::uint64_t>(steps.size());
  for (const DeltaStep& step : steps) {
    put_version_id(out, step.from);
    put_version_id(out, step.to);
    put_digest(out, step.to_root);
    out.put(step.frames);
    out.put(step.frame_bytes);
    out.put(step.changed);
  }
  return bytes;
}
Result<PlanReply> PlanReply::decode(ByteSpan payload) {
  Decoder in(payload, "plan_reply");
  PlanReply m;
  m.mode = in.enumerator(PlanMode::up_to_date, PlanMode::full, "mode");
  m.plan = in.get<std::uint64_t>();
  m.target = in.version();
  m.target_root = in.digest();
  m.full_bytes = in.get_at_most(kModelBytesMax, "full_bytes");
  const auto steps = in.get_at_most(kDeltaStepsMax, "step count");
  for (std::uint64_t i = 0; i < steps && !in.in().failed(); ++i) {
    DeltaStep step;
    step.from = in.version_id();
    step.to = in.version_id();
    step.to_root = in.digest();
    step.frames = in.get<std::uint64_t>();
    step.frame_bytes = in.get<std::uint64_t>();
    step.changed = in.get<std::uint64_t>();
    m.steps.push_back(step);
  }
  return in.finish(std::move(m));
}

// ---- data requests -------------------------------------------------------------------------------------------

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

std::vector<std::byte> GetDigests::encode() const {
  return encode_plan_only(plan);
}
Result<GetDigests> GetDigests::decode(ByteSpan payload) {
  Decoder in(payload, "get_digests");
  GetDigests m;
  m.plan = in.get<std::uint64_t>();
  return in.finish(std::move(m));
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
  return in.finish(std::move(m));
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
  put_ranges(out, ranges);
  return bytes;
}
Result<RangesHead> GetRawTiles::decode_head(ByteSpan payload) {
  Decoder in(payload, "get_raw_tiles");
  RangesHead head;
  head.plan = in.get<std::uint64_t>();
  return get_ranges_head(in, head);
}
Result<GetRawTiles> GetRawTiles::decode(ByteSpan payload) {
  Decoder in(payload, "get_raw_tiles");
  GetRawTiles m;
  m.plan = in.get<std::uint64_t>();
  m.ranges = get_message_ranges(in);
  return in.finish(std::move(m));
}

std::vector<std::byte> Release::encode() const {
  return encode_plan_only(plan);
}
Result<Release> Release::decode(ByteSpan payload) {
  Decoder in(payload, "release");
  Release m;
  m.plan = in.get<std::uint64_t>();
  return in.finish(std::move(m));
}

std::vector<std::byte> VersionReady::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  put_version(out, version);
  put_digest(out, layout);
  return bytes;
}
Result<VersionReady> VersionReady::decode(ByteSpan payload) {
  Decoder in(payload, "version_ready");
  VersionReady m;
  m.version = in.version();
  m.layout = in.digest();
  return in.finish(std::move(m));
}

// ---- trainer ↔ agent -----------------------------------------------------------------------------------------

std::vector<std::byte> TrainerHello::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(protocol);
  out.put(writer_index);
  out.put(writers);
  out.put(pid);
  out.put_string(cut(name, kPeerNameBytesMax));
  put_layout_message(out, layout);
  return bytes;
}
Result<TrainerHello> TrainerHello::decode(ByteSpan payload) {
  Decoder in(payload, "trainer_hello");
  TrainerHello m;
  m.protocol = in.get<std::uint16_t>();
  m.writer_index = in.get<std::uint32_t>();
  m.writers = in.get<std::uint32_t>();
  m.pid = in.get<std::int32_t>();
  m.name = in.string(kPeerNameBytesMax, "name");
  m.layout = get_layout_message(in);
  return in.finish(std::move(m));
}

std::vector<std::byte> TrainerWelcome::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put_string(segment_name);
  out.put_string(shm_dir);
  out.put(generation);
  put_version_id(out, newest);
  return bytes;
}
Result<TrainerWelcome> TrainerWelcome::decode(ByteSpan payload) {
  Decoder in(payload, "trainer_welcome");
  TrainerWelcome m;
  m.segment_name = in.string(kPathBytesMax, "segment_name");
  m.shm_dir = in.string(kPathBytesMax, "shm_dir");
  m.generation = in.get<std::uint64_t>();
  m.newest = in.version_id();
  return in.finish(std::move(m));
}

std::vector<std::byte> TrainerPlan::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(deadline_ms);
  out.put_varint(rects.size());
  for (const PlanRect& rect : rects) {
    out.put_varint(rect.tensor);
    out.put_varint(rect.row);
    out.put_varint(rect.col);
    out.put_varint(rect.rows);
    out.put_varint(rect.cols);
  }
  return bytes;
}
Result<TrainerPlan> TrainerPlan::decode(ByteSpan payload) {
  Decoder in(payload, "trainer_plan");
  TrainerPlan m;
  m.deadline_ms = in.get<std::uint64_t>();
  const std::uint64_t count = in.varint();
  if (count > in.in().remaining() / 5) in.reject("rectangle count", std::to_string(count) + ", more than there are");
  if (!in.in().failed()) m.rects.reserve(static_cast<std::size_t>(count));
  for (std::uint64_t i = 0; i < count && !in.in().failed(); ++i) {
    PlanRect rect;
    const std::uint64_t tensor = in.varint();
    if (tensor >= kTensorsMax) in.reject("tensor", std::to_string(tensor));
    rect.tensor = static_cast<std::uint32_t>(tensor);
    rect.row = in.varint();
    rect.col = in.varint();
    rect.rows = in.varint();
    rect.cols = in.varint();
    m.rects.push_back(rect);
  }
  return in.finish(std::move(m));
}

std::vector<std::byte> TrainerWait::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  put_version_id(out, version);
  out.put(deadline_ms);
  return bytes;
}
Result<TrainerWait> TrainerWait::decode(ByteSpan payload) {
  Decoder in(payload, "trainer_wait");
  TrainerWait m;
  m.version = in.version_id();
  m.deadline_ms = in.get<std::uint64_t>();
  return in.finish(std::move(m));
}

std::vector<std::byte> TrainerReady::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  put_version_id(out, version);
  out.put(delta_bytes);
  out.put(changed);
  out.put(encode_us);
  return bytes;
}
Result<TrainerReady> TrainerReady::decode(ByteSpan payload) {
  Decoder in(payload, "trainer_ready");
  TrainerReady m;
  m.version = in.version_id();
  m.delta_bytes = in.get<std::uint64_t>();
  m.changed = in.get<std::uint64_t>();
  m.encode_us = in.get<std::uint64_t>();
  return in.finish(std::move(m));
}

}  // namespace deltasync::wire
