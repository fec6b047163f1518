// Making a part: the rectangles that a node holds, as a layout of their own.
#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "format/coverage.hpp"
#include "format/layout_index.hpp"
#include "format/part.hpp"
#include "format/tiling.hpp"

namespace deltasync {
namespace {

bool is_cut(std::uint64_t at, std::uint64_t length, const std::vector<std::uint64_t>& cuts) {
  return at == 0 || at == length || std::binary_search(cuts.begin(), cuts.end(), at);
}

std::vector<std::uint64_t> cuts_inside(const std::vector<std::uint64_t>& cuts, std::uint64_t begin,
                                       std::uint64_t count) {
  std::vector<std::uint64_t> inside;
  for (const std::uint64_t cut : cuts) {
    if (cut > begin && cut < begin + count) inside.push_back(cut - begin);
  }
  return inside;
}

Result<TensorSpec> piece_spec(const Layout& whole, std::uint32_t index, const Rect& rect) {
  const Tensor& tensor = whole.tensors()[index];
  if (rect == Rect{0, 0, tensor.rows, tensor.cols}) return tensor.spec;
  TensorSpec spec;
  spec.name = describe_slice(tensor, rect);
  spec.dtype = tensor.spec.dtype;
  if (tensor.spec.shape.size() > 1) spec.shape.push_back(rect.rows);
  spec.shape.push_back(rect.cols * dtype_packed(spec.dtype));
  const auto& row_cuts = tensor.spec.row_cuts;
  const auto& col_cuts = tensor.spec.col_cuts;
  for (const std::uint64_t row : {rect.row, rect.row + rect.rows}) {
    if (is_cut(row, tensor.rows, row_cuts)) continue;
    return Error(Errc::invalid_argument,
                 tensor.spec.name + ": a part ends at row " + std::to_string(row) + ", where the layout has no cut");
  }
  for (const std::uint64_t col : {rect.col, rect.col + rect.cols}) {
    if (is_cut(col, tensor.cols, col_cuts)) continue;
    return Error(Errc::invalid_argument,
                 tensor.spec.name + ": a part ends at column " + std::to_string(col) + ", where the layout has no cut");
  }
  spec.col_cuts = cuts_inside(col_cuts, rect.col, rect.cols);
  spec.row_cuts = cuts_inside(row_cuts, rect.row, rect.rows);
  if (rect.cols != tensor.cols) {
    // The height of bands follows from the widest panel, which another part may have: each band begins at a cut.
    const TileGrid grid = grid_of(whole, index);
    spec.row_cuts.clear();
    for (std::uint64_t b = grid.band_of(rect.row); b < grid.bands(); ++b) {
      const std::uint64_t first = grid.band(b).first;
      if (first >= rect.row + rect.rows) break;
      if (first > rect.row) spec.row_cuts.push_back(first - rect.row);
    }
  }
  return spec;
}

}  // namespace

Status check_members(const std::vector<Part::Member>& members) {
  std::set<std::string_view> names;
  for (const Part::Member& member : members) {
    if (member.name.empty() || member.endpoint.empty() || member.name.size() > kPartNameBytesMax ||
        member.endpoint.size() > kPartNameBytesMax) {
      return Error(Errc::invalid_argument, "member '" + member.name + "' at '" + member.endpoint +
                                               "': name and endpoint have 1 to " + std::to_string(kPartNameBytesMax) +
                                               " bytes");
    }
    if (!names.insert(member.name).second) {
      return Error(Errc::invalid_argument, "two members are called '" + member.name + "'");
    }
  }
  return {};
}

Status add_cuts(std::vector<TensorSpec>& specs, std::span<const TensorSlice> slices) {
  std::map<std::uint32_t, std::pair<std::set<std::uint64_t>, std::set<std::uint64_t>>> cuts;  // rows, columns
  for (const TensorSlice& slice : slices) {
    if (slice.tensor >= specs.size()) {
      return Error(Errc::out_of_range,
                   "tensor " + std::to_string(slice.tensor) + " of " + std::to_string(specs.size()));
    }
    auto& [rows, cols] = cuts[slice.tensor];
    rows.insert({slice.rect.row, slice.rect.row + slice.rect.rows});
    cols.insert({slice.rect.col, slice.rect.col + slice.rect.cols});
  }
  for (auto& [index, at] : cuts) {
    TensorSpec& spec = specs[index];
    Tensor view;
    view.spec = spec;
    DS_TRY(derive(view, index));
    const auto add = [&](std::vector<std::uint64_t>& list, std::set<std::uint64_t>& edges, std::uint64_t length) {
      if (*edges.rbegin() > length) return false;
      edges.insert(list.begin(), list.end());
      edges.erase(0);
      edges.erase(length);
      list.assign(edges.begin(), edges.end());
      return true;
    };
    if (!add(spec.row_cuts, at.first, view.rows) || !add(spec.col_cuts, at.second, view.cols)) {
      return Error(Errc::out_of_range, spec.name + ": a part is not inside of its " + std::to_string(view.rows) +
                                           " rows and " + std::to_string(view.cols) + " columns");
    }
  }
  return {};
}

Result<std::pair<LayoutPtr, Sidecar>> make_part(LayoutPtr whole, const Sidecar& sidecar,
                                                std::span<const TensorSlice> held,
                                                const std::vector<std::pair<std::string, std::string>>& members,
                                                std::uint32_t self) {
  Part part;
  for (const auto& [name, endpoint] : members) part.members.push_back({name, endpoint});
  DS_TRY(check_members(part.members));
  if (self >= members.size()) {
    return Error(Errc::invalid_argument, "member " + std::to_string(self) + " of " + std::to_string(members.size()));
  }
  if (!sidecar.part.empty()) return Error(Errc::invalid_argument, "the whole model's sidecar is that of a part");
  DS_ASSIGN(const std::vector<TensorSlice> joined, join_slices(*whole, held));
  if (joined.empty()) return Error(Errc::invalid_argument, "the part holds nothing");
  std::vector<TensorSpec> specs;
  for (const auto& [tensor, rect] : joined) {
    DS_ASSIGN(TensorSpec spec, piece_spec(*whole, tensor, rect));
    specs.push_back(std::move(spec));
    part.origins.push_back({tensor, rect.row, rect.col});
  }
  DS_ASSIGN(LayoutPtr layout, Layout::build(std::move(specs)));
  part.whole = std::move(whole);
  part.sidecar = sidecar;
  part.self = self;
  DS_TRY(PartMap::check(*layout, part));
  Sidecar made;
  made.part = encode_part(part);
  return std::pair{std::move(layout), std::move(made)};
}

}  // namespace deltasync
