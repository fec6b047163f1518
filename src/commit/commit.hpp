// All ranks of a rollout engine at one version: a Coordinator that one process runs (rank 0, or the engine's driver)
// and a Participant that each rank runs beside its Receiver. They speak over TCP. commit_protocol.md says what is
// promised; coordinator_machine.hpp and
// participant_machine.hpp decide.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "base/deadline.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/result.hpp"
#include "deltasync/tls.hpp"
#include "deltasync/version.hpp"
#include "format/commit_messages.hpp"

namespace deltasync::commit {

struct CoordinatorOptions {
  std::uint32_t ranks = 0;  ///< of the group: numbered from 0
  /// The log, made if it is not there; its directory is. The next coordinator is given the same file, which
  /// must survive what the coordinator is to survive. Without it, ranks in doubt stay so until they are resolved by
  /// hand.
  std::filesystem::path log;
  std::string listen = "127.0.0.1:0";  ///< "HOST:PORT"; beyond loopback a token or TLS with a CA is needed
  std::string token;                   ///< shared secret, 16 bytes or more; empty = none
  TlsOptions tls;                      ///< as its server; none by default. `kernel` is not looked at
  std::chrono::milliseconds prepare_limit = std::chrono::seconds(30);  ///< for all to stop serving
  std::chrono::milliseconds commit_limit = std::chrono::seconds(60);   ///< for all to commit; then all go back
};

struct RankStatus {
  bool connected = false;
  std::optional<Report> report;  ///< what it said last
};

/// Thread-safe. When it is destroyed it ends the calls that are under way (update() and exchange() with `cancelled`),
/// its threads and its port; what is open then is ended by the next one. No call may begin after that: a participant of
/// this process that asks by exchange() ends first.
class Coordinator {
 public:
  /// Errors: already_exists (another coordinator has the log or the port), corrupt (the log), unauthenticated (a bind
  /// beyond loopback without a token), invalid_argument, io, no_space.
  static Result<std::unique_ptr<Coordinator>> start(CoordinatorOptions options);
  virtual ~Coordinator() = default;

  virtual std::uint16_t port() const = 0;

  /// Brings all ranks to one version and says which. The deadline bounds the waiting for pulls, which a rank may go on
  /// with for its own `pull_limit`; preparing and committing have their own limits after it. On error no rank has
  /// another version than before (or does not serve until it has). Errors: version_conflict (another transaction is
  /// open), timed_out (names who is late), what a rank's pull or commit said, peer_died (a rank has lost what it had
  /// staged), io (the log cannot be written, or was removed or replaced: start the coordinator again), cancelled (the
  /// coordinator is being destroyed: the next one says what became of it).
  virtual Result<Version> update(const Want& want, Deadline deadline) = 0;

  /// What all ranks serve, as far as they serve; nothing before the first update.
  virtual std::optional<Version> served() const = 0;
  virtual std::vector<RankStatus> ranks() const = 0;

  /// The conversation without TCP, for ranks in this process and for transports of others: a rank's report for the
  /// order that answers it. Waits until `hold`, the stop, or until there is something to be done. To a process that was
  /// replaced by a later one the order is none of its own: Order::incarnation is that of the later one.
  virtual Result<Order> exchange(const Report& report, Deadline hold, std::stop_token stop) = 0;
};

/// The engine, as a rank's participant drives it. Called from the participant's own thread (but for the first pause,
/// which start()'s caller makes), one call at a time. Both are idempotent: they may be called again when they failed,
/// and when they were called before. What they throw counts as an error that names the call. Deadlines are theirs to
/// keep: while a call does not return, the rank does nothing else, and updates end at their deadlines without it.
class Engine {
 public:
  virtual ~Engine() = default;
  /// No step that reads the weights runs when this returns, and none begins until resume(). On error the engine may be
  /// left half paused: the rank takes part in no commit, and either resumes it or, where it must not serve, asks for
  /// the pause again and again and writes nothing before.
  virtual Status pause(Deadline deadline) = 0;
  /// The weights are this version, and may be served. On error it is called again after a second (while the rank pulls
  /// the next version: after two, four, and so on, at most sixty), for as long as the rank may serve the version: the
  /// group's decision does not wait for it, and the next update may begin meanwhile. Until it succeeds the rank counts
  /// as serving, and its report's `problem` says why it does not.
  virtual Status resume(const Version& version, Deadline deadline) = 0;
};

/// How a rank asks its coordinator. TCP if a participant is given none. What it throws counts as an error.
using Exchange = std::function<Result<Order>(const Report&, Deadline, std::stop_token)>;

struct ParticipantOptions {
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  std::string coordinator;  ///< "HOST:PORT"
  std::string token;
  TlsOptions tls;             ///< as the coordinator's client; none by default
  std::string name = "rank";  ///< for messages
  std::chrono::milliseconds pull_limit = std::chrono::minutes(10);
  std::chrono::milliseconds pause_limit = std::chrono::seconds(30);
  std::chrono::milliseconds resume_limit = std::chrono::seconds(30);
  std::chrono::milliseconds commit_limit = std::chrono::seconds(60);
  /// After a promise, and after the order to commit: how long until a rank that knows no outcome is in doubt.
  std::chrono::milliseconds decide_limit = std::chrono::seconds(120);
  Exchange exchange;  ///< in place of TCP
};

/// One rank. Begins paused, and joins the group by itself: it catches up with what the others serve. Thread-safe.
class Participant {
 public:
  /// From now on `receiver` (with its target bound) and `engine` are the participant's alone, until it is destroyed;
  /// the engine is paused. Ranks whose receivers subscribed to the same tiles are compared. invalid_argument: no such
  /// rank, no target, or a receiver whose full updates are in place (FullUpdatePolicy::in_place), which would destroy
  /// the version that others serve, or go back to; unsupported if commits of its target are final (a relay's); no_space
  /// (no thread to be had); what the engine's pause said.
  static Result<std::unique_ptr<Participant>> start(ParticipantOptions options, Receiver& receiver, Engine& engine);
  /// Leaves the rank as it is: a promise that is open dies with it.
  virtual ~Participant() = default;

  virtual RankState state() const = 0;
  /// What the rank may serve now; nothing in every state but RankState::serving. The label is this version's.
  virtual std::optional<Version> serving() const = 0;
  virtual Report report() const = 0;
  /// Why the coordinator cannot be asked or obeyed, at the moment.
  virtual std::optional<Error> last_error() const = 0;

  /// The operator's word to a rank that is in doubt and whose coordinator will not come back: it gives up its promise,
  /// keeps what its target holds, and serves when a coordinator has brought it to the version of the others.
  /// A pull that is under way is ended. Does not wait for that, nor for the engine to pause: report().busy says that it
  /// has not yet. version_conflict while the rank is at other work, which does not wait for the trainer: say it again.
  virtual Status resolve_by_pull() = 0;
};

}  // namespace deltasync::commit
