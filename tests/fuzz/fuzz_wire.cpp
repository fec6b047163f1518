// First two bytes: the message type; the rest: its payload. A payload that decodes encodes to the same bytes; and
// behind its header it crosses a connection, in whatever pieces. The rest is also taken for what comes from a
// connection.
#include <algorithm>
#include <cstdlib>
#include <optional>

#include "format/message.hpp"
#include "format/wire.hpp"
#include "format/wire_bucket.hpp"
#include "format/wire_local.hpp"
#include "format/wire_report.hpp"
#include "format/wire_ucx.hpp"

namespace {

using namespace deltasync;

template <class Message>
void round_trip(ByteSpan payload) {
  const auto message = Message::decode(payload);
  if (!message) return;
  const auto again = message->encode();
  if (!std::equal(again.begin(), again.end(), payload.begin(), payload.end())) std::abort();
}

void decode(wire::Type type, ByteSpan payload) {
  switch (type) {
    case wire::Type::hello: return round_trip<wire::Hello>(payload);
    case wire::Type::auth: return round_trip<wire::Auth>(payload);
    case wire::Type::welcome: return round_trip<wire::Welcome>(payload);
    case wire::Type::error: return round_trip<wire::ErrorMessage>(payload);
    case wire::Type::layout: return round_trip<wire::LayoutMessage>(payload);
    case wire::Type::plan: return round_trip<wire::PlanRequest>(payload);
    case wire::Type::plan_reply: return round_trip<wire::PlanReply>(payload);
    case wire::Type::subscribe: return round_trip<wire::Subscribe>(payload);
    case wire::Type::get_digests: return round_trip<wire::GetDigests>(payload);
    case wire::Type::get_extent: return round_trip<wire::GetExtent>(payload);
    case wire::Type::get_frames: return round_trip<wire::GetFrames>(payload);
    case wire::Type::get_raw_tiles: return round_trip<wire::GetRawTiles>(payload);
    case wire::Type::release: return round_trip<wire::Release>(payload);
    case wire::Type::version_ready: return round_trip<wire::VersionReady>(payload);
    case wire::Type::report: return round_trip<wire::Report>(payload);
    case wire::Type::get_lag: return round_trip<wire::GetLag>(payload);
    case wire::Type::lag: return round_trip<wire::Lag>(payload);
    case wire::Type::keep_alive: return round_trip<wire::KeepAlive>(payload);
    case wire::Type::relay_to: return round_trip<wire::RelayTo>(payload);
    case wire::Type::elsewhere: return round_trip<wire::Elsewhere>(payload);
    case wire::Type::parents: return round_trip<wire::Parents>(payload);
    case wire::Type::trainer_parents: return round_trip<wire::TrainerParents>(payload);
    case wire::Type::get_local: return round_trip<wire::GetLocal>(payload);
    case wire::Type::open_ucx: return round_trip<wire::OpenUcx>(payload);
    case wire::Type::ucx_opened: return round_trip<wire::UcxOpened>(payload);
    case wire::Type::local: return round_trip<wire::Local>(payload);
    case wire::Type::map_segment: return round_trip<wire::MapSegment>(payload);
    case wire::Type::trainer_hello: return round_trip<wire::TrainerHello>(payload);
    case wire::Type::trainer_welcome: return round_trip<wire::TrainerWelcome>(payload);
    case wire::Type::trainer_plan: return round_trip<wire::TrainerPlan>(payload);
    case wire::Type::trainer_notify: return round_trip<wire::TrainerNotify>(payload);
    case wire::Type::trainer_wait: return round_trip<wire::TrainerWait>(payload);
    case wire::Type::trainer_ready: return round_trip<wire::TrainerReady>(payload);
    case wire::Type::trainer_arrival: return round_trip<wire::TrainerArrival>(payload);
    case wire::Type::trainer_delta: return round_trip<wire::TrainerDelta>(payload);
    case wire::Type::trainer_frames: return round_trip<wire::TrainerFrames>(payload);
    case wire::Type::bucket_hello: return round_trip<wire::BucketHello>(payload);
    case wire::Type::bucket_begin: return round_trip<wire::BucketBegin>(payload);
    case wire::Type::bucket_chunk: return round_trip<wire::BucketChunk>(payload);
    case wire::Type::bucket_finish: return round_trip<wire::BucketFinish>(payload);
    default: break;
  }
}

/// What a connection makes of bytes that come in pieces of at most `piece_max`; nothing if it wants more.
std::optional<Result<wire::Message>> receive(ByteSpan bytes, std::size_t piece_max) {
  wire::MessageParser message;
  bool allowed = false;
  for (;;) {
    const MutByteSpan to = message.next();
    if (to.empty() && allowed) return std::move(message).take();
    const ByteSpan piece = bytes.first(std::min({to.size(), bytes.size(), piece_max}));
    if (!to.empty() && piece.empty()) return std::nullopt;
    std::copy(piece.begin(), piece.end(), to.begin());
    bytes = bytes.subspan(piece.size());
    Status status = to.empty() ? message.allow_payload(wire::kControlBytesMax) : message.took(piece.size());
    if (!status) return std::move(status).error();
    allowed |= to.empty();
  }
}

/// However it is cut, the same comes of it.
void receive_in_pieces(ByteSpan bytes) {
  const auto whole = receive(bytes, bytes.size());
  const auto cut = receive(bytes, bytes.empty() ? 1 : 1 + std::to_integer<std::size_t>(bytes.back()) % 64);
  if (whole.has_value() != cut.has_value()) std::abort();
  if (!whole) return;
  if (whole->ok() != cut->ok()) std::abort();
  if (whole->ok() ? (*whole)->payload != (*cut)->payload : whole->error().message() != cut->error().message()) {
    std::abort();
  }
}

void cross(wire::Type type, ByteSpan payload) {
  const wire::Header header = wire::make_header(type, 1, payload, payload.size());
  std::vector<std::byte> bytes(bytes_of(header).begin(), bytes_of(header).end());
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  receive_in_pieces(bytes);
  const auto message = receive(bytes, 1 + payload.size() % 64);
  if (!message) std::abort();
  const bool fits = payload.size() <= std::min(wire::payload_bytes_max(header.type), wire::kControlBytesMax) &&
                    wire::payload_bytes_max(header.type) != 0;
  if (message->ok() != fits) std::abort();
  if (fits && !std::equal(payload.begin(), payload.end(), (*message)->payload.begin(), (*message)->payload.end())) {
    std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const ByteSpan bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto type = static_cast<wire::Type>(load<std::uint16_t>(bytes.data()));
  decode(type, bytes.subspan(2));
  cross(type, bytes.subspan(2));
  receive_in_pieces(bytes.subspan(2));
  return 0;
}
