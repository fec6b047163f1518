// Visits every state that a few ranks and their coordinator can reach: by every order of messages (each may be lost,
// doubled and late), work that succeeds or fails, deadlines, deaths and restarts within a configuration's budgets. The
// machines are the ones that the processes run.
//
// Checked in every state:
//   split       two ranks serve different versions, by their word or by what their engines step with
//   undecided   a rank serves a version of which no record `finish` was ever durable
//   broken      a rank serves, or its engine steps, with an open promise; or it serves something else than its target
//               holds
//   written     memory changes under an engine that steps with it
//   stuck       everybody is restarted and everything is delivered: and yet a promise or a transaction stays open, or
//               not all serve the group's version although it is to be had (be it that an update waits for the next
//               one), or not all come to one at the next update
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "format/commit_messages.hpp"

namespace deltasync::commit::model {

inline constexpr std::size_t kRanks = 3;  ///< at most

enum class Violation : std::uint8_t { none, split, undecided, broken, written, stuck };
const char* name(Violation violation);

/// What may still happen.
struct Budget {
  std::uint8_t ranks = 2;
  std::uint8_t messages = 2;  ///< of each direction and rank that may still arrive; older ones are lost
  std::uint8_t transactions = 1;
  std::uint8_t publications = 0;
  std::uint8_t coordinator_deaths = 0;
  std::uint8_t rank_deaths = 0;
  std::uint8_t resolutions = 0;  ///< resolve_by_pull
  std::uint8_t failures = 0;     ///< of work
  std::uint8_t timeouts = 0;     ///< of the coordinator
  std::uint8_t losses = 0;       ///< work that fails and leaves its target without a whole version
  std::uint8_t log_losses = 0;   ///< while the coordinator is dead: the next one begins another log
  bool in_doubt = false;         ///< ranks' deadlines pass
  bool directories = false;      ///< a rank's version survives it
  bool past_is_gone = false;     ///< the agent gives the newest version only
  std::uint8_t gones = 2;        ///< how often somebody may find that out
  bool waits = false;            ///< updates want a version newer than what a rank holds: pulls wait for that
  bool engine_lags = false;      ///< engines follow their ranks later, in steps of their own
  bool all_serve_first = true;   ///< begin where all serve version 1
};

/// What a broken executor would do. Each must be found.
struct Rules {
  bool acts_before_logging = false;  ///< tells the machine that a record is durable before it is
  bool serves_in_doubt = false;      ///< a rank in doubt serves what it holds
  bool loses_records = false;        ///< a restarted coordinator does not find the last record of a transaction
  bool same_incarnation = false;     ///< a restarted rank calls itself what it was
  bool check_stuck = true;
};

struct Outcome {
  Violation violation = Violation::none;
  bool truncated = false;
  std::uint64_t states = 0;
  std::uint64_t finished = 0;  ///< states in which a transaction had just finished
  std::uint64_t in_doubt = 0;  ///< states with a rank in doubt
  std::vector<std::string> trace;
};

Outcome explore(const Budget& budget, const Rules& rules = {}, std::uint64_t states_max = 6'000'000);

/// One way of `steps` choices at random: longer, with more of everything, than all ways can be.
Outcome walk(const Budget& budget, std::uint64_t seed, unsigned steps);

}  // namespace deltasync::commit::model
