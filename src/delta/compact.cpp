// Frames and deltas with their tiles in rice_class where that is smaller.
#include <memory>
#include <utility>

#include "delta/class_codec.hpp"
#include "delta/codec.hpp"
#include "delta/frame.hpp"
#include "delta/kernel_scalar.hpp"
#include "delta/make_frames.hpp"
#include "format/tiling.hpp"

namespace deltasync::delta {

namespace {

/// Lists of changed elements for tiles whose payload has none in the ulp form.
struct ChangeLists {
  std::vector<std::uint16_t> positions;
  std::vector<std::byte> diffs;
};

/// Lists the elements that differ among `count` ones of the tile; at(i, position, new element) fills in the i-th.
template <class U, class At>
ChangedElements differing(const RowGeometry& geometry, const std::byte* before, std::uint32_t count,
                          ChangeLists& scratch, At&& at) {
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
                                 const std::byte* before, std::size_t row_stride, ChangeLists& scratch) {
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

/// The changed elements of a record that is kept() as positions and differences, in scratch memory of this thread.
Result<ChangedElements> changes_of(const TileShape& shape, const TileRecord& record, const std::byte* before,
                                   std::size_t row_stride, ChangeLists& scratch) {
  DecodedTile decoded;
  if (!traits(record.codec).whole_tile) {
    DS_ASSIGN(decoded, decode_alone(active_kernels(), shape, record));
  }
  if (traits(record.codec).differences) return ChangedElements{decoded.positions, decoded.values, decoded.count};
  switch (shape.element_bytes) {
    case 1: return absolute_changes<std::uint8_t>(shape, record, decoded, before, row_stride, scratch);
    case 2: return absolute_changes<std::uint16_t>(shape, record, decoded, before, row_stride, scratch);
    case 4: return absolute_changes<std::uint32_t>(shape, record, decoded, before, row_stride, scratch);
    default: return absolute_changes<std::uint64_t>(shape, record, decoded, before, row_stride, scratch);
  }
}

/// Turns the new tile, row by row without padding, into the old one.
void subtract_changes(const TileShape& shape, const ChangedElements& changes, std::byte* tile) {
  with_element(shape, [&]<class U, bool kFloat>() {
    for (std::uint32_t i = 0; i < changes.count; ++i) {
      std::byte* const element = tile + std::size_t{changes.positions[i]} * sizeof(U);
      const U difference = load_raw<U>(changes.diffs + std::size_t{i} * sizeof(U));
      store_raw(element, add_ulps<U, kFloat>(load_raw<U>(element), static_cast<U>(U{0} - difference)));
    }
  });
}

/// Compacts frames one after the other. One per worker, since it keeps the working memory.
class Compactor {
 public:
  explicit Compactor(const Layout& layout) : layout_(layout) {}

  /// Old tiles from the half that the delta applies to.
  Result<Frame> with_base(const Frame& frame, ByteSpan before);
  /// Old tiles from those that the delta leads to, the differences subtracted; nothing if they are not to be had.
  Result<std::optional<Frame>> with_target(const Frame& frame, const MergeOptions& options);
  const CodecStats (&stats() const noexcept)[kCodecEnd] { return stats_; }

 private:
  static bool is_reversible(const TileShape& shape, const TileRecord& record) noexcept {
    return shape.is_float && traits(record.codec).inverts();
  }
  bool read_target(const std::vector<TileRecord>& records, const MergeOptions& options);
  Status add_from_target(const TileShape& shape, const TileRecord& record, std::byte* tile);
  /// In classes if that is smaller; `old` is the tile's first element.
  void add_smaller(const TileShape& shape, TileRecord record, const ChangedElements& changes, const std::byte* old,
                   std::size_t row_stride);
  void add_as_it_is(TileRecord record);
  void add(TileRecord& record, std::size_t payload_begin);

  const Layout& layout_;
  ClassEncodeScratch encode_;
  ChangeLists lists_;
  FrameBuilder builder_;
  CodecStats stats_[kCodecEnd];
  std::vector<std::uint64_t> target_tiles_;
  std::vector<std::byte> target_;  ///< their bytes: of a batch at most
};

void Compactor::add(TileRecord& record, std::size_t payload_begin) {
  record.payload = ByteSpan(builder_.payloads()).subspan(payload_begin);
  add_to_stats(record, stats_);
  builder_.add(record);
}

void Compactor::add_as_it_is(TileRecord record) {
  std::vector<std::byte>& payloads = builder_.payloads();
  const std::size_t begin = payloads.size();
  payloads.insert(payloads.end(), record.payload.begin(), record.payload.end());
  add(record, begin);
}

void Compactor::add_smaller(const TileShape& shape, TileRecord record, const ChangedElements& changes,
                            const std::byte* old, std::size_t row_stride) {
  const std::size_t begin = builder_.payloads().size();
  const std::size_t limit = record_bytes(record, record.payload.size()) + record.payload.size();
  if (!encode_class(shape, changes, old, row_stride, limit, encode_, record, builder_.payloads())) {
    return add_as_it_is(record);
  }
  add(record, begin);
}

Result<Frame> Compactor::with_base(const Frame& frame, ByteSpan before) {
  if (frame.bytes.empty()) return frame;
  DS_ASSIGN(const std::vector<TileRecord> records, parse_frame(layout_, frame.bytes));
  for (const TileRecord& record : records) {
    const TileShape shape = tile_shape(layout_, record.tile);
    if (!shape.is_float || !traits(record.codec).kept()) {
      add_as_it_is(record);
      continue;
    }
    const Tile tile = tile_of(layout_, record.tile);
    const Tensor& tensor = layout_.tensors()[tile.tensor];
    const auto row_stride = static_cast<std::size_t>(tensor.row_bytes());
    const std::byte* const first =
        before.data() + tensor.offset + tile.rect.row * tensor.row_bytes() + tile.rect.col * tensor.element_bytes;
    auto changes = changes_of(shape, record, first, row_stride, lists_);
    if (!changes) return std::move(changes).error().with_context(tile_name(layout_, record.tile));
    add_smaller(shape, record, *changes, first, row_stride);
  }
  return builder_.finish();
}

/// Those that are reversible, all at once.
bool Compactor::read_target(const std::vector<TileRecord>& records, const MergeOptions& options) {
  target_tiles_.clear();
  std::size_t bytes = 0;
  for (const TileRecord& record : records) {
    const TileShape shape = tile_shape(layout_, record.tile);
    if (!is_reversible(shape, record)) continue;
    target_tiles_.push_back(record.tile);
    bytes += shape.raw_bytes();
  }
  if (target_tiles_.empty()) return true;
  if (!options.read_target) return false;
  target_.resize(bytes);
  return options.read_target(target_tiles_, target_.data());
}

Status Compactor::add_from_target(const TileShape& shape, const TileRecord& record, std::byte* tile) {
  const std::size_t row_bytes = shape.row_bytes();
  if (tile_digest(tile, row_bytes, shape.rows, row_bytes) != record.digest_after) {
    return Error(Errc::corrupt, "the tile that was read is not of the delta's target");
  }
  DS_ASSIGN(const ChangedElements changes, changes_of(shape, record, nullptr, 0, lists_));
  subtract_changes(shape, changes, tile);
  add_smaller(shape, record, changes, tile, row_bytes);
  return {};
}

Result<std::optional<Frame>> Compactor::with_target(const Frame& frame, const MergeOptions& options) {
  DS_ASSIGN(const std::vector<TileRecord> records, parse_frame(layout_, frame.bytes));
  if (!read_target(records, options)) return std::optional<Frame>();
  std::byte* tile = target_.data();
  for (const TileRecord& record : records) {
    const TileShape shape = tile_shape(layout_, record.tile);
    if (!is_reversible(shape, record)) {
      add_as_it_is(record);
      continue;
    }
    DS_TRY(add_from_target(shape, record, tile).with_context(tile_name(layout_, record.tile)));
    tile += shape.raw_bytes();
  }
  return std::optional<Frame>(builder_.finish());
}

/// fn(compactor, frame) for each frame of the delta makes that of the result; nothing if one of them gives nothing.
template <class Fn>
Result<std::optional<Delta>> compact_frames(const Layout& layout, const Delta& delta, const std::atomic<bool>* cancel,
                                            ThreadPool& pool, Fn&& fn) {
  DS_ASSIGN(auto out,
            make_frames(
                "compact", delta.frames.size(), cancel, pool, [&] { return std::make_unique<Compactor>(layout); },
                [&](Compactor& compactor, std::uint64_t i) { return fn(compactor, delta.frames[i]); }));
  if (out) {
    out->layout = delta.layout;
    out->from = delta.from;
    out->to = delta.to;
    out->from_root = delta.from_root;
    out->to_root = delta.to_root;
  }
  return out;
}

}  // namespace

Result<Frame> compact_frame(const Layout& layout, const Frame& frame, ByteSpan before) {
  return Compactor(layout).with_base(frame, before);
}

Result<Delta> compact(const Layout& layout, const Delta& delta, ByteSpan before, ThreadPool& pool) {
  DS_ASSIGN(auto out, compact_frames(layout, delta, nullptr, pool,
                                     [&](Compactor& compactor, const Frame& frame) -> Result<std::optional<Frame>> {
                                       DS_ASSIGN(Frame made, compactor.with_base(frame, before));
                                       return std::optional<Frame>(std::move(made));
                                     }));
  return *std::move(out);
}

Result<std::optional<Delta>> compact_from_target(const Layout& layout, const Delta& delta, const MergeOptions& options,
                                                 ThreadPool& pool) {
  return compact_frames(layout, delta, options.cancel, pool, [&](Compactor& compactor, const Frame& frame) {
    return compactor.with_target(frame, options);
  });
}

}  // namespace deltasync::delta
