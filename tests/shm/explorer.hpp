// Visits every state that a configuration can reach, by every interleaving of single memory operations, deadlines,
// kills, stops and restarts within the configuration's budgets.
//
// Checked in every state: a half that holds a version holds all of it and nothing else; at most one half is ACTIVE.
// Checked at every operation: see model_memory.cpp. Checked where nobody can move: a party that still waits has a
// reason (model_liveness.cpp), so that no party is stuck.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shm/model_actors.hpp"

namespace deltasync::shm::model {

struct Outcome {
  Violation violation = Violation::none;
  bool truncated = false;  ///< the bound cut the search: proves nothing
  std::uint64_t states = 0;
  std::uint64_t steps = 0;
  std::uint64_t quiet = 0;            ///< states in which nobody could move
  std::uint64_t completed = 0;        ///< states in which every writer and reader had finished
  std::uint64_t sealed_versions = 0;  ///< steps that made a version ACTIVE: the search did reach the real work
  std::vector<std::string> trace;     ///< one line a step, to the violation
};

Outcome explore(const Config& config, const Rules& rules = {});

// ---- shared by the parts of the explorer

/// Whether an actor has this choice now.
bool applies(const State& state, unsigned actor, Action action);
/// One step of an actor, for a choice that applies.
Violation take(const Config& config, const Rules& rules, State& state, unsigned actor, Action action);
/// The checks on a state by itself.
Violation check_state(const State& state);
/// stuck, if all who could act can only wait and somebody waits without a reason; `quiet` tells that all wait.
Violation check_progress(const Config& config, const Rules& rules, const State& state, bool& quiet);

}  // namespace deltasync::shm::model
