#include "receiver/delta_log.hpp"

#include <atomic>
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

/// Memory, and whether it refused to be written.
class DeltaLog::Writing {
 public:
  explicit Writing(TileStore& store) : store_(store) {}
  TileStore& store() noexcept { return store_; }
  bool failed() const noexcept { return failed_.load(std::memory_order_relaxed); }

  Status put(const Tile& tile, const TileRows& rows) { return note(store_.put(tile, rows)); }
  Status exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) {
    return note(store_.exchange(tile, record, changes));
  }
  Status settle() { return note(store_.settle()); }

 private:
  Status note(Status status) {
    if (!status.ok()) failed_.store(true, std::memory_order_relaxed);
    return status;
  }
  TileStore& store_;
  std::atomic<bool> failed_{false};
};

Status DeltaLog::apply(const Layout& layout, std::vector<StagedStep> steps, TileStore& memory, ThreadPool& pool,
                       Deadline deadline) {
  steps_ = std::move(steps);
  undo_.assign(steps_.size(), {});
  torn_ = false;
  Writing writing(memory);
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    Status applied = apply_step(layout, i, writing, pool, deadline);
    Status settled = writing.settle();  // what was put off has to be there before it can be taken back
    if (applied.ok()) applied = std::move(settled);
    if (!applied.ok()) return fail(layout, std::move(applied).error(), i + 1, writing.failed(), memory, pool);
  }
  return {};
}

/// What was applied of the first `steps` steps is taken back, if it is known.
Error DeltaLog::fail(const Layout& layout, Error why, std::size_t steps, bool torn, TileStore& memory,
                     ThreadPool& pool) {
  for (std::size_t i = steps; i-- > 0 && !torn;) torn = !revert_step(layout, i, memory, pool).ok();
  *this = {};
  torn_ = torn;
  return why;
}

Status DeltaLog::revert(const Layout& layout, TileStore& memory, ThreadPool& pool) {
  for (std::size_t i = steps_.size(); i-- > 0;) DS_TRY(revert_step(layout, i, memory, pool));
  return {};
}

Status DeltaLog::apply_step(const Layout& layout, std::size_t step, Writing& memory, ThreadPool& pool,
                            Deadline deadline) {
  std::vector<StagedFrame>& frames = steps_[step].frames;
  std::vector<FrameUndo>& undo = undo_[step];
  undo.resize(frames.size());
  std::vector<std::vector<std::byte>> scratch(pool.size());
  return run_all(pool, frames.size(), deadline, "applying a delta", [&](std::uint64_t i, unsigned worker) {
    return apply_frame(layout, frames[i], undo[i], memory, scratch[worker]);
  });
}

/// On error the first records are applied, each of them whole: those that have an end in the undo log.
Status DeltaLog::apply_frame(const Layout& layout, StagedFrame& frame, FrameUndo& undo, Writing& memory,
                             std::vector<std::byte>& scratch) {
  undo.ends.reserve(frame.records.size());
  Resolved resolved(layout, frame);
  for (const delta::TileRecord& record : frame.records) {
    const Tile tile = layout.tile(record.tile);
    if (const MutByteSpan changes = resolved.next(record); !changes.empty()) {
      DS_TRY(memory.exchange(tile, record, changes));
    } else {
      DS_ASSIGN(const TileRows rows, memory.store().open_tile(tile, scratch));
      delta::save_undo(layout, record, rows.first, rows.row_stride, undo.bytes);
      delta::commit_tile(layout, record, rows.first, rows.row_stride);
      DS_TRY(memory.put(tile, rows));
    }
    undo.ends.push_back(undo.bytes.size());
  }
  return {};
}

Status DeltaLog::revert_step(const Layout& layout, std::size_t step, TileStore& memory, ThreadPool& pool) {
  std::vector<StagedFrame>& frames = steps_[step].frames;
  const std::vector<FrameUndo>& undo = undo_[step];
  std::vector<std::vector<std::byte>> scratch(pool.size());
  DS_TRY(run_all(pool, frames.size(), [&](std::uint64_t i, unsigned worker) {
    return revert_frame(layout, frames[i], undo[i], memory, scratch[worker]);
  }));
  return memory.settle();
}

Status DeltaLog::revert_frame(const Layout& layout, StagedFrame& frame, const FrameUndo& undo, TileStore& memory,
                              std::vector<std::byte>& scratch) {
  Resolved resolved(layout, frame);
  std::size_t from = 0;
  for (std::size_t r = 0; r < undo.ends.size(); ++r) {
    const delta::TileRecord& record = frame.records[r];
    const Tile tile = layout.tile(record.tile);
    const std::size_t end = undo.ends[r];
    if (const MutByteSpan changes = resolved.next(record); !changes.empty()) {
      DS_TRY(memory.exchange(tile, record, changes));
    } else {
      DS_ASSIGN(const TileRows rows, memory.open_tile(tile, scratch));
      delta::undo_tile(layout, record, rows.first, rows.row_stride, ByteSpan(undo.bytes).subspan(from, end - from));
      DS_TRY(memory.put(tile, rows));
    }
    from = end;
  }
  return {};
}

}  // namespace deltasync
