// Live memory that was given up, and is there again: what a receiver has to forget, and how it goes on.
#include "receiver/attest.hpp"
#include "receiver/receiver_impl.hpp"
#include "receiver/target_shadow.hpp"

namespace deltasync {
namespace receiver {
namespace {

Result<ShadowedTarget*> shadowed(Target* target) {
  if (target == nullptr) return Error(Errc::invalid_argument, "no target is bound");
  auto* const found = dynamic_cast<ShadowedTarget*>(target);
  if (found == nullptr) return Error(Errc::unsupported, "the target has no shadow");
  return found;
}

}  // namespace

/// Waits first, so that what is forgotten then waits for nobody; and once more for what that left.
Status ReceiverImpl::give_up_live(const Until& until) {
  DS_ASSIGN(ShadowedTarget* const target, shadowed(target_.get()));
  const auto may_write = [](Error why) {
    return std::move(why).with_context("the device may still write to live memory: keep it, and call again");
  };
  if (Status finished = target->finish_live(until); !finished.ok()) return may_write(std::move(finished).error());
  const OnTarget on_target(*target, until);
  close_staged();
  discard_full();
  if (Status given_up = target->give_up_live(until); !given_up.ok()) return may_write(std::move(given_up).error());
  note_standing(nullptr);
  return {};
}

/// What was invalidated was live memory, or the shadow: both are as they were committed then.
Result<RestoreReport> ReceiverImpl::restore_live(const Until& until) {
  const auto start = std::chrono::steady_clock::now();
  DS_ASSIGN(ShadowedTarget* const target, shadowed(target_.get()));
  close_staged();
  discard_full();
  DS_TRY(target->restore(until));
  RestoreReport report;
  report.version = target->committed()->version;
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
  report.restore_s = seconds_since(start);
  return report;
}

Status ReceiverImpl::attest_or_invalidate(Target& target, const Until& until) const {
  auto wrong = deltasync::attest(target, tiles_, until);
  if (wrong.ok() && wrong->empty()) return {};
  target.invalidate();
  if (!wrong.ok()) return std::move(wrong).error().with_context("attesting live memory");
  return Error(Errc::corrupt, "live memory: " + describe(*wrong) + " right after it was restored");
}

}  // namespace receiver

Status give_up_live(Receiver& receiver, Deadline deadline, std::stop_token stop) {
  auto* const ours = dynamic_cast<receiver::ReceiverImpl*>(&receiver);
  if (ours == nullptr) return Error(Errc::unsupported, "give_up_live: another kind of receiver");
  return ours->give_up_live(Until(deadline, std::move(stop))).with_context("give_up_live");
}

Result<RestoreReport> restore_live(Receiver& receiver, Deadline deadline, std::stop_token stop) {
  auto* const ours = dynamic_cast<receiver::ReceiverImpl*>(&receiver);
  if (ours == nullptr) return Error(Errc::unsupported, "restore_live: another kind of receiver");
  return ours->restore_live(Until(deadline, std::move(stop))).with_context("restore_live");
}

}  // namespace deltasync
