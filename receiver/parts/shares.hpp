// Which member gives which tile, where several may. Pure.
#pragma once

#include <span>
#include <vector>

#include "format/part.hpp"
#include "format/tile_set.hpp"

namespace deltasync::receiver {

/// For each member the tiles of its part that are asked from it, in ranges; none where `parts` has null, or others give
/// all that it has. Each of the `wanted` tiles of the whole layout is asked from one member, and members with the same
/// tiles get about as many bytes of them.
///   - Errc::coverage: the first tiles that no member has, by tensor and rows.
Result<std::vector<std::vector<wire::TileRange>>> divide(const Layout& whole, const TileSet& wanted,
                                                         std::span<const PartMap* const> parts);

}  // namespace deltasync::receiver
