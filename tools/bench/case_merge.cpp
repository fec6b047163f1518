// bench merge: a chain of steps as one delta, as an agent makes it for a receiver that is several versions late.
#include <algorithm>
#include <atomic>

#include "bench/bench.hpp"
#include "bench/limits.hpp"
#include "bench/synth.hpp"
#include "delta/frame.hpp"
#include "format/tiling.hpp"

namespace deltasync::bench {
namespace {

/// The version before the steps, the one after them, and the deltas of the steps between.
struct History {
  LayoutPtr layout;
  Buffer first;
  Buffer last;
  std::vector<std::uint64_t> first_digests;
  std::vector<delta::Delta> steps;

  ByteSpan before() const { return first.span().first(static_cast<std::size_t>(layout->half_bytes())); }
  ByteSpan after() const { return last.span().first(static_cast<std::size_t>(layout->half_bytes())); }
};

Result<History> make_history(const Options& options, ThreadPool& pool) {
  DS_ASSIGN(const LayoutPtr layout, decoder_layout(static_cast<std::uint64_t>(options.model_gib * 0x1p30)));
  DS_ASSIGN(Buffer first, Buffer::allocate(layout->half_bytes(), pool));
  DS_ASSIGN(Buffer last, Buffer::allocate(layout->half_bytes(), pool));
  DS_ASSIGN(Buffer before, Buffer::allocate(layout->half_bytes(), pool));
  History history{layout, std::move(first), std::move(last), {}, {}};
  SyntheticModel model(history.layout, options.density, options.seed, pool);
  model.write_half(history.first.span());
  model.write_half(history.last.span());
  history.first_digests.resize(static_cast<std::size_t>(history.layout->tile_count()));
  delta::half_digests(*history.layout, history.before(), history.first_digests, pool);
  std::vector<std::uint64_t> digests = history.first_digests;
  for (std::uint64_t number = 1; number <= options.steps; ++number) {
    std::swap(before, history.last);
    model.step();
    model.write_half(history.last.span());
    const delta::EncodeRequest request{{1, number}, {1, number + 1}, delta::root_digest(digests), {}};
    history.steps.push_back(delta::encode(*history.layout, before.span(), history.after(), digests, request, pool));
  }
  return history;
}

/// Applies `delta` to the first version and compares with the last.
Status verify(History& history, const delta::Delta& delta, ThreadPool& pool) {
  const Layout& layout = *history.layout;
  std::atomic<bool> wrong{false};
  pool.run(delta.frames.size(), [&](std::uint64_t i, unsigned) {
    const auto records = delta::parse_frame(layout, delta.frames[i].bytes);
    if (!records) {
      wrong = true;
      return;
    }
    for (const auto& record : *records) {
      const Tile tile = tile_of(layout, record.tile);
      const Tensor& tensor = layout.tensors()[tile.tensor];
      const delta::TensorMemory memory{history.first.span().data() + tensor.offset,
                                       static_cast<std::size_t>(tensor.row_bytes())};
      if (!delta::apply_tile(layout, record, delta::tile_address(memory, tile, tensor.element_bytes), memory.row_stride,
                             history.first_digests[record.tile])) {
        wrong = true;
      }
    }
  });
  if (wrong || !std::equal(history.before().begin(), history.before().end(), history.after().begin())) {
    return Error(Errc::corrupt, "the merged delta does not lead to the last version");
  }
  return {};
}

}  // namespace

Result<Json> run_merge(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(History history, make_history(options, pool));
  const Layout& layout = *history.layout;
  std::vector<const delta::Delta*> chain;
  std::uint64_t chain_bytes = 0;
  std::uint64_t chain_changed = 0;
  for (const delta::Delta& step : history.steps) {
    chain.push_back(&step);
    chain_bytes += step.frame_bytes;
    chain_changed += step.changed;
  }
  std::atomic<std::uint64_t> target_tiles{0};
  delta::MergeOptions merging;
  merging.read_target = [&](std::span<const std::uint64_t> tiles, std::byte* out) {
    for (const std::uint64_t tile : tiles) out = delta::copy_tile(layout, history.after(), tile, out);
    target_tiles += tiles.size();
    return true;
  };
  double merge_s = 1e300;
  std::optional<delta::Delta> merged;
  for (unsigned round = 0; round < rounds_of(options); ++round) {
    merged.reset();
    target_tiles = 0;
    const Stopwatch watch;
    DS_ASSIGN(merged, delta::merge(layout, chain, merging, pool));
    merge_s = std::min(merge_s, watch.seconds());
    if (!merged) return Error(Errc::internal, "the chain cannot be merged");
  }
  std::vector<std::uint64_t> digests = history.first_digests;
  const delta::EncodeRequest request{{1, 1}, {1, options.steps + 1}, delta::root_digest(digests), {}};
  const delta::Delta direct = delta::encode(layout, history.before(), history.after(), digests, request, pool);
  DS_TRY(verify(history, *merged, pool));
  const auto elements = static_cast<double>(layout.elements());
  return Json{{"steps", options.steps},
              {"density", static_cast<double>(history.steps.front().changed) / elements},
              {"merged_density", static_cast<double>(merged->changed) / elements},
              {"chain_bytes", chain_bytes},
              {"merged_bytes", merged->frame_bytes},
              {"direct_bytes", direct.frame_bytes},
              {"merged_to_chain", static_cast<double>(merged->frame_bytes) / static_cast<double>(chain_bytes)},
              {"merge_s", merge_s},
              {"merge_gbps", static_cast<double>(layout.model_bytes()) / merge_s / 1e9},
              {"ns_per_change", merge_s * 1e9 / static_cast<double>(chain_changed)},
              {"target_tiles", target_tiles.load()},
              {"verified", true},
              {"isa", delta::isa_name()}};
}

}  // namespace deltasync::bench
