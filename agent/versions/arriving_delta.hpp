// A delta that a relay is still receiving: the frames so far, for receivers that hold the version it leads from.
//
// Invariants:
//   - A frame is here only with the tiles that it settles: of these tiles it is all that changes, for ever.
//   - It is of one version, whatever becomes of it. Who has read all of it has the whole delta, whether or not the
//   relay
//     ever commits it: each reader verifies tiles and root, as of any delta.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "agent/versions/changes.hpp"
#include "delta/delta.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "format/wire.hpp"

namespace deltasync::agent {

/// Thread-safe.
class ArrivingDelta {
 public:
  /// The sums are those of the relay's plan. More than twice as many bytes are not taken.
  ArrivingDelta(LayoutPtr layout, std::uint64_t frames, std::uint64_t frame_bytes);

  struct Piece {
    delta::Frame frame;
    std::uint64_t hash = 0;  ///< XXH3-64 of its bytes
  };
  using PiecePtr = std::shared_ptr<const Piece>;

  /// What changes in these tiles: one frame, or nothing if that is empty. protocol, out_of_range, corrupt or no_space:
  /// it is not taken.
  Status add(const wire::TileRange& tiles, std::vector<std::byte> frame);

  struct Settled {
    std::uint64_t end = 0;         ///< tiles [first, end) are
    std::vector<PiecePtr> pieces;  ///< those that have tiles there, ascending
  };
  /// How far the tiles from `first` on are settled, up to `end`.
  Settled settled(std::uint64_t first, std::uint64_t end) const;

  std::uint64_t frames() const noexcept { return frames_; }
  /// How many tiles are settled; it only grows.
  std::uint64_t tiles_settled() const;
  /// No more of it will come, though not all is there.
  bool cut_short() const;
  /// Nothing is taken any more.
  void end();
  /// Told of each part, and of the end.
  Changes& changes() noexcept { return changes_; }

 private:
  Status settle(const wire::TileRange& tiles, PiecePtr piece);
  bool whole_locked() const { return tiles_settled_ == layout_->tile_count(); }

  const LayoutPtr layout_;
  const std::uint64_t frames_;
  const std::uint64_t bytes_max_;
  Changes changes_;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::uint64_t> ranges_;  // settled: first → end, not adjacent. Protected by mutex_, as below
  std::map<std::uint64_t, PiecePtr> pieces_;       // by their first tile
  std::uint64_t tiles_settled_ = 0;
  std::uint64_t bytes_ = 0;
  bool ended_ = false;
};

}  // namespace deltasync::agent
