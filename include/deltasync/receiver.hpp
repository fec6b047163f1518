// The rollout side: connect → bind a target → pull() → StagedUpdate → commit() or rollback(). receiver.md and
// targets.md are the guides.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "deltasync/target.hpp"
#include "deltasync/tls.hpp"
#include "deltasync/version.hpp"

namespace deltasync {

/// What to do when a full transfer is needed while a version is live in the target.
enum class FullUpdatePolicy : std::uint8_t {
  stage,     ///< keep the live version until commit; needs host memory for a second copy
  in_place,  ///< overwrite in place: current() is empty until the pull is whole. Only while the engine is paused
  refuse,    ///< fail with Errc::no_space
};

/// What to do when the agent serves a version of an older epoch than the target holds: by another trainer, which never
/// heard of the one that published that (it runs elsewhere, or was started again).
enum class OlderEpoch : std::uint8_t {
  follow,  ///< take it: the agent is the one that the user pointed to
  wait,    ///< for a version of the epoch that is held, or of a later one, until the deadline
  fail,    ///< Errc::version_conflict
};

struct ReceiverOptions {
  /// "HOST:PORT" of an agent; several, separated by commas: of the first that answers. Who loses that one goes on at
  /// the others, with deltas, and comes back to the first. Where trainer nodes hold parts of the model (part.hpp), that
  /// of any of them: it names the others. Or "bucket:PATH", where a trainer of this host hands its tensors over without
  /// an agent: the receiver listens on that Unix socket, and each version comes whole.
  std::string endpoint = {};
  std::string token = {};  ///< shared secret; empty: none, or that which a local agent of this user made
  TlsOptions tls = {};     ///< as its client; none by default
  unsigned streams = 4;    ///< parallel data connections, 1 to 64; a thread each (pull()'s caller is one of them)
  /// Threads that compute digests, apply updates and copy, 1 to 256, the calling thread included; they sleep otherwise.
  /// 0: one for each hardware thread, at most 16.
  unsigned threads = 0;
  /// CPUs that the receiver's own threads run on, such as "0-7,16": those near the memory (or the device) that it
  /// writes, whose pages then come from there too. Empty: where connect()'s caller may run. The caller's thread is left
  /// alone.
  std::string cores = {};
  FullUpdatePolicy full_update_policy = FullUpdatePolicy::stage;
  /// Host memory that the frames of one delta may take, in bytes; a larger one becomes a full update, unless
  /// full_update_policy refuses those or the version is wanted by number or label (then a delta as large as the model
  /// is the limit, beyond it Errc::no_space). As much again may be taken by its changes in decoded form, which shorten
  /// the commit. That memory stays for the next update. 0: a quarter of the model, at least 16 MiB.
  std::uint64_t delta_bytes_max = 0;
  /// Speed of the link from the agent in gigabits per second. On a slow one full transfers come packed (about two
  /// thirds of the bytes of bf16 weights), where that is sooner. 0: measured. Say it where a tunnel or a quota hides
  /// the truth.
  double link_gbps = 0;
  /// Whether full updates are copied out of the memory of an agent on this host, of the same user, in place of coming
  /// over a connection. Unset: if both ends of the connection have one address, and it can be had; else over the
  /// connection, which the log says once if it seemed possible. true: or the pull fails (Errc::unsupported). Deltas
  /// always come over the connection.
  std::optional<bool> local = std::nullopt;
  /// Tiles re-read in full after each delta, round robin, copies of their elements too; 0: none.
  std::uint64_t scrub_tiles = 8;
  /// After each commit all of live memory is attested, as by Receiver::attest(). What is not the version's fails the
  /// commit with Errc::corrupt, naming tile and tensor.
  bool attest_commits = false;
  /// For pulls of the newest version and of a newer one. Said in the log, once. Who names a version gets what is named.
  OlderEpoch on_older_epoch = OlderEpoch::follow;
  std::string name = "receiver";  ///< for the agent's log and status
};

/// The epoch of what came from a directory (Want::directory), which no trainer has; the number is made of its content,
/// and has no order.
inline constexpr std::uint64_t kDirectoryEpoch = 1;

/// What a pull asks for: by default the newest version, for which "up to date" is an answer.
///
/// ```cpp
/// auto newest = receiver.pull();
/// auto next = receiver.pull({.newer = true});
/// auto named = receiver.pull({.label = "global_step_1200"});
/// auto numbered = receiver.pull({.number = 1200});
/// ```
struct Want {
  /// This number of the newest epoch, or of `epoch`. It is waited for if it is still to come, and Errc::gone if past.
  std::optional<std::uint64_t> number = std::nullopt;
  /// The version with this label; likewise, and an unknown label is waited for. Not together with `number`.
  std::string label = {};
  /// The newest, once it is another version than the target holds, and not an earlier one of its epoch. Without meaning
  /// for a version that is named.
  bool newer = false;
  std::uint64_t epoch = 0;  ///< with `number`: of this one; 0: of the newest
  /// Alone: no version of the agent's, but what the safetensors files of this directory have now. Its tensors are those
  /// of the layout, of their shapes and dtypes: else Errc::layout_mismatch names what is missing, unexpected or
  /// different, and nothing has been touched. Afterwards the version is one of kDirectoryEpoch, with the path as its
  /// label, and the next pull from the agent is a full one. Errc::unsupported: the target keeps directories or hands
  /// versions on, the trainer nodes hold parts, or the receiver is at a bucket channel.
  std::filesystem::path directory = {};
  /// How long to wait until the agent has it, the time without an agent included; then Errc::timed_out, which is no
  /// failure. An agent that has been asked is heard out, for five seconds or so. Nothing: until the call's deadline,
  /// which bounds this and the transfer.
  std::optional<std::chrono::milliseconds> wait_max = std::nullopt;
};

enum class PullMode : std::uint8_t { up_to_date, delta, full };
std::string_view to_string(PullMode mode) noexcept;

/// What a pull did. Times in seconds.
struct PullReport {
  PullMode mode = PullMode::up_to_date;
  Version version;               ///< delivered, never merely requested
  Digest128 root;                ///< of the subscribed tiles' digests at that version
  std::uint64_t wire_bytes = 0;  ///< received over all connections in this pull, headers and handshakes counted
  /// Of tiles: copied out of the agent's memory (ReceiverOptions::local), or out of a trainer's buckets
  /// ("bucket:PATH").
  std::uint64_t local_bytes = 0;
  std::uint64_t full_bytes = 0;      ///< of the subscribed tensors and tiles, for comparison
  std::uint64_t metadata_bytes = 0;  ///< of wire_bytes: everything that is not tile data
  std::uint64_t tiles = 0;           ///< received
  std::uint64_t changed = 0;         ///< elements changed (delta)
  std::uint32_t delta_steps = 0;     ///< versions stepped through
  std::uint32_t replans = 0;         ///< times the plan was made again (lease revoked, agent restarted)
  std::uint32_t stream_restarts = 0;
  std::uint32_t repaired_tiles = 0;
  bool packed = false;     ///< full: some or all tiles came packed
  std::string transports;  ///< UCX's that carried tiles, such as "posix/memory" (ucx:// endpoints); empty: none did
  double wait_s = 0;       ///< for the version to exist
  double transfer_s = 0;   ///< plan answered → last byte verified and staged
  double verify_s = 0;     ///< of that, CPU time spent on digests (summed over threads); none of local_bytes
  double commit_s = 0;     ///< set by commit()
  double attest_s = 0;     ///< likewise, with ReceiverOptions::attest_commits: what attesting took after it
};

/// A tile of live memory that is not the committed version's.
struct TileMismatch {
  std::uint64_t tile = 0;  ///< its number in the layout, for repair()
  std::string tensor = {};
  /// Empty: it is wrong where it is read. Else that is right, and this live memory has a copy (a tied weight, a
  /// replica) with something else in it: the first of them.
  std::string copy_in = {};

  bool operator==(const TileMismatch&) const = default;
};
/// "tile 88 (model.layers.3.mlp.up_proj.weight)", or "tile 7 (lm_head.weight), the copy in embed_tokens".
std::string to_string(const TileMismatch& mismatch);

/// What repair() or restore() wrote into live memory.
struct RepairReport {
  Version version;                   ///< that live memory has now, or has still: the committed one
  std::uint64_t tiles = 0;           ///< written
  std::uint64_t bytes = 0;           ///< of these tiles
  std::uint64_t fetched = 0;         ///< tiles that came from the agent; the others came from the target's shadow
  std::uint64_t wire_bytes = 0;      ///< received, headers and handshakes counted
  std::uint64_t metadata_bytes = 0;  ///< of wire_bytes: everything that is not tile data
  double total_s = 0;                ///< all of it, seconds
  double attest_s = 0;               ///< of that, reading live memory again
};

/// How far what a receiver holds is behind what its agent serves. Durations are the agent's, by its monotonic clock:
/// what time it is on either host does not matter.
struct Lag {
  std::optional<Version> held;    ///< committed; nothing before the first commit
  std::optional<Version> newest;  ///< that the agent serves; nothing if it serves none yet, or could not be asked
  /// Published after the one that is held; 0: it is the newest. At most 4,096, which the agent remembers; all of these
  /// if nothing is held. Nothing where there is no newest.
  std::optional<std::uint64_t> versions;
  std::optional<double> seconds;       ///< since the first of these was published; 0: it is the newest
  std::optional<double> newest_age_s;  ///< since the newest was published
  /// What `newest` was when the agent answered last, to this question or one before, and how long ago that was. Nothing
  /// if it never has.
  std::optional<Version> heard_newest;
  std::optional<double> heard_s;
  /// Why the agent could not be asked; else of the last pull or commit, if that failed. Empty: all is well. That a stop
  /// ended a pull, or nothing newer came until its deadline, is no failure.
  std::string last_error;
};

/// A verified update that is not yet visible. Destroyed without commit(), it is rolled back. All calls, its destruction
/// included, belong on the thread that calls the receiver. It may outlive the receiver; then commit() fails.
class StagedUpdate {
 public:
  virtual ~StagedUpdate() = default;
  /// Valid while the update lives.
  virtual const PullReport& report() const = 0;
  /// Whether commit() may be called: neither committed nor given up, and no later pull has begun.
  virtual bool is_staged() const noexcept = 0;
  /// Makes the version visible in the target. On error the target is on the version that it had before; what takes a
  /// failed commit back may last ten seconds longer than the deadline, so that it is not lost. The deadline bounds the
  /// work on tiles; a flush to disk that has begun is not cut short, and a stop ends no commit that has begun.
  ///
  /// With ReceiverOptions::attest_commits an attestation that fails, or finds live memory wrong, takes the commit back
  /// like rollback(). Where that cannot be (after a full update in place) the target has no version any more. The
  /// message says which, and whether what is wrong was wrong in the version before, too.
  ///   - Errc::timed_out, Errc::cancelled: while it waits for what an engine's streams had when it was called, the
  ///     update stays staged, and may be committed again; later it is given up. is_staged() says which.
  ///   - Errc::corrupt: what was staged, or what is in live memory, is not the version.
  ///   - Errc::io, Errc::no_space: a device's or a disk's.
  ///   - Errc::invalid_argument: a later pull has begun, or the receiver is gone.
  virtual Status commit(const CallOptions& call = {}) = 0;
  /// Before commit(): forgets the staged bytes. After it, until the next pull: restores the version before, bit for
  /// bit. The memory that this needs is given back by the next pull, or when this object is destroyed.
  ///   - Errc::unsupported: after a full update in place, or if the target does not support it (supports_rollback()).
  ///   - Errc::io: a device's; the version may be lost.
  virtual Status rollback() = 0;
};

/// One receiver of one agent. One thread calls it at a time, but for lag() and progress(). It connects again by itself.
///
/// ```cpp
/// const CallOptions minute = CallOptions::within(std::chrono::minutes(1));
/// DS_ASSIGN(const auto mine, Receiver::connect({.endpoint = "127.0.0.1:7070"}, minute));
/// DS_TRY(mine->bind(make_host_target(mine->layout()), minute));
/// DS_ASSIGN(const auto staged, mine->pull({.newer = true}));
/// DS_TRY(staged->commit());
/// std::printf("%s: %s\n", staged->report().version.label.c_str(), to_string(staged->report().mode).data());
/// ```
class Receiver {
 public:
  /// Connects, authenticates and fetches the layout. An agent without a layout yet is waited for.
  ///   - Errc::connection: nobody there; one that begins to listen later is not waited for.
  ///   - Errc::unauthenticated: the token, or the certificate of either side.
  ///   - Errc::unsupported: only one side speaks TLS, or none of the agent's protocols.
  ///   - Errc::invalid_argument: options that cannot be, such as `cores` that are not open to this process.
  ///   - Errc::no_space: no thread to be had.
  ///   - Errc::not_found, Errc::permission, Errc::corrupt: files of `tls`.
  ///   - Errc::timed_out, Errc::cancelled.
  static Result<std::unique_ptr<Receiver>> connect(ReceiverOptions options, const CallOptions& call = {});
  virtual ~Receiver() = default;

  virtual const LayoutPtr& layout() const = 0;
  virtual const Sidecar& sidecar() const = 0;

  /// Takes the target that keeps the versions, and which slices of the model it keeps; none: the whole model. Only the
  /// slices' tiles are pulled, verified and kept, over one and the same chain of versions; what else the target's
  /// memory holds is left alone. A directory target that already holds a version of this layout is verified, which
  /// reads all of it, and goes on from that. On error the target bound before stays.
  ///   - Errc::layout_mismatch: the target was made for another layout.
  ///   - Errc::not_found, Errc::out_of_range: a slice, which is named.
  ///   - Errc::unsupported: the target keeps whole models only, or has other slices.
  ///   - Errc::no_space: memory that the target needs.
  ///   - Errc::timed_out, Errc::cancelled.
  virtual Status bind(std::unique_ptr<Target> target, const std::vector<Slice>& slices, const CallOptions& call) = 0;
  /// To the whole model.
  Status bind(std::unique_ptr<Target> target, const CallOptions& call = {}) {
    return bind(std::move(target), std::vector<Slice>(), call);
  }
  /// The bound target, or null. Valid until the next bind().
  virtual Target* target() = 0;
  /// What bind() took; none: the whole model.
  virtual const std::vector<Slice>& slices() const = 0;
  /// ReceiverOptions::full_update_policy.
  virtual FullUpdatePolicy full_update_policy() const = 0;
  /// Whether the bound target can go back after a commit. False of a relay's, whose receivers may have the version by
  /// then, and where no target is bound.
  virtual bool supports_rollback() const = 0;

  /// Brings the wanted version into staging, verified. On error the target keeps its version and can pull again. What a
  /// full update had verified by then is kept for the next pull; a delta begins again.
  ///   - Errc::gone: the wanted version is past; the message lists what there is.
  ///   - Errc::timed_out, Errc::cancelled: the message names the stage.
  ///   - Errc::layout_mismatch: the trainer has a new layout, or several nodes and now others, or a directory target
  ///     would get other side files: connect again.
  ///   - Errc::version_conflict: by OlderEpoch::fail.
  ///   - Errc::no_space: for staging; by FullUpdatePolicy::refuse.
  ///   - Errc::connection, Errc::corrupt: it did not come, or not as it was sent.
  ///   - Errc::unsupported: by ReceiverOptions::local.
  virtual Result<std::unique_ptr<StagedUpdate>> pull(const Want& want = {}, const CallOptions& call = {}) = 0;
  /// Whether `want` (a number or a label) still means this staged version. A trainer that was started again gives the
  /// same numbers and labels to other weights: what was staged before is not meant any more, and neither is what the
  /// agent does not remember. One question; nothing is transferred, and what is staged stays.
  ///   - Errc::invalid_argument: it is no longer staged, or another kind of want.
  ///   - Errc::layout_mismatch, Errc::unauthenticated, Errc::timed_out, Errc::cancelled.
  virtual Result<bool> is_current(const StagedUpdate& staged, const Want& want, const CallOptions& call = {}) = 0;

  /// The committed version, or nothing.
  virtual std::optional<Version> current() const = 0;
  /// How far behind it is now. Any thread, during any other call; only the receiver's destruction waits for it. Asks
  /// the agent, on a connection of its own, for five seconds at most. Never fails: Lag::last_error says why it could
  /// not.
  virtual Lag lag(const CallOptions& call = {}) const = 0;
  /// How far a full update is that a pull fetches now: bytes of weights that are verified, and all of them. Both are 0
  /// before it begins, after it, and in any other pull. Any thread, during any other call.
  virtual std::pair<std::uint64_t, std::uint64_t> progress() const = 0;

  /// The tiles whose elements in live memory are not those of the committed version, in order; empty: all are as they
  /// were committed. All of live memory is read, on a device by the device; first the places that elements are read
  /// from, then their copies where those are right. What differs was written by another program, or the memory is
  /// broken: repair() brings these tiles again.
  ///   - Errc::not_found: nothing is committed.
  ///   - Errc::invalid_argument: no target is bound.
  ///   - Errc::no_space: copies on devices take some staging memory, once.
  ///   - Errc::io: a device's. Errc::timed_out, Errc::cancelled.
  ///
  /// ```cpp
  /// DS_ASSIGN(const auto wrong, receiver.attest());
  /// for (const TileMismatch& tile : wrong) std::fprintf(stderr, "%s\n", to_string(tile).c_str());
  /// DS_TRY(receiver.repair(wrong));
  /// ```
  virtual Result<std::vector<TileMismatch>> attest(const CallOptions& call = {}) = 0;

  /// Writes these tiles of the committed version again into all of their places, verified, and attests them: those that
  /// the target's shadow has from there, all others from the agent, which sends these tiles and no others. The version
  /// stays what it is. Live memory is written: the engine may not compute with it meanwhile. On error some tiles may be
  /// repaired, and none has become worse.
  ///   - Errc::not_found: nothing is committed.
  ///   - Errc::out_of_range, Errc::invalid_argument: there is no such tile, or the target does not keep it.
  ///   - Errc::gone: the agent serves another version by now; the next pull is a full one.
  ///   - Errc::corrupt: a tile, which is named, is wrong again right after it was written, or came wrong.
  ///   - Errc::unsupported: a directory target, whose files nobody else may write.
  ///   - Errc::io: a device's, while it was written: there is no version any more; pull again.
  ///   - Errc::connection, Errc::timed_out, Errc::cancelled.
  virtual Result<RepairReport> repair(std::span<const std::uint64_t> tiles, const CallOptions& call = {}) = 0;
  /// All that attest() found.
  Result<RepairReport> repair(std::span<const TileMismatch> mismatches, const CallOptions& call = {});

  /// Gives live memory up, so that the engine can sleep: nothing touches it once this has returned without an error.
  /// A shadow keeps its version. current() is empty, and pulls fail with Errc::invalid_argument, until restore().
  /// What is under way is forgotten: what is staged, a full update that was pulled in part, the rollback of the last
  /// commit.
  ///   - Errc::unsupported: the target is no placed one.
  ///   - Errc::timed_out, Errc::cancelled, Errc::io: a device may still write to live memory, which must be kept
  ///     until a later call succeeds.
  ///
  /// ```cpp
  /// DS_TRY(receiver.release());  // the engine's memory may go now …
  /// DS_TRY(receiver.restore());  // … and is there again, at the same addresses
  /// ```
  virtual Status release(const CallOptions& call = {}) = 0;
  /// Writes all of live memory, each tile verified on its way: after release(), or after a failure by which live memory
  /// lost its version. It is at the addresses that the placement names, with whatever in it. A commit before it cannot
  /// be rolled back any more.
  ///
  /// With PlacedTargetOptions::shadow from there: nothing comes over the network, and on error the shadow still has its
  /// version. Without, it is the newest version, pulled whole; errors are those of pull() and commit(), too.
  ///   - Errc::unsupported: the target is no placed one.
  ///   - Errc::not_found: there was no version, or without a shadow the endpoint is "bucket:PATH", which keeps none:
  ///     pull.
  ///   - Errc::corrupt: a tile of the shadow is wrong, or (with attest_commits) live memory does not keep what is
  ///     written: pull again.
  ///   - Errc::io: a device's. Errc::timed_out, Errc::cancelled.
  virtual Result<RepairReport> restore(const CallOptions& call = {}) = 0;
};

}  // namespace deltasync
