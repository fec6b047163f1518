// Micro-benchmarks of the delta engine on synthetic steps: what memory allows (reading both halves, copying one), the
// scan alone, diff + encode + digest, apply + verify. Arguments: changed elements per 10,000; threads.
//
//   bench_delta --benchmark_filter=Encode     DELTASYNC_BENCH_MIB=256 bench_delta
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <map>
#include <memory>

#include "bench/synth.hpp"
#include "delta/delta.hpp"
#include "delta/encode.hpp"
#include "format/tiling.hpp"

namespace deltasync::delta {
namespace {

std::uint64_t model_bytes() {
  const char* mib = std::getenv("DELTASYNC_BENCH_MIB");
  return (mib != nullptr ? std::strtoull(mib, nullptr, 10) : 1024) << 20;
}

/// Two versions of a synthetic model and what is computed of them once.
struct Halves {
  LayoutPtr layout;
  std::vector<std::byte> before;
  std::vector<std::byte> after;
  std::vector<std::uint64_t> digests;
  Delta delta;

  explicit Halves(double density) : layout(bench::decoder_layout(model_bytes()).value()) {
    ThreadPool pool(2, "bench");
    bench::SyntheticModel model(layout, density, 1, pool);
    before.resize(layout->half_bytes());
    after.resize(layout->half_bytes());
    model.write_half(before);
    model.step();
    model.write_half(after);
    digests.resize(layout->tile_count());
    half_digests(*layout, before, digests, pool);
    auto digests_after = digests;
    delta = encode(*layout, before, after, digests_after, EncodeRequest{}, pool);
  }
};

/// Kept from one benchmark to the next, one density at a time.
Halves& halves(std::int64_t per_10000) {
  static std::unique_ptr<Halves> kept;
  static std::int64_t kept_density = -1;
  if (kept_density != per_10000) {
    kept.reset();
    kept = std::make_unique<Halves>(static_cast<double>(per_10000) / 10000);
    kept_density = per_10000;
  }
  return *kept;
}

void set_rate(benchmark::State& state, const Halves& h) {
  state.SetBytesProcessed(static_cast<std::int64_t>(h.before.size()) * state.iterations());
}

constexpr std::uint64_t kPiece = 4u << 20;
std::uint64_t pieces(const Halves& h) {
  return (h.before.size() + kPiece - 1) / kPiece;
}
std::uint64_t piece_bytes(const Halves& h, std::uint64_t i) {
  return std::min(kPiece, h.before.size() - i * kPiece);
}

void ReadBoth(benchmark::State& state) {
  const Halves& h = halves(state.range(0));
  ThreadPool pool(static_cast<unsigned>(state.range(1)), "bench");
  for (auto _ : state) {
    pool.run(pieces(h), [&](std::uint64_t i, unsigned) {
      std::uint64_t sum = 0;
      const std::byte* const a = h.before.data() + i * kPiece;
      const std::byte* const b = h.after.data() + i * kPiece;
      typedef std::uint64_t Vector __attribute__((vector_size(64), aligned(1), may_alias));
      Vector total = {};
      for (std::uint64_t at = 0; at + 64 <= piece_bytes(h, i); at += 64) {
        total |= *reinterpret_cast<const Vector*>(a + at) ^ *reinterpret_cast<const Vector*>(b + at);
      }
      for (int lane = 0; lane < 8; ++lane) sum |= total[lane];
      benchmark::DoNotOptimize(sum);
    });
  }
  set_rate(state, h);
}

void Copy(benchmark::State& state) {
  Halves& h = halves(state.range(0));
  ThreadPool pool(static_cast<unsigned>(state.range(1)), "bench");
  std::vector<std::byte> to(h.before.size());
  for (auto _ : state) {
    pool.run(pieces(h), [&](std::uint64_t i, unsigned) {
      std::memcpy(to.data() + i * kPiece, h.before.data() + i * kPiece, piece_bytes(h, i));
    });
  }
  set_rate(state, h);
}

void ScanOnly(benchmark::State& state) {
  const Halves& h = halves(state.range(0));
  ThreadPool pool(static_cast<unsigned>(state.range(1)), "bench");
  std::vector<std::vector<std::uint16_t>> positions(pool.size(), std::vector<std::uint16_t>(kTileElementsMax + kSlack));
  std::vector<std::vector<std::uint16_t>> diffs = positions;
  for (auto _ : state) {
    pool.run(h.before.size() / kTileElementsMax / 2, [&](std::uint64_t i, unsigned worker) {
      ScanOutput out;
      out.positions = positions[worker].data();
      out.diffs = reinterpret_cast<std::byte*>(diffs[worker].data());
      const std::size_t at = i * kTileElementsMax * 2;
      active_kernels().scans[0].of[1][1](h.before.data() + at, h.after.data() + at, kTileElementsMax, 0, 0, out);
      benchmark::DoNotOptimize(out.digest_change);
    });
  }
  set_rate(state, h);
}

void DigestAll(benchmark::State& state) {
  const Halves& h = halves(state.range(0));
  ThreadPool pool(static_cast<unsigned>(state.range(1)), "bench");
  auto digests = h.digests;
  for (auto _ : state) half_digests(*h.layout, h.before, digests, pool);
  set_rate(state, h);
}

void Encode(benchmark::State& state) {
  const Halves& h = halves(state.range(0));
  ThreadPool pool(static_cast<unsigned>(state.range(1)), "bench");
  std::uint64_t changed = 0;
  std::uint64_t bytes = 0;
  for (auto _ : state) {
    auto digests = h.digests;
    const Delta delta = encode(*h.layout, h.before, h.after, digests, EncodeRequest{}, pool);
    changed = delta.changed;
    bytes = to_container(delta).size();
  }
  set_rate(state, h);
  state.counters["bits_per_change"] = static_cast<double>(bytes) * 8 / static_cast<double>(changed);
  state.counters["density"] = static_cast<double>(changed) / static_cast<double>(h.layout->elements());
}

/// One pass over all frames of h.delta; fn(record, first element, stride).
template <class Fn>
void for_each_record(const Halves& h, std::vector<std::byte>& half, ThreadPool& pool, Fn&& fn) {
  pool.run(h.delta.frames.size(), [&](std::uint64_t i, unsigned) {
    const auto records = parse_frame(*h.layout, h.delta.frames[i].bytes).value();
    for (const TileRecord& record : records) {
      const Tile tile = tile_of(*h.layout, record.tile);
      const Tensor& tensor = h.layout->tensors()[tile.tensor];
      const TensorMemory memory{half.data() + tensor.offset, static_cast<std::size_t>(tensor.row_bytes())};
      fn(record, tile_address(memory, tile, tensor.element_bytes), memory.row_stride);
    }
  });
}

void Apply(benchmark::State& state) {
  const Halves& h = halves(state.range(0));
  ThreadPool pool(static_cast<unsigned>(state.range(1)), "bench");
  std::vector<std::byte> half = h.before;
  for (auto _ : state) {
    for_each_record(h, half, pool, [&](const TileRecord& record, std::byte* first, std::size_t stride) {
      if (!apply_tile(*h.layout, record, first, stride, h.digests[record.tile]).ok()) std::abort();
    });
    state.PauseTiming();
    std::memcpy(half.data(), h.before.data(), half.size());
    state.ResumeTiming();
  }
  set_rate(state, h);
}

void Commit(benchmark::State& state) {
  const Halves& h = halves(state.range(0));
  ThreadPool pool(static_cast<unsigned>(state.range(1)), "bench");
  std::vector<std::byte> half = h.before;
  for (auto _ : state) {
    for_each_record(h, half, pool, [&](const TileRecord& record, std::byte* first, std::size_t stride) {
      commit_tile(*h.layout, record, first, stride);
    });
  }
  set_rate(state, h);
}

void sizes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"per10000", "threads"})->UseRealTime()->Unit(benchmark::kMillisecond);
  for (const int threads : {1, 2}) b->Args({100, threads});
}
void densities(benchmark::internal::Benchmark* b) {
  b->ArgNames({"per10000", "threads"})->UseRealTime()->Unit(benchmark::kMillisecond);
  for (const int per_10000 : {20, 100, 450}) {
    for (const int threads : {1, 2}) b->Args({per_10000, threads});
  }
}
BENCHMARK(ReadBoth)->Apply(sizes);
BENCHMARK(Copy)->Apply(sizes);
BENCHMARK(DigestAll)->Apply(sizes);
BENCHMARK(ScanOnly)->Apply(densities);
BENCHMARK(Encode)->Apply(densities);
BENCHMARK(delta::Apply)->Name("Apply")->Apply(densities);
BENCHMARK(Commit)->Apply(densities);

}  // namespace
}  // namespace deltasync::delta

BENCHMARK_MAIN();
