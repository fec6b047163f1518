#include "tests/commit/model_world.hpp"

#include <algorithm>
#include <utility>

#include "base/bytes.hpp"
#include "base/hash.hpp"

namespace deltasync::commit::model {
namespace {

// ---- fingerprint -------------------------------------------------------------------------------------------------

/// Of a report or a rank; the words do not matter.
template <class T>
std::optional<Errc> problem_of(const T& of) {
  if (of.problem.empty()) return std::nullopt;
  return of.code;
}

class Print {
 public:
  template <std::integral T>
  Print& add(T v) {
    out_.put(static_cast<std::uint64_t>(v));
    return *this;
  }
  template <class E>
  requires std::is_enum_v<E> Print& add(E e) { return add(static_cast<std::uint64_t>(e)); }
  Print& add(const VersionId& v) { return add(v.epoch).add(v.number); }
  Print& add(const TransactionId& t) { return add(t.term).add(t.number); }
  Print& add(const Report& r) {
    return add(r.incarnation)
        .add(r.step)
        .add(r.state)
        .add(r.busy)
        .add(r.phase)
        .add(r.transaction)
        .add(r.round)
        .add(r.staged.id)
        .add(r.holds)
        .add(r.log)
        .add(problem_of(r));
  }
  Print& add(const Order& o) {
    return add(o.log)
        .add(o.term)
        .add(o.step)
        .add(o.incarnation)
        .add(o.kind)
        .add(o.transaction)
        .add(o.round)
        .add(o.exact)
        .add(o.want.newer)
        .add(o.version.id);
  }
  Print& add(const Record& r) { return add(r.kind).add(r.term).add(r.transaction).add(r.version.id); }
  Print& add(const CoordinatorState& s) {
    add(s.log).add(s.term).add(s.step).add(s.transactions).add(s.started).add(s.stage).add(s.transaction).add(s.round);
    add(s.exact).add(s.moved_on).add(s.version.id).add(s.last).add(s.outcome).add(s.group).add(s.pending);
    for (const auto c : s.committed) add(c);
    for (const auto& r : s.ranks) add(r);
    return *this;
  }
  Print& add(const Version& v) { return add(v.id); }
  Print& add(const ParticipantState& s) {
    add(s.incarnation).add(s.step).add(s.log).add(s.order_term).add(s.order_step).add(s.serving).add(s.in_doubt);
    add(s.holds)
        .add(s.before)
        .add(s.roll_back_next)
        .add(s.cancel)
        .add(s.forget_next)
        .add(s.phase)
        .add(s.transaction)
        .add(s.round);
    return add(s.staged.id)
        .add(s.work.kind)
        .add(s.work.serial)
        .add(s.work.exact)
        .add(s.work.want.newer)
        .add(problem_of(s));
  }
  template <class T>
  Print& add(const std::optional<T>& v) {
    add(v.has_value());
    if (v) add(*v);
    return *this;
  }
  template <class T>
  Print& add(const std::vector<T>& v) {
    add(v.size());
    for (const T& e : v) add(e);
    return *this;
  }
  Digest128 digest() const { return xxh3_128(bytes_); }

 private:
  std::vector<std::byte> bytes_;
  ByteWriter out_{bytes_};
};

}  // namespace

Digest128 fingerprint(const World& w) {
  Print p;
  p.add(w.left.transactions).add(w.left.publications).add(w.left.coordinator_deaths).add(w.left.rank_deaths);
  p.add(w.left.resolutions)
      .add(w.left.failures)
      .add(w.left.timeouts)
      .add(w.left.losses)
      .add(w.left.log_losses)
      .add(w.left.gones);
  p.add(w.newest).add(w.log_name).add(w.finished);
  p.add(w.coordinator.has_value());
  if (w.coordinator) p.add(w.coordinator->state());
  p.add(w.log).add(w.unsynced);
  for (std::size_t r = 0; r < w.left.ranks; ++r) {
    const Rank& rank = w.rank[r];
    p.add(rank.machine.has_value());
    if (rank.machine) p.add(rank.machine->state());
    p.add(rank.incarnation).add(rank.target.holds).add(rank.target.staged).add(rank.target.undo).add(rank.engine);
    p.add(w.reports[r]).add(w.orders[r]);
  }
  return p.digest();
}

// ---- what can happen ---------------------------------------------------------------------------------------------

namespace {

template <class M>
void push(std::vector<M>& history, M message, std::size_t max) {
  history.push_back(std::move(message));
  if (history.size() > max) history.erase(history.begin());
}

}  // namespace

void say(World& w, std::size_t r) {
  const Report report = w.rank[r].machine->report();
  auto& history = w.reports[r];
  if (std::find(history.begin(), history.end(), report) == history.end()) push(history, report, w.left.messages);
}

namespace {

bool same_order(const Order& a, const Order& b) {
  return a.log == b.log && a.term == b.term && a.step == b.step && a.incarnation == b.incarnation && a.kind == b.kind &&
         a.transaction == b.transaction && a.round == b.round;
}

void answer(World& w, std::size_t r) {
  const Order order = w.coordinator->order(static_cast<std::uint32_t>(r));
  auto& history = w.orders[r];
  const bool known = std::any_of(history.begin(), history.end(), [&](const Order& o) { return same_order(o, order); });
  if (order.kind != OrderKind::none && !known) push(history, order, w.left.messages);
}

void append(World& w, const Record& record) {
  w.log.push_back(record);
  const bool known = std::find(w.finished.begin(), w.finished.end(), record.version.id) != w.finished.end();
  if (record.kind == RecordKind::finish && !known) w.finished.push_back(record.version.id);
}

/// As ParticipantImpl::settle_engine does it: where the pause is the work at hand, that does it.
bool follows(const Rank& rank) {
  return rank.machine && rank.machine->work().kind != Work::Kind::pause &&
         rank.machine->state().serving != rank.engine.has_value();
}

void follow(Rank& rank) {
  rank.engine = rank.machine->serving();
}

/// Nothing is written under an engine that may step although its rank does not serve.
bool may_work(const Rank& rank) {
  const Work::Kind kind = rank.machine->work().kind;
  const bool writes = kind == Work::Kind::pull || kind == Work::Kind::commit || kind == Work::Kind::catch_up;
  return !(writes && rank.engine && !rank.machine->state().serving);
}

/// Of a past version the agent has nothing.
bool wants_past(const World& w, const Rank& rank) {
  const VersionId wanted = rank.machine->work().exact;
  return w.left.past_is_gone && wanted.valid() && wanted.number < w.newest && wanted != rank.target.holds;
}

}  // namespace

void settle_engine(World& w, std::size_t r) {
  if (!w.left.engine_lags && follows(w.rank[r])) follow(w.rank[r]);
}

Want wanted(const World& w) {
  Want want;
  if (w.left.waits) want.newer = true;
  return want;
}

bool waits_for_trainer(const World& w, std::size_t r) {
  const Rank& rank = w.rank[r];
  const Work& work = rank.machine->work();
  return work.kind == Work::Kind::pull && !work.exact.valid() && work.want.newer &&
         rank.target.holds.number >= w.newest;
}

void start_rank(World& w, std::size_t r, const Rules& rules) {
  Rank& rank = w.rank[r];
  if (!rules.same_incarnation || rank.incarnation == 0) ++rank.incarnation;
  rank.machine.emplace(static_cast<std::uint32_t>(r), rank.incarnation, rank.target.holds);
  say(w, r);
}

void start_coordinator(World& w, const Rules& rules) {
  std::vector<Record> log = w.log;
  if (rules.loses_records && !log.empty() && log.back().kind != RecordKind::start) log.pop_back();
  auto made = CoordinatorMachine::recover(w.left.ranks, log, w.log_name);
  if (!made) {
    w.broken = true;
    return;
  }
  w.coordinator.emplace(*std::move(made));
}

void make_durable(World& w) {
  append(w, *w.coordinator->pending());
  w.coordinator->logged();
}

void sync(World& w) {
  for (const Record& record : std::exchange(w.unsynced, {})) append(w, record);
}

void do_work(World& w, std::size_t r, How how) {
  Rank& rank = w.rank[r];
  const Work work = rank.machine->work();
  if (work.kind == Work::Kind::none || !may_work(rank)) return;
  if (waits_for_trainer(w, r)) {
    if (!rank.machine->cancelled()) return;
    how = How::cancelled;
  }
  std::optional<Error> error;
  if (how != How::well) error = Error(Errc::io, "made up");
  if (wants_past(w, rank)) error = Error(Errc::gone, "past");
  if (how == How::cancelled) error = Error(Errc::cancelled, "stopped");
  if (work.kind == Work::Kind::pause && !error) rank.engine.reset();
  WorkResult result = rank.target.work(work, version(w.newest), std::move(error));
  if (how == How::loses_version) rank.target.die(false);
  result.holds = rank.target.holds;
  w.broken = w.broken || rank.target.broken;
  rank.machine->done(work.serial, result);
  settle_engine(w, r);
  say(w, r);
}

namespace {

class Choices {
 public:
  Choices(const World& world, const Rules& rules) : from_(world), rules_(rules) {
    coordinator();
    for (std::size_t r = 0; r < world.left.ranks; ++r) rank(r);
    if (world.left.publications > 0) {
      World& w = add("publish");
      --w.left.publications;
      ++w.newest;
    }
  }
  std::vector<Next> take() { return std::move(next_); }

 private:
  World& add(std::string label) { return next_.emplace_back(std::move(label), from_).second; }

  void coordinator() {
    if (!from_.coordinator) {
      start_coordinator(add("coordinator starts"), rules_);
      if (from_.left.log_losses > 0) lose_log(add("the log is lost"));
      return;
    }
    const CoordinatorMachine& c = *from_.coordinator;
    if (c.pending()) {
      const std::string label = "log " + std::string(to_string(c.pending()->kind));
      if (rules_.acts_before_logging) {
        World& w = add(label + " (not durable)");
        w.unsynced.push_back(*c.pending());
        w.coordinator->logged();
      } else {
        make_durable(add(label));
      }
    }
    if (!from_.unsynced.empty()) {
      sync(add("sync"));
    }
    if (c.idle() && from_.left.transactions > 0) {
      World& w = add("begin");
      --w.left.transactions;
      (void)w.coordinator->begin(wanted(w));
    }
    if (from_.left.timeouts > 0 && !c.pending() && c.state().stage != CoordinatorState::Stage::idle) {
      World& w = add("coordinator's time is up");
      --w.left.timeouts;
      w.coordinator->time_is_up();
    }
    if (from_.left.coordinator_deaths == 0) return;
    World& w = add("coordinator dies");
    --w.left.coordinator_deaths;
    w.coordinator.reset();
    w.unsynced.clear();
    if (!c.pending()) return;
    World& torn = add("coordinator dies, its record is durable");
    --torn.left.coordinator_deaths;
    append(torn, *c.pending());
    torn.coordinator.reset();
    torn.unsynced.clear();
  }

  /// Somebody makes another one in its place, with another name.
  static void lose_log(World& w) {
    --w.left.log_losses;
    w.log.clear();
    ++w.log_name;
  }

  void rank(std::size_t r) {
    const std::string who = "rank " + std::to_string(r);
    if (from_.coordinator) {
      for (std::size_t i = 0; i < from_.reports[r].size(); ++i) {
        World& w = add(who + "'s report arrives: " + std::string(to_string(from_.reports[r][i].phase)));
        (void)w.coordinator->on_report(from_.reports[r][i]);
        answer(w, r);
      }
    }
    const auto& machine = from_.rank[r].machine;
    if (!machine) {
      start_rank(add(who + " starts"), r, rules_);
      return;
    }
    for (std::size_t i = 0; i < from_.orders[r].size(); ++i) {
      World& w = add(who + " is ordered: " + std::string(to_string(from_.orders[r][i].kind)));
      (void)w.rank[r].machine->on_order(from_.orders[r][i]);
      settle_engine(w, r);
      say(w, r);
    }
    const Work::Kind kind = machine->work().kind;
    if (kind != Work::Kind::none && may_work(from_.rank[r])) work(r, who);
    const bool at_rest = kind == Work::Kind::none || kind == Work::Kind::pull || kind == Work::Kind::catch_up;
    if (at_rest && from_.left.resolutions > 0) {
      World& w = add(who + " is resolved by pull");
      --w.left.resolutions;
      (void)w.rank[r].machine->resolve_by_pull(++w.rank[r].incarnation);
      settle_engine(w, r);
      say(w, r);
    }
    if (from_.left.engine_lags && follows(from_.rank[r])) follow(add(who + "'s engine follows").rank[r]);
    if (from_.left.in_doubt && machine->promised() && !machine->state().in_doubt) {
      World& w = add(who + " is in doubt");
      w.rank[r].machine->time_is_up();
      say(w, r);
    }
    if (from_.left.rank_deaths > 0) {
      World& w = add(who + " dies");
      --w.left.rank_deaths;
      w.rank[r].machine.reset();
      w.rank[r].engine.reset();
      w.rank[r].target.die(w.left.directories);
    }
  }

  void work(std::size_t r, const std::string& who) {
    const Rank& rank = from_.rank[r];
    const Work::Kind kind = rank.machine->work().kind;
    if (rank.machine->cancelled()) do_work(add(who + " is stopped"), r, How::cancelled);
    if (waits_for_trainer(from_, r)) return;
    if (wants_past(from_, rank)) {
      if (from_.left.gones == 0) return;  // a rank may try for ever
      World& w = add(who + "'s version is gone");
      --w.left.gones;
      do_work(w, r, How::well);
      return;
    }
    do_work(add(who + " works"), r, How::well);
    if (from_.left.failures > 0) {
      World& w = add(who + " fails");
      --w.left.failures;
      do_work(w, r, How::fails);
    }
    const bool rolls_back = kind == Work::Kind::roll_back && rank.target.undo;  // else it only drops what is staged
    const bool writes = kind == Work::Kind::commit || rolls_back || kind == Work::Kind::catch_up;
    if (from_.left.losses > 0 && writes) {
      World& w = add(who + " loses its version");
      --w.left.losses;
      do_work(w, r, How::loses_version);
    }
  }

  const World& from_;
  const Rules& rules_;
  std::vector<Next> next_;
};

}  // namespace

std::vector<Next> choices(const World& world, const Rules& rules) {
  return Choices(world, rules).take();
}

}  // namespace deltasync::commit::model
