// What some targets can do, and others not: an interface for each. A target names those that it has in its
// TargetCapabilities; nobody calls one that is not named there.
//
// Threads, errors and the life of an update are those of Target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/call_context.hpp"
#include "delta/changes.hpp"
#include "deltasync/placement.hpp"
#include "deltasync/result.hpp"
#include "format/tile_set.hpp"
#include "format/tiling.hpp"
#include "format/wire_report.hpp"
#include "receiver/targets/tile_rows.hpp"

namespace deltasync {

// ---- commits -------------------------------------------------------------------------------------------------------

/// Commits can be rolled back. Without it they are final.
class CanRollBack {
 public:
  /// Rolls the last commit back, bit for bit. unsupported if there is nothing to roll back: that is possible after a
  /// commit, until the next update begins or forget_rollback(). Waits for nobody, and does no more work than the commit
  /// did.
  virtual Status rollback() = 0;
  /// The last commit will not be rolled back any more: gives up what is kept for that alone.
  virtual void forget_rollback() noexcept = 0;

 protected:
  ~CanRollBack() = default;
};

// ---- which tiles ---------------------------------------------------------------------------------------------------

/// Keeps some tiles and no others. Without it a target keeps whole models.
class CanKeepSlices {
 public:
  /// Called once, before open(): from now on only these tiles are kept, compared and handed out. invalid_argument: they
  /// cannot be these.
  virtual Status subscribe(const TileSet& tiles) = 0;
  /// The tiles that are kept. Never null; lives as long as the target.
  virtual const TileSet* kept() const = 0;

 protected:
  ~CanKeepSlices() = default;
};

// ---- looking at the committed version where it lies ----------------------------------------------------------------

/// Knows a faster way to the digests of what is live than through live_tile().
class CanDigest {
 public:
  /// The state digests of kept tiles of the committed version as they are where it lies now, in the order of `tiles`.
  /// On error some are set.
  virtual Status live_digests(std::span<const std::uint64_t> tiles, std::span<std::uint64_t> digests,
                              const CallContext& until) = 0;

 protected:
  ~CanDigest() = default;
};

/// Of a tile that is as it was committed where it is read, some element has another place with something else in it.
struct WrongCopy {
  std::uint64_t tile = 0;
  std::string memory;  ///< the live memory that has the first such place
};

/// Elements may have more places than the one that they are read from.
class CanReadCopies {
 public:
  /// Makes what wrong_copies() reads with, which does that itself where nobody has: it takes memory of devices, once.
  /// no_space, io; timed_out or cancelled. On error the next call tries again.
  virtual Status prepare_copies(const CallContext& until) = 0;
  /// Of these tiles (ascending), all of which are as they were committed where they are read, those with a place of
  /// which that is not true.
  virtual Result<std::vector<WrongCopy>> wrong_copies(std::span<const std::uint64_t> tiles,
                                                      const CallContext& until) = 0;

 protected:
  ~CanReadCopies() = default;
};

// ---- writing the committed version where it lies -------------------------------------------------------------------

/// Tiles of the committed version are put again where it lies: begin_repair, repair_tile …, end_repair, while no update
/// is open that goes there. Those who may not touch live memory at a commit may not meanwhile.
class CanRepair {
 public:
  /// not_found if nothing is committed. On error nothing has changed.
  virtual Status begin_repair(const CallContext& until) = 0;
  /// The tile's very bytes, which the caller has verified, to every place that it has. By many threads, as put_tile.
  virtual Status repair_tile(const Tile& tile, const TileRows& rows) = 0;
  /// What was put is there, or the error says why not, and then there is no version any more.
  virtual Status end_repair() = 0;

 protected:
  ~CanRepair() = default;
};

/// Keeps a copy of the version beside live memory, so that this can be given away for a while.
class CanSleep {
 public:
  /// A tile of the committed version from that copy; null: it has none. The caller verifies it.
  virtual Result<TileRows> kept_tile(const Tile& tile, std::vector<std::byte>& scratch) const = 0;
  /// Live memory may be given away once this returns: committed() is null, the copy stays. No update may be open. On
  /// error something may still write live memory: it has no version any more, but is not given up.
  virtual Status release(const CallContext& until) = 0;
  /// All tiles from the copy, each verified: committed() is that version again. No update may be open.
  virtual Status restore(const CallContext& until) = 0;

 protected:
  ~CanSleep() = default;
};

// ---- deltas --------------------------------------------------------------------------------------------------------

/// The changes of some tiles, resolved, where a target keeps them for the commit. Given back when this ends, by any
/// thread; ends before its target.
class KeptChanges {
 public:
  virtual ~KeptChanges() = default;
  std::vector<std::uint64_t> tiles;  ///< ascending
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

/// Resolves changes where the committed version lies: for tiles that have to come from far to be looked at.
class CanResolve {
 public:
  /// Resolves those that it marks. What it returns (or null) has those that are marked as kept, for the commit of the
  /// frame that it goes into. Called by many threads at once. On error nothing is known of any.
  virtual Result<std::unique_ptr<KeptChanges>> resolve(std::span<TileChanges> changes) const = 0;

 protected:
  ~CanResolve() = default;
};

// ---- full updates --------------------------------------------------------------------------------------------------

/// Has tensors of the open full update as rows in memory, where those who receive many rows at once may write.
class CanLendRows {
 public:
  /// Where all rows of the tensor are contiguous: who writes there puts no tile. Null: nowhere.
  virtual std::byte* full_rows(std::uint32_t tensor) = 0;

 protected:
  ~CanLendRows() = default;
};

/// Others can write the memory that a full update may land in: an engine, or the user.
class SharesMemory {
 public:
  /// True if the full update that is open now lands there: what a pull that ended early has left is read again before
  /// it is trusted.
  virtual bool shares_memory() const = 0;

 protected:
  ~SharesMemory() = default;
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

/// Its devices read host memory of others where it is.
class CanBorrow {
 public:
  /// Lets them read this memory, which begins a page, and which `keeper` has mapped for as long as their drivers know
  /// it. Never null. Takes long for much memory. no_space or io: a device refuses it; timed_out, cancelled.
  virtual Result<std::unique_ptr<RegisteredHostMemory>> lend(std::span<std::byte> memory,
                                                             std::shared_ptr<const void> keeper,
                                                             const CallContext& until) = 0;
  /// put_tile for tiles of which kept() has the ranks [first, end), while a full update is open that goes to live
  /// memory. They are contiguous in lent memory, from `rows` on, each without gaps and from a multiple of
  /// kTileAlignment; and stay there, unchanged, until the update is committed or discarded.
  virtual Status put_lent(RegisteredHostMemory& memory, std::uint64_t first, std::uint64_t end,
                          const std::byte* rows) = 0;

 protected:
  ~CanBorrow() = default;
};

// ---- waiting -------------------------------------------------------------------------------------------------------

/// Calls may have to wait for a device.
class WaitsForDevices {
 public:
  /// A pull begins, of which all that came before is committed or given up; and ends. Until then no call of live_tile,
  /// resolve, full_tile or put_tile waits beyond `until`: timed_out or cancelled.
  virtual void begin_pull(const CallContext& until) = 0;
  virtual void end_pull() noexcept = 0;
  /// Waits until what the engine has in its streams now is done, so that a commit need not wait for it. timed_out,
  /// cancelled: nothing was changed.
  virtual Status wait_for_engine(const CallContext& until) = 0;
  /// Waits until nothing that was asked for reads or writes live memory any more. timed_out, cancelled, io: something
  /// may still do.
  virtual Status finish_live(const CallContext& until) = 0;

 protected:
  ~WaitsForDevices() = default;
};

/// What is committed is served on to others, by somebody else.
class CanHandOn {
 public:
  /// Waits until the committed version is served. timed_out, connection, cancelled; invalid_argument if nothing is
  /// committed; aborted if it is lost, and then nothing is committed any more; corrupt if it cannot be served. A call
  /// for one that is known to be served looks whether it still is, for a second at most.
  virtual Status wait_served(const CallContext& until) = 0;
  /// Of the agent that serves it, as wire::Hello::instance; 0: not known.
  virtual std::uint64_t agent_instance() const = 0;
  /// Where others may pull from it; empty: that is not known.
  virtual std::string advertised() const = 0;
  /// That agent is told where its versions come from. Best effort.
  virtual void tell_parents(wire::Parents parents) = 0;

  // An open full update may be handed on while it comes.
  /// What is put from now on is of this version; of tiles with `have` the bytes are there. Again for each further plan.
  virtual void comes(const Version& version, const Digest128& root, std::span<const std::uint64_t> digests,
                     std::span<const std::uint8_t> have) = 0;
  /// These tiles have their digests, and are put again with the same bytes only. Any thread, while no other call is
  /// under way but of its own kind and put_tile.
  virtual void came(std::span<const std::uint64_t> tiles) = 0;
  /// Before tiles become another version's.
  virtual void comes_no_more() noexcept = 0;

  // So may the delta from the committed version.
  /// This step to `to` comes. Again for each further plan.
  virtual void delta_comes(const wire::DeltaStep& step, const Version& to) = 0;
  /// All that changes in these tiles, verified: one frame, or nothing if that is empty. No two calls have a tile in
  /// common. Any thread, while no other call is under way but of its own kind.
  virtual void frame_came(const wire::TileRange& tiles, ByteSpan frame) = 0;
  /// Not all of it did, and no more will.
  virtual void delta_comes_no_more() noexcept = 0;

 protected:
  ~CanHandOn() = default;
};

// ---- all of them ---------------------------------------------------------------------------------------------------

/// What a target can do: it cannot where the pointer is null or the flag false. The same as long as the target lives;
/// what the pointers name lives as long.
struct TargetCapabilities {
  /// commit_delta makes use of StagedFrame::resolved.
  bool takes_decoded = false;
  /// A full update writes files of the sidecar, which then must not be an old one.
  bool writes_side_files = false;
  /// Versions lie where an engine has its weights, by a placement: a shadow can be kept beside them. It then has
  /// rollback, slices, repair and digests.
  bool in_live_memory = false;
  const Placement* placement = nullptr;  ///< by which they do

  CanRollBack* rollback = nullptr;
  CanKeepSlices* slices = nullptr;
  CanDigest* digests = nullptr;
  CanReadCopies* copies = nullptr;
  CanRepair* repair = nullptr;
  CanSleep* sleep = nullptr;
  CanResolve* resolve = nullptr;
  CanLendRows* rows = nullptr;
  SharesMemory* shared = nullptr;
  CanBorrow* borrow = nullptr;
  WaitsForDevices* devices = nullptr;
  CanHandOn* hand_on = nullptr;

  friend bool operator==(const TargetCapabilities&, const TargetCapabilities&) = default;
};

}  // namespace deltasync
