// How the tiles of a raw answer are divided into frames, and how such frames go out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/hash.hpp"
#include "deltasync/layout.hpp"
#include "format/wire.hpp"

namespace deltasync::agent {

/// Cuts ranges into runs of tiles of at most 4 MiB of a half, one tile at least.
class RawTileRuns {
 public:
  /// `ranges` lie inside the layout, which is borrowed.
  RawTileRuns(const Layout& layout, std::vector<wire::TileRange> ranges)
      : layout_(layout), ranges_(std::move(ranges)), next_(ranges_.empty() ? 0 : ranges_.front().first) {}

  bool more() const noexcept { return at_ < ranges_.size(); }
  /// Ascending tiles.
  std::vector<std::uint64_t> next() {
    std::vector<std::uint64_t> tiles;
    for (std::uint64_t bytes = 0; more() && tiles.size() < kTilesMax;) {
      const Tile tile = layout_.tile(next_);
      const std::uint64_t tile_bytes = tile.rect.elements() * layout_.tensors()[tile.tensor].element_bytes;
      if (!tiles.empty() && bytes + tile_bytes > kBytesMax) break;
      bytes += tile_bytes;
      tiles.push_back(next_);
      if (++next_ == ranges_[at_].end && ++at_ < ranges_.size()) next_ = ranges_[at_].first;
    }
    return tiles;
  }

 private:
  static constexpr std::uint64_t kBytesMax = 4u << 20;
  static constexpr std::size_t kTilesMax = 4096;

  const Layout& layout_;
  const std::vector<wire::TileRange> ranges_;
  std::size_t at_ = 0;  // in ranges_
  std::uint64_t next_;  // tile
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
