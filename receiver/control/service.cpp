#include "receiver/control/service.hpp"

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/log.hpp"

namespace deltasync::control {
namespace {

/// For putting admission right after a call whose deadline has passed.
constexpr auto kEndLimit = std::chrono::seconds(30);
/// How often a call that waits looks whether it shall stop.
constexpr auto kLook = std::chrono::milliseconds(100);

/// Counts a call, from its coming to its end.
struct Waiting {
  explicit Waiting(std::atomic<int>& c) : count(c), before(c.fetch_add(1)) {}
  ~Waiting() { count.fetch_sub(1); }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  std::atomic<int>& count;
  const int before;
};

/// nullopt: it is none.
std::optional<std::uint64_t> number_of(std::string_view text) {
  std::uint64_t number = 0;
  const auto [stopped, failed] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (text.empty() || failed != std::errc() || stopped != text.data() + text.size()) return std::nullopt;
  return number;
}

bool is_not_found(const Status& done) {
  return !done && done.error().code() == Errc::not_found;
}

EngineState state_at_start(bool has_weights) {
  EngineState state;
  state.weights_whole = has_weights;
  if (has_weights) return state;
  state.stopped = true;
  state.paused_by = PausedBy::itself;
  return state;
}

}  // namespace

Service::Service(RolloutEngine& engine, EngineWeights& weights, std::chrono::nanoseconds call_limit)
    : engine_(engine),
      weights_(weights),
      call_limit_(call_limit),
      machine_(state_at_start(weights.current().has_value())),
      state_(machine_.state()) {}

Status Service::call(Call call, const UpdateRequest& request, const std::string& label,
                     std::optional<std::chrono::nanoseconds> limit) {
  const Deadline deadline = Deadline::after(std::min(limit.value_or(call_limit_), call_limit_));
  const Waiting waiting(waiting_);
  if (waiting.before >= kWaitingMax) return Error(Errc::timed_out, busy_with("as many calls as may wait do"));
  std::unique_lock turn(calls_, std::defer_lock);
  while (!turn.try_lock_until(std::min(deadline.at(), Deadline::after(kLook).at()))) {
    if (stop_.stop_requested()) return Error(Errc::cancelled, "the control service ends");
    if (deadline.passed()) return Error(Errc::timed_out, busy_with("its deadline has passed"));
  }
  if (stop_.stop_requested()) return Error(Errc::cancelled, "the control service ends");
  call.stages_in_place = weights_.stages_in_place();
  machine_.observe(weights_.current().has_value());
  DS_TRY(run(call, request, deadline));
  return label.empty() ? Status() : rename(label);
}

Status Service::check() {
  const Standing now = standing();
  if (now.version || now.engine.still()) return {};
  return call({.kind = Call::Kind::check});
}

Status Service::run(const Call& call, const UpdateRequest& request, Deadline deadline) {
  if (const std::string why = machine_.begin(call); !why.empty()) return Error(Errc::version_conflict, why);
  note(std::string(to_string(call.kind)));
  Errc code = Errc::internal;
  while (machine_.step().kind != Step::Kind::none) {
    const Step step = machine_.step();
    const Deadline limit =
        machine_.ending() ? Deadline(std::max(deadline.at(), Deadline::after(kEndLimit).at())) : deadline;
    CallOptions options{.deadline = limit.at(), .stop = stop_.get_token()};
    if (machine_.ending()) options.stop = {};
    Status done;
    if (!machine_.ending() && stop_.stop_requested()) {
      done = Error(Errc::cancelled, "the control service ends");
    } else if (limit.passed()) {
      done = Error(Errc::timed_out, "the call's deadline has passed");
    } else {
      done = carry_out(step, request, options);
    }
    const bool stays_void = step.kind == Step::Kind::fill && call.may_stay_void && is_not_found(done);
    if (done || stays_void) {
      machine_.succeeded(done.ok());
    } else {
      if (machine_.error().empty()) code = done.error().code();
      log::warn("control_step_failed call={} step={} error=\"{}\"", to_string(call.kind), to_string(step.kind),
                done.error().to_string());
      const bool had = machine_.state().weights_whole;
      machine_.failed(done.error().message(), had && !weights_.current() ? Weights::void_weights : Weights::as_before);
    }
    note(std::string(to_string(call.kind)));
  }
  note("");
  if (machine_.error().empty()) return {};
  std::string left = machine_.state().weights_whole ? "" : "; the weights are those of no version now";
  if (!machine_.state().serves()) left += "; the engine is paused";
  return Error(code, machine_.error() + left);
}

/// Where nothing can come back the newest version is waited for, unless the call goes on without.
Status Service::fill(const CallOptions& call) {
  Status filled = weights_.fill(call);
  if (!is_not_found(filled) || machine_.call().may_stay_void) return filled;
  DS_TRY(weights_.stage({}, call));
  return weights_.commit(call);
}

/// What a hook throws fails its step: the call goes on to its end.
Status Service::carry_out(const Step& step, const UpdateRequest& request, const CallOptions& call) {
  try {
    return do_step(step, request, call);
  } catch (const std::exception& e) {
    return Error(Errc::internal, e.what());
  }
}

Status Service::do_step(const Step& step, const UpdateRequest& request, const CallOptions& call) {
  switch (step.kind) {
    case Step::Kind::none: return {};
    case Step::Kind::stop_admission: return engine_.stop_admission();
    case Step::Kind::resume_admission: return engine_.resume_admission();
    case Step::Kind::abort: DS_TRY(engine_.abort({})); return {};
    case Step::Kind::wait_idle: return engine_.wait_idle(call);
    case Step::Kind::hold: return engine_.hold(call);
    case Step::Kind::release_hold: return engine_.release_hold();
    case Step::Kind::reset_caches: return engine_.reset_caches(call);
    case Step::Kind::pause_transfer: return engine_.pause_transfer();
    case Step::Kind::resume_transfer: return engine_.resume_transfer();
    case Step::Kind::release:
      if (step.memory == EngineMemory::weights) DS_TRY(weights_.release(call));
      return engine_.release_memory(step.memory);
    case Step::Kind::restore: return engine_.restore_memory(step.memory);
    case Step::Kind::fill: return fill(call);
    case Step::Kind::stage: return weights_.stage(request, call);
    case Step::Kind::commit: return weights_.commit(call);
  }
  return {};
}

std::string Service::busy_with(const std::string& why) const {
  const std::string busy = standing().busy;
  return "busy: " + (busy.empty() ? "another call" : busy) + " goes on, and " + why;
}

Status Service::rename(const std::string& label, std::optional<VersionId> expected) {
  const std::optional<Version> live = weights_.current();
  if (!live) return Error(Errc::version_conflict, "no version is live that could be called " + label);
  if (expected && live->id != *expected) {
    return Error(Errc::version_conflict, "version " + std::to_string(expected->number) + " should be called " + label +
                                             ", but " + std::to_string(live->id.number) + " is live by now");
  }
  const std::lock_guard lock(mutex_);
  label_ = label;
  labelled_ = live->id;
  return {};
}

void Service::note(const std::string& busy) {
  const std::lock_guard lock(mutex_);
  state_ = machine_.state();
  busy_ = busy;
}

Standing Service::standing() const {
  Standing now;
  now.version = weights_.current();
  const std::lock_guard lock(mutex_);
  now.engine = state_;
  now.busy = busy_;
  if (!now.version) return now;
  const Version& live = *now.version;
  const std::string own = live.label.empty() ? std::to_string(live.id.number) : live.label;
  now.label = labelled_ == live.id ? label_ : own;
  now.cache_salt = to_string(live.id);
  return now;
}

Status admits(const Standing& now, std::string_view min, std::string_view exact) {
  const auto wanted = number_of(min);
  if (!min.empty() && !wanted) {
    return Error(Errc::invalid_argument, "'" + std::string(min) + "' is no version's number");
  }
  const auto conflict = [&](const std::string& what) {
    return Error(Errc::version_conflict, what + ", and " + (now.version ? now.label : "no version") + " is live");
  };
  if (!now.version) return conflict("the request needs a whole version");
  // What came from a directory has no number to be compared.
  const VersionId& live = now.version->id;
  const bool numbered = live.epoch != kDirectoryEpoch;
  if (wanted && !(numbered && live.number >= *wanted)) {
    return conflict("the request is for version " + std::string(min) + " or a later one");
  }
  if (exact.empty() || exact == now.label || exact == now.version->label) return {};
  if (numbered && number_of(exact) == live.number) return {};
  return conflict("the request is for version " + std::string(exact));
}

}  // namespace deltasync::control
