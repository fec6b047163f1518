// A delta with other records for some of its tiles: what an agent serves when a tile's digest was found to be wrong.
#include <algorithm>
#include <utility>

#include "delta/frame.hpp"

namespace deltasync::delta {
namespace {

/// What stands in place of the tiles' records.
struct Replacement {
  const Layout& layout;
  const ByteSpan* after;  ///< null: nothing
  std::span<const std::uint64_t> digests;

  void add(std::uint64_t tile, FrameBuilder& to) const {
    if (after == nullptr) return;
    TileRecord record;
    record.tile = tile;
    record.codec = Codec::raw;
    const TileShape shape = tile_shape(layout, tile);
    record.changed = shape.elements();
    record.digest_after = digests[static_cast<std::size_t>(tile)];
    const std::size_t begin = to.payloads().size();
    to.payloads().resize(begin + shape.raw_bytes());
    copy_tile(layout, *after, tile, to.payloads().data() + begin);
    to.add(record);
  }
};

/// One batch's frame (empty: none), with `tiles` replaced.
Result<Frame> amend_frame(const Frame* frame, std::span<const std::uint64_t> tiles, const Replacement& by) {
  std::vector<TileRecord> records;
  if (frame != nullptr) {
    DS_ASSIGN(records, parse_frame(by.layout, frame->bytes));
  }
  FrameBuilder made;
  for (const TileRecord& record : records) {
    for (; !tiles.empty() && tiles.front() < record.tile; tiles = tiles.subspan(1)) by.add(tiles.front(), made);
    if (!tiles.empty() && tiles.front() == record.tile) continue;  // comes with the next record
    made.payloads().insert(made.payloads().end(), record.payload.begin(), record.payload.end());
    made.add(record);
  }
  for (const std::uint64_t tile : tiles) by.add(tile, made);
  return made.finish();
}

void count(const Layout& layout, const Frame& frame, Delta& delta) {
  delta.changed += frame.changed;
  delta.frame_bytes += frame.bytes.size();
  const auto records = parse_frame(layout, frame.bytes);
  if (!records) return;  // a damaged one that was taken over: its receivers will say so
  for (const TileRecord& record : *records) add_to_stats(record, delta.stats);
}

}  // namespace

Result<Delta> amend(const Layout& layout, std::span<const Batch> batches, const Delta& delta,
                    std::span<const std::uint64_t> tiles, const ByteSpan* after, std::span<const std::uint64_t> digests,
                    const Digest128& to_root) {
  const Replacement by{layout, after, digests};
  Delta made;
  made.layout = delta.layout;
  made.from = delta.from;
  made.to = delta.to;
  made.from_root = delta.from_root;
  made.to_root = to_root;
  auto frame = delta.frames.begin();
  while (!tiles.empty()) {
    const auto batch = std::upper_bound(batches.begin(), batches.end(), tiles.front(),
                                        [](std::uint64_t tile, const Batch& b) { return tile < b.end; });
    const auto inside = std::lower_bound(tiles.begin(), tiles.end(), batch->end);
    for (; frame != delta.frames.end() && frame->last_tile < batch->first; ++frame) made.frames.push_back(*frame);
    const bool there = frame != delta.frames.end() && frame->first_tile < batch->end;
    DS_ASSIGN(Frame amended, amend_frame(there ? &*frame : nullptr, {tiles.begin(), inside}, by));
    if (there) ++frame;
    if (amended.tiles != 0) made.frames.push_back(std::move(amended));
    tiles = {inside, tiles.end()};
  }
  made.frames.insert(made.frames.end(), frame, delta.frames.end());
  for (const Frame& each : made.frames) count(layout, each, made);
  return made;
}

}  // namespace deltasync::delta
