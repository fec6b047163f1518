// The target that the user has bound, as the receivers of its parts see it: each its own tiles, by its part's numbers.
// They pull at once; what they commit is gathered, and becomes one commit of the real target.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "format/part.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync::receiver {

/// What the parts of one target share. Between begin() and the end of the pulls, any thread.
class JointUpdate {
 public:
  explicit JointUpdate(Target& target) : target_(target) {}

  Target& target() const noexcept { return target_; }
  /// All pulls that follow bring deltas, or all bring full updates. Not while any goes on.
  void begin(bool full) {
    full_ = full;
    full_is_needed_ = false;
  }
  bool is_full() const noexcept { return full_; }
  /// A full update is open, or was refused; it lasts over several begins of one.
  bool is_open() const;
  /// Some part could not do with a delta.
  bool full_is_needed() const noexcept { return full_is_needed_; }

  /// Opens the full update, once for all parts. `cancelled` if deltas are wanted: see full_is_needed().
  Status begin_full(FullUpdatePolicy policy, const CallContext& until);
  /// For all parts: none has a full update open any more.
  void discard_full() noexcept;
  /// The real target has committed it.
  void full_is_committed() noexcept;

 private:
  Target& target_;
  std::atomic<bool> full_{false};
  std::atomic<bool> full_is_needed_{false};
  mutable std::mutex mutex_;
  bool open_ = false;  // protected by mutex_
};

/// Belongs to the receiver of one part. What it names of the real target outlives it.
class PartTarget final : public Target,
                         public CanKeepSlices,
                         public CanRepair,
                         public CanResolve,
                         public CanLendRows,
                         public SharesMemory {
 public:
  PartTarget(JointUpdate& joint, const PartMap& map) : joint_(joint), map_(map), can_(joint.target().capabilities()) {}

  /// What the real target has committed now, of this part's tiles. Before each pull.
  void look_at_committed();
  /// Only which version it is: after each commit, while an engine may stand still.
  void look_at_version();
  /// What was committed here since the last time, for the real target; nothing: nothing was.
  struct Gathered {
    std::vector<StagedStep> steps;  ///< of a delta, by tiles of the whole
    TargetState state;              ///< by tiles of the part
  };
  std::optional<Gathered> take_gathered() { return std::exchange(gathered_, std::nullopt); }
  /// The digests of the part's kept tiles, into a table of the whole.
  void scatter(const std::vector<std::uint64_t>& digests, std::vector<std::uint64_t>& whole) const;

  const LayoutPtr& layout() const override { return map_.layout(); }
  TargetCapabilities capabilities() override;
  Status open(ThreadPool& /*pool*/, const CallContext& /*until*/) override { return {}; }
  const TargetState* committed() const override;
  Result<TileRows> live_tile(const Tile& tile, std::vector<std::byte>& scratch) const override;
  void invalidate() noexcept override {}  // the real target's owner sees to it
  Status begin_full(FullUpdatePolicy policy, const CallContext& until) override;
  Result<TileRows> full_tile(const Tile& tile, std::vector<std::byte>& scratch) override;
  Status put_tile(const Tile& tile, const TileRows& rows) override;
  Status commit_full(TargetState state, Deadline deadline) override;
  void discard_full() noexcept override {}  // likewise: the other parts may have it open
  Status commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) override;

  Status subscribe(const TileSet& tiles) override;
  const TileSet* kept() const override { return &kept_; }
  Status begin_repair(const CallContext& until) override { return can_.repair->begin_repair(until); }
  Status repair_tile(const Tile& tile, const TileRows& rows) override;
  Status end_repair() override { return can_.repair->end_repair(); }
  Result<std::unique_ptr<KeptChanges>> resolve(std::span<TileChanges> changes) const override;
  std::byte* full_rows(std::uint32_t tensor) override;
  bool shares_memory() const override { return can_.shared->shares_memory(); }

 private:
  JointUpdate& joint_;
  const PartMap& map_;
  const TargetCapabilities can_;  ///< the real target's
  TileSet kept_;
  std::optional<TargetState> committed_;
  std::optional<Gathered> gathered_;
};

}  // namespace deltasync::receiver
