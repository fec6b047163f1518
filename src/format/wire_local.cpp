#include "format/wire_local.hpp"

#include <utility>

#include "format/wire_codec.hpp"

namespace deltasync::wire {

std::vector<std::byte> GetLocal::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(plan);
  return bytes;
}
Result<GetLocal> GetLocal::decode(ByteSpan payload) {
  Decoder in(payload, "get_local");
  GetLocal m;
  m.plan = in.get<std::uint64_t>();
  return in.finish(m);
}

std::vector<std::byte> Local::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put_string(cut(socket, kPathBytesMax));
  out.put(generation);
  out.put(half);
  out.put(sequence);
  return bytes;
}
Result<Local> Local::decode(ByteSpan payload) {
  Decoder in(payload, "local");
  Local m;
  m.socket = in.string(kPathBytesMax, "socket");
  m.generation = in.get<std::uint64_t>();
  m.half = in.get_at_most<std::uint8_t>(1, "half");
  m.sequence = in.get<std::uint64_t>();
  return in.finish(std::move(m));
}

std::vector<std::byte> MapSegment::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(protocol);
  out.put(instance);
  out.put(generation);
  return bytes;
}
Result<MapSegment> MapSegment::decode(ByteSpan payload) {
  Decoder in(payload, "map_segment");
  MapSegment m;
  m.protocol = in.get<std::uint16_t>();
  m.instance = in.get<std::uint64_t>();
  m.generation = in.get<std::uint64_t>();
  return in.finish(m);
}

}  // namespace deltasync::wire
