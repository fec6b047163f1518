// Frames and deltas with their tiles in rice_class where that is smaller.
#include "delta/class_codec.hpp"
#include "delta/dense_codec.hpp"
#include "delta/frame.hpp"
#include "delta/kernel_scalar.hpp"

namespace deltasync::delta {

namespace {

/// Working memory of one thread: lists of changed elements for tiles whose payload has none in the ulp form.
struct CompactScratch {
  ClassEncodeScratch encode;
  std::vector<std::uint16_t> positions;
  std::vector<std::byte> diffs;
};

CompactScratch& compact_scratch() {
  thread_local const std::unique_ptr<CompactScratch> scratch(new CompactScratch);
  return *scratch;
}

/// Lists the elements that differ among `count` ones of the tile; at(i, position, new element) fills in the i-th.
template <class U, class At>
ChangedElements differing(const RowGeometry& geometry, const std::byte* before, std::uint32_t count,
                          CompactScratch& scratch, At&& at) {
  scratch.positions.resize(count);
  scratch.diffs.resize(std::size_t{count} * sizeof(U));
  RowCursor cursor(geometry);
  std::uint32_t listed = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    std::uint16_t position = 0;
    U after = 0;
    at(i, position, after);
    const std::uint32_t col = cursor.seek(position);
    const U old = load_raw<U>(before + cursor.offset() + std::size_t{col} * sizeof(U));
    if (old == after) continue;
    scratch.positions[listed] = position;
    store_raw(scratch.diffs.data() + std::size_t{listed} * sizeof(U),
              static_cast<U>(ulp_map<U, true>(after) - ulp_map<U, true>(old)));
    ++listed;
  }
  return {scratch.positions.data(), scratch.diffs.data(), listed};
}

template <class U>
ChangedElements absolute_changes(const TileShape& shape, const TileRecord& record, const DecodedTile& decoded,
                                 const std::byte* before, std::size_t row_stride, CompactScratch& scratch) {
  const RowGeometry geometry(shape, row_stride);
  if (record.codec == Codec::raw) {
    return differing<U>(geometry, before, shape.elements(), scratch,
                        [&](std::uint32_t i, std::uint16_t& position, U& after) {
                          position = static_cast<std::uint16_t>(i);
                          after = load_raw<U>(record.payload.data() + std::size_t{i} * sizeof(U));
                        });
  }
  return differing<U>(geometry, before, decoded.count, scratch,
                      [&](std::uint32_t i, std::uint16_t& position, U& after) {
                        position = decoded.positions[i];
                        after = load_raw<U>(decoded.values + std::size_t{i} * sizeof(U));
                      });
}

/// The changed elements of a record as positions and differences, in scratch memory of this thread.
Result<ChangedElements> changes_of(const TileShape& shape, const TileRecord& record, const std::byte* before,
                                   std::size_t row_stride, CompactScratch& scratch) {
  DecodedTile decoded;
  if (record.codec == Codec::dense_ulp) {
    DS_ASSIGN(decoded, decode_dense(active_kernels(), shape, record));
  } else if (record.codec != Codec::raw) {
    DS_ASSIGN(decoded, decode_rice(shape, record));
  }
  if (record.codec == Codec::rice_ulp || record.codec == Codec::dense_ulp)
    return ChangedElements{decoded.positions, decoded.values, decoded.count};
  switch (shape.element_bytes) {
    case 1: return absolute_changes<std::uint8_t>(shape, record, decoded, before, row_stride, scratch);
    case 2: return absolute_changes<std::uint16_t>(shape, record, decoded, before, row_stride, scratch);
    case 4: return absolute_changes<std::uint32_t>(shape, record, decoded, before, row_stride, scratch);
    default: return absolute_changes<std::uint64_t>(shape, record, decoded, before, row_stride, scratch);
  }
}

}  // namespace

Result<Frame> compact_frame(const Layout& layout, const Frame& frame, ByteSpan before) {
  if (frame.bytes.empty()) return frame;
  DS_ASSIGN(const std::vector<TileRecord> records, parse_frame(layout, frame.bytes));
  CompactScratch& scratch = compact_scratch();
  FrameBuilder builder;
  for (TileRecord record : records) {
    const TileShape shape = tile_shape(layout, record.tile);
    const Tile tile = layout.tile(record.tile);
    const Tensor& tensor = layout.tensors()[tile.tensor];
    const auto row_stride = static_cast<std::size_t>(tensor.row_bytes());
    const std::byte* const first =
        before.data() + tensor.offset + tile.rect.row * tensor.row_bytes() + tile.rect.col * tensor.element_bytes;
    const ByteSpan payload = record.payload;
    bool smaller = false;
    if (shape.is_float && record.codec != Codec::rice_class && record.codec != Codec::raw_planes) {
      auto changes = changes_of(shape, record, first, row_stride, scratch);
      if (!changes) return std::move(changes).error().with_context(tile_name(layout, record.tile));
      const std::size_t limit = record_bytes(record, payload.size()) + payload.size();
      smaller = encode_class(shape, *changes, first, row_stride, limit, scratch.encode, record, builder.payloads());
    }
    if (!smaller) builder.payloads().insert(builder.payloads().end(), payload.begin(), payload.end());
    builder.add(record);
  }
  return builder.finish();
}

Result<Delta> compact(const Layout& layout, const Delta& delta, ByteSpan before, ThreadPool& pool) {
  Delta out = delta;
  std::vector<Status> statuses(delta.frames.size());
  pool.run(delta.frames.size(), [&](std::uint64_t i, unsigned) {
    auto frame = compact_frame(layout, delta.frames[i], before);
    if (frame) {
      out.frames[i] = std::move(*frame);
    } else {
      statuses[i] = std::move(frame).error();
    }
  });
  out.changed = out.frame_bytes = 0;
  for (CodecStats& stats : out.stats) stats = {};
  for (std::size_t i = 0; i < out.frames.size(); ++i) {
    DS_TRY(statuses[i]);
    out.changed += out.frames[i].changed;
    out.frame_bytes += out.frames[i].bytes.size();
    DS_ASSIGN(const auto records, parse_frame(layout, out.frames[i].bytes));
    for (const TileRecord& record : records) add_to_stats(record, out.stats);
  }
  return out;
}

}  // namespace deltasync::delta
