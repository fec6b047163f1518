// The conversation of a trainer's process with the agent.
#include "format/wire_codec.hpp"
#include "format/wire_report.hpp"

namespace deltasync::wire {

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

std::vector<std::byte> TrainerWelcome::encode(std::uint16_t protocol) const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put_string(segment_name);
  out.put_string(shm_dir);
  out.put(generation);
  put_version_id(out, newest);
  if (protocol >= 5) {
    out.put(epoch);
    out.put(instance);
  }
  return bytes;
}
Result<TrainerWelcome> TrainerWelcome::decode(ByteSpan payload, std::uint16_t protocol) {
  Decoder in(payload, "trainer_welcome");
  TrainerWelcome m;
  m.segment_name = in.string(kPathBytesMax, "segment_name");
  m.shm_dir = in.string(kPathBytesMax, "shm_dir");
  m.generation = in.get<std::uint64_t>();
  m.newest = in.version_id();
  if (protocol >= 5) {
    m.epoch = in.get<std::uint64_t>();
    m.instance = in.get<std::uint64_t>();
  }
  return in.finish(std::move(m));
}

std::vector<std::byte> TrainerPlan::encode(std::uint16_t protocol) const {
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
  if (protocol >= 5) out.put(agreed);
  return bytes;
}
Result<TrainerPlan> TrainerPlan::decode(ByteSpan payload, std::uint16_t protocol) {
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
  if (protocol >= 5) m.agreed = in.flag("agreed");
  return in.finish(std::move(m));
}

std::vector<std::byte> TrainerNotify::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put(offload_ns);
  out.put(guard_ns);
  return bytes;
}
Result<TrainerNotify> TrainerNotify::decode(ByteSpan payload) {
  Decoder in(payload, "trainer_notify");
  TrainerNotify m;
  m.offload_ns = in.get<std::uint64_t>();
  m.guard_ns = in.get<std::uint64_t>();
  return in.finish(m);
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
  return in.finish(m);
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
  return in.finish(m);
}

std::vector<std::byte> TrainerArrival::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  put_digest(out, layout);
  put_version(out, version);
  put_digest(out, root);
  out.put<std::uint64_t>(digests.size());
  for (const std::uint64_t digest : digests) out.put(digest);
  return bytes;
}
Result<TrainerArrival> TrainerArrival::decode(ByteSpan payload) {
  Decoder in(payload, "trainer_arrival");
  TrainerArrival m;
  m.layout = in.digest();
  m.version = in.version();
  m.root = in.digest();
  const auto count = in.get<std::uint64_t>();
  if (count > in.in().remaining() / sizeof(std::uint64_t)) in.reject("tile count", std::to_string(count));
  if (!m.version.id.valid() && count != 0) in.reject("tile count", std::to_string(count) + " of no version");
  if (!in.in().failed()) m.digests.reserve(static_cast<std::size_t>(count));
  for (std::uint64_t i = 0; i < count && !in.in().failed(); ++i) m.digests.push_back(in.get<std::uint64_t>());
  return in.finish(std::move(m));
}

std::vector<std::byte> TrainerDelta::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  put_digest(out, layout);
  put_version(out, from);
  put_version(out, to);
  put_digest(out, from_root);
  put_digest(out, to_root);
  out.put(frames);
  out.put(frame_bytes);
  out.put(changed);
  return bytes;
}
Result<TrainerDelta> TrainerDelta::decode(ByteSpan payload) {
  Decoder in(payload, "trainer_delta");
  TrainerDelta m;
  m.layout = in.digest();
  m.from = in.version();
  m.to = in.version();
  m.from_root = in.digest();
  m.to_root = in.digest();
  m.frames = in.get<std::uint64_t>();
  m.frame_bytes = in.get<std::uint64_t>();
  m.changed = in.get<std::uint64_t>();
  return in.finish(std::move(m));
}

std::vector<std::byte> TrainerFrames::encode() const {
  std::vector<std::byte> bytes;
  bytes.reserve(kHeadBytes + frame.size());
  ByteWriter out(bytes);
  out.put(tiles.first);
  out.put(tiles.end);
  put_blob(out, frame);
  return bytes;
}
Result<TrainerFrames> TrainerFrames::decode(ByteSpan payload) {
  Decoder in(payload, "trainer_frames");
  TrainerFrames m;
  m.tiles.first = in.get<std::uint64_t>();
  m.tiles.end = in.get<std::uint64_t>();
  if (m.tiles.first >= m.tiles.end) {
    in.reject("tiles", std::to_string(m.tiles.first) + " to " + std::to_string(m.tiles.end));
  }
  m.frame = in.blob();
  return in.finish(std::move(m));
}

}  // namespace deltasync::wire
