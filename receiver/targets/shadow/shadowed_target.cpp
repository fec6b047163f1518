#include "receiver/targets/shadow/shadowed_target.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "format/tiling.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync {
namespace {

/// Records point into their frame's bytes, so a copy of a frame has records of its own.
StagedFrame clone(const StagedFrame& frame) {
  StagedFrame copy;
  copy.bytes = frame.bytes;
  copy.records = frame.records;
  for (delta::TileRecord& record : copy.records) {
    if (record.payload.empty()) continue;
    const auto at = static_cast<std::size_t>(record.payload.data() - frame.bytes.data());
    record.payload = ByteSpan(copy.bytes).subspan(at, record.payload.size());
  }
  copy.resolved.resize(frame.resolved.size());
  if (!frame.resolved.empty()) std::memcpy(copy.resolved.data(), frame.resolved.data(), frame.resolved.size());
  return copy;
}

std::vector<StagedStep> clone(const std::vector<StagedStep>& steps) {
  std::vector<StagedStep> copies;
  for (const StagedStep& step : steps) {
    copies.push_back({step.from, step.to, {}});
    copies.back().frames.reserve(step.frames.size());
    for (const StagedFrame& frame : step.frames) copies.back().frames.push_back(clone(frame));
  }
  return copies;
}

}  // namespace

ShadowedTarget::ShadowedTarget(std::unique_ptr<Target> live, const ShadowOptions& options)
    : live_(std::move(live)), can_(live_->capabilities()), shadow_(*live_, options) {}

TargetCapabilities ShadowedTarget::capabilities() {
  TargetCapabilities can;
  can.takes_decoded = true;
  can.placement = can_.placement;
  can.rollback = this;
  can.slices = this;
  can.repair = this;
  can.sleep = this;
  can.digests = can_.digests;
  can.copies = can_.copies;
  can.shared = can_.shared;
  can.devices = can_.devices;
  return can;
}

Status ShadowedTarget::subscribe(const TileSet& tiles) {
  DS_TRY(can_.slices->subscribe(tiles));
  return shadow_.subscribe(tiles);
}

Status ShadowedTarget::open(ThreadPool& pool, const CallContext& until) {
  DS_TRY(shadow_.open(pool, until));
  DS_TRY(live_->open(pool, until));
  pool_ = &pool;
  return {};
}

const TargetState* ShadowedTarget::committed() const {
  return shadow_.committed() != nullptr ? live_->committed() : nullptr;
}

Result<TileRows> ShadowedTarget::live_tile(const Tile& tile, std::vector<std::byte>& scratch) const {
  if (committed() == nullptr) return TileRows{};
  return shadow_.live_tile(tile, scratch);
}

// ---- single tiles --------------------------------------------------------------------------------------------------

Status ShadowedTarget::begin_repair(const CallContext& until) {
  if (committed() == nullptr) return Error(Errc::not_found, "nothing is committed that could be repaired");
  DS_TRY(shadow_.begin_repair(until));
  return can_.repair->begin_repair(until);
}

Status ShadowedTarget::repair_tile(const Tile& tile, const TileRows& rows) {
  DS_TRY(shadow_.repair_tile(tile, rows));
  return can_.repair->repair_tile(tile, rows);
}

Status ShadowedTarget::end_repair() {
  DS_TRY(shadow_.end_repair());
  Status ended = can_.repair->end_repair();
  if (ended.ok()) return {};
  undo_ = Undo::none;
  return with_what_is_left(std::move(ended).error());
}

Result<TileRows> ShadowedTarget::kept_tile(const Tile& tile, std::vector<std::byte>& scratch) const {
  return shadow_.live_tile(tile, scratch);
}

// ---- full ----------------------------------------------------------------------------------------------------------

Status ShadowedTarget::begin_full(FullUpdatePolicy policy, const CallContext& until) {
  if (full_ != Full::closed) return Error(Errc::invalid_argument, "a full update is open already");
  if (released_) return Error(Errc::invalid_argument, "live memory was given up: it has to be restored first");
  if (committed() != nullptr && policy == FullUpdatePolicy::stage) {
    DS_TRY(shadow_.begin_full(FullUpdatePolicy::stage, until));
    can_.rollback->forget_rollback();
    full_ = Full::shadow;
  } else {
    DS_TRY(live_->begin_full(policy, until));
    // Where live memory has lost its version the shadow keeps it until the commit: the pull may fail.
    const FullUpdatePolicy beside = policy == FullUpdatePolicy::stage ? policy : FullUpdatePolicy::in_place;
    if (Status begun = shadow_.begin_full(beside, until); !begun.ok()) {
      live_->discard_full();
      return begun;
    }
    full_ = Full::both;
  }
  undo_ = Undo::none;
  return {};
}

Result<TileRows> ShadowedTarget::full_tile(const Tile& tile, std::vector<std::byte>& scratch) {
  // An engine may have written to live memory meanwhile: that is what is to be seen.
  if (full_ == Full::both) return live_->full_tile(tile, scratch);
  return shadow_.full_tile(tile, scratch);
}

Status ShadowedTarget::put_tile(const Tile& tile, const TileRows& rows) {
  if (full_ == Full::both) DS_TRY(live_->put_tile(tile, rows));
  return shadow_.put_tile(tile, rows);
}

Status ShadowedTarget::commit_full(TargetState state, Deadline deadline) {
  switch (full_) {
    case Full::closed: break;
    case Full::both: return commit_both(std::move(state), deadline);
    case Full::shadow: return commit_through(std::move(state), deadline);
  }
  return Error(Errc::invalid_argument, "no full update is open");
}

Status ShadowedTarget::commit_both(TargetState state, Deadline deadline) {
  DS_TRY(shadow_.commit_full(state, deadline));
  full_ = Full::closed;
  Status written = live_->commit_full(std::move(state), deadline);
  if (!written.ok()) {
    live_->discard_full();
    // To the version that it had while live memory had none; where it had none either, it has this one.
    if (shadow_.keeps_before()) return roll_back(std::move(written).error(), deadline);
    return with_what_is_left(std::move(written).error());
  }
  undo_ = Undo::both;
  return {};
}

Status ShadowedTarget::commit_through(TargetState state, Deadline deadline) {
  DS_TRY(shadow_.commit_full(std::move(state), deadline));
  full_ = Full::closed;
  Status written = write_live(deadline);
  if (!written.ok()) return roll_back(std::move(written).error(), deadline);
  undo_ = Undo::shadow;
  return {};
}

void ShadowedTarget::discard_full() noexcept {
  if (full_ == Full::both) live_->discard_full();
  if (full_ != Full::closed) shadow_.discard_full();
  full_ = Full::closed;
}

/// Each tile is verified before it is written. On error live memory has no version, unless nothing was written to it.
Status ShadowedTarget::write_live(const CallContext& until) {
  const TargetState& state = *shadow_.committed();
  const std::vector<std::uint64_t> batches = shadow_.batches();
  DS_TRY(live_->begin_full(FullUpdatePolicy::in_place, until));
  Status put = run_all(
      *pool_, batches.size() - 1, until, "writing live memory from the shadow", [&](std::uint64_t batch, unsigned) {
        return shadow_.put_live(batches[static_cast<std::size_t>(batch)], batches[static_cast<std::size_t>(batch) + 1]);
      });
  if (put.ok()) put = live_->commit_full(state, until.deadline());
  if (!put.ok()) live_->discard_full();
  if (put.ok()) can_.rollback->forget_rollback();
  return put;
}

// ---- delta ---------------------------------------------------------------------------------------------------------

Status ShadowedTarget::commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) {
  if (full_ != Full::closed) return Error(Errc::invalid_argument, "a full update is open");
  if (committed() == nullptr) {
    return Error(Errc::version_conflict, "a delta needs a committed version, there is none");
  }
  DS_TRY(shadow_.commit_delta(clone(steps), state, deadline));
  undo_ = Undo::none;
  Status written = live_->commit_delta(std::move(steps), std::move(state), deadline);
  if (!written.ok()) return roll_back(std::move(written).error(), deadline);
  undo_ = Undo::both;
  return {};
}

// ---- back ----------------------------------------------------------------------------------------------------------

/// The shadow has a commit that live memory refused, or lost its version by.
Error ShadowedTarget::roll_back(Error why, Deadline deadline) {
  const Status back = shadow_.rollback();
  if (!back.ok()) return std::move(why).with_context("the shadow could not be rolled back");
  if (live_->committed() == nullptr && shadow_.committed() != nullptr) {
    if (write_live(with_grace(deadline)).ok()) return why;
  }
  return with_what_is_left(std::move(why));
}

Error ShadowedTarget::with_what_is_left(Error why) const {
  if (live_->committed() != nullptr || shadow_.committed() == nullptr) return why;
  return std::move(why).with_context("live memory has no version, its shadow has " +
                                     to_string(shadow_.committed()->version));
}

Status ShadowedTarget::rollback() {
  if (full_ != Full::closed) return Error(Errc::invalid_argument, "a full update is open");
  if (undo_ == Undo::none) return Error(Errc::unsupported, "there is no commit that could be rolled back");
  // A version before that is rotten is not worth the one that is there.
  if (undo_ == Undo::shadow) DS_TRY(shadow_.check_before(Deadline::after(kRollbackLimit)));
  const Undo undo = std::exchange(undo_, Undo::none);
  Status back;
  if (undo == Undo::both) {
    back = can_.rollback->rollback();
    if (!back.ok() && live_->committed() != nullptr) {
      undo_ = undo;
      return back;
    }
  }
  if (!shadow_.rollback().ok())
    shadow_.invalidate();  // it had a version that live memory had lost: it cannot be restored
  if (shadow_.committed() == nullptr || (undo == Undo::both && back.ok())) return back;
  // Live memory has the version that is rolled back, or none.
  Status written = write_live(Deadline::after(kRollbackLimit));
  if (written.ok()) return {};
  live_->invalidate();
  return with_what_is_left(std::move(written).error());
}

void ShadowedTarget::forget_rollback() noexcept {
  undo_ = Undo::none;
  can_.rollback->forget_rollback();
  shadow_.forget_rollback();
}

void ShadowedTarget::invalidate() noexcept {
  forget_rollback();
  live_->invalidate();
}

// ---- asleep --------------------------------------------------------------------------------------------------------

ShadowState ShadowedTarget::state() const {
  ShadowState state;
  state.bytes = shadow_.bytes();
  state.pinned = shadow_.is_pinned();
  if (shadow_.committed() != nullptr) state.version = shadow_.committed()->version;
  state.released = released_;
  return state;
}

Status ShadowedTarget::release(const CallContext& until) {
  invalidate();
  if (can_.devices != nullptr) DS_TRY(can_.devices->finish_live(until));
  released_ = true;
  // A staged update has left it in memory that is not; nobody computes now.
  shadow_.pin(until);
  return {};
}

Status ShadowedTarget::restore(const CallContext& until) {
  if (full_ != Full::closed) return Error(Errc::invalid_argument, "a full update is open");
  released_ = false;  // the memory is there, says the caller: what the shadow cannot bring back a pull can
  if (shadow_.committed() == nullptr) return Error(Errc::not_found, "the shadow has no version");
  DS_TRY(until.check("writing live memory from the shadow"));
  // What is there still is not given up for a shadow that is rotten.
  if (live_->committed() != nullptr) DS_TRY(shadow_.check(until));
  forget_rollback();
  return write_live(until);
}

// ---- public --------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<Target>> make_shadowed_target(std::unique_ptr<Target> live, const ShadowOptions& options) {
  if (live == nullptr) return Error(Errc::invalid_argument, "a shadow without a target");
  if (!live->capabilities().in_live_memory) {
    return Error(Errc::unsupported, "a shadow of a target that does not keep versions in an engine's live memory");
  }
  return std::unique_ptr<Target>(new ShadowedTarget(std::move(live), options));
}

std::optional<ShadowState> shadow_of(const Target& target) {
  const auto* const shadowed = dynamic_cast<const ShadowedTarget*>(&target);
  if (shadowed == nullptr) return std::nullopt;
  return shadowed->state();
}

}  // namespace deltasync
