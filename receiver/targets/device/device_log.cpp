#include "receiver/targets/device/device_log.hpp"

#include <algorithm>
#include <atomic>
#include <map>
#include <utility>

#include "format/tiling.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync {

namespace {

bool is_kept(const StagedFrame& frame, std::uint64_t tile) {
  return std::any_of(frame.kept.begin(), frame.kept.end(), [&](const auto& kept) {
    return std::binary_search(kept->tiles.begin(), kept->tiles.end(), tile);
  });
}

}  // namespace

DeviceLog::DeviceLog(const TileSet& tiles, DeviceExecutor& executor, std::vector<StagedStep> steps)
    : tiles_(&tiles), executor_(&executor), steps_(std::move(steps)), batch_(executor) {
  sort_out();
}

/// Decoded changes go into the batch, if they are not where it needs them; only updates of one step come with them, so
/// no tile is in both.
void DeviceLog::sort_out() {
  const Layout& layout = *executor_->placement().layout();
  std::map<std::uint64_t, TileWork> by_tile;
  for (StagedStep& step : steps_) {
    for (StagedFrame& frame : step.frames) {
      std::span<const std::byte> resolved(frame.resolved);
      // What was kept is from the executor that is asked now: the target's own.
      std::size_t kept_tiles = 0;
      for (const auto& kept : frame.kept) {
        batch_.add(static_cast<const ChangesOnDevices&>(*kept));
        kept_tiles += kept->tiles.size();
      }
      if (kept_tiles == frame.records.size()) continue;
      for (const delta::TileRecord& record : frame.records) {
        if (is_kept(frame, record.tile)) continue;
        const std::uint64_t rank = tiles_->rank(record.tile).value();
        const std::size_t bytes = resolved.empty() ? 0 : delta::resolved_bytes(layout, record);
        if (bytes != 0) {
          batch_.add(rank, record.changed, resolved.first(bytes));
          resolved = resolved.subspan(bytes);
          continue;
        }
        TileWork& work = by_tile[record.tile];
        work.tile = tile_of(layout, record.tile);
        work.rank = rank;
        work.records.push_back(&record);
      }
    }
  }
  work_.reserve(by_tile.size());
  for (auto& [tile, work] : by_tile) work_.push_back(std::move(work));
}

/// Writes a tile that was read as `before`. On error it is that again, or torn.
Status DeviceLog::rewrite(const TileWork& work, const std::vector<std::byte>& now, const std::vector<std::byte>& before,
                          const CallContext& until, bool& torn) {
  const std::uint64_t row_bytes = now.size() / work.tile.rect.rows;
  Status written = executor_->scatter_tile(work.rank, now.data(), row_bytes, until);
  if (written.ok()) return {};
  if (!executor_->scatter_tile(work.rank, before.data(), row_bytes, executor_->patient()).ok()) torn = true;
  return written;
}

/// Each record is verified over what was read: what wrote there meanwhile may have left what no record decodes over.
Status DeviceLog::apply_tile(TileWork& work, std::uint64_t digest, std::vector<std::byte>& scratch,
                             const CallContext& until, bool& torn) {
  const Layout& layout = *executor_->placement().layout();
  scratch.resize(static_cast<std::size_t>(executor_->tile_bytes(work.rank)));
  DS_TRY(executor_->gather_tile(work.rank, scratch.data(), until));
  const std::vector<std::byte> before = scratch;
  const std::size_t row_bytes = scratch.size() / static_cast<std::size_t>(work.tile.rect.rows);
  work.undo.clear();
  work.ends.clear();
  for (const delta::TileRecord* record : work.records) {
    auto after = delta::verify_tile(layout, *record, scratch.data(), row_bytes, digest);
    if (!after.ok()) {
      return std::move(after).error().with_context("somebody wrote to live memory since the delta was verified");
    }
    digest = *after;
    delta::save_undo(layout, *record, scratch.data(), row_bytes, work.undo);
    work.ends.push_back(work.undo.size());
    delta::commit_tile(layout, *record, scratch.data(), row_bytes);
  }
  DS_TRY(rewrite(work, scratch, before, until, torn));
  work.applied = true;
  return {};
}

Status DeviceLog::revert_tile(TileWork& work, std::vector<std::byte>& scratch, const CallContext& until, bool& torn) {
  const Layout& layout = *executor_->placement().layout();
  scratch.resize(static_cast<std::size_t>(executor_->tile_bytes(work.rank)));
  DS_TRY(executor_->gather_tile(work.rank, scratch.data(), until));
  const std::vector<std::byte> before = scratch;
  const std::size_t row_bytes = scratch.size() / static_cast<std::size_t>(work.tile.rect.rows);
  for (std::size_t i = work.records.size(); i-- > 0;) {
    const std::size_t begin = i == 0 ? 0 : work.ends[i - 1];
    delta::undo_tile(layout, *work.records[i], scratch.data(), row_bytes,
                     ByteSpan(work.undo).subspan(begin, work.ends[i] - begin));
  }
  DS_TRY(rewrite(work, scratch, before, until, torn));
  work.applied = false;
  return {};
}

Status DeviceLog::apply(std::span<const std::uint64_t> digests, ThreadPool& pool, const CallContext& until,
                        bool& torn) {
  DS_TRY(batch_.upload(until));
  // Their memory is on the devices now.
  for (StagedStep& step : steps_) {
    for (StagedFrame& frame : step.frames) frame.resolved = {};
  }
  std::atomic<bool> any_torn{false};
  std::vector<std::vector<std::byte>> scratch(pool.size());
  Status done = run_all(pool, work_.size(), until, "applying a delta", [&](std::uint64_t i, unsigned worker) -> Status {
    bool tile_torn = false;
    Status applied = apply_tile(work_[i], digests[work_[i].tile.index], scratch[worker], until, tile_torn);
    if (tile_torn) any_torn = true;
    return applied;
  });
  if (done.ok()) done = until.check("applying a delta");
  // The devices have it when the batch is waited for.
  bool exchanged = false;
  if (done.ok()) {
    exchanged = true;
    done = batch_.exchange(executor_->patient(until));
  }
  if (done.ok()) return {};
  torn = any_torn;
  const CallContext again = executor_->patient(with_grace(until.deadline()));
  if (exchanged && !batch_.exchange_back(again).ok()) torn = true;
  if (!revert_tiles(pool, again, torn).ok()) torn = true;
  return done;
}

Status DeviceLog::revert_tiles(ThreadPool& pool, const CallContext& until, bool& torn) {
  std::atomic<bool> any_torn{false};
  std::vector<std::vector<std::byte>> scratch(pool.size());
  Status done = run_all(pool, work_.size(), [&](std::uint64_t i, unsigned worker) -> Status {
    if (!work_[i].applied) return {};
    bool tile_torn = false;
    Status reverted = revert_tile(work_[i], scratch[worker], executor_->patient(), tile_torn);
    if (tile_torn) any_torn = true;
    return reverted;
  });
  if (any_torn) torn = true;
  if (done.ok()) done = executor_->finish(until);
  return done;
}

/// What fails half-way leaves a mixture of two versions.
Status DeviceLog::revert(ThreadPool& pool, const CallContext& until, bool& torn) {
  Status done = batch_.exchange_back(until);
  if (done.ok()) done = revert_tiles(pool, until, torn);
  if (!done.ok()) torn = true;
  return done;
}

}  // namespace deltasync
