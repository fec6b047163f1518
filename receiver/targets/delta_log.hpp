// Deltas applied to tiles in memory, and what rolls them back.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "format/tiling.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync {

/// The tiles of one version, wherever their elements are. Different tiles may be used by different threads at once.
/// What exchange() was asked for has happened when settle() returns, and not necessarily before: until then its tile is
/// used by nobody, and its changes stay where they are. So a device may collect them for one kernel. An error of put,
/// exchange or settle means that nobody knows what the memory has.
class TileStore {
 public:
  virtual ~TileStore() = default;
  /// The tile as it is now, to be read or changed: its place, or a copy of it in `scratch`. On error nothing has
  /// changed.
  virtual Result<TileRows> open_tile(const Tile& tile, std::vector<std::byte>& scratch) = 0;
  /// The tile is what `rows` has: those of open_tile, which have changed, or any others. They are not needed any more
  /// when this returns.
  virtual Status put(const Tile& tile, const TileRows& rows) = 0;
  /// Exchanges a record's changes (delta::resolve_tile) with what is there: in `changes` is then what rolls it back.
  virtual Status exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) = 0;
  /// All of it has happened. Called by one thread when the others have ended.
  virtual Status settle() { return {}; }
};

/// The undo log of one update. Decoded changes that were exchanged are that log themselves; of frames that come without
/// them the frame is, with the bytes that it overwrote.
class DeltaLog {
 public:
  /// Applies verified steps, oldest first, and keeps them. `digests` are those of all tiles before. On error nothing is
  /// kept, and memory is as before unless it is torn(). timed_out; corrupt, naming a tile in which somebody wrote since
  /// it was verified, as far as it shows; io, the memory's own.
  Status apply(const Layout& layout, std::vector<StagedStep> steps, std::span<const std::uint64_t> digests,
               TileStore& memory, ThreadPool& pool, Deadline deadline);
  /// Rolls back what apply() did. On error memory has anything.
  Status revert(const Layout& layout, TileStore& memory, ThreadPool& pool);

  /// apply() failed, and nobody knows what the memory has: writing failed there, or rolling back what was written.
  bool torn() const noexcept { return torn_; }

 private:
  /// What rolls one frame back: the bytes that were overwritten, record i's end at ends[i]. Records whose changes were
  /// exchanged need none: these are in the frame, or in `late` if they were decoded here.
  struct FrameUndo {
    std::vector<std::byte> bytes;
    std::vector<std::size_t> ends;
    std::vector<std::byte> late;
  };
  class Writing;
  /// `digests` are those before the step and become those after it, or there are none.
  Status apply_step(const Layout& layout, std::size_t step, std::span<std::uint64_t> digests, Writing& memory,
                    ThreadPool& pool, Deadline deadline);
  static Status apply_frame(const Layout& layout, StagedFrame& frame, FrameUndo& undo, std::span<std::uint64_t> digests,
                            Writing& memory, std::vector<std::byte>& scratch);
  static Status decode_late(const Layout& layout, const delta::TileRecord& record, std::uint64_t digest,
                            MutByteSpan changes, Writing& memory, std::vector<std::byte>& scratch);
  static Status overwrite(const Layout& layout, const delta::TileRecord& record, std::vector<std::byte>& undo,
                          Writing& memory, std::vector<std::byte>& scratch);
  Status revert_step(const Layout& layout, std::size_t step, TileStore& memory, ThreadPool& pool);
  static Status revert_frame(const Layout& layout, StagedFrame& frame, FrameUndo& undo, TileStore& memory,
                             std::vector<std::byte>& scratch);
  Error fail(const Layout& layout, Error why, std::size_t steps, bool torn, TileStore& memory, ThreadPool& pool);

  std::vector<StagedStep> steps_;
  std::vector<std::vector<FrameUndo>> undo_;  ///< by step, by frame
  bool torn_ = false;
};

}  // namespace deltasync
