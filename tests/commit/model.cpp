#include "tests/commit/model.hpp"

#include <unordered_set>
#include <utility>

#include "base/bytes.hpp"
#include "tests/commit/model_world.hpp"

namespace deltasync::commit::model {
namespace {

struct HashDigest {
  std::size_t operator()(const Digest128& d) const {
    return load<std::size_t>(reinterpret_cast<const std::byte*>(d.bytes.data()));
  }
};

constexpr int kStepsMax = 200;  ///< of a rank, to the end of what it has begun

/// The rank goes on alone, and finds its deadline passed. Any endless way leads through a wait: it is enough to ask
/// there.
bool ends(World w, std::uint32_t r, const Rules& rules) {
  for (int i = 0; i < kStepsMax; ++i) {
    if (!step(w, r, rules, !rules.never_ends)) return true;
  }
  return false;
}

/// All ranks are there and vote yes; who has to wait waits until nobody can do anything else. True: all have a yes.
bool all_agree(World& w, const Rules& rules, unsigned attempt) {
  for (std::uint32_t r = 0; r < w.left.ranks; ++r) {
    if (!w.rank[r].machine) start(w, r, rules);
    w.rank[r].machine->vote({{}, "again", "", ""}, w.left.counted ? "" : "again " + std::to_string(attempt));
  }
  bool all_done = false;
  for (int i = 0; i < kStepsMax && !all_done; ++i) {
    all_done = true;
    for (std::uint32_t r = 0; r < w.left.ranks; ++r) {
      if (step(w, r, rules, i > kStepsMax / 2)) all_done = false;
    }
  }
  for (std::uint32_t r = 0; r < w.left.ranks; ++r) {
    if (!is_done(w.rank[r]) || w.rank[r].machine->report().verdict.outcome != Outcome::yes) return false;
  }
  return true;
}

/// Who waits comes to an end; and where nobody has anything to do, all come to a yes again soon, if all want to.
Violation check_stuck(const World& w, const Rules& rules) {
  bool at_rest = true;
  for (std::uint32_t r = 0; r < w.left.ranks; ++r) {
    const Rank& rank = w.rank[r];
    if (!rank.machine || rank.machine->action().kind == Action::Kind::none || is_done(rank)) continue;
    at_rest = false;
    if (rank.machine->action().kind == Action::Kind::wait && !ends(w, r, rules)) return Violation::stuck;
  }
  if (!at_rest) return Violation::none;
  World later = w;
  // Who lost the store in a counted round may be one ahead, until the others have given up there.
  for (unsigned attempt = 0; attempt < 2 + kRanks; ++attempt) {
    if (all_agree(later, rules, attempt)) return Violation::none;
  }
  return Violation::stuck;
}

struct Frame {
  std::string label;
  std::vector<Next> next;
};

class Search {
 public:
  Search(const Budget& budget, const Rules& rules, std::uint64_t states_max) : rules_(rules), states_max_(states_max) {
    World world;
    world.left = budget;
    enter("start", world);
  }

  Seen run() {
    while (!path_.empty() && out_.violation == Violation::none && !out_.truncated) {
      Frame& top = path_.back();
      if (top.next.empty()) {
        path_.pop_back();
        continue;
      }
      const Next next = std::move(top.next.back());
      top.next.pop_back();
      enter(next.first, next.second);
    }
    out_.states = seen_.size();
    return std::move(out_);
  }

 private:
  void enter(const std::string& label, const World& world) {
    if (!seen_.insert(fingerprint(world)).second) return;
    tell(world);
    out_.violation = check(world);
    if (out_.violation == Violation::none) out_.violation = check_stuck(world, rules_);
    out_.truncated = seen_.size() >= states_max_;
    path_.push_back({label, out_.violation == Violation::none ? choices(world, rules_) : std::vector<Next>()});
    if (out_.violation == Violation::none) return;
    for (const Frame& frame : path_) out_.trace.push_back(frame.label);
  }

  void tell(const World& world) {
    for (std::uint32_t r = 0; r < world.left.ranks; ++r) {
      if (!is_done(world.rank[r])) continue;
      switch (world.rank[r].machine->report().ending) {
        case Report::Ending::kept: ++out_.kept; break;
        case Report::Ending::as_before: ++out_.as_before; break;
        case Report::Ending::doubtful: ++out_.doubtful; break;
        case Report::Ending::unwritten: ++out_.unwritten; break;
        case Report::Ending::voted: ++out_.voted; break;
      }
    }
  }

  const Rules rules_;
  const std::uint64_t states_max_;
  std::unordered_set<Digest128, HashDigest> seen_;
  std::vector<Frame> path_;
  Seen out_;
};

}  // namespace

const char* name(Violation violation) {
  switch (violation) {
    case Violation::none: return "none";
    case Violation::split: return "split";
    case Violation::unfounded: return "unfounded";
    case Violation::disagreement: return "disagreement";
    case Violation::mixed: return "mixed";
    case Violation::stuck: return "stuck";
  }
  return "?";
}

Seen explore(const Budget& budget, const Rules& rules, std::uint64_t states_max) {
  return Search(budget, rules, states_max).run();
}

}  // namespace deltasync::commit::model
