#include "tools/cli/delta_check.hpp"
#include "format/tiling.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace deltasync::tools {
namespace {

/// One tile of a half: its rows, each `row_bytes` long and `row_stride` from the next.
struct TileRows {
  std::uint64_t rows = 0;
  std::size_t row_bytes = 0;
  std::size_t row_stride = 0;
  std::size_t offset = 0;

  TileRows(const Layout& layout, std::uint64_t index) {
    const Tile tile = tile_of(layout, index);
    const Tensor& tensor = layout.tensors()[tile.tensor];
    rows = tile.rect.rows;
    row_bytes = static_cast<std::size_t>(tile.rect.cols * tensor.element_bytes);
    row_stride = static_cast<std::size_t>(tensor.row_bytes());
    offset = static_cast<std::size_t>(tensor.offset + tile.rect.row * tensor.row_bytes() +
                                      tile.rect.col * tensor.element_bytes);
  }
  const std::byte* row(ByteSpan half, std::uint64_t r) const { return half.data() + offset + r * row_stride; }
};

Status check_tile(const Layout& layout, const delta::TileRecord& record, ByteSpan before, ByteSpan after,
                  std::uint64_t digest, std::vector<std::byte>& copy) {
  const TileRows tile(layout, record.tile);
  copy.resize(static_cast<std::size_t>(tile.rows) * tile.row_bytes);
  for (std::uint64_t r = 0; r < tile.rows; ++r) {
    std::memcpy(copy.data() + r * tile.row_bytes, tile.row(before, r), tile.row_bytes);
  }
  DS_TRY(delta::apply_tile(layout, record, copy.data(), tile.row_bytes, digest));
  for (std::uint64_t r = 0; r < tile.rows; ++r) {
    if (std::memcmp(copy.data() + r * tile.row_bytes, tile.row(after, r), tile.row_bytes) == 0) continue;
    return Error(Errc::corrupt, "tile " + std::to_string(record.tile) + " decodes to other bytes than the new ones");
  }
  return {};
}

bool is_same(const TileRows& tile, ByteSpan before, ByteSpan after) {
  for (std::uint64_t r = 0; r < tile.rows; ++r) {
    if (std::memcmp(tile.row(before, r), tile.row(after, r), tile.row_bytes) != 0) return false;
  }
  return true;
}

/// Of the tiles that no frame has.
Status check_untouched(const Layout& layout, const std::vector<std::uint8_t>& touched, ByteSpan before, ByteSpan after,
                       ThreadPool& pool) {
  constexpr std::uint64_t kShare = 64;  // tiles that a thread takes at a time
  std::atomic<std::uint64_t> missing{touched.size()};
  pool.run((touched.size() + kShare - 1) / kShare, [&](std::uint64_t share, unsigned) {
    const std::uint64_t end = std::min<std::uint64_t>(touched.size(), (share + 1) * kShare);
    for (std::uint64_t t = share * kShare; t < end; ++t) {
      if (touched[t] == 0 && !is_same(TileRows(layout, t), before, after)) missing = t;
    }
  });
  if (missing == touched.size()) return {};
  return Error(Errc::corrupt, "tile " + std::to_string(missing) + " changed, and the delta does not have it");
}

}  // namespace

Status check_delta(const Layout& layout, const delta::Delta& delta, ByteSpan before, ByteSpan after,
                   std::span<const std::uint64_t> digests, ThreadPool& pool) {
  std::vector<std::vector<std::byte>> copies(pool.size());
  std::vector<Status> statuses(delta.frames.size());
  std::vector<std::uint8_t> touched(static_cast<std::size_t>(layout.tile_count()));  // frames have disjoint tiles
  pool.run(delta.frames.size(), [&](std::uint64_t i, unsigned worker) {
    auto records = delta::parse_frame(layout, delta.frames[i].bytes);
    if (!records) {
      statuses[i] = std::move(records).error();
      return;
    }
    for (const delta::TileRecord& record : *records) {
      statuses[i] = check_tile(layout, record, before, after, digests[record.tile], copies[worker]);
      if (!statuses[i]) return;
      touched[record.tile] = 1;
    }
  });
  for (Status& status : statuses) DS_TRY(std::move(status));
  return check_untouched(layout, touched, before, after, pool);
}

}  // namespace deltasync::tools
