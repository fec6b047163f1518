#include "receiver/delta_log.hpp"

#include <utility>

#include "receiver/target_checks.hpp"

namespace deltasync {
namespace {

/// Deals out the decoded changes of a frame, record by record.
class Resolved {
 public:
  Resolved(const Layout& layout, StagedFrame& frame) : layout_(layout), rest_(frame.resolved) {}
  /// Empty if there are none: a raw tile, or a frame that was not resolved.
  MutByteSpan next(const delta::TileRecord& record) {
    if (rest_.empty()) return {};
    const std::size_t bytes = delta::resolved_bytes(layout_, record);
    const MutByteSpan changes = rest_.first(bytes);
    rest_ = rest_.subspan(bytes);
    return changes;
  }

 private:
  const Layout& layout_;
  MutByteSpan rest_;
};

}  // namespace

Status DeltaLog::apply(const Layout& layout, std::vector<StagedStep> steps, TileStore& memory, ThreadPool& pool,
                       Deadline deadline) {
  steps_ = std::move(steps);
  undo_.assign(steps_.size(), {});
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    Status status = apply_step(layout, i, memory, pool, deadline);
    if (status.ok()) continue;
    for (std::size_t k = i + 1; k-- > 0;) revert_step(layout, k, memory, pool);
    *this = {};
    return status;
  }
  return {};
}

void DeltaLog::revert(const Layout& layout, TileStore& memory, ThreadPool& pool) {
  for (std::size_t i = steps_.size(); i-- > 0;) revert_step(layout, i, memory, pool);
}

/// On error some frames are applied, each of them whole: those whose undo has an end for each record.
Status DeltaLog::apply_step(const Layout& layout, std::size_t step, TileStore& memory, ThreadPool& pool,
                            Deadline deadline) {
  std::vector<StagedFrame>& frames = steps_[step].frames;
  std::vector<FrameUndo>& undo = undo_[step];
  undo.resize(frames.size());
  std::vector<std::vector<std::byte>> scratch(pool.size());
  return run_all(pool, frames.size(), deadline, "applying a delta", [&](std::uint64_t i, unsigned worker) -> Status {
    StagedFrame& frame = frames[i];
    undo[i].ends.reserve(frame.records.size());
    Resolved resolved(layout, frame);
    for (const delta::TileRecord& record : frame.records) {
      const Tile tile = layout.tile(record.tile);
      if (const MutByteSpan changes = resolved.next(record); !changes.empty()) {
        memory.exchange(tile, record, changes);
      } else {
        const TileRows rows = memory.open_tile(tile, scratch[worker]);
        delta::save_undo(layout, record, rows.first, rows.row_stride, undo[i].bytes);
        delta::commit_tile(layout, record, rows.first, rows.row_stride);
        memory.close_tile(tile, rows);
      }
      undo[i].ends.push_back(undo[i].bytes.size());
    }
    return {};
  });
}

void DeltaLog::revert_step(const Layout& layout, std::size_t step, TileStore& memory, ThreadPool& pool) {
  std::vector<StagedFrame>& frames = steps_[step].frames;
  const std::vector<FrameUndo>& undo = undo_[step];
  std::vector<std::vector<std::byte>> scratch(pool.size());
  pool.run(frames.size(), [&](std::uint64_t i, unsigned worker) {
    StagedFrame& frame = frames[i];
    Resolved resolved(layout, frame);
    std::size_t from = 0;
    for (std::size_t r = 0; r < undo[i].ends.size(); ++r) {
      const delta::TileRecord& record = frame.records[r];
      const Tile tile = layout.tile(record.tile);
      const std::size_t end = undo[i].ends[r];
      if (const MutByteSpan changes = resolved.next(record); !changes.empty()) {
        memory.exchange(tile, record, changes);
      } else {
        const TileRows rows = memory.open_tile(tile, scratch[worker]);
        delta::undo_tile(layout, record, rows.first, rows.row_stride,
                         ByteSpan(undo[i].bytes).subspan(from, end - from));
        memory.close_tile(tile, rows);
      }
      from = end;
    }
  });
}

}  // namespace deltasync
