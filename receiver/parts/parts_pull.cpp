// One pull from all members: which version, everything of it, and one update of what they brought.
#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "base/trace.hpp"
#include "net/ucx/transports.hpp"
#include "receiver/parts/at_once.hpp"
#include "receiver/parts/parts_receiver.hpp"
#include "receiver/targets/attest.hpp"

namespace deltasync::receiver {
namespace {

/// For a member to have a version that another one has: then all are asked again.
constexpr std::chrono::milliseconds kMemberWait{2'000};

/// Time, a connection or another plan may help.
bool may_pass(Errc code) {
  return code == Errc::timed_out || code == Errc::connection || code == Errc::not_found || code == Errc::gone ||
         code == Errc::lease_revoked || code == Errc::peer_died || code == Errc::corrupt;
}

/// An answer of a member may be had later.
bool comes_yet(Errc code) {
  return code == Errc::timed_out || code == Errc::connection;
}

/// The frames of several chains from one base to one version, whose tiles are disjoint, as one chain: the longest, with
/// the last steps of the others beside its last ones.
void join_chain(std::vector<StagedStep>& all, std::vector<StagedStep> more) {
  if (more.size() > all.size()) all.swap(more);
  const std::size_t ahead = all.size() - more.size();
  for (std::size_t i = 0; i < more.size(); ++i) {
    auto& frames = all[ahead + i].frames;
    for (StagedFrame& frame : more[i].frames) frames.push_back(std::move(frame));
  }
}

void add(PullReport& sum, const PullReport& part) {
  sum.wire_bytes += part.wire_bytes;
  sum.metadata_bytes += part.metadata_bytes;
  sum.tiles += part.tiles;
  sum.changed += part.changed;
  sum.delta_steps = std::max(sum.delta_steps, part.delta_steps);
  sum.replans += part.replans;
  sum.stream_restarts += part.stream_restarts;
  net::ucx::add_names(sum.transports, part.transports);
  sum.repaired_tiles += part.repaired_tiles;
  sum.packed = sum.packed || part.packed;
  sum.transfer_s = std::max(sum.transfer_s, part.transfer_s);
  sum.verify_s += part.verify_s;
}

}  // namespace

Result<std::unique_ptr<StagedUpdate>> PartsReceiver::pull(const Want& want, const CallOptions& call) {
  DS_TRY(check_pullable());
  if (needed().empty()) return Error(Errc::invalid_argument, "pull: no target is bound");
  DS_TRY(check_want(want).with_context("pull"));
  if (!want.directory.empty()) return Error(Errc::unsupported, "pull: trainer nodes hold parts, which no directory is");
  close_staged();
  const CallContext until(call);
  const OnTarget on_target(*target_, until);
  last_.reset();
  auto prepared = run(want, until);
  for (Member& member : members_) unstage(member);  // what was gathered is in `prepared`
  if (!prepared) {
    const Error& why = prepared.error();
    const Errc code = why.code();
    if (code != Errc::cancelled && !may_pass(code)) discard_full();
    if (code != Errc::cancelled && code != Errc::timed_out) note_standing(&why);
    return std::move(prepared).error();
  }
  if (prepared->report.mode == PullMode::up_to_date) note_standing(nullptr);
  return stage(std::move(*prepared));
}

void PartsReceiver::unstage(Member& member) {
  if (member.staged == nullptr) return;
  member.receiver->unstage();
  member.staged.reset();
}

/// Deltas from all, if all can; else full updates from all.
Result<Prepared> PartsReceiver::run(const Want& want, const CallContext& until) {
  bool full = joint_->is_open() || invalidated_ || target_->committed() == nullptr;
  for (;;) {
    members_changed_ = false;
    auto prepared = run_once(want, full, until);
    if (prepared.ok()) return prepared;
    if (!full && joint_->full_is_needed()) {
      full = true;
    } else if (!members_changed_) {
      return prepared;
    }
  }
}

Result<Prepared> PartsReceiver::run_once(const Want& want, bool full, const CallContext& until) {
  const auto start = std::chrono::steady_clock::now();
  joint_->begin(full);
  DS_TRY(look_at_members(until));
  members_changed_ = false;
  for (Member* member : needed()) {
    unstage(*member);
    member->target->look_at_committed();
  }
  const bool named = want.number || !want.label.empty();
  DS_ASSIGN(const Version version, named ? agree_on_named(want, until) : agree(want, full, until));
  const TargetState* const committed = target_->committed();
  if (!full && committed != nullptr && committed->version.id == version.id) {
    Prepared same;
    same.report.version = committed->version;
    same.report.root = committed->root;
    same.report.full_bytes = tiles_.bytes();
    same.report.wait_s = seconds_since(start);
    for (Member* member : needed()) member->staged_root = member->target->committed()->root;
    return same;
  }
  for (Member* member : needed()) {
    if (member->staged->report().version == version) continue;
    return about(*member, Error(Errc::corrupt,
                                "it calls " + to_string(version) + " " + to_string(member->staged->report().version)));
  }
  if (!full) DS_TRY(scrub(until));
  DS_ASSIGN(Prepared prepared, merge(full));
  prepared.report.wait_s = std::max(0.0, seconds_since(start) - prepared.report.transfer_s);
  return prepared;
}

// ---- which version -------------------------------------------------------------------------------------------------

namespace {

/// When the time is over: what the last refusal was.
Status check_time(const CallContext& until, const std::optional<Deadline>& wait_by, const std::optional<Error>& last) {
  const bool waited_enough = wait_by && wait_by->passed();
  Status more = waited_enough ? Status(Error(Errc::timed_out, "no version that all members have came in time"))
                              : until.check("waiting for a version that all members have");
  if (more.ok() || !last) return more;
  return Error(more.error().code(), more.error().message() + " (" + last->to_string() + ")");
}

std::optional<Deadline> wait_limit(const Want& want) {
  if (!want.wait_max) return std::nullopt;
  return Deadline::after(*want.wait_max);
}

Error members_are_others() {
  return {Errc::lease_revoked, "the members that are asked have changed"};
}

}  // namespace

/// A trainer that was started again may run on other nodes, while the agents of those before serve what they had.
Result<Version> PartsReceiver::ask_one(Member& member, const Want& want, const CallContext& until) const {
  DS_ASSIGN(Version version, member.receiver->target_version(want, until));
  if (version.id.epoch == member.epoch) return version;
  DS_ASSIGN(const Sidecar now, member.receiver->sidecar_now(until));
  if (now.part != member.receiver->sidecar().part) {
    const auto number = static_cast<std::size_t>(&member - members_.data());
    const auto part = part_of(number, now, *member.receiver->layout());
    if (!part) {
      return Error(Errc::layout_mismatch,
                   "the trainer has other nodes than before (" + part.error().message() + "): connect again");
    }
  }
  member.epoch = version.id.epoch;
  return version;
}

/// Until all have answered. One that others can replace is not waited for while it is away.
Result<std::vector<Version>> PartsReceiver::ask(const std::vector<Member*>& whom, Want want,
                                                const std::optional<Deadline>& wait_by, const CallContext& until) {
  std::vector<Version> answers(whom.size());
  for (;;) {
    want.wait_max = wait_by ? std::min(tuning_.wait_slice, wait_by->remaining_ms()) : tuning_.wait_slice;
    std::vector<Status> results(whom.size());
    at_once(whom.size(), until, [&](std::size_t i, const CallContext& each) {
      auto version = ask_one(*whom[i], want, each);
      if (version) {
        answers[i] = std::move(*version);
      } else {
        results[i] = std::move(version).error();
      }
      return results[i].ok() || comes_yet(results[i].error().code());
    });
    std::optional<std::size_t> late;
    std::optional<std::size_t> failed;
    for (std::size_t i = 0; i < whom.size(); ++i) {
      if (results[i].ok()) continue;
      if (comes_yet(results[i].error().code())) {
        late = i;
      } else if (!failed || results[*failed].error().code() == Errc::cancelled) {
        failed = i;  // it stops the others, which say `cancelled` then
      }
    }
    if (failed) return about(*whom[*failed], std::move(results[*failed]).error());
    if (!late) return answers;
    last_ = about(*whom[*late], std::move(results[*late]).error());
    DS_TRY(check_time(until, wait_by, last_));
    DS_TRY(look_at_members(until));
    if (members_changed_) return members_are_others();
  }
}

/// All of these that have not staged the version yet pull it. What may pass is in `refusals`.
Status PartsReceiver::fetch(const std::vector<Member*>& whom, const VersionId& version, const Want& want,
                            const CallContext& until, std::vector<std::optional<Error>>& refusals) {
  Want exactly{.number = version.number, .epoch = version.epoch, .wait_max = kMemberWait};
  if (want.wait_max) exactly.wait_max = std::min(*want.wait_max, kMemberWait);
  at_once(whom.size(), until, [&](std::size_t i, const CallContext& each) {
    Member& member = *whom[i];
    if (member.staged != nullptr && member.staged->report().version.id == version) return true;
    unstage(member);
    auto staged = member.receiver->pull(exactly, each);
    if (!staged) {
      refusals[i] = std::move(staged).error();
      return may_pass(refusals[i]->code());
    }
    member.staged = std::move(*staged);
    return true;
  });
  if (joint_->full_is_needed()) return Error(Errc::cancelled, "a part needs a full update");
  DS_TRY(until.check("fetching version " + to_string(version)));
  for (const bool first : {true, false}) {
    for (std::size_t i = 0; i < whom.size(); ++i) {
      if (!refusals[i] || may_pass(refusals[i]->code())) continue;
      if (first && refusals[i]->code() == Errc::cancelled) continue;
      return about(*whom[i], std::move(*refusals[i]));
    }
  }
  return {};
}

/// Who gives wrong tiles is left out if others have them, as is who is away.
Status PartsReceiver::note_refusals(const std::vector<Member*>& whom, const std::vector<std::optional<Error>>& refusals,
                                    const std::optional<Deadline>& wait_by, const CallContext& until) {
  bool left_out = false;
  for (std::size_t i = 0; i < whom.size(); ++i) {
    if (!refusals[i]) continue;
    last_ = about(*whom[i], *refusals[i]);
    if (refusals[i]->code() != Errc::corrupt || !whom[i]->replaceable) continue;
    leave_out(*whom[i], *refusals[i]);
    left_out = true;
  }
  if (left_out) {
    members_changed_ = true;
    DS_TRY(share_out());
  }
  DS_TRY(check_time(until, wait_by, last_));
  DS_TRY(look_at_members(until));
  if (members_changed_) return members_are_others();
  return {};
}

Result<Version> PartsReceiver::agree(const Want& want, bool full, const CallContext& until) {
  const TargetState* const committed = target_->committed();
  const auto wait_by = wait_limit(want);
  AgreementWant wanted;
  if (!full && committed != nullptr) wanted.held = committed->version.id;
  wanted.newer = want.newer;
  wanted.older_epoch = options_.on_older_epoch == OlderEpoch::follow;
  const std::vector<Member*> all = needed();
  Agreement agreement(all.size(), wanted);
  Backoff backoff(tuning_);
  for (;;) {
    switch (agreement.step()) {
      case Agreement::Step::ask: {
        DS_ASSIGN(const std::vector<Version> newest, ask(all, {.newer = want.newer}, wait_by, until));
        for (std::size_t i = 0; i < all.size(); ++i) {
          if (agreement.has_answered(i)) continue;
          DS_TRY(look_at_epoch(*all[i], newest[i], full ? nullptr : committed));
          agreement.heard(i, newest[i].id);
        }
        if (agreement.step() != Agreement::Step::ask) break;
        DS_TRY(check_time(until, wait_by, last_));
        until.pause(backoff.next());
        break;
      }
      case Agreement::Step::pull: {
        const VersionId version = agreement.version();
        std::vector<std::optional<Error>> refusals(all.size());
        DS_TRY(fetch(all, version, want, until, refusals));
        for (std::size_t i = 0; i < all.size(); ++i) {
          if (!refusals[i]) agreement.staged(i, version);
        }
        for (std::size_t i = 0; i < all.size(); ++i) {
          if (refusals[i]) agreement.refused(i, refusals[i]->code() == Errc::gone);
        }
        if (agreement.step() == Agreement::Step::agreed) return all.front()->staged->report().version;
        DS_TRY(note_refusals(all, refusals, wait_by, until));
        until.pause(backoff.next());
        break;
      }
      case Agreement::Step::up_to_date: return committed->version;
      case Agreement::Step::agreed: return all.front()->staged->report().version;
    }
  }
}

Result<Version> PartsReceiver::agree_on_named(const Want& want, const CallContext& until) {
  const auto wait_by = wait_limit(want);
  const std::vector<Member*> all = needed();
  Backoff backoff(tuning_);
  for (;;) {
    DS_ASSIGN(const std::vector<Version> meant, ask(all, want, wait_by, until));
    const VersionId version = meant.front().id;
    const bool one = std::all_of(meant.begin(), meant.end(), [&](const Version& v) { return v.id == version; });
    if (one) {
      if (!joint_->is_full() && target_->committed() != nullptr && target_->committed()->version.id == version) {
        return target_->committed()->version;
      }
      std::vector<std::optional<Error>> refusals(all.size());
      DS_TRY(fetch(all, version, want, until, refusals));
      const bool none = std::none_of(refusals.begin(), refusals.end(), [](const auto& r) { return r.has_value(); });
      if (none) return all.front()->staged->report().version;
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (refusals[i] && refusals[i]->code() == Errc::gone) return about(*all[i], *refusals[i]);
      }
      DS_TRY(note_refusals(all, refusals, wait_by, until));
    }
    DS_TRY(check_time(until, wait_by, last_));
    until.pause(backoff.next());
  }
}

Status PartsReceiver::look_at_epoch(const Member& member, const Version& served, const TargetState* held) {
  Status fits = older_epochs_.check(member.at.endpoint, served, held);
  if (fits) return {};
  const Error why = about(member, std::move(fits).error());
  if (older_epochs_.policy() == OlderEpoch::fail) return why;
  last_ = Error(Errc::timed_out, why.message());
  return {};
}

// ---- one update ----------------------------------------------------------------------------------------------------

Result<Prepared> PartsReceiver::merge(bool full) {
  const trace::Span span("merge");
  Prepared all;
  PullReport& report = all.report;
  report.mode = full ? PullMode::full : PullMode::delta;
  report.full_bytes = tiles_.bytes();
  const TargetState* const committed = target_->committed();
  if (full) {
    all.state.digests.assign(static_cast<std::size_t>(layout_->tile_count()), 0);
  } else {
    all.state.digests = committed->digests;
  }
  for (Member* member : needed()) {
    report.version = member->staged->report().version;
    member->staged_root = member->staged->report().root;
    add(report, member->staged->report());
    DS_TRY(member->staged->commit(CallOptions()).with_context(describe(*member)));  // only gathers
    auto gathered = member->target->take_gathered();
    if (!gathered) return about(*member, Error(Errc::internal, "it has gathered nothing"));
    member->target->scatter(gathered->state.digests, all.state.digests);
    join_chain(all.steps, std::move(gathered->steps));
  }
  all.state.version = report.version;
  all.state.root = report.root = tiles_.root(all.state.digests);
  return all;
}

/// As Pull::scrub(), of all tiles of the target.
Status PartsReceiver::scrub(const CallContext& until) {
  const trace::Span span("scrub");
  const std::vector<std::uint64_t> list = scrub_list(tiles_, options_.scrub_tiles, scrubs_++);
  DS_ASSIGN(const std::vector<TileMismatch> wrong, deltasync::attest(*target_, list, until, Copies::where_they_can));
  if (wrong.empty()) return {};
  invalidated_ = true;
  return Error(Errc::corrupt, "live memory: " + deltasync::describe(wrong) +
                                  ": somebody wrote to it; the next pull replaces the version");
}

}  // namespace deltasync::receiver
