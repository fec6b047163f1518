// Nobody is stuck. Every wait has a deadline, so "stuck" means: without its deadline a party would wait forever, and
// no dead agent, stopped process, missing writer or earlier timeout is the reason.
//
// Why looking at quiet states is enough: state words only move forward (P5), each writer has a bounded number of
// versions, and an attempt is repeated only after a state word moved (checked: spurious_retry). So every run without
// further faults comes to rest in states where each actor's next episode changes nothing.
#include "shm/explorer.hpp"

namespace deltasync::shm::model {
namespace {

bool alive(const Actor& a) {
  return a.status == Status::running || a.status == Status::stopped;
}

const Actor* living_writer(const State& s, unsigned slot) {
  for (unsigned i = 0; i < s.actors; ++i) {
    const auto& a = s.actor[i];
    if (a.kind == Kind::writer && a.slot == slot && alive(a) && a.locals.pc != kAsk) return &a;
  }
  return nullptr;
}

/// Runs one actor alone from between two episodes. True if it comes back to where it was with nothing changed.
bool only_waits(const Config& config, const Rules& rules, State s, unsigned actor) {
  const auto home = s.actor[actor].locals;
  const auto cells = s.cells;
  for (int steps = 0; steps < 400; ++steps) {
    // A lease in the way is revoked in the end: that is the agent's own deadline, not a fault.
    const auto action = applies(s, actor, Action::revoke) ? Action::revoke : Action::step;
    const auto violation = take(config, rules, s, actor, action);
    const auto& a = s.actor[actor];
    if (violation != Violation::none || a.status != Status::running || s.cells != cells) return false;
    if (a.log_size == 0 && a.locals == home) return true;
  }
  return false;
}

bool reason_to_wait(const Config& config, const State& s, unsigned actor) {
  const auto& a = s.actor[actor];
  const bool skipped = s.timeouts_taken || s.execs_left != config.execs;  // a writer may have left a version out
  bool agent_runs = false;
  for (unsigned i = 0; i < s.actors; ++i) {
    if (s.actor[i].status == Status::stopped) return true;
    if (s.actor[i].kind == Kind::agent) agent_runs = s.actor[i].status == Status::running;
  }
  if (!agent_runs) return true;
  if (a.kind == Kind::reader) {
    // Nothing to read yet: fine. But what is ACTIVE or SEALED must be offered.
    return !holds_version(half_word(s, 0).code) && !holds_version(half_word(s, 1).code);
  }
  const auto& script = config.writers[actor];
  switch (a.locals.pc) {
    case kAsk: return living_writer(s, script.slot) != nullptr;
    case kBegin:
      if (script.slot == 0) return false;  // all halves of the living are given back in the end
      return living_writer(s, 0) == nullptr || skipped;
    case kSeal:
      for (unsigned k = 0; k < script.writers; ++k) {
        if (phase_word(s, k).sequence == a.locals.sequence) continue;
        // Writer k never came to this fill: it is dead, or its own deadline or an exec sent it on.
        if (living_writer(s, k) == nullptr || skipped) return true;
      }
      return false;
    default: return false;
  }
}

}  // namespace

Violation check_progress(const Config& config, const Rules& rules, const State& s, bool& quiet) {
  quiet = false;
  for (unsigned i = 0; i < s.actors; ++i) {
    const auto& a = s.actor[i];
    if (a.status != Status::running) continue;
    if (a.log_size != 0) return Violation::none;
    // The agent goes round; one place of its loop stands for all.
    if (a.kind == Kind::agent && a.locals.pc != kReap0) return Violation::none;
  }
  for (unsigned i = 0; i < s.actors; ++i) {
    if (s.actor[i].status == Status::running && !only_waits(config, rules, s, i)) return Violation::none;
  }
  quiet = true;
  for (unsigned i = 0; i < s.actors; ++i) {
    const auto& a = s.actor[i];
    if (a.status != Status::running || a.kind == Kind::agent) continue;
    if (!reason_to_wait(config, s, i)) return Violation::stuck;
  }
  return Violation::none;
}

}  // namespace deltasync::shm::model
