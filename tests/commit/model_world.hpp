// The world that the model explores: a few ranks, their coordinator and its log, and all that is on its way between
// them; and the steps that it can take.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "commit/coordinator_machine.hpp"
#include "commit/participant_machine.hpp"
#include "tests/commit/model.hpp"
#include "tests/commit/pretend_target.hpp"

namespace deltasync::commit::model {

/// A rank's process, its target and its engine.
struct Rank {
  std::optional<ParticipantMachine> machine;
  std::uint64_t incarnation = 0;
  PretendTarget target;
  std::optional<VersionId> engine;  ///< steps with this; it follows the machine, sooner or later
};

struct World {
  Budget left;
  std::optional<CoordinatorMachine> coordinator;
  std::uint64_t log_name = 77;      ///< of a log that begins now
  std::vector<Record> log;          ///< durable
  std::vector<Record> unsynced;     ///< acts_before_logging
  std::vector<VersionId> finished;  ///< of which a record `finish` was durable, in this log or one that was lost
  std::array<Rank, kRanks> rank;
  std::array<std::vector<Report>, kRanks> reports;
  std::array<std::vector<Order>, kRanks> orders;
  std::uint64_t newest = 1;
  bool broken = false;
};

Digest128 fingerprint(const World& w);

using Next = std::pair<std::string, World>;
/// All that can happen next, each with what it leads to.
std::vector<Next> choices(const World& world, const Rules& rules);

// ---- single steps

void say(World& w, std::size_t r);
void start_rank(World& w, std::size_t r, const Rules& rules);
void start_coordinator(World& w, const Rules& rules);
/// What the coordinator wants to have in its log is there.
void make_durable(World& w);
void sync(World& w);
/// Its engine does what the machine says, if nothing is to be known of that.
void settle_engine(World& w, std::size_t r);
Want wanted(const World& w);  ///< by an update
/// The rank pulls what the trainer has not published yet.
bool waits_for_trainer(const World& w, std::size_t r);
/// The work that the rank's machine asks for, unless it has to wait for the engine or for the trainer.
enum class How : std::uint8_t { well, fails, loses_version, cancelled };
void do_work(World& w, std::size_t r, How how);

}  // namespace deltasync::commit::model
