#include "format/part.hpp"

#include <algorithm>
#include <utility>

#include "format/coverage.hpp"
#include "format/sidecar_decoder.hpp"
#include "format/tiling.hpp"

namespace deltasync {
namespace {

Error bad_part(const std::string& what) {
  return {Errc::corrupt, "part: " + what};
}

bool by_place(const Part::Origin& a, const Part::Origin& b) {
  if (a.tensor != b.tensor) return a.tensor < b.tensor;
  return a.row != b.row ? a.row < b.row : a.col < b.col;
}

/// Whether the bands of the part's tensor, `row` rows further down, are those of the whole's from `band` on.
bool same_bands(const TileGrid& part, const TileGrid& whole, std::uint64_t row, std::uint64_t band) {
  for (std::uint64_t b = 0; b < part.bands(); ++b) {
    if (band + b >= whole.bands()) return false;
    const auto [first, rows] = part.band(b);
    if (whole.band(band + b) != std::pair{first + row, rows}) return false;
  }
  return true;
}

}  // namespace

Result<PartMap::Piece> PartMap::make_piece(const Layout& layout, const Part& part, std::uint32_t index) {
  const Tensor& mine = layout.tensors()[index];
  const Part::Origin& origin = part.origins[index];
  if (origin.tensor >= part.whole->tensors().size()) {
    return bad_part("'" + mine.spec.name + "' belongs to tensor " + std::to_string(origin.tensor) + " of " +
                    std::to_string(part.whole->tensors().size()));
  }
  const Tensor& tensor = part.whole->tensors()[origin.tensor];
  const auto wrong = [&](const std::string& what) {
    return bad_part("'" + mine.spec.name + "' " + what + " of '" + tensor.spec.name + "'");
  };
  if (mine.spec.dtype != tensor.spec.dtype) return wrong("has not the dtype");
  if (mine.tile_count == 0) return wrong("has no elements, and so is no part");
  const bool inside = mine.rows <= tensor.rows && origin.row <= tensor.rows - mine.rows && mine.cols <= tensor.cols &&
                      origin.col <= tensor.cols - mine.cols;
  if (!inside) return wrong("is not inside");
  const TileGrid grid = grid_of(layout, index);
  const TileGrid whole = grid_of(*part.whole, origin.tensor);
  Piece piece{.origin = origin,
              .first = mine.first_tile,
              .bands = grid.bands(),
              .panels = grid.panels(),
              .whole_first = tensor.first_tile,
              .whole_panels = whole.panels(),
              .band = whole.band_of(origin.row)};
  const auto panel = std::lower_bound(whole.panel_starts.begin(), whole.panel_starts.end(), origin.col);
  piece.panel = static_cast<std::uint64_t>(panel - whole.panel_starts.begin());
  const bool same_panels = piece.panel + piece.panels <= piece.whole_panels &&
                           std::equal(grid.panel_starts.begin(), grid.panel_starts.end(), panel,
                                      [&](std::uint64_t a, std::uint64_t b) { return a + origin.col == b; });
  if (!same_panels || !same_bands(grid, whole, origin.row, piece.band)) return wrong("has not the tiles");
  return piece;
}

Result<std::vector<PartMap::Piece>> PartMap::make_pieces(const Layout& layout, const Part& part) {
  if (part.origins.size() != layout.tensors().size()) {
    return bad_part("it places " + std::to_string(part.origins.size()) + " tensors, the layout has " +
                    std::to_string(layout.tensors().size()));
  }
  if (!std::is_sorted(part.origins.begin(), part.origins.end(), by_place))
    return bad_part("its tensors are not sorted");
  std::vector<Piece> pieces;
  pieces.reserve(part.origins.size());
  std::vector<TensorSlice> slices;
  slices.reserve(part.origins.size());
  for (std::uint32_t i = 0; i < part.origins.size(); ++i) {
    DS_ASSIGN(Piece piece, make_piece(layout, part, i));
    pieces.push_back(piece);
    const Tensor& tensor = layout.tensors()[i];
    slices.push_back({piece.origin.tensor, {piece.origin.row, piece.origin.col, tensor.rows, tensor.cols}});
  }
  if (const Status disjoint = check_disjoint(*part.whole, slices); !disjoint)
    return bad_part(disjoint.error().message());
  return pieces;
}

Result<PartMap> PartMap::build(LayoutPtr layout, const Part& part) {
  PartMap map;
  DS_ASSIGN(map.pieces_, make_pieces(*layout, part));
  map.layout_ = std::move(layout);
  map.whole_ = part.whole;
  for (std::size_t i = 1; i < map.pieces_.size(); ++i) {
    const std::uint64_t first = map.pieces_[i].first;
    map.keeps_order_ = map.keeps_order_ && map.tile_in_whole(first - 1) < map.tile_in_whole(first);
  }
  return map;
}

Status PartMap::check(const Layout& layout, const Part& part) {
  DS_TRY(make_pieces(layout, part));
  return {};
}

std::uint64_t PartMap::tile_in_whole(std::uint64_t tile) const {
  const Piece& piece = pieces_[layout_->tensor_of_tile(tile)];
  const std::uint64_t local = tile - piece.first;
  return piece.whole_first + (piece.band + local / piece.panels) * piece.whole_panels + piece.panel +
         local % piece.panels;
}

Tile PartMap::tile_in_whole(const Tile& tile) const {
  const TensorSlice there = slice_in_whole({tile.tensor, tile.rect});
  return {tile_in_whole(tile.index), there.tensor, there.rect};
}

std::optional<std::uint64_t> PartMap::tile_in_part(std::uint64_t tile) const {
  const std::uint32_t tensor = whole_->tensor_of_tile(tile);
  auto piece = std::lower_bound(pieces_.begin(), pieces_.end(), tensor,
                                [](const Piece& p, std::uint32_t t) { return p.origin.tensor < t; });
  for (; piece != pieces_.end() && piece->origin.tensor == tensor; ++piece) {
    const std::uint64_t band = (tile - piece->whole_first) / piece->whole_panels;
    const std::uint64_t panel = (tile - piece->whole_first) % piece->whole_panels;
    const bool inside = band >= piece->band && band - piece->band < piece->bands && panel >= piece->panel &&
                        panel - piece->panel < piece->panels;
    if (inside) return piece->first + (band - piece->band) * piece->panels + (panel - piece->panel);
  }
  return std::nullopt;
}

TensorSlice PartMap::slice_in_whole(const TensorSlice& slice) const {
  const Part::Origin& origin = pieces_[slice.tensor].origin;
  Rect rect = slice.rect;
  rect.row += origin.row;
  rect.col += origin.col;
  return {origin.tensor, rect};
}

namespace {

Result<TensorSlice> slice_in_part(const Part& part, const Layout& layout, const TensorSlice& slice) {
  DS_TRY(check_slice(*part.whole, slice));
  const Rect& rect = slice.rect;
  auto origin = std::lower_bound(part.origins.begin(), part.origins.end(), slice.tensor,
                                 [](const Part::Origin& o, std::uint32_t t) { return o.tensor < t; });
  for (; origin != part.origins.end() && origin->tensor == slice.tensor; ++origin) {
    const auto index = static_cast<std::uint32_t>(origin - part.origins.begin());
    const Tensor& mine = layout.tensors()[index];
    const bool inside = rect.row >= origin->row && rect.row + rect.rows <= origin->row + mine.rows &&
                        rect.col >= origin->col && rect.col + rect.cols <= origin->col + mine.cols;
    if (inside) return TensorSlice{index, {rect.row - origin->row, rect.col - origin->col, rect.rows, rect.cols}};
  }
  return Error(Errc::out_of_range,
               "this node's part has not all of " + describe_slice(part.whole->tensors()[slice.tensor], rect));
}

}  // namespace

Result<std::vector<TensorSlice>> slices_in_part(const Sidecar& sidecar, const Layout& layout,
                                                std::span<const TensorSlice> slices) {
  if (sidecar.part.empty()) return Error(Errc::invalid_argument, "the sidecar is not that of a part");
  DS_ASSIGN(const Part part, decode_part(sidecar.part, layout));
  std::vector<TensorSlice> mine;
  mine.reserve(slices.size());
  for (const TensorSlice& slice : slices) {
    DS_ASSIGN(const TensorSlice found, slice_in_part(part, layout, slice));
    mine.push_back(found);
  }
  return mine;
}

// ---- encoding ------------------------------------------------------------------------------------------------------

std::vector<std::byte> encode_part(const Part& part) {
  std::vector<std::byte> encoded;
  ByteWriter out(encoded);
  out.put<std::uint32_t>(part.self);
  out.put<std::uint32_t>(static_cast<std::uint32_t>(part.members.size()));
  for (const Part::Member& member : part.members) {
    out.put_string(member.name);
    out.put_string(member.endpoint);
  }
  out.put<std::uint32_t>(static_cast<std::uint32_t>(part.origins.size()));
  for (const Part::Origin& origin : part.origins) {
    out.put(origin.tensor);
    out.put(origin.row);
    out.put(origin.col);
  }
  for (const std::vector<std::byte>& bytes : {part.whole->encode(), part.sidecar.encode()}) {
    out.put<std::uint64_t>(bytes.size());
    out.append(bytes);
  }
  return encoded;
}

Result<Part> decode_part(ByteSpan encoded, const Layout& layout) {
  ByteReader in(encoded);
  Part part;
  part.self = in.get<std::uint32_t>();
  const auto members = in.get<std::uint32_t>();
  if (members > kPartMembersMax) return bad_part(std::to_string(members) + " members");
  for (std::uint32_t i = 0; i < members && !in.failed(); ++i) {
    auto name = in.get_string(kPartNameBytesMax);
    part.members.push_back({std::move(name), in.get_string(kPartNameBytesMax)});
  }
  const auto origins = in.get<std::uint32_t>();
  if (!in.failed() && origins != layout.tensors().size()) {
    return bad_part("it places " + std::to_string(origins) + " tensors, the layout has " +
                    std::to_string(layout.tensors().size()));
  }
  for (std::uint32_t i = 0; i < origins && !in.failed(); ++i) {
    const auto tensor = in.get<std::uint32_t>();
    const auto row = in.get<std::uint64_t>();
    part.origins.push_back({tensor, row, in.get<std::uint64_t>()});
  }
  const ByteSpan whole = in.take(in.get<std::uint64_t>());
  const ByteSpan sidecar = in.take(in.get<std::uint64_t>());
  DS_TRY(in.finish("part"));
  if (part.self >= part.members.size()) return bad_part("it is member " + std::to_string(part.self) + " of none");
  if (auto named = check_members(part.members); !named) return bad_part(named.error().message());
  auto decoded = Layout::decode(whole);
  if (!decoded) return std::move(decoded).error().with_context("part: the whole layout");
  part.whole = *std::move(decoded);
  SidecarDecoder files(*part.whole, sidecar.size(), false);
  DS_TRY(files.feed(sidecar).with_context("part: the whole model's"));
  DS_ASSIGN(part.sidecar, files.finish().with_context("part: the whole model's"));
  DS_TRY(PartMap::check(layout, part));
  return part;
}

}  // namespace deltasync
