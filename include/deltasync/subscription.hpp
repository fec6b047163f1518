// Which slices of a model a receiver keeps: those of its tensor-parallel rank, say.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

/// A rectangle of one tensor's 2-D view (see TensorSpec), or all of it.
struct Slice {
  std::string tensor;        ///< its name
  std::optional<Rect> rect;  ///< in elements; nothing: the whole tensor
};

/// What a receiver gets: the slices' tiles and no others. Slices may overlap. A slice that cuts through a tile brings
/// the whole tile; one that begins and ends at the layout's cuts (TensorSpec::row_cuts, col_cuts) is whole tiles, and
/// exactly its own bytes travel.
struct Subscription {
  std::vector<Slice> slices;  ///< empty: the whole model
};

/// The rows, or the columns, of rank `index` of `count`: as many for each, and one more for the first few where they do
/// not divide evenly. A 1-D tensor is one row. Errors: not_found (no such tensor), invalid_argument (no such rank, or
/// more ranks than rows or columns).
Result<Slice> row_slice(const Layout& layout, std::string_view tensor, std::uint64_t index, std::uint64_t count);
Result<Slice> col_slice(const Layout& layout, std::string_view tensor, std::uint64_t index, std::uint64_t count);

}  // namespace deltasync
