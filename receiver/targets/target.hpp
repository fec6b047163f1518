// Where a receiver keeps its versions. The receiver moves and verifies bytes; a target owns the memory or files, and
// knows how to make a verified update visible and how to roll it back. One conformance suite runs over all kinds.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/call_context.hpp"
#include "base/thread_pool.hpp"
#include "delta/delta.hpp"
#include "deltasync/receiver.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/capabilities.hpp"
#include "receiver/targets/recycled_bytes.hpp"

namespace deltasync {

/// A whole verified version: its name, the digest of every tile, and their root. With a subscription the digests of
/// other tiles are zero, and the root is that of its tiles.
struct TargetState {
  Version version;
  Digest128 root;
  std::vector<std::uint64_t> digests;  ///< layout.tile_count() entries
};

/// A frame as it came over the wire, with its parsed records (which point into `bytes`).
struct StagedFrame {
  std::vector<std::byte> bytes;
  std::vector<delta::TileRecord> records;
  /// The changes of all records that are not in `kept`, one after the other, as delta::resolve_tile left them when it
  /// verified the frame over live memory; or nothing. For targets that take them decoded.
  RecycledBytes resolved{};
  std::vector<std::unique_ptr<KeptChanges>> kept{};  ///< those that the target has itself
};
/// One delta step; frames in any order, tiles disjoint.
struct StagedStep {
  VersionId from;
  VersionId to;
  std::vector<StagedFrame> frames;
};

/// What rolls a commit back that was refused may last so much longer than the commit's own deadline, which may have
/// passed by then: long enough to write a model once more, and no longer, since an engine waits.
inline constexpr std::chrono::seconds kRollbackGrace{10};
inline Deadline with_grace(Deadline deadline) {
  return Deadline(deadline.at() + kRollbackGrace);
}

/// The core that every target has. What only some can do is in capabilities().
///
/// Life of an update:  begin_full → put_tile … → commit_full | discard
///                     (verify against live_tile) → commit_delta | nothing
/// and after either commit, until the next update begins or forget_rollback: rollback, where the target can. Used by
/// one thread at a time, but for live_tile, resolve, full_tile, put_tile and full_rows, which many threads may call at
/// once: each with scratch of its own, and of two that write none the same tile.
class Target {
 public:
  virtual ~Target() = default;

  virtual const LayoutPtr& layout() const = 0;
  virtual TargetCapabilities capabilities() = 0;
  /// Called once by Receiver::bind: opens what exists, verifies a version found there. Ended by
  /// `until` (timed_out, cancelled) it has changed nothing but for leftovers that are gone.
  virtual Status open(ThreadPool& pool, const CallContext& until) = 0;

  /// The committed version, or null.
  virtual const TargetState* committed() const = 0;
  /// A kept tile of the committed version, read only: where it is, or a copy of it in `scratch` where its rows do not
  /// lie like that. Null if nothing is committed. An error, here and below, is one of the memory itself (io).
  virtual Result<TileRows> live_tile(const Tile& tile, std::vector<std::byte>& scratch) const = 0;
  /// Live memory was found not to be the committed version, and none can be restored: committed() is null from
  /// then on. Not while an update is open.
  virtual void invalidate() noexcept = 0;

  /// Opens memory for a full version: the final place where nothing is committed, else as `policy` says
  /// (in_place: committed() becomes null at once). Errors: no_space; timed_out or cancelled, and then nothing is open.
  virtual Status begin_full(FullUpdatePolicy policy, const CallContext& until) = 0;
  /// A kept tile of the open full update, to be written or read: its place, or a copy of it in `scratch`. It has
  /// what was put before. Null if no update is open.
  virtual Result<TileRows> full_tile(const Tile& tile, std::vector<std::byte>& scratch) = 0;
  /// The tile is what `rows` has: those of full_tile(), or any others. Different tiles may be put by different threads.
  virtual Status put_tile(const Tile& tile, const TileRows& rows) = 0;
  /// Makes the full update, which the caller has verified whole, the committed version. An error that leaves live
  /// memory with parts of two versions leaves nothing committed; likewise of commit_delta and rollback. After timed_out
  /// the version before is still there, if there was one.
  virtual Status commit_full(TargetState state, Deadline deadline) = 0;
  /// Gives up an open full update; the committed version (if not in place) is untouched.
  virtual void discard_full() noexcept = 0;

  /// Applies verified steps, oldest first, and makes the result the committed version; on any error, the passed
  /// deadline (timed_out) included, the old one stays.
  virtual Status commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) = 0;
};

/// For callers to whom a target that cannot is as good as one that has nothing to do, or says so.

/// Rolls the last commit back. unsupported: there is none, or commits of this kind are final.
Status roll_back(Target& target);
void forget_rollback(Target& target) noexcept;
/// Before open(). unsupported: this kind keeps whole models, and `tiles` are less.
Status subscribe(Target& target, const TileSet& tiles);
/// The tiles that it keeps; null: all.
const TileSet* kept_tiles(Target& target);

}  // namespace deltasync
