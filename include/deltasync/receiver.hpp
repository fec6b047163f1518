// The rollout side: connect → bind a target → pull() → StagedUpdate → commit() or rollback().
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "deltasync/deadline.hpp"
#include "deltasync/hf.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "deltasync/subscription.hpp"
#include "deltasync/tls.hpp"
#include "deltasync/version.hpp"

namespace deltasync {

/// Keeps the versions. Opaque here: made by the functions at the end of this file, handed to Receiver::bind.
class Target;
struct DeleteTarget {
  void operator()(Target* target) const noexcept;
};
using TargetPtr = std::unique_ptr<Target, DeleteTarget>;

/// What to do when a full transfer is needed while a version is live in the target.
enum class FullOverLive : std::uint8_t {
  stage,     ///< keep the live version until commit; needs host memory for a second copy
  in_place,  ///< overwrite in place: current() is empty until the pull is whole. Only while the engine is paused
  refuse,    ///< fail with no_space
};

/// What to do when the agent serves a version of an older epoch than the target holds: by another trainer, which never
/// heard of the one that published that (it runs elsewhere, or began anew).
enum class OlderEpoch : std::uint8_t {
  follow,  ///< take it: the agent is the one that the user pointed to
  wait,    ///< for a version of the epoch that is held, or of a later one, until the deadline
  fail,    ///< version_conflict
};

struct ReceiverOptions {
  std::string endpoint;  ///< "HOST:PORT" of an agent
  std::string token;     ///< shared secret; empty: none, or that which a local agent of this user made
  TlsOptions tls;        ///< as its client; none by default
  unsigned streams = 4;  ///< parallel data connections, 1 to 64; a thread each (pull()'s caller is one of them)
  /// Threads that compute digests, apply updates and copy, 1 to 256, the calling thread included; they sleep
  /// otherwise. 0 = one for each hardware thread, at most 16.
  unsigned threads = 0;
  /// CPUs that the receiver's own threads run on, such as "0-7,16": those near the memory (or the device) that it
  /// writes, whose pages then come from there too. Empty = where connect()'s caller may run. The caller's thread is
  /// left alone. invalid_argument if one is not there or not open to this process.
  std::string cores;
  FullOverLive full_over_live = FullOverLive::stage;
  /// Host memory that the frames of one delta may take; a larger one becomes a full update, unless full_over_live
  /// refuses those or the version is wanted by number or label (then a delta as large as the model is the limit, beyond
  /// it no_space). As much again may be taken by its changes in decoded form, which shorten the commit; those that find
  /// no room are decoded twice. That memory stays for the next update. 0 = a quarter of the model, at least 16 MiB.
  std::uint64_t delta_bytes_max = 0;
  /// Speed of the link from the agent in gigabits per second. On a slow one full transfers come packed (about two
  /// thirds of the bytes of bf16 weights), where that is sooner, for some work on both ends. 0 = measured in earlier
  /// transfers, and at the beginning of a long one; an agent on the same host and a link that is not known count as
  /// fast. Say it where a tunnel or a quota hides the truth.
  double link_gbps = 0;
  /// Tiles re-read in full after each delta, round robin; 0 = none. Copies of their elements too, as long as there is
  /// memory to read those with (else the log says receiver does_not_read_copies).
  std::uint64_t scrub_tiles = 8;
  /// After each commit all of live memory is attested (deltasync/attest.hpp): read where it is, on a device by the
  /// device, copies of elements too. What is not the version's fails the commit with corrupt, naming tile and tensor.
  /// Binding a target takes what copies are read with (on devices some staging memory).
  bool attest_commits = false;
  /// For pulls of Kind::newest and Kind::newer. Said in the log, once. Who names a version gets what is named.
  OlderEpoch on_older_epoch = OlderEpoch::follow;
  std::string name = "receiver";  ///< for the agent's log and status
};

/// What a pull asks for.
struct Want {
  enum class Kind : std::uint8_t {
    newest,  ///< what the agent serves; up to date is an answer
    newer,   ///< the same, once it is another version than the target holds, and not an earlier one of its epoch
    number,  ///< `number` of the newest epoch, or of `epoch`; waited for if it is still to come, `gone` if past
    label,   ///< the version with this label; likewise, but an unknown label is waited for
  };
  Kind kind = Kind::newest;
  std::uint64_t number = 0;
  std::string label;
  std::uint64_t epoch = 0;  ///< with Kind::number: of this one; 0: of the newest
  /// How long to wait until the agent has it, the time without an agent included; then timed_out, which is no failure.
  /// An agent that has been asked is heard out, for five seconds or so. The pull's deadline bounds this and the
  /// transfer, and nothing else does if this is unset.
  std::optional<std::chrono::milliseconds> wait_max{};
};

enum class PullMode : std::uint8_t { up_to_date, delta, full };
std::string_view to_string(PullMode mode) noexcept;

/// What a pull did. Times in seconds.
struct PullReport {
  PullMode mode = PullMode::up_to_date;
  Version version;                   ///< delivered, never merely requested
  Digest128 root;                    ///< of the subscribed tiles' digests at that version
  std::uint64_t wire_bytes = 0;      ///< received over all connections in this pull, headers and handshakes counted
  std::uint64_t full_bytes = 0;      ///< of the subscribed tensors and tiles, for comparison
  std::uint64_t metadata_bytes = 0;  ///< of wire_bytes: everything that is not tile data
  std::uint64_t tiles = 0;           ///< received
  std::uint64_t changed = 0;         ///< elements changed (delta)
  std::uint32_t delta_steps = 0;     ///< versions stepped through
  std::uint32_t replans = 0;         ///< times the plan was made anew (lease revoked, agent restarted)
  std::uint32_t stream_restarts = 0;
  std::uint32_t repaired_tiles = 0;
  bool packed = false;    ///< full: some or all tiles came packed
  double wait_s = 0;      ///< for the version to exist
  double transfer_s = 0;  ///< plan answered → last byte verified and staged
  double verify_s = 0;    ///< of that, CPU time spent on digests (summed over threads)
  double commit_s = 0;    ///< set by commit()
  double attest_s = 0;    ///< likewise, with ReceiverOptions::attest_commits: what attesting took after it
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

/// A verified update that is not yet visible. Dropped without commit() = rolled back. Not thread-safe: all calls, its
/// destruction included, belong on the thread that calls the receiver. May outlive the receiver; then commit() fails.
class StagedUpdate {
 public:
  virtual ~StagedUpdate() = default;
  virtual const PullReport& report() const = 0;
  /// Makes the version visible in the target; on error, timed_out at the deadline included, the target is on the
  /// version that it had before. The deadline bounds the work on tiles; a flush to disk that has begun is not cut
  /// short. What takes a failed commit back may last ten seconds longer, so that the version before is not lost. With
  /// ReceiverOptions::attest_commits an attestation that fails, or finds live memory wrong (corrupt), takes the commit
  /// back like rollback(); where that cannot be (after a full update in place) the target has no version any more. The
  /// message says which, and whether what is wrong was wrong in the version before, too: then that is what current()
  /// names, with the damage that it had, until Receiver::pull replaces it or repair() mends it.
  virtual Status commit(Deadline deadline) = 0;
  /// With ten minutes.
  Status commit() { return commit(Deadline::after(std::chrono::minutes(10))); }
  /// Before commit(): forgets the staged bytes. After commit(), until the next pull: restores the version before,
  /// bit for bit (unsupported after a full update in place). The memory that this needs is given back by the next pull,
  /// or when this object is destroyed: keep it only as long as the way back may be wanted.
  virtual Status rollback() = 0;
};

/// One receiver of one agent. Not thread-safe: one thread calls it at a time. Reconnects by itself.
///
/// Calls that take a `stop` end soon after it is requested, by any thread or a stop that was requested before, with
/// `cancelled`, whatever they are doing; a call that has failed for another reason by then says that reason. What the
/// call leaves behind is what it would leave at its deadline.
class Receiver {
 public:
  /// Connects, authenticates and fetches the layout. Errors: connection, unauthenticated (the token, or the
  /// certificate of either side), unsupported (only one side speaks TLS), timed_out, cancelled, no_space (no thread to
  /// be had), and what is wrong with files of `tls`. An agent without a layout yet is waited for until the deadline.
  static Result<std::unique_ptr<Receiver>> connect(ReceiverOptions options, Deadline deadline,
                                                   std::stop_token stop = {});
  virtual ~Receiver() = default;

  virtual const LayoutPtr& layout() const = 0;
  virtual const Sidecar& sidecar() const = 0;

  /// Takes the target that keeps the versions. A directory target that already holds a version of this layout is
  /// verified and resumes from it (this reads all of it: timed_out if that takes longer than the deadline allows, and
  /// the target bound before stays; cancelled likewise). layout_mismatch if the target was made for another layout.
  ///
  /// With a subscription only the tiles of its slices are pulled, verified and kept, over one and the same chain of
  /// versions as the whole model; what else the target's memory holds is left alone. Errors: not_found and out_of_range
  /// name the slice, unsupported if the target keeps whole models only. Another subscription needs another target.
  virtual Status bind(TargetPtr target, const Subscription& subscription, Deadline deadline,
                      std::stop_token stop = {}) = 0;
  /// To the whole model.
  Status bind(TargetPtr target, Deadline deadline, std::stop_token stop = {}) {
    return bind(std::move(target), Subscription(), deadline, std::move(stop));
  }
  /// The bound target, or null.
  virtual Target* target() = 0;
  /// What bind() took; the whole model before it.
  virtual const Subscription& subscription() const = 0;
  /// ReceiverOptions::full_over_live.
  virtual FullOverLive full_over_live() const = 0;
  /// True if the bound target can go back after a commit. False of a relay's (relay_target.hpp), whose receivers may
  /// have the version by then, and where no target is bound.
  virtual bool takes_commits_back() const = 0;

  /// Brings the wanted version into staging, verified. On error the target keeps its version and can pull again. What a
  /// full update had verified before timed_out, cancelled or connection is kept for the next pull; a delta begins anew.
  /// Errors: gone, timed_out and cancelled (name the stage), layout_mismatch (the trainer has a new layout, or a
  /// directory target would get other side files: connect again), connection, no_space, corrupt.
  virtual Result<std::unique_ptr<StagedUpdate>> pull(const Want& want, Deadline deadline,
                                                     std::stop_token stop = {}) = 0;

  /// The committed version, or nothing.
  virtual std::optional<Version> current() const = 0;

  /// How far behind it is now. Any thread, during any other call; only the receiver's destruction must wait for it.
  /// Asks the agent, on a connection of its own, for five seconds at most; never fails (Lag::last_error says why it
  /// could not).
  virtual Lag lag(Deadline deadline, std::stop_token stop = {}) const = 0;
};

/// Keeps one version in host memory, laid out like a half (Tensor::offset). `memory` is not owned and must hold
/// layout->half_bytes(); empty = the target allocates. With a subscription only its tiles are valid. Own memory then
/// has pages (of 2 MiB) for the rows of these tiles only, so that a slice of rows takes its own size, one of columns
/// its tensor's; other bytes are zero, or in the user's memory what they were.
TargetPtr make_host_target(LayoutPtr layout, std::span<std::byte> memory = {});
/// The memory of a host target (empty span for any other kind, and for own memory before the first pull). Memory given
/// by the user keeps its address. Own memory changes place at the commit of a full update over a live version and at a
/// rollback of one, and is unmapped with the target: ask again after each commit, and do not read the old span.
std::span<const std::byte> host_target_memory(const Target& target);

/// Keeps HF model directories: `out/versions/<epoch>-<number>/…` are immutable, the symlink `out/current` names the
/// committed one and is swapped atomically. The version before is patched forward only if no process has its
/// files open or mapped; else a new directory is written. Directories older than that are removed when unused.
struct HfTargetOptions {
  /// Each version is on the disk before it is committed (fsync of its files, its directory and the link): a power
  /// failure leaves the committed version. Without it, whatever the system has written by then.
  bool flush = true;
  /// Bytes of the disk that a new directory leaves free: whoever else writes there goes on. Nothing: 5 % of the file
  /// system, 1 GiB at most. What does not fit is no_space before anything is written.
  std::optional<std::uint64_t> disk_reserve_bytes = std::nullopt;
  /// Versions may go into a directory that holds a model of somebody else: beside it, and whoever loads the directory
  /// itself goes on loading that one.
  bool beside_model = false;
};
Result<TargetPtr> make_hf_target(LayoutPtr layout, Sidecar sidecar, std::filesystem::path out,
                                 HfTargetOptions options = {});

}  // namespace deltasync
