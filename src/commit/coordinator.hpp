// The coordinator's machine with its log, and the clock that ends what takes too long. Thread-safe; no socket.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "commit/commit.hpp"
#include "commit/coordinator_machine.hpp"
#include "commit/log_file.hpp"
#include "commit/points.hpp"

namespace deltasync::commit {

class CoordinatorCore {
 public:
  static Result<std::unique_ptr<CoordinatorCore>> open(const CoordinatorOptions& options, Points points);
  /// Ends the calls of update() and exchange() that are under way, with `cancelled`, and waits until they have.
  ~CoordinatorCore();
  CoordinatorCore(const CoordinatorCore&) = delete;
  CoordinatorCore& operator=(const CoordinatorCore&) = delete;

  /// See Coordinator.
  Result<Version> update(const Want& want, Deadline deadline);
  Result<Order> exchange(const Report& report, Deadline hold, const std::stop_token& stop);
  std::optional<Version> served() const;
  std::vector<std::optional<Report>> reports() const;

  std::uint64_t log() const;
  std::uint64_t term() const;
  /// The latest process of the rank that was heard of; 0: none.
  std::uint64_t incarnation(std::uint32_t rank) const;

 private:
  /// A call of update() and, once that is known, what became of its transaction.
  struct Update {
    std::optional<Result<Version>> outcome;
  };
  class Inside;

  CoordinatorCore(const CoordinatorOptions& options, Points points, std::unique_ptr<LogFile> log,
                  CoordinatorMachine machine);
  /// Makes durable what is pending, and so on until nothing is. The lock is held: a caller meanwhile waits for the
  /// disk, and could be told nothing before.
  Status settle();
  /// Why no call may wait any longer.
  std::optional<Error> over() const;
  void note_outcome();
  /// No more orders: nobody knows what the log has.
  Error give_up(Error why);
  void watch_clock(const std::stop_token& stop);
  Deadline stage_deadline() const;

  const std::chrono::milliseconds prepare_limit_;
  const std::chrono::milliseconds commit_limit_;
  const Points points_;

  mutable std::mutex mutex_;
  std::condition_variable_any changed_;
  std::unique_ptr<LogFile> log_;  // protected by mutex_, as all that follows
  CoordinatorMachine machine_;
  std::optional<Error> broken_;
  Update* update_ = nullptr;  ///< whose transaction is open, or has ended without its call having heard of it
  unsigned calls_ = 0;        ///< under way
  bool ending_ = false;
  Deadline staging_until_{Deadline::after({})};
  std::jthread clock_;  // last: it uses all of the above
};

}  // namespace deltasync::commit
