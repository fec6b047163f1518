// bench codec: every byte of a delta's container, divided by the elements that changed, beside what no code can beat
// and what COO would take.
#include "bench/halves.hpp"
#include "deltasync/hf.hpp"
#include "tools/diff_sizes.hpp"

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
                {"rice_ulp", codec(delta::Codec::rice_ulp)}}},
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
  auto digests = halves.digests();
  const delta::Delta delta = halves.encode(digests, pool);
  DS_ASSIGN(const auto containers,
            tools::compact_sizes(halves.layout(), delta, halves.before(), halves.after(), halves.digests(), pool));
  return report(sizes, containers);
}

}  // namespace deltasync::bench
