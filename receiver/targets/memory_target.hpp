// A version that lies in memory, no matter whose: the part that host memory, the live memory of an engine and that of a
// device have in common. Which calls may follow which, what is committed, and what rolls a commit back is decided here;
// where tiles are and how they get there and back is the kind's.
//
// What is where:
//   live memory  the committed version (and a full update that may go to its final place)
//   staging      a staged full update; after its commit, the version before, until the next update begins
// A delta is applied in live memory: its decoded changes are exchanged with what is there, and are the undo log from
// then on; of frames that come without them the frame itself is that log, with the bytes that it overwrote.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "format/tiling.hpp"
#include "receiver/targets/delta_log.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync {

/// What a kind provides are the private virtual functions below; one whose deltas are applied tile by tile is a
/// TileTarget. Each is called when the state allows it and not otherwise, so a kind keeps no state of its own but
/// its memory. An error of a function that writes live memory (put, settle, settle_full, exchange_staging, and
/// what rolls a delta back) means that nobody knows what the memory has: the target then has no version at all,
/// committed() is null, and the next full update may land there. So a kind that can tell, or repair, does so before it
/// returns an error.
class MemoryTarget : public Target,
                     public CanRollBack,
                     public CanKeepSlices,
                     public CanDigest,
                     public CanRepair,
                     public SharesMemory {
 public:
  const LayoutPtr& layout() const final { return layout_; }
  /// All that this class has. A kind adds what it has beside that; one that shares its memory with nobody takes
  /// `shared` away.
  TargetCapabilities capabilities() override;
  Status subscribe(const TileSet& tiles) final;
  Status open(ThreadPool& pool, const CallContext& until) final;
  bool shares_memory() const final { return full_ == Full::first || full_ == Full::in_place; }
  const TileSet* kept() const final { return &tiles_; }
  const TargetState* committed() const final { return committed_ ? &*committed_ : nullptr; }
  Result<TileRows> live_tile(const Tile& tile, std::vector<std::byte>& scratch) const final;
  Status live_digests(std::span<const std::uint64_t> tiles, std::span<std::uint64_t> digests,
                      const CallContext& until) override;
  Status begin_repair(const CallContext& until) final;
  Status repair_tile(const Tile& tile, const TileRows& rows) final;
  Status end_repair() final;
  void invalidate() noexcept final;
  Status begin_full(FullUpdatePolicy policy, const CallContext& until) final;
  Result<TileRows> full_tile(const Tile& tile, std::vector<std::byte>& scratch) final;
  Status put_tile(const Tile& tile, const TileRows& rows) final;
  Status commit_full(TargetState state, Deadline deadline) final;
  void discard_full() noexcept final;
  Status commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) final;
  Status rollback() final;
  void forget_rollback() noexcept final;

 protected:
  /// `name` is what log lines call it: "host_target". `served`: live memory has something that is in use, though no
  /// version of ours; full updates treat it as they do a live version.
  MemoryTarget(std::string name, LayoutPtr layout, TileSet tiles, bool served = false)
      : layout_(std::move(layout)), tiles_(std::move(tiles)), name_(std::move(name)), served_(served) {}

  enum class Full : std::uint8_t {
    closed,
    first,     ///< nothing was there: tiles land in live memory
    in_place,  ///< likewise, over what was there, which is lost
    staged,    ///< they land in staging
  };
  /// Whether a full update is open, and where its tiles land.
  Full full() const noexcept { return full_; }

  const Layout& layout_of() const noexcept { return *layout_; }
  const TileSet& tiles() const noexcept { return tiles_; }
  ThreadPool& pool() const noexcept { return *pool_; }  ///< once it is open
  std::size_t row_bytes(const Tile& tile) const {
    return static_cast<std::size_t>(tile.rect.cols) * layout_->tensors()[tile.tensor].element_bytes;
  }
  /// The version that rollback() brings back from staging; null: it brings none, or from elsewhere.
  const TargetState* staged_before() const noexcept {
    return undo_.kind == Undo::Kind::staged && undo_.state ? &*undo_.state : nullptr;
  }

 private:
  // ---- what a kind provides. Functions with a tile are called by many threads at once, as in Target; all others by
  // one, while no such call is under way.

  /// Why these tiles cannot be the ones that are kept from now on.
  virtual Status check_subscription(const TileSet& /*tiles*/) const { return {}; }
  /// Before anything else: what is to be allocated, started or looked at once. pool() is there.
  virtual Status open_memory(const CallContext& until) = 0;

  /// Live memory is about to take a whole version, tile by tile, where nothing is committed or what is will be given
  /// up. On error all is as it was.
  virtual Status open_live(const CallContext& until) = 0;
  /// A tile of live memory, read only: where it is, or a copy of it in `scratch`.
  virtual Result<TileRows> read_tile(const Tile& tile, std::vector<std::byte>& scratch) const = 0;
  /// The same to be changed, and then put; on error nothing has changed.
  virtual Result<TileRows> open_tile(const Tile& tile, std::vector<std::byte>& scratch) = 0;
  /// The tile is what `rows` has: those of open_tile, which have changed, or any others. They are not needed any more
  /// when this returns; the tile is there when settle_full() has returned.
  virtual Status put(const Tile& tile, const TileRows& rows) = 0;
  virtual Status settle_full(const CallContext& until) = 0;

  /// Room for a second version in host memory; nothing if it is there already. On error there is none. no_space,
  /// timed_out, cancelled.
  virtual Status open_staging(const CallContext& until) = 0;
  virtual void close_staging() noexcept = 0;
  /// A tile of it, to be read and written in place. A kind that has none of its own rows has them contiguous.
  virtual TileRows staged_tile(const Tile& tile) const = 0;
  /// All subscribed tiles of staging and live memory change places. The commit of a staged update and its rollback:
  /// short, and waits for nobody but the memory.
  virtual Status exchange_staging(const CallContext& until) = 0;
  /// What staging takes, for messages.
  virtual std::uint64_t staging_bytes() const = 0;

  /// Applies verified steps to live memory, whose digests these are, and rolls them back; forget_delta: that will not
  /// be asked for any more. On error memory is as before, unless it is `torn`.
  virtual Status apply_delta(std::vector<StagedStep> steps, std::span<const std::uint64_t> digests, Deadline deadline,
                             bool& torn) = 0;
  virtual Status revert_delta() = 0;
  virtual void forget_delta() noexcept = 0;
  /// True if live memory is as it was before the call of exchange_staging or revert_delta that has just failed: then
  /// the version is not lost.
  virtual bool kept_whole() const noexcept { return false; }

  // ---- the state

  /// How to roll the last commit back.
  struct Undo {
    enum class Kind : std::uint8_t {
      none,    ///< nothing committed since the update began, or the version before is gone
      empty,   ///< the first full update: before it there was nothing
      staged,  ///< the version before is in staging
      deltas,  ///< the version before is live memory with the delta rolled back
    };
    Kind kind = Kind::none;
    std::optional<TargetState> state;  ///< of the version before, if that is one
  };

  std::string what_is_live() const;
  Error lose_version(Error why);
  void forget_undo() noexcept;

  const LayoutPtr layout_;
  TileSet tiles_;  ///< what is kept; all other bytes are left alone
  const std::string name_;
  ThreadPool* pool_ = nullptr;
  std::optional<TargetState> committed_;
  bool served_;  ///< without a committed version, live memory has something that is in use
  Full full_ = Full::closed;
  Undo undo_;
  std::atomic<bool> repair_failed_{false};  ///< since begin_repair
};

/// A kind whose deltas go through a DeltaLog: TileStore is the rest of what it provides.
class TileTarget : public MemoryTarget, protected TileStore {
 protected:
  using MemoryTarget::MemoryTarget;

 private:
  // These of both are one.
  Result<TileRows> open_tile(const Tile& tile, std::vector<std::byte>& scratch) override = 0;
  Status put(const Tile& tile, const TileRows& rows) override = 0;
  Status settle() override { return {}; }

  Status settle_full(const CallContext& /*done by memory alone*/) final { return settle(); }
  Status apply_delta(std::vector<StagedStep> steps, std::span<const std::uint64_t> digests, Deadline deadline,
                     bool& torn) final;
  Status revert_delta() final { return log_.revert(layout_of(), *this, pool()); }
  void forget_delta() noexcept final { log_ = {}; }

  DeltaLog log_;
};

}  // namespace deltasync
