// What a rollout engine is told to do, and when it serves: a state machine without I/O, clock or thread. Pure.
//
//            pause                 sleep (pauses, if nobody has)
//   serves ────────────▶ paused ────────────▶ asleep
//     ▲  ◀──────────────   │  ▲  ◀────────────  wake (serves, if the sleep had paused it, or the call says so)
//     │      resume        │  └─ update: stays paused, unless the call says so
//     └─ update: stage while it serves; stop, commit, serve again
//
// One call at a time. Who runs it does what step() says and answers with succeeded() or failed(), until there is none.
// A call is steps, and then what puts admission right: as it was before, or as the call says. So a call that fails
// leaves the engine as it was, and serving if it was serving, as far as its state allows. Where weights have become
// void meanwhile it ends with the engine stopped; a check is a call of nothing else.
//
// The engine serves only while nothing sleeps, its weights are those of one version, and no cache is of another one
// that was to be dropped. Weights are written only while no forward pass reads them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "receiver/control/call.hpp"

namespace deltasync::control {

/// What a failed step has left of the weights.
enum class Weights : std::uint8_t { as_before, void_weights };

/// The guards that tests remove one by one.
enum class Guard : std::uint8_t {
  none,
  asleep_blocks,     ///< nothing serves while something sleeps
  void_blocks,       ///< nothing serves weights of no version
  void_stops,        ///< an engine that serves is stopped when they become that
  stale_blocks,      ///< nothing serves with caches that were to be reset
  must_be_paused,    ///< an update that wants a paused engine is refused else
  stops_for_commit,  ///< an update of a serving engine stops it for the commit
  drains,            ///< who stopped it for sleeping waits until it is idle
  pause_stays,       ///< only a resume, or a call that resumes, ends a client's pause
  reopens,           ///< what a call has stopped for itself it lets go on, if it fails as well
  sleep_wakes,       ///< what a sleep has paused goes on when nothing sleeps
  fills,             ///< woken weights are filled before anything serves
};

struct AllGuards {
  static constexpr bool broken(Guard) noexcept { return false; }
};

/// A programmer's mistake ends the process: an answer where there is no step.
template <class Guards>
class MachineOf {
 public:
  explicit MachineOf(EngineState state, Guards guards = {}) : state_(state), guards_(guards) {}

  /// Between calls: whether the weights, unless they are asleep, are those of one version.
  void observe(bool whole) {
    if (state_.asleep.has(EngineMemory::weights)) return;
    // What was computed with them since is in the caches.
    if (state_.weights_whole && !whole) state_.stale_caches = true;
    state_.weights_whole = whole;
  }
  /// Begins a call. Nothing if it can begin; else why it cannot, and nothing has changed.
  std::string begin(const Call& call);
  /// Of the call that was begun last.
  Step step() const { return next_ < steps_.size() ? steps_[next_] : Step{}; }
  /// The steps from here on put admission right: they are due whatever the call's deadline says.
  bool ending() const noexcept { return ending_; }
  /// `whole`: of a fill, whether there was a version that could be there again.
  void succeeded(bool whole = true);
  void failed(const std::string& why, Weights left = Weights::as_before);

  const EngineState& state() const noexcept { return state_; }
  /// Why the call failed, when there is no step any more; empty: it has not.
  const std::string& error() const noexcept { return error_; }
  const Call& call() const noexcept { return call_; }

 private:
  void plan();
  void plan_pause(PauseMode mode);
  void plan_reset();
  void plan_stop(PauseMode mode);
  void plan_stop_of_void();
  void plan_end();
  bool shall_serve() const;
  bool may_serve() const;
  void took_effect(const Step& step, bool whole);
  void then(Step::Kind kind, EngineMemory memory = EngineMemory::weights) { steps_.push_back({kind, memory}); }
  bool broken(Guard guard) const noexcept { return guards_.broken(guard); }

  EngineState state_;
  Guards guards_;
  // Of the call.
  Call call_;
  EngineState before_;
  std::vector<Step> steps_;
  std::size_t next_ = 0;
  bool ending_ = false;  ///< the steps are those that put admission right
  std::string error_;
};

using Machine = MachineOf<AllGuards>;
extern template class MachineOf<AllGuards>;

// ---- calls -------------------------------------------------------------------------------------------------------

/// Released first is what needs the others; restored in the other order.
inline constexpr EngineMemory kReleaseOrder[] = {EngineMemory::cuda_graph, EngineMemory::weights,
                                                 EngineMemory::cpu_cache, EngineMemory::kv_cache};

template <class Guards>
std::string MachineOf<Guards>::begin(const Call& call) {
  if (step().kind != Step::Kind::none) return std::string(to_string(call_.kind)) + " is under way";
  const MemorySet& asleep = state_.asleep;
  const bool pauses = call.kind == Call::Kind::pause || call.kind == Call::Kind::sleep;
  if (pauses && call.mode == PauseMode::wait && state_.held && !may_serve()) {
    return "the requests that are held cannot run to their end without whole weights: pause with mode abort";
  }
  switch (call.kind) {
    case Call::Kind::update:
      if (call.must_be_paused && !state_.stopped && !state_.held && !broken(Guard::must_be_paused)) {
        return "the engine serves: pause it before its weights are updated";
      }
      if (asleep.has(EngineMemory::weights)) return "the weights are asleep: wake them before they are updated";
      break;
    case Call::Kind::resume:
      if (!asleep.empty() && !broken(Guard::asleep_blocks)) {
        return to_string(asleep) + " asleep: wake the engine before it is resumed";
      }
      if (!state_.weights_whole && !broken(Guard::void_blocks)) {
        return "the weights are those of no version: update them before the engine is resumed";
      }
      break;
    case Call::Kind::sleep:
      if (call.mode == PauseMode::keep && state_.serves() && !broken(Guard::drains)) {
        return "requests cannot be kept in memory that is released: sleep with mode abort or wait";
      }
      break;
    case Call::Kind::wake:
      if (call.kv_cache_first && asleep.has(EngineMemory::kv_cache) && call.memory.has(EngineMemory::weights) &&
          !call.memory.has(EngineMemory::kv_cache)) {
        return "kv_cache is asleep, and a captured graph uses it: wake kv_cache first, or both";
      }
      break;
    case Call::Kind::pause:
    case Call::Kind::reset_caches:
    case Call::Kind::check: break;
  }
  call_ = call;
  if (call.caches_as_paused && state_.paused_by == PausedBy::pause) call_.resets_caches = false;
  before_ = state_;
  steps_.clear();
  next_ = 0;
  ending_ = false;
  error_.clear();
  plan();
  if (steps_.empty()) plan_end();
  return {};
}

template <class Guards>
void MachineOf<Guards>::plan() {
  switch (call_.kind) {
    case Call::Kind::pause: return plan_pause(call_.mode);
    case Call::Kind::resume:
    case Call::Kind::check: return;
    case Call::Kind::reset_caches: return plan_reset();
    case Call::Kind::sleep: {
      MemorySet wanted;
      for (const EngineMemory memory : kReleaseOrder) {
        if (call_.memory.has(memory) && !state_.asleep.has(memory)) wanted.insert(memory);
      }
      if (wanted.empty()) return;
      // Who was paused with requests kept has them still, in memory that goes.
      if (!(state_.stopped && state_.idle) && !broken(Guard::drains)) {
        plan_pause(call_.mode == PauseMode::wait ? PauseMode::wait : PauseMode::abort);
      }
      // What is remembered of their content goes with them.
      if (wanted.has(EngineMemory::kv_cache) || wanted.has(EngineMemory::cpu_cache)) plan_reset();
      for (const EngineMemory memory : kReleaseOrder) {
        if (wanted.has(memory)) then(Step::Kind::release, memory);
      }
      return;
    }
    case Call::Kind::wake:
      if (!state_.weights_whole) plan_stop_of_void();  // they are filled while nobody reads them
      for (std::size_t i = std::size(kReleaseOrder); i-- > 0;) {
        const EngineMemory memory = kReleaseOrder[i];
        if (!call_.memory.has(memory)) continue;
        if (state_.asleep.has(memory)) then(Step::Kind::restore, memory);
        if (memory == EngineMemory::weights && !state_.weights_whole && !broken(Guard::fills)) then(Step::Kind::fill);
      }
      return;
    case Call::Kind::update:
      if (!call_.stages_in_place) then(Step::Kind::stage);
      if (!state_.still() && !broken(Guard::stops_for_commit)) plan_stop(call_.mode);
      if (call_.stages_in_place) then(Step::Kind::stage);
      then(Step::Kind::commit);
      if (call_.resets_caches) plan_reset();
      return;
  }
}

/// Caches whose memory sleeps have been reset before, and are again before anything serves if they have to be.
template <class Guards>
void MachineOf<Guards>::plan_reset() {
  if (state_.asleep.has(EngineMemory::kv_cache)) return;
  if (!steps_.empty() && steps_.back().kind == Step::Kind::reset_caches) return;
  then(Step::Kind::reset_caches);
}

template <class Guards>
void MachineOf<Guards>::plan_pause(PauseMode mode) {
  if (!state_.stopped) then(Step::Kind::stop_admission);
  if (mode == PauseMode::keep) {
    if (!state_.still()) then(Step::Kind::hold);
  } else {
    if (mode == PauseMode::abort) then(Step::Kind::abort);
    // Requests that are held never end.
    if (mode == PauseMode::wait && state_.held) {
      if (state_.stale_caches && !broken(Guard::stale_blocks)) then(Step::Kind::reset_caches);
      then(Step::Kind::release_hold);
    }
    then(Step::Kind::wait_idle);
  }
  if (!state_.transfer_paused) then(Step::Kind::pause_transfer);
  if (call_.resets_caches) plan_reset();
}

template <class Guards>
void MachineOf<Guards>::plan_stop(PauseMode mode) {
  if (!state_.stopped) then(Step::Kind::stop_admission);
  if (mode == PauseMode::keep) return then(Step::Kind::hold);
  if (mode == PauseMode::abort) then(Step::Kind::abort);
  then(Step::Kind::wait_idle);
}

/// Requests are not held for the next version: what was computed last is wrong.
template <class Guards>
void MachineOf<Guards>::plan_stop_of_void() {
  if (state_.still() || broken(Guard::void_stops)) return;
  plan_stop(PauseMode::abort);
}

// ---- how it goes on ----------------------------------------------------------------------------------------------

template <class Guards>
void MachineOf<Guards>::succeeded(bool whole) {
  if (next_ >= steps_.size()) {
    std::fprintf(stderr, "deltasync: the rollout control was answered where it had asked for nothing\n");
    std::abort();
  }
  took_effect(steps_[next_], whole);
  ++next_;
  if (next_ == steps_.size() && !ending_) plan_end();
}

template <class Guards>
void MachineOf<Guards>::failed(const std::string& why, Weights left) {
  const Step::Kind kind = step().kind;
  error_ += (error_.empty() ? "" : "; then ") + std::string(to_string(kind)) + ": " + why;
  // Whatever comes next, caches are of weights that are gone.
  if (left == Weights::void_weights) {
    state_.weights_whole = false;
    state_.stale_caches = true;
  }
  if (!ending_) return plan_end();
  if (state_.serves()) {  // it could not be stopped: the next check tries again
    state_.paused_by = PausedBy::nobody;
  } else if (state_.paused_by == PausedBy::nobody) {  // who resumes it goes on from here
    state_.paused_by = PausedBy::pause;
  }
  next_ = steps_.size();
}

template <class Guards>
void MachineOf<Guards>::took_effect(const Step& step, bool whole) {
  switch (step.kind) {
    case Step::Kind::stop_admission: state_.stopped = true; break;
    case Step::Kind::resume_admission: state_.stopped = state_.idle = false; break;
    case Step::Kind::abort: break;
    case Step::Kind::wait_idle: state_.idle = state_.stopped; break;
    case Step::Kind::hold: state_.held = true; break;
    case Step::Kind::release_hold: state_.held = false; break;
    case Step::Kind::reset_caches: state_.stale_caches = false; break;
    case Step::Kind::pause_transfer: state_.transfer_paused = true; break;
    case Step::Kind::resume_transfer: state_.transfer_paused = false; break;
    case Step::Kind::release:
      state_.asleep.insert(step.memory);
      if (step.memory == EngineMemory::weights) state_.weights_whole = false;
      break;
    case Step::Kind::restore: state_.asleep.remove(step.memory); break;
    case Step::Kind::fill: state_.weights_whole = whole; break;
    case Step::Kind::stage: break;
    case Step::Kind::commit:
      state_.weights_whole = true;
      state_.stale_caches = state_.stale_caches || call_.resets_caches;
      break;
    case Step::Kind::none: break;
  }
}

/// What the call leaves to be done is to put admission right.
template <class Guards>
void MachineOf<Guards>::plan_end() {
  ending_ = true;
  steps_.clear();
  next_ = 0;
  if (shall_serve() && may_serve()) {
    if (state_.stale_caches && !broken(Guard::stale_blocks)) then(Step::Kind::reset_caches);
    if (state_.transfer_paused) then(Step::Kind::resume_transfer);
    if (state_.held) then(Step::Kind::release_hold);
    if (state_.stopped) then(Step::Kind::resume_admission);
    state_.paused_by = PausedBy::nobody;
    return;
  }
  if (!may_serve()) plan_stop_of_void();
  if (state_.serves() && steps_.empty()) return;
  if (call_.kind == Call::Kind::pause && error_.empty()) {
    state_.paused_by = PausedBy::pause;
  } else if (state_.paused_by == PausedBy::nobody) {
    // It goes on by itself when it may.
    state_.paused_by = PausedBy::itself;
  }
}

template <class Guards>
bool MachineOf<Guards>::shall_serve() const {
  const bool ok = error_.empty();
  const bool before = before_.serves() && !broken(Guard::reopens);
  const bool slept = state_.paused_by == PausedBy::itself && !broken(Guard::sleep_wakes);
  switch (call_.kind) {
    case Call::Kind::pause: return !ok && before;
    case Call::Kind::resume: return true;
    case Call::Kind::reset_caches: return before;
    case Call::Kind::sleep: return before;  // if nothing sleeps after all
    case Call::Kind::check: return before || slept;
    case Call::Kind::wake:
    case Call::Kind::update: return before || slept || (ok && call_.resumes) || broken(Guard::pause_stays);
  }
  return false;
}

template <class Guards>
bool MachineOf<Guards>::may_serve() const {
  return (state_.asleep.empty() || broken(Guard::asleep_blocks)) &&
         (state_.weights_whole || broken(Guard::void_blocks));
}

}  // namespace deltasync::control
