// A copy on the host of what an engine has in its live memory: to decode over, to wake with, to repair from.
#pragma once

#include <cstdint>
#include <optional>
#include <stop_token>

#include "deltasync/deadline.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

struct ShadowOptions {
  /// So much host memory at most; what the subscribed tiles need beyond it is refused. 0: as much as the machine and
  /// its cgroup have room for.
  std::uint64_t bytes_max = 0;
  /// Lets devices read the shadow where it is, so that what is written from it needs no copy on the host, when it is
  /// bound and, if it is not any more, when live memory is given up: both take longer for it. After a staged full
  /// update it is not, since that must not keep an engine waiting. Where a device refuses (the log line `shadow
  /// not_pinned` says why), and where live memory is on the host, everything works without. Forked children do not
  /// inherit it.
  bool pin = true;
};

/// A target that keeps each version twice: in the live memory of `live`, which is one of make_placed_target or
/// make_device_target, and in host memory as large as the subscribed tiles, its *shadow*. Binding takes that memory,
/// all of its pages; no_space names it, and the log line `shadow keeps` says how much it is.
///
/// Both are always of one version: a commit or a rollback that fails in one is taken back in the other. Where live
/// memory cannot be brought back, tile by tile from the shadow if need be, it has no version any more
/// (Receiver::current() is empty), yet the shadow has: restore_live() ends that.
///
/// A pull while live memory has no version leaves the shadow's until its commit (with FullOverLive::stage, which takes
/// as much host memory again; else it is given up at once): if the pull fails, restore_live() still brings it back.
///
/// What it changes:
///   - Deltas are verified and decoded over the shadow; live memory is not read. So what others wrote there is found by
///     the scrub (ReceiverOptions::scrub_tiles) and by attest() alone.
///   - A full update over a live version is staged once, beside the shadow. Its commit writes all tiles from there, and
///     its rollback all tiles of the version before; a rollback to a version that is wrong in the shadow is corrupt,
///     and changes nothing.
///   - repair() takes tiles from the shadow, and asks the agent only for those that are wrong there too.
///   - restore_live() writes all of live memory from the shadow.
///   - Whatever writes tiles from the shadow verifies each before.
///   - A delta's commit is the shadow's (on the host) and then the live target's; its frames are there twice meanwhile.
///
/// Errors: invalid_argument without a target; unsupported over any other kind.
Result<TargetPtr> make_shadowed_target(TargetPtr live, const ShadowOptions& options = {});

/// What a shadow has.
struct ShadowState {
  std::uint64_t bytes = 0;         ///< of host memory that it takes; while a full update over it is staged, or can be
                                   ///< taken back, as much again is taken
  bool pinned = false;             ///< devices read it where it is
  std::optional<Version> version;  ///< the last that was committed whole, whatever live memory has
  bool live_given_up = false;
};
/// Nothing for a target without one.
std::optional<ShadowState> shadow_of(const Target& target);

/// The engine goes to sleep: its weights' memory is given up, and nobody touches it once this has returned without an
/// error: what devices still do there, after a commit that timed out, is waited for. The shadow keeps its version;
/// Receiver::current() is empty, and pulls fail with invalid_argument, until restore_live(). Whatever was under way is
/// forgotten, as by a failed pull: what is staged, a full update that was pulled in part, the way back from the last
/// commit. What the target itself has on a device (its staging) stays there.
///
/// Errors: unsupported without a shadow. timed_out (at the deadline, or when the target's patience with the device
/// ends), cancelled, io: a device may still write to this memory, which must be kept until a later call succeeds; what
/// was under way may be forgotten by then, and the version too.
Status give_up_live(Receiver& receiver, Deadline deadline, std::stop_token stop = {});

/// What a restoration did.
struct RestoreReport {
  Version version;          ///< that live memory has now
  std::uint64_t bytes = 0;  ///< of the tiles that were written
  double restore_s = 0;     ///< all of it
  double attest_s = 0;      ///< of that, with ReceiverOptions::attest_commits
};
/// The engine's memory is there again, at the addresses that the placement names and with whatever in it: all tiles are
/// written from the shadow, each verified on its way, and the version is the committed one again. Nothing comes over
/// the network. The same after a failure that live memory lost its version by, or to write all of it anew. A commit
/// before it cannot be taken back any more.
/// Errors: unsupported without a shadow; not_found if the shadow has no version; corrupt: a tile of the shadow is
/// wrong, or (with attest_commits) live memory does not keep what is written: pull anew; timed_out, cancelled; io, a
/// device's. On error live memory has no version, and the shadow still has its; but a version that live memory had
/// stays, if it was begun too late to have changed anything, or for a tile of the shadow that is wrong.
Result<RestoreReport> restore_live(Receiver& receiver, Deadline deadline, std::stop_token stop = {});

}  // namespace deltasync
