#include "shm/explorer.hpp"

#include <xxhash.h>

#include <algorithm>
#include <sstream>

namespace deltasync::shm::model {
namespace {

/// Of everything that decides what can happen next.
XXH128_hash_t fingerprint(const State& s) {
  std::array<std::uint64_t, sizeof(State) / 8 + kActorsMax * 8> words;
  std::size_t n = 0;
  for (const auto cell : s.cells) words[n++] = cell;
  for (const auto* lease : {&s.served, &s.lease}) {
    words[n++] = std::uint64_t{lease->taken} | std::uint64_t{lease->revoked} << 8 | std::uint64_t{lease->half} << 16 |
                 std::uint64_t{lease->value} << 32;
    words[n++] = lease->sequence;
  }
  words[n++] = s.held[0];
  words[n++] = s.held[1];
  words[n++] = std::uint64_t{s.fill_value[0]} | std::uint64_t{s.fill_value[1]} << 32;
  words[n++] = std::uint64_t{s.last_active} | std::uint64_t{s.last_sequence} << 32;
  words[n++] = std::uint64_t{s.kills_left} | std::uint64_t{s.stops_left} << 8 |
               std::uint64_t{s.agent_restarts_left} << 16 | std::uint64_t{s.timeouts_left} << 24 |
               std::uint64_t{s.aborts_left} << 32 | std::uint64_t{s.timeouts_taken} << 40 |
               std::uint64_t{s.execs_left} << 48;
  for (unsigned i = 0; i < s.actors; ++i) {
    const auto& a = s.actor[i];
    words[n++] =
        static_cast<std::uint64_t>(a.status) | std::uint64_t{a.log_size} << 8 | std::uint64_t{a.pending_size} << 16;
    std::memcpy(&words[n], &a.locals, sizeof(Locals));
    n += sizeof(Locals) / 8;
    for (unsigned k = 0; k < a.log_size; ++k) words[n++] = a.log[k];
    for (unsigned k = 0; k < a.pending_size; ++k) {
      const Pending& stored = a.pending[k];
      words[n++] = stored.cell | stored.sequence << 8;
      words[n++] = stored.value;
    }
  }
  return XXH3_128bits(words.data(), n * sizeof(words[0]));
}

/// Open-addressing set of 128-bit fingerprints: at ten million states a collision has a chance of 10⁻²⁵.
class Visited {
 public:
  Visited() : slots_(std::size_t{1} << 16) {}
  bool insert(XXH128_hash_t h) {
    h.low64 |= 1;  // zero means empty
    if (2 * size_ >= slots_.size()) grow();
    return place(slots_, h) && ++size_ > 0;
  }
  std::size_t size() const { return size_; }

 private:
  static bool place(std::vector<XXH128_hash_t>& slots, XXH128_hash_t h) {
    const auto mask = slots.size() - 1;
    for (auto i = h.high64 & mask;; i = (i + 1) & mask) {
      if (slots[i].low64 == 0) return slots[i] = h, true;
      if (slots[i].low64 == h.low64 && slots[i].high64 == h.high64) return false;
    }
  }
  void grow() {
    std::vector<XXH128_hash_t> larger(2 * slots_.size());
    for (const auto& h : slots_) {
      if (h.low64 != 0) place(larger, h);
    }
    slots_.swap(larger);
  }
  std::vector<XXH128_hash_t> slots_;
  std::size_t size_ = 0;
};

constexpr Action kActions[] = {Action::step, Action::timeout, Action::abort,   Action::revoke, Action::kill,
                               Action::stop, Action::resume,  Action::restart, Action::exec,   Action::drain};

/// A state on the current path, and the next choice to try from it.
struct Frame {
  State state;
  std::uint16_t next = 0;
};

std::string describe(const Config& config, const State& before, const State& after, unsigned actor, Action action) {
  static const char* const kWriter[] = {"ask",  "init", "begin",   "copy",  "count", "decide",
                                        "mark", "seal", "give-up", "abort", "idle"};
  static const char* const kAgent[] = {"adopt",  "serve-old", "reap0",   "reap1", "grant",  "overlap",
                                       "sealed", "activate",  "publish", "diff",  "leases", "free"};
  static const char* const kReader[] = {"lease", "read", "look", "release"};
  const auto& a = before.actor[actor];
  std::ostringstream out;
  if (a.kind == Kind::writer) {
    out << "writer " << config.writers[actor].slot << " (process " << a.process << ") " << kWriter[a.locals.pc];
  } else if (a.kind == Kind::agent) {
    out << "agent " << kAgent[a.locals.pc];
  } else {
    out << "reader " << kReader[a.locals.pc];
  }
  out << "+" << unsigned{a.log_size};
  if (action != Action::step) out << " " << name(action);
  for (unsigned c = 0; c < kCells; ++c) {
    if (before.cells[c] == after.cells[c]) continue;
    if (c < kInfoCells) {
      const auto now = half_word(after, c);
      out << "  half " << c << " → " << to_string(now.code) << "(" << now.sequence << ")";
    } else if (c >= kPhase && c < kOwner) {
      const auto now = phase_word(after, c - kPhase);
      out << "  phase " << c - kPhase << " → " << to_string(now.code) << "(" << now.sequence << ")";
    } else if (c >= kData) {
      out << "  data[" << (c - kData) / kDataCells << "][" << (c - kData) % kDataCells << "] → " << after.cells[c];
    } else {
      out << "  word " << c << " → " << after.cells[c];
    }
  }
  return out.str();
}

class Search {
 public:
  Search(const Config& config, const Rules& rules) : config_(config), rules_(rules) {}

  Outcome run() {
    enter(initial(config_));
    while (!path_.empty() && out_.violation == Violation::none && !out_.truncated) advance();
    out_.states = visited_.size();
    return std::move(out_);
  }

 private:
  void advance() {
    auto& top = path_.back();
    if (top.next == top.state.actors * std::size(kActions)) {
      path_.pop_back();
      return;
    }
    const unsigned actor = top.next / std::size(kActions);
    const Action action = kActions[top.next % std::size(kActions)];
    ++top.next;
    if (!applies(top.state, actor, action)) return;
    State after = top.state;
    const auto violation = take(config_, rules_, after, actor, action);
    ++out_.steps;
    if (after.last_active != top.state.last_active) ++out_.sealed_versions;
    if (violation != Violation::none) return fail(violation, &after);
    enter(after);
  }

  void enter(const State& s) {
    if (!visited_.insert(fingerprint(s))) return;
    path_.push_back({s, 0});
    if (const auto violation = check_state(s); violation != Violation::none) return fail(violation, nullptr);
    bool quiet = false;
    if (rules_.check_progress) {
      if (const auto v = check_progress(config_, rules_, s, quiet); v != Violation::none) return fail(v, nullptr);
    }
    out_.quiet += quiet;
    out_.completed += std::all_of(s.actor.begin(), s.actor.begin() + s.actors,
                                  [](const Actor& a) { return a.kind == Kind::agent || a.status == Status::finished; });
    out_.truncated = visited_.size() >= config_.states_max;
  }

  /// The path itself is the counterexample.
  void fail(Violation violation, const State* last) {
    out_.violation = violation;
    for (std::size_t i = 0; i < path_.size(); ++i) {
      const State* after = i + 1 < path_.size() ? &path_[i + 1].state : last;
      if (after == nullptr) break;
      const auto choice = static_cast<unsigned>(path_[i].next - 1);
      out_.trace.push_back(describe(config_, path_[i].state, *after, choice / std::size(kActions),
                                    kActions[choice % std::size(kActions)]));
    }
  }

  const Config& config_;
  const Rules rules_;
  Visited visited_;
  std::vector<Frame> path_;
  Outcome out_;
};

}  // namespace

Outcome explore(const Config& config, const Rules& rules) {
  return Search(config, rules).run();
}

}  // namespace deltasync::shm::model
