// Deltas applied to tiles in host memory, and what takes them back.
#pragma once

#include <vector>

#include "receiver/target.hpp"

namespace deltasync {

/// Tiles in host memory, wherever their elements are. Different tiles may be used by different threads at once.
class TileStore {
 public:
  virtual ~TileStore() = default;
  /// The tile, to be changed: its place, or a copy of it in `scratch`.
  virtual TileRows open_tile(const Tile& tile, std::vector<std::byte>& scratch) = 0;
  /// What open_tile gave has changed.
  virtual void close_tile(const Tile& tile, const TileRows& rows) = 0;
  /// Exchanges a record's changes (delta::resolve_tile) with what is there.
  virtual void exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) = 0;
};

/// The undo log of one update. Decoded changes that were exchanged are that log themselves; of frames that come without
/// them the frame is, with the bytes that it overwrote.
class DeltaLog {
 public:
  /// Applies verified steps, oldest first, and keeps them. On error (timed_out) memory is as before, and nothing kept.
  Status apply(const Layout& layout, std::vector<StagedStep> steps, TileStore& memory, ThreadPool& pool,
               Deadline deadline);
  /// Takes back what apply() did.
  void revert(const Layout& layout, TileStore& memory, ThreadPool& pool);

 private:
  /// What takes one frame back: the bytes that commit_tile overwrote, record i's end at ends[i]. Records whose changes
  /// were exchanged need none.
  struct FrameUndo {
    std::vector<std::byte> bytes;
    std::vector<std::size_t> ends;
  };
  Status apply_step(const Layout& layout, std::size_t step, TileStore& memory, ThreadPool& pool, Deadline deadline);
  void revert_step(const Layout& layout, std::size_t step, TileStore& memory, ThreadPool& pool);

  std::vector<StagedStep> steps_;
  std::vector<std::vector<FrameUndo>> undo_;  ///< by step, by frame
};

}  // namespace deltasync
