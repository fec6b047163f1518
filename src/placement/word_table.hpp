// The table that words.hpp works on, made for one kind of memory: the host's, or a device's.
#pragma once

#include <functional>
#include <vector>

#include "placement/regions.hpp"
#include "placement/words.hpp"

namespace deltasync::placement {

/// Owns what a WordTable points to.
struct WordTables {
  std::vector<WordTile> tiles;
  std::vector<WordRegion> regions;
  WordTable view() const { return {tiles.data(), regions.data()}; }
};

/// `base_of(memory)` is the address of a memory (index in Placement::memories(), or kRestMemory) as the code sees it
/// that uses the table; null: not in this table.
WordTables make_word_tables(const Placement& placement, const std::function<std::byte*(std::uint32_t memory)>& base_of);

}  // namespace deltasync::placement
