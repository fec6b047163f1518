// The coordinator's side. What it decides goes through `pending`: stage and outcome change in logged() and nowhere else
// once ranks may have promised.
#include <algorithm>
#include <map>
#include <utility>

#include "commit/coordinator_machine.hpp"

namespace deltasync::commit {
namespace {

using Stage = CoordinatorState::Stage;
using Outcome = CoordinatorState::Outcome;

std::string rank_name(std::uint32_t rank) {
  return "rank " + std::to_string(rank);
}

bool has_promised(Phase phase) {
  return phase == Phase::prepared || phase == Phase::committing || phase == Phase::committed ||
         phase == Phase::commit_failed;
}

/// What ended a pull, and may be over when it is tried again.
bool may_pass(Errc code) {
  return code == Errc::connection || code == Errc::timed_out;
}

Error bad_log(const std::string& why) {
  return {Errc::corrupt, "the coordinator's log: " + why};
}

/// Applies one record to what the ones before it say. `open` is the transaction that was committed last and has not
/// ended.
Status replay(CoordinatorState& s, std::optional<Record>& open, std::uint32_t& ranks, const Record& r) {
  const std::string name = std::string(to_string(r.kind)) + " " + to_string(r.transaction);
  if (s.log == 0 && r.kind != RecordKind::start) return bad_log("begins with " + name);
  if (s.log != 0 && r.log != s.log) return bad_log("a record of another log: " + name);
  if (r.kind == RecordKind::start ? r.term <= s.term : r.term != s.term) return bad_log("the term of " + name);
  switch (r.kind) {
    case RecordKind::start:
      if (r.log == 0) return bad_log("has no name");
      s.log = r.log;
      s.term = r.term;
      ranks = r.ranks;
      if (r.version.id.valid()) {
        if (s.group && s.group->id != r.version.id) return bad_log("a start that names another version");
        s.group = r.version;
      }
      return {};
    case RecordKind::commit:
    case RecordKind::abort:
      if (open || r.transaction <= s.last) return bad_log("comes too late: " + name);
      if (r.kind == RecordKind::abort) return {};  // what has no record is presumed aborted: this one is for people
      if (!r.version.id.valid()) return bad_log("no version: " + name);
      open = r;
      return {};
    case RecordKind::roll_back:
    case RecordKind::finish:
      if (!open || open->transaction != r.transaction) return bad_log("without a commit before it: " + name);
      s.last = r.transaction;
      s.outcome = r.kind == RecordKind::finish ? Outcome::finished : Outcome::gone_back;
      if (r.kind == RecordKind::finish) s.group = open->version;
      open.reset();
      return {};
  }
  return bad_log("an unknown kind of record");
}

}  // namespace

std::string_view to_string(RecordKind kind) noexcept {
  switch (kind) {
    case RecordKind::start: return "start";
    case RecordKind::commit: return "commit";
    case RecordKind::abort: return "abort";
    case RecordKind::roll_back: return "roll_back";
    case RecordKind::finish: return "finish";
  }
  return "?";
}

Result<CoordinatorMachine> CoordinatorMachine::recover(std::uint32_t ranks, const std::vector<Record>& records,
                                                       std::uint64_t fresh_log) {
  if (ranks == 0 || ranks > kRanksMax) {
    return Error(Errc::invalid_argument,
                 std::to_string(ranks) + " ranks; 1 to " + std::to_string(kRanksMax) + " are possible");
  }
  CoordinatorState s;
  std::optional<Record> open;
  std::uint32_t ranks_before = ranks;
  for (const Record& record : records) DS_TRY(replay(s, open, ranks_before, record));
  if (open && ranks_before != ranks) {
    return Error(Errc::invalid_argument, "transaction " + to_string(open->transaction) + " of " +
                                             std::to_string(ranks_before) + " ranks is open; it cannot end with " +
                                             std::to_string(ranks));
  }
  if (s.log == 0) s.log = fresh_log;
  ++s.term;
  s.ranks.resize(ranks);
  s.committed.assign(ranks, 0);
  if (open) {
    s.transaction = open->transaction;
    s.version = open->version;
    s.stage = Stage::committing;
  }
  s.pending = Record{RecordKind::start, s.log, s.term, ranks, {}, s.group.value_or(Version())};
  return CoordinatorMachine(std::move(s));
}

// ---- decisions -------------------------------------------------------------------------------------------------

void CoordinatorMachine::decide(RecordKind kind, Error why) {
  s_.problem = std::move(why);
  decide(kind);
}

void CoordinatorMachine::decide(RecordKind kind) {
  s_.pending = Record{kind, s_.log, s_.term, static_cast<std::uint32_t>(s_.ranks.size()), s_.transaction, {}};
  if (kind == RecordKind::commit || kind == RecordKind::finish) s_.pending->version = s_.version;
}

void CoordinatorMachine::logged() {
  if (!s_.pending) return;
  const Record record = *std::exchange(s_.pending, std::nullopt);
  ++s_.step;
  switch (record.kind) {
    case RecordKind::start: s_.started = true; break;
    case RecordKind::commit:
      s_.stage = Stage::committing;
      s_.committed.assign(s_.ranks.size(), 0);
      break;
    case RecordKind::abort: s_.stage = Stage::idle; break;
    case RecordKind::roll_back:
    case RecordKind::finish:
      s_.last = record.transaction;
      s_.outcome = record.kind == RecordKind::finish ? Outcome::finished : Outcome::gone_back;
      if (record.kind == RecordKind::finish) s_.group = record.version;
      s_.stage = Stage::idle;
      break;
  }
  advance();
}

Status CoordinatorMachine::begin(const Want& want) {
  if (!idle()) return Error(Errc::version_conflict, "transaction " + to_string(s_.transaction) + " is open");
  s_.transaction = {s_.term, ++s_.transactions};
  s_.round = 1;
  s_.want = want;
  s_.exact = {};
  s_.version = {};
  s_.problem = Error(Errc::internal, "");
  s_.nothing_new = false;
  s_.moved_on = false;
  s_.stage = Stage::staging;
  ++s_.step;
  return {};
}

std::string CoordinatorMachine::who_is_late() const {
  std::string names;
  for (std::uint32_t i = 0; i < s_.ranks.size(); ++i) {
    const auto& r = s_.ranks[i];
    const bool there = r && r->transaction == s_.transaction;
    const bool done = there && ((s_.stage == Stage::staging && r->phase == Phase::staged && r->round == s_.round) ||
                                (s_.stage == Stage::preparing && r->phase == Phase::prepared) ||
                                (s_.stage == Stage::committing && s_.committed[i] != 0));
    if (done) continue;
    std::string where = r ? std::string(to_string(there ? r->phase : Phase::none)) : "never heard of";
    if (r && !there && !r->problem.empty()) where += ": " + r->problem;
    if (r && is_foreign(*r)) where = "obeys another coordinator's log";
    names += (names.empty() ? "" : ", ") + rank_name(i) + " (" + where + ")";
  }
  return names;
}

void CoordinatorMachine::time_is_up() {
  if (s_.pending || s_.stage == Stage::idle) return;
  static constexpr const char* kWhat[] = {"", "staging", "preparing", "committing"};
  const RecordKind kind = s_.stage == Stage::committing ? RecordKind::roll_back : RecordKind::abort;
  decide(kind, Error(Errc::timed_out, std::string("deadline passed while ") + kWhat[static_cast<int>(s_.stage)] +
                                          "; waited for " + who_is_late()));
}

// ---- reports ---------------------------------------------------------------------------------------------------

Status CoordinatorMachine::on_report(const Report& report) {
  if (report.rank >= s_.ranks.size()) {
    return Error(Errc::invalid_argument,
                 rank_name(report.rank) + " of a group of " + std::to_string(s_.ranks.size()) + " ranks");
  }
  auto& known = s_.ranks[report.rank];
  if (known && report.incarnation < known->incarnation) {
    return Error(Errc::version_conflict, rank_name(report.rank) + ": this process has been replaced by a later one");
  }
  if (known && report.incarnation == known->incarnation && report.step < known->step) return {};  // overtaken
  known = report;
  if (is_foreign(report)) {  // its transaction may have the name of one of ours
    known->phase = Phase::none;
    known->transaction = {};
    known->round = 0;
  }
  advance();
  return {};
}

bool CoordinatorMachine::is_foreign(const Report& report) const {
  return report.log != 0 && report.log != s_.log;
}

bool CoordinatorMachine::in_round(const Report& report) const {
  return report.transaction == s_.transaction && report.round == s_.round;
}

void CoordinatorMachine::advance() {
  if (s_.pending || !s_.started) return;
  switch (s_.stage) {
    case Stage::idle: break;
    case Stage::staging: advance_staging(); break;
    case Stage::preparing: advance_preparing(); break;
    case Stage::committing: advance_committing(); break;
  }
}

void CoordinatorMachine::advance_staging() {
  for (std::uint32_t i = 0; i < s_.ranks.size(); ++i) {
    const auto& r = s_.ranks[i];
    if (!r || !in_round(*r) || r->phase != Phase::stage_failed) continue;
    if (s_.exact.valid() && s_.round < kRoundsMax) return next_round({});  // that version may be out of reach by now
    return decide(RecordKind::abort, Error(r->code, rank_name(i) + ": " + r->problem));
  }
  const auto has_staged = [&](const auto& r) { return r && in_round(*r) && r->phase == Phase::staged; };
  const auto has_staged_other = [&](const auto& r) {
    return has_staged(r) && s_.group && r->staged.id != s_.group->id;
  };
  if (!s_.moved_on && std::any_of(s_.ranks.begin(), s_.ranks.end(), has_staged_other)) {
    s_.moved_on = true;
    ++s_.step;  // what was ordered of those who serve first is void
  }
  if (std::all_of(s_.ranks.begin(), s_.ranks.end(), has_staged)) agree();
}

void CoordinatorMachine::agree() {
  const Report& first = *s_.ranks.front();
  Version newest = first.staged;
  bool same = true;
  bool all_serve = s_.group.has_value();
  for (const auto& r : s_.ranks) {
    same = same && r->staged.id == first.staged.id;
    if (r->staged.id > newest.id) newest = r->staged;
    all_serve = all_serve && r->state == RankState::serving && r->holds == s_.group->id;
  }
  if (!same && s_.round >= kRoundsMax) {
    return decide(RecordKind::abort, Error(Errc::timed_out, "the ranks did not come to one version in " +
                                                                std::to_string(kRoundsMax) + " rounds"));
  }
  if (!same) return next_round(newest.id);
  if (auto roots = check_roots(); !roots) return decide(RecordKind::abort, std::move(roots).error());
  s_.version = newest;
  if (all_serve && newest.id == s_.group->id) {
    s_.nothing_new = true;
    s_.stage = Stage::idle;  // nobody has promised anything: there is nothing to decide
    ++s_.step;
    return;
  }
  s_.stage = Stage::preparing;
  ++s_.step;
}

void CoordinatorMachine::next_round(VersionId exact) {
  ++s_.round;
  s_.exact = exact;
  ++s_.step;
}

/// Who subscribed to the same has the same.
Status CoordinatorMachine::check_roots() const {
  std::map<Digest128, std::uint32_t> first;
  for (std::uint32_t i = 0; i < s_.ranks.size(); ++i) {
    const Report& r = *s_.ranks[i];
    const auto [other, fresh] = first.emplace(r.subscription, i);
    if (fresh || s_.ranks[other->second]->staged_root == r.staged_root) continue;
    return Error(Errc::corrupt, rank_name(i) + " and " + rank_name(other->second) + " staged different contents of " +
                                    to_string(r.staged));
  }
  return {};
}

void CoordinatorMachine::advance_preparing() {
  bool all = true;
  for (std::uint32_t i = 0; i < s_.ranks.size(); ++i) {
    const Report& r = *s_.ranks[i];
    if (!in_round(r)) {
      return decide(RecordKind::abort,
                    Error(Errc::peer_died, rank_name(i) + " has lost what it had staged (another process?)"));
    }
    if (r.phase == Phase::stage_failed) {
      return decide(RecordKind::abort, Error(r.code, rank_name(i) + ": " + r.problem));
    }
    all = all && r.phase == Phase::prepared;
  }
  if (all) decide(RecordKind::commit);
}

void CoordinatorMachine::advance_committing() {
  bool all = true;
  for (std::uint32_t i = 0; i < s_.ranks.size(); ++i) {
    const auto& r = s_.ranks[i];
    const bool there = r && r->transaction == s_.transaction;
    // What has been committed once stays a fact: who dies after it comes back without serving.
    if (there && r->phase == Phase::committed) s_.committed[i] = 1;
    if (s_.committed[i] != 0) continue;
    all = false;
    if (there && r->phase == Phase::commit_failed) {
      return decide(RecordKind::roll_back, Error(r->code, rank_name(i) + ": " + r->problem));
    }
    if (r && !there) {
      return decide(RecordKind::roll_back,
                    Error(Errc::peer_died, rank_name(i) + " has lost what it had staged (another process?)"));
    }
  }
  if (all) decide(RecordKind::finish);
}

// ---- orders ----------------------------------------------------------------------------------------------------

Order CoordinatorMachine::order(std::uint32_t rank) const {
  Order o;
  o.log = s_.log;
  o.term = s_.term;
  o.step = s_.step;
  if (!s_.started || rank >= s_.ranks.size() || !s_.ranks[rank]) return o;
  const Report& r = *s_.ranks[rank];
  o.incarnation = r.incarnation;
  o.transaction = s_.transaction;
  o.round = s_.round;
  if (is_foreign(r)) return o;  // it hears that there is another log, and obeys nothing
  const bool open = s_.stage != Stage::idle;
  if (r.phase != Phase::none && !(open && r.transaction == s_.transaction)) {
    o.transaction = r.transaction;
    if (r.transaction == s_.last) {
      const bool finish = s_.outcome == Outcome::finished;
      o.kind = finish ? OrderKind::finish : OrderKind::roll_back;
      if (finish) o.version = *s_.group;
    } else {
      // Later than all that may have been committed: it was not. Earlier: forgotten, since a later one was committed by
      // all ranks, which this process was none of.
      const bool forgotten = r.transaction < s_.last && has_promised(r.phase);
      o.kind = forgotten ? OrderKind::expel : OrderKind::roll_back;
    }
    return o;
  }
  if (s_.pending) return o;
  o.version = s_.version;
  switch (s_.stage) {
    case Stage::staging:
      if (r.phase != Phase::none && in_round(r)) return o;
      if (serves_first(r)) return bring_to_group(o, r);
      o.kind = OrderKind::stage;
      o.want = s_.want;
      o.exact = s_.exact;
      // Newer than what the group serves. Who holds something else may hold what others are to pull yet.
      if (!(s_.group && r.holds == s_.group->id)) o.want.newer = false;
      return o;
    case Stage::preparing:
      if (r.phase == Phase::staged && in_round(r)) o.kind = OrderKind::prepare;
      return o;
    case Stage::committing:
      if (r.phase == Phase::prepared) o.kind = OrderKind::commit;
      return o;
    case Stage::idle: break;
  }
  if (r.state == RankState::serving) {
    if (!s_.group || r.holds != s_.group->id) o.kind = OrderKind::expel;
    return o;
  }
  if (!s_.group) return o;
  return bring_to_group(o, r);
}

/// Staging may last as long as the trainer takes for its next version: a rank that came back meanwhile is not to wait
/// for that. But it is, once somebody has staged another version: then all wait for this rank alone, and what the group
/// serves is, of its agent, a past one. And so is a rank that cannot have the group's version.
bool CoordinatorMachine::serves_first(const Report& report) const {
  if (!s_.group || report.phase != Phase::none || report.state == RankState::serving) return false;
  if (report.holds == s_.group->id) return true;
  return !s_.moved_on && (report.problem.empty() || may_pass(report.code));
}

/// What a rank without a promise needs to serve what all others do.
Order CoordinatorMachine::bring_to_group(Order o, const Report& report) const {
  if (report.busy) return o;
  o.version = *s_.group;
  o.kind = report.holds == s_.group->id ? OrderKind::serve : OrderKind::catch_up;
  return o;
}

}  // namespace deltasync::commit
