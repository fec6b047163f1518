// A verified update that waits for its commit, of whatever receiver has the target.
#include "receiver/bound_target.hpp"

#include <chrono>
#include <utility>

#include "base/label.hpp"
#include "base/trace.hpp"
#include "receiver/targets/attest.hpp"

namespace deltasync::receiver {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Status check_want(const Want& want) {
  if (want.number && !want.label.empty()) return Error(Errc::invalid_argument, "a number or a label, not both");
  if (!want.directory.empty() && (want.number || !want.label.empty() || want.newer)) {
    return Error(Errc::invalid_argument, "a directory or a version, not both");
  }
  return check_label(want.label);
}

std::unique_ptr<StagedUpdate> BoundTarget::stage(Prepared prepared) {
  auto staged = std::make_unique<StagedImpl>(*this, std::move(prepared));
  staged_ = staged.get();
  return staged;
}

void BoundTarget::close_staged() {
  if (staged_ == nullptr) return;
  staged_->drop();
  if (target_ != nullptr) forget_rollback(*target_);  // nobody can ask for it any more
  staged_->receiver_ = nullptr;
  staged_ = nullptr;
}

std::optional<TargetState> BoundTarget::take_staged_full() {
  if (staged_ == nullptr || !staged_->is_staged() || staged_->report().mode != PullMode::full) return std::nullopt;
  staged_->phase_ = StagedImpl::Phase::dropped;
  return std::move(staged_->prepared_.state);
}

void BoundTarget::forget_unfinished() {
  if (staged_ != nullptr) staged_->drop();
  discard_full();
}

StagedImpl::StagedImpl(BoundTarget& receiver, Prepared prepared)
    : receiver_(&receiver), prepared_(std::move(prepared)) {}

StagedImpl::~StagedImpl() {
  if (receiver_ != nullptr) receiver_->close_staged();
}

void StagedImpl::drop() {
  if (phase_ != Phase::staged) return;
  phase_ = Phase::dropped;
  prepared_.steps.clear();
  if (receiver_ != nullptr && prepared_.report.mode == PullMode::full) receiver_->discard_full();
}

Status StagedImpl::check_attached() const {
  if (receiver_ != nullptr) return {};
  return Error(Errc::invalid_argument, "this update was overtaken by a later pull, or its receiver is gone");
}

Status StagedImpl::commit(const CallOptions& call) {
  DS_TRY(check_attached());
  if (phase_ != Phase::staged) return Error(Errc::invalid_argument, "commit: the update is not staged any more");
  const auto start = std::chrono::steady_clock::now();
  const trace::Span span("commit", prepared_.report.version.id);
  Status done = wait_for_engine(call);
  if (done) done = commit_staged(Deadline::of(call), start);
  receiver_->note_standing(done.ok() ? nullptr : &done.error());
  return done;
}

/// What was staged is kept meanwhile: with more time the same commit may do.
Status StagedImpl::wait_for_engine(const CallContext& until) {
  DS_TRY(until.check("beginning the commit"));
  WaitsForDevices* const devices = receiver_->target_->capabilities().devices;
  if (devices == nullptr || prepared_.report.mode == PullMode::up_to_date) return {};
  return devices->wait_for_engine(until).with_context("commit of " + to_string(prepared_.report.version));
}

Status StagedImpl::commit_staged(Deadline deadline, std::chrono::steady_clock::time_point start) {
  Target& target = *receiver_->target_;
  invalidated_before_ = receiver_->invalidated_;
  Status status;
  switch (prepared_.report.mode) {
    case PullMode::up_to_date: break;
    case PullMode::delta:
      status = target.commit_delta(std::move(prepared_.steps), std::move(prepared_.state), deadline);
      break;
    case PullMode::full: status = target.commit_full(std::move(prepared_.state), deadline); break;
  }
  if (!status) {
    // Verified when it was pulled, so it is the memory that is another one now.
    if (status.error().code() == Errc::corrupt) receiver_->invalidated_ = true;
    drop();
    return std::move(status).with_context("commit of " + to_string(prepared_.report.version));
  }
  if (prepared_.report.mode == PullMode::full) {
    receiver_->full_is_committed();
    // Of no trainer: no delta of any leads on from it.
    receiver_->invalidated_ = prepared_.report.version.id.epoch == kDirectoryEpoch;
  }
  phase_ = Phase::committed;
  receiver_->had_version_ = true;
  receiver_->note_held();
  prepared_.report.commit_s = seconds_since(start);
  if (receiver_->options_.attest_commits && prepared_.report.mode != PullMode::up_to_date) return attest(deadline);
  return {};
}

/// The version that was committed is the one that is there, or it is none.
Status StagedImpl::attest(const CallContext& until) {
  const auto start = std::chrono::steady_clock::now();
  const trace::Span span("attest", prepared_.report.version.id);
  CommitVerdict verdict = attest_commit(*receiver_->target_, receiver_->tiles_, until);
  prepared_.report.attest_s = seconds_since(start);
  if (verdict.status.ok()) return {};
  phase_ = Phase::dropped;
  receiver_->note_held();
  if (verdict.was_wrong || invalidated_before_) receiver_->invalidated_ = true;
  return std::move(verdict.status).with_context("commit of " + to_string(prepared_.report.version));
}

Status StagedImpl::rollback() {
  DS_TRY(check_attached());
  switch (phase_) {
    case Phase::staged: drop(); return {};
    case Phase::dropped: return {};
    case Phase::committed: break;
  }
  if (prepared_.report.mode != PullMode::up_to_date) {
    const trace::Span span("rollback", prepared_.report.version.id);
    DS_TRY(roll_back(*receiver_->target_).with_context("rollback of " + to_string(prepared_.report.version)));
    if (invalidated_before_) receiver_->invalidated_ = true;
    receiver_->note_held();
    receiver_->note_standing(nullptr);
  }
  phase_ = Phase::dropped;
  return {};
}

}  // namespace deltasync::receiver
