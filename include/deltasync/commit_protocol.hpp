// Two-phase commit over the ranks of one rollout engine, as two state machines without sockets, threads, files or a
// clock: one for the coordinator, one for each rank. Whoever runs them carries a rank's Report to the coordinator and
// the coordinator's Order back, by whatever means the engine has; include/deltasync/commit.hpp does it over TCP.
// commit_protocol.md has the states, and what follows when somebody dies.
//
// Reports and orders may be lost, doubled, late and in any order. Both say all that there is to say each time: a lost
// one is made up for by the next, so a rank reports again and again, as often as an answer shall be late at most.
//
// What holds at every instant, whoever has died or is silent:
//   - no two ranks serve different versions. A version is served only after a record `finish` of it is durable, and
//   that
//     is written only after every rank has committed it, for which each has stopped serving before;
//   - a rank that promised to commit does not serve until it knows what became of it;
//   - nothing is ordered of which the record is not durable.
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

// ---- coordinator -----------------------------------------------------------------------------------------------

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

/// Decides. Events: reports, a record made durable, time that is up, and the wish for a version. Every method but the
/// readers may leave a record in pending(): make it durable, call logged(), and look again. Until then order() gives
/// nothing that would rest on it. If a record cannot be made durable, end: whether it is will be seen at the next
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

// ---- rank ------------------------------------------------------------------------------------------------------

/// What a rank's process has to do for the machine. One at a time.
struct Work {
  enum class Kind : std::uint8_t {
    none,
    pull,       ///< `want`, or `exact` if that is valid; keep it staged in place of what was staged
    pause,      ///< have the engine stop using its weights
    commit,     ///< what is staged
    roll_back,  ///< roll back, or drop what is only staged
    catch_up,   ///< pull and commit `exact`
    forget,     ///< give up the undo log, and what is staged
  };
  Kind kind = Kind::none;
  std::uint64_t serial = 0;  ///< tells one from the next
  Want want;
  VersionId exact;
};

/// How it went.
struct WorkResult {
  std::optional<Error> error;
  VersionId holds;  ///< what the target holds now, whatever happened
  Version staged;   ///< pull
  Digest128 root;   ///< pull
};

struct ParticipantState {
  std::uint32_t rank = 0;
  std::uint64_t incarnation = 0;
  Digest128 subscription;
  std::uint64_t step = 1;
  std::uint64_t log = 0;  ///< the coordinator's; 0: none has spoken yet
  std::uint64_t order_term = 0;
  std::uint64_t order_step = 0;

  bool serving = false;
  bool in_doubt = false;
  VersionId holds;
  VersionId before;             ///< that it served when it promised; epoch 0: it did not serve
  bool roll_back_next = false;  ///< ordered while something else was under way
  bool cancel = false;          ///< the pull at hand is not wanted any more
  bool forget_next = false;     ///< nor is what it brings: it was for an earlier incarnation

  Phase phase = Phase::none;
  TransactionId transaction;
  std::uint32_t round = 0;
  Version staged;
  Digest128 staged_root;
  Errc code = Errc::internal;
  std::string problem;

  Work work;
  std::uint64_t works = 0;
};

/// Obeys. Events: orders, work done, the deadline of a promise, and the operator's word.
class ParticipantMachine {
 public:
  /// Begins paused. `incarnation` must be larger than that of any earlier process of the rank (make_epoch(), and
  /// make_epoch() of a larger one that is heard of), and no earlier process may live any more; `holds` is what its
  /// target already has.
  ParticipantMachine(std::uint32_t rank, std::uint64_t incarnation, VersionId holds, Digest128 subscription = {});

  const ParticipantState& state() const noexcept { return s_; }
  Report report() const;
  RankState rank_state() const noexcept;
  /// What it serves.
  std::optional<VersionId> serving() const;
  /// It has promised, and does not know the outcome.
  bool promised() const noexcept;

  /// version_conflict if the order is of another coordinator's log: it changes nothing, and resolve_by_pull is the way
  /// to join that. Orders to others and late ones are no errors; they change nothing.
  Status on_order(const Order& order);
  const Work& work() const noexcept { return s_.work; }
  /// The pull at hand may end early.
  bool cancelled() const noexcept { return s_.cancel; }
  void done(std::uint64_t serial, const WorkResult& result);
  /// The deadline of a promise has passed.
  void time_is_up();
  /// A later process of this rank has been heard of: it serves no more, and no order may reach it any more.
  void replaced();
  /// The operator's word: the promise is void, the rank goes on like a process that was started anew, with what its
  /// target holds, and does not serve before a coordinator says so. A pull that is under way is cancelled, and what it
  /// brings is dropped. Not while other work is under way (version_conflict), which does not wait for the trainer.
  Status resolve_by_pull(std::uint64_t incarnation);

 private:
  void stage(const Order& order);
  void prepare(const Order& order);
  void commit(const Order& order);
  void finish(const Order& order);
  void roll_back(const Order& order);
  void serve(const Order& order);
  void catch_up(const Order& order);
  void expel(const Order& order);
  void begin_rolling_back();
  void leave_transaction();
  void start(Work::Kind kind);
  void note(const WorkResult& result);
  bool same(const Order& order) const { return s_.transaction == order.transaction && s_.phase != Phase::none; }

  ParticipantState s_;
};

}  // namespace deltasync::commit
