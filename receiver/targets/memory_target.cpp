#include "receiver/targets/memory_target.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/target_checks.hpp"
#include "receiver/targets/tile_memory.hpp"

namespace deltasync {
namespace {

constexpr std::chrono::minutes kDiscard{1};  ///< nobody gives it a deadline: a bound for what never ends

}  // namespace

TargetCapabilities MemoryTarget::capabilities() {
  TargetCapabilities can;
  can.takes_decoded = true;
  can.rollback = this;
  can.slices = this;
  can.digests = this;
  can.repair = this;
  can.shared = this;
  return can;
}

Status MemoryTarget::subscribe(const TileSet& tiles) {
  if (pool_ != nullptr) return Error(Errc::invalid_argument, "the target is open already");
  DS_TRY(check_subscription(tiles));
  tiles_ = tiles;
  return {};
}

Status MemoryTarget::open(ThreadPool& pool, const CallContext& until) {
  pool_ = &pool;
  Status opened = open_memory(until);
  if (!opened.ok()) pool_ = nullptr;
  return opened;
}

Result<TileRows> MemoryTarget::live_tile(const Tile& tile, std::vector<std::byte>& scratch) const {
  if (!committed_) return TileRows{};
  return read_tile(tile, scratch);
}

std::string MemoryTarget::what_is_live() const {
  return committed_ ? "the live version " + to_string(committed_->version) : "live memory that is in use";
}

Status MemoryTarget::live_digests(std::span<const std::uint64_t> tiles, std::span<std::uint64_t> digests,
                                  const CallContext& until) {
  constexpr std::uint64_t kTilesPerItem = 16;
  std::vector<std::vector<std::byte>> scratch(pool_->size());
  const std::uint64_t items = (tiles.size() + kTilesPerItem - 1) / kTilesPerItem;
  return run_all(*pool_, items, until, "reading live memory", [&](std::uint64_t item, unsigned worker) -> Status {
    const std::uint64_t end = std::min<std::uint64_t>((item + 1) * kTilesPerItem, tiles.size());
    for (std::uint64_t i = item * kTilesPerItem; i < end; ++i) {
      DS_ASSIGN(digests[i], live_digest(*this, tile_of(*layout_, tiles[i]), scratch[worker]));
    }
    return {};
  });
}

// ---- repairing -----------------------------------------------------------------------------------------------------

/// A full update that is staged goes on meanwhile: it is elsewhere.
Status MemoryTarget::begin_repair(const CallContext& until) {
  if (!committed_) return Error(Errc::not_found, "nothing is committed that could be repaired");
  repair_failed_ = false;
  return open_live(until);
}

Status MemoryTarget::repair_tile(const Tile& tile, const TileRows& rows) {
  Status written = put(tile, rows);
  if (!written.ok()) repair_failed_ = true;
  return written;
}

Status MemoryTarget::end_repair() {
  Status settled = settle_full(Deadline::after(kDiscard));
  if (settled.ok() && repair_failed_) settled = Error(Errc::io, "a tile could not be written");
  if (settled.ok()) return {};
  return lose_version(std::move(settled).error());
}

void MemoryTarget::invalidate() noexcept {
  committed_.reset();
  served_ = false;
  forget_rollback();
}

// ---- full ----------------------------------------------------------------------------------------------------------

Result<TileRows> MemoryTarget::full_tile(const Tile& tile, std::vector<std::byte>& scratch) {
  if (full_ == Full::closed) return TileRows{};
  if (full_ == Full::staged) return staged_tile(tile);
  return open_tile(tile, scratch);
}

Status MemoryTarget::put_tile(const Tile& tile, const TileRows& rows) {
  if (full_ == Full::closed) return {};
  if (full_ != Full::staged) return put(tile, rows);
  copy_tile_rows(*layout_, tile, rows, staged_tile(tile));
  return {};
}

Status MemoryTarget::begin_full(FullUpdatePolicy policy, const CallContext& until) {
  if (pool_ == nullptr) return Error(Errc::invalid_argument, "the target is not open");
  if (full_ != Full::closed) return Error(Errc::invalid_argument, "a full update is open already");
  const bool live = committed_ || served_;
  if (live && policy == FullUpdatePolicy::refuse) {
    return Error(Errc::no_space, "a full update over " + what_is_live() + " needs a second copy of " +
                                     std::to_string(tiles_.bytes()) +
                                     " bytes in host memory, which the policy refuses");
  }
  forget_undo();
  if (live && policy == FullUpdatePolicy::stage) {
    DS_TRY(open_staging(until).with_context("second copy for a full update"));
    full_ = Full::staged;
    return {};
  }
  DS_TRY(open_live(until));
  full_ = live ? Full::in_place : Full::first;
  committed_.reset();
  served_ = false;
  close_staging();
  return {};
}

Status MemoryTarget::commit_full(TargetState state, Deadline deadline) {
  if (full_ == Full::closed) return Error(Errc::invalid_argument, "no full update is open");
  DS_TRY(check_state(*layout_, tiles_, state));
  forget_undo();
  Status written = full_ == Full::staged ? exchange_staging(deadline) : settle_full(deadline);
  if (!written.ok()) {
    if (full_ == Full::staged && kept_whole()) return written;
    return lose_version(std::move(written).error());
  }
  if (full_ == Full::staged) {
    undo_.kind = Undo::Kind::staged;
    log::info("{} keeps_for_rollback version={} bytes={}", name_,
              committed_ ? to_string(committed_->version) : "unknown", staging_bytes());
  } else if (full_ == Full::first) {
    undo_.kind = Undo::Kind::empty;
  }
  undo_.state = std::move(committed_);
  committed_ = std::move(state);
  full_ = Full::closed;
  return {};
}

void MemoryTarget::discard_full() noexcept {
  if (full_ == Full::staged) {
    close_staging();
  } else if (full_ != Full::closed) {
    // What was put is not written later, over what somebody else may put there now.
    if (const Status settled = settle_full(Deadline::after(kDiscard)); !settled.ok())
      log::warn("{} discards why=\"{}\"", name_, settled.error().to_string());
  }
  full_ = Full::closed;
}

// ---- delta ---------------------------------------------------------------------------------------------------------

Status MemoryTarget::commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) {
  if (full_ != Full::closed) return Error(Errc::invalid_argument, "a full update is open");
  if (pool_ == nullptr) return Error(Errc::invalid_argument, "the target is not open");
  DS_TRY(check_steps(*layout_, tiles_, committed(), steps, state, *pool_));
  forget_undo();
  close_staging();  // the version before the last full update: from here on it cannot be rolled back to
  bool torn = false;
  Status applied = apply_delta(std::move(steps), committed_->digests, deadline, torn);
  if (!applied.ok()) {
    if (torn) return lose_version(std::move(applied).error());
    return applied;
  }
  undo_.kind = Undo::Kind::deltas;
  undo_.state = std::move(committed_);
  committed_ = std::move(state);
  return {};
}

// ---- back ----------------------------------------------------------------------------------------------------------

Status MemoryTarget::rollback() {
  if (full_ != Full::closed) return Error(Errc::invalid_argument, "a full update is open");
  Status back;
  switch (undo_.kind) {
    case Undo::Kind::none: return Error(Errc::unsupported, "there is no commit that could be rolled back");
    case Undo::Kind::empty: break;
    case Undo::Kind::staged: back = exchange_staging(Deadline::after(kRollbackLimit)); break;
    case Undo::Kind::deltas: back = revert_delta(); break;
  }
  if (!back.ok()) {
    if (kept_whole()) return back;
    return lose_version(std::move(back).error());
  }
  close_staging();
  committed_ = std::move(undo_.state);
  forget_undo();
  return {};
}

Status TileTarget::apply_delta(std::vector<StagedStep> steps, std::span<const std::uint64_t> digests, Deadline deadline,
                               bool& torn) {
  Status applied = log_.apply(layout_of(), std::move(steps), digests, *this, pool(), deadline);
  torn = log_.torn();
  return applied;
}

void MemoryTarget::forget_undo() noexcept {
  undo_ = {};
  forget_delta();
}

void MemoryTarget::forget_rollback() noexcept {
  forget_undo();
  if (full_ != Full::staged) close_staging();
}

/// Live memory has parts of two versions, or worse: it is none, and none can be restored.
Error MemoryTarget::lose_version(Error why) {
  committed_.reset();
  served_ = false;
  forget_undo();
  full_ = Full::closed;
  close_staging();
  return std::move(why).with_context("live memory has no whole version any more");
}

}  // namespace deltasync
