// Message headers and the handshake. wire_protocol.md lists the fields of each message in the order in which its
// encode() and decode() have them here and in wire_{plan,data,trainer}.cpp; a decoder names the field that is wrong.
#include "format/wire.hpp"

#include <algorithm>

#include "base/hash.hpp"
#include "format/wire_codec.hpp"
#include "format/wire_report.hpp"

namespace deltasync::wire {

// ---- headers -------------------------------------------------------------------------------------------------

std::string_view to_string(Type type) noexcept {
  switch (type) {
    case Type::hello: return "hello";
    case Type::auth: return "auth";
    case Type::welcome: return "welcome";
    case Type::error: return "error";
    case Type::end: return "end";
    case Type::get_layout: return "get_layout";
    case Type::layout: return "layout";
    case Type::plan: return "plan";
    case Type::plan_reply: return "plan_reply";
    case Type::get_digests: return "get_digests";
    case Type::digests: return "digests";
    case Type::get_extent: return "get_extent";
    case Type::extent: return "extent";
    case Type::get_frames: return "get_frames";
    case Type::frame: return "frame";
    case Type::get_raw_tiles: return "get_raw_tiles";
    case Type::release: return "release";
    case Type::watch: return "watch";
    case Type::version_ready: return "version_ready";
    case Type::subscribe: return "subscribe";
    case Type::check_tiles: return "check_tiles";
    case Type::tiles_checked: return "tiles_checked";
    case Type::report: return "report";
    case Type::get_lag: return "get_lag";
    case Type::lag: return "lag";
    case Type::keep_alive: return "keep_alive";
    case Type::alive: return "alive";
    case Type::relay_to: return "relay_to";
    case Type::parents: return "parents";
    case Type::get_local: return "get_local";
    case Type::local: return "local";
    case Type::elsewhere: return "elsewhere";
    case Type::open_ucx: return "open_ucx";
    case Type::ucx_opened: return "ucx_opened";
    case Type::trainer_hello: return "trainer_hello";
    case Type::trainer_welcome: return "trainer_welcome";
    case Type::trainer_plan: return "trainer_plan";
    case Type::trainer_plan_ok: return "trainer_plan_ok";
    case Type::trainer_notify: return "trainer_notify";
    case Type::trainer_wait: return "trainer_wait";
    case Type::trainer_ready: return "trainer_ready";
    case Type::trainer_parents: return "trainer_parents";
    case Type::map_segment: return "map_segment";
    case Type::segment: return "segment";
    case Type::bucket_hello: return "bucket_hello";
    case Type::bucket_begin: return "bucket_begin";
    case Type::bucket_chunk: return "bucket_chunk";
    case Type::bucket_finish: return "bucket_finish";
    case Type::trainer_arrival: return "trainer_arrival";
    case Type::trainer_delta: return "trainer_delta";
    case Type::trainer_frames: return "trainer_frames";
  }
  return {};
}

const char* mode_name(PlanMode mode) noexcept {
  switch (mode) {
    case PlanMode::up_to_date: return "up_to_date";
    case PlanMode::delta: return "delta";
    case PlanMode::full: return "full";
  }
  return "unknown";
}

std::string type_name(std::uint16_t type) {
  const std::string_view name = to_string(static_cast<Type>(type));
  return name.empty() ? std::to_string(type) : std::string(name);
}

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
    case Type::tiles_checked:
    case Type::report:
    case Type::get_lag:
    case Type::lag:
    case Type::keep_alive:
    case Type::alive:
    case Type::relay_to:
    case Type::parents:
    case Type::get_local:
    case Type::local:
    case Type::elsewhere:
    case Type::open_ucx:
    case Type::ucx_opened:
    case Type::trainer_parents:
    case Type::trainer_delta:
    case Type::map_segment:
    case Type::segment:
    case Type::trainer_welcome:
    case Type::trainer_plan_ok:
    case Type::trainer_notify:
    case Type::trainer_wait:
    case Type::trainer_ready:
    case Type::bucket_begin:
    case Type::bucket_finish: return kControlBytesMax;
    case Type::layout:
    case Type::bucket_hello:
    case Type::trainer_hello: return kLayoutBytesMax;
    case Type::trainer_arrival:
    case Type::digests: return kDigestsBytesMax;
    case Type::extent: return kExtentBytesMax;
    case Type::frame: return kFrameBytesMax;
    case Type::trainer_frames: return TrainerFrames::kHeadBytes + kFrameBytesMax;
    case Type::get_frames:
    case Type::get_raw_tiles:
    case Type::subscribe:
    case Type::check_tiles:
    case Type::trainer_plan:
    case Type::bucket_chunk: return kRangesBytesMax;
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
  if (header.magic != kMagic) {
    const ByteSpan first = bytes_of(header);
    if (first[0] == std::byte{22} && first[1] == std::byte{3}) {  // a TLS record of a handshake
      return Error(Errc::unsupported,
                   "the peer speaks TLS, and this side does not: give this side a certificate "
                   "(--tls-cert, --tls-key), or the peer no --tls-ca");
    }
    return Error(Errc::protocol, "message header: not the magic of this protocol");
  }
  if (header.header_hash != xxh3_64(bytes_of(header).first(offsetof(Header, header_hash)))) {
    return Error(Errc::corrupt, "message header: its hash differs");
  }
  if (header.flags != 0 || header.reserved != 0) {
    return Error(Errc::protocol, "message header: reserved fields are not zero");
  }
  const std::uint64_t bytes_max = payload_bytes_max(header.type);
  const std::string name = "message of type " + type_name(header.type);
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

namespace {

Result<std::uint16_t> first_word(ByteSpan payload, const char* sender) {
  ByteReader in(payload);
  const auto protocol = in.get<std::uint16_t>();
  if (in.failed()) return Error(Errc::corrupt, std::string(sender) + " sent no protocol number");
  return protocol;
}

std::string to_words(Protocols p) {
  return std::to_string(p.oldest) + (p.newest == p.oldest ? "" : " to " + std::to_string(p.newest));
}

Error nothing_in_common(const char* sender, Protocols theirs, Protocols ours) {
  return {Errc::unsupported, std::string(sender) + " speaks protocol " + to_words(theirs) + ", this side " +
                                 to_words(ours) + ": use releases that are closer"};
}

}  // namespace

Result<std::uint16_t> check_protocol(ByteSpan payload, const char* sender, Protocols ours) {
  DS_ASSIGN(const std::uint16_t protocol, first_word(payload, sender));
  if (protocol >= ours.oldest && protocol <= ours.newest) return protocol;
  return nothing_in_common(sender, {protocol, protocol}, ours);
}

Result<std::uint16_t> agree_on_protocol(const Header& header, ByteSpan hello, const char* sender, Protocols ours) {
  DS_ASSIGN(const std::uint16_t oldest, first_word(hello, sender));
  const auto newest = static_cast<std::uint16_t>(std::clamp<std::uint64_t>(header.request, oldest, 0xFFFF));
  const std::uint16_t agreed = std::min(newest, ours.newest);
  if (agreed >= std::max(oldest, ours.oldest)) return agreed;
  return nothing_in_common(sender, {oldest, newest}, ours);
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
  put_digest(out, clock);
  out.put(clock_ns);
  return bytes;
}
Result<Welcome> Welcome::decode(ByteSpan payload) {
  Decoder in(payload, "welcome");
  Welcome m;
  m.proof = in.array<32>();
  m.has_layout = in.flag("has_layout");
  m.layout = in.digest();
  m.clock = in.digest();
  m.clock_ns = in.get<std::uint64_t>();
  return in.finish(m);
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

}  // namespace deltasync::wire
