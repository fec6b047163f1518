// Two-phase commit over the ranks of one rollout engine: what decides, without sockets, threads, files or a clock.
// Its caller carries a rank's Report here and the Order back; src/commit/coordinator does it, with the log.
// commit_protocol.md has the states, and what follows when somebody dies.
//
// What holds at every instant, whichever ranks have died or are silent:
//   - no two ranks serve different versions. A version is served only after a record `finish` of it is durable, and
//   that
//     is written only after every rank has committed it, for which each has stopped serving before;
//   - a rank that promised to commit does not serve until it knows what became of it;
//   - nothing is ordered of which the record is not durable.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "deltasync/result.hpp"
#include "format/commit_messages.hpp"

namespace deltasync::commit {

/// What has been decided and what is under way; plain data.
struct CoordinatorState {
  enum class Stage : std::uint8_t { idle, staging, preparing, committing };
  enum class Outcome : std::uint8_t { none, finished, gone_back };

  std::uint64_t log = 0;
  std::uint64_t term = 0;
  std::uint64_t step = 0;
  std::uint64_t transactions = 0;  ///< begun in this term
  bool started = false;            ///< the term is durable
  std::optional<Record> pending;   ///< to be made durable

  Stage stage = Stage::idle;
  TransactionId transaction;
  std::uint32_t round = 0;
  Want want;
  VersionId exact;                      ///< valid: what this round asks for
  bool moved_on = false;                ///< somebody has staged another version than the group's
  Version version;                      ///< from preparing on
  std::vector<std::uint8_t> committed;  ///< by rank, in Stage::committing

  TransactionId last;  ///< the last one of which a commit was recorded, once it has ended
  Outcome outcome = Outcome::none;
  Error problem{Errc::internal, ""};  ///< why it did not finish
  bool nothing_new = false;           ///< it ended because all serve what was wanted
  std::optional<Version> group;       ///< what the ranks serve, if they serve

  std::vector<std::optional<Report>> ranks;  ///< what each said last
};

/// Decides. Events: reports, a record made durable, time that is up, and the request for a version. Every method but
/// the readers may leave a record in pending(): make it durable, call logged(), and look again. Until then order()
/// gives nothing that would rest on it. If a record cannot be made durable, end: whether it is will be seen at the next
/// start.
class CoordinatorMachine {
 public:
  /// From what the log has, oldest first; a new log begins with `fresh_log`, which is random and not 0. The first
  /// record is pending. Errors: corrupt (records that cannot follow each other), invalid_argument (another number of
  /// ranks while a transaction is open).
  static Result<CoordinatorMachine> recover(std::uint32_t ranks, const std::vector<Record>& records,
                                            std::uint64_t fresh_log);

  const CoordinatorState& state() const noexcept { return s_; }
  const std::optional<Record>& pending() const noexcept { return s_.pending; }
  void logged();

  /// version_conflict while a transaction is open.
  Status begin(const Want& want);
  /// The stage at hand takes too long. Never waits for anybody: ends what is open.
  void time_is_up();
  /// invalid_argument: no such rank; version_conflict: a process that has been replaced. Both change nothing.
  Status on_report(const Report& report);
  /// What the rank is to do now; `none` before its first report.
  Order order(std::uint32_t rank) const;

  /// No transaction is open, and the last one's outcome is known.
  bool idle() const noexcept { return s_.started && s_.stage == CoordinatorState::Stage::idle && !s_.pending; }

 private:
  explicit CoordinatorMachine(CoordinatorState state) : s_(std::move(state)) {}

  bool is_foreign(const Report& report) const;
  bool in_round(const Report& report) const;
  void advance();
  void advance_staging();
  void agree();
  void next_round(VersionId exact);
  bool serves_first(const Report& report) const;
  Order bring_to_group(Order order, const Report& report) const;
  void advance_preparing();
  void advance_committing();
  void decide(RecordKind kind, Error why);
  void decide(RecordKind kind);
  std::string who_is_late() const;
  Status check_roots() const;

  CoordinatorState s_;
};

}  // namespace deltasync::commit
