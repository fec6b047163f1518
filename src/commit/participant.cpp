#include "commit/participant.hpp"

#include <pthread.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/call_context.hpp"
#include "base/log.hpp"
#include "commit/hooks.hpp"
#include "commit/rank_link.hpp"
#include "format/tile_set.hpp"

namespace deltasync::commit {
namespace {

constexpr auto kAnswerLimit = std::chrono::seconds(10);  ///< the coordinator holds an answer for a second
constexpr auto kBusyPause = std::chrono::milliseconds(50);
constexpr auto kShortPause = std::chrono::milliseconds(5);  ///< after an answer that changed nothing
constexpr auto kRetryMin = std::chrono::milliseconds(20);
constexpr auto kRetryMax = std::chrono::seconds(1);
constexpr auto kWorkRetry = std::chrono::seconds(1);  ///< after a pull that nobody else will slow down
constexpr auto kSliceMax = std::chrono::minutes(1);

/// Work that may write what the engine reads.
bool writes(Work::Kind kind) {
  return kind == Work::Kind::pull || kind == Work::Kind::commit || kind == Work::Kind::catch_up;
}

/// How long the pull at hand may take. While an engine that is to resume has not, that comes in slices: between them
/// the engine is asked again, since a pull may wait for its version as long as its limit allows. Slices grow, so that
/// what has to be transferred comes through.
class PullTime {
 public:
  explicit PullTime(std::chrono::milliseconds limit) : limit_(limit) {}
  Deadline next(std::uint64_t serial, bool in_slices) {
    if (serial != serial_) {
      serial_ = serial;
      until_ = Deadline::after(limit_);
      slice_ = kWorkRetry;
    }
    if (!in_slices) return until_;
    return until_.earlier(
        Deadline::after(std::exchange(slice_, std::min<std::chrono::milliseconds>(2 * slice_, kSliceMax))));
  }
  bool over() const { return until_.passed(); }

 private:
  const std::chrono::milliseconds limit_;
  std::uint64_t serial_ = 0;
  Deadline until_ = Deadline::after({});
  std::chrono::milliseconds slice_{};
};

VersionId id_of(const std::optional<Version>& version) {
  return version ? version->id : VersionId();
}

}  // namespace

Result<std::unique_ptr<Participant>> Participant::start(ParticipantOptions options, Receiver& receiver,
                                                        Engine& engine) {
  DS_ASSIGN(auto made, ParticipantImpl::start(std::move(options), receiver, engine));
  return std::unique_ptr<Participant>(std::move(made));
}

Result<std::unique_ptr<ParticipantImpl>> ParticipantImpl::start(ParticipantOptions options, Receiver& receiver,
                                                                Engine& engine, Points points) {
  if (options.rank >= options.ranks || options.ranks > kRanksMax) {
    return Error(Errc::invalid_argument,
                 "rank " + std::to_string(options.rank) + " of " + std::to_string(options.ranks) + " ranks");
  }
  if (receiver.target() == nullptr) return Error(Errc::invalid_argument, "the receiver has no target yet");
  if (receiver.full_update_policy() == FullUpdatePolicy::in_place) {
    return Error(Errc::invalid_argument,
                 "the receiver makes full updates in place: that would destroy the version which the group serves");
  }
  if (!receiver.supports_rollback()) {
    return Error(Errc::unsupported,
                 "commits of the receiver's target are final: a group must be able to roll back to the version before");
  }
  DS_ASSIGN(const TileSet tiles, TileSet::of(*receiver.layout(), receiver.slices()));
  std::unique_ptr<RankLink> link;
  if (!options.exchange) {
    DS_ASSIGN(net::Endpoint where, net::parse_endpoint(options.coordinator));
    DS_ASSIGN(auto tls, net::Tls::client_if_wanted(options.tls));
    link = std::make_unique<RankLink>(options, std::move(where), std::move(tls));
  }
  std::unique_ptr<ParticipantImpl> made(
      new ParticipantImpl(std::move(options), receiver, tiles.digest(), engine, std::move(points)));
  made->link_ = std::move(link);
  DS_TRY(made->pause_engine().with_context("pausing the engine"));
  made->engine_runs_ = false;
  try {
    made->worker_ = std::jthread([p = made.get()](const std::stop_token& stop) { p->work_all(stop); });
    made->asker_ = std::jthread([p = made.get()](const std::stop_token& stop) { p->ask_all(stop); });
  } catch (const std::system_error& e) {
    return Error(Errc::no_space, "the rank's threads: " + e.code().message());
  }
  return made;
}

ParticipantImpl::ParticipantImpl(ParticipantOptions options, Receiver& receiver, const Digest128& tiles, Engine& engine,
                                 Points points)
    : options_(std::move(options)),
      points_(std::move(points)),
      receiver_(receiver),
      engine_(engine),
      machine_(options_.rank, make_epoch(), id_of(receiver.current()), tiles),
      held_(receiver.current()) {}

ParticipantImpl::~ParticipantImpl() {
  asker_.request_stop();
  worker_.request_stop();
  {
    const std::lock_guard lock(mutex_);
    pull_stop_.request_stop();
  }
}

// ---- what others ask -------------------------------------------------------------------------------------------

void ParticipantImpl::look_at_clock() const {
  if (!promise_until_ || !promise_until_->passed()) return;
  machine_.time_is_up();
  note_doubt("clock");
}

void ParticipantImpl::note_doubt(std::string_view by) const {
  const ParticipantState& s = machine_.state();
  const bool now = machine_.rank_state() == RankState::in_doubt;
  if (now == in_doubt_.has_value()) return;
  if (now) {
    log::warn("commit_in_doubt rank={} transaction={} phase={} version={}", options_.rank, to_string(s.transaction),
              to_string(s.phase), to_string(s.staged));
    in_doubt_ = s.transaction;
    return;
  }
  log::warn("commit_doubt_ended rank={} transaction={} by={}", options_.rank, to_string(*in_doubt_), by);
  in_doubt_.reset();
}

RankState ParticipantImpl::state() const {
  const std::lock_guard lock(mutex_);
  look_at_clock();
  return machine_.rank_state();
}

std::optional<Version> ParticipantImpl::serving() const {
  const std::lock_guard lock(mutex_);
  if (!machine_.serving()) return std::nullopt;
  return held_;
}

Report ParticipantImpl::report() const {
  const std::lock_guard lock(mutex_);
  look_at_clock();
  Report said = machine_.report();
  // Nothing may be written yet: a caller that asks for that would have to wait.
  if (!machine_.state().serving && engine_runs_ != false) said.busy = true;
  if (said.problem.empty() && engine_trouble_) {
    said.code = engine_trouble_->code();
    said.problem = engine_trouble_->message().substr(0, kProblemBytesMax);
  }
  return said;
}

std::optional<Error> ParticipantImpl::last_error() const {
  const std::lock_guard lock(mutex_);
  return trouble_;
}

Status ParticipantImpl::resolve_by_pull() {
  const std::lock_guard lock(mutex_);
  if (replaced_) return Error(Errc::version_conflict, "a later process of this rank has joined; end this one");
  DS_TRY(machine_.resolve_by_pull(make_epoch(machine_.state().incarnation)));
  note_doubt("resolve_by_pull");
  if (machine_.cancelled()) pull_stop_.request_stop();
  promise_until_.reset();
  promise_phase_ = Phase::none;
  changed_.notify_all();
  return {};
}

// ---- asking ----------------------------------------------------------------------------------------------------

void ParticipantImpl::ask_all(const std::stop_token& stop) {
  ::pthread_setname_np(::pthread_self(), "ds-commit-ask");
  std::chrono::milliseconds pause = kRetryMin;
  while (!stop.stop_requested()) {
    const Report said = report();
    at(points_, "report", to_string(said.phase));
    const Deadline deadline = Deadline::after(kAnswerLimit);
    auto answer = ask(said, deadline, stop);
    if (stop.stop_requested()) return;
    if (take(answer)) {
      pause = kRetryMin;
      wait_for_news(said.step, said.busy ? kBusyPause : kShortPause, stop);
    } else if (is_replaced()) {
      return;
    } else {
      CallContext(deadline, stop).pause(pause);
      pause = std::min<std::chrono::milliseconds>(2 * pause, kRetryMax);
    }
  }
}

Result<Order> ParticipantImpl::ask(const Report& said, Deadline deadline, const std::stop_token& stop) {
  if (!options_.exchange) return link_->exchange(said, deadline, stop);
  const Deadline hold = deadline.earlier(Deadline::after(kRetryMax));
  return call_hook("the exchange", [&] { return options_.exchange(said, hold, stop); });
}

bool ParticipantImpl::is_replaced() const {
  const std::lock_guard lock(mutex_);
  return replaced_;
}

bool ParticipantImpl::take(const Result<Order>& answer) {
  const std::lock_guard lock(mutex_);
  std::optional<Error> trouble;
  if (!answer) {
    trouble = answer.error();
    if (trouble->code() == Errc::version_conflict) meet_later(0);
  } else if (answer->log != 0 && answer->incarnation > machine_.state().incarnation) {
    trouble = Error(Errc::version_conflict, "the coordinator answers a later process of this rank");
    if (machine_.state().log == 0 || machine_.state().log == answer->log) meet_later(answer->incarnation);
  } else {
    if (auto obeyed = machine_.on_order(*answer); !obeyed) trouble = std::move(obeyed).error();
    note_doubt(to_string(answer->kind));
    if (machine_.cancelled()) pull_stop_.request_stop();
    if (!machine_.promised()) {
      promise_until_.reset();
      promise_phase_ = Phase::none;
    } else if (machine_.state().phase == Phase::committing && promise_phase_ != Phase::committing) {
      promise_until_ = Deadline::after(options_.decide_limit);
      promise_phase_ = Phase::committing;
    }
    at(points_, "ordered", to_string(answer->kind));
  }
  if (trouble && (!trouble_ || trouble_->message() != trouble->message())) {
    log::warn("commit_trouble rank={} error=\"{}\"", options_.rank, trouble->to_string());
  }
  trouble_ = std::move(trouble);
  changed_.notify_all();
  return !trouble_;
}

/// There is, or was, a process of this rank whose incarnation is larger.
void ParticipantImpl::meet_later(std::uint64_t latest) {
  if (machine_.state().log != 0) {
    replaced_ = true;
    machine_.replaced();
    note_doubt("a later process");
    pull_stop_.request_stop();
  } else if (latest > machine_.state().incarnation) {
    // That was an earlier one: every process begins at the lowest count. Nothing was promised under this name yet.
    static_cast<void>(machine_.resolve_by_pull(make_epoch(latest)));
  }
}

/// Until something has happened here, but not longer than `limit`.
void ParticipantImpl::wait_for_news(std::uint64_t step_before, std::chrono::milliseconds limit,
                                    const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, stop, limit, [&] { return machine_.state().step != step_before; });
}

// ---- working ---------------------------------------------------------------------------------------------------

void ParticipantImpl::work_all(const std::stop_token& stop) {
  ::pthread_setname_np(::pthread_self(), "ds-commit-work");
  PullTime pull_time(options_.pull_limit);
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    const bool settled = settle_engine(lock);
    if (stop.stop_requested()) return;  // before there is a pull that nobody would stop
    const Work work = machine_.work();
    const bool may_step = !settled && !machine_.state().serving;
    if (work.kind == Work::Kind::none || (may_step && writes(work.kind))) {
      const auto seen = machine_.state().step;
      const auto limit = settled ? std::chrono::milliseconds(std::chrono::hours(1)) : kWorkRetry;
      changed_.wait_for(lock, stop, limit, [&] { return machine_.state().step != seen; });
      continue;
    }
    pull_stop_ = std::stop_source();
    if (machine_.cancelled()) pull_stop_.request_stop();
    const std::stop_token pull_stop = pull_stop_.get_token();
    if (work.kind == Work::Kind::pause) engine_runs_.reset();
    const bool in_slices = !settled && work.kind == Work::Kind::pull;
    const Deadline pull_until = pull_time.next(work.serial, in_slices);
    lock.unlock();
    static constexpr const char* kNames[] = {"none", "pull", "pause", "commit", "roll_back", "catch_up", "forget"};
    const char* const name = kNames[static_cast<int>(work.kind)];
    at(points_, "work", name);
    const WorkResult result = run(work, pull_until, pull_stop);
    at(points_, "worked", name);
    if (in_slices && result.error && result.error->code() == Errc::timed_out && pull_until.passed() &&
        !pull_time.over()) {
      lock.lock();
      continue;  // the same work, after the engine
    }
    if (result.error && !stop.stop_requested()) {
      log::warn("commit_work_failed rank={} work={} error=\"{}\"", options_.rank, name, result.error->to_string());
      // Whatever is ordered meanwhile ends this: a new order to pull most of all.
      if (work.kind == Work::Kind::catch_up) CallContext(Deadline::after(kWorkRetry), pull_stop).pause(kWorkRetry);
    }
    std::optional<Version> held = receiver_.current();
    lock.lock();
    held_ = std::move(held);
    if (work.kind == Work::Kind::pause && !result.error) engine_runs_ = false;
    machine_.done(work.serial, result);
    note_doubt(to_string(machine_.state().phase));
    if (machine_.state().phase == Phase::prepared && work.kind == Work::Kind::pause) {
      promise_until_ = Deadline::after(options_.decide_limit);
      promise_phase_ = Phase::prepared;
    }
    if (!machine_.promised()) promise_until_.reset();
    changed_.notify_all();
  }
}

/// A rank serves from the machine's word on; its engine follows. It is paused by the work that has to know how that
/// went, or here, where the rank stops for another reason.
bool ParticipantImpl::settle_engine(std::unique_lock<std::mutex>& lock) {
  for (;;) {
    const bool wanted = machine_.state().serving;  // may have changed while the engine was asked
    if (engine_runs_ == wanted) engine_trouble_.reset();
    if (engine_runs_ == wanted || machine_.work().kind == Work::Kind::pause) return true;
    const std::optional<Version> version = held_;
    engine_runs_.reset();
    lock.unlock();
    const Status done = wanted ? resume_engine(*version) : pause_engine();
    lock.lock();
    if (!done) {
      engine_trouble_ = done.error();
      log::error("commit_engine_failed rank={} {}=1 error=\"{}\"", options_.rank, wanted ? "resume" : "pause",
                 done.error().to_string());
      return false;
    }
    engine_runs_ = wanted;
  }
}

Status ParticipantImpl::pause_engine() {
  return call_hook("the engine's pause", [&] { return engine_.pause(Deadline::after(options_.pause_limit)); });
}

Status ParticipantImpl::resume_engine(const Version& version) {
  return call_hook("the engine's resume",
                   [&] { return engine_.resume(version, Deadline::after(options_.resume_limit)); });
}

WorkResult ParticipantImpl::run(const Work& work, Deadline pull_until, const std::stop_token& stop) {
  WorkResult result;
  Status done;
  switch (work.kind) {
    case Work::Kind::none: break;
    case Work::Kind::pull: done = pull(work, result, CallContext(pull_until, stop)); break;
    case Work::Kind::pause: done = pause_engine(); break;
    case Work::Kind::commit: done = commit_staged(); break;
    case Work::Kind::roll_back: done = roll_back(); break;
    case Work::Kind::catch_up:
      done = pull(work, result, CallContext(pull_until, stop));
      if (done && stop.stop_requested()) done = cancelled_while("catching up");
      if (done) done = commit_staged();
      staged_.reset();
      break;
    case Work::Kind::forget: staged_.reset(); break;
  }
  if (!done) result.error = std::move(done).error();
  result.holds = id_of(receiver_.current());
  return result;
}

Status ParticipantImpl::pull(const Work& work, WorkResult& result, const CallContext& until) {
  staged_.reset();
  Want wanted = work.want;
  const VersionId exact = work.exact;
  if (exact.valid()) {
    wanted.label.clear();
    wanted.number = exact.number;
    wanted.epoch = exact.epoch;
  }
  DS_ASSIGN(staged_, receiver_.pull(wanted, until));
  const PullReport& report = staged_->report();
  if (exact.valid() && report.version.id != exact) {
    Error wrong(Errc::gone, "asked for " + to_string(exact) + ", the agent has " + to_string(report.version));
    staged_.reset();
    return wrong;
  }
  result.staged = report.version;
  result.root = report.root;
  return {};
}

Status ParticipantImpl::commit_staged() {
  if (staged_ == nullptr) return Error(Errc::internal, "nothing is staged");
  return staged_->commit(Deadline::after(options_.commit_limit));
}

Status ParticipantImpl::roll_back() {
  if (staged_ == nullptr) return {};
  Status done = staged_->rollback();
  staged_.reset();
  return done;
}

}  // namespace deltasync::commit
