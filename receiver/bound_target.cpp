#include "receiver/bound_target.hpp"

#include <chrono>
#include <string>
#include <utility>

#include "receiver/targets/attest.hpp"

namespace deltasync::receiver {
namespace {

Status check_in_live_memory(Target* target) {
  if (target == nullptr) return Error(Errc::invalid_argument, "no target is bound");
  const TargetCapabilities can = target->capabilities();
  if (can.in_live_memory || can.sleep != nullptr) return {};
  return Error(Errc::unsupported, "the target's version is not in an engine's live memory");
}

}  // namespace

Status BoundTarget::bind_tiles(std::unique_ptr<Target> target, TileSet tiles, const CallContext& until) {
  DS_TRY(subscribe(*target, tiles).with_context("bind"));
  DS_TRY(until.check("opening the target").with_context("bind"));
  DS_TRY(target->open(target_pool_, until).with_context("bind"));
  // Now, and not in the first commit, while an engine stands still.
  CanReadCopies* const copies = target->capabilities().copies;
  if (options_.attest_commits && copies != nullptr) DS_TRY(copies->prepare_copies(until).with_context("bind"));
  drop_unfinished();
  target_ = std::move(target);
  tiles_ = std::move(tiles);
  invalidated_ = released_ = had_version_ = false;
  note_held();
  DS_TRY(target_bound(until));
  note_standing(nullptr);
  return {};
}

Status BoundTarget::bind(std::unique_ptr<Target> target, const std::vector<Slice>& slices, const CallOptions& call) {
  if (target == nullptr) return Error(Errc::invalid_argument, "bind: no target");
  if (target->layout()->digest() != layout_->digest()) {
    return Error(Errc::layout_mismatch, "the target was made for layout " + to_string(target->layout()->digest()) +
                                            ", the agent serves " + to_string(layout_->digest()));
  }
  DS_ASSIGN(TileSet tiles, TileSet::of(*layout_, slices).with_context("bind"));
  DS_TRY(bind_tiles(std::move(target), std::move(tiles), call));
  slices_ = slices;
  return {};
}

void BoundTarget::note_held() {
  const TargetState* const committed = target_->committed();
  last_held_ = committed != nullptr ? committed->version.id : VersionId();
}

bool BoundTarget::supports_rollback() const {
  return target_ != nullptr && target_->capabilities().rollback != nullptr;
}

Result<std::vector<TileMismatch>> BoundTarget::attest(const CallOptions& call) {
  if (target_ == nullptr) return Error(Errc::invalid_argument, "attest: no target is bound");
  return deltasync::attest(*target_, tiles_, call);
}

std::optional<Version> BoundTarget::current() const {
  if (target_ == nullptr || target_->committed() == nullptr) return std::nullopt;
  return target_->committed()->version;
}

// ---- live memory that is released, and is there again --------------------------------------------------------------

/// Waits first, so that what is forgotten then waits for nobody; and once more for what that left.
Status BoundTarget::release_live(const CallContext& until) {
  DS_TRY(check_in_live_memory(target_.get()));
  const auto may_write = [](Error why) {
    return std::move(why).with_context("the device may still write to live memory: keep it, and call again");
  };
  if (WaitsForDevices* const devices = target_->capabilities().devices) {
    if (Status finished = devices->finish_live(until); !finished.ok()) return may_write(std::move(finished).error());
  }
  const OnTarget on_target(*target_, until);
  drop_unfinished();
  if (CanSleep* const can = target_->capabilities().sleep) {
    if (Status released = can->release(until); !released.ok()) return may_write(std::move(released).error());
  } else {
    target_->invalidate();
    released_ = true;
  }
  note_standing(nullptr);
  return {};
}

Status BoundTarget::check_pullable() const {
  if (target_ == nullptr) return Error(Errc::invalid_argument, "pull: no target is bound");
  if (released_) return Error(Errc::invalid_argument, "pull: live memory was given up: it has to be restored first");
  return {};
}

/// What was invalidated was live memory, or the shadow: both are as they were committed then.
Result<RepairReport> BoundTarget::restore_live(CanSleep& can, const CallContext& until) {
  const auto start = std::chrono::steady_clock::now();
  drop_unfinished();
  DS_TRY(can.restore(until));
  RepairReport report;
  report.version = target_->committed()->version;
  report.tiles = tiles_.tiles();
  report.bytes = tiles_.bytes();
  if (options_.attest_commits) {
    const auto restored = std::chrono::steady_clock::now();
    if (Status attested = attest_or_invalidate(until); !attested) {
      note_standing(&attested.error());
      return attested.error();
    }
    report.attest_s = seconds_since(restored);
  }
  invalidated_ = false;
  note_standing(nullptr);
  report.total_s = seconds_since(start);
  return report;
}

/// Nothing is live: a full update, verified as each is, which goes to its places. A first version is not waited for.
Result<RepairReport> BoundTarget::restore_by_pull(const CallOptions& call) {
  const auto start = std::chrono::steady_clock::now();
  released_ = false;  // the memory is there, says the caller: if this fails, another pull may do
  if (!had_version_) return Error(Errc::not_found, "there was no version that could come back: pull one");
  if (!fetches()) {
    return Error(Errc::not_found, "a bucket channel keeps no version that could come back: let the trainer send one");
  }
  DS_ASSIGN(const auto staged, pull({}, call));
  DS_TRY(staged->commit(call));
  const PullReport& pulled = staged->report();
  RepairReport report;
  report.version = pulled.version;
  if (pulled.mode != PullMode::up_to_date) {
    report.tiles = report.fetched = tiles_.tiles();
    report.bytes = tiles_.bytes();
  }
  report.wire_bytes = pulled.wire_bytes;
  report.metadata_bytes = pulled.metadata_bytes;
  report.attest_s = pulled.attest_s;
  report.total_s = seconds_since(start);
  return report;
}

Status BoundTarget::attest_or_invalidate(const CallContext& until) const {
  auto wrong = deltasync::attest(*target_, tiles_, until);
  if (wrong.ok() && wrong->empty()) return {};
  target_->invalidate();
  if (!wrong.ok()) return std::move(wrong).error().with_context("attesting live memory");
  return Error(Errc::corrupt, "live memory: " + describe(*wrong) + " right after it was restored");
}

Status BoundTarget::release(const CallOptions& call) {
  return release_live(call).with_context("release");
}

Result<RepairReport> BoundTarget::restore(const CallOptions& call) {
  DS_TRY(check_in_live_memory(target_.get()).with_context("restore"));
  CanSleep* const can = target_->capabilities().sleep;
  return (can != nullptr ? restore_live(*can, call) : restore_by_pull(call)).with_context("restore");
}

}  // namespace deltasync::receiver
