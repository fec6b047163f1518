// The target that keeps versions as HF model directories (targets.md).
//
// The committed directory is mapped read only and never written. A full update fills an incoming directory through a
// mapping; a delta goes into the version before the committed one, if a write lease on each of its files proves that
// nobody has them, else into a copy (hf_target_delta.cpp). Either becomes a version by a rename, and the committed one
// by the symlink.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/fork_guard.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/directory/hf_patch.hpp"
#include "receiver/targets/directory/hf_store.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync {

/// The version before the committed one: what rollback() returns to and the next delta may patch.
struct Previous {
  std::string name;
  TargetState state;
  std::vector<StagedStep> steps;  ///< from it to the committed version; empty: it cannot be patched
};

/// A full update that is open.
struct OpenFull {
  std::filesystem::path directory;
  MappedModel model;       ///< writable
  bool lost_live = false;  ///< it began by giving up the version before
};

class HfTarget final : public Target, public CanRollBack, public CanLendRows {
 public:
  explicit HfTarget(LayoutPtr layout, HfStore store) : layout_(std::move(layout)), store_(std::move(store)) {}
  ~HfTarget() override { discard_full(); }  // a forked child's copy leaves the directory to the parent

  const LayoutPtr& layout() const override { return layout_; }
  TargetCapabilities capabilities() override {
    TargetCapabilities can;
    can.writes_side_files = true;
    can.rollback = this;
    can.rows = this;
    return can;
  }
  Status open(ThreadPool& pool, const CallContext& until) override;
  const TargetState* committed() const override { return committed_ ? &*committed_ : nullptr; }
  Result<TileRows> live_tile(const Tile& tile, std::vector<std::byte>& scratch) const override;
  void invalidate() noexcept override;
  Status begin_full(FullUpdatePolicy policy, const CallContext& until) override;
  Result<TileRows> full_tile(const Tile& tile, std::vector<std::byte>& scratch) override;
  Status put_tile(const Tile& tile, const TileRows& rows) override;
  std::byte* full_rows(std::uint32_t tensor) override;
  Status commit_full(TargetState state, Deadline deadline) override;
  void discard_full() noexcept override;
  Status commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) override;
  Status rollback() override;
  /// The version before stays for its readers, and to be patched.
  void forget_rollback() noexcept override { can_rollback_ = false; }

 private:
  struct Resumed {
    TargetState state;
    MappedModel model;
  };
  Result<Resumed> resume(const std::string& name, const CallContext& until);
  std::vector<std::string> resume_order() const;
  void drop_committed();
  Result<std::filesystem::path> with_room(const std::function<Result<std::filesystem::path>()>& write);
  Result<std::filesystem::path> fill_incoming(const CallContext& until);
  Result<std::optional<std::filesystem::path>> patch_previous(const std::vector<StagedStep>& steps,
                                                              const TargetState& state, Deadline deadline);
  Result<std::filesystem::path> write_again(const std::vector<StagedStep>& steps, const TargetState& state,
                                            Deadline deadline);
  Status copy_committed(const std::vector<UniqueFd>& files, const std::vector<std::filesystem::path>& paths,
                        Deadline deadline);
  Status patch(const std::vector<PatchFile>& files, std::vector<const StagedStep*> steps,
               std::vector<std::uint64_t> digests, const TargetState& after, std::function<bool()> go_on,
               Deadline deadline);
  Status make_current(const std::filesystem::path& incoming, TargetState state);
  void remove_unused();

  const LayoutPtr layout_;
  HfStore store_;
  ThreadPool* pool_ = nullptr;
  std::optional<TargetState> committed_;
  std::string name_;  ///< of the committed version
  MappedModel live_;  ///< of the committed version
  std::optional<Previous> previous_;
  std::string served_;  ///< instead of previous_: what `current` led to, no base of ours, to which rollback() returns
  bool can_rollback_ = false;
  std::optional<OpenFull> full_;
  const ForkGuard fork_guard_;
  bool leases_work_ = true;  ///< until a filesystem says otherwise
};

}  // namespace deltasync
