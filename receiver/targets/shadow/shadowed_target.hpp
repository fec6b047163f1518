// A target in live memory with a shadow of it on the host (deltasync/target.hpp).
//
// Invariant: where both have a committed version it is the same. The shadow goes first, forth: its memory is ours, and
// does not fail; so what live memory refuses is rolled back there by a rollback that does not fail either. And live
// memory goes first, back. Where live memory lost its version it gets the shadow's, tile by tile, if that works.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "deltasync/target.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/shadow/shadow_memory.hpp"

namespace deltasync {

/// What a shadow has.
struct ShadowState {
  std::uint64_t bytes = 0;         ///< of host memory that it takes; while a full update over it is staged, or can be
                                   ///< rolled back, as much again is taken
  bool pinned = false;             ///< devices read it where it is
  std::optional<Version> version;  ///< the last that was committed whole, whatever live memory has
  bool released = false;           ///< live memory is
};
/// Nothing for a target without one.
std::optional<ShadowState> shadow_of(const Target& target);

/// Wraps a target in live memory. invalid_argument without one, unsupported for any other kind.
Result<std::unique_ptr<Target>> make_shadowed_target(std::unique_ptr<Target> live, const ShadowOptions& options = {});

class ShadowedTarget final : public Target,
                             public CanRollBack,
                             public CanKeepSlices,
                             public CanRepair,
                             public CanSleep {
 public:
  ShadowedTarget(std::unique_ptr<Target> live, const ShadowOptions& options);

  const LayoutPtr& layout() const override { return live_->layout(); }
  /// What looks at live memory is the live target's own. It has no rows to lend: what lands in memory directly would be
  /// in one of both only.
  TargetCapabilities capabilities() override;
  Status subscribe(const TileSet& tiles) override;
  Status open(ThreadPool& pool, const CallContext& until) override;
  const TileSet* kept() const override { return can_.slices->kept(); }
  const TargetState* committed() const override;
  Result<TileRows> live_tile(const Tile& tile, std::vector<std::byte>& scratch) const override;

  Status begin_repair(const CallContext& until) override;
  Status repair_tile(const Tile& tile, const TileRows& rows) override;
  Status end_repair() override;
  Result<TileRows> kept_tile(const Tile& tile, std::vector<std::byte>& scratch) const override;
  void invalidate() noexcept override;

  Status begin_full(FullUpdatePolicy policy, const CallContext& until) override;
  Result<TileRows> full_tile(const Tile& tile, std::vector<std::byte>& scratch) override;
  Status put_tile(const Tile& tile, const TileRows& rows) override;
  Status commit_full(TargetState state, Deadline deadline) override;
  void discard_full() noexcept override;
  Status commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) override;
  Status rollback() override;
  void forget_rollback() noexcept override;

  ShadowState state() const;
  Status release(const CallContext& until) override;
  Status restore(const CallContext& until) override;

 private:
  /// Where the tiles of the open full update go.
  enum class Full : std::uint8_t {
    closed,
    both,    ///< to the shadow, and as the live target has them
    shadow,  ///< to the shadow's staging alone; the commit writes live memory from there
  };
  enum class Undo : std::uint8_t {
    none,
    both,    ///< each rolls its own commit back
    shadow,  ///< the shadow does, and live memory is written from there
  };

  Status commit_both(TargetState state, Deadline deadline);
  Status commit_through(TargetState state, Deadline deadline);
  Status write_live(const CallContext& until);
  Error roll_back(Error why, Deadline deadline);
  Error with_what_is_left(Error why) const;

  const std::unique_ptr<Target> live_;
  const TargetCapabilities can_;  ///< the live target's
  ShadowMemory shadow_;
  ThreadPool* pool_ = nullptr;
  bool released_ = false;
  Full full_ = Full::closed;
  Undo undo_ = Undo::none;
};

}  // namespace deltasync
