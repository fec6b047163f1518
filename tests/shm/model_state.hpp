// One state of the model: every shared word, the agent's lease table, and each actor's position. Plain data, copied
// for every step.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "shm/protocol.hpp"

namespace deltasync::shm::model {

inline constexpr unsigned kSlots = 2;
inline constexpr unsigned kDataCells = 2;  ///< per half: enough to be torn
inline constexpr unsigned kActorsMax = 5;
inline constexpr unsigned kLogMax = 48;
inline constexpr unsigned kPendingMax = 4;  ///< one more waits until the oldest is seen
inline constexpr unsigned kInfo = 3;        ///< words of info that the model has: epoch, number, writers

/// Shared words, by index.
enum Cell : unsigned {
  kState = 0,
  kInfoCells = kState + kHalves,
  kPhase = kInfoCells + kHalves * kInfo,
  kOwner = kPhase + kSlots,
  kProgress = kOwner + kSlots,  ///< a half is one batch of kDataCells elements
  kData = kProgress + kHalves,
  kCells = kData + kHalves * kDataCells,
};

enum class Kind : std::uint8_t { none, writer, agent, reader };
enum class Status : std::uint8_t { running, stopped, dead, finished };

/// Where an actor stands between two episodes. An episode is one attempt of the protocol; inside it the position is
/// the log of what it has observed so far, from which it is run again.
struct Locals {
  std::uint8_t pc = 0;
  std::uint8_t version = 0;  ///< writer: index of the version that it is at; reader: rounds done
  std::uint8_t half = 0;
  std::uint8_t cell = 0;
  std::uint8_t holding = 0;  ///< agent: reads while a writer writes; reader: what it will read counts
  std::uint8_t failed = 0;   ///< writer: fills that ended without a version
  std::uint16_t value = 0;   ///< reader: the version that its lease names
  std::uint64_t sequence = 0;

  bool operator==(const Locals&) const = default;
};
static_assert(sizeof(Locals) == 16);

/// What a process has stored and others do not see yet.
struct Pending {
  std::uint64_t cell = 0;
  std::uint64_t value = 0;
  std::uint64_t sequence = 0;  ///< bytes: of the fill that they are for
};

struct Actor {
  Kind kind = Kind::none;
  Status status = Status::running;
  std::uint8_t slot = 0;
  std::uint8_t log_size = 0;
  std::uint32_t process = 0;  ///< what an owner word says
  Locals locals;
  std::array<std::uint64_t, kLogMax> log{};
  std::uint8_t pending_size = 0;
  std::array<Pending, kPendingMax> pending{};  ///< oldest first
};

/// A lease in the agent's memory. It ends by acknowledgement, revocation, or the agent's death.
struct Lease {
  std::uint8_t taken = 0;
  std::uint8_t revoked = 0;
  std::uint8_t half = 0;
  std::uint8_t pad = 0;
  std::uint32_t value = 0;
  std::uint64_t sequence = 0;
};

struct State {
  std::array<std::uint64_t, kCells> cells{};
  // the agent's own memory, gone when it dies
  Lease served;  ///< what new leases are taken on
  Lease lease;   ///< of the one reader
  std::uint64_t held[kHalves] = {0, 0};
  // what has happened, for the checks only
  std::uint32_t fill_value[kHalves] = {0, 0};  ///< version that the half's current fill is really of
  std::uint32_t last_active = 0;               ///< value and sequence of the version that became ACTIVE last
  std::uint32_t last_sequence = 0;
  std::uint8_t kills_left = 0, stops_left = 0, agent_restarts_left = 0, timeouts_left = 0, aborts_left = 0;
  std::uint8_t timeouts_taken = 0;
  std::uint8_t actors = 0;
  std::uint8_t execs_left = 0;
  std::uint8_t exec_slot = 0;  ///< constant
  std::array<Actor, kActorsMax> actor;
};

inline HalfWord half_word(const State& s, unsigned half) {
  return HalfWord::unpack(s.cells[kState + half]);
}
inline PhaseWord phase_word(const State& s, unsigned slot) {
  return PhaseWord::unpack(s.cells[kPhase + slot]);
}
/// All elements of the half's batch are counted as in place in this fill.
inline bool batch_whole(const State& s, unsigned half, std::uint64_t sequence) {
  const auto word = ProgressWord::unpack(s.cells[kProgress + half]);
  return word.sequence == sequence && word.elements == kDataCells;
}
/// The bytes that a version's fill writes into every data cell.
constexpr std::uint32_t value_of(std::uint64_t epoch, std::uint64_t number) {
  return static_cast<std::uint32_t>(epoch * 16 + number);
}
constexpr std::uint32_t epoch_of(std::uint32_t value) {
  return value / 16;
}
inline std::uint32_t info_value(const State& s, unsigned half) {
  return value_of(s.cells[kInfoCells + half * kInfo + kInfoEpoch], s.cells[kInfoCells + half * kInfo + kInfoNumber]);
}

/// What a broken run is called. Tests expect one of these, not just any.
enum class Violation : std::uint8_t {
  none,
  wrong_write,     ///< bytes written that others may read, or outside of the fill that they are for
  torn,            ///< a half that holds a version has other bytes in it
  torn_info,       ///< a version was read that no fill was of
  two_active,      ///< more than one half is ACTIVE
  went_back,       ///< an older version became ACTIVE after a newer one
  wrong_edge,      ///< a state word moved where it must not
  wrong_abort,     ///< a fill was ended by somebody who has no part in it
  stale_join,      ///< begin returned a fill that was over before it joined
  spurious_retry,  ///< "again" though nothing had moved
  stuck,           ///< nobody can go on without a deadline, and nobody is to blame
  log_full,        ///< the model's own limit
};
const char* name(Violation violation);

}  // namespace deltasync::shm::model
