// The words of the rollout control: what a client may ask of a rollout engine, and what the engine is told to do.
#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "deltasync/control.hpp"

namespace deltasync::control {

/// Some of the memory that an engine can give up.
class MemorySet {
 public:
  constexpr MemorySet() = default;
  constexpr MemorySet(std::initializer_list<EngineMemory> of) {
    for (const EngineMemory memory : of) insert(memory);
  }
  static constexpr MemorySet all() {
    return {EngineMemory::weights, EngineMemory::kv_cache, EngineMemory::cpu_cache, EngineMemory::cuda_graph};
  }

  constexpr bool has(EngineMemory memory) const { return (bits_ & bit(memory)) != 0; }
  constexpr void insert(EngineMemory memory) { bits_ |= bit(memory); }
  constexpr void remove(EngineMemory memory) { bits_ &= static_cast<std::uint8_t>(~bit(memory)); }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr std::uint8_t bits() const { return bits_; }
  bool operator==(const MemorySet&) const = default;

 private:
  static constexpr std::uint8_t bit(EngineMemory memory) {
    return static_cast<std::uint8_t>(1U << static_cast<unsigned>(memory));
  }
  std::uint8_t bits_ = 0;
};

std::string_view to_string(EngineMemory memory) noexcept;
/// "weights and kv_cache"
std::string to_string(MemorySet memory);

/// What a client asks for. Whether the engine serves again afterwards is said by the call, not by what was before.
struct Call {
  enum class Kind : std::uint8_t { pause, resume, sleep, wake, update, reset_caches, check };
  Kind kind = Kind::pause;
  PauseMode mode = PauseMode::abort;  ///< pause, and of an update or sleep that finds the engine serving
  bool resets_caches = true;          ///< pause; update, after the commit
  bool caches_as_paused = false;  ///< update: of an engine that a client has paused, caches stay as that client said
  bool must_be_paused = false;    ///< update: refused else; otherwise it pauses for its commit
  bool stages_in_place = false;   ///< update: staging writes live memory
  bool resumes = false;           ///< update, wake: the engine serves afterwards, even if a client has paused it
  bool kv_cache_first = false;    ///< wake: weights are refused while kv_cache stays asleep
  bool may_stay_void = false;     ///< wake: where no weights can come back an update is to bring them, later
  MemorySet memory = {};          ///< sleep, wake
};
std::string_view to_string(Call::Kind kind) noexcept;

/// What is to be done with the engine next.
struct Step {
  enum class Kind : std::uint8_t {
    none,  ///< the call is over
    stop_admission,
    resume_admission,
    abort,      ///< all requests
    wait_idle,  ///< until no request is left
    hold,       ///< no forward pass after it, and requests stay
    release_hold,
    reset_caches,
    pause_transfer,  ///< of caches between engines
    resume_transfer,
    release,  ///< `memory`
    restore,  ///< `memory`
    fill,     ///< the weights' memory, which has been restored, with a whole version if there is one
    stage,    ///< the version that is asked for: pulled and verified beside the live one
    commit,   ///< what is staged
  };
  Kind kind = Kind::none;
  EngineMemory memory = EngineMemory::weights;

  bool operator==(const Step&) const = default;
};
std::string_view to_string(Step::Kind kind) noexcept;

/// Who has paused the engine.
enum class PausedBy : std::uint8_t {
  nobody,
  pause,   ///< a client, until it resumes
  itself,  ///< a sleep, an update that failed, or void weights, until the engine may serve
};

/// What is known of the engine.
struct EngineState {
  bool stopped = false;  ///< admits no requests
  bool idle = false;     ///< and has none
  bool held = false;     ///< makes no forward passes
  bool transfer_paused = false;
  bool stale_caches = false;   ///< they were to be reset after a commit
  bool weights_whole = false;  ///< they are those of one version
  PausedBy paused_by = PausedBy::nobody;
  MemorySet asleep = {};

  bool serves() const { return !stopped && !held; }
  /// No forward pass reads the weights.
  bool still() const { return held || (stopped && idle); }
  bool operator==(const EngineState&) const = default;
};

}  // namespace deltasync::control
