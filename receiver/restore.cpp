// Live memory that was released, and is there again: what a receiver has to forget, and how it goes on.
#include "receiver/receiver_impl.hpp"
#include "receiver/targets/attest.hpp"
#include "receiver/targets/shadow/shadowed_target.hpp"

namespace deltasync::receiver {
namespace {

Result<ShadowedTarget*> shadowed(Target* target) {
  if (target == nullptr) return Error(Errc::invalid_argument, "no target is bound");
  auto* const found = dynamic_cast<ShadowedTarget*>(target);
  if (found == nullptr) return Error(Errc::unsupported, "the target has no shadow");
  return found;
}

}  // namespace

/// Waits first, so that what is forgotten then waits for nobody; and once more for what that left.
Status ReceiverImpl::release_live(const CallContext& until) {
  DS_ASSIGN(ShadowedTarget* const target, shadowed(target_.get()));
  const auto may_write = [](Error why) {
    return std::move(why).with_context("the device may still write to live memory: keep it, and call again");
  };
  if (Status finished = target->finish_live(until); !finished.ok()) return may_write(std::move(finished).error());
  const OnTarget on_target(*target, until);
  close_staged();
  discard_full();
  if (Status released = target->release(until); !released.ok()) return may_write(std::move(released).error());
  note_standing(nullptr);
  return {};
}

/// What was invalidated was live memory, or the shadow: both are as they were committed then.
Result<RepairReport> ReceiverImpl::restore_live(const CallContext& until) {
  const auto start = std::chrono::steady_clock::now();
  DS_ASSIGN(ShadowedTarget* const target, shadowed(target_.get()));
  close_staged();
  discard_full();
  DS_TRY(target->restore(until));
  RepairReport report;
  report.version = target->committed()->version;
  report.tiles = tiles_.tiles();
  report.bytes = tiles_.bytes();
  if (options_.attest_commits) {
    const auto restored = std::chrono::steady_clock::now();
    if (Status attested = attest_or_invalidate(*target, until); !attested) {
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

Status ReceiverImpl::attest_or_invalidate(Target& target, const CallContext& until) const {
  auto wrong = deltasync::attest(target, tiles_, until);
  if (wrong.ok() && wrong->empty()) return {};
  target.invalidate();
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
