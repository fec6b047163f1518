// The rank's side of coordinator_machine.hpp: what obeys, without sockets, threads or a clock. src/commit/participant
// runs it beside a receiver and an engine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "deltasync/result.hpp"
#include "format/commit_messages.hpp"

namespace deltasync::commit {

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
  /// The operator's word: the promise is void, the rank goes on like a process that was started again, with what its
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
