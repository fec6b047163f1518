// Messages about versions: the layout, plans, what is new.
#include "format/wire_codec.hpp"

namespace deltasync::wire {

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

std::vector<std::byte> PlanRequest::encode() const {
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
  put_digest(out, subscription);
  out.put(compact);
  out.put(epoch);
  put_if_set(out, arriving);
  return bytes;
}
Result<PlanRequest> PlanRequest::decode(ByteSpan payload) {
  Decoder in(payload, "plan");
  PlanRequest m;
  m.layout = in.digest();
  m.base = in.version_id();
  m.base_root = in.digest();
  m.want = in.enumerator(WantKind::newest, WantKind::label, "want");
  m.number = in.get<std::uint64_t>();
  m.label = in.label();
  m.wait_ms = in.get<std::uint64_t>();
  m.partial = in.flag("partial");
  m.full_only = in.flag("full_only");
  m.subscription = in.digest();
  m.compact = in.flag("compact");
  m.epoch = in.get<std::uint64_t>();
  m.arriving = in.flag_if_set("arriving");
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
  out.put(pack_threads);
  out.put<std::uint64_t>(steps.size());
  for (const DeltaStep& step : steps) {
    put_version_id(out, step.from);
    put_version_id(out, step.to);
    put_digest(out, step.to_root);
    out.put(step.frames);
    out.put(step.frame_bytes);
    out.put(step.changed);
  }
  put_if_set(out, arriving);
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
  m.pack_threads = in.get<std::uint32_t>();
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
  m.arriving = in.flag_if_set("arriving");
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

}  // namespace deltasync::wire
