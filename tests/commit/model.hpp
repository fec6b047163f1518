// Visits every state that a few ranks can reach together: by every order of their steps, with deadlines that pass at
// any time, a store that fails, work that fails, ranks that come late, die and start again, all within a budget. The
// machine is the one that the engines run.
//
// Checked in every state:
//   split        one rank has a yes of a round, another one a no
//   unfounded    a yes that not all ranks have voted for, about the same, with everything taken by somebody; or an
//                unknown outcome of a rank that has voted no such thing
//   disagreement a rank reports another verdict than the one that stands in the register
//   mixed        a rank has new weights and does not say that it keeps them; or it says how all ended, and another one
//                has other weights
//   stuck        alone, with its deadline passed, a rank does not come to an end; or ranks that are all there, and need
//                not wait, do not come to a yes any more
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "commit/machine.hpp"

namespace deltasync::commit::model {

enum class Violation : std::uint8_t { none, split, unfounded, disagreement, mixed, stuck };
const char* name(Violation violation);

/// What may happen.
struct Budget {
  std::uint8_t ranks = 2;
  std::uint8_t times = 1;        ///< that each rank's process votes, or updates
  bool updates = true;           ///< else each is one round
  bool counted = false;          ///< rounds; else they have names
  std::uint8_t noes = 0;         ///< votes against the first round
  std::uint8_t others = 0;       ///< votes about another version
  bool lacks = false;            ///< there is something that no rank takes
  bool loads = false;            ///< what is written cannot be rolled back
  bool erases = false;           ///< rank 0 erases the rounds before the last one with a yes
  std::uint8_t deaths = 0;       ///< after each of which the rank may start again
  std::uint8_t store_fails = 0;  ///< with the effect of the call, or without
  std::uint8_t commit_fails = 0;
  std::uint8_t rollback_fails = 0;
  std::uint8_t interrupts = 0;
};

/// What is broken. Each must be found.
struct Rules {
  Guard guard = Guard::none;  ///< of the machine
  bool overwrites = false;    ///< a register takes every value
  bool never_ends = false;    ///< ranks have no deadline
  bool erases_early = false;  ///< rank 0 erases the rounds that it has left itself
};

struct Seen {
  Violation violation = Violation::none;
  bool truncated = false;
  std::uint64_t states = 0;
  std::uint64_t kept = 0, as_before = 0, doubtful = 0, unwritten = 0, voted = 0;  ///< states with a rank that ended so
  std::vector<std::string> trace;
};

Seen explore(const Budget& budget, const Rules& rules = {}, std::uint64_t states_max = 4'000'000);

}  // namespace deltasync::commit::model
