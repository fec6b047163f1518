// bench packed: whole tiles in byte planes, as full transfers over slow links have them: how much smaller, how fast
// they are made and undone, and the link rate from which on that is the limit. And what zstd would add to a delta's
// frames.
#include <zstd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bench/halves.hpp"
#include "bench/limits.hpp"
#include "deltasync/layout.hpp"
#include "format/tiling.hpp"

namespace deltasync::bench {
namespace {

/// What a run over all tiles took, the best of the rounds.
struct PackedRun {
  std::uint64_t bytes = 0;  ///< of the frames
  double pack_s = 1e300;
  double unpack_s = 1e300;
};

/// Packs every batch of the half, and unpacks it into `to`.
Status run_round(const Layout& layout, ByteSpan half, std::span<const std::uint64_t> digests, std::span<std::byte> to,
                 ThreadPool& pool, PackedRun& best) {
  const std::vector<delta::Batch> batches = delta::make_batches(layout);
  std::vector<delta::Frame> frames(batches.size());
  const Stopwatch packing;
  pool.run(batches.size(), [&](std::uint64_t i, unsigned) {
    std::vector<std::uint64_t> tiles;
    for (std::uint64_t t = batches[i].first; t < batches[i].end; ++t) tiles.push_back(t);
    frames[i] = delta::packed_frame(layout, half, tiles, digests);
  });
  best.pack_s = std::min(best.pack_s, packing.seconds());
  best.bytes = 0;
  for (const delta::Frame& frame : frames) best.bytes += frame.bytes.size();
  std::vector<Status> statuses(frames.size());
  const Stopwatch unpacking;
  pool.run(frames.size(), [&](std::uint64_t i, unsigned) {
    const auto records = delta::parse_frame(layout, frames[i].bytes);
    if (!records) {
      statuses[i] = records.error();
      return;
    }
    for (const delta::TileRecord& record : *records) {
      const Tile tile = tile_of(layout, record.tile);
      const Tensor& tensor = layout.tensors()[tile.tensor];
      const auto stride = static_cast<std::size_t>(tensor.row_bytes());
      std::byte* const first = delta::tile_address({to.data() + tensor.offset, stride}, tile, tensor.element_bytes);
      if (const auto digest = delta::apply_tile(layout, record, first, stride, 0); !digest)
        statuses[i] = digest.error();
    }
  });
  best.unpack_s = std::min(best.unpack_s, unpacking.seconds());
  for (const Status& status : statuses) DS_TRY(status);
  return {};
}

Result<Json> measure(const Options& options, const Layout& layout, ByteSpan half,
                     const std::vector<std::uint64_t>& digests, ThreadPool& pool) {
  DS_ASSIGN(const Buffer memory, Buffer::allocate(layout.half_bytes(), pool));
  PackedRun best;
  for (unsigned round = 0; round < rounds_of(options); ++round) {
    DS_TRY(run_round(layout, half, digests, memory.span(), pool, best));
  }
  const auto bytes = static_cast<double>(layout.model_bytes());
  const double pack = bytes / best.pack_s / 1e9;
  const double unpack = bytes / best.unpack_s / 1e9;
  return Json{{"model_bytes", layout.model_bytes()},
              {"packed_bytes", best.bytes},
              {"share", static_cast<double>(best.bytes) / bytes},
              {"pack_gbps_per_thread", pack / options.threads},
              {"unpack_gbps_per_thread", unpack / options.threads},
              {"break_even_link_gbit", 8 * std::min(pack, unpack)}};
}

/// Level 1 over the frames of a delta, each by itself: its bytes against theirs.
Json zstd_over(const delta::Delta& delta) {
  std::vector<std::byte> out;
  std::uint64_t bytes = 0;
  const Stopwatch watch;
  for (const delta::Frame& frame : delta.frames) {
    out.resize(std::max(out.size(), ::ZSTD_compressBound(frame.bytes.size())));
    bytes += ::ZSTD_compress(out.data(), out.size(), frame.bytes.data(), frame.bytes.size(), 1);
  }
  return Json{{"frame_bytes", delta.frame_bytes}, {"zstd_bytes", bytes}, {"zstd_s", watch.seconds()}};
}

Result<Json> from_directory(const Options& options, ThreadPool& pool) {
  DS_ASSIGN(const HfModel model, HfModel::open(options.from.front()));
  const Layout& layout = *model.layout();
  DS_ASSIGN(const Buffer half, Buffer::allocate(layout.half_bytes(), pool));
  std::fill(half.span().begin(), half.span().end(), std::byte{0});
  for (std::uint32_t i = 0; i < layout.tensors().size(); ++i) {
    const auto bytes = model.tensor(i);
    if (!bytes.empty()) std::memcpy(half.span().data() + layout.tensors()[i].offset, bytes.data(), bytes.size());
  }
  std::vector<std::uint64_t> digests(static_cast<std::size_t>(layout.tile_count()));
  delta::half_digests(layout, half.span(), digests, pool);
  return measure(options, layout, half.span(), digests, pool);
}

}  // namespace

Result<Json> run_packed(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  if (!options.from.empty()) return from_directory(options, pool);
  DS_ASSIGN(const Halves halves, Halves::make(options, pool));
  DS_ASSIGN(Json result, measure(options, halves.layout(), halves.before(), halves.digests(), pool));
  auto digests = halves.digests();
  result["delta"] = zstd_over(halves.encode(digests, pool));
  return result;
}

}  // namespace deltasync::bench
