#include "receiver/targets/segment/hand_over.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/log.hpp"
#include "base/trace.hpp"
#include "delta/kept_delta.hpp"
#include "writer/relay_access.hpp"

namespace deltasync::relay {
namespace {

/// An agent that merges deltas cannot read these codecs, and makes none.
bool is_as_encoded(const StagedFrame& frame) {
  return std::none_of(frame.records.begin(), frame.records.end(), [](const delta::TileRecord& record) {
    return record.codec == delta::Codec::rice_class || record.codec == delta::Codec::raw_planes;
  });
}

/// The same frames in the order of their tiles.
delta::Delta delta_of(const Layout& layout, const TargetState& before, const TargetState& after,
                      const StagedStep& step) {
  delta::Delta delta;
  delta.layout = layout.digest();
  delta.from = before.version.id;
  delta.to = after.version.id;
  delta.from_root = before.root;
  delta.to_root = after.root;
  for (const StagedFrame& staged : step.frames) {
    delta::Frame frame;
    frame.first_tile = staged.records.front().tile;
    frame.last_tile = staged.records.back().tile;
    frame.tiles = static_cast<std::uint32_t>(staged.records.size());
    for (const delta::TileRecord& record : staged.records) frame.changed += record.changed;
    frame.bytes = staged.bytes;
    delta.changed += frame.changed;
    delta.frame_bytes += frame.bytes.size();
    delta.frames.push_back(std::move(frame));
  }
  std::sort(delta.frames.begin(), delta.frames.end(),
            [](const delta::Frame& a, const delta::Frame& b) { return a.first_tile < b.first_tile; });
  return delta;
}

Status write(const Writer& writer, const Layout& layout, const TargetState& before, const TargetState& after,
             const StagedStep& step) {
  const delta::Delta delta = delta_of(layout, before, after, step);
  std::vector<delta::DigestBefore> digests;
  for (std::size_t tile = 0; tile < after.digests.size(); ++tile) {
    if (before.digests[tile] != after.digests[tile]) digests.push_back({tile, before.digests[tile]});
  }
  const std::vector<std::byte> head = delta::kept_delta_head(delta, before.version, after.version, digests);
  std::vector<ByteSpan> pieces{head};
  for (const delta::Frame& frame : delta.frames) pieces.emplace_back(frame.bytes);
  return hand_over_delta(writer, pieces);
}

}  // namespace

bool hand_over(const Layout& layout, const Writer& writer, const TargetState& before, const TargetState& after,
               const std::vector<StagedStep>& steps) noexcept {
  try {
    withdraw_delta(writer);  // what was handed over with a version that came to nothing
    if (steps.size() != 1) return false;
    const std::vector<StagedFrame>& frames = steps.front().frames;
    if (!std::all_of(frames.begin(), frames.end(), is_as_encoded)) return false;
    const trace::Span span("hand over", after.version.id);
    const Status written = write(writer, layout, before, after, steps.front());
    if (written) return true;
    log::warn("delta_not_handed_over version=\"{}\" error=\"{}\" effect=\"the agent compares the halves\"",
              to_string(after.version), written.error().to_string());
  } catch (const std::exception& e) {
    log::warn("delta_not_handed_over error=\"{}\" effect=\"the agent compares the halves\"", e.what());
  }
  return false;
}

}  // namespace deltasync::relay
