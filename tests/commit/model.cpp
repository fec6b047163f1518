#include "tests/commit/model.hpp"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/hash.hpp"
#include "tests/support/model.hpp"

namespace deltasync::commit::model {
namespace {

constexpr std::uint64_t kLog = 77;

/// A rank's process and its target, which keeps versions without a mistake.
struct Rank {
  std::optional<ParticipantMachine> machine;
  std::uint64_t incarnation = 0;
  VersionId holds;
  std::optional<VersionId> staged;
  std::optional<VersionId> undo;
};

struct World {
  Budget left;
  std::optional<CoordinatorMachine> coordinator;
  std::vector<Record> log;       ///< durable
  std::vector<Record> unsynced;  ///< acts_before_logging
  std::array<Rank, kRanks> rank;
  std::array<std::vector<Report>, kRanks> reports;
  std::array<std::vector<Order>, kRanks> orders;
  std::uint64_t newest = 1;
  bool broken = false;
};

// ---- fingerprint -------------------------------------------------------------------------------------------------

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
        .add(r.holds);
  }
  Print& add(const Order& o) {
    return add(o.term)
        .add(o.step)
        .add(o.incarnation)
        .add(o.kind)
        .add(o.transaction)
        .add(o.round)
        .add(o.exact)
        .add(o.version.id);
  }
  Print& add(const Record& r) { return add(r.kind).add(r.term).add(r.transaction).add(r.version.id); }
  Print& add(const CoordinatorState& s) {
    add(s.term).add(s.step).add(s.transactions).add(s.started).add(s.stage).add(s.transaction).add(s.round);
    add(s.exact).add(s.version.id).add(s.last).add(s.outcome).add(s.group).add(s.pending);
    for (const auto c : s.committed) add(c);
    for (const auto& r : s.ranks) add(r);
    return *this;
  }
  Print& add(const Version& v) { return add(v.id); }
  Print& add(const ParticipantState& s) {
    add(s.incarnation).add(s.step).add(s.log).add(s.order_term).add(s.order_step).add(s.serving).add(s.in_doubt);
    add(s.holds).add(s.before).add(s.go_back_next).add(s.cancel).add(s.phase).add(s.transaction).add(s.round);
    return add(s.staged.id).add(s.work.kind).add(s.work.serial).add(s.work.exact);
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

Digest128 fingerprint(const World& w) {
  Print p;
  p.add(w.left.transactions).add(w.left.publications).add(w.left.coordinator_deaths).add(w.left.rank_deaths);
  p.add(w.left.resolutions).add(w.left.failures).add(w.left.timeouts).add(w.newest);
  p.add(w.coordinator.has_value());
  if (w.coordinator) p.add(w.coordinator->state());
  p.add(w.log).add(w.unsynced);
  for (std::size_t r = 0; r < w.left.ranks; ++r) {
    const Rank& rank = w.rank[r];
    p.add(rank.machine.has_value());
    if (rank.machine) p.add(rank.machine->state());
    p.add(rank.incarnation).add(rank.holds).add(rank.staged).add(rank.undo).add(w.reports[r]).add(w.orders[r]);
  }
  return p.digest();
}

struct HashDigest {
  std::size_t operator()(const Digest128& d) const {
    return load<std::size_t>(reinterpret_cast<const std::byte*>(d.bytes.data()));
  }
};

// ---- what can happen ---------------------------------------------------------------------------------------------

template <class M>
void push(std::vector<M>& history, M message, std::size_t max) {
  history.push_back(std::move(message));
  if (history.size() > max) history.erase(history.begin());
}

void say(World& w, std::size_t r) {
  const Report report = w.rank[r].machine->report();
  auto& history = w.reports[r];
  if (std::find(history.begin(), history.end(), report) == history.end()) push(history, report, w.left.messages);
}

bool same_order(const Order& a, const Order& b) {
  return a.term == b.term && a.step == b.step && a.incarnation == b.incarnation && a.kind == b.kind &&
         a.transaction == b.transaction && a.round == b.round;
}

void answer(World& w, std::size_t r) {
  const Order order = w.coordinator->order(static_cast<std::uint32_t>(r));
  auto& history = w.orders[r];
  const bool known = std::any_of(history.begin(), history.end(), [&](const Order& o) { return same_order(o, order); });
  if (order.kind != OrderKind::none && !known) push(history, order, w.left.messages);
}

void start_rank(World& w, std::size_t r, const Rules& rules) {
  Rank& rank = w.rank[r];
  if (!rules.same_incarnation || rank.incarnation == 0) ++rank.incarnation;
  if (!w.left.directories) rank.holds = {};
  rank.machine.emplace(static_cast<std::uint32_t>(r), rank.incarnation, rank.holds);
  say(w, r);
}

void start_coordinator(World& w, const Rules& rules) {
  std::vector<Record> log = w.log;
  if (rules.loses_records && !log.empty() && log.back().kind != RecordKind::start) log.pop_back();
  auto made = CoordinatorMachine::recover(w.left.ranks, log, kLog);
  if (!made) {
    w.broken = true;
    return;
  }
  w.coordinator.emplace(*std::move(made));
}

void make_durable(World& w) {
  w.log.push_back(*w.coordinator->pending());
  w.coordinator->logged();
}

void do_work(World& w, std::size_t r, bool fails) {
  Rank& rank = w.rank[r];
  const Work work = rank.machine->work();
  WorkResult result;
  if (fails) result.error = Error(Errc::io, "made up");
  switch (work.kind) {
    case Work::Kind::none: return;
    case Work::Kind::pull:
      rank.staged.reset();
      rank.undo.reset();
      if (fails) break;
      rank.staged = work.exact.valid() ? work.exact : VersionId{1, w.newest};
      result.staged.id = *rank.staged;
      break;
    case Work::Kind::pause: break;
    case Work::Kind::commit:
      if (fails) {
        rank.staged.reset();
        break;
      }
      if (!rank.staged) w.broken = true;
      rank.undo = std::exchange(rank.holds, rank.staged.value_or(VersionId()));
      rank.staged.reset();
      break;
    case Work::Kind::go_back:
      if (!fails && rank.undo) rank.holds = *rank.undo;
      rank.undo.reset();
      rank.staged.reset();
      break;
    case Work::Kind::catch_up:
      if (!fails) rank.holds = work.exact;
      break;
    case Work::Kind::forget:
      rank.staged.reset();
      rank.undo.reset();
      break;
  }
  result.holds = rank.holds;
  rank.machine->done(work.serial, result);
  say(w, r);
}

using Next = std::pair<std::string, World>;

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
      World& w = add("sync");
      w.log.insert(w.log.end(), w.unsynced.begin(), w.unsynced.end());
      w.unsynced.clear();
    }
    if (c.idle() && from_.left.transactions > 0) {
      World& w = add("begin");
      --w.left.transactions;
      (void)w.coordinator->begin(Want());
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
    torn.log.push_back(*c.pending());
    torn.coordinator.reset();
    torn.unsynced.clear();
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
      say(w, r);
    }
    if (machine->work().kind != Work::Kind::none) {
      do_work(add(who + " works"), r, false);
      if (from_.left.failures > 0) {
        World& w = add(who + " fails");
        --w.left.failures;
        do_work(w, r, true);
      }
    } else if (from_.left.resolutions > 0) {
      World& w = add(who + " is resolved by pull");
      --w.left.resolutions;
      (void)w.rank[r].machine->resolve_by_pull(++w.rank[r].incarnation);
      say(w, r);
    }
    if (from_.left.in_doubt && machine->promised() && !machine->state().in_doubt) {
      World& w = add(who + " is in doubt");
      w.rank[r].machine->time_is_up();
      say(w, r);
    }
    if (from_.left.rank_deaths > 0) {
      World& w = add(who + " dies");
      --w.left.rank_deaths;
      w.rank[r].machine.reset();
      w.rank[r].staged.reset();
      w.rank[r].undo.reset();
    }
  }

  const World& from_;
  const Rules& rules_;
  std::vector<Next> next_;
};

// ---- checks ------------------------------------------------------------------------------------------------------

std::optional<VersionId> serving(const Rank& rank, const Rules& rules) {
  if (!rank.machine) return std::nullopt;
  if (rules.serves_in_doubt && rank.machine->rank_state() == RankState::in_doubt && rank.holds.valid()) {
    return rank.holds;
  }
  return rank.machine->serving();
}

bool decided(const World& w, const VersionId& version) {
  return std::any_of(w.log.begin(), w.log.end(),
                     [&](const Record& r) { return r.kind == RecordKind::finish && r.version.id == version; });
}

Violation check(const World& w, const Rules& rules) {
  if (w.broken) return Violation::broken;
  std::optional<VersionId> seen;
  for (std::size_t r = 0; r < w.left.ranks; ++r) {
    const auto v = serving(w.rank[r], rules);
    if (!v) continue;
    if (seen && *seen != *v) return Violation::split;
    seen = v;
  }
  for (std::size_t r = 0; r < w.left.ranks; ++r) {
    const auto v = serving(w.rank[r], rules);
    if (!v) continue;
    if (!rules.serves_in_doubt && (w.rank[r].machine->promised() || *v != w.rank[r].holds)) return Violation::broken;
    if (!decided(w, *v)) return Violation::undecided;
  }
  return Violation::none;
}

void settle_coordinator(World& w, const Rules& rules) {
  if (!w.coordinator) start_coordinator(w, rules);
  w.log.insert(w.log.end(), w.unsynced.begin(), w.unsynced.end());
  w.unsynced.clear();
  while (w.coordinator && w.coordinator->pending()) make_durable(w);
}

bool all_serve_one(const World& w) {
  std::optional<VersionId> seen;
  for (std::size_t r = 0; r < w.left.ranks; ++r) {
    const auto v = w.rank[r].machine->serving();
    if (!v || (seen && *seen != *v)) return false;
    seen = v;
  }
  return true;
}

/// Nobody dies any more, everything arrives: do all come to serve one version?
Violation check_stuck(World w, const Rules& rules) {
  constexpr int kPatience = 60;
  for (int i = 0; i < kPatience; ++i) {
    settle_coordinator(w, rules);
    if (!w.coordinator) return Violation::broken;
    for (std::size_t r = 0; r < w.left.ranks; ++r) {
      if (!w.rank[r].machine) start_rank(w, r, rules);
      (void)w.coordinator->on_report(w.rank[r].machine->report());
      settle_coordinator(w, rules);
      (void)w.rank[r].machine->on_order(w.coordinator->order(static_cast<std::uint32_t>(r)));
      do_work(w, r, false);
      if (const auto v = check(w, rules); v != Violation::none) return v;
    }
    if (all_serve_one(w) && w.coordinator->idle()) return Violation::none;
    // A rank whose promise nobody can end is the operator's to resolve; a version is somebody's to wish for.
    if (i > 20 && w.coordinator->idle()) (void)w.coordinator->begin(Want());
  }
  return Violation::stuck;
}

/// Where all ranks have started and, if asked for, serve version 1.
World initial(const Budget& budget, const Rules& rules) {
  World w;
  w.left = budget;
  if (!budget.all_serve_first) return w;
  settle_coordinator(w, rules);
  for (std::size_t r = 0; r < budget.ranks; ++r) start_rank(w, r, rules);
  (void)w.coordinator->begin(Want());
  while (!all_serve_one(w) || w.rank[0].machine->report().busy || w.rank[budget.ranks - 1].machine->report().busy) {
    for (std::size_t r = 0; r < budget.ranks; ++r) {
      (void)w.coordinator->on_report(w.rank[r].machine->report());
      settle_coordinator(w, rules);
      (void)w.rank[r].machine->on_order(w.coordinator->order(static_cast<std::uint32_t>(r)));
      do_work(w, r, false);
    }
  }
  for (std::size_t r = 0; r < budget.ranks; ++r) {
    w.reports[r].clear();
    say(w, r);
  }
  w.newest = 2;
  return w;
}

struct Frame {
  std::string label;
  World world;
  std::vector<Next> next;
};

class Search {
 public:
  Search(const Budget& budget, const Rules& rules, std::uint64_t states_max) : rules_(rules), states_max_(states_max) {
    enter("start", initial(budget, rules));
  }

  Outcome run() {
    while (!path_.empty() && out_.violation == Violation::none && !out_.truncated) {
      Frame& top = path_.back();
      if (top.next.empty()) {
        path_.pop_back();
        continue;
      }
      Next next = std::move(top.next.back());
      top.next.pop_back();
      enter(std::move(next.first), std::move(next.second));
    }
    out_.states = seen_.size();
    return std::move(out_);
  }

 private:
  void enter(std::string label, World world) {
    if (!seen_.insert(fingerprint(world)).second) return;
    Violation found = check(world, rules_);
    if (found == Violation::none && rules_.check_stuck) found = check_stuck(world, rules_);
    out_.finished += !world.log.empty() && world.log.back().kind == RecordKind::finish;
    for (std::size_t r = 0; r < world.left.ranks; ++r) {
      const auto& m = world.rank[r].machine;
      if (m && m->rank_state() == RankState::in_doubt) {
        ++out_.in_doubt;
        break;
      }
    }
    out_.truncated = seen_.size() >= states_max_;
    std::vector<Next> next;
    if (found == Violation::none) next = Choices(world, rules_).take();
    path_.push_back({std::move(label), std::move(world), std::move(next)});
    if (found == Violation::none) return;
    out_.violation = found;
    for (const Frame& frame : path_) out_.trace.push_back(frame.label);
  }

  const Rules rules_;
  const std::uint64_t states_max_;
  std::unordered_set<Digest128, HashDigest> seen_;
  std::vector<Frame> path_;
  Outcome out_;
};

}  // namespace

const char* name(Violation violation) {
  switch (violation) {
    case Violation::none: return "none";
    case Violation::split: return "split";
    case Violation::undecided: return "undecided";
    case Violation::broken: return "broken";
    case Violation::stuck: return "stuck";
  }
  return "?";
}

Outcome walk(const Budget& budget, std::uint64_t seed, unsigned steps) {
  constexpr unsigned kLooks = 25;  // steps between two looks at whether all can still come to one version
  test::Random random(seed);
  const Rules rules;
  World world = initial(budget, rules);
  Outcome out;
  for (unsigned i = 0; i < steps && out.violation == Violation::none; ++i) {
    std::vector<Next> next = Choices(world, rules).take();
    if (next.empty()) break;
    Next& taken = next[static_cast<std::size_t>(random.below(next.size()))];
    out.trace.push_back(std::move(taken.first));
    world = std::move(taken.second);
    ++out.states;
    out.violation = check(world, rules);
    if (out.violation == Violation::none && i % kLooks == 0) out.violation = check_stuck(world, rules);
    out.finished += !world.log.empty() && world.log.back().kind == RecordKind::finish;
  }
  return out;
}

Outcome explore(const Budget& budget, const Rules& rules, std::uint64_t states_max) {
  return Search(budget, rules, states_max).run();
}

}  // namespace deltasync::commit::model
