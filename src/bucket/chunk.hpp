// What lies where in a bucket, and what of a version has been sent or has come. No I/O: trainer and engine run the same
// code on both ends of a channel, so offsets never cross it.
//
//   half 0  | chunk 0 | chunk 2 | …      a chunk: tensors one after the other, each at a multiple of kAlignment; or, of
//   a half 1  | chunk 1 | chunk 3 | …      tensor that is larger than a half, as many of its bands as fit, alone
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "format/tile_set.hpp"
#include "format/tiling.hpp"
#include "format/wire_bucket.hpp"

namespace deltasync::bucket {

inline constexpr std::uint64_t kAlignment = 512;
inline constexpr std::uint64_t kHalfBytesMax = std::uint64_t{1} << 40;

/// Bytes of one tensor in a half: whole tiles.
struct Piece {
  wire::BucketPart part;
  std::uint64_t offset = 0;  ///< in the half
  std::uint64_t from = 0;    ///< first byte in the tensor
  std::uint64_t bytes = 0;
  std::uint64_t first_tile = 0;
  std::uint64_t tiles = 0;
};

/// One of the piece's tiles: as tile_of(), but without a search where the tensor is one tile, as most of many small
/// ones.
Tile tile_in(const Layout& layout, const Piece& piece, std::uint64_t index);

/// Which tensors of a layout one rank sends.
class Share {
 public:
  /// Of no tensor.
  Share() = default;
  /// `tensors`: sorted, disjoint ranges of layout indices; none: all. out_of_range beyond the layout; invalid_argument
  /// where a band of a tensor is larger than a half, or a half has no valid size.
  static Result<Share> make(LayoutPtr layout, std::vector<wire::TileRange> tensors, std::uint64_t half_bytes);

  const Layout& layout() const noexcept { return *layout_; }
  std::uint64_t half_bytes() const noexcept { return half_bytes_; }
  const std::vector<wire::TileRange>& tensors() const noexcept { return tensors_; }
  bool has(std::uint32_t tensor) const noexcept { return tensor < mine_.size() && mine_[tensor]; }
  std::uint64_t count() const noexcept { return count_; }
  std::uint64_t bytes() const noexcept { return bytes_; }
  /// Over its tiles' entries of a table of all tiles' digests.
  Digest128 root(std::span<const std::uint64_t> digests) const { return tiles_ ? tiles_->root(digests) : Digest128(); }

 private:
  LayoutPtr layout_;
  std::uint64_t half_bytes_ = 0;
  std::vector<wire::TileRange> tensors_;
  std::vector<bool> mine_;
  std::uint64_t count_ = 0;
  std::uint64_t bytes_ = 0;
  std::optional<TileSet> tiles_;  ///< none: its tensors have no element
};

/// How far the tensors of a share have come in one version: each once, and of each its bands in order.
class Passage {
 public:
  explicit Passage(Share share);

  const Share& share() const noexcept { return share_; }
  /// Nothing has passed.
  void begin();
  bool is_whole(std::uint32_t tensor) const noexcept { return whole_[tensor]; }
  std::uint64_t next_band(std::uint32_t tensor) const noexcept { return bands_[tensor]; }
  /// The next chunk begins at the half's first byte.
  void begin_chunk() noexcept { used_ = 0, alone_ = false; }
  /// Where the part lies behind those of the chunk so far, which passes with it. Errors name the tensor, and then
  /// nothing has passed: out_of_range (no such tensor or band), invalid_argument (another rank's, bands out of order),
  /// already_exists (it came before), no_space (it does not fit in what is left of the half).
  Result<Piece> pass(const wire::BucketPart& part);
  /// The part of a tensor that comes next: all of it, or where that is larger than a half as many bands as fit. Nothing
  /// if the chunk has no room for it. The tensor is not whole yet.
  std::optional<wire::BucketPart> next_part(std::uint32_t tensor) const;
  /// coverage, naming what has not come whole (eight at most).
  Status check_whole() const;

 private:
  Result<Piece> locate(const wire::BucketPart& part) const;
  std::string name(std::uint32_t tensor) const;

  Share share_;
  std::vector<std::uint64_t> bands_;  ///< by tensor: that have passed, of one larger than a half
  std::vector<bool> whole_;
  std::uint64_t left_ = 0;  ///< tensors that are not whole
  std::uint64_t used_ = 0;  ///< of the half
  bool alone_ = false;      ///< bands are in it
};

/// The trainer's side of a version.
class Outgoing {
 public:
  explicit Outgoing(Share share);

  const Share& share() const noexcept { return passage_.share(); }
  void begin();
  bool is_whole(std::uint32_t tensor) const noexcept { return passage_.is_whole(tensor); }
  /// Where the next bytes of the tensor belong in the half. Nothing: take() the chunk first. invalid_argument,
  /// out_of_range, already_exists.
  Result<std::optional<Piece>> next(std::uint32_t tensor);
  /// Whether next() needs no take() before.
  bool fits(std::uint32_t tensor) const {
    return !share().has(tensor) || is_whole(tensor) || passage_.next_part(tensor).has_value();
  }
  std::span<const Piece> pieces() const noexcept { return pieces_; }
  unsigned half() const noexcept { return half_; }
  /// The chunk with these digests of its tiles, in order. What follows lies in the other half.
  wire::BucketChunk take(std::vector<std::uint64_t> digests);
  Status check_whole() const { return passage_.check_whole(); }
  /// Of a version that is whole, and taken.
  wire::BucketFinish finish() const { return {share().count(), share().bytes(), share().root(digests_)}; }

 private:
  Passage passage_;
  std::vector<Piece> pieces_;
  std::vector<std::uint64_t> digests_;  ///< by tile of the layout
  unsigned half_ = 0;
};

/// The engine's.
class Incoming {
 public:
  explicit Incoming(Share share) : passage_(std::move(share)) {}

  const Share& share() const noexcept { return passage_.share(); }
  void begin();
  /// What the chunk has, checked: nothing of it lies outside of the half or over another piece. Its digests go to the
  /// entries of their tiles in `digests`. The errors of Passage::pass(); protocol, if it is the other half's turn;
  /// corrupt, if the digests are not as many as the tiles.
  Result<std::vector<Piece>> take(const wire::BucketChunk& chunk, std::span<std::uint64_t> digests);
  /// All has come, and is what the trainer means. coverage, corrupt.
  Status finish(const wire::BucketFinish& manifest, std::span<const std::uint64_t> digests) const;

 private:
  Passage passage_;
  unsigned half_ = 0;
};

}  // namespace deltasync::bucket
