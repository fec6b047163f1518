// Some of a layout's tiles, as sorted ranges: what a receiver of slices subscribes to. Agent and receiver make the same
// one of the same ranges, name it by the same digest, and tell its state by the same root (wire_protocol.md
// "Subscriptions").
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "format/wire.hpp"

namespace deltasync {

/// Bytes of the elements of tiles in sorted, disjoint ranges inside the layout.
std::uint64_t bytes_of_tiles(const Layout& layout, const std::vector<wire::TileRange>& ranges);

/// Immutable once made. Does not hold the layout.
class TileSet {
 public:
  /// None at all.
  TileSet() = default;
  static TileSet whole(const Layout& layout);
  /// Sorted, disjoint and not empty, as wire::get_ranges() gives them; neighbours are joined. out_of_range beyond the
  /// layout, invalid_argument without a tile.
  static Result<TileSet> make(const Layout& layout, const std::vector<wire::TileRange>& ranges);
  /// The tiles that the slices cut. Errors name the slice: not_found, out_of_range; invalid_argument if there are
  /// slices, but no tile in any of them.
  static Result<TileSet> of(const Layout& layout, const std::vector<Slice>& subscription);

  /// All tiles of the layout.
  bool is_whole() const noexcept { return whole_; }
  const std::vector<wire::TileRange>& ranges() const noexcept { return ranges_; }
  std::uint64_t tiles() const noexcept { return tiles_; }
  /// Of the tiles' elements: what a full transfer of them moves.
  std::uint64_t bytes() const noexcept { return bytes_; }
  /// XXH3-128 of the payload of wire::Subscribe with these ranges; zero if whole.
  const Digest128& digest() const noexcept { return digest_; }
  const Digest128& layout() const noexcept { return layout_; }

  bool contains(std::uint64_t tile) const noexcept;
  /// Where the tile stands among those of the set, if it is one; `hint` moves forward with ascending tiles (start at
  /// 0).
  std::optional<std::uint64_t> rank(std::uint64_t tile, std::size_t& hint) const noexcept;
  /// The same for tiles in any order, by bisection.
  std::optional<std::uint64_t> rank(std::uint64_t tile) const noexcept;
  /// The set's tiles in sorted, disjoint ranges.
  std::vector<wire::TileRange> intersect(const std::vector<wire::TileRange>& ranges) const;
  /// As few ranges as may be whose intersect() is `ranges`, which are the set's tiles: what lies between two of them
  /// and is not the set's is taken in. All of the set is one.
  std::vector<wire::TileRange> windows(const std::vector<wire::TileRange>& ranges) const;
  /// The tile that stands there; index < tiles().
  std::uint64_t nth(std::uint64_t index) const noexcept;

  /// From a table of all tiles those of the set, in order; and back: other entries stay.
  std::vector<std::uint64_t> gather(std::span<const std::uint64_t> all) const;
  void scatter(std::span<const std::uint64_t> from, std::span<std::uint64_t> all) const;
  /// Root digest over the set's entries of a table of all tiles' digests.
  Digest128 root(std::span<const std::uint64_t> all) const;

 private:
  bool whole_ = false;
  std::vector<wire::TileRange> ranges_;
  std::vector<std::uint64_t> before_;  ///< by range: tiles of the set before it
  std::uint64_t tiles_ = 0;
  std::uint64_t bytes_ = 0;
  Digest128 digest_;
  Digest128 layout_;
};

}  // namespace deltasync
