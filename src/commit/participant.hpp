// One rank: the machine between its coordinator (one thread asks) and its receiver and engine (one thread works).
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>

#include "base/call_context.hpp"
#include "commit/commit.hpp"
#include "commit/participant_machine.hpp"
#include "commit/points.hpp"

namespace deltasync::commit {

class RankLink;

class ParticipantImpl final : public Participant {
 public:
  static Result<std::unique_ptr<ParticipantImpl>> start(ParticipantOptions options, Receiver& receiver, Engine& engine,
                                                        Points points = {});
  ~ParticipantImpl() override;

  RankState state() const override;
  std::optional<Version> serving() const override;
  Report report() const override;
  std::optional<Error> last_error() const override;
  Status resolve_by_pull() override;

 private:
  ParticipantImpl(ParticipantOptions options, Receiver& receiver, const Digest128& tiles, Engine& engine,
                  Points points);

  // the asking thread
  void ask_all(const std::stop_token& stop);
  Result<Order> ask(const Report& said, Deadline deadline, const std::stop_token& stop);
  /// False if there was no answer, or one that the rank must not obey.
  bool take(const Result<Order>& answer);
  void meet_later(std::uint64_t latest);
  bool is_replaced() const;
  void wait_for_news(std::uint64_t step_before, std::chrono::milliseconds limit, const std::stop_token& stop);

  // the working thread
  void work_all(const std::stop_token& stop);
  /// Engine and machine agree on whether it serves; false: they do not yet. The engine may then step with its weights
  /// although the rank does not serve, and nothing may be written.
  bool settle_engine(std::unique_lock<std::mutex>& lock);
  Status pause_engine();
  Status resume_engine(const Version& version);
  WorkResult run(const Work& work, Deadline pull_until, const std::stop_token& stop);
  Status pull(const Work& work, WorkResult& result, const CallContext& until);
  Status commit_staged();
  Status roll_back();

  // The lock is held.
  void look_at_clock() const;
  /// Says once that the rank is in doubt, and once that it is not any more, and by what.
  void note_doubt(std::string_view by) const;

  const ParticipantOptions options_;
  const Points points_;
  Receiver& receiver_;                    // used by the working thread
  Engine& engine_;                        // likewise
  std::unique_ptr<StagedUpdate> staged_;  // likewise
  std::unique_ptr<RankLink> link_;        // used by the asking thread; none if options_.exchange is there

  mutable std::mutex mutex_;
  mutable std::condition_variable_any changed_;
  // protected by mutex_, as all that follows
  mutable ParticipantMachine machine_;             ///< in_doubt is a matter of looking
  mutable std::optional<Deadline> promise_until_;  ///< of the promise that is open
  Phase promise_phase_ = Phase::none;              ///< that promise_until_ is for
  std::optional<Version> held_;                    ///< what the target holds, with its label
  std::optional<bool> engine_runs_;                ///< nothing: it is being asked, or the last call failed half-way
  std::optional<Error> engine_trouble_;            ///< why the engine does not serve what the rank may serve
  std::optional<Error> trouble_;
  mutable std::optional<TransactionId> in_doubt_;  ///< that has been said
  bool replaced_ = false;                          ///< by a later process of the rank: nobody is asked any more
  std::stop_source pull_stop_;

  std::jthread worker_;  // last: they use all of the above
  std::jthread asker_;
};

}  // namespace deltasync::commit
