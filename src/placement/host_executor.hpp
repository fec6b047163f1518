// Moves tiles and changed elements between contiguous memory and the places that a placement gives them, all of it in
// host memory.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "base/bytes.hpp"
#include "placement/word_table.hpp"

namespace deltasync::placement {

/// Tiles are named by their rank in the placement's set. Different tiles may be worked on by different threads at once;
/// what belongs to no needed tile is never touched.
class HostExecutor {
 public:
  /// Whose memory it is that elements without a place are kept in.
  enum class Rest : std::uint8_t {
    own,    ///< made here, and zeroed by this thread
    given,  ///< set_rest() is called before the first tile is used
  };
  /// unsupported if a memory is on a device; no_space.
  static Result<HostExecutor> make(std::shared_ptr<const Placement> placement, Rest rest = Rest::own);
  /// placement().rest_bytes() of them, zero, at an address that every element may have. Borrowed.
  void set_rest(std::byte* memory) noexcept;

  const Placement& placement() const noexcept { return *placement_; }
  WordTable table() const { return tables_.view(); }
  std::uint64_t tile_bytes(std::uint64_t rank) const noexcept;

  /// All elements of the tile, row by row without gaps: tile_bytes().
  void gather_tile(std::uint64_t rank, std::byte* to) const;
  /// And back, to every place that an element has, from rows that may have gaps.
  void scatter_tile(std::uint64_t rank, const std::byte* from, std::uint64_t row_stride) const;
  /// Exchanges the tile with the one in `bytes`, row by row without gaps. `scratch` is working memory.
  void exchange_tile(std::uint64_t rank, std::byte* bytes, std::vector<std::byte>& scratch) const;

  /// `changes` are `count` local indices (16 bits each), then as many elements: these are exchanged with the ones in
  /// memory. Copies of an element are written as well, so the same call once more rolls it all back where they were
  /// alike.
  void exchange_words(std::uint64_t rank, std::uint32_t count, MutByteSpan changes) const;
  /// The same, and nothing is kept of what was there.
  void scatter_words(std::uint64_t rank, std::uint32_t count, ByteSpan changes) const;

  /// A tile that lies in live memory as in a half: rows of elements without gaps.
  struct Rows {
    std::byte* first = nullptr;
    std::uint64_t row_stride = 0;
  };
  /// To be written: in one place only.
  std::optional<Rows> rows_of(std::uint64_t rank) const noexcept;
  /// To be read: where its elements are read, whatever copies they have.
  std::optional<Rows> read_rows_of(std::uint64_t rank) const noexcept;

 private:
  HostExecutor() = default;
  Rect rect_of(const WordTile& tile, std::uint64_t rank) const noexcept;

  std::shared_ptr<const Placement> placement_;
  std::unique_ptr<std::byte[]> own_rest_;
  WordTables tables_;
  std::vector<std::uint32_t> rows_;  ///< of each tile
};

}  // namespace deltasync::placement
