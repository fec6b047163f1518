// Drives an engine that has no control routes of its own: pause, resume, sleep, wake, update over HTTP, as clients of
// vLLM, SGLang and FastDeploy ask for them. The engine implements RolloutEngine; its weights come by a Receiver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "deltasync/receiver.hpp"
#include "deltasync/result.hpp"
#include "deltasync/tls.hpp"
#include "deltasync/version.hpp"

namespace deltasync {

/// Memory that an engine can give up while it sleeps.
enum class EngineMemory : std::uint8_t { weights, kv_cache, cpu_cache, cuda_graph };

/// What becomes of the requests that run when an engine pauses.
enum class PauseMode : std::uint8_t {
  abort,  ///< they end at once, with the tokens that they have
  wait,   ///< they run to their end
  keep,   ///< they stay, and go on later
};

/// What the control service does with an engine. One call at a time, on a thread of the service, but for abort(), which
/// may come beside any of them. Each has the deadline of the client's call, and should end when its stop says so; none
/// may throw. An error fails the client's call, whose steps before are undone as far as the engine can serve.
class RolloutEngine {
 public:
  virtual ~RolloutEngine() = default;

  /// Takes no new requests from now on: they wait, or are refused.
  virtual Status stop_admission() = 0;
  virtual Status resume_admission() = 0;
  /// Ends these requests, or all if `ids` is empty, with the tokens that they have. How many there were.
  virtual Result<std::uint64_t> abort(std::span<const std::string> ids) = 0;
  /// Returns when no request is left. Comes after stop_admission(). Errc::timed_out.
  virtual Status wait_idle(const CallOptions& call) = 0;

  /// Whether hold() is implemented. Without it nothing pauses with PauseMode::keep, and an update of an engine that
  /// serves waits for its requests.
  virtual bool can_hold() const { return false; }
  /// Returns when no forward pass runs, and begins none until release_hold(); requests stay.
  virtual Status hold(const CallOptions& call);
  virtual Status release_hold();

  /// Forgets what was computed with the weights so far: prefix, multimodal and encoder caches.
  virtual Status reset_caches(const CallOptions& call) = 0;
  /// Of caches between engines. Do nothing if not implemented.
  virtual Status pause_transfer();
  virtual Status resume_transfer();

  /// Gives the memory up, and takes it again at the same addresses. What it held is lost; weights are written by the
  /// service. Errc::unsupported if not implemented.
  virtual Status release_memory(EngineMemory memory);
  virtual Status restore_memory(EngineMemory memory);
};

/// Of a request: it is for a version of this number or a later one; for the one of this number or name. Until that is
/// live the answer is 409. And of all answers: the live version's name, or its number.
inline constexpr const char* kMinVersionHeader = "X-Deltasync-Min-Version";
inline constexpr const char* kExactVersionHeader = "X-Deltasync-Exact-Version";
inline constexpr const char* kVersionHeader = "X-Deltasync-Version";

/// Which versions computed an answer whose request was held during an update: one object for each request. An engine
/// asks ControlServer::admit() for what is live when a forward pass begins; no commit comes before the pass has ended.
///
/// ```cpp
/// VersionSpans spans;
/// spans.computed({.id = {7, 3}, .label = "step-3"}, 17);
/// spans.computed({.id = {7, 4}, .label = "step-4"}, 1);
/// for (const auto& [version, first, end] : spans.list()) {
///   std::printf("%s: tokens %zu to %zu\n", version.c_str(), first, end);
/// }
/// ```
class VersionSpans {
 public:
  /// The answer's next tokens, so many, are this version's.
  void computed(const Version& version, std::size_t tokens = 1);
  /// Of each run of tokens of one version, in order: the version's name, its first token, and the one behind its last.
  const std::vector<std::tuple<std::string, std::size_t, std::size_t>>& list() const noexcept { return spans_; }

 private:
  VersionId last_;
  std::vector<std::tuple<std::string, std::size_t, std::size_t>> spans_;
};

struct ControlOptions {
  std::string listen = "127.0.0.1:0";  ///< "HOST:PORT"; beyond loopback only with a token
  std::string token = {};              ///< that clients show as "Authorization: Bearer …"; empty: none
  TlsOptions tls = {};                 ///< as a server; none by default
  /// Whose routes are served: "v1" (FastDeploy's), "vllm", "sglang". Where two have the same path, the first here.
  std::vector<std::string> dialects = {"v1", "vllm", "sglang"};
  std::string model = {};        ///< path or name, for clients that ask
  std::uint32_t world_size = 1;  ///< processes of the engine, likewise; tensor parallel ones but for
  std::uint32_t pp_size = 1;     ///< pipeline stages
  std::uint32_t ep_size = 1;     ///< and ranks of experts, which are among them
  /// A JSON object of what clients shall find in /server_info besides, or instead; empty: nothing.
  std::string engine_info = {};
  double call_s = 600;               ///< a call's deadline, in seconds, its wait for others included
  bool graphs_use_kv_cache = false;  ///< then weights are not woken (v1) while kv_cache sleeps
};

/// Serves until it is destroyed. Thread-safe.
///
/// ```cpp
/// class Engine : public RolloutEngine {
///  public:
///   Status stop_admission() override { return {}; }  // and so on, as the engine needs it
///   Status resume_admission() override { return {}; }
///   Result<std::uint64_t> abort(std::span<const std::string>) override { return std::uint64_t{0}; }
///   Status wait_idle(const CallOptions&) override { return {}; }
///   Status reset_caches(const CallOptions&) override { return {}; }
/// };
/// Engine engine;
/// DS_ASSIGN(const auto control, ControlServer::start({.listen = "127.0.0.1:8000"}, engine, receiver));
/// std::printf("control routes at %s\n", control->endpoint().c_str());
/// ```
class ControlServer {
 public:
  /// `engine` and `receiver`, which has a target, outlive it. What the receiver has committed is live; without that the
  /// engine has to be paused, until an update gives it weights.
  ///   - Errc::invalid_argument: a dialect that there is none of; a listen that is none.
  ///   - Errc::unauthenticated: beyond loopback without a token.
  static Result<std::unique_ptr<ControlServer>> start(ControlOptions options, RolloutEngine& engine,
                                                      Receiver& receiver);
  virtual ~ControlServer() = default;

  /// "HOST:PORT" that it listens on.
  virtual std::string endpoint() const = 0;

  /// For the engine's own routes, when the scheduler takes a request: what it will be computed with, by its headers
  /// kMinVersionHeader and kExactVersionHeader (empty: it has none). The live version, whose label is the name that
  /// kVersionHeader of the answer has to say; and a cache salt, which no other version has and all engines with this
  /// version have. Any thread.
  ///   - Errc::version_conflict: answer 409; another version is live, or none.
  ///   - Errc::invalid_argument: answer 400; `min_version` is no number.
  virtual Result<std::pair<Version, std::string>> admit(std::string_view min_version,
                                                        std::string_view exact_version) const = 0;
};

}  // namespace deltasync
