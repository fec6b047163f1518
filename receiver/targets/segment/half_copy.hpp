// One whole version into the open fill of a writer, round by round: the tiles that change are patched in memory that
// stays in cache, all are written once (what a fill has counted as in place is not written again), and read again where
// they lie now. What is sealed after that is what the digests say.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/deadline.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/writer.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/segment/tile_patches.hpp"

namespace deltasync::relay {

/// What a version is made of.
struct VersionSource {
  ByteSpan base;                          ///< a whole half
  std::span<const std::uint64_t> before;  ///< digests of its tiles; used of those that are patched
  const TilePatches& patches;
  std::span<const std::uint64_t> after;  ///< digests of the version's tiles
};

class HalfCopy {
 public:
  /// All borrowed. `written`, for tests, is called between the writing of a round and the look at it.
  HalfCopy(const Layout& layout, Writer& writer, ThreadPool& pool, std::function<void()> written = {});

  /// corrupt names a tile of which the half has other bytes than its digest says: of the base, or badly written;
  /// timed_out between two rounds; errors of Writer::write(). After an error the fill is to be aborted.
  Status run(const VersionSource& source, Deadline deadline);

 private:
  struct RoundTile {
    Tile tile;
    std::size_t at = 0;  ///< in scratch_, if it is patched
    bool patched = false;
  };
  std::uint64_t take_round(std::uint64_t first, const TilePatches& patches);
  Status patch(const VersionSource& source);
  Status write(const VersionSource& source);
  Status read_back(const VersionSource& source);
  const std::byte* in_half(ByteSpan half, const Tile& tile) const;
  std::size_t row_bytes(const Tile& tile) const;

  const Layout& layout_;
  Writer& writer_;
  ThreadPool& pool_;
  const std::function<void()> written_;
  std::vector<RoundTile> round_;
  std::vector<std::byte> scratch_;
  std::vector<SliceSource> slices_;
};

}  // namespace deltasync::relay
