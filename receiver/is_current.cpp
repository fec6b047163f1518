// Whether a staged version is still what is asked for: Receiver::is_current().
#include "deltasync/receiver.hpp"

#include <utility>

#include "receiver/receiver_impl.hpp"

namespace deltasync::receiver {

Result<bool> Pull::means(const VersionId& version, const Digest128& root) {
  Backoff backoff(s_.peer.tuning);
  for (;;) {
    DS_TRY(until_.check("asking which version it is"));
    DS_TRY(s_.control.ensure(until_.deadline()));
    wire::PlanRequest question = plan_request();
    // As if it were committed: the agent answers that this is up to date, or what is wanted instead.
    question.base = version;
    question.base_root = root;
    question.partial = question.full_only = question.compact = 0;
    question.wait_ms = 0;
    const auto answer = ask(question);
    if (answer.value) {
      if (answer.value->mode == wire::PlanMode::up_to_date) return answer.value->target.id == version;
      s_.control.release(answer.value->plan, until_.deadline());
      return false;
    }
    if (answer.refused) {
      // Of the past and not known, or still to come.
      const Errc code = answer.refused->code();
      if (code == Errc::gone || code == Errc::timed_out || code == Errc::not_found) return false;
      if (code != Errc::connection) return *answer.refused;  // else nobody has a place for now
    }
    until_.pause(backoff.next());
  }
}

Result<bool> ReceiverImpl::means(const std::pair<VersionId, Digest128>& version, const Want& want,
                                 const CallContext& until) {
  if (want.number.has_value() != want.label.empty()) {
    return Error(Errc::invalid_argument, "a number or a label is asked about");
  }
  const auto stopping = control_.stop_by(until.stop());
  return Pull(session(partial_, invalidated_), want, until).means(version.first, version.second);
}

Result<bool> ReceiverImpl::is_current(const StagedUpdate& staged, const Want& want, const CallOptions& call) {
  if (staged_ == nullptr || staged_ != &staged) {
    return Error(Errc::invalid_argument, "is_current: this update was overtaken by a later pull");
  }
  return means({staged.report().version.id, staged.report().root}, want, call).with_context("is_current");
}

Result<Version> ReceiverImpl::target_version(const Want& want, const CallContext& until) {
  const auto stopping = control_.stop_by(until.stop());
  PartialUpdate nothing;
  bool invalidated = invalidated_;
  return Pull(session(nothing, invalidated), want, until).target();
}

Status ReceiverImpl::is_there(const CallContext& until) {
  const auto stopping = control_.stop_by(until.stop());
  return control_.ensure(until.deadline());
}

}  // namespace deltasync::receiver
