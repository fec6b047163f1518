// What the conversations with trainers share: who has which slot, the board of plans, and the thread for what takes
// long. Used on the strand, unless said otherwise. Invariants, asserted where they hold:
//   - a slot has at most one record, and a record's process is not known to be dead;
//   - a record goes away only by a goodbye or by the proof of death, never by a closed connection;
//   - no hook is called once the server is destroyed.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agent/trainer/trainer_plans.hpp"
#include "agent/trainer/trainer_server.hpp"
#include "base/fd.hpp"
#include "net/log_exception.hpp"
#include "net/work_thread.hpp"

namespace deltasync::agent {

using TrainerStrand = boost::asio::strand<boost::asio::io_context::executor_type>;

/// A writer process that holds a slot.
struct Trainer {
  Trainer(TrainerStrand& strand, ProcessWatch w, UniqueFd pidfd) : watch(std::move(w)), death(strand, pidfd.get()) {
    static_cast<void>(pidfd.release());  // the descriptor's now
  }
  static Result<std::shared_ptr<Trainer>> make(TrainerStrand& strand, ProcessWatch watch);

  std::uint32_t slot = 0;
  std::uint32_t writers = 0;
  std::uint64_t generation = 0;
  std::uint64_t grant = 0;  ///< the last one of the slot that this process got
  std::string name;
  std::uint64_t connection = 0;  ///< 0: the process lives, its connection does not
  std::function<bool()> left;    ///< whether the peer closed that connection; callable while it is not 0
  ProcessWatch watch;
  boost::asio::posix::stream_descriptor death;  ///< a pidfd: readable when dead

  /// Whether the process still has the other end: a connection that it abandoned must not keep it from attaching again.
  bool connected() const { return connection != 0 && !left(); }
  std::string who() const { return "writer " + std::to_string(slot) + " (" + to_string(watch.id()) + ")"; }
};
using TrainerPtr = std::shared_ptr<Trainer>;  // shared by the table and by the coroutine that awaits its death

class TrainerState : public std::enable_shared_from_this<TrainerState> {
 public:
  /// Throws boost::system::system_error where no thread is to be had.
  TrainerState(boost::asio::io_context& io, TrainerHooks& hooks, TrainerServerOptions options);

  TrainerHooks& hooks;
  const TrainerServerOptions options;
  TrainerStrand strand;
  std::atomic<bool> stopped{false};  ///< set on the strand
  /// Decodes what trainers bring, checks plans, calls the hooks that may block. Its queue is bounded by the connections
  /// and the slots: each has one work there at a time.
  net::WorkThread setup{"trainer-setup"};

  template <class Work>
  void spawn(Work&& work) {
    boost::asio::co_spawn(strand, std::forward<Work>(work), net::log_exception("trainer_server"));
  }

  // ---- waiting ------------------------------------------------------------------------------------------------
  /// Until something changed, or the deadline. Wakes may be spurious: look again.
  boost::asio::awaitable<void> change(Deadline deadline);
  void wake_all();

  // ---- slots --------------------------------------------------------------------------------------------------
  TrainerPtr find(std::uint32_t slot) const;
  /// Whether this process may have that slot, as far as the records tell.
  Status may_attach(const wire::TrainerHello& hello, const ProcessId& peer) const;
  bool is_connected(const ProcessId& peer) const;
  /// That connection is the slot's from now on. An earlier one of the same process is ended, and what it waits for is
  /// dropped.
  void connect(const TrainerPtr& trainer, std::uint64_t connection, std::function<bool()> left);
  /// A record of its own for a slot of `generation`, in place of the one that is there.
  Result<TrainerPtr> enter(std::uint32_t slot, std::uint64_t generation, ProcessWatch peer);
  /// The slots stay with their processes: a closed connection proves nothing.
  void connection_closed(std::uint64_t connection);
  boost::asio::awaitable<void> drop(TrainerPtr trainer, Error why);
  /// A process was granted a slot of `generation`, but no record was made for it.
  boost::asio::awaitable<void> give_back(std::uint32_t slot, std::uint64_t generation, std::uint64_t grant,
                                         ProcessId process);
  /// Drops writers whose process is proved dead, even before the event of their pidfd (a trainer may restart at once).
  boost::asio::awaitable<void> drop_dead();

  // ---- plans --------------------------------------------------------------------------------------------------
  /// Plans are of that generation from now on.
  void use_board(std::uint64_t generation, const LayoutPtr& layout);
  /// Null if the trainer's layout was replaced.
  WriterPlanBoard* board_of(const Trainer& trainer);
  /// Starts making the trials that are due on the setup thread, unless that is under way.
  void judge();

  /// Makes what changed visible to status().
  void publish();
  /// Any thread.
  std::vector<TrainerStatus> status() const;
  void stop();

 private:
  struct Board {
    std::uint64_t generation = 0;
    LayoutPtr layout;
    WriterPlanBoard plans;
  };
  boost::asio::awaitable<void> watch_death(TrainerPtr trainer);
  boost::asio::awaitable<void> tell_gone(std::uint32_t slot, std::uint64_t generation, std::uint64_t grant);
  boost::asio::awaitable<void> judge_all();

  std::map<std::uint32_t, TrainerPtr> trainers_;  // by slot
  std::list<boost::asio::steady_timer*> waiters_;
  std::optional<Board> board_;
  bool judging_ = false;

  mutable std::mutex status_mutex_;
  std::vector<TrainerStatus> published_;  // protected by status_mutex_
};

}  // namespace deltasync::agent
