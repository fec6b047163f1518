// Where a receiver keeps its versions. The receiver moves and verifies bytes; a target owns the memory or files, and
// knows how to make a verified update visible and how to roll it back. One conformance suite runs over all kinds.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/call_context.hpp"
#include "base/thread_pool.hpp"
#include "delta/changes.hpp"
#include "delta/delta.hpp"
#include "deltasync/receiver.hpp"
#include "format/tile_set.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/recycled_bytes.hpp"

namespace deltasync {

/// A whole verified version: its name, the digest of every tile, and their root. With a subscription the digests of
/// other tiles are zero, and the root is that of its tiles.
struct TargetState {
  Version version;
  Digest128 root;
  std::vector<std::uint64_t> digests;  ///< layout.tile_count() entries
};

/// The changes of some tiles, resolved, where a target keeps them for the commit. Given back when this ends, by any
/// thread; ends before its target.
class KeptChanges {
 public:
  virtual ~KeptChanges() = default;
  std::vector<std::uint64_t> tiles;  ///< ascending
};

/// A frame as it came over the wire, with its parsed records (which point into `bytes`).
struct StagedFrame {
  std::vector<std::byte> bytes;
  std::vector<delta::TileRecord> records;
  /// The changes of all records that are not in `kept`, one after the other, as delta::resolve_tile left them when it
  /// verified the frame over live memory; or nothing. For targets that exchange.
  RecycledBytes resolved{};
  std::vector<std::unique_ptr<KeptChanges>> kept{};  ///< those that the target has itself
};
/// One delta step; frames in any order, tiles disjoint.
struct StagedStep {
  VersionId from;
  VersionId to;
  std::vector<StagedFrame> frames;
};

/// A tile in memory: its element (r, c) at first + r·row_stride + c·element_bytes.
struct TileRows {
  std::byte* first = nullptr;
  std::size_t row_stride = 0;
};

/// Decoded changes of one tile, to be resolved over the committed version.
struct TileChanges {
  std::uint64_t tile = 0;
  std::uint32_t count = 0;
  delta::NumberKind kind = delta::NumberKind::elements;
  MutByteSpan changes;              ///< positions, then numbers; resolved: new elements in their place
  std::uint64_t digest_change = 0;  ///< of the tile's digest, modulo 2^64
  bool resolved = false;            ///< as new elements
  bool kept = false;                ///< resolved, and what resolve() returned has them: `changes` say nothing
};

/// Of a tile that is as it was committed where it is read, some element has another place with something else in it.
struct WrongCopy {
  std::uint64_t tile = 0;
  std::string memory;  ///< the live memory that has the first such place
};

/// Host memory that a target puts tiles from without a copy of its own. Ends before its target, and before the memory.
class RegisteredHostMemory {
 public:
  static constexpr std::uint64_t kTileAlignment = 64;  ///< of tiles in it

  RegisteredHostMemory() = default;
  virtual ~RegisteredHostMemory() = default;
  RegisteredHostMemory(const RegisteredHostMemory&) = delete;
  RegisteredHostMemory& operator=(const RegisteredHostMemory&) = delete;
  /// Tiles are best put so many bytes at a time.
  virtual std::uint64_t lot_bytes() const noexcept = 0;
  /// Nothing reads the memory any more. False: a device may still, and the memory must never be given back.
  virtual bool end() noexcept = 0;
};

/// What rolls a commit back that was refused may last so much longer than the commit's own deadline, which may have
/// passed by then: long enough to write a model once more, and no longer, since an engine waits.
inline constexpr std::chrono::seconds kRollbackGrace{10};
inline Deadline with_grace(Deadline deadline) {
  return Deadline(deadline.at() + kRollbackGrace);
}

/// Life of an update:  begin_full → put_tile … → commit_full | discard
///                     (verify against live_tile) → commit_delta | nothing
/// and after either commit, until the next update begins or forget_rollback: rollback. Used by one thread at a time,
/// but for live_tile, resolve, full_tile, put_tile and full_rows, which many threads may call at once: each with
/// scratch of its own, and of two that write none the same tile.
class Target {
 public:
  virtual ~Target() = default;

  virtual const LayoutPtr& layout() const = 0;
  /// True if commit_delta makes use of StagedFrame::resolved.
  virtual bool exchanges() const { return false; }
  /// True if others can write the memory of the full update that is open now: what a pull that ended early has left
  /// there is read again before it is trusted.
  virtual bool shares_memory() const { return false; }
  /// False if a committed update is final: rollback() after a commit is unsupported.
  virtual bool supports_rollback() const { return true; }
  /// True if versions lie where an engine has its weights, by a placement: a shadow can be kept beside them.
  virtual bool in_live_memory() const { return false; }
  /// True if a full update writes files of the sidecar, which then must not be an old one.
  virtual bool writes_side_files() const { return false; }
  /// Called once by Receiver::bind before open(): from now on only these tiles are kept, compared and handed out. A
  /// target that can keep whole models only says unsupported.
  virtual Status subscribe(const TileSet& tiles) {
    if (tiles.is_whole()) return {};
    return Error(Errc::unsupported, "this kind of target keeps whole models, no slices of them");
  }
  /// A pull begins, of which all that came before is committed or given up; and ends. Until then no call of
  /// live_tile, resolve, full_tile or put_tile waits for others (a device) beyond `until`: timed_out or cancelled.
  virtual void begin_pull(const CallContext& /*until*/) {}
  virtual void end_pull() noexcept {}

  /// Waits until nothing that was asked for reads or writes live memory any more. timed_out, cancelled, io: something
  /// may still do.
  virtual Status finish_live(const CallContext& /*until*/) { return {}; }

  /// Called once by Receiver::bind: opens what exists, verifies a version found there. Ended by
  /// `until` (timed_out, cancelled) it has changed nothing but for leftovers that are gone.
  virtual Status open(ThreadPool& pool, const CallContext& until) = 0;
  /// The tiles that are kept, once it is open; null: all of them.
  virtual const TileSet* kept() const { return nullptr; }
  /// The committed version, or null.
  virtual const TargetState* committed() const = 0;

  /// A subscribed tile of the committed version, read only: where it is, or a copy of it in `scratch` where its rows do
  /// not lie like that. Null if nothing is committed. An error, here and below, is one of the memory itself (io).
  virtual Result<TileRows> live_tile(const Tile& tile, std::vector<std::byte>& scratch) const = 0;
  /// The state digests of subscribed tiles of the committed version as they are where it lies now. On error some are
  /// set.
  virtual Status live_digests(std::span<const std::uint64_t> tiles, std::span<std::uint64_t> digests,
                              const CallContext& until);

  /// Makes what wrong_copies() reads with, which does that itself where nobody has: it takes memory of devices, once.
  /// no_space, io; timed_out or cancelled. On error the next call tries again.
  virtual Status prepare_copies(const CallContext& /*until*/) { return {}; }
  /// Of these tiles (ascending), all of which are as they were committed where they are read, those with a place of
  /// which that is not true.
  virtual Result<std::vector<WrongCopy>> wrong_copies(std::span<const std::uint64_t> /*tiles*/,
                                                      const CallContext& /*until*/) {
    return std::vector<WrongCopy>();
  }

  /// Tiles of the committed version are put again where it lies: begin_repair, repair_tile …, end_repair, while no
  /// update is open that goes there. Those who may not touch live memory at a commit may not
  /// meanwhile. unsupported; not_found if nothing is committed; else begin_repair has changed nothing.
  virtual Status begin_repair(const CallContext& /*until*/) {
    return Error(Errc::unsupported, "this kind of target does not take single tiles");
  }
  /// The tile's very bytes, which the caller has verified, to every place that it has. By many threads, as put_tile.
  virtual Status repair_tile(const Tile& /*tile*/, const TileRows& /*rows*/) { return {}; }
  /// What was put is there, or the error says why not, and then there is no version any more.
  virtual Status end_repair() { return {}; }
  /// A tile of the committed version from a copy that the target keeps beside live memory; null: it has none. The
  /// caller verifies it.
  virtual Result<TileRows> kept_tile(const Tile& /*tile*/, std::vector<std::byte>& /*scratch*/) const {
    return TileRows{};
  }

  /// Live memory was found not to be the committed version, and none can be restored: committed() is null from
  /// then on. Not while an update is open.
  virtual void invalidate() noexcept;

  /// True if resolve() is worth a call: where tiles have to come from far to be looked at.
  virtual bool resolves() const { return false; }
  /// Resolves changes where the committed version lies; those that it marks. What it returns (or null) has those that
  /// are marked as kept, for the commit of the frame that it goes into. Called by many threads at once. On error
  /// nothing is known of any.
  virtual Result<std::unique_ptr<KeptChanges>> resolve(std::span<TileChanges> /*changes*/) const {
    return std::unique_ptr<KeptChanges>();
  }

  /// Opens memory for a full version: the final place where nothing is committed, else as `policy` says
  /// (in_place: committed() becomes null at once). Errors: no_space; timed_out or cancelled, and then nothing is open.
  virtual Status begin_full(FullUpdatePolicy policy, const CallContext& until) = 0;
  /// A subscribed tile of the open full update, to be written or read: its place, or a copy of it in `scratch`. It has
  /// what was put before. Null if no update is open.
  virtual Result<TileRows> full_tile(const Tile& tile, std::vector<std::byte>& scratch) = 0;
  /// The tile is what `rows` has: those of full_tile(), or any others. Different tiles may be put by different threads.
  virtual Status put_tile(const Tile& tile, const TileRows& rows) = 0;
  /// Lets devices read this host memory, which begins a page, where it is. Null: the target has no use for that. Takes
  /// long for much memory. no_space or io: a device refuses it; timed_out, cancelled.
  virtual Result<std::unique_ptr<RegisteredHostMemory>> lend(std::span<std::byte> /*memory*/,
                                                             const CallContext& /*until*/) {
    return std::unique_ptr<RegisteredHostMemory>();
  }
  /// put_tile for tiles of which `kept` has the ranks [first, end). They are contiguous in lent memory, from
  /// `rows` on, each without gaps and from a multiple of kTileAlignment; and stay there, unchanged, until the update is
  /// committed or discarded.
  virtual Status put_lent(RegisteredHostMemory& /*memory*/, std::uint64_t /*first*/, std::uint64_t /*end*/,
                          const std::byte* /*rows*/) {
    return Error(Errc::internal, "nothing was lent");
  }
  /// Where all rows of a tensor are contiguous in the open full update: those who receive many at once may
  /// write there, and put no tile. Null: nowhere.
  virtual std::byte* full_rows(std::uint32_t tensor) = 0;
  /// Makes the full update, which the caller has verified whole, the committed version. An error that leaves live
  /// memory with parts of two versions leaves nothing committed; likewise of commit_delta and rollback. After timed_out
  /// the version before is still there, if there was one.
  virtual Status commit_full(TargetState state, Deadline deadline) = 0;
  /// Gives up an open full update; the committed version (if not in place) is untouched.
  virtual void discard_full() noexcept = 0;

  /// Applies verified steps, oldest first, and makes the result the committed version; on any error, the passed
  /// deadline (timed_out) included, the old one stays.
  virtual Status commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) = 0;

  /// Rolls the last commit back, bit for bit. unsupported if there is nothing to roll back. Waits for nobody, and does
  /// no more work than the commit did.
  virtual Status rollback() = 0;
  /// The last commit will not be rolled back any more: gives up what is kept for that alone.
  virtual void forget_rollback() noexcept = 0;
};

}  // namespace deltasync
