// One tile over several records (delta_format.md "Merged deltas"): what its elements have become, as far as the
// records tell it without the tile.
#pragma once

#include <memory>
#include <vector>

#include "delta/delta.hpp"
#include "delta/geometry.hpp"
#include "delta/kernels.hpp"
#include "delta/rice.hpp"

namespace deltasync::delta {

/// begin(), add() for each record from the oldest on, finish(). One per worker, since it keeps the working memory.
class TileMerger {
 public:
  explicit TileMerger(const Kernels& kernels);

  /// Forgets whatever was before, an unfinished tile too.
  void begin(const TileShape& shape);
  /// `corrupt` if the payload is; unsupported for rice_class.
  Status add(const TileRecord& record);

  enum class Outcome : std::uint8_t {
    unchanged,     ///< as it was before the first record: no record says so
    changed,       ///< the payload was appended
    needs_target,  ///< the records alone do not tell it in one codec
  };
  /// Appends the payload and fills in the record but for tile and digest. `target` is the tile after the last record,
  /// row by row without padding, or null. `corrupt` if a tile whose bytes are all known does not have record's
  /// digest_after.
  Result<Outcome> finish(const std::byte* target, TileRecord& record, std::vector<std::byte>& out);

 private:
  static constexpr std::size_t kMaskWords = kTileElementsMax / 64;

  template <class U, bool kFloat>
  void add_differences(const DecodedTile& tile);
  template <class U>
  void add_values(const DecodedTile& tile);
  /// Lists the elements that may have changed and clears the accumulators.
  template <class U>
  void gather();
  void gather_elements();
  Outcome encode(const std::byte* target, TileRecord& record, std::vector<std::byte>& out);
  void append_whole(const std::byte* bytes, TileRecord& record, std::vector<std::byte>& out) const;

  struct Arena {
    alignas(64) std::byte sums[kTileElementsMax * 8];    ///< of differences; zero wherever `summed` is not set
    alignas(64) std::byte values[kTileElementsMax * 8];  ///< elements that are known; what is not marked is garbage
    std::uint64_t summed[kMaskWords] = {};               ///< positions with a difference
    std::uint64_t known[kMaskWords] = {};                ///< positions with a value, unless all are
    std::uint16_t positions[kTileElementsMax + kSlack];
    alignas(64) std::byte diffs[(kTileElementsMax + kSlack) * 8];
  };

  const Kernels& kernels_;
  const std::unique_ptr<Arena> arena_;
  RiceScratch scratch_;
  TileShape shape_;          ///< of no elements between two tiles
  bool all_known_ = false;   ///< a raw record was there
  bool some_known_ = false;  ///< `known` is not empty
  // What gather() lists.
  std::uint32_t listed_ = 0;
  std::uint32_t listed_known_ = 0;
};

}  // namespace deltasync::delta
