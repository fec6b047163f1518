// bench baseline: published ways and ours over the same two versions in one run: bytes, and the time of encoding and of
// decoding onto the version before, beside one copy of the model. Every decoded version is compared with the one that
// was encoded.
#include <algorithm>
#include <atomic>
#include <optional>

#include "bench/baselines.hpp"
#include "bench/halves.hpp"
#include "bench/limits.hpp"
#include "bench/whole_file.hpp"
#include "delta/container.hpp"
#include "delta/frame.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/target_checks.hpp"

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

/// The best of each over the rounds. `encode()`: Result of the bytes to send; `decode()`: onto the version before.
template <class Encode, class Decode>
Result<Timed> time_rounds(const Data& data, const char* name, unsigned rounds, const Encode& encode,
                          const Decode& decode) {
  Timed timed;
  for (unsigned round = 0; round < rounds; ++round) {
    const Stopwatch encoding;
    DS_ASSIGN(timed.bytes, encode());
    timed.encode_s = std::min(timed.encode_s, encoding.seconds());
    data.reset_live();
    const Stopwatch decoding;
    const Status decoded = decode();
    timed.decode_s = std::min(timed.decode_s, decoding.seconds());
    DS_TRY(decoded);
    DS_TRY(data.check_live(name));
  }
  return timed;
}

Result<Timed> time_format(const Data& data, const BaselineFormat& format, const std::vector<ElementRange>& ranges,
                          unsigned rounds) {
  const Bf16Span before = data.words(data.halves.before());
  const Bf16Span after = data.words(data.halves.after());
  const std::span<std::uint16_t> live{reinterpret_cast<std::uint16_t*>(data.live.span().data()),
                                      data.live.span().size() / sizeof(std::uint16_t)};
  std::vector<std::vector<std::byte>> deltas(ranges.size());
  const auto encode = [&]() -> Result<std::uint64_t> {
    DS_TRY(run_all(data.pool, ranges.size(), [&](std::uint64_t i, unsigned) {
      const auto [first, count] = ranges[i];
      deltas[i].clear();
      return format.encode(before.subspan(first, count), after.subspan(first, count), deltas[i]);
    }));
    std::uint64_t bytes = 0;
    for (const auto& delta : deltas) bytes += delta.size();
    return bytes;
  };
  const auto decode = [&] {
    return run_all(data.pool, ranges.size(), [&](std::uint64_t i, unsigned) {
      return format.decode(deltas[i], live.subspan(ranges[i].first, ranges[i].count));
    });
  };
  return time_rounds(data, format.name, rounds, encode, decode);
}

/// A new file for each version, as those systems make one.
Result<Timed> time_file(const Data& data, const std::filesystem::path& directory, unsigned rounds) {
  const Layout& layout = data.halves.layout();
  std::optional<WholeFile> file;
  const auto save = [&]() -> Result<std::uint64_t> {
    file.reset();
    DS_ASSIGN(file, WholeFile::save(layout, data.halves.after(), directory, data.pool));
    return file->bytes();
  };
  return time_rounds(data, "safetensors", rounds, save,
                     [&] { return file->load(layout, data.live.span(), data.pool); });
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
  const Layout& layout = data.halves.layout();
  delta::Delta delta;
  const auto encode = [&]() -> Result<std::uint64_t> {
    auto digests = data.halves.digests();
    delta = data.halves.encode(digests, data.pool);
    if (compact) {
      DS_ASSIGN(auto made, delta::compact_from_target(layout, delta, reads_after(data.halves), data.pool));
      delta = *std::move(made);
    }
    std::uint64_t bytes = delta::container_header(delta).size();
    for (const auto& frame : delta.frames) bytes += frame.bytes.size();
    return bytes;
  };
  const auto decode = [&]() -> Status {
    std::vector<std::uint64_t> state = data.halves.digests();
    return run_all(data.pool, delta.frames.size(), [&](std::uint64_t i, unsigned) -> Status {
      DS_ASSIGN(const auto records, delta::parse_frame(layout, delta.frames[i].bytes));
      for (const auto& record : records) {
        const Tile tile = tile_of(layout, record.tile);
        const Tensor& tensor = layout.tensors()[tile.tensor];
        const delta::TensorMemory memory{data.live.span().data() + tensor.offset, tensor.row_bytes()};
        auto* const first = delta::tile_address(memory, tile, tensor.element_bytes);
        DS_ASSIGN(state[record.tile], delta::apply_tile(layout, record, first, memory.row_stride, state[record.tile]));
      }
      return {};
    });
  };
  return time_rounds(data, "deltasync", rounds, encode, decode);
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
  const unsigned rounds = rounds_of(options);
  const ByteSpan whole = halves.after().first(layout.half_bytes());
  const double copy_s = memcpy_s(live.span(), whole, pool);

  Json rows = Json::array();
  const auto add = [&](const char* name, const char* system, const Timed& timed) {
    rows.push_back({{"format", name},
                    {"system", system},
                    {"bytes", timed.bytes},
                    {"bits_per_change", 8.0 * static_cast<double>(timed.bytes) / static_cast<double>(changed)},
                    {"encode_ms", 1e3 * timed.encode_s},
                    {"decode_ms", 1e3 * timed.decode_s},
                    {"encode_to_memcpy", timed.encode_s / copy_s},
                    {"decode_to_memcpy", timed.decode_s / copy_s}});
  };
  // What all others are compared with: a copy where the trainer is, and one where the engine is.
  add("the whole model, copied", "memcpy", {copy_s, copy_s, layout.model_bytes()});
  DS_ASSIGN(const Timed file, time_file(data, options.shm_dir, rounds));
  add("the whole model, a safetensors file", "AstraFlow, from disk", file);
  const std::vector<ElementRange> ranges = ranges_of(layout);
  for (const BaselineFormat& format : baseline_formats()) {
    DS_ASSIGN(const Timed timed, time_format(data, format, ranges, rounds));
    add(format.name, format.system, timed);
  }
  DS_ASSIGN(const Timed ours, time_ours(data, false, rounds));
  add("Rice gaps + ulp planes, a digest a tile", "deltasync", ours);
  DS_ASSIGN(const Timed compact, time_ours(data, true, rounds));
  add("the same in exponent classes", "deltasync, slow links", compact);
  return Json{{"density", static_cast<double>(changed) / static_cast<double>(layout.elements())},
              {"changed", changed},
              {"limit_gbps", bytes / read_both_once(halves.before(), halves.after(), pool) / 1e9},
              {"memcpy_s", copy_s},
              {"isa", delta::isa_name()},
              {"rows", rows}};
}

}  // namespace deltasync::bench
