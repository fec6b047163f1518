// The actors of the model: a writer process, the agent, a remote reader. Each is a table of short episodes around the
// real protocol code; waiting is an episode that ends where it began.
#pragma once

#include <vector>

#include "shm/model_memory.hpp"

namespace deltasync::shm::model {

/// What the scheduler lets an actor do. Choices other than `step` are taken between two episodes.
enum class Action : std::uint8_t {
  step,
  timeout,  ///< a writer's deadline has passed
  abort,    ///< a writer's user gives the fill up
  revoke,   ///< the agent ends the leases that its writer waits for
  kill,
  stop,
  resume,
  restart,  ///< a new agent process
  exec,     ///< a writer becomes another program: the process, and so its slot, stays; its memory goes
  drain,    ///< others see the bytes that a writer has stored
};
const char* name(Action action);

struct WriterScript {
  unsigned slot = 0;
  unsigned writers = 1;
  std::uint64_t epoch = 1;
  unsigned versions = 1;  ///< numbers 1 … versions
  bool granted = true;    ///< from the start; else it asks the agent
};

struct Config {
  const char* name = "";
  std::vector<WriterScript> writers;
  bool reader = true;
  unsigned reader_rounds = 2;
  bool reads_while_written = false;
  bool maps_locally = false;  ///< the reader is on the agent's host: it reads without holding, and looks afterwards
  bool delays_bytes = false;  ///< a memory that is weakly ordered: see Memory
  unsigned kills = 0, stops = 0, agent_restarts = 0, timeouts = 0, aborts = 0, execs = 0;
  unsigned exec_slot = 0;  ///< whose writers call exec
  std::uint64_t states_max = 20'000'000;
};

State initial(const Config& config);

enum WriterPc : std::uint8_t { kAsk, kInit, kBegin, kCopy, kCount, kDecide, kMark, kSeal, kGiveUp, kAbort, kIdle };
enum AgentPc : std::uint8_t {
  kAdopt,
  kServeOld,
  kReap0,
  kReap1,
  kGrant,
  kReadWhileWritten,
  kSealed,
  kActivate,
  kPublish,
  kDiff,
  kLeases,
  kFree,
};
enum ReaderPc : std::uint8_t { kLease, kRead, kLook, kRelease };

/// Runs the actor's current episode from its start over `memory`; `locals` becomes where it stands if it finishes.
void run_writer(const WriterScript& script, Locals& locals, Memory& memory, Action action);
void run_agent(const Config& config, Locals& locals, Memory& memory, Action action);
void run_reader(const Config& config, Locals& locals, Memory& memory);

}  // namespace deltasync::shm::model
