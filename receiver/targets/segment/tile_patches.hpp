// The records of verified deltas by tile, and what a tile is after them. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "receiver/targets/target.hpp"

namespace deltasync::relay {

class TilePatches {
 public:
  TilePatches() = default;
  /// `steps` are borrowed, oldest first; more may be added after them.
  TilePatches(const Layout& layout, std::span<const StagedStep> steps) { add(layout, steps); }
  void add(const Layout& layout, std::span<const StagedStep> steps);

  bool has(std::uint64_t tile) const noexcept;
  /// Ascending, each once.
  std::vector<std::uint64_t> tiles() const;
  /// `rows` has the tile's rows, with this digest before and all records applied after: the digest that it has then.
  /// Different tiles may be patched by different threads. corrupt if the tile is another one than was verified.
  Result<std::uint64_t> apply(const Layout& layout, std::uint64_t tile, std::byte* rows, std::size_t row_stride,
                              std::uint64_t digest) const;

 private:
  struct Patch {
    std::uint64_t tile = 0;
    const delta::TileRecord* record = nullptr;
    bool decoded = false;
    ByteSpan changes;  ///< if it is decoded
  };
  std::vector<Patch>::const_iterator find(std::uint64_t tile) const noexcept;

  std::vector<Patch> patches_;  ///< by tile; those of a tile from the oldest step on
};

}  // namespace deltasync::relay
