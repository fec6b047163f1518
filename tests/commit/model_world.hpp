// The world that the model explores: a few ranks, and the registers that they share; and the steps that it can take.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "deltasync/layout.hpp"
#include "tests/commit/model.hpp"

namespace deltasync::commit::model {

inline constexpr std::uint32_t kRanks = 4;  ///< at most

struct Removed {
  Guard guard = Guard::none;
  bool broken(Guard asked) const noexcept { return asked == guard; }
};

using Explored = MachineOf<Removed>;

enum class Memory : std::uint8_t { before, written, lost };

/// A rank's process, and what its engine has in memory.
struct Rank {
  std::optional<Explored> machine;
  Memory memory = Memory::before;
  std::uint8_t lives = 0;   ///< that it has begun
  std::uint8_t times = 0;   ///< that this process has voted, or updated
  bool lost_store = false;  ///< once, in this life
  bool interrupted = false;
  std::string ready;  ///< what this process has staged, and voted yes about
  /// Rounds of which this process has heard the outcome, or takes one for granted.
  std::set<std::string> yes, no;
};

struct World {
  Budget left;
  std::map<std::string, std::string> registers;
  std::set<std::string> yes;  ///< rounds of which that stands there
  std::array<Rank, kRanks> rank;
  std::array<std::set<std::string>, kRanks> promised;  ///< rounds for which a yes was on its way, in any life
  Violation found = Violation::none;
};

Digest128 fingerprint(const World& w);

using Next = std::pair<std::string, World>;
/// All that can happen next, each with what it leads to.
std::vector<Next> choices(const World& world, const Rules& rules);

// ---- single steps

void start(World& w, std::uint32_t r, const Rules& rules);
/// What the rank waits for happens, and nothing fails; false: it has nothing to do.
bool step(World& w, std::uint32_t r, const Rules& rules, bool late);
bool is_done(const Rank& rank);
/// What can be said of this state alone.
Violation check(const World& w);

}  // namespace deltasync::commit::model
