// First two bytes: the message type; the rest: its payload. A payload that decodes encodes to the same bytes.
#include <algorithm>
#include <cstdlib>

#include "format/wire.hpp"
#include "format/wire_report.hpp"

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
    case wire::Type::trainer_hello: return round_trip<wire::TrainerHello>(payload);
    case wire::Type::trainer_welcome: return round_trip<wire::TrainerWelcome>(payload);
    case wire::Type::trainer_plan: return round_trip<wire::TrainerPlan>(payload);
    case wire::Type::trainer_notify: return round_trip<wire::TrainerNotify>(payload);
    case wire::Type::trainer_wait: return round_trip<wire::TrainerWait>(payload);
    case wire::Type::trainer_ready: return round_trip<wire::TrainerReady>(payload);
    default: break;
  }
  if (payload.size() >= sizeof(wire::Header)) (void)wire::check_header(load<wire::Header>(payload.data()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const ByteSpan bytes(reinterpret_cast<const std::byte*>(data), size);
  decode(static_cast<wire::Type>(load<std::uint16_t>(bytes.data())), bytes.subspan(2));
  return 0;
}
