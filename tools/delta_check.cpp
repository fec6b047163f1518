#include "tools/delta_check.hpp"

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
    const Tile tile = layout.tile(index);
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

}  // namespace

Status check_delta(const Layout& layout, const delta::Delta& delta, ByteSpan before, ByteSpan after,
                   std::span<const std::uint64_t> digests, ThreadPool& pool) {
  std::vector<std::vector<std::byte>> copies(pool.size());
  std::vector<Status> statuses(delta.frames.size());
  pool.run(delta.frames.size(), [&](std::uint64_t i, unsigned worker) {
    auto records = delta::parse_frame(layout, delta.frames[i].bytes);
    if (!records) {
      statuses[i] = std::move(records).error();
      return;
    }
    for (const delta::TileRecord& record : *records) {
      statuses[i] = check_tile(layout, record, before, after, digests[record.tile], copies[worker]);
      if (!statuses[i]) return;
    }
  });
  for (Status& status : statuses) DS_TRY(std::move(status));
  return {};
}

}  // namespace deltasync::tools
