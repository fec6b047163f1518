// Live memory that was released, and is there again: what a receiver has to forget, and how it goes on.
#include "receiver/receiver_impl.hpp"
#include "receiver/targets/attest.hpp"

namespace deltasync::receiver {
namespace {

Result<CanSleep*> can_sleep(Target* target) {
  if (target == nullptr) return Error(Errc::invalid_argument, "no target is bound");
  CanSleep* const can = target->capabilities().sleep;
  if (can == nullptr) return Error(Errc::unsupported, "the target has no shadow");
  return can;
}

}  // namespace

/// Waits first, so that what is forgotten then waits for nobody; and once more for what that left.
Status ReceiverImpl::release_live(const CallContext& until) {
  DS_ASSIGN(CanSleep* const can, can_sleep(target_.get()));
  const auto may_write = [](Error why) {
    return std::move(why).with_context("the device may still write to live memory: keep it, and call again");
  };
  if (WaitsForDevices* const devices = target_->capabilities().devices) {
    if (Status finished = devices->finish_live(until); !finished.ok()) return may_write(std::move(finished).error());
  }
  const OnTarget on_target(*target_, until);
  close_staged();
  discard_full();
  if (Status released = can->release(until); !released.ok()) return may_write(std::move(released).error());
  note_standing(nullptr);
  return {};
}

/// What was invalidated was live memory, or the shadow: both are as they were committed then.
Result<RepairReport> ReceiverImpl::restore_live(const CallContext& until) {
  const auto start = std::chrono::steady_clock::now();
  DS_ASSIGN(CanSleep* const can, can_sleep(target_.get()));
  close_staged();
  discard_full();
  DS_TRY(can->restore(until));
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

Status ReceiverImpl::attest_or_invalidate(const CallContext& until) const {
  auto wrong = deltasync::attest(*target_, tiles_, until);
  if (wrong.ok() && wrong->empty()) return {};
  target_->invalidate();
  if (!wrong.ok()) return std::move(wrong).error().with_context("attesting live memory");
  return Error(Errc::corrupt, "live memory: " + describe(*wrong) + " right after it was restored");
}

Status ReceiverImpl::release(const CallOptions& call) {
  return release_live(call).with_context("release");
}

Result<RepairReport> ReceiverImpl::restore(const CallOptions& call) {
  return restore_live(call).with_context("restore");
}

}  // namespace deltasync::receiver
