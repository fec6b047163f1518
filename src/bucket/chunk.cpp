#include "bucket/chunk.hpp"

#include <algorithm>
#include <utility>

namespace deltasync::bucket {
namespace {

constexpr std::size_t kNamed = 8;

std::uint64_t aligned(std::uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::uint64_t longest_band(const TileGrid& grid) {
  std::uint64_t rows = 0;
  for (std::uint64_t b = 0; b < grid.bands(); ++b) rows = std::max(rows, grid.band(b).second);
  return rows;
}

Status check_bands(const Layout& layout, std::uint32_t index, std::uint64_t half_bytes) {
  const Tensor& tensor = layout.tensors()[index];
  if (tensor.bytes <= half_bytes) return {};
  const std::uint64_t band = longest_band(grid_of(layout, index)) * tensor.row_bytes();
  if (band <= half_bytes) return {};
  return Error(Errc::invalid_argument, tensor.spec.name + " goes by bands of " + std::to_string(band) +
                                           " bytes, and a bucket has " + std::to_string(half_bytes) +
                                           ": make buckets larger");
}

}  // namespace

Tile tile_in(const Layout& layout, const Piece& piece, std::uint64_t index) {
  const Tensor& tensor = layout.tensors()[piece.part.tensor];
  if (tensor.tile_count != 1) return tile_of(layout, index);
  return {index, piece.part.tensor, {0, 0, tensor.rows, tensor.cols}};
}

// ---- Share ---------------------------------------------------------------------------------------------------------

Result<Share> Share::make(LayoutPtr layout, std::vector<wire::TileRange> tensors, std::uint64_t half_bytes) {
  const std::uint64_t all = layout->tensors().size();
  if (half_bytes == 0 || half_bytes % kAlignment != 0 || half_bytes > kHalfBytesMax) {
    return Error(Errc::invalid_argument, "buckets of " + std::to_string(half_bytes) + " bytes: a multiple of " +
                                             std::to_string(kAlignment) + ", 1 TiB at most");
  }
  if (tensors.empty() && all != 0) tensors.push_back({0, all});
  Share share;
  share.half_bytes_ = half_bytes;
  share.mine_.resize(static_cast<std::size_t>(all));
  std::vector<wire::TileRange> tiles;
  for (const wire::TileRange& range : tensors) {
    if (range.end > all) {
      return Error(Errc::out_of_range,
                   "tensor " + std::to_string(range.end - 1) + " of a layout with " + std::to_string(all));
    }
    for (std::uint64_t t = range.first; t < range.end; ++t) {
      const Tensor& tensor = layout->tensors()[t];
      DS_TRY(check_bands(*layout, static_cast<std::uint32_t>(t), half_bytes));
      share.mine_[t] = true;
      share.bytes_ += tensor.bytes;
      ++share.count_;
    }
    const std::uint64_t first = layout->tensors()[range.first].first_tile;
    const Tensor& last = layout->tensors()[range.end - 1];
    const std::uint64_t end = last.first_tile + last.tile_count;
    if (first != end) tiles.push_back({first, end});
  }
  if (!tiles.empty()) {
    DS_ASSIGN(share.tiles_, TileSet::make(*layout, tiles));
  }
  share.tensors_ = std::move(tensors);
  share.layout_ = std::move(layout);
  return share;
}

// ---- Passage -------------------------------------------------------------------------------------------------------

Passage::Passage(Share share) : share_(std::move(share)) {
  begin();
}

void Passage::begin() {
  const std::size_t tensors = share_.layout().tensors().size();
  bands_.assign(tensors, 0);
  whole_.assign(tensors, false);
  left_ = share_.count();
  begin_chunk();
}

std::string Passage::name(std::uint32_t tensor) const {
  return share_.layout().tensors()[tensor].spec.name;
}

Result<Piece> Passage::locate(const wire::BucketPart& part) const {
  const Tensor& tensor = share_.layout().tensors()[part.tensor];
  Piece piece{part, aligned(used_), 0, tensor.bytes, tensor.first_tile, tensor.tile_count};
  if (part.bands != 0) {
    const TileGrid grid = grid_of(share_.layout(), part.tensor);
    if (part.first_band >= grid.bands() || part.bands > grid.bands() - part.first_band) {
      return Error(Errc::out_of_range, name(part.tensor) + ": bands " + std::to_string(part.first_band) + " and " +
                                           std::to_string(part.bands - 1) + " more of " + std::to_string(grid.bands()));
    }
    const auto [last_row, last_rows] = grid.band(part.first_band + part.bands - 1);
    piece.from = grid.band(part.first_band).first * tensor.row_bytes();
    piece.bytes = (last_row + last_rows) * tensor.row_bytes() - piece.from;
    piece.first_tile += part.first_band * grid.panels();
    piece.tiles = part.bands * grid.panels();
  }
  if (piece.offset > share_.half_bytes() || piece.bytes > share_.half_bytes() - piece.offset) {
    return Error(Errc::no_space, name(part.tensor) + ": " + std::to_string(piece.bytes) + " bytes at " +
                                     std::to_string(piece.offset) + " of a bucket of " +
                                     std::to_string(share_.half_bytes()));
  }
  return piece;
}

Result<Piece> Passage::pass(const wire::BucketPart& part) {
  if (part.tensor >= whole_.size()) {
    return Error(Errc::out_of_range,
                 "tensor " + std::to_string(part.tensor) + " of a layout with " + std::to_string(whole_.size()));
  }
  if (!share_.has(part.tensor)) {
    return Error(Errc::invalid_argument, name(part.tensor) + " is for another rank to send");
  }
  if (whole_[part.tensor]) return Error(Errc::already_exists, name(part.tensor) + " is sent twice in one version");
  std::uint64_t& bands = bands_[part.tensor];
  if (part.first_band != bands) {
    return Error(Errc::invalid_argument, name(part.tensor) + ": band " + std::to_string(part.first_band) +
                                             " came where " + std::to_string(bands) + " was due");
  }
  if (alone_ || (part.bands != 0 && used_ != 0)) {
    return Error(Errc::invalid_argument, name(part.tensor) + ": bands of a tensor share a bucket with nothing");
  }
  DS_ASSIGN(const Piece piece, locate(part));
  used_ = piece.offset + piece.bytes;
  alone_ = part.bands != 0;
  bands += part.bands;
  const Tensor& tensor = share_.layout().tensors()[part.tensor];
  if (piece.from + piece.bytes == tensor.bytes) {
    whole_[part.tensor] = true;
    --left_;
  }
  return piece;
}

std::optional<wire::BucketPart> Passage::next_part(std::uint32_t tensor) const {
  const std::uint64_t half = share_.half_bytes();
  const Tensor& t = share_.layout().tensors()[tensor];
  if (alone_) return std::nullopt;
  if (t.bytes <= half) {
    if (aligned(used_) > half || t.bytes > half - aligned(used_)) return std::nullopt;
    return wire::BucketPart{tensor, 0, 0};
  }
  if (used_ != 0) return std::nullopt;
  const TileGrid grid = grid_of(share_.layout(), tensor);
  wire::BucketPart part{tensor, bands_[tensor], 0};
  std::uint64_t bytes = 0;
  while (part.first_band + part.bands < grid.bands()) {
    bytes += grid.band(part.first_band + part.bands).second * t.row_bytes();
    if (bytes > half) break;
    ++part.bands;
  }
  return part;
}

Status Passage::check_whole() const {
  if (left_ == 0) return {};
  std::string names;
  std::size_t named = 0;
  for (std::uint32_t t = 0; t < whole_.size() && named < kNamed; ++t) {
    if (!share_.has(t) || whole_[t]) continue;
    names += (named++ == 0 ? "" : ", ") + name(t) + (bands_[t] != 0 ? " (in part)" : "");
  }
  const std::string more = left_ > named ? " and " + std::to_string(left_ - named) + " more" : "";
  return Error(Errc::coverage, std::to_string(left_) + " of " + std::to_string(share_.count()) +
                                   " tensors have not come: " + names + more);
}

// ---- Outgoing ------------------------------------------------------------------------------------------------------

Outgoing::Outgoing(Share share) : passage_(std::move(share)) {
  begin();
}

void Outgoing::begin() {
  passage_.begin();
  pieces_.clear();
  digests_.assign(static_cast<std::size_t>(share().layout().tile_count()), 0);
  half_ = 0;
}

Result<std::optional<Piece>> Outgoing::next(std::uint32_t tensor) {
  wire::BucketPart part{tensor, 0, 0};
  if (share().has(tensor) && !is_whole(tensor)) {  // else pass() says what is wrong
    const auto fits = passage_.next_part(tensor);
    if (!fits) return std::optional<Piece>();
    part = *fits;
  }
  DS_ASSIGN(const Piece piece, passage_.pass(part));
  pieces_.push_back(piece);
  return std::optional<Piece>(piece);
}

wire::BucketChunk Outgoing::take(std::vector<std::uint64_t> digests) {
  wire::BucketChunk chunk;
  chunk.half = static_cast<std::uint8_t>(half_);
  chunk.parts.reserve(pieces_.size());
  std::size_t at = 0;
  for (const Piece& piece : pieces_) {
    chunk.parts.push_back(piece.part);
    for (std::uint64_t t = 0; t < piece.tiles; ++t) digests_[piece.first_tile + t] = digests[at++];
  }
  chunk.digests = std::move(digests);
  pieces_.clear();
  passage_.begin_chunk();
  half_ ^= 1;
  return chunk;
}

// ---- Incoming ------------------------------------------------------------------------------------------------------

void Incoming::begin() {
  passage_.begin();
  half_ = 0;
}

Result<std::vector<Piece>> Incoming::take(const wire::BucketChunk& chunk, std::span<std::uint64_t> digests) {
  if (chunk.half != half_) {
    return Error(Errc::protocol, "half " + std::to_string(chunk.half) + " came where the other one was due");
  }
  std::vector<Piece> pieces;
  pieces.reserve(chunk.parts.size());
  passage_.begin_chunk();
  std::uint64_t tiles = 0;
  for (const wire::BucketPart& part : chunk.parts) {
    DS_ASSIGN(const Piece piece, passage_.pass(part));
    tiles += piece.tiles;
    pieces.push_back(piece);
  }
  if (tiles != chunk.digests.size()) {
    return Error(Errc::corrupt, "a chunk of " + std::to_string(tiles) + " tiles has " +
                                    std::to_string(chunk.digests.size()) + " digests");
  }
  auto from = chunk.digests.begin();
  for (const Piece& piece : pieces) {
    std::copy_n(from, piece.tiles, digests.begin() + static_cast<std::ptrdiff_t>(piece.first_tile));
    from += static_cast<std::ptrdiff_t>(piece.tiles);
  }
  half_ ^= 1;
  return pieces;
}

Status Incoming::finish(const wire::BucketFinish& manifest, std::span<const std::uint64_t> digests) const {
  DS_TRY(passage_.check_whole());
  if (manifest.tensors != share().count() || manifest.model_bytes != share().bytes()) {
    return Error(Errc::corrupt, "the manifest names " + std::to_string(manifest.tensors) + " tensors of " +
                                    std::to_string(manifest.model_bytes) + " bytes; " +
                                    std::to_string(share().count()) + " of " + std::to_string(share().bytes()) +
                                    " came");
  }
  if (manifest.root != share().root(digests)) {
    return Error(Errc::corrupt, "the manifest's digest is not that of what came");
  }
  return {};
}

}  // namespace deltasync::bucket
