// bench baseline: published formats and ours over the same two versions in one run: bytes, and the speed of encoding
// and of decoding onto the version before. Every decoded version is compared with the one that was encoded.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "bench/baselines.hpp"
#include "bench/halves.hpp"
#include "bench/limits.hpp"
#include "delta/frame.hpp"
#include "format/tiling.hpp"

namespace deltasync::bench {
namespace {

constexpr std::size_t kPieceElements = std::size_t{4} << 20;  ///< of a tensor, for one thread at a time

struct ElementRange {
  std::size_t first;  ///< bf16 element of the half
  std::size_t count;
};

std::vector<ElementRange> ranges_of(const Layout& layout) {
  std::vector<ElementRange> ranges;
  for (const Tensor& tensor : layout.tensors()) {
    const std::size_t elements = tensor.bytes / sizeof(std::uint16_t);
    for (std::size_t at = 0; at < elements; at += kPieceElements) {
      ranges.push_back({tensor.offset / sizeof(std::uint16_t) + at, std::min(kPieceElements, elements - at)});
    }
  }
  return ranges;
}

struct Timed {
  double encode_s = 1e300;
  double decode_s = 1e300;
  std::uint64_t bytes = 0;
};

/// The two halves, and memory to decode onto.
struct Data {
  const Halves& halves;
  const Buffer& live;
  ThreadPool& pool;

  Bf16Span words(ByteSpan half) const {
    return {reinterpret_cast<const std::uint16_t*>(half.data()), half.size() / sizeof(std::uint16_t)};
  }
  void reset_live() const { copy_once(live.span(), halves.before().first(live.span().size()), pool); }
  Status check_live(const char* name) const {
    if (std::equal(live.span().begin(), live.span().end(), halves.after().begin())) return {};
    return Error(Errc::corrupt, std::string(name) + ": the decoded version differs from the encoded one");
  }
};

Result<Timed> time_format(const Data& data, const BaselineFormat& format, const std::vector<ElementRange>& ranges,
                          unsigned rounds) {
  Timed timed;
  const Bf16Span before = data.words(data.halves.before());
  const Bf16Span after = data.words(data.halves.after());
  const std::span<std::uint16_t> live{reinterpret_cast<std::uint16_t*>(data.live.span().data()),
                                      data.live.span().size() / sizeof(std::uint16_t)};
  std::vector<std::vector<std::byte>> deltas(ranges.size());
  for (unsigned round = 0; round < rounds; ++round) {
    for (auto& delta : deltas) delta.clear();
    const Stopwatch encoding;
    std::atomic<bool> wrong{false};
    data.pool.run(ranges.size(), [&](std::uint64_t i, unsigned) {
      const auto [first, count] = ranges[i];
      if (!format.encode(before.subspan(first, count), after.subspan(first, count), deltas[i])) wrong = true;
    });
    timed.encode_s = std::min(timed.encode_s, encoding.seconds());

    data.reset_live();
    const Stopwatch decoding;
    data.pool.run(ranges.size(), [&](std::uint64_t i, unsigned) {
      if (!format.decode(deltas[i], live.subspan(ranges[i].first, ranges[i].count))) wrong = true;
    });
    timed.decode_s = std::min(timed.decode_s, decoding.seconds());
    if (wrong)
      return Error(Errc::corrupt, std::string(format.name) + ": it does not encode, or not decode what it encoded");
    DS_TRY(data.check_live(format.name));
  }
  for (const auto& delta : deltas) timed.bytes += delta.size();
  return timed;
}

/// The tiles of the version that a delta leads to, as the agent reads them from the served half.
delta::MergeOptions reads_after(const Halves& halves) {
  delta::MergeOptions options;
  options.read_target = [&halves](std::span<const std::uint64_t> tiles, std::byte* out) {
    for (const std::uint64_t tile : tiles) out = delta::copy_tile(halves.layout(), halves.after(), tile, out);
    return true;
  };
  return options;
}

/// As the agent encodes and a receiver applies, digests of all tiles included on both sides. In exponent classes both
/// of the agent's steps count.
Result<Timed> time_ours(const Data& data, bool compact, unsigned rounds) {
  Timed timed;
  const Layout& layout = data.halves.layout();
  for (unsigned round = 0; round < rounds; ++round) {
    auto digests = data.halves.digests();
    const Stopwatch encoding;
    delta::Delta delta = data.halves.encode(digests, data.pool);
    if (compact) {
      DS_ASSIGN(auto made, delta::compact_from_target(layout, delta, reads_after(data.halves), data.pool));
      delta = *std::move(made);
    }
    timed.encode_s = std::min(timed.encode_s, encoding.seconds());
    timed.bytes = delta::to_container(delta).size();

    data.reset_live();
    std::vector<std::uint64_t> state = data.halves.digests();
    std::atomic<bool> wrong{false};
    const Stopwatch decoding;
    data.pool.run(delta.frames.size(), [&](std::uint64_t i, unsigned) {
      const auto records = delta::parse_frame(layout, delta.frames[i].bytes);
      if (!records) {
        wrong = true;
        return;
      }
      for (const auto& record : *records) {
        const Tile tile = tile_of(layout, record.tile);
        const Tensor& tensor = layout.tensors()[tile.tensor];
        const delta::TensorMemory memory{data.live.span().data() + tensor.offset, tensor.row_bytes()};
        auto* const first = delta::tile_address(memory, tile, tensor.element_bytes);
        if (!delta::apply_tile(layout, record, first, memory.row_stride, state[record.tile])) wrong = true;
      }
    });
    timed.decode_s = std::min(timed.decode_s, decoding.seconds());
    if (wrong) return Error(Errc::corrupt, "a tile of our own delta does not verify");
    DS_TRY(data.check_live("deltasync"));
  }
  return timed;
}

}  // namespace

Result<Json> run_baseline(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const Halves halves, Halves::make(options, pool));
  const Layout& layout = halves.layout();
  DS_ASSIGN(const Buffer live, Buffer::allocate(layout.half_bytes(), pool));
  const Data data{halves, live, pool};
  auto digests = halves.digests();
  const std::uint64_t changed = halves.encode(digests, pool).changed;
  if (changed == 0) return Error(Errc::invalid_argument, "nothing changes at this density of so small a model");
  const auto bytes = static_cast<double>(layout.half_bytes());

  Json rows = Json::array();
  const auto add = [&](const char* name, const char* system, const Timed& timed) {
    rows.push_back({{"format", name},
                    {"system", system},
                    {"bytes", timed.bytes},
                    {"bits_per_change", 8.0 * static_cast<double>(timed.bytes) / static_cast<double>(changed)},
                    {"encode_gbps", bytes / timed.encode_s / 1e9},
                    {"decode_gbps", bytes / timed.decode_s / 1e9}});
  };
  const std::vector<ElementRange> ranges = ranges_of(layout);
  for (const BaselineFormat& format : baseline_formats()) {
    DS_ASSIGN(const Timed timed, time_format(data, format, ranges, rounds_of(options)));
    add(format.name, format.system, timed);
  }
  DS_ASSIGN(const Timed ours, time_ours(data, false, rounds_of(options)));
  add("Rice gaps + ulp planes, a digest a tile", "deltasync", ours);
  DS_ASSIGN(const Timed compact, time_ours(data, true, rounds_of(options)));
  add("the same in exponent classes", "deltasync, slow links", compact);
  return Json{{"density", static_cast<double>(changed) / static_cast<double>(layout.elements())},
              {"changed", changed},
              {"limit_gbps", bytes / read_both_once(halves.before(), halves.after(), pool) / 1e9},
              {"memcpy_s", memcpy_s(live.span(), halves.before().first(layout.half_bytes()), pool)},
              {"rows", rows}};
}

}  // namespace deltasync::bench
