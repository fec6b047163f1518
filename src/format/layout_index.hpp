// What Layout is built with and keeps beside its tensors: the checks of one tensor, names sorted for look-ups, and the
// tile arithmetic of each tensor.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "deltasync/layout.hpp"

namespace deltasync {

/// The tile grid of one tensor in three numbers; the rest follows from the cuts (layout_format.md "Tiling").
struct TileGeometry {
  std::uint64_t band_rows = 0;
  std::uint64_t bands = 0;
  std::uint64_t panels = 0;
};
/// `rows` and `cols` as in Tensor; the cuts of `spec` have been checked against them.
TileGeometry tile_geometry(const TensorSpec& spec, std::uint64_t rows, std::uint64_t cols);

/// Checks what the spec of tensor number `position` says about itself, and fills in rows, cols, element_bytes and
/// bytes.
Status derive(Tensor& t, std::size_t position);

struct Layout::Index {
  struct Name {
    std::uint64_t hash = 0;
    std::uint32_t tensor = 0;
  };
  std::vector<Name> names;                ///< by hash, then by name
  std::vector<std::uint64_t> first_tile;  ///< per tensor
  std::vector<TileGeometry> geometry;     ///< per tensor
};

}  // namespace deltasync
