#include "receiver/targets/delta_log.hpp"

#include <atomic>
#include <utility>

#include "delta/codec.hpp"
#include "delta/geometry.hpp"
#include "delta/raw_planes.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/target_checks.hpp"
#include "receiver/targets/verify.hpp"

namespace deltasync {
namespace {

/// Deals out the decoded changes of a frame, record by record. Of a frame that came without them those of rice_class
/// are decoded at the commit, into `late`.
class Changes {
 public:
  Changes(const Layout& layout, StagedFrame& frame, MutByteSpan late)
      : layout_(layout), decoded_(!frame.resolved.empty()), rest_(decoded_ ? MutByteSpan(frame.resolved) : late) {}
  bool decoded() const noexcept { return decoded_; }
  /// Empty if there are none.
  MutByteSpan next(const delta::TileRecord& record) {
    if (!decoded_ && !delta::traits(record.codec).needs_old_tile) return {};
    const std::size_t bytes = delta::resolved_bytes(layout_, record);
    const MutByteSpan changes = rest_.first(bytes);
    rest_ = rest_.subspan(bytes);
    return changes;
  }

 private:
  const Layout& layout_;
  const bool decoded_;
  MutByteSpan rest_;
};

/// Contiguous rows that are only read.
TileRows packed_rows(ByteSpan bytes, std::size_t row_bytes) {
  return {const_cast<std::byte*>(bytes.data()), row_bytes};
}

bool any_late(const Layout& layout, const std::vector<StagedStep>& steps) {
  for (const StagedStep& step : steps) {
    for (const StagedFrame& frame : step.frames) {
      if (frame.resolved.empty() && class_bytes(layout, frame) != 0) return true;
    }
  }
  return false;
}

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

Status DeltaLog::apply(const Layout& layout, std::vector<StagedStep> steps, std::span<const std::uint64_t> digests,
                       TileStore& memory, ThreadPool& pool, Deadline deadline) {
  steps_ = std::move(steps);
  std::vector<std::uint64_t> before;
  if (any_late(layout, steps_)) before.assign(digests.begin(), digests.end());
  undo_.assign(steps_.size(), {});
  torn_ = false;
  Writing writing(memory);
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    Status applied = apply_step(layout, i, before, writing, pool, deadline);
    Status settled = writing.settle();  // what was put off has to be there before it can be rolled back
    if (applied.ok()) applied = std::move(settled);
    if (!applied.ok()) return fail(layout, std::move(applied).error(), i + 1, writing.failed(), memory, pool);
  }
  return {};
}

/// What was applied of the first `steps` steps is rolled back, if it is known.
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

Status DeltaLog::apply_step(const Layout& layout, std::size_t step, std::span<std::uint64_t> digests, Writing& memory,
                            ThreadPool& pool, Deadline deadline) {
  std::vector<StagedFrame>& frames = steps_[step].frames;
  std::vector<FrameUndo>& undo = undo_[step];
  undo.resize(frames.size());
  std::vector<std::vector<std::byte>> scratch(pool.size());
  return run_all(pool, frames.size(), deadline, "applying a delta", [&](std::uint64_t i, unsigned worker) {
    return apply_frame(layout, frames[i], undo[i], digests, memory, scratch[worker]);
  });
}

/// On error the first records are applied, each of them whole: those that have an end in the undo log.
Status DeltaLog::apply_frame(const Layout& layout, StagedFrame& frame, FrameUndo& undo,
                             std::span<std::uint64_t> digests, Writing& memory, std::vector<std::byte>& scratch) {
  undo.ends.reserve(frame.records.size());
  if (frame.resolved.empty()) undo.late.resize(static_cast<std::size_t>(class_bytes(layout, frame)));
  Changes changes(layout, frame, undo.late);
  for (const delta::TileRecord& record : frame.records) {
    if (const MutByteSpan decoded = changes.next(record); !decoded.empty()) {
      if (!changes.decoded()) DS_TRY(decode_late(layout, record, digests[record.tile], decoded, memory, scratch));
      DS_TRY(memory.exchange(tile_of(layout, record.tile), record, decoded));
    } else {
      DS_TRY(overwrite(layout, record, undo.bytes, memory, scratch));
    }
    undo.ends.push_back(undo.bytes.size());
    if (!digests.empty()) digests[record.tile] = record.digest_after;
  }
  return {};
}

/// rice_class decodes over what is there, and whatever it is: so it is verified once more, on the very bytes.
Status DeltaLog::decode_late(const Layout& layout, const delta::TileRecord& record, std::uint64_t digest,
                             MutByteSpan changes, Writing& memory, std::vector<std::byte>& scratch) {
  DS_ASSIGN(const TileRows rows, memory.store().open_tile(tile_of(layout, record.tile), scratch));
  auto after = delta::resolve_tile(layout, record, rows.first, rows.row_stride, digest, changes);
  if (after.ok()) return {};
  return std::move(after).error().with_context("somebody wrote to live memory since the delta was verified");
}

Status DeltaLog::overwrite(const Layout& layout, const delta::TileRecord& record, std::vector<std::byte>& undo,
                           Writing& memory, std::vector<std::byte>& scratch) {
  const Tile tile = tile_of(layout, record.tile);
  DS_ASSIGN(const TileRows rows, memory.store().open_tile(tile, scratch));
  delta::save_undo(layout, record, rows.first, rows.row_stride, undo);
  if (delta::traits(record.codec).whole_tile) {
    const delta::TileShape shape = delta::tile_shape(layout, record.tile);
    DS_ASSIGN(const ByteSpan whole, delta::whole_tile_bytes(shape, record));
    return memory.put(tile, packed_rows(whole, shape.row_bytes()));
  }
  delta::commit_tile(layout, record, rows.first, rows.row_stride);
  return memory.put(tile, rows);
}

Status DeltaLog::revert_step(const Layout& layout, std::size_t step, TileStore& memory, ThreadPool& pool) {
  std::vector<StagedFrame>& frames = steps_[step].frames;
  std::vector<FrameUndo>& undo = undo_[step];
  std::vector<std::vector<std::byte>> scratch(pool.size());
  DS_TRY(run_all(pool, frames.size(), [&](std::uint64_t i, unsigned worker) {
    return revert_frame(layout, frames[i], undo[i], memory, scratch[worker]);
  }));
  return memory.settle();
}

Status DeltaLog::revert_frame(const Layout& layout, StagedFrame& frame, FrameUndo& undo, TileStore& memory,
                              std::vector<std::byte>& scratch) {
  Changes changes(layout, frame, undo.late);
  std::size_t from = 0;
  for (std::size_t r = 0; r < undo.ends.size(); ++r) {
    const delta::TileRecord& record = frame.records[r];
    const ByteSpan overwritten = ByteSpan(undo.bytes).subspan(from, undo.ends[r] - from);
    from = undo.ends[r];
    const Tile tile = tile_of(layout, record.tile);
    if (const MutByteSpan decoded = changes.next(record); !decoded.empty()) {
      DS_TRY(memory.exchange(tile, record, decoded));
    } else if (delta::traits(record.codec).whole_tile) {
      DS_TRY(memory.put(tile, packed_rows(overwritten, delta::tile_shape(layout, record.tile).row_bytes())));
    } else {
      DS_ASSIGN(const TileRows rows, memory.open_tile(tile, scratch));
      delta::undo_tile(layout, record, rows.first, rows.row_stride, overwritten);
      DS_TRY(memory.put(tile, rows));
    }
  }
  return {};
}

}  // namespace deltasync
