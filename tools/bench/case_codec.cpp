// bench codec: every byte of a delta's container, divided by the elements that changed, beside what no code can beat
// and what COO would take.
#include "bench/halves.hpp"
#include "deltasync/layout.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/target_checks.hpp"
#include "tools/cli/diff_sizes.hpp"

namespace deltasync::bench {
namespace {

Json report(const tools::DiffSizes& sizes, const tools::CompactSizes& containers) {
  const auto per_change = [&](double bits) { return sizes.bits_per_change(bits); };
  const auto stats = [](const delta::CodecStats& s) {
    return Json{{"tiles", s.tiles}, {"changed", s.changed}, {"bytes", s.bytes}};
  };
  Json compact_codecs;
  for (std::size_t i = 1; i < delta::kCodecEnd; ++i) {
    compact_codecs[to_string(static_cast<delta::Codec>(i))] = stats(containers.compact_stats[i]);
  }
  const auto codec = [&](delta::Codec c) { return stats(sizes.ulp_stats[static_cast<std::size_t>(c)]); };
  return Json{{"density", sizes.density()},
              {"changed", sizes.changed},
              {"container_bytes", containers.container_bytes},
              {"bits_per_change", per_change(8.0 * static_cast<double>(containers.container_bytes))},
              {"floor_bits", per_change(sizes.floor_model.total())},
              {"floor_tile_bits", per_change(sizes.floor_tile.total())},
              {"floor_exponent_bits", per_change(sizes.floor_exponent.total())},
              {"coo_bits", per_change(static_cast<double>(sizes.coo_bits))},
              {"absolute_bits", per_change(8.0 * static_cast<double>(sizes.absolute_bytes))},
              {"codecs",
               {{"raw", codec(delta::Codec::raw)},
                {"rice_absolute", codec(delta::Codec::rice_absolute)},
                {"rice_ulp", codec(delta::Codec::rice_ulp)},
                {"dense_ulp", codec(delta::Codec::dense_ulp)}}},
              {"compact",
               {{"container_bytes", containers.compact_container_bytes},
                {"bits_per_change", per_change(8.0 * static_cast<double>(containers.compact_container_bytes))},
                {"verified", true},
                {"codecs", compact_codecs}}},
              {"ulp_histogram",
               {{"1", sizes.by_ulp[0]}, {"2", sizes.by_ulp[1]}, {"3-8", sizes.by_ulp[2]}, {"more", sizes.by_ulp[3]}}}};
}

Result<Json> from_directories(const Options& options, ThreadPool& pool) {
  if (options.from.size() != 2) return Error(Errc::invalid_argument, "--from takes two model directories");
  DS_ASSIGN(const HfModel before, HfModel::open(options.from[0]));
  DS_ASSIGN(const HfModel after, HfModel::open(options.from[1]));
  DS_ASSIGN(const auto sizes, tools::diff_sizes(before, after, pool));
  DS_ASSIGN(const auto containers, tools::compact_sizes(before, after, pool));
  return report(sizes, containers);
}

/// GB of one half per second at which all records of a delta verify over `before`, the best of all rounds.
Result<double> verify_gbps(const Halves& halves, const delta::Delta& delta, unsigned rounds, ThreadPool& pool) {
  const Layout& layout = halves.layout();
  double best_s = 1e300;
  for (unsigned round = 0; round < rounds; ++round) {
    const Stopwatch watch;
    const Status status = run_all(pool, delta.frames.size(), [&](std::uint64_t i, unsigned) -> Status {
      DS_ASSIGN(const auto records, delta::parse_frame(layout, delta.frames[i].bytes));
      for (const auto& record : records) {
        const Tile tile = tile_of(layout, record.tile);
        const Tensor& tensor = layout.tensors()[tile.tensor];
        const std::byte* const first = halves.before().data() + tensor.offset + tile.rect.row * tensor.row_bytes() +
                                       tile.rect.col * tensor.element_bytes;
        DS_TRY(delta::verify_tile(layout, record, first, tensor.row_bytes(), halves.digests()[record.tile]));
      }
      return {};
    });
    DS_TRY(status);
    best_s = std::min(best_s, watch.seconds());
  }
  return static_cast<double>(layout.half_bytes()) / best_s / 1e9;
}

/// What the two forms cost. Of exponent classes, `encode_gbps` is what they take on top of diff and encode.
Status add_speeds(const Halves& halves, const delta::Delta& delta, double diff_encode_s, unsigned rounds,
                  ThreadPool& pool, Json& json) {
  const auto gbps = [&](double seconds) { return static_cast<double>(halves.layout().half_bytes()) / seconds / 1e9; };
  json["diff_encode_gbps"] = gbps(diff_encode_s);
  DS_ASSIGN(json["verify_gbps"], verify_gbps(halves, delta, rounds, pool));
  double compact_s = 1e300;
  delta::Delta compact;
  for (unsigned round = 0; round < rounds; ++round) {
    const Stopwatch watch;
    DS_ASSIGN(compact, delta::compact(halves.layout(), delta, halves.before(), pool));
    compact_s = std::min(compact_s, watch.seconds());
  }
  json["compact"]["encode_gbps"] = gbps(compact_s);
  DS_ASSIGN(json["compact"]["verify_gbps"], verify_gbps(halves, compact, rounds, pool));
  json["isa"] = delta::isa_name();
  return {};
}

}  // namespace

Result<Json> run_codec(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  if (!options.from.empty()) return from_directories(options, pool);
  DS_ASSIGN(const Halves halves, Halves::make(options, pool));
  const auto tensor_in = [&](ByteSpan half) {
    return [&, half](std::uint32_t i) {
      const Tensor& tensor = halves.layout().tensors()[i];
      return half.subspan(tensor.offset, tensor.bytes);
    };
  };
  DS_ASSIGN(const auto sizes,
            tools::diff_sizes(halves.layout(), tensor_in(halves.before()), tensor_in(halves.after()), pool));
  delta::Delta delta;
  double diff_encode_s = 1e300;
  for (unsigned round = 0; round < rounds_of(options); ++round) {
    auto digests = halves.digests();
    const Stopwatch watch;
    delta = halves.encode(digests, pool);
    diff_encode_s = std::min(diff_encode_s, watch.seconds());
  }
  DS_ASSIGN(const auto containers,
            tools::compact_sizes(halves.layout(), delta, halves.before(), halves.after(), halves.digests(), pool));
  Json json = report(sizes, containers);
  DS_TRY(add_speeds(halves, delta, diff_encode_s, rounds_of(options), pool, json));
  return json;
}

}  // namespace deltasync::bench
