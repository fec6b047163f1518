// The configurations that the explorer runs: who takes part and what may go wrong, each small enough to be searched
// to the end.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>

#include "shm/explorer.hpp"

namespace deltasync::shm::model {

inline WriterScript writer(unsigned slot, unsigned writers, std::uint64_t epoch, unsigned versions,
                           bool granted = true) {
  return {slot, writers, epoch, versions, granted};
}

/// The ordinary life of one trainer, with one death of anyone anywhere, an abort and a missed deadline.
inline Config one_writer() {
  Config c;
  c.name = "one writer, a death, agent restart";
  c.writers = {writer(0, 1, 1, 3)};
  c.kills = 1, c.agent_restarts = 1, c.aborts = 1, c.timeouts = 1;
  return c;
}

/// Any one process stands still at any point, perhaps for good.
inline Config one_writer_stopped() {
  Config c;
  c.name = "one writer, a stop, a death";
  c.writers = {writer(0, 1, 1, 3)};
  c.stops = 1, c.kills = 1, c.agent_restarts = 1, c.reader_rounds = 1;
  return c;
}

/// The reader maps the segment: the agent does not see what it reads, and no lease that is revoked stops it.
inline Config local_reader() {
  Config c;
  c.name = "a reader on the agent's host, a death, agent restart";
  c.writers = {writer(0, 1, 1, 3)};
  c.maps_locally = true;
  c.kills = 1, c.agent_restarts = 1, c.aborts = 1;
  return c;
}

inline Config local_reader_stopped() {
  Config c;
  c.name = "a reader on the agent's host, a stop, a death";
  c.writers = {writer(0, 1, 1, 3)};
  c.maps_locally = true;
  c.stops = 1, c.kills = 1, c.agent_restarts = 1, c.reader_rounds = 1;
  return c;
}

/// The trainer dies (or ends) anywhere and is started again; meanwhile the new one asks for the old one's slot.
inline Config trainer_restart() {
  Config c;
  c.name = "trainer restarted in a new epoch";
  c.writers = {writer(0, 1, 1, 2), writer(0, 1, 2, 2, false)};
  c.kills = 1, c.stops = 1, c.reader = false;
  return c;
}

/// The same with the agent dying as well.
inline Config both_restart() {
  Config c;
  c.name = "trainer and agent restarted";
  c.writers = {writer(0, 1, 1, 2), writer(0, 1, 2, 1, false)};
  c.kills = 2, c.agent_restarts = 1, c.reader_rounds = 1;
  return c;
}

/// Clocks and counters may go back: a trainer whose epoch is older than what is there publishes all the same.
inline Config older_epoch() {
  Config c;
  c.name = "a second trainer of an older epoch";
  c.writers = {writer(0, 1, 2, 1), writer(0, 1, 1, 2, false)};
  c.kills = 1, c.reader = false;
  return c;
}

/// A trainer that repeats the numbers of its epoch is refused until it has passed what is there.
inline Config repeated_numbers() {
  Config c;
  c.name = "a second trainer of the same epoch";
  c.writers = {writer(0, 1, 1, 2), writer(0, 1, 1, 3, false)};
  c.kills = 1, c.reader = false;
  return c;
}

inline Config two_writers() {
  Config c;
  c.name = "two writers, a death";
  c.writers = {writer(0, 2, 1, 2), writer(1, 2, 1, 2)};
  c.kills = 1, c.reader = false;
  return c;
}

inline Config two_writers_abort() {
  Config c;
  c.name = "two writers, an abort";
  c.writers = {writer(0, 2, 1, 2), writer(1, 2, 1, 2)};
  c.aborts = 1, c.reader = false;
  return c;
}

inline Config two_writers_late() {
  Config c;
  c.name = "two writers, a missed deadline";
  c.writers = {writer(0, 2, 1, 2), writer(1, 2, 1, 2)};
  c.timeouts = 1, c.reader = false;
  return c;
}

inline Config two_writers_stopped() {
  Config c;
  c.name = "two writers, a stop";
  c.writers = {writer(0, 2, 1, 2), writer(1, 2, 1, 2)};
  c.stops = 1, c.reader = false;
  return c;
}

/// One of two writers dies and is replaced while the other goes on.
inline Config replaced_writer() {
  Config c;
  c.name = "one of two writers replaced";
  c.writers = {writer(0, 2, 1, 2), writer(1, 2, 1, 2), writer(1, 2, 1, 2, false)};
  c.kills = 1, c.reader = false;
  return c;
}

/// The trainer becomes another program in the same process, anywhere.
inline Config one_writer_exec() {
  Config c;
  c.name = "one writer, an exec, a death, agent restart";
  c.writers = {writer(0, 1, 1, 4)};
  c.execs = 1, c.kills = 1, c.agent_restarts = 1, c.reader = false;
  return c;
}

inline Config two_writers_exec() {
  Config c;
  c.name = "two writers, an exec of the second";
  c.writers = {writer(0, 2, 1, 2), writer(1, 2, 1, 2)};
  c.execs = 1, c.exec_slot = 1, c.reader = false;
  return c;
}

/// The agent reads while the writer writes, which may abort and come back to the same half.
inline Config reads_while_written() {
  Config c;
  c.name = "the agent reads while the writer writes";
  c.writers = {writer(0, 1, 1, 3)};
  c.reads_while_written = true;
  c.aborts = 2, c.kills = 1, c.agent_restarts = 1, c.reader = false;
  return c;
}

inline Config reads_while_two_write() {
  Config c;
  c.name = "the agent reads while two writers write";
  c.writers = {writer(0, 2, 1, 2), writer(1, 2, 1, 2)};
  c.reads_while_written = true;
  c.aborts = 1, c.reader = false;
  return c;
}

/// One of these in a memory that is weakly ordered.
template <Config (*kOf)()>
Config delayed() {
  Config c = kOf();
  c.delays_bytes = true;
  return c;
}

inline void report(const Config& config, const Outcome& out, double seconds) {
  const std::string name_of = std::string(config.name) + (config.delays_bytes ? ", bytes late" : "");
  std::printf("  %-64s %9llu states %10llu steps %7llu quiet %6llu complete  %5.1f s  %s\n", name_of.c_str(),
              static_cast<unsigned long long>(out.states), static_cast<unsigned long long>(out.steps),
              static_cast<unsigned long long>(out.quiet), static_cast<unsigned long long>(out.completed), seconds,
              name(out.violation));
}

inline Outcome run(const Config& config, const Rules& rules = {}) {
  const auto start = std::chrono::steady_clock::now();
  auto out = explore(config, rules);
  report(config, out, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  return out;
}

}  // namespace deltasync::shm::model
