#include "commit/coordinator.hpp"

#include <pthread.h>

#include <system_error>
#include <utility>

#include "base/log.hpp"
#include "net/auth.hpp"

namespace deltasync::commit {
namespace {

using Stage = CoordinatorState::Stage;

constexpr auto kClockIdle = std::chrono::hours(1);

/// For a process that was replaced: it hears of the later one, and nothing of what that is to do.
Order to_later(const Order& order) {
  Order o;
  o.log = order.log;
  o.term = order.term;
  o.step = order.step;
  o.incarnation = order.incarnation;
  return o;
}

}  // namespace

/// A call that waits here: the destructor waits for it. The lock is held at both ends.
class CoordinatorCore::Inside {
 public:
  explicit Inside(CoordinatorCore& core) : core_(core) { ++core_.calls_; }
  ~Inside() {
    --core_.calls_;
    if (core_.ending_) core_.changed_.notify_all();
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  CoordinatorCore& core_;
};

Result<std::unique_ptr<CoordinatorCore>> CoordinatorCore::open(const CoordinatorOptions& options, Points points) {
  if (options.log.empty()) return Error(Errc::invalid_argument, "a coordinator needs a log");
  DS_ASSIGN(std::unique_ptr<LogFile> file, LogFile::open(options.log));
  if (file->torn_bytes() > 0) {
    log::warn("commit_log_torn file={} bytes={}", options.log.string(), file->torn_bytes());
  }
  auto machine = CoordinatorMachine::recover(options.ranks, file->records(), net::make_random_id());
  if (!machine) return std::move(machine).error().with_context(options.log.string());
  try {
    std::unique_ptr<CoordinatorCore> core(
        new CoordinatorCore(options, std::move(points), std::move(file), *std::move(machine)));
    const std::lock_guard lock(core->mutex_);
    DS_TRY(core->settle());
    return core;
  } catch (const std::system_error& e) {
    return Error(Errc::no_space, "the coordinator's clock: " + e.code().message());
  }
}

CoordinatorCore::CoordinatorCore(const CoordinatorOptions& options, Points points, std::unique_ptr<LogFile> file,
                                 CoordinatorMachine machine)
    : prepare_limit_(options.prepare_limit),
      commit_limit_(options.commit_limit),
      points_(std::move(points)),
      log_(std::move(file)),
      machine_(std::move(machine)),
      clock_([this](const std::stop_token& stop) { watch_clock(stop); }) {}

CoordinatorCore::~CoordinatorCore() {
  std::unique_lock lock(mutex_);
  ending_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return calls_ == 0; });
}

std::optional<Error> CoordinatorCore::over() const {
  if (ending_) return Error(Errc::cancelled, "the coordinator ends; what is open is ended by the next one of its log");
  return broken_;
}

Status CoordinatorCore::settle() {
  if (broken_) return *broken_;
  while (machine_.pending()) {
    const Record record = *machine_.pending();
    at(points_, "log", to_string(record.kind));
    if (auto written = log_->append(record); !written) return give_up(std::move(written).error());
    at(points_, "logged", to_string(record.kind));
    log::info("commit_decided kind={} transaction={} version={}", to_string(record.kind), to_string(record.transaction),
              to_string(record.version));
    machine_.logged();
  }
  changed_.notify_all();
  return {};
}

Error CoordinatorCore::give_up(Error why) {
  broken_ = std::move(why).with_context("the coordinator gives no more orders");
  log::error("commit_log_failed error=\"{}\"", broken_->to_string());
  changed_.notify_all();
  return *broken_;
}

Result<Version> CoordinatorCore::update(const Want& want, Deadline deadline) {
  std::unique_lock lock(mutex_);
  const Inside inside(*this);
  if (auto why = over()) return *std::move(why);
  note_outcome();  // the call before may not have woken up yet
  DS_TRY(machine_.begin(want));
  Update mine;
  update_ = &mine;
  staging_until_ = deadline;
  changed_.notify_all();
  // No deadline here: the clock ends every stage at its own.
  changed_.wait(lock, [&] {
    note_outcome();
    return mine.outcome || over();
  });
  if (mine.outcome) return *std::move(mine.outcome);
  update_ = nullptr;
  return *over();
}

/// The transaction that the machine speaks of is that call's: no other one begins before this has been looked at.
void CoordinatorCore::note_outcome() {
  if (update_ == nullptr || !machine_.idle()) return;
  const CoordinatorState& s = machine_.state();
  const bool finished = s.last == s.transaction && s.outcome == CoordinatorState::Outcome::finished;
  if (s.nothing_new || finished) {
    update_->outcome.emplace(*s.group);
  } else {
    update_->outcome.emplace(
        Error(s.problem.code(), s.problem.message()).with_context("transaction " + to_string(s.transaction)));
  }
  update_ = nullptr;
}

Result<Order> CoordinatorCore::exchange(const Report& report, Deadline hold, const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  const Inside inside(*this);
  if (auto why = over()) return *std::move(why);
  const std::uint64_t before = machine_.state().step;
  if (auto heard = machine_.on_report(report); !heard) {
    if (heard.error().code() != Errc::version_conflict) return std::move(heard).error();
    return to_later(machine_.order(report.rank));
  }
  if (machine_.pending()) {
    DS_TRY(settle());
  } else if (machine_.state().step != before) {
    changed_.notify_all();
  }
  for (;;) {
    const Order order = machine_.order(report.rank);
    if (order.incarnation != report.incarnation) return to_later(order);
    if (order.kind != OrderKind::none || report.busy || hold.passed() || stop.stop_requested()) {
      if (order.kind == OrderKind::none) return order;
      // Somebody else's log may say something else by now.
      if (auto ours = log_->still_ours(); !ours) return give_up(std::move(ours).error());
      at(points_, "order", to_string(order.kind));
      return order;
    }
    const std::uint64_t step = machine_.state().step;
    changed_.wait_until(lock, stop, hold.at(), [&] { return over() || machine_.state().step != step; });
    if (auto why = over()) return *std::move(why);
  }
}

Deadline CoordinatorCore::stage_deadline() const {
  switch (machine_.state().stage) {
    case Stage::staging: return staging_until_;
    case Stage::preparing: return Deadline::after(prepare_limit_);
    case Stage::committing: return Deadline::after(commit_limit_);
    case Stage::idle: break;
  }
  return Deadline::after(kClockIdle);
}

/// A stage's limit begins when the clock sees the stage.
void CoordinatorCore::watch_clock(const std::stop_token& stop) {
  ::pthread_setname_np(::pthread_self(), "ds-commit-clock");
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    const std::pair seen(machine_.state().stage, machine_.state().transaction);
    const Deadline deadline = stage_deadline();
    const bool moved = changed_.wait_until(lock, stop, deadline.at(), [&] {
      return std::pair(machine_.state().stage, machine_.state().transaction) != seen;
    });
    if (broken_) return;  // nothing can be decided any more
    if (moved || stop.stop_requested() || seen.first == Stage::idle) continue;
    machine_.time_is_up();
    static_cast<void>(settle());  // what is broken is told to the next caller
  }
}

std::optional<Version> CoordinatorCore::served() const {
  const std::lock_guard lock(mutex_);
  return machine_.state().group;
}

std::vector<std::optional<Report>> CoordinatorCore::reports() const {
  const std::lock_guard lock(mutex_);
  return machine_.state().ranks;
}

std::uint64_t CoordinatorCore::log() const {
  const std::lock_guard lock(mutex_);
  return machine_.state().log;
}

std::uint64_t CoordinatorCore::term() const {
  const std::lock_guard lock(mutex_);
  return machine_.state().term;
}

std::uint64_t CoordinatorCore::incarnation(std::uint32_t rank) const {
  const std::lock_guard lock(mutex_);
  const auto& ranks = machine_.state().ranks;
  return rank < ranks.size() && ranks[rank] ? ranks[rank]->incarnation : 0;
}

}  // namespace deltasync::commit
