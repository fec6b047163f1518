#include "delta/encode.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "base/form_choice.hpp"
#include "base/racing_reads.hpp"
#include "base/trace.hpp"
#include "delta/changed_words.hpp"
#include "delta/mix.hpp"
#include "format/tiling.hpp"

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
  const Tile tile = tile_of(layout, index);
  const Tensor& tensor = layout.tensors()[tile.tensor];
  return static_cast<std::size_t>(tensor.offset + tile.rect.row * tensor.row_bytes() +
                                  (tile.rect.col + tile.rect.cols) * tensor.element_bytes);
}

/// For the timeline: what a batch read of one half, and what became of it.
void note_batch(const Layout& layout, const Batch& batch, std::uint32_t index, const trace::Arg& became) {
  if (!trace::on()) return;
  std::uint64_t bytes = 0;
  for (std::uint64_t t = batch.first; t < batch.end; ++t) {
    const Tile tile = tile_of(layout, t);
    bytes += tile.rect.elements() * layout.tensors()[tile.tensor].element_bytes;
  }
  trace::note({"batch", index});
  trace::note({"bytes", bytes});
  trace::note(became);
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

/// Of the active kernels' scans.
FormChoice& scan_choice() {
  static const auto& forms = active_kernels().scans;
  static FormChoice choice(forms[1].of[0][0] != nullptr ? 2 : 1, 0);
  return choice;
}

/// A strip's scan in this form; in the first, if these kernels, which need not be the active ones, do not have it.
ScanFn scan_of(const Kernels& kernels, const Strip& strip, unsigned form) {
  const TileShape shape = strip.shape(0);
  const ScanFn scan = kernels.scans[form].of[shape.width_log2()][shape.is_float];
  return scan != nullptr ? scan : kernels.scans[0].of[shape.width_log2()][shape.is_float];
}

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

void BatchEncoder::scan_flat_tile(const Strip& strip, std::uint32_t panel, ScanFn scan, ByteSpan before,
                                  ByteSpan after) {
  const TileShape shape = strip.shape(panel);
  const std::byte* const a = before.data() + strip.offset(panel);
  const std::byte* const b = after.data() + strip.offset(panel);
  ScanOutput& out = panels_[panel].out;
  scan(a, b, shape.elements(), 0, 0, out);
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
  scan_choice().run(end_of(strip) - static_cast<std::size_t>(strip.offset(0)), true,
                    [&](unsigned form) { scan_strip(strip, scan_of(kernels_, strip, form), before, after); });
}

void BatchEncoder::scan_strip(const Strip& strip, ScanFn scan, ByteSpan before, ByteSpan after) {
  const std::size_t stride = strip.tensor->row_bytes();
  const bool whole_rows = stride == strip.shape(0).row_bytes();
  if (strip.rows == 1 || (whole_rows && (stride % 8 == 0 || stride < kShortRowBytes))) {
    for (std::uint32_t p = 0; p < strip.panels; ++p) scan_flat_tile(strip, p, scan, before, after);
    return;
  }
  for (std::uint32_t r = 0; r < strip.rows; ++r) {
    for (std::uint32_t p = 0; p < strip.panels; ++p) {
      const TileShape shape = strip.shape(p);
      const std::size_t at = strip.offset(p) + r * stride;
      scan(before.data() + at, after.data() + at, shape.cols, r * shape.cols, std::uint64_t{r} * shape.words_per_row(),
           panels_[p].out);
    }
  }
}

void BatchEncoder::encode_strip(const Strip& strip, ByteSpan before, ByteSpan after, const Batch& batch,
                                EncodedBatch& to) {
  scan_strip(strip, before, after);
  for (std::uint32_t p = 0; p < strip.panels; ++p) {
    const ScanOutput& out = panels_[p].out;
    if (out.count == 0) continue;
    TileRecord record;
    record.tile = strip.first_tile + p;
    record.digest_after = to.digests[static_cast<std::size_t>(record.tile - batch.first)] += out.digest_change;
    const std::size_t payload_begin = builder_.payloads().size();
    encode_payload(kernels_, strip.shape(p), {out.positions, out.diffs, out.count}, after.data() + strip.offset(p),
                   strip.tensor->row_bytes(), form_, scratch_, record, builder_.payloads());
    CodecStats& stats = to.stats[static_cast<unsigned>(record.codec)];
    ++stats.tiles;
    stats.changed += record.changed;
    stats.bytes += builder_.payloads().size() - payload_begin;
    builder_.add(record);
  }
}

EncodedBatch BatchEncoder::encode(const Batch& batch, ByteSpan before, ByteSpan after,
                                  std::span<const std::uint64_t> digests) {
  EncodedBatch made;
  const auto of_batch =
      digests.subspan(static_cast<std::size_t>(batch.first), static_cast<std::size_t>(batch.end - batch.first));
  made.digests.assign(of_batch.begin(), of_batch.end());
  EqualRun equal(before, after, end_of_first_row(layout_, batch.end - 1));
  for_each_strip(layout_, batch.first, batch.end, [&](const Strip& strip) {
    const auto begin = static_cast<std::size_t>(strip.offset(0));
    const std::size_t end = end_of(strip);
    if (end - begin <= kSmallStripBytes && equal.covers(begin, end)) return;
    encode_strip(strip, before, after, batch, made);
  });
  made.frame = builder_.finish();
  return made;
}

// ---- all batches of a layout -----------------------------------------------------------------------------------

struct Encoding::Impl {
  Impl(const Kernels& k, const Layout& l, std::span<const Batch> all, ByteSpan from, ByteSpan to,
       std::vector<std::uint64_t> of_before, ValueForm f)
      : kernels(k),
        layout(l),
        batches(all),
        before(from),
        after(to),
        form(f),
        digests_before(std::move(of_before)),
        digests_after(digests_before.size()),
        results(all.size()) {}
  ~Impl() {
    for (const auto& result : results) {
      if (EncodedBatch* const made = result.load(); made != &taken()) delete made;
    }
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  const Kernels& kernels;
  const Layout& layout;
  const std::span<const Batch> batches;
  const ByteSpan before;
  const ByteSpan after;
  const ValueForm form;
  const std::vector<std::uint64_t> digests_before;
  std::vector<std::uint64_t> digests_after;  // finish()'s
  // By batch: null as long as it is not there. Who makes one puts it there unless it was taken meanwhile, so nobody
  // waits for anybody.
  std::vector<std::atomic<EncodedBatch*>> results;

  /// Stands for one that is finish()'s.
  static EncodedBatch& taken() {
    static EncodedBatch none;
    return none;
  }

  /// False: somebody else was faster with this batch.
  using Take = std::function<bool(std::uint32_t batch, EncodedBatch made)>;
  /// Encodes these batches on the pool. `overlapped`: by the time that one is encoded nobody may want it any more, and
  /// the halves may be written.
  void encode_all(std::span<const std::uint32_t> which, bool overlapped, ThreadPool& pool, const Take& take) const {
    std::vector<std::unique_ptr<BatchEncoder>> encoders(pool.size());  // each worker makes its own: its memory is near
    const auto encode_one = [&](std::uint64_t i, unsigned worker) {
      if (encoders[worker] == nullptr) encoders[worker].reset(new BatchEncoder(kernels, layout, form));
      const std::uint32_t b = which[i];
      EncodedBatch made;
      {
        std::optional<RacingReads> racing;
        if (overlapped) racing.emplace();
        made = encoders[worker]->encode(batches[b], before, after, digests_before);
      }
      const trace::Arg frame_bytes("frame_bytes", made.frame.bytes.size());
      const bool kept = take(b, std::move(made));
      note_batch(layout, batches[b], b, kept ? frame_bytes : trace::Arg("discarded", 1));
    };
    pool.run(which.size(), encode_one);
  }

  std::size_t run_overlapped(std::span<const std::uint32_t> which, ThreadPool& pool) {
    std::vector<std::uint32_t> fresh;
    fresh.reserve(which.size());
    for (const std::uint32_t b : which) {
      if (results[b].load(std::memory_order_acquire) == nullptr) fresh.push_back(b);
    }
    std::atomic<std::size_t> put{0};
    const auto offer = [&](std::uint32_t b, EncodedBatch made) {
      auto own = std::make_unique<EncodedBatch>(std::move(made));
      EncodedBatch* none = nullptr;
      if (!results[b].compare_exchange_strong(none, own.get(), std::memory_order_acq_rel)) {
        return false;
      }
      static_cast<void>(own.release());
      ++put;
      return true;
    };
    encode_all(fresh, true, pool, offer);
    return put;
  }

  Delta finish(const EncodeRequest& request, ThreadPool& pool, std::size_t& rest_count) {
    std::vector<EncodedBatch> all(batches.size());
    std::vector<std::uint32_t> rest;
    for (std::uint32_t b = 0; b < batches.size(); ++b) {
      const std::unique_ptr<EncodedBatch> made(results[b].exchange(&taken(), std::memory_order_acq_rel));
      if (made == nullptr) {
        rest.push_back(b);
      } else {
        all[b] = std::move(*made);
      }
    }
    rest_count = rest.size();
    encode_all(rest, false, pool, [&](std::uint32_t b, EncodedBatch made) {
      all[b] = std::move(made);
      return true;
    });

    const trace::Span span("finish");
    Delta delta;
    std::vector<Frame> frames(batches.size());
    for (std::size_t b = 0; b < batches.size(); ++b) {
      std::copy(all[b].digests.begin(), all[b].digests.end(),
                digests_after.begin() + static_cast<std::ptrdiff_t>(batches[b].first));
      add_to_stats(all[b].stats, delta.stats);
      frames[b] = std::move(all[b].frame);
    }
    delta.layout = layout.digest();
    delta.from = request.from;
    delta.to = request.to;
    delta.from_root = request.from_root;
    delta.to_root = root_digest(digests_after);
    take_frames(frames, delta);
    return delta;
  }
};

Encoding::Encoding(const Layout& layout, std::span<const Batch> batches, ByteSpan before, ByteSpan after,
                   std::vector<std::uint64_t> digests, ValueForm form)
    : impl_(std::make_unique<Impl>(active_kernels(), layout, batches, before, after, std::move(digests), form)) {}
Encoding::~Encoding() = default;

std::size_t Encoding::run_overlapped(std::span<const std::uint32_t> which, ThreadPool& pool) {
  return impl_->run_overlapped(which, pool);
}
Delta Encoding::finish(const EncodeRequest& request, ThreadPool& pool) {
  return impl_->finish(request, pool, rest_);
}
std::vector<std::uint64_t> Encoding::take_digests() noexcept {
  return std::move(impl_->digests_after);
}

Delta encode_with(const Kernels& kernels, const Layout& layout, ByteSpan before, ByteSpan after,
                  std::span<std::uint64_t> digests, const EncodeRequest& request, ThreadPool& pool) {
  const std::vector<Batch> batches = make_batches(layout);
  Encoding::Impl encoding(kernels, layout, batches, before, after, {digests.begin(), digests.end()}, request.form);
  std::size_t rest = 0;
  Delta delta = encoding.finish(request, pool, rest);
  std::copy(encoding.digests_after.begin(), encoding.digests_after.end(), digests.begin());
  return delta;
}

Delta encode(const Layout& layout, ByteSpan before, ByteSpan after, std::span<std::uint64_t> digests,
             const EncodeRequest& request, ThreadPool& pool) {
  return encode_with(active_kernels(), layout, before, after, digests, request, pool);
}

}  // namespace deltasync::delta
