#include "receiver/targets/target_checks.hpp"
#include "format/tiling.hpp"

#include <atomic>
#include <mutex>
#include <new>
#include <optional>

namespace deltasync {

std::string describe_tile(const Layout& layout, std::uint64_t tile) {
  return "tile " + std::to_string(tile) + " (" + layout.tensors()[layout.tensor_of_tile(tile)].spec.name + ")";
}

std::uint64_t digest_of_rows(const Layout& layout, const Tile& tile, const TileRows& rows) {
  const std::uint64_t row_bytes = tile.rect.cols * layout.tensors()[tile.tensor].element_bytes;
  return delta::tile_digest(rows.first, rows.row_stride, tile.rect.rows, row_bytes);
}

Result<std::uint64_t> live_digest(const Target& target, const Tile& tile, std::vector<std::byte>& scratch) {
  DS_ASSIGN(const TileRows live, target.live_tile(tile, scratch));
  if (live.first == nullptr) return Error(Errc::not_found, "nothing is committed");
  return digest_of_rows(*target.layout(), tile, live);
}

Status check_state(const Layout& layout, const TileSet& tiles, const TargetState& state) {
  if (!state.version.id.valid()) return Error(Errc::invalid_argument, "a version with epoch 0 cannot be committed");
  if (state.digests.size() != layout.tile_count()) {
    return Error(Errc::layout_mismatch, "state of " + to_string(state.version) + " has " +
                                            std::to_string(state.digests.size()) + " tile digests, the layout " +
                                            std::to_string(layout.tile_count()) + " tiles");
  }
  if (tiles.root(state.digests) != state.root) {
    return Error(Errc::corrupt, "state of " + to_string(state.version) + ": the root does not belong to the digests");
  }
  return {};
}

namespace {

Status check_chain(const TargetState* committed, const std::vector<StagedStep>& steps, const TargetState& after) {
  if (committed == nullptr) return Error(Errc::version_conflict, "a delta needs a committed version, there is none");
  if (steps.empty()) return Error(Errc::invalid_argument, "a delta without a step");
  VersionId at = committed->version.id;
  for (const StagedStep& step : steps) {
    if (step.from != at) {
      return Error(Errc::version_conflict, "a step from " + to_string(step.from) + " does not follow " + to_string(at));
    }
    at = step.to;
  }
  if (at != after.version.id) {
    return Error(Errc::version_conflict,
                 "the steps end at " + to_string(at) + ", not at " + to_string(after.version.id));
  }
  return {};
}

/// For each tile the number of the step that was walked last of those that have it; 0: none has. Steps are walked
/// newest first, the frames of one by several threads.
using Marks = std::vector<std::uint32_t>;

/// Marks the frame's tiles and, where no newer step has one, compares its digest with that of the final state.
Status check_frame(const Layout& layout, const TileSet& tiles, const StagedFrame& frame, const TargetState& after,
                   std::uint32_t number, Marks& marks) {
  for (const delta::TileRecord& record : frame.records) {
    if (record.tile >= layout.tile_count()) {
      return Error(Errc::out_of_range,
                   "tile " + std::to_string(record.tile) + " of " + std::to_string(layout.tile_count()));
    }
    if (!tiles.is_whole() && !tiles.contains(record.tile)) {
      return Error(Errc::corrupt, describe_tile(layout, record.tile) + " was not subscribed to");
    }
    const std::uint32_t newer = std::atomic_ref(marks[record.tile]).exchange(number, std::memory_order_relaxed);
    if (newer == number) return Error(Errc::corrupt, describe_tile(layout, record.tile) + " comes twice");
    if (newer == 0 && record.digest_after != after.digests[record.tile]) {
      return Error(Errc::corrupt,
                   describe_tile(layout, record.tile) + " ends at another digest than in the state to commit");
    }
  }
  return {};
}

}  // namespace

Status check_steps(const Layout& layout, const TileSet& tiles, const TargetState* committed,
                   const std::vector<StagedStep>& steps, const TargetState& after, ThreadPool& pool) {
  DS_TRY(check_chain(committed, steps, after));
  DS_TRY(check_state(layout, tiles, after));
  Marks marks(layout.tile_count());
  std::uint32_t number = 0;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    ++number;
    Status checked = run_all(pool, step->frames.size(), [&](std::uint64_t frame, unsigned) {
      return check_frame(layout, tiles, step->frames[frame], after, number, marks);
    });
    if (!checked.ok()) return std::move(checked).with_context("the step to " + to_string(step->to));
  }
  for (std::uint64_t tile = 0; tile < layout.tile_count(); ++tile) {
    if (marks[tile] == 0 && committed->digests[tile] != after.digests[tile]) {
      return Error(Errc::corrupt, describe_tile(layout, tile) + " changes its digest, but no step has it");
    }
  }
  return {};
}

Status run_all(ThreadPool& pool, std::uint64_t count, const std::function<Status(std::uint64_t, unsigned)>& fn) {
  std::atomic<bool> failed = false;
  std::mutex mutex;
  std::optional<Error> first;  // protected by mutex
  pool.run(count, [&](std::uint64_t index, unsigned worker) {
    if (failed.load(std::memory_order_relaxed)) return;
    Status status;
    try {
      status = fn(index, worker);
    } catch (const std::bad_alloc&) {
      status = Error(Errc::no_space, "out of memory");
    }
    if (status.ok()) return;
    const std::lock_guard lock(mutex);
    failed.store(true, std::memory_order_relaxed);
    if (!first) first = std::move(status).error();
  });
  if (first) return *std::move(first);
  return {};
}

Status run_all(ThreadPool& pool, std::uint64_t count, const CallContext& until, std::string_view what,
               const std::function<Status(std::uint64_t, unsigned)>& fn) {
  return run_all(pool, count, [&](std::uint64_t index, unsigned worker) -> Status {
    DS_TRY(until.check(what));
    return fn(index, worker);
  });
}

}  // namespace deltasync
