// One rank's side. Invariants: `serving` implies that no promise is open; a promise is left by finish, roll_back and
// expel only, and by resolve_by_pull.
#include <utility>

#include "commit/participant_machine.hpp"

namespace deltasync::commit {

std::string to_string(const TransactionId& id) {
  return std::to_string(id.term) + "." + std::to_string(id.number);
}

std::string_view to_string(RankState state) noexcept {
  switch (state) {
    case RankState::paused: return "paused";
    case RankState::serving: return "serving";
    case RankState::prepared: return "prepared";
    case RankState::committed_waiting: return "committed_waiting";
    case RankState::in_doubt: return "in_doubt";
  }
  return "?";
}

std::string_view to_string(Phase phase) noexcept {
  switch (phase) {
    case Phase::none: return "none";
    case Phase::staging: return "staging";
    case Phase::staged: return "staged";
    case Phase::stage_failed: return "stage_failed";
    case Phase::preparing: return "preparing";
    case Phase::prepared: return "prepared";
    case Phase::committing: return "committing";
    case Phase::committed: return "committed";
    case Phase::commit_failed: return "commit_failed";
    case Phase::rolling_back: return "rolling_back";
  }
  return "?";
}

std::string_view to_string(OrderKind kind) noexcept {
  switch (kind) {
    case OrderKind::none: return "none";
    case OrderKind::stage: return "stage";
    case OrderKind::prepare: return "prepare";
    case OrderKind::commit: return "commit";
    case OrderKind::finish: return "finish";
    case OrderKind::roll_back: return "roll_back";
    case OrderKind::serve: return "serve";
    case OrderKind::catch_up: return "catch_up";
    case OrderKind::expel: return "expel";
  }
  return "?";
}

namespace {

/// Work that may wait for a version, and can be told not to.
bool pulls(Work::Kind kind) {
  return kind == Work::Kind::pull || kind == Work::Kind::catch_up;
}

}  // namespace

ParticipantMachine::ParticipantMachine(std::uint32_t rank, std::uint64_t incarnation, VersionId holds,
                                       Digest128 subscription) {
  s_.rank = rank;
  s_.incarnation = incarnation;
  s_.holds = holds;
  s_.subscription = subscription;
}

bool ParticipantMachine::promised() const noexcept {
  switch (s_.phase) {
    case Phase::prepared:
    case Phase::committing:
    case Phase::committed:
    case Phase::commit_failed: return true;
    default: return false;
  }
}

RankState ParticipantMachine::rank_state() const noexcept {
  if (s_.serving) return RankState::serving;
  if (!promised()) return RankState::paused;
  if (s_.in_doubt) return RankState::in_doubt;
  return s_.phase == Phase::committed ? RankState::committed_waiting : RankState::prepared;
}

std::optional<VersionId> ParticipantMachine::serving() const {
  if (!s_.serving) return std::nullopt;
  return s_.holds;
}

Report ParticipantMachine::report() const {
  Report r;
  r.rank = s_.rank;
  r.incarnation = s_.incarnation;
  r.step = s_.step;
  r.state = rank_state();
  r.busy = s_.work.kind != Work::Kind::none;
  r.phase = s_.phase;
  r.transaction = s_.transaction;
  r.round = s_.round;
  r.staged = s_.staged;
  r.staged_root = s_.staged_root;
  r.subscription = s_.subscription;
  r.holds = s_.holds;
  r.code = s_.code;
  r.problem = s_.problem;
  r.log = s_.log;
  return r;
}

// ---- orders ----------------------------------------------------------------------------------------------------

Status ParticipantMachine::on_order(const Order& order) {
  if (order.incarnation != s_.incarnation || order.log == 0) return {};
  if (s_.log != 0 && order.log != s_.log) {
    return Error(Errc::version_conflict, "rank " + std::to_string(s_.rank) +
                                             " belongs to the group of another coordinator's log; to join this "
                                             "one it has to be resolved by a pull");
  }
  if (std::pair(order.term, order.step) < std::pair(s_.order_term, s_.order_step)) return {};
  s_.log = order.log;
  s_.order_term = order.term;
  s_.order_step = order.step;
  switch (order.kind) {
    case OrderKind::none: break;
    case OrderKind::stage: stage(order); break;
    case OrderKind::prepare: prepare(order); break;
    case OrderKind::commit: commit(order); break;
    case OrderKind::finish: finish(order); break;
    case OrderKind::roll_back: roll_back(order); break;
    case OrderKind::serve: serve(order); break;
    case OrderKind::catch_up: catch_up(order); break;
    case OrderKind::expel: expel(order); break;
  }
  return {};
}

void ParticipantMachine::start(Work::Kind kind) {
  s_.work = Work();
  s_.work.kind = kind;
  s_.work.serial = ++s_.works;
  ++s_.step;
}

/// Whatever is ordered while work is under way comes again with the answer to a later report.
void ParticipantMachine::stage(const Order& order) {
  if (promised() || s_.phase == Phase::preparing || s_.phase == Phase::rolling_back) return;
  const bool known = s_.transaction == order.transaction && s_.round >= order.round && s_.phase != Phase::none;
  if (known) return;
  if (s_.work.kind != Work::Kind::none) {
    s_.cancel = pulls(s_.work.kind);
    return;
  }
  const bool has_it = s_.phase == Phase::staged && s_.transaction == order.transaction && order.exact.valid();
  if (has_it && s_.staged.id == order.exact) {
    s_.round = order.round;
    ++s_.step;
    return;
  }
  s_.phase = Phase::staging;
  s_.transaction = order.transaction;
  s_.round = order.round;
  s_.staged = {};
  s_.staged_root = {};
  s_.problem.clear();
  start(Work::Kind::pull);
  s_.work.want = order.want;
  s_.work.exact = order.exact;
}

void ParticipantMachine::prepare(const Order& order) {
  if (!same(order) || s_.phase != Phase::staged || s_.round != order.round || s_.work.kind != Work::Kind::none) return;
  if (s_.staged.id != order.version.id) return;
  s_.before = s_.serving ? s_.holds : VersionId();
  s_.serving = false;
  s_.phase = Phase::preparing;
  start(Work::Kind::pause);
}

void ParticipantMachine::commit(const Order& order) {
  if (!same(order) || s_.phase != Phase::prepared) return;
  s_.in_doubt = false;  // for the time that it takes now
  s_.phase = Phase::committing;
  start(Work::Kind::commit);
}

void ParticipantMachine::finish(const Order& order) {
  if (!same(order) || s_.phase != Phase::committed) return;
  leave_transaction();
  s_.serving = true;
  start(Work::Kind::forget);
}

void ParticipantMachine::roll_back(const Order& order) {
  if (!same(order) || s_.phase == Phase::rolling_back) return;
  if (s_.work.kind == Work::Kind::none) return begin_rolling_back();
  s_.roll_back_next = true;
  s_.cancel = pulls(s_.work.kind);
}

void ParticipantMachine::begin_rolling_back() {
  // Who has promised nothing goes on serving meanwhile.
  if (!promised()) s_.before = s_.serving ? s_.holds : VersionId();
  s_.roll_back_next = false;
  s_.phase = Phase::rolling_back;
  start(Work::Kind::roll_back);
}

void ParticipantMachine::serve(const Order& order) {
  if (s_.phase != Phase::none || s_.work.kind != Work::Kind::none || s_.serving) return;
  if (!s_.holds.valid() || s_.holds != order.version.id) return;
  s_.serving = true;
  ++s_.step;
}

void ParticipantMachine::catch_up(const Order& order) {
  if (s_.phase != Phase::none || s_.work.kind != Work::Kind::none || s_.serving) return;
  if (s_.holds == order.version.id) return;
  start(Work::Kind::catch_up);
  s_.work.exact = order.version.id;
}

void ParticipantMachine::expel(const Order& order) {
  if (s_.work.kind != Work::Kind::none) return;
  const bool open = s_.phase != Phase::none;
  if (open && s_.transaction != order.transaction) return;
  if (!open && !s_.serving) return;
  leave_transaction();
  s_.serving = false;
  s_.code = Errc::gone;
  s_.problem = "the coordinator does not know any more what became of this rank's version";
  start(Work::Kind::forget);
}

void ParticipantMachine::leave_transaction() {
  s_.phase = Phase::none;
  s_.transaction = {};
  s_.round = 0;
  s_.staged = {};
  s_.staged_root = {};
  s_.before = {};
  s_.in_doubt = false;
  s_.roll_back_next = false;
  s_.cancel = false;
  s_.problem.clear();
}

// ---- what happens here -----------------------------------------------------------------------------------------

void ParticipantMachine::note(const WorkResult& result) {
  s_.holds = result.holds;
  if (!result.error) return;
  s_.code = result.error->code();
  s_.problem = result.error->message().substr(0, kProblemBytesMax);
}

void ParticipantMachine::done(std::uint64_t serial, const WorkResult& result) {
  if (s_.work.kind == Work::Kind::none || serial != s_.work.serial) return;
  const Work::Kind kind = s_.work.kind;
  const bool failed = result.error.has_value();
  s_.work = Work();
  const bool cancelled = std::exchange(s_.cancel, false);
  ++s_.step;
  if (std::exchange(s_.forget_next, false)) {
    s_.holds = result.holds;
    return start(Work::Kind::forget);
  }
  if (cancelled && kind == Work::Kind::catch_up) {
    s_.holds = result.holds;  // that it was to end is no problem, and does not hide one
  } else {
    note(result);
  }
  switch (kind) {
    case Work::Kind::none: break;
    case Work::Kind::pull:
      s_.phase = failed ? Phase::stage_failed : Phase::staged;
      if (!failed) {
        s_.staged = result.staged;
        s_.staged_root = result.root;
      }
      // A full update in place: what was served is gone.
      if (s_.serving && !s_.holds.valid()) s_.serving = false;
      break;
    case Work::Kind::pause:
      s_.phase = failed ? Phase::stage_failed : Phase::prepared;
      if (failed) s_.serving = s_.before.valid();
      break;
    case Work::Kind::commit: s_.phase = failed ? Phase::commit_failed : Phase::committed; break;
    case Work::Kind::roll_back: {
      const bool serve = !failed && s_.before.valid() && s_.before == s_.holds;
      leave_transaction();
      note(result);
      s_.serving = serve;
      break;
    }
    case Work::Kind::catch_up:
      if (!failed) s_.problem.clear();
      break;
    case Work::Kind::forget: break;
  }
  if (s_.roll_back_next) begin_rolling_back();
}

void ParticipantMachine::time_is_up() {
  if (!promised() || s_.in_doubt) return;
  s_.in_doubt = true;
  ++s_.step;
}

void ParticipantMachine::replaced() {
  s_.serving = false;
  s_.before = {};  // nor does it serve again when the work at hand is done
  s_.roll_back_next = false;
  s_.cancel = pulls(s_.work.kind);
  ++s_.step;
  if (s_.work.kind != Work::Kind::none) return;
  leave_transaction();
  start(Work::Kind::forget);
}

Status ParticipantMachine::resolve_by_pull(std::uint64_t incarnation) {
  const bool idle = s_.work.kind == Work::Kind::none;
  if (!idle && !pulls(s_.work.kind)) return Error(Errc::version_conflict, "the rank is at work; try again");
  if (incarnation <= s_.incarnation) return Error(Errc::invalid_argument, "an incarnation that is no later one");
  leave_transaction();
  s_.serving = false;
  s_.incarnation = incarnation;
  s_.log = 0;
  s_.order_term = 0;
  s_.order_step = 0;
  if (idle) {
    start(Work::Kind::forget);
  } else {
    s_.cancel = s_.forget_next = true;
    ++s_.step;
  }
  return {};
}

}  // namespace deltasync::commit
