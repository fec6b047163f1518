// What the ranks of a rollout engine and their coordinator say to each other, and what the coordinator's log has.
// commit_protocol.md is normative; src/commit has the machines that speak.
//
// Reports and orders may be lost, doubled, late and in any order. Both say all that there is to say each time: a lost
// one is made up for by the next, so a rank reports again and again, as often as an answer shall be late at most.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/result.hpp"
#include "deltasync/version.hpp"

namespace deltasync::commit {

inline constexpr std::uint32_t kRanksMax = 1024;
inline constexpr std::uint32_t kRoundsMax = 16;  ///< in which the ranks of one transaction agree on a version
inline constexpr std::size_t kProblemBytesMax = 4096;

/// Grows from one transaction to the next, over restarts of the coordinator too.
struct TransactionId {
  std::uint64_t term = 0;  ///< of the coordinator: one more with each start
  std::uint64_t number = 0;
  auto operator<=>(const TransactionId&) const = default;
  bool valid() const noexcept { return term != 0; }
};
std::string to_string(const TransactionId& id);  ///< "2.17"

/// What a rank is, for those who ask whether it serves.
enum class RankState : std::uint8_t {
  paused = 1,         ///< does not serve, and has promised nothing
  serving,            ///< serves what it holds
  prepared,           ///< has promised to commit; does not serve
  committed_waiting,  ///< holds the new version and the undo log; does not serve
  in_doubt,           ///< one of the two before, and its deadline has passed; does not serve
};
std::string_view to_string(RankState state) noexcept;

/// How far a rank is with a transaction.
enum class Phase : std::uint8_t {
  none = 0,
  staging,        ///< pulls
  staged,         ///< the version of this round is staged and verified
  stage_failed,   ///< the pull, or the preparation, failed: nothing is promised
  preparing,      ///< stops serving
  prepared,       ///< promised
  committing,     ///< promised; writes
  committed,      ///< promised; holds the new version and the undo log
  commit_failed,  ///< promised; holds the version before, or none
  rolling_back,   ///< rolls back what it did
};
std::string_view to_string(Phase phase) noexcept;

/// All that a rank has to say.
struct Report {
  std::uint32_t rank = 0;
  std::uint64_t incarnation = 0;  ///< of the rank's process: a later one is larger
  std::uint64_t step = 0;         ///< grows with each change of what is said here
  RankState state = RankState::paused;
  bool busy = false;  ///< is at work, and will have more to say soon
  Phase phase = Phase::none;
  TransactionId transaction;   ///< of `phase`
  std::uint32_t round = 0;     ///< likewise
  Version staged;              ///< from Phase::staged on
  Digest128 staged_root;       ///< of what the rank subscribed to
  Digest128 subscription;      ///< ranks with the same one have the same root
  VersionId holds;             ///< committed; epoch 0: nothing
  Errc code = Errc::internal;  ///< of `problem`
  std::string problem;         ///< why the last thing that was ordered failed; empty: it did not
  std::uint64_t log = 0;       ///< of the coordinator that it obeys; 0: none has spoken yet

  bool operator==(const Report&) const = default;
};

enum class OrderKind : std::uint8_t {
  none = 0,  ///< go on as you are
  stage,     ///< pull `want`
  prepare,   ///< stop serving and promise to commit `version`, which you have staged
  commit,
  finish,     ///< all have committed: forget the undo log, serve
  roll_back,  ///< roll back what you did for the transaction, and serve again if you served before it
  serve,      ///< you hold what all others serve
  catch_up,   ///< pull exactly `version`, which the others serve, and commit it; you do not serve
  expel,      ///< what became of your transaction is not known any more: forget it and do not serve
};
std::string_view to_string(OrderKind kind) noexcept;

/// What a rank is to do.
struct Order {
  std::uint64_t log = 0;   ///< the coordinator's log: another one is another group
  std::uint64_t term = 0;  ///< with `step`: an order that is older than another one is void
  std::uint64_t step = 0;
  std::uint64_t incarnation = 0;  ///< to whom
  OrderKind kind = OrderKind::none;
  TransactionId transaction;
  std::uint32_t round = 0;
  Want want;        ///< stage
  VersionId exact;  ///< stage: valid: this version, whatever `want` says
  Version version;  ///< prepare, commit, finish, serve, catch_up
};

enum class RecordKind : std::uint8_t {
  start = 1,  ///< a coordinator has begun a term
  commit,     ///< all ranks are prepared: they may commit
  abort,      ///< the transaction ends, none has committed
  roll_back,  ///< the transaction ends, those who committed roll it back
  finish,     ///< all ranks have committed: the version is the group's
};
std::string_view to_string(RecordKind kind) noexcept;

/// What the coordinator's log has. Nothing is ordered that rests on a record before the record is durable.
struct Record {
  RecordKind kind = RecordKind::start;
  std::uint64_t log = 0;
  std::uint64_t term = 0;  ///< of who wrote it
  std::uint32_t ranks = 0;
  TransactionId transaction;  ///< not of `start`
  Version version;            ///< commit, finish; of `start`: what the group serves

  bool operator==(const Record&) const = default;
};

}  // namespace deltasync::commit
