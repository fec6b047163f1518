// The tiles of a part (deltasync/part.hpp) and those of the whole layout: the same rectangles under other numbers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "deltasync/part.hpp"
#include "format/tiling.hpp"

namespace deltasync {

inline constexpr std::size_t kPartMembersMax = 65'536;
inline constexpr std::size_t kPartNameBytesMax = 256;  ///< of a member, its endpoint likewise

/// What Sidecar::part says. `origins` belongs to the tensors of the part's layout.
struct Part {
  /// A trainer node of the job.
  struct Member {
    std::string name;      ///< unique
    std::string endpoint;  ///< HOST:PORT of its agent, as receivers reach it
  };
  /// Where the first element of a tensor of the part lies in the whole layout.
  struct Origin {
    std::uint32_t tensor = 0;  ///< index in `whole`
    std::uint64_t row = 0;
    std::uint64_t col = 0;
  };
  LayoutPtr whole;              ///< the one layout of the job
  Sidecar sidecar;              ///< of the whole model
  std::vector<Origin> origins;  ///< grow by tensor, then row, then column
  std::vector<Member> members;  ///< all of them, the same list at each
  std::uint32_t self = 0;       ///< index of this one in `members`
};

/// Immutable; any thread.
class PartMap {
 public:
  /// Errors: corrupt, if `part` is not one of this layout: a rectangle that is not inside its tensor, has another dtype
  /// or other tiles, or overlaps another one.
  static Result<PartMap> build(LayoutPtr layout, const Part& part);
  static Status check(const Layout& layout, const Part& part);

  const LayoutPtr& layout() const noexcept { return layout_; }
  const LayoutPtr& whole() const noexcept { return whole_; }
  /// Of a tile of the part's layout (< its tile_count()). O(log tensors).
  std::uint64_t tile_in_whole(std::uint64_t tile) const;
  /// The same with its rectangle there.
  Tile tile_in_whole(const Tile& tile) const;
  /// Of a tile of the whole layout; nothing: the part does not have it. O(log tensors + rectangles of its tensor).
  std::optional<std::uint64_t> tile_in_part(std::uint64_t tile) const;
  /// A rectangle of a tensor of the part, in the whole.
  TensorSlice slice_in_whole(const TensorSlice& slice) const;
  /// Tiles of the part, in order, are in order in the whole, too.
  bool keeps_order() const noexcept { return keeps_order_; }

 private:
  /// A tensor of the part: its tiles are `bands` × `panels` of those of a tensor of the whole.
  struct Piece {
    Part::Origin origin;
    std::uint64_t first = 0;  ///< tile of the part
    std::uint64_t bands = 0;
    std::uint64_t panels = 0;
    std::uint64_t whole_first = 0;  ///< tile of the whole: the tensor's first
    std::uint64_t whole_panels = 0;
    std::uint64_t band = 0;  ///< in the tensor of the whole, of the first
    std::uint64_t panel = 0;
  };
  static Result<std::vector<Piece>> make_pieces(const Layout& layout, const Part& part);
  static Result<Piece> make_piece(const Layout& layout, const Part& part, std::uint32_t tensor);

  LayoutPtr layout_;
  LayoutPtr whole_;
  std::vector<Piece> pieces_;  ///< by tensor of the part's layout
  bool keeps_order_ = true;
};

/// invalid_argument: names and endpoints that are empty, too long, or two names that are one.
Status check_members(const std::vector<Part::Member>& members);

/// Sidecar::part (layout_format.md).
std::vector<std::byte> encode_part(const Part& part);
/// For the part's layout. Errors: corrupt.
Result<Part> decode_part(ByteSpan encoded, const Layout& layout);

}  // namespace deltasync
