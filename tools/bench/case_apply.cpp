// bench apply: what a host target does with a delta (decode and verify every tile, then write it), against one memcpy.
#include <algorithm>
#include <atomic>

#include "bench/halves.hpp"
#include "bench/limits.hpp"

namespace deltasync::bench {
namespace {

struct ParsedFrame {
  std::vector<delta::TileRecord> records;
};

/// Runs `fn(record, tile, tensor)` over every record, frames in parallel.
template <class Fn>
void for_each_record(const Layout& layout, const std::vector<ParsedFrame>& frames, ThreadPool& pool, const Fn& fn) {
  pool.run(frames.size(), [&](std::uint64_t i, unsigned) {
    for (const auto& record : frames[i].records) {
      const Tile tile = layout.tile(record.tile);
      fn(record, tile, layout.tensors()[tile.tensor]);
    }
  });
}

}  // namespace

Result<Json> run_apply(const Options& options) {
  ThreadPool pool(options.threads, "bench");
  DS_ASSIGN(const Halves halves, Halves::make(options, pool));
  const Layout& layout = halves.layout();
  auto digests = halves.digests();
  const auto delta = halves.encode(digests, pool);
  DS_ASSIGN(const Buffer live, Buffer::allocate(layout.half_bytes(), pool));
  const auto address = [&](const Tile& tile, const Tensor& tensor) {
    return delta::tile_address({live.span().data() + tensor.offset, tensor.row_bytes()}, tile, tensor.element_bytes);
  };

  double copy_s = 1e300;
  double apply_s = 1e300;
  double verify_s = 1e300;
  for (unsigned round = 0; round < std::max(5U, options.versions); ++round) {
    copy_s = std::min(copy_s, copy_once(live.span(), halves.before(), pool));  // also puts the base back
    std::atomic<bool> wrong{false};
    const Stopwatch watch;
    std::vector<ParsedFrame> frames(delta.frames.size());
    pool.run(frames.size(), [&](std::uint64_t i, unsigned) {
      auto records = delta::parse_frame(layout, delta.frames[i].bytes);
      if (!records) {
        wrong = true;
        return;
      }
      frames[i].records = std::move(*records);
    });
    for_each_record(layout, frames, pool, [&](const delta::TileRecord& record, const Tile& tile, const Tensor& tensor) {
      if (!delta::verify_tile(layout, record, address(tile, tensor), tensor.row_bytes(),
                              halves.digests()[record.tile])) {
        wrong = true;
      }
    });
    if (wrong) return Error(Errc::internal, "a tile of our own delta does not verify");
    verify_s = std::min(verify_s, watch.seconds());
    for_each_record(layout, frames, pool, [&](const delta::TileRecord& record, const Tile& tile, const Tensor& tensor) {
      delta::commit_tile(layout, record, address(tile, tensor), tensor.row_bytes());
    });
    apply_s = std::min(apply_s, watch.seconds());
  }
  if (!std::equal(live.span().begin(), live.span().end(), halves.after().begin())) {
    return Error(Errc::internal, "the applied version differs from the encoded one");
  }
  return Json{{"memcpy_s", copy_s},
              {"apply_s", apply_s},
              {"verify_s", verify_s},
              {"ratio_to_memcpy", apply_s / copy_s},
              {"density", static_cast<double>(delta.changed) / static_cast<double>(layout.elements())},
              {"isa", delta::isa_name()}};
}

}  // namespace deltasync::bench
