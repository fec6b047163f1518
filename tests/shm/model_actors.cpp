#include "shm/model_actors.hpp"

namespace deltasync::shm::model {

const char* name(Action action) {
  switch (action) {
    case Action::step: return "step";
    case Action::timeout: return "TIMEOUT";
    case Action::abort: return "ABORT";
    case Action::revoke: return "REVOKE";
    case Action::kill: return "KILL";
    case Action::stop: return "STOP";
    case Action::resume: return "RESUME";
    case Action::restart: return "RESTART";
    case Action::exec: return "EXEC";
    case Action::drain: return "DRAIN";
  }
  return "?";
}

State initial(const Config& config) {
  State s;
  for (unsigned h = 0; h < kHalves; ++h) s.cells[kState + h] = HalfWord{HalfState::free, 0}.pack();
  for (unsigned k = 0; k < kSlots; ++k) s.cells[kPhase + k] = PhaseWord{Phase::idle, 0}.pack();
  std::uint32_t process = 1;
  for (const auto& script : config.writers) {
    auto& a = s.actor[s.actors++];
    a.kind = Kind::writer;
    a.slot = static_cast<std::uint8_t>(script.slot);
    a.process = process++;
    a.locals.pc = script.granted ? kInit : kAsk;
    if (script.granted) s.cells[kOwner + script.slot] = a.process;
  }
  auto& agent = s.actor[s.actors++];
  agent.kind = Kind::agent;
  agent.locals.pc = kAdopt;
  if (config.reader) s.actor[s.actors++].kind = Kind::reader;
  s.kills_left = static_cast<std::uint8_t>(config.kills);
  s.stops_left = static_cast<std::uint8_t>(config.stops);
  s.agent_restarts_left = static_cast<std::uint8_t>(config.agent_restarts);
  s.timeouts_left = static_cast<std::uint8_t>(config.timeouts);
  s.aborts_left = static_cast<std::uint8_t>(config.aborts);
  s.execs_left = static_cast<std::uint8_t>(config.execs);
  s.exec_slot = static_cast<std::uint8_t>(config.exec_slot);
  return s;
}

namespace {

void begin(const WriterScript& script, Locals& l, Memory& m, Action action) {
  const auto give_up = [&] { l.pc = kIdle; };
  if (action == Action::timeout) return give_up();
  InfoWords want{};
  want[kInfoEpoch] = script.epoch;
  want[kInfoNumber] = l.version + 1u;
  want[kInfoWriters] = script.writers;
  m.about_to_fill(value_of(script.epoch, l.version + 1u));
  Protocol<Memory> protocol(m);
  const auto found = script.slot == 0 ? protocol.lead(want) : protocol.join(script.slot, want);
  if (m.unfinished()) return;
  const auto& s = m.state();
  switch (found.attempt) {
    case Attempt::done:
      l.half = static_cast<std::uint8_t>(found.half);
      l.sequence = found.sequence;
      l.cell = 0;
      l.pc = kCopy;
      if (script.slot != 0 && half_word(s, found.half) != HalfWord{HalfState::filling, found.sequence}) {
        m.report(Violation::stale_join);
      }
      break;
    case Attempt::conflict:
      // What is reported must be what that half really was filled with, if it still is in that fill.
      if (half_word(s, found.half).sequence == found.sequence && found.other_open &&
          value_of(found.other[kInfoEpoch], found.other[kInfoNumber]) != s.fill_value[found.half]) {
        m.report(Violation::torn_info);
      }
      if (!(found.other_open && version_of(found.other) < version_of(want))) give_up();
      break;
    case Attempt::again:
      // The snapshot's first loads are of the state words: one of them must have moved since.
      if (m.self().log[0] == s.cells[kState] && m.self().log[1] == s.cells[kState + 1]) {
        m.report(Violation::spurious_retry);
      }
      break;
    case Attempt::wait: break;
  }
}

void copy(const WriterScript& script, Locals& l, Memory& m) {
  Protocol<Memory> protocol(m);
  // With two writers each has one of the cells; alone, one writes both.
  const unsigned cell = script.writers == 1 ? l.cell : script.slot;
  if (!protocol.enter_copy(script.slot, l.half, l.sequence)) {
    if (!m.unfinished()) l.pc = kAbort;
    return;
  }
  m.write_data(l.half, cell, l.sequence, value_of(script.epoch, l.version + 1u));
  l.pc = kCount;
}

/// The copy's bracket is still open.
void count(const WriterScript& script, Locals& l, Memory& m) {
  Protocol<Memory> protocol(m);
  const unsigned cells = script.writers == 1 ? kDataCells : 1;
  if (!protocol.add_progress(l.half, 0, l.sequence, 1)) return;
  protocol.leave_copy(script.slot, l.sequence);
  ++l.cell;
  l.pc = l.cell == cells ? kDecide : kCopy;
}

void seal(Locals& l, Memory& m, Action action) {
  Protocol<Memory> protocol(m);
  if (action == Action::timeout) {
    l.pc = kGiveUp;
    return;
  }
  protocol.try_seal(l.half, l.sequence);
  const auto state = protocol.fill_state(l.half, l.sequence);
  if (state == FillState::open) return;
  if (state != FillState::sealed) ++l.failed;
  l.pc = kIdle;
}

}  // namespace

void run_writer(const WriterScript& script, Locals& l, Memory& m, Action action) {
  Protocol<Memory> protocol(m);
  switch (l.pc) {
    case kAsk:
      if (m.load(m.slot_owner(script.slot)) == m.self().process) l.pc = kInit;
      break;
    case kInit:
      protocol.start_slot(script.slot);
      l.pc = kBegin;
      break;
    case kBegin: begin(script, l, m, action); break;
    case kCount: count(script, l, m); break;
    case kCopy:
      if (action == Action::abort) {
        l.pc = kAbort;
      } else {
        copy(script, l, m);
      }
      break;
    case kDecide: l.pc = action == Action::abort ? kAbort : kMark; break;
    case kMark:
      protocol.mark_committed(script.slot, l.sequence);
      l.pc = kSeal;
      break;
    case kSeal: seal(l, m, action); break;
    case kGiveUp:
      // The deadline has passed; the last writer may seal at this very moment, and then this is no failure.
      l.pc = protocol.abort(l.half, l.sequence) ? kIdle : kSeal;
      if (l.pc == kIdle) ++l.failed;
      break;
    case kAbort:
      protocol.abort(l.half, l.sequence);
      ++l.failed;
      l.pc = kIdle;
      break;
    case kIdle: {
      protocol.mark_idle(script.slot);
      const auto failed = l.failed;
      const auto next = static_cast<std::uint8_t>(l.version + 1);
      l = {};
      l.version = next;
      l.failed = failed;
      l.pc = kBegin;
      if (!m.unfinished() && next == script.versions) m.self().status = Status::finished;
      break;
    }
    default: break;
  }
}

namespace {

void reap(unsigned half, Memory& m) {
  Protocol<Memory> protocol(m);
  protocol.reap_fill(half);
  protocol.settle(half, m.state().held[half]);
}

/// The agent opens a slot for a process that asks; the same steps as AgentRole::grant_slot.
void grant(const Config& config, Memory& m) {
  Protocol<Memory> protocol(m);
  for (unsigned i = 0; i < config.writers.size(); ++i) {
    const unsigned slot = config.writers[i].slot;
    const bool asks = m.privately([&] {
      const auto& a = m.state().actor[i];
      return std::uint64_t{a.locals.pc == kAsk && a.status == Status::running &&
                           m.state().cells[kOwner + slot] != a.process};
    }) != 0;
    if (!asks) continue;
    const auto owner = m.load(m.slot_owner(slot));
    if (owner != 0 && !m.owner_dead(slot) && !m.broken(Guard::grant_dead_only)) continue;
    for (unsigned h = 0; h < kHalves; ++h) protocol.reap_fill(h);
    protocol.end_part(slot);
    m.store(m.slot_owner(slot), 0);
    for (unsigned h = 0; h < kHalves; ++h) protocol.settle(h, m.state().held[h]);
    m.store(m.slot_owner(slot), m.state().actor[i].process);
    return;
  }
}

/// Reads what a writer's progress covers while later bytes are still being written. Between taking hold and reading
/// the agent goes once through its loop.
void read_while_written(Locals& l, Memory& m) {
  Protocol<Memory> protocol(m);
  if (l.holding) {
    const unsigned half = l.holding - 1u;
    const auto now = HalfWord::unpack(m.load(m.half_state(half)));
    if (now.sequence == m.state().held[half]) {
      for (unsigned c = 0; c < kDataCells; ++c) m.read_data(half, c, m.state().fill_value[half]);
    }
    m.privately([&] {
      m.state().held[half] = 0;
      return std::uint64_t{0};
    });
    l.holding = 0;
    return;
  }
  for (unsigned h = 0; h < kHalves; ++h) {
    const auto now = HalfWord::unpack(m.load(m.half_state(h)));
    if (now.code != HalfState::filling || protocol.elements_done(h, 0, now.sequence) < kDataCells) continue;
    // AgentRole::hold: from here on this agent will not make the half FREE.
    m.privately([&] {
      m.state().held[h] = now.sequence;
      return std::uint64_t{0};
    });
    l.holding = static_cast<std::uint8_t>(h + 1);
    return;
  }
}

void publish(Locals& l, Memory& m) {
  m.privately([&] {
    auto& s = m.state();
    s.served = {1, 0, l.half, 0, info_value(s, l.half), l.sequence};
    return std::uint64_t{0};
  });
  const unsigned other = 1u - l.half;
  const auto now = HalfWord::unpack(m.load(m.half_state(other)));
  if (now.code != HalfState::retiring) {
    l = Locals{kReap0, 0, 0, 0, l.holding, 0, 0, 0};
    return;
  }
  l.half = static_cast<std::uint8_t>(other);
  l.sequence = now.sequence;
  l.pc = kDiff;
}

/// The delta is made of both halves: the retiring one and the active one.
void diff(Locals& l, Memory& m) {
  for (unsigned h = 0; h < kHalves; ++h) {
    const auto must_be = m.state().fill_value[h];
    for (unsigned c = 0; c < kDataCells; ++c) m.read_data(h, c, must_be);
  }
  l.pc = kLeases;
}

void leases(Locals& l, Memory& m, Action action) {
  const auto in_the_way = m.privately([&] {
    auto& lease = m.state().lease;
    const bool here = lease.taken && !lease.revoked && lease.half == l.half && lease.sequence == l.sequence;
    if (here && action == Action::revoke) lease.revoked = 1;
    return std::uint64_t{here && action != Action::revoke && !m.broken(Guard::retire_waits)};
  });
  if (in_the_way == 0) l.pc = kFree;
}

}  // namespace

void run_agent(const Config& config, Locals& l, Memory& m, Action action) {
  Protocol<Memory> protocol(m);
  switch (l.pc) {
    case kAdopt:
      for (unsigned h = 0; h < kHalves; ++h) protocol.adopt_half(h);
      l.pc = kServeOld;
      break;
    case kServeOld:
      l.pc = kReap0;
      for (unsigned h = 0; h < kHalves; ++h) {
        const auto now = HalfWord::unpack(m.load(m.half_state(h)));
        if (now.code != HalfState::active) continue;
        m.privately([&] {
          auto& s = m.state();
          s.served = {1, 0, static_cast<std::uint8_t>(h), 0, info_value(s, h), now.sequence};
          return std::uint64_t{0};
        });
      }
      break;
    case kReap0:
      reap(0, m);
      l.pc = kReap1;
      break;
    case kReap1:
      reap(1, m);
      l.pc = kGrant;
      break;
    case kGrant:
      grant(config, m);
      l.pc = config.reads_while_written ? kReadWhileWritten : kSealed;
      break;
    case kReadWhileWritten:
      read_while_written(l, m);
      l.pc = kSealed;
      break;
    case kSealed: {
      const int half = protocol.next_sealed();
      if (half == Protocol<Memory>::kAgain) break;
      if (half < 0) {
        l.pc = kReap0;
        break;
      }
      l.half = static_cast<std::uint8_t>(half);
      l.sequence = HalfWord::unpack(m.load(m.half_state(l.half))).sequence;
      l.pc = kActivate;
      break;
    }
    case kActivate: l.pc = protocol.activate(l.half, l.sequence) ? kPublish : kReap0; break;
    case kPublish: publish(l, m); break;
    case kDiff: diff(l, m); break;
    case kLeases: leases(l, m, action); break;
    case kFree:
      protocol.free_retired(l.half, l.sequence);
      l = Locals{kReap0, 0, 0, 0, l.holding, 0, 0, 0};
      break;
    default: break;
  }
}

void run_reader(const Config& config, Locals& l, Memory& m) {
  switch (l.pc) {
    case kLease: {
      const auto value = m.privately([&] {
        auto& s = m.state();
        if (!s.served.taken) return std::uint64_t{0};
        s.lease = s.served;
        return std::uint64_t{s.served.sequence} << 40 | std::uint64_t{s.served.half} << 32 | s.served.value;
      });
      if (value == 0) break;
      l.sequence = value >> 40;
      l.half = static_cast<std::uint8_t>(value >> 32 & 1);
      l.value = static_cast<std::uint16_t>(value);
      l.pc = config.maps_locally && m.broken(Guard::read_before_recheck) ? kLook : kRead;
      break;
    }
    case kRead: {
      // Pages may be read until the acknowledgement, also after a revocation that has not arrived yet: then only what
      // matches the digests fixed at seal is kept, so a wrong value is no harm.
      const auto& lease = m.state().lease;
      const bool entitled = lease.taken && !lease.revoked && !config.maps_locally;
      if (m.read_data(l.half, l.cell, entitled ? l.value : 0) != l.value) l.failed = 1;
      if (++l.cell == kDataCells) l.pc = config.maps_locally ? kLook : kRelease;
      if (l.pc == kLook && m.broken(Guard::read_before_recheck)) {
        if (l.holding && l.failed != 0) m.report(Violation::torn);
        l.pc = kRelease;
      }
      break;
    }
    case kLook: {
      // What it read counts, though it held nothing, if the half still has the content that the lease was for.
      Protocol<Memory> protocol(m);
      const bool counts = protocol.holds(l.half, l.sequence);
      if (m.broken(Guard::read_before_recheck)) {  // the processor looks first, and reads then
        l.holding = counts ? 1 : 0;
        l.pc = kRead;
        break;
      }
      if (!m.unfinished() && counts && l.failed != 0) m.report(Violation::torn);
      l.pc = kRelease;
      break;
    }
    case kRelease:
      m.privately([&] {
        m.state().lease = {};
        return std::uint64_t{0};
      });
      l = Locals{kLease, static_cast<std::uint8_t>(l.version + 1), 0, 0, 0, 0, 0, 0};
      if (!m.unfinished() && l.version == config.reader_rounds) m.self().status = Status::finished;
      break;
    default: break;
  }
}

}  // namespace deltasync::shm::model
