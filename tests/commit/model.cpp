#include "tests/commit/model.hpp"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/bytes.hpp"
#include "tests/commit/model_world.hpp"
#include "tests/support/model.hpp"

namespace deltasync::commit::model {
namespace {

struct HashDigest {
  std::size_t operator()(const Digest128& d) const {
    return load<std::size_t>(reinterpret_cast<const std::byte*>(d.bytes.data()));
  }
};

// ---- checks ------------------------------------------------------------------------------------------------------

std::optional<VersionId> serving(const Rank& rank, const Rules& rules) {
  if (!rank.machine) return std::nullopt;
  if (rules.serves_in_doubt && rank.machine->rank_state() == RankState::in_doubt && rank.target.holds.valid()) {
    return rank.target.holds;
  }
  return rank.machine->serving();
}

/// What the rank says and what its engine does.
Violation check(const World& w, const Rank& rank, const Rules& rules) {
  const auto says = serving(rank, rules);
  if (rank.engine && *rank.engine != rank.target.holds) return Violation::written;
  if (says && !rules.serves_in_doubt && (rank.machine->promised() || *says != rank.target.holds)) {
    return Violation::broken;
  }
  if (rank.engine && rank.machine->promised()) return Violation::broken;
  for (const auto& v : {says, rank.engine}) {
    if (v && std::find(w.finished.begin(), w.finished.end(), *v) == w.finished.end()) return Violation::undecided;
  }
  return Violation::none;
}

Violation check(const World& w, const Rules& rules) {
  if (w.broken) return Violation::broken;
  std::optional<VersionId> seen;
  for (std::size_t r = 0; r < w.left.ranks; ++r) {
    for (const auto& v : {serving(w.rank[r], rules), w.rank[r].engine}) {
      if (v && seen && *seen != *v) return Violation::split;
      if (v) seen = v;
    }
  }
  for (std::size_t r = 0; r < w.left.ranks; ++r) {
    if (const auto v = check(w, w.rank[r], rules); v != Violation::none) return v;
  }
  return Violation::none;
}

void settle_coordinator(World& w, const Rules& rules) {
  if (!w.coordinator) start_coordinator(w, rules);
  sync(w);
  while (w.coordinator && w.coordinator->pending()) make_durable(w);
}

/// And so do their engines.
bool all_serve_one(const World& w) {
  std::optional<VersionId> seen;
  for (std::size_t r = 0; r < w.left.ranks; ++r) {
    const auto v = w.rank[r].machine->serving();
    if (!v || (seen && *seen != *v) || w.rank[r].engine != v) return false;
    seen = v;
  }
  return true;
}

/// One report for one order, and its work. Where the log was lost, the operator says what he has to say.
void round_trip(World& w, std::size_t r, const Rules& rules) {
  Rank& rank = w.rank[r];
  (void)w.coordinator->on_report(rank.machine->report());
  settle_coordinator(w, rules);
  const Status obeyed = rank.machine->on_order(w.coordinator->order(static_cast<std::uint32_t>(r)));
  if (!obeyed && rank.machine->work().kind == Work::Kind::none) {
    (void)rank.machine->resolve_by_pull(++rank.incarnation);
  }
  settle_engine(w, r);
  do_work(w, r, How::well);
}

/// All serve one version, and no transaction is open, or one that waits for the trainer in each rank.
bool is_at_rest(const World& w) {
  if (!all_serve_one(w)) return false;
  if (w.coordinator->idle()) return true;
  for (std::size_t r = 0; r < w.left.ranks; ++r) {
    if (!waits_for_trainer(w, r)) return false;
  }
  return true;
}

/// Nobody dies any more, everything arrives.
Violation calm_down(World& w, const Rules& rules) {
  constexpr int kPatience = 40;
  for (int i = 0; i < kPatience; ++i) {
    settle_coordinator(w, rules);
    if (!w.coordinator) return Violation::broken;
    for (std::size_t r = 0; r < w.left.ranks; ++r) {
      if (!w.rank[r].machine) start_rank(w, r, rules);
      round_trip(w, r, rules);
      if (const auto v = check(w, rules); v != Violation::none) return v;
    }
    if (is_at_rest(w)) break;
  }
  return Violation::none;
}

/// The coordinator has ended what was open, and no rank is held by a promise.
bool all_is_decided(const World& w) {
  if (!w.coordinator->idle()) return false;
  for (std::size_t r = 0; r < w.left.ranks; ++r) {
    if (w.rank[r].machine->state().phase != Phase::none) return false;
  }
  return true;
}

/// Do all come to what the group serves; and if that is not to be had any more, or nothing was ever served, do they at
/// the next update?
Violation check_stuck(World w, const Rules& rules) {
  w.left.engine_lags = false;
  if (const auto v = calm_down(w, rules); v != Violation::none) return v;
  if (is_at_rest(w) && w.coordinator->idle()) return Violation::none;
  if (is_at_rest(w)) {
    ++w.newest;
  } else {
    if (!all_is_decided(w)) return Violation::stuck;
    const auto& group = w.coordinator->state().group;
    const bool to_be_had = group && (!w.left.past_is_gone || group->id.number == w.newest);
    if (to_be_had || !w.coordinator->begin(wanted(w))) return Violation::stuck;
  }
  if (const auto v = calm_down(w, rules); v != Violation::none) return v;
  return all_serve_one(w) && w.coordinator->idle() ? Violation::none : Violation::stuck;
}

/// Where all ranks have started and, if asked for, serve version 1.
World initial(const Budget& budget, const Rules& rules) {
  World w;
  w.left = budget;
  if (!budget.all_serve_first) return w;
  settle_coordinator(w, rules);
  for (std::size_t r = 0; r < budget.ranks; ++r) start_rank(w, r, rules);
  (void)w.coordinator->begin(Want());
  w.left.engine_lags = false;
  (void)calm_down(w, rules);
  for (std::size_t r = 0; r < budget.ranks; ++r) do_work(w, r, How::well);  // the last one forgets its undo log
  w.left.engine_lags = budget.engine_lags;
  for (std::size_t r = 0; r < budget.ranks; ++r) {
    w.reports[r].clear();
    say(w, r);
  }
  if (!budget.waits) w.newest = 2;
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
    if (found == Violation::none) next = choices(world, rules_);
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
    case Violation::written: return "written";
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
    std::vector<Next> next = choices(world, rules);
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
