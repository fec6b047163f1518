// The records of a verified delta by tile, and what a tile is after them. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "receiver/targets/target.hpp"

namespace deltasync::relay {

class TilePatches {
 public:
  TilePatches() = default;
  /// `steps` are borrowed, oldest first; their decoded changes are used up by apply().
  TilePatches(const Layout& layout, std::vector<StagedStep>& steps);

  bool has(std::uint64_t tile) const noexcept;
  /// `rows` has the tile's rows contiguous, with this digest before and all records applied after. Different
  /// tiles may be patched by different threads. corrupt if the tile is another one than was verified.
  Status apply(const Layout& layout, std::uint64_t tile, std::byte* rows, std::uint64_t digest) const;

 private:
  struct Patch {
    std::uint64_t tile = 0;
    const delta::TileRecord* record = nullptr;
    bool decoded = false;
    MutByteSpan changes;  ///< if it is decoded
  };
  std::vector<Patch>::const_iterator find(std::uint64_t tile) const noexcept;

  std::vector<Patch> patches_;  ///< by tile; those of a tile from the oldest step on
};

}  // namespace deltasync::relay
