// The rollout control as it is: every call in every state that any calls lead to, with every step failing once, and
// another client's call beside it; between any two calls, and at any failure, the weights may become void. Nothing goes
// wrong. And with one guard removed: what the guard prevents is found.
#include <gtest/gtest.h>

#include <cstdio>
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "receiver/control/machine.hpp"

namespace deltasync::control {
namespace {

struct Removed {
  Guard guard = Guard::none;
  bool broken(Guard asked) const noexcept { return asked == guard; }
};
using Explored = MachineOf<Removed>;

/// The engine itself, which the machine only hears of.
struct Engine {
  bool admits = true;
  bool requests = true;  ///< as soon as it admits some
  bool held = false;
  bool whole = true;   ///< the weights
  bool stale = false;  ///< a cache of other weights is there that a client wanted to be dropped
  bool filled = true;  ///< a cache remembers something
  MemorySet asleep = {};

  bool computes() const { return requests && !held; }
  auto key() const { return std::tuple(admits, requests, held, whole, stale, filled, asleep.bits()); }
};

struct World {
  EngineState state;
  Engine engine;
  auto key() const {
    const EngineState& s = state;
    return std::tuple(s.stopped, s.idle, s.held, s.transfer_paused, s.stale_caches, s.weights_whole, s.paused_by,
                      s.asleep.bits(), engine.key());
  }
};

std::vector<Call> all_calls() {
  using Kind = Call::Kind;
  std::vector<Call> calls;
  const MemorySet weights{EngineMemory::weights}, cache{EngineMemory::kv_cache}, graph{EngineMemory::cuda_graph};
  for (const PauseMode mode : {PauseMode::abort, PauseMode::wait, PauseMode::keep}) {
    for (const bool resets : {true, false}) {
      calls.push_back({.kind = Kind::pause, .mode = mode, .resets_caches = resets});
      for (const bool resumes : {true, false}) {
        calls.push_back({.kind = Kind::update, .mode = mode, .resets_caches = resets, .resumes = resumes});
        calls.push_back({.kind = Kind::update, .resets_caches = resets, .must_be_paused = true, .resumes = resumes});
        calls.push_back({.kind = Kind::update, .mode = mode, .resets_caches = resets, .stages_in_place = true});
        calls.push_back({.kind = Kind::update, .mode = mode, .resets_caches = resets, .caches_as_paused = true});
      }
    }
    for (const MemorySet memory : {weights, cache, graph, MemorySet::all(), MemorySet()}) {
      for (const bool resets : {true, false}) {
        calls.push_back({.kind = Kind::sleep, .mode = mode, .resets_caches = resets, .memory = memory});
      }
    }
  }
  for (const MemorySet memory : {weights, cache, graph, MemorySet::all(), MemorySet()}) {
    for (const bool resumes : {true, false}) {
      calls.push_back({.kind = Kind::wake, .resumes = resumes, .memory = memory});
      calls.push_back({.kind = Kind::wake, .resumes = resumes, .kv_cache_first = true, .memory = memory});
      calls.push_back({.kind = Kind::wake, .resumes = resumes, .may_stay_void = true, .memory = memory});
    }
  }
  calls.push_back({.kind = Kind::resume});
  calls.push_back({.kind = Kind::reset_caches});
  calls.push_back({.kind = Kind::check});
  return calls;
}

std::string describe(const Call& call) {
  std::string text(to_string(call.kind));
  if (!call.memory.empty()) text += " " + to_string(call.memory);
  text += call.mode == PauseMode::abort ? " abort" : call.mode == PauseMode::wait ? " wait" : " keep";
  if (call.resets_caches) text += " resets";
  if (call.must_be_paused) text += " must_be_paused";
  if (call.resumes) text += " resumes";
  return text;
}

class Explorer {
 public:
  explicit Explorer(Removed guards = {}) : guards_(guards) {
    EngineState serving;
    serving.weights_whole = true;
    enter({serving, {}}, "it serves");
    // An engine that has no weights yet.
    EngineState fresh;
    fresh.stopped = true;
    fresh.paused_by = PausedBy::itself;
    enter({fresh, {.admits = false, .requests = false, .whole = false}}, "it has no weights");
  }

  /// What goes wrong, and how; empty: nothing.
  std::string run() {
    while (!waiting_.empty() && found_.empty()) {
      const World world = waiting_.front();
      waiting_.pop_front();
      if (const std::string why = stuck(world); !why.empty()) found_ = seen_.at(world.key()) + "; " + why;
      for (const Call& call : all_calls()) begin(world, call);
      become_void(world);
    }
    return found_;
  }
  std::size_t states() const { return seen_.size(); }
  std::size_t calls() const { return calls_; }

 private:
  void enter(const World& world, const std::string& way) {
    if (seen_.emplace(world.key(), way).second) waiting_.push_back(world);
  }

  /// Of one rank of several, which was started again. The engine goes on until the next call.
  void become_void(World world) {
    if (!world.engine.whole) return;
    const std::string way = seen_.at(world.key()) + "; the weights become void";
    Explored machine(world.state, guards_);
    machine.observe(false);
    world.state = machine.state();
    world.engine.whole = false;
    world.engine.stale = true;
    enter(world, way);
  }

  void begin(const World& world, const Call& call) {
    Explored machine(world.state, guards_);
    const std::string refused = machine.begin(call);
    if (!refused.empty()) {
      if (!(machine.state() == world.state)) found_ = "a refused call changed something";
      return;
    }
    ++calls_;
    go_on(world, machine, world.engine, seen_.at(world.key()) + "; " + describe(call), 0, false, !world.engine.whole);
  }

  /// Each way on from here: the step succeeds, or fails. Two fail at most: one of the call, one of its end.
  /// `surprised`: it served when the weights became void, and has not been stopped yet.
  void go_on(const World& before, const Explored& machine, Engine engine, const std::string& way, int failures,
             bool end_failed, bool surprised) {
    if (!found_.empty()) return;
    const Step step = machine.step();
    if (engine.admits) engine.requests = true;
    if (engine.computes()) engine.filled = true;
    surprised = surprised && !serves_wrongly(engine).empty();
    if (step.kind == Step::Kind::none) return over(before, machine, engine, way, end_failed, surprised);
    Explored other = machine;
    for (const Call::Kind kind : {Call::Kind::pause, Call::Kind::resume, Call::Kind::update}) {
      if (other.begin({.kind = kind}).empty()) found_ = way + ": two calls at once";
    }
    if (const std::string why = wrong(step, engine, machine.call(), surprised); !why.empty()) {
      found_ = way + ", " + std::string(to_string(step.kind)) + ": " + why;
      return;
    }
    Explored good = machine;
    good.succeeded();
    go_on(before, good, after(engine, step, machine.call()), way, failures, end_failed, surprised);
    if (step.kind == Step::Kind::fill && machine.call().may_stay_void) {
      Explored lacking = machine;
      lacking.succeeded(false);
      go_on(before, lacking, engine, way + " (nothing comes)", failures, end_failed, surprised);
    }
    if (failures == 2) return;
    for (const Weights left : {Weights::as_before, Weights::void_weights}) {
      if (left == Weights::void_weights && !machine.state().weights_whole) continue;
      Explored bad = machine;
      bad.failed("no", left);
      Engine broken = engine;
      if (left == Weights::void_weights) {
        broken.whole = false;
        broken.stale = true;
      }
      go_on(before, bad, broken, way + " (" + std::string(to_string(step.kind)) + " fails)", failures + 1,
            end_failed || machine.ending(), surprised || left == Weights::void_weights);
    }
  }

  static Engine after(Engine engine, const Step& step, const Call& call) {
    switch (step.kind) {
      case Step::Kind::stop_admission: engine.admits = false; break;
      case Step::Kind::resume_admission: engine.admits = engine.requests = true; break;
      case Step::Kind::wait_idle: engine.requests = engine.admits; break;
      case Step::Kind::hold: engine.held = true; break;
      case Step::Kind::release_hold: engine.held = false; break;
      case Step::Kind::reset_caches: engine.stale = engine.filled = false; break;
      case Step::Kind::release:
        engine.asleep.insert(step.memory);
        if (step.memory == EngineMemory::weights) engine.whole = false;
        break;
      case Step::Kind::restore: engine.asleep.remove(step.memory); break;
      case Step::Kind::fill: engine.whole = true; break;
      case Step::Kind::commit:
        engine.whole = true;
        engine.stale = engine.stale || call.resets_caches;
        break;
      default: break;
    }
    return engine;
  }

  static std::string wrong(const Step& step, const Engine& engine, const Call& call, bool surprised) {
    const bool writes = step.kind == Step::Kind::commit || (step.kind == Step::Kind::stage && call.stages_in_place);
    if (writes && engine.computes()) return "weights are written while they are read";
    if (step.kind == Step::Kind::commit && engine.asleep.has(EngineMemory::weights)) return "there is no memory";
    if (step.kind == Step::Kind::fill && engine.computes()) return "weights are written while they are read";
    if (step.kind == Step::Kind::fill && engine.asleep.has(EngineMemory::weights)) return "there is no memory";
    const bool of_cache = step.memory == EngineMemory::kv_cache || step.memory == EngineMemory::cpu_cache;
    if (step.kind == Step::Kind::release && of_cache && engine.filled) return "a cache remembers what is lost";
    if (step.kind == Step::Kind::reset_caches && engine.asleep.has(EngineMemory::kv_cache)) return "there is no cache";
    if (step.kind == Step::Kind::release && engine.requests) return "requests lose memory that they need";
    if (step.kind == Step::Kind::release && engine.asleep.has(step.memory)) return "released twice";
    if (step.kind == Step::Kind::restore && !engine.asleep.has(step.memory)) return "restored twice";
    if (step.kind == Step::Kind::stop_admission && !engine.admits) return "stopped twice";
    if (step.kind == Step::Kind::resume_admission && engine.admits) return "resumed twice";
    if (step.kind == Step::Kind::hold && engine.held) return "held twice";
    if (step.kind == Step::Kind::release_hold && !engine.held) return "not held";
    return surprised ? "" : serves_wrongly(engine);
  }

  static std::string serves_wrongly(const Engine& engine) {
    if (!engine.admits && !engine.computes()) return {};
    if (engine.admits && engine.held) return {};
    if (!engine.asleep.empty()) return "it serves while something sleeps";
    if (!engine.whole) return "it serves weights of no version";
    return {};
  }

  void over(const World& before, const Explored& machine, const Engine& engine, const std::string& way, bool end_failed,
            bool surprised) {
    const EngineState& now = machine.state();
    const Call& call = machine.call();
    const bool may_serve = now.asleep.empty() && now.weights_whole;
    std::string why = end_failed && surprised ? "" : serves_wrongly(engine);
    if (now.serves() && now.weights_whole && engine.stale) why = "it serves with caches that were to be reset";
    if (now.serves() != (engine.admits && !engine.held)) why = "it is not as the machine takes it to be";
    const bool ok = machine.error().empty();
    const bool ends_pause = call.kind == Call::Kind::resume || (ok && call.resumes);
    if (before.state.paused_by == PausedBy::pause && !ends_pause && now.serves()) why = "a client's pause has ended";
    const bool pauses = call.kind == Call::Kind::pause && ok;
    if (before.state.serves() && !pauses && may_serve && !end_failed && !now.serves()) why = "it stays stopped";
    if (now.paused_by == PausedBy::itself && may_serve && !end_failed) why = "nothing sleeps, and it does not go on";
    if (now.serves() != (now.paused_by == PausedBy::nobody)) why = "nobody has paused it, or it serves though paused";
    if (ok && call.kind == Call::Kind::update && !now.weights_whole) why = "an update without weights";
    const bool fills = call.kind == Call::Kind::wake && call.memory.has(EngineMemory::weights) && !call.may_stay_void;
    if (ok && fills && !now.weights_whole) why = "woken weights are void";
    if (!why.empty()) {
      found_ = way + ": " + why;
      return;
    }
    enter({now, engine}, way + (ok ? "" : " FAILED"));
  }

  /// Woken, updated and resumed, with nothing failing, it serves.
  std::string stuck(const World& world) const {
    Explored machine(world.state, guards_);
    for (const Call& call : {Call{.kind = Call::Kind::wake, .memory = MemorySet::all()},
                             Call{.kind = Call::Kind::update}, Call{.kind = Call::Kind::resume}}) {
      const std::string refused = machine.begin(call);
      if (!refused.empty()) return "it cannot be brought back: " + refused;
      for (int steps = 0; machine.step().kind != Step::Kind::none; ++steps) {
        if (steps == 50) return "a call without an end";
        machine.succeeded();
      }
    }
    return machine.state().serves() ? "" : "it cannot be brought back";
  }

  const Removed guards_;
  std::map<decltype(World().key()), std::string> seen_;
  std::deque<World> waiting_;
  std::size_t calls_ = 0;
  std::string found_;
};

TEST(ControlMachine, NoCallsOfAnyClientsLeadAstray) {
  Explorer explorer;
  EXPECT_EQ(explorer.run(), "");
  std::printf("      %zu states, %zu calls\n", explorer.states(), explorer.calls());
  EXPECT_GT(explorer.states(), 100U);
}

class ControlMutant : public testing::TestWithParam<Guard> {};

TEST_P(ControlMutant, IsFound) {
  Explorer explorer(Removed{GetParam()});
  const std::string found = explorer.run();
  std::printf("      %s\n", found.c_str());
  EXPECT_NE(found, "");
}

INSTANTIATE_TEST_SUITE_P(Guards, ControlMutant,
                         testing::Values(Guard::asleep_blocks, Guard::void_blocks, Guard::void_stops,
                                         Guard::stale_blocks, Guard::stops_for_commit, Guard::drains,
                                         Guard::pause_stays, Guard::reopens, Guard::sleep_wakes, Guard::fills));

EngineState serving() {
  EngineState state;
  state.weights_whole = true;
  return state;
}

/// The steps of a call in which none fails.
std::vector<Step::Kind> steps_of(Machine& machine, const Call& call) {
  std::vector<Step::Kind> kinds;
  EXPECT_EQ(machine.begin(call), "");
  for (; machine.step().kind != Step::Kind::none; machine.succeeded()) kinds.push_back(machine.step().kind);
  return kinds;
}

TEST(ControlMachine, AnUpdateThatWantsAPausedEngineIsRefusedElse) {
  Machine machine(serving());
  EXPECT_NE(machine.begin({.kind = Call::Kind::update, .must_be_paused = true}), "");
  EXPECT_EQ(machine.step().kind, Step::Kind::none);
}

TEST(ControlMachine, AnUpdateStagesBeforeItStopsTheEngine) {
  Machine machine(serving());
  using enum Step::Kind;
  EXPECT_EQ(steps_of(machine, {.kind = Call::Kind::update, .mode = PauseMode::keep}),
            (std::vector{stage, stop_admission, hold, commit, reset_caches, release_hold, resume_admission}));
}

TEST(ControlMachine, WakesInTheOppositeOrder) {
  Machine machine(serving());
  EXPECT_FALSE(steps_of(machine, {.kind = Call::Kind::sleep, .memory = MemorySet::all()}).empty());
  ASSERT_EQ(machine.begin({.kind = Call::Kind::wake, .memory = MemorySet::all()}), "");
  std::vector<EngineMemory> order;
  for (; machine.step().kind != Step::Kind::none; machine.succeeded()) {
    if (machine.step().kind == Step::Kind::restore) order.push_back(machine.step().memory);
  }
  EXPECT_EQ(order, (std::vector{EngineMemory::kv_cache, EngineMemory::cpu_cache, EngineMemory::weights,
                                EngineMemory::cuda_graph}));
  EXPECT_TRUE(machine.state().serves());
}

TEST(ControlMachine, GraphsThatUseTheCacheWaitForIt) {
  Machine machine(serving());
  EXPECT_FALSE(steps_of(machine, {.kind = Call::Kind::sleep, .memory = MemorySet::all()}).empty());
  const MemorySet weights{EngineMemory::weights};
  const std::string refused = machine.begin({.kind = Call::Kind::wake, .kv_cache_first = true, .memory = weights});
  EXPECT_NE(refused.find("wake kv_cache first"), std::string::npos) << refused;
  EXPECT_EQ(machine.begin({.kind = Call::Kind::wake, .memory = weights}), "");
}

}  // namespace
}  // namespace deltasync::control
