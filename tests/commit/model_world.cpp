#include "tests/commit/model_world.hpp"

#include <algorithm>
#include <iterator>

#include "base/bytes.hpp"
#include "base/hash.hpp"

namespace deltasync::commit::model {
namespace {

using Kind = Action::Kind;

const std::string kFailure = "it was told to fail";

std::string name_of(std::uint32_t r) {
  return "rank " + std::to_string(r);
}

// ---- the registers -------------------------------------------------------------------------------------------------

std::optional<std::vector<std::string>> get(const World& w, const Action& action) {
  std::vector<std::string> values;
  for (const std::string& name : action.registers) {
    const auto found = w.registers.find(name);
    if (found == w.registers.end()) return std::nullopt;
    values.push_back(found->second);
  }
  return values;
}

std::optional<Verdict> standing(const World& w, const std::string& round) {
  const auto found = w.registers.find(round + "/verdict");
  if (found == w.registers.end()) return std::nullopt;
  return *decode_verdict(found->second);
}

/// Whether all ranks have voted yes in the round, about the same, and nothing is lacking.
bool all_said_yes(const World& w, const std::string& round) {
  std::vector<Vote> votes;
  for (std::uint32_t r = 0; r < w.left.ranks; ++r) {
    const auto found = w.registers.find(round + "/vote/" + std::to_string(r));
    if (found == w.registers.end()) return false;
    votes.push_back(*decode_vote(found->second));
  }
  const Tally tally = count(votes);
  return tally.objection.empty() && tally.lacking.empty();
}

// ---- what a rank has heard -----------------------------------------------------------------------------------------

void fail(World& w, Violation violation) {
  if (w.found == Violation::none) w.found = violation;
}

/// What stands there then.
std::string put(World& w, const Action& action, const Rules& rules) {
  const std::string& name = action.registers[0];
  std::string& there = w.registers[name];
  if (!there.empty() && !rules.overwrites) return there;
  there = action.value;
  const std::size_t end = name.rfind("/verdict");
  if (end == std::string::npos || decode_verdict(there)->outcome != Outcome::yes) return there;
  w.yes.insert(name.substr(0, end));
  if (!all_said_yes(w, name.substr(0, end))) fail(w, Violation::unfounded);
  return there;
}

bool is_vote(const Action& action) {
  return action.kind == Kind::write && action.registers[0].find("/vote/") != std::string::npos;
}

/// Whether what the rank says can rest on the votes of its own process alone.
bool knows_no_earlier_life(const Rank& rank) {
  return rank.lives > 1 && rank.lost_store;
}

void note(World& w, std::uint32_t r) {
  Rank& rank = w.rank[r];
  const Explored& m = *rank.machine;
  const std::string& round = m.round();
  const Action& action = m.action();
  if (is_vote(action) && !decode_vote(action.value)->reason) w.promised[r].insert(round);
  if (round.empty() || rank.interrupted) return;
  if (action.kind == Kind::commit) {
    rank.yes.insert(round);
    const auto own = w.registers.find(round + "/vote/" + std::to_string(r));
    const bool has_it =
        own != w.registers.end() && !rank.ready.empty() && decode_vote(own->second)->subject == rank.ready;
    if (!has_it || w.yes.count(round) == 0) fail(w, Violation::unfounded);
  }
  if (action.kind == Kind::roll_back && !knows_no_earlier_life(rank)) rank.no.insert(round);
  const bool is_unknown = action.kind == Kind::void_weights ||
                          (action.kind == Kind::done && m.report().verdict.outcome == Outcome::unknown);
  if (is_unknown && w.promised[r].count(round) == 0) fail(w, Violation::unfounded);
  if (action.kind != Kind::done || is_unknown) return;
  const Verdict& verdict = m.report().verdict;
  if (verdict.outcome == Outcome::yes) {
    rank.yes.insert(round);
    if (!all_said_yes(w, round)) fail(w, Violation::unfounded);
  }
  if (verdict.outcome == Outcome::no && !knows_no_earlier_life(rank)) rank.no.insert(round);
  if (!rank.lost_store && standing(w, round) != verdict) fail(w, Violation::disagreement);
}

// ---- steps ---------------------------------------------------------------------------------------------------------

void begin(World& w, std::uint32_t r, bool votes_no, bool votes_other) {
  Rank& rank = w.rank[r];
  ++rank.times;
  if (rank.memory == Memory::written) rank.memory = Memory::before;
  Vote vote{{}, votes_other ? "other" : "new", rank.memory == Memory::lost ? name_of(r) + " is void" : "", ""};
  if (w.left.lacks) vote.lacks = std::string(1, "37"[r % 2]);
  if (votes_no) vote.reason = "no";
  rank.ready = votes_no ? "" : vote.subject;
  const std::string at = w.left.counted ? "" : std::to_string(rank.times);
  if (w.left.updates) {
    rank.machine->update(std::move(vote), at);
  } else {
    rank.machine->vote(std::move(vote), at);
  }
  note(w, r);
}

void write_weights(World& w, std::uint32_t r, bool fails) {
  Rank& rank = w.rank[r];
  if (!fails) rank.memory = Memory::written;
  rank.machine->committed(fails ? std::optional(kFailure) : std::nullopt);
}

void roll_back(World& w, std::uint32_t r, bool fails) {
  Rank& rank = w.rank[r];
  if (rank.memory == Memory::written) rank.memory = fails || w.left.loads ? Memory::lost : Memory::before;
  rank.machine->rolled_back(rank.memory == Memory::lost ? name_of(r) + " is void" : "");
}

void lose_weights(World& w, std::uint32_t r) {
  Rank& rank = w.rank[r];
  if (rank.memory == Memory::written) rank.memory = Memory::lost;
  rank.machine->voided("void");
}

bool uses_store(const Action& action) {
  return action.kind == Kind::read || action.kind == Kind::write;
}

class Choices {
 public:
  Choices(const World& world, const Rules& rules) : from_(world), rules_(rules) {
    for (std::uint32_t r = 0; r < world.left.ranks; ++r) rank(r);
    if (world.left.erases) erases();
  }
  std::vector<Next> take() { return std::move(next_); }

 private:
  World& add(std::uint32_t r, const std::string& label) {
    return next_.emplace_back(name_of(r) + " " + label, from_).second;
  }

  void rank(std::uint32_t r) {
    const Rank& rank = from_.rank[r];
    if (!rank.machine) {
      if (rank.lives == 0 || rank.memory == Memory::lost) start(add(r, "starts"), r, rules_);
      return;
    }
    if (from_.left.deaths > 0) {
      World& w = add(r, "dies");
      --w.left.deaths;
      w.rank[r].machine.reset();
      w.rank[r].memory = Memory::lost;
    }
    const Action& action = rank.machine->action();
    if (action.kind == Kind::none || is_done(rank)) return begins(r);
    fails(r, action);
    if (action.kind == Kind::wait) {
      step(add(r, "looks again"), r, rules_, false);
      if (!rules_.never_ends) step(add(r, "has waited long enough"), r, rules_, true);
      return;
    }
    std::string label(to_string(action.kind));
    for (const std::string& name : action.registers) label += " " + name;
    step(add(r, label + " " + action.value), r, rules_, false);
  }

  void begins(std::uint32_t r) {
    if (from_.rank[r].times >= from_.left.times) return;
    begin(add(r, "begins"), r, false, false);
    if (from_.left.noes > 0) {
      World& w = add(r, "begins with a no");
      --w.left.noes;
      begin(w, r, true, false);
    }
    if (from_.left.others > 0) {
      World& w = add(r, "begins with another version");
      --w.left.others;
      begin(w, r, false, true);
    }
  }

  /// A rank votes in one round after the other: once all have voted in one, nobody reads those before.
  void erases() {
    const std::string at = std::to_string(from_.rank[0].times);
    if (from_.yes.count(from_.left.updates ? at + "/staged" : at) == 0 && !rules_.erases_early) return;
    World w = from_;
    for (auto each = w.registers.begin(); each != w.registers.end();) {
      each = std::stoi(each->first) < std::stoi(at) ? w.registers.erase(each) : std::next(each);
    }
    if (w.registers.size() < from_.registers.size()) next_.emplace_back("rounds before " + at + " are erased", w);
  }

  void fails(std::uint32_t r, const Action& action) {
    if (uses_store(action) && from_.left.store_fails > 0) {
      for (const bool has_effect : {false, true}) {
        if (has_effect && action.kind != Kind::write) continue;
        World& w = add(r, has_effect ? "loses the store after its write" : "loses the store");
        --w.left.store_fails;
        if (has_effect) put(w, action, rules_);
        w.rank[r].lost_store = true;
        w.rank[r].machine->failed(kFailure);
        note(w, r);
      }
    }
    if (action.kind == Kind::commit && from_.left.commit_fails > 0) {
      World& w = add(r, "cannot commit");
      --w.left.commit_fails;
      write_weights(w, r, true);
      note(w, r);
    }
    if (action.kind == Kind::roll_back && from_.left.rollback_fails > 0) {
      World& w = add(r, "cannot roll back");
      --w.left.rollback_fails;
      roll_back(w, r, true);
      note(w, r);
    }
    if (from_.left.interrupts > 0) {
      World& w = add(r, "is interrupted");
      --w.left.interrupts;
      w.rank[r].interrupted = true;
      if (action.kind == Kind::commit) w.rank[r].memory = Memory::written;  // the last that can have happened
      w.rank[r].machine->interrupted();
      note(w, r);
    }
  }

  const World& from_;
  const Rules& rules_;
  std::vector<Next> next_;
};

}  // namespace

bool is_done(const Rank& rank) {
  return rank.machine && rank.machine->action().kind == Kind::done;
}

void start(World& w, std::uint32_t r, const Rules& rules) {
  Rank& rank = w.rank[r];
  rank.machine.emplace(r, w.left.ranks, Removed{rules.guard});
  ++rank.lives;
  rank.times = 0;
  rank.lost_store = rank.interrupted = false;
  rank.yes.clear();
  rank.no.clear();
}

bool step(World& w, std::uint32_t r, const Rules& rules, bool late) {
  Explored& m = *w.rank[r].machine;
  const Action action = m.action();
  switch (action.kind) {
    case Kind::none:
    case Kind::done: return false;
    case Kind::read:
      if (const auto values = get(w, action)) {
        m.found(*values);
      } else {
        m.absent();
      }
      break;
    case Kind::write: m.stands(put(w, action, rules)); break;
    case Kind::wait: m.go_on(late); break;
    case Kind::word: m.worded("nobody takes " + action.value); break;
    case Kind::commit: write_weights(w, r, false); break;
    case Kind::roll_back: roll_back(w, r, false); break;
    case Kind::void_weights: lose_weights(w, r); break;
  }
  note(w, r);
  return true;
}

std::vector<Next> choices(const World& world, const Rules& rules) {
  return Choices(world, rules).take();
}

Violation check(const World& w) {
  if (w.found != Violation::none) return w.found;
  std::set<std::string> yes = w.yes;
  for (std::uint32_t r = 0; r < w.left.ranks; ++r) yes.insert(w.rank[r].yes.begin(), w.rank[r].yes.end());
  for (std::uint32_t r = 0; r < w.left.ranks; ++r) {
    for (const std::string& round : w.rank[r].no) {
      if (yes.count(round) != 0) return Violation::split;
    }
  }
  for (std::uint32_t r = 0; r < w.left.ranks; ++r) {
    const Rank& rank = w.rank[r];
    if (!is_done(rank)) continue;
    const auto ending = rank.machine->report().ending;
    const bool keeps = ending == Report::Ending::kept;
    if (keeps != (rank.memory == Memory::written)) return Violation::mixed;
    if (w.left.times != 1 || !(keeps || ending == Report::Ending::as_before)) continue;
    for (std::uint32_t other = 0; other < w.left.ranks; ++other) {
      const Rank& beside = w.rank[other];
      if (beside.lives != 1 || !beside.machine) continue;
      if (keeps && beside.memory == Memory::before) return Violation::mixed;
      if (!keeps && beside.memory != Memory::before) return Violation::mixed;
    }
  }
  return Violation::none;
}

Digest128 fingerprint(const World& w) {
  std::string text;
  const auto add = [&](const std::string& part) { (text += part) += '\0'; };
  for (const unsigned left : {w.left.noes, w.left.others, w.left.deaths, w.left.store_fails, w.left.commit_fails,
                              w.left.rollback_fails, w.left.interrupts}) {
    add(std::to_string(left));
  }
  for (const auto& [name, value] : w.registers) {
    add(name);
    add(value);
  }
  for (const std::string& round : w.yes) add(round);
  for (std::uint32_t r = 0; r < w.left.ranks; ++r) {
    const Rank& rank = w.rank[r];
    add("rank");
    if (rank.machine) rank.machine->describe(add);
    for (const unsigned part : {unsigned(rank.memory), unsigned(rank.lives), unsigned(rank.times),
                                unsigned(rank.lost_store), unsigned(rank.interrupted)}) {
      add(std::to_string(part));
    }
    add(rank.ready);
    for (const auto* rounds : {&rank.yes, &rank.no, &w.promised[r]}) {
      for (const std::string& round : *rounds) add(round);
      add("");
    }
  }
  return xxh3_128({reinterpret_cast<const std::byte*>(text.data()), text.size()});
}

}  // namespace deltasync::commit::model
