// Chains of deltas as one (delta_format.md "Merged deltas").
#include <algorithm>
#include <memory>
#include <utility>

#include "delta/codec.hpp"
#include "delta/frame.hpp"
#include "delta/make_frames.hpp"
#include "delta/merge_tile.hpp"

namespace deltasync::delta {

namespace {

using Chain = std::span<const Delta* const>;

/// A record of the batch at hand; those of one tile stand together, the oldest first.
struct Link {
  const TileRecord* record = nullptr;
  std::size_t step = 0;
};

bool is_before(const Link& a, const Link& b) noexcept {
  return a.record->tile != b.record->tile ? a.record->tile < b.record->tile : a.step < b.step;
}

/// Whether the records of a tile leave some elements as differences and others as values, as far as their codecs tell.
bool may_mix(std::span<const Link> links) noexcept {
  bool differences = false;
  bool values = false;
  for (const Link& link : links) {
    const CodecTraits& codec = traits(link.record->codec);
    if (codec.whole_tile) return false;
    (codec.differences ? differences : values) = true;
  }
  return differences && values;
}

Error not_merged(Codec codec) {
  return {Errc::unsupported, std::string("merging a tile in ") + to_string(codec)};
}

/// Merges batches of tiles. One per worker, since it keeps the working memory.
class BatchMerger {
 public:
  BatchMerger(const Layout& layout, Chain chain, const MergeOptions& options)
      : layout_(layout), chain_(chain), options_(options), tiles_(active_kernels()) {}

  /// The frame of one batch, without bytes if nothing changed in the end; nothing if a frame cannot express that.
  Result<std::optional<Frame>> merge(const Batch& batch);
  const CodecStats (&stats() const noexcept)[kCodecEnd] { return stats_; }

 private:
  Status read_frames(const Batch& batch);
  Result<std::optional<Frame>> copy_frame();
  Status copy_tile(const TileRecord& record);
  /// False: one record cannot express it.
  Result<bool> merge_tile(std::span<const Link> links, const std::byte* target);
  /// Reads the tiles that probably need the target, all at once; mixed_target_ is empty if they are not to be had.
  void read_mixed();
  bool read_one(std::uint64_t tile);
  template <class Fn>
  void for_each_tile(Fn&& fn) const;
  void count(TileRecord& record, std::size_t payload_begin);

  const Layout& layout_;
  const Chain chain_;
  const MergeOptions& options_;
  TileMerger tiles_;
  FrameBuilder builder_;
  CodecStats stats_[kCodecEnd];

  // The batch at hand.
  std::vector<const Frame*> frames_;
  std::vector<std::vector<TileRecord>> records_;
  std::vector<Link> links_;
  std::vector<std::uint64_t> mixed_;     ///< tiles
  std::vector<std::byte> mixed_target_;  ///< their bytes
  std::vector<std::byte> one_target_;
};

/// The frames of the chain in the batch, their records in links_.
Status BatchMerger::read_frames(const Batch& batch) {
  frames_.clear();
  records_.clear();
  links_.clear();
  for (std::size_t step = 0; step < chain_.size(); ++step) {
    const std::vector<Frame>& frames = chain_[step]->frames;
    auto frame = std::lower_bound(frames.begin(), frames.end(), batch.first,
                                  [](const Frame& f, std::uint64_t tile) { return f.last_tile < tile; });
    std::uint64_t free_from = batch.first;
    for (; frame != frames.end() && frame->first_tile < batch.end; ++frame) {
      auto parsed = parse_frame(layout_, frame->bytes);
      if (!parsed) return std::move(parsed).error().with_context("delta " + std::to_string(step));
      if (parsed->front().tile < free_from || parsed->back().tile >= batch.end) {
        return Error(Errc::corrupt, "delta " + std::to_string(step) + ": a frame that is not of one batch");
      }
      free_from = parsed->back().tile + 1;
      frames_.push_back(&*frame);
      records_.push_back(std::move(*parsed));
      for (const TileRecord& record : records_.back()) links_.push_back({&record, step});
    }
  }
  return {};
}

template <class Fn>
void BatchMerger::for_each_tile(Fn&& fn) const {
  for (std::size_t i = 0; i < links_.size();) {
    std::size_t end = i + 1;
    while (end < links_.size() && links_[end].record->tile == links_[i].record->tile) ++end;
    if (!fn(std::span<const Link>(links_).subspan(i, end - i))) return;
    i = end;
  }
}

void BatchMerger::read_mixed() {
  mixed_.clear();
  mixed_target_.clear();
  std::size_t bytes = 0;
  for_each_tile([&](std::span<const Link> links) {
    if (may_mix(links)) {
      mixed_.push_back(links.front().record->tile);
      bytes += tile_shape(layout_, mixed_.back()).raw_bytes();
    }
    return true;
  });
  if (mixed_.empty() || !options_.read_target) return;
  mixed_target_.resize(bytes);
  if (!options_.read_target(mixed_, mixed_target_.data())) mixed_target_.clear();
}

bool BatchMerger::read_one(std::uint64_t tile) {
  if (!options_.read_target) return false;
  one_target_.resize(tile_shape(layout_, tile).raw_bytes());
  return options_.read_target({&tile, 1}, one_target_.data());
}

void BatchMerger::count(TileRecord& record, std::size_t payload_begin) {
  record.payload = ByteSpan(builder_.payloads()).subspan(payload_begin);
  add_to_stats(record, stats_);
  builder_.add(record);
}

Status BatchMerger::copy_tile(const TileRecord& record) {
  if (!traits(record.codec).kept()) return not_merged(record.codec);
  TileRecord copy = record;
  const std::size_t begin = builder_.payloads().size();
  builder_.payloads().insert(builder_.payloads().end(), record.payload.begin(), record.payload.end());
  count(copy, begin);
  return {};
}

Result<std::optional<Frame>> BatchMerger::copy_frame() {
  for (const TileRecord& record : records_.front()) {
    if (!traits(record.codec).kept()) return not_merged(record.codec).with_context(tile_name(layout_, record.tile));
    add_to_stats(record, stats_);
  }
  return std::optional<Frame>(*frames_.front());
}

Result<bool> BatchMerger::merge_tile(std::span<const Link> links, const std::byte* target) {
  TileRecord out;
  out.tile = links.front().record->tile;
  out.digest_after = links.back().record->digest_after;
  const std::size_t begin = builder_.payloads().size();
  for (;;) {
    tiles_.begin(tile_shape(layout_, out.tile));
    for (const Link& link : links) DS_TRY(tiles_.add(*link.record));
    DS_ASSIGN(const auto outcome, tiles_.finish(target, out, builder_.payloads()));
    if (outcome == TileMerger::Outcome::unchanged) return true;
    if (outcome == TileMerger::Outcome::changed) break;
    // Seldom: in the one codec that the records have, the tile is longer than raw.
    if (!read_one(out.tile)) return false;
    target = one_target_.data();
  }
  count(out, begin);
  return true;
}

Result<std::optional<Frame>> BatchMerger::merge(const Batch& batch) {
  DS_TRY(read_frames(batch));
  if (frames_.size() == 1) return copy_frame();
  std::sort(links_.begin(), links_.end(), is_before);
  read_mixed();
  Status status;
  bool possible = true;
  std::size_t target_at = 0;
  auto mixed = mixed_.begin();
  for_each_tile([&](std::span<const Link> links) {
    const std::uint64_t tile = links.front().record->tile;
    const std::byte* target = nullptr;
    if (mixed != mixed_.end() && *mixed == tile) {
      ++mixed;
      if (!mixed_target_.empty()) target = mixed_target_.data() + target_at;
      target_at += tile_shape(layout_, tile).raw_bytes();
    }
    if (links.size() == 1) {
      status = copy_tile(*links.front().record);
    } else if (auto merged = merge_tile(links, target)) {
      possible = *merged;
    } else {
      status = std::move(merged).error();
    }
    if (!status) status = std::move(status).error().with_context(tile_name(layout_, tile));
    return status.ok() && possible;
  });
  Frame frame = builder_.finish();
  DS_TRY(status);
  if (!possible) return std::optional<Frame>();
  return std::optional<Frame>(std::move(frame));
}

Status check_chain(const Layout& layout, Chain chain) {
  if (chain.empty()) return Error(Errc::invalid_argument, "merge: no deltas");
  for (std::size_t i = 0; i < chain.size(); ++i) {
    if (chain[i]->layout != layout.digest()) {
      return Error(Errc::layout_mismatch, "merge: delta " + std::to_string(i) + " is of another layout");
    }
    if (i > 0 && (chain[i - 1]->to != chain[i]->from || chain[i - 1]->to_root != chain[i]->from_root)) {
      return Error(Errc::invalid_argument, "merge: delta " + std::to_string(i) + " begins where none before it ends");
    }
  }
  return {};
}

}  // namespace

Result<std::optional<Delta>> merge(const Layout& layout, std::span<const Delta* const> chain,
                                   const MergeOptions& options, ThreadPool& pool) {
  DS_TRY(check_chain(layout, chain));
  const std::vector<Batch> batches = make_batches(layout);
  DS_ASSIGN(auto merged, make_frames(
                             "merge", batches.size(), options.cancel, pool,
                             [&] { return std::make_unique<BatchMerger>(layout, chain, options); },
                             [&](BatchMerger& merger, std::uint64_t i) { return merger.merge(batches[i]); }));
  if (merged) {
    merged->layout = layout.digest();
    merged->from = chain.front()->from;
    merged->to = chain.back()->to;
    merged->from_root = chain.front()->from_root;
    merged->to_root = chain.back()->to_root;
  }
  return merged;
}

}  // namespace deltasync::delta
