#include "delta/encode.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/trace.hpp"
#include "delta/changed_words.hpp"
#include "delta/mix.hpp"

namespace deltasync::delta {

namespace {

/// Below this, rows that are not whole words are scanned as one run, and the digest is taken from the changed
/// positions: a call per row would cost more than its bytes.
constexpr std::size_t kShortRowBytes = 512;

/// Room for a tile's positions and differences. The odd extra keeps the buffers of neighbouring panels out of each
/// other's cache sets.
constexpr std::size_t kPositionBytes = (kTileElementsMax + kSlack) * sizeof(std::uint16_t);
constexpr std::size_t kPanelSkewBytes = 192;

template <class U>
std::uint64_t digest_change_at(const Kernels& kernels, const RowGeometry& geometry, const ScanOutput& out,
                               const std::byte* before, const std::byte* after) {
  ChangedWordSum sum(kernels);
  for_each_changed_word<U>(geometry, out.positions, out.count, [&](const ChangedWord& w) {
    sum.add(load_word(before + w.offset, w.bytes), load_word(after + w.offset, w.bytes), w.index);
  });
  return sum.finish();
}

/// A strip up to this size is compared before it is scanned, together with what lies behind it: in models of very many
/// small tensors, most of them unchanged, a call a strip costs more than its bytes.
constexpr std::size_t kSmallStripBytes = 16u << 10;
constexpr std::size_t kCompareBytes = 4096;

std::size_t end_of(const Strip& strip) {
  const Tensor& tensor = *strip.tensor;
  return static_cast<std::size_t>(strip.offset(strip.panels) + (strip.rows - 1) * tensor.row_bytes());
}

/// Where the first row of a tile ends in a half. Up to there, whatever follows tiles of the same batch is of that batch
/// too; the rows behind it may lie between panels of the next batch, which are still being written.
std::size_t end_of_first_row(const Layout& layout, std::uint64_t index) {
  const Tile tile = layout.tile(index);
  const Tensor& tensor = layout.tensors()[tile.tensor];
  return static_cast<std::size_t>(tensor.offset + tile.rect.row * tensor.row_bytes() +
                                  (tile.rect.col + tile.rect.cols) * tensor.element_bytes);
}

/// For the timeline: what a batch read of one half, and what became of it.
void note_batch(const Layout& layout, const Batch& batch, std::uint32_t index, const Frame& frame) {
  if (!trace::on()) return;
  std::uint64_t bytes = 0;
  for (std::uint64_t t = batch.first; t < batch.end; ++t) {
    const Tile tile = layout.tile(t);
    bytes += tile.rect.elements() * layout.tensors()[tile.tensor].element_bytes;
  }
  trace::note({"batch", index});
  trace::note({"bytes", bytes});
  trace::note({"frame_bytes", frame.bytes.size()});
}

/// How far two halves are the same, asked for ascending ranges below `end`.
class EqualRun {
 public:
  EqualRun(ByteSpan before, ByteSpan after, std::size_t end) : before_(before), after_(after), end_(end) {}
  bool covers(std::size_t begin, std::size_t end) {
    if (begin >= same_until_) extend(begin);
    return end <= same_until_;
  }

 private:
  void extend(std::size_t from) {
    while (from < end_) {
      const std::size_t bytes = std::min(kCompareBytes, end_ - from);
      if (std::memcmp(before_.data() + from, after_.data() + from, bytes) != 0) break;
      from += bytes;
    }
    same_until_ = from;
  }

  const ByteSpan before_;
  const ByteSpan after_;
  const std::size_t end_;
  std::size_t same_until_ = 0;
};

}  // namespace

void BatchEncoder::reset_panels(std::uint32_t panels, std::uint32_t element_bytes) {
  if (element_bytes > panel_element_bytes_) {
    panels_.clear();
    panel_element_bytes_ = element_bytes;
  }
  const std::size_t size = kPositionBytes + (kTileElementsMax + kSlack) * panel_element_bytes_;
  while (panels_.size() < panels) {
    PanelBuffer buffer;
    const std::size_t skew = panels_.size() % 32 * kPanelSkewBytes;
    buffer.memory.reset(new std::byte[size + skew]);  // not zeroed: only what is written is ever touched
    buffer.out.positions = reinterpret_cast<std::uint16_t*>(buffer.memory.get() + skew);
    buffer.out.diffs = buffer.memory.get() + skew + kPositionBytes;
    panels_.push_back(std::move(buffer));
  }
  for (std::uint32_t p = 0; p < panels; ++p) {
    panels_[p].out.count = 0;
    panels_[p].out.digest_change = 0;
  }
}

void BatchEncoder::scan_flat_tile(const Strip& strip, std::uint32_t panel, ByteSpan before, ByteSpan after) {
  const TileShape shape = strip.shape(panel);
  const std::byte* const a = before.data() + strip.offset(panel);
  const std::byte* const b = after.data() + strip.offset(panel);
  ScanOutput& out = panels_[panel].out;
  kernels_.scan[shape.width_log2()][shape.is_float](a, b, shape.elements(), 0, 0, out);
  if (shape.rows == 1 || shape.row_bytes() % 8 == 0) return;
  const RowGeometry geometry(shape, shape.row_bytes());
  switch (shape.element_bytes) {
    case 1: out.digest_change = digest_change_at<std::uint8_t>(kernels_, geometry, out, a, b); break;
    case 2: out.digest_change = digest_change_at<std::uint16_t>(kernels_, geometry, out, a, b); break;
    default: out.digest_change = digest_change_at<std::uint32_t>(kernels_, geometry, out, a, b);
  }
}

void BatchEncoder::scan_strip(const Strip& strip, ByteSpan before, ByteSpan after) {
  reset_panels(strip.panels, strip.tensor->element_bytes);
  const std::size_t stride = strip.tensor->row_bytes();
  const bool whole_rows = stride == strip.shape(0).row_bytes();
  if (strip.rows == 1 || (whole_rows && (stride % 8 == 0 || stride < kShortRowBytes))) {
    for (std::uint32_t p = 0; p < strip.panels; ++p) scan_flat_tile(strip, p, before, after);
    return;
  }
  const ScanFn scan = kernels_.scan[strip.shape(0).width_log2()][strip.shape(0).is_float];
  for (std::uint32_t r = 0; r < strip.rows; ++r) {
    for (std::uint32_t p = 0; p < strip.panels; ++p) {
      const TileShape shape = strip.shape(p);
      const std::size_t at = strip.offset(p) + r * stride;
      scan(before.data() + at, after.data() + at, shape.cols, r * shape.cols, std::uint64_t{r} * shape.words_per_row(),
           panels_[p].out);
    }
  }
}

void BatchEncoder::encode_strip(const Strip& strip, ByteSpan before, ByteSpan after, std::span<std::uint64_t> digests) {
  scan_strip(strip, before, after);
  for (std::uint32_t p = 0; p < strip.panels; ++p) {
    const ScanOutput& out = panels_[p].out;
    if (out.count == 0) continue;
    TileRecord record;
    record.tile = strip.first_tile + p;
    record.digest_after = digests[record.tile] += out.digest_change;
    const std::size_t payload_begin = builder_.payloads().size();
    encode_payload(kernels_, strip.shape(p), {out.positions, out.diffs, out.count}, after.data() + strip.offset(p),
                   strip.tensor->row_bytes(), form_, scratch_, record, builder_.payloads());
    CodecStats& stats = stats_[static_cast<unsigned>(record.codec)];
    ++stats.tiles;
    stats.changed += record.changed;
    stats.bytes += builder_.payloads().size() - payload_begin;
    builder_.add(record);
  }
}

Frame BatchEncoder::encode(const Batch& batch, ByteSpan before, ByteSpan after, std::span<std::uint64_t> digests) {
  EqualRun equal(before, after, end_of_first_row(layout_, batch.end - 1));
  for_each_strip(layout_, batch.first, batch.end, [&](const Strip& strip) {
    const auto begin = static_cast<std::size_t>(strip.offset(0));
    const std::size_t end = end_of(strip);
    if (end - begin <= kSmallStripBytes && equal.covers(begin, end)) return;
    encode_strip(strip, before, after, digests);
  });
  return builder_.finish();
}

// ---- all batches of a layout -----------------------------------------------------------------------------------

struct Encoding::Impl {
  const Kernels& kernels;
  const Layout& layout;
  const std::span<const Batch> batches;
  const ByteSpan before;
  const ByteSpan after;
  const ValueForm form;
  std::vector<std::uint64_t> digests;
  std::vector<Frame> frames;  // by batch
  std::vector<std::uint8_t> done;
  std::size_t left;
  std::vector<std::unique_ptr<BatchEncoder>> encoders;  // by worker, who makes its own: its memory is near it
  std::span<const std::uint32_t> homes;                 // by batch; empty: none

  void run(std::span<const std::uint32_t> which, ThreadPool& pool) {
    std::vector<std::uint32_t> fresh;
    fresh.reserve(which.size());
    for (const std::uint32_t b : which) {
      if (std::exchange(done[b], std::uint8_t{1}) == 0) fresh.push_back(b);
    }
    if (encoders.size() < pool.size()) encoders.resize(pool.size());
    std::vector<std::uint32_t> fresh_homes;
    if (!homes.empty()) {
      for (const std::uint32_t b : fresh) fresh_homes.push_back(homes[b]);
    }
    const auto encode_one = [&](std::uint64_t i, unsigned worker) {
      if (encoders[worker] == nullptr) encoders[worker].reset(new BatchEncoder(kernels, layout, form));
      const std::uint32_t b = fresh[i];
      frames[b] = encoders[worker]->encode(batches[b], before, after, digests);
      note_batch(layout, batches[b], b, frames[b]);
    };
    pool.run(fresh.size(), encode_one, fresh_homes);
    left -= fresh.size();
  }

  Delta finish(const EncodeRequest& request, ThreadPool& pool) {
    std::vector<std::uint32_t> rest(batches.size());
    std::iota(rest.begin(), rest.end(), 0u);
    run(rest, pool);
    const trace::Span span("finish");
    Delta delta;
    delta.layout = layout.digest();
    delta.from = request.from;
    delta.to = request.to;
    delta.from_root = request.from_root;
    delta.to_root = root_digest(digests);
    take_frames(frames, delta);
    for (const auto& encoder : encoders) {
      if (encoder != nullptr) add_to_stats(encoder->stats(), delta.stats);
    }
    return delta;
  }

  static std::unique_ptr<Impl> make(const Kernels& kernels, const Layout& layout, std::span<const Batch> batches,
                                    ByteSpan before, ByteSpan after, std::vector<std::uint64_t> digests,
                                    ValueForm form) {
    const std::size_t n = batches.size();
    return std::unique_ptr<Impl>(new Impl{kernels,
                                          layout,
                                          batches,
                                          before,
                                          after,
                                          form,
                                          std::move(digests),
                                          std::vector<Frame>(n),
                                          std::vector<std::uint8_t>(n, 0),
                                          n,
                                          {},
                                          {}});
  }
};

Encoding::Encoding(const Layout& layout, std::span<const Batch> batches, ByteSpan before, ByteSpan after,
                   std::vector<std::uint64_t> digests, ValueForm form, std::span<const std::uint32_t> batch_homes)
    : impl_(Impl::make(active_kernels(), layout, batches, before, after, std::move(digests), form)) {
  impl_->homes = batch_homes;
}
Encoding::~Encoding() = default;

void Encoding::run(std::span<const std::uint32_t> which, ThreadPool& pool) {
  impl_->run(which, pool);
}
std::size_t Encoding::left() const noexcept {
  return impl_->left;
}
Delta Encoding::finish(const EncodeRequest& request, ThreadPool& pool) {
  return impl_->finish(request, pool);
}
std::vector<std::uint64_t> Encoding::take_digests() noexcept {
  return std::move(impl_->digests);
}

Delta encode_with(const Kernels& kernels, const Layout& layout, ByteSpan before, ByteSpan after,
                  std::span<std::uint64_t> digests, const EncodeRequest& request, ThreadPool& pool) {
  const std::vector<Batch> batches = make_batches(layout);
  const auto encoding =
      Encoding::Impl::make(kernels, layout, batches, before, after, {digests.begin(), digests.end()}, request.form);
  Delta delta = encoding->finish(request, pool);
  std::copy(encoding->digests.begin(), encoding->digests.end(), digests.begin());
  return delta;
}

Delta encode(const Layout& layout, ByteSpan before, ByteSpan after, std::span<std::uint64_t> digests,
             const EncodeRequest& request, ThreadPool& pool) {
  return encode_with(active_kernels(), layout, before, after, digests, request, pool);
}

}  // namespace deltasync::delta
