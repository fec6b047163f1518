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

/// The new program goes on with the next version; after the last one it has nothing to do and ends.
void exec(const WriterScript& script, Actor& a) {
  const auto next = static_cast<std::uint8_t>(a.locals.version + 1);
  forget(a);
  a.locals.version = next;
  a.locals.pc = kInit;
  if (next == script.versions) a.status = Status::finished;
}

/// Faults: what somebody else does to a process. And exec, which happens as suddenly.
void fault(const Config& config, State& s, unsigned actor, Action action) {
  auto& a = s.actor[actor];
  switch (action) {
    case Action::kill:
      --s.kills_left;
      kill(s, a);
      break;
    case Action::stop:
      --s.stops_left;
      a.status = Status::stopped;
      break;
    case Action::resume: a.status = Status::running; break;
    case Action::restart:
      --s.agent_restarts_left;
      a.status = Status::running;
      a.locals.pc = kAdopt;
      break;
    case Action::exec:
      --s.execs_left;
      exec(config.writers[actor], a);
      break;
    default: break;
  }
}

}  // namespace

bool applies(const State& s, unsigned actor, Action action) {
  const auto& a = s.actor[actor];
  switch (action) {
    case Action::kill: return alive(a) && s.kills_left > 0;
    case Action::stop: return a.status == Status::running && s.stops_left > 0;
    case Action::resume: return a.status == Status::stopped;
    case Action::drain: return a.pending_size != 0;
    case Action::restart: return a.kind == Kind::agent && a.status == Status::dead && s.agent_restarts_left > 0;
    case Action::exec:
      return a.kind == Kind::writer && a.status == Status::running && a.slot == s.exec_slot && s.execs_left > 0 &&
             a.locals.pc != kAsk;
    default: break;
  }
  if (a.status != Status::running) return false;
  if (action == Action::step) return true;
  if (a.log_size != 0) return false;  // choices are made between two episodes
  const auto pc = a.locals.pc;
  switch (action) {
    case Action::timeout: return a.kind == Kind::writer && (pc == kBegin || pc == kSeal) && s.timeouts_left > 0;
    case Action::abort: return a.kind == Kind::writer && (pc == kCopy || pc == kDecide) && s.aborts_left > 0;
    case Action::revoke:
      return a.kind == Kind::agent && pc == kLeases && s.lease.taken && !s.lease.revoked &&
             s.lease.half == a.locals.half;
    default: return false;
  }
}

Violation take(const Config& config, const Rules& rules, State& s, unsigned actor, Action action) {
  auto& a = s.actor[actor];
  Memory memory(s, actor, rules, config.delays_bytes);
  // A death is seen, and another program begins, only after all that the process stored.
  if (action == Action::kill || action == Action::exec) memory.drain();
  if (action == Action::drain) memory.drain_one();
  if (action == Action::drain) return memory.violation();
  if (action >= Action::kill) {
    fault(config, s, actor, action);
    return memory.violation();
  }
  if (action == Action::abort) --s.aborts_left;
  if (action == Action::timeout) {
    --s.timeouts_left;
    s.timeouts_taken = 1;
  }

  Locals locals = a.locals;
  switch (a.kind) {
    case Kind::writer: run_writer(config.writers[actor], locals, memory, action); break;
    case Kind::agent: run_agent(config, locals, memory, action); break;
    case Kind::reader: run_reader(config, locals, memory); break;
    case Kind::none: break;
  }
  if (memory.unfinished()) {
    if (a.log_size == kLogMax) return Violation::log_full;
    a.log[a.log_size++] = memory.observation();
  } else {
    a.locals = locals;
    for (unsigned i = 0; i < a.log_size; ++i) a.log[i] = 0;
    a.log_size = 0;
  }
  return memory.violation();
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
