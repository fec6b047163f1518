#include "agent/trainer/trainer_state.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>

#include "base/log.hpp"
#include "format/coverage.hpp"
#include "net/coroutine.hpp"

namespace deltasync::agent {

namespace asio = boost::asio;
using asio::awaitable;
using net::kAsTuple;

namespace {

Error died(const Trainer& trainer) {
  return {Errc::peer_died, trainer.who() + " died"};
}

}  // namespace

Result<TrainerPtr> Trainer::make(TrainerStrand& strand, ProcessWatch watch) {
  UniqueFd pidfd(::fcntl(watch.fd(), F_DUPFD_CLOEXEC, 0));
  if (!pidfd) return Error::from_errno("watch " + to_string(watch.id()), errno);
  return std::make_shared<Trainer>(strand, std::move(watch), std::move(pidfd));
}

TrainerState::TrainerState(asio::io_context& io, TrainerHooks& h, TrainerServerOptions o)
    : hooks(h), options(std::move(o)), strand(asio::make_strand(io)) {}

awaitable<void> TrainerState::change(Deadline deadline) {
  asio::steady_timer timer(strand);
  timer.expires_at(deadline.at());
  const auto here = waiters_.insert(waiters_.end(), &timer);
  co_await timer.async_wait(kAsTuple);
  waiters_.erase(here);
}

void TrainerState::wake_all() {
  for (auto* timer : waiters_) timer->cancel();
}

// ---- slots -------------------------------------------------------------------------------------------------------

TrainerPtr TrainerState::find(std::uint32_t slot) const {
  const auto found = trainers_.find(slot);
  return found == trainers_.end() ? nullptr : found->second;
}

Status TrainerState::may_attach(const wire::TrainerHello& hello, const ProcessId& peer) const {
  for (const auto& [slot, t] : trainers_) {
    if (slot == hello.writer_index && (t->watch.id() != peer || t->connected())) {
      return Error(Errc::already_exists, t->who() + " is attached");
    }
    if (slot != hello.writer_index && t->writers != hello.writers) {
      return Error(Errc::already_exists, t->who() + " is attached as one of " + std::to_string(t->writers) +
                                             " writers, this one says " + std::to_string(hello.writers));
    }
  }
  return {};
}

bool TrainerState::is_connected(const ProcessId& peer) const {
  return std::any_of(trainers_.begin(), trainers_.end(),
                     [&](const auto& entry) { return entry.second->watch.id() == peer && entry.second->connected(); });
}

Result<TrainerPtr> TrainerState::enter(std::uint32_t slot, std::uint64_t generation, ProcessWatch peer) {
  DS_ASSIGN(TrainerPtr made, Trainer::make(strand, std::move(peer)));
  if (const TrainerPtr before = find(slot)) before->death.cancel();
  made->slot = slot;
  made->generation = generation;
  trainers_[slot] = made;
  spawn([self = shared_from_this(), made]() -> awaitable<void> { co_await self->watch_death(made); });
  return made;
}

void TrainerState::connect(const TrainerPtr& trainer, std::uint64_t connection, std::function<bool()> left) {
  WriterPlanBoard* board = board_of(*trainer);
  if (board != nullptr && trainer->connection != 0 && !board->accepted(trainer->slot)) {
    static_cast<void>(board->give_up(trainer->slot));
  }
  trainer->connection = connection;
  trainer->left = std::move(left);
  wake_all();
}

void TrainerState::connection_closed(std::uint64_t connection) {
  for (const auto& [slot, trainer] : trainers_) {
    if (trainer->connection != connection) continue;
    trainer->connection = 0;
    trainer->left = nullptr;
  }
  publish();
}

awaitable<void> TrainerState::drop(TrainerPtr trainer, Error why) {
  if (stopped || find(trainer->slot) != trainer) co_return;
  log::info("trainer_gone slot={} pid={} reason=\"{}\"", trainer->slot, trainer->watch.id().pid, why.message());
  trainers_.erase(trainer->slot);
  trainer->death.cancel();
  if (WriterPlanBoard* board = board_of(*trainer)) board->remove(trainer->slot, why);
  publish();
  wake_all();
  co_await tell_gone(trainer->slot, trainer->generation, trainer->grant);
}

awaitable<void> TrainerState::give_back(std::uint32_t slot, std::uint64_t generation, std::uint64_t grant,
                                        ProcessId process) {
  // Granted once more to a process whose record is of another connection: that one's goodbye will have to name it.
  if (const TrainerPtr t = find(slot); t && t->generation == generation && t->watch.id() == process) {
    t->grant = std::max(t->grant, grant);
    co_return;
  }
  co_await tell_gone(slot, generation, grant);
}

awaitable<void> TrainerState::tell_gone(std::uint32_t slot, std::uint64_t generation, std::uint64_t grant) {
  const auto tell = [&]() -> Status {
    hooks.writer_gone(generation, slot, grant);
    return {};
  };
  const Status told = co_await setup.run(tell);
  if (!told && !stopped) log::error("trainer_gone slot={} error=\"{}\"", slot, told.error().to_string());
}

awaitable<void> TrainerState::watch_death(TrainerPtr trainer) {
  while (!stopped && !trainer->watch.dead()) {
    const auto [ec] = co_await trainer->death.async_wait(asio::posix::stream_descriptor::wait_read, kAsTuple);
    if (ec) co_return;  // said goodbye, or stop()
  }
  Error why = died(*trainer);
  co_await drop(trainer, std::move(why));
}

awaitable<void> TrainerState::drop_dead() {
  std::vector<TrainerPtr> dead;
  for (const auto& [slot, t] : trainers_) {
    if (t->watch.dead()) dead.push_back(t);
  }
  for (const auto& t : dead) {
    Error why = died(*t);
    co_await drop(t, std::move(why));
  }
}

// ---- plans -------------------------------------------------------------------------------------------------------

void TrainerState::use_board(std::uint64_t generation, const LayoutPtr& layout) {
  if (board_ && board_->generation == generation) return;
  if (board_) setup.discard(std::move(board_));
  board_.emplace(Board{generation, layout, {}});
}

WriterPlanBoard* TrainerState::board_of(const Trainer& trainer) {
  return board_ && board_->generation == trainer.generation ? &board_->plans : nullptr;
}

void TrainerState::judge() {
  if (judging_) return;
  spawn([self = shared_from_this()]() -> awaitable<void> { co_await self->judge_all(); });
}

awaitable<void> TrainerState::judge_all() {
  if (judging_) co_return;
  judging_ = true;
  const struct AtEnd {
    bool& judging;
    ~AtEnd() { judging = false; }
  } at_end{judging_};
  while (board_ && !stopped) {
    const std::optional<WriterPlanBoard::Trial> trial = board_->plans.next_trial();
    if (!trial) break;
    const std::uint64_t generation = board_->generation;
    const auto check = [this, &trial, layout = board_->layout]() -> Result<Status> {
      if (options.before_check) options.before_check();
      std::vector<TensorSlice> all;
      for (const WriterPlanBoard::WriterPlan& plan : trial->plans) all.insert(all.end(), plan->begin(), plan->end());
      return check_coverage(*layout, all);
    };
    Result<Status> verdict = Error(Errc::internal, "the plans could not be checked");
    try {
      if (options.before_trial) options.before_trial();
      verdict = co_await setup.run(check);
    } catch (const std::exception& e) {  // a trial that never ended would be the board's last
      verdict = Error(Errc::internal, e.what());
    }
    if (!board_ || board_->generation != generation) continue;
    if (verdict) {
      board_->plans.conclude(*trial, *verdict);
    } else {
      board_->plans.fail(*trial, verdict.error());
    }
    wake_all();
    publish();
  }
}

// ---- for others --------------------------------------------------------------------------------------------------

void TrainerState::publish() {
  std::vector<TrainerStatus> list;
  for (const auto& [slot, t] : trainers_) {
    const WriterPlanBoard* board = board_of(*t);
    list.push_back({slot, t->writers, t->generation, t->watch.id().pid, t->name, t->connection != 0,
                    board != nullptr && board->accepted(slot), board != nullptr && board->waiting(slot)});
  }
  const std::lock_guard lock(status_mutex_);
  published_ = std::move(list);
}

std::vector<TrainerStatus> TrainerState::status() const {
  const std::lock_guard lock(status_mutex_);
  return published_;
}

void TrainerState::stop() {
  for (const auto& [slot, trainer] : trainers_) trainer->death.cancel();
  wake_all();
}

}  // namespace deltasync::agent
