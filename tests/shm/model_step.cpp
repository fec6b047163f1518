// One step: which choices an actor has in a state, and what each does.
#include "shm/explorer.hpp"

namespace deltasync::shm::model {
namespace {

bool alive(const Actor& a) {
  return a.status == Status::running || a.status == Status::stopped;
}

void forget(Actor& a) {
  a.locals = {};
  a.log_size = 0;
  a.log = {};
}

void kill(State& s, Actor& a) {
  forget(a);
  a.status = Status::dead;
  if (a.kind != Kind::agent) return;
  s.served = {};  // its memory is gone, and its connections with it
  s.lease = {};
  s.held[0] = s.held[1] = 0;
}

bool spend(std::uint8_t& budget) {
  if (budget == 0) return false;
  --budget;
  return true;
}

/// Faults: what somebody else does to a process.
bool fault(State& s, Actor& a, Action action) {
  switch (action) {
    case Action::kill:
      if (!alive(a) || !spend(s.kills_left)) return false;
      kill(s, a);
      return true;
    case Action::stop:
      if (a.status != Status::running || !spend(s.stops_left)) return false;
      a.status = Status::stopped;
      return true;
    case Action::resume:
      if (a.status != Status::stopped) return false;
      a.status = Status::running;
      return true;
    case Action::restart:
      if (a.kind != Kind::agent || a.status != Status::dead || !spend(s.agent_restarts_left)) return false;
      a.status = Status::running;
      a.locals.pc = kAdopt;
      return true;
    default: return false;
  }
}

/// Whether a choice other than a plain step applies, and its price.
bool choose(State& s, const Actor& a, Action action) {
  if (action == Action::step) return true;
  if (a.log_size != 0) return false;
  const auto pc = a.locals.pc;
  switch (action) {
    case Action::timeout:
      if (a.kind != Kind::writer || (pc != kBegin && pc != kSeal) || !spend(s.timeouts_left)) return false;
      s.timeouts_taken = 1;
      return true;
    case Action::abort: return a.kind == Kind::writer && pc == kDecide && spend(s.aborts_left);
    case Action::revoke: {
      const auto& lease = s.lease;
      return a.kind == Kind::agent && pc == kLeases && lease.taken && !lease.revoked && lease.half == a.locals.half;
    }
    default: return false;
  }
}

}  // namespace

bool take(const Config& config, const Rules& rules, State& s, unsigned actor, Action action, Violation& violation) {
  auto& a = s.actor[actor];
  if (action >= Action::kill) return fault(s, a, action);
  if (a.status != Status::running || !choose(s, a, action)) return false;

  Memory memory(s, actor, rules);
  Locals locals = a.locals;
  switch (a.kind) {
    case Kind::writer: run_writer(config.writers[actor], locals, memory, action); break;
    case Kind::agent: run_agent(config, locals, memory, action); break;
    case Kind::reader: run_reader(config, locals, memory); break;
    case Kind::none: return false;
  }
  violation = memory.violation();
  if (memory.unfinished()) {
    if (a.log_size == kLogMax) {
      violation = Violation::log_full;
      return true;
    }
    a.log[a.log_size++] = memory.observation();
  } else {
    a.locals = locals;
    for (unsigned i = 0; i < a.log_size; ++i) a.log[i] = 0;
    a.log_size = 0;
  }
  return true;
}

Violation check_state(const State& s) {
  unsigned active = 0;
  for (unsigned h = 0; h < kHalves; ++h) {
    const auto now = half_word(s, h);
    if (now.code == HalfState::active) ++active;
    if (!holds_version(now.code)) continue;
    for (unsigned c = 0; c < kDataCells; ++c) {
      if (s.cells[kData + h * kDataCells + c] != s.fill_value[h]) return Violation::torn;
    }
    if (info_value(s, h) != s.fill_value[h]) return Violation::torn_info;
  }
  return active > 1 ? Violation::two_active : Violation::none;
}

}  // namespace deltasync::shm::model
