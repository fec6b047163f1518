// How the tiles of a raw answer are divided into frames, and how such frames go out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/hash.hpp"
#include "delta/delta.hpp"
#include "deltasync/layout.hpp"
#include "format/tiling.hpp"
#include "format/wire.hpp"

namespace deltasync::agent {

/// Cuts ranges into runs of tiles of at most 4 MiB of a half, one tile at least. A batch of the layout that is inside
/// of a range is a run of its own: however two receivers divide what they ask for, most of their runs are the same.
class RawTileRuns {
 public:
  /// `ranges` lie inside the layout, whose batches `batches` are; both are borrowed.
  RawTileRuns(const Layout& layout, std::span<const delta::Batch> batches, std::vector<wire::TileRange> ranges)
      : layout_(layout),
        batches_(batches),
        ranges_(std::move(ranges)),
        next_(ranges_.empty() ? 0 : ranges_.front().first) {}

  bool more() const noexcept { return at_ < ranges_.size(); }
  /// Ascending tiles.
  std::vector<std::uint64_t> next() {
    std::vector<std::uint64_t> tiles;
    for (std::uint64_t whole_end = whole_batch(); whole_end != 0 && next_ < whole_end;) take(tiles);
    if (!tiles.empty()) return tiles;
    for (std::uint64_t bytes = 0; more() && tiles.size() < delta::kBatchTilesMax;) {
      const Tile tile = tile_of(layout_, next_);
      bytes += tile.rect.elements() * layout_.tensors()[tile.tensor].element_bytes;
      if (!tiles.empty() && (bytes > delta::kBatchBytesTarget || whole_batch() != 0)) break;
      take(tiles);
    }
    return tiles;
  }

 private:
  void take(std::vector<std::uint64_t>& tiles) {
    tiles.push_back(next_);
    if (++next_ == ranges_[at_].end && ++at_ < ranges_.size()) next_ = ranges_[at_].first;
  }
  /// The end of the batch that begins with the next tile, if the range has all of it; else 0.
  std::uint64_t whole_batch() {
    while (batch_ < batches_.size() && batches_[batch_].first < next_) ++batch_;
    if (batch_ == batches_.size() || batches_[batch_].first != next_) return 0;
    return batches_[batch_].end <= ranges_[at_].end ? batches_[batch_].end : 0;
  }

  const Layout& layout_;
  const std::span<const delta::Batch> batches_;
  const std::vector<wire::TileRange> ranges_;
  std::size_t at_ = 0;     // in ranges_
  std::size_t batch_ = 0;  // in batches_: the first that does not begin before next_
  std::uint64_t next_;     // tile
};

/// The header of a frame message whose payload hash is known: a ring's frames are hashed once for all receivers.
inline wire::Header frame_header(std::uint64_t request, std::uint64_t payload_bytes, std::uint64_t payload_hash) {
  wire::Header header;
  header.type = static_cast<std::uint16_t>(wire::Type::frame);
  header.request = request;
  header.payload_bytes = payload_bytes;
  header.payload_hash = payload_hash;
  header.header_hash = xxh3_64(bytes_of(header).first(offsetof(wire::Header, header_hash)));
  return header;
}

}  // namespace deltasync::agent
