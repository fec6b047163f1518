// Carries out what the machine says, with an engine and its weights.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>

#include "base/deadline.hpp"
#include "deltasync/control.hpp"
#include "receiver/control/machine.hpp"
#include "receiver/control/weights.hpp"

namespace deltasync::control {

/// What clients may know at any time.
struct Standing {
  EngineState engine;
  std::string busy;                ///< the call that goes on; empty: none
  std::optional<Version> version;  ///< that is live
  std::string label;               ///< of it, as the last client has called it; else its own, or its number
  std::string cache_salt;          ///< that no other version has, the same on all engines; empty: none is live
};

/// Whether what is live will do for a request: `min` is a number, `exact` a number or a name, and empty what is not
/// asked for.
///   - Errc::invalid_argument: `min` is no number.
///   - Errc::version_conflict: another version is live, or none; the message names it.
Status admits(const Standing& now, std::string_view min, std::string_view exact);

/// Thread-safe. Calls come one after the other: each waits for those before it.
class Service {
 public:
  static constexpr int kWaitingMax = 8;  ///< calls; more are refused at once, so that abort() is not kept waiting
  /// Both outlive it. `call_limit`: of a call whose client names none, its wait included.
  Service(RolloutEngine& engine, EngineWeights& weights, std::chrono::nanoseconds call_limit);

  /// Returns when all is done. `label`: of an update, what the version is called from now on; empty: by its own name.
  ///   - Errc::cancelled: stop() was called.
  ///   - Errc::timed_out: it did not begin by its deadline; names the call that went on.
  ///   - Errc::version_conflict: the engine is not in a state for it; nothing has happened.
  ///   - else what failed, and what that has left.
  Status call(Call call, const UpdateRequest& request = {}, const std::string& label = "",
              std::optional<std::chrono::nanoseconds> limit = std::nullopt);
  /// Stops the engine, and aborts its requests, where its weights have become those of no version, until they are of
  /// one again. Does nothing, and waits for nobody, else.
  Status check();
  /// Beside any call.
  Result<std::uint64_t> abort(std::span<const std::string> ids) { return engine_.abort(ids); }
  /// What the live version is called from now on.
  ///   - Errc::version_conflict: none is, or another one than `expected`.
  Status rename(const std::string& label, std::optional<VersionId> expected = std::nullopt);
  Standing standing() const;

  /// Calls end as soon as the engine lets them; later ones fail.
  void stop() { stop_.request_stop(); }

 private:
  Status run(const Call& call, const UpdateRequest& request, Deadline deadline);
  Status fill(const CallOptions& call);
  Status do_step(const Step& step, const UpdateRequest& request, const CallOptions& call);
  Status carry_out(const Step& step, const UpdateRequest& request, const CallOptions& call);
  void note(const std::string& busy);
  std::string busy_with(const std::string& why) const;

  RolloutEngine& engine_;
  EngineWeights& weights_;
  const std::chrono::nanoseconds call_limit_;
  std::stop_source stop_;
  std::atomic<int> waiting_{0};
  std::timed_mutex calls_;  ///< whose call goes on has it
  Machine machine_;         ///< protected by calls_
  mutable std::mutex mutex_;
  EngineState state_;  ///< protected by mutex_, as all below
  std::string busy_;
  std::string label_;  ///< of version labelled_, by a client
  std::optional<VersionId> labelled_;
};

}  // namespace deltasync::control
