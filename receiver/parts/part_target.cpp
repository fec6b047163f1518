#include "receiver/parts/part_target.hpp"

#include <algorithm>
#include <utility>

namespace deltasync::receiver {

// ---- what the parts share ------------------------------------------------------------------------------------------

bool JointUpdate::is_open() const {
  const std::lock_guard lock(mutex_);
  return open_;
}

Status JointUpdate::begin_full(FullUpdatePolicy policy, const CallContext& until) {
  if (!full_) {
    full_is_needed_ = true;
    return Error(Errc::cancelled, "this part needs a full update");
  }
  const std::lock_guard lock(mutex_);
  if (open_) return {};
  DS_TRY(target_.begin_full(policy, until));
  open_ = true;
  return {};
}

void JointUpdate::discard_full() noexcept {
  const std::lock_guard lock(mutex_);
  if (open_) target_.discard_full();
  open_ = false;
}

void JointUpdate::full_is_committed() noexcept {
  const std::lock_guard lock(mutex_);
  open_ = false;
  full_ = false;
}

// ---- one part ------------------------------------------------------------------------------------------------------

/// Where each row of tiles keeps its order, changes may stay decoded beside their frame: the target finds them by it.
TargetCapabilities PartTarget::capabilities() {
  TargetCapabilities can;
  can.takes_decoded = can_.takes_decoded && map_.keeps_order();
  can.writes_side_files = can_.writes_side_files;
  can.slices = this;
  if (can_.repair != nullptr) can.repair = this;
  if (can_.resolve != nullptr && map_.keeps_order()) can.resolve = this;
  if (can_.rows != nullptr) can.rows = this;
  if (can_.shared != nullptr) can.shared = this;
  return can;
}

Status PartTarget::subscribe(const TileSet& tiles) {
  kept_ = tiles;
  return {};
}

void PartTarget::look_at_committed() {
  const TargetState* const whole = joint_.target().committed();
  if (whole == nullptr) {
    committed_.reset();
    return;
  }
  TargetState mine;
  mine.version = whole->version;
  mine.digests.assign(static_cast<std::size_t>(layout()->tile_count()), 0);
  for (const wire::TileRange& range : kept_.ranges()) {
    for (std::uint64_t tile = range.first; tile < range.end; ++tile) {
      mine.digests[tile] = whole->digests[map_.tile_in_whole(tile)];
    }
  }
  mine.root = kept_.root(mine.digests);
  committed_ = std::move(mine);
}

void PartTarget::look_at_version() {
  const TargetState* const whole = joint_.target().committed();
  if (whole == nullptr) {
    committed_.reset();
  } else {
    if (!committed_) committed_.emplace();
    committed_->version = whole->version;
  }
}

void PartTarget::scatter(const std::vector<std::uint64_t>& digests, std::vector<std::uint64_t>& whole) const {
  for (const wire::TileRange& range : kept_.ranges()) {
    for (std::uint64_t tile = range.first; tile < range.end; ++tile) {
      whole[map_.tile_in_whole(tile)] = digests[tile];
    }
  }
}

/// A full update comes over nothing: so none of the parts asks for a delta.
const TargetState* PartTarget::committed() const {
  return committed_ && !joint_.is_full() ? &*committed_ : nullptr;
}

Result<TileRows> PartTarget::live_tile(const Tile& tile, std::vector<std::byte>& scratch) const {
  return joint_.target().live_tile(map_.tile_in_whole(tile), scratch);
}

Status PartTarget::begin_full(FullUpdatePolicy policy, const CallContext& until) {
  return joint_.begin_full(policy, until);
}

Result<TileRows> PartTarget::full_tile(const Tile& tile, std::vector<std::byte>& scratch) {
  return joint_.target().full_tile(map_.tile_in_whole(tile), scratch);
}

Status PartTarget::put_tile(const Tile& tile, const TileRows& rows) {
  return joint_.target().put_tile(map_.tile_in_whole(tile), rows);
}

Status PartTarget::commit_full(TargetState state, Deadline /*deadline*/) {
  gathered_ = Gathered{{}, std::move(state)};
  return {};
}

Status PartTarget::commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline /*deadline*/) {
  for (StagedStep& step : steps) {
    for (StagedFrame& frame : step.frames) {
      for (delta::TileRecord& record : frame.records) record.tile = map_.tile_in_whole(record.tile);
      if (map_.keeps_order()) continue;
      std::sort(frame.records.begin(), frame.records.end(),
                [](const auto& a, const auto& b) { return a.tile < b.tile; });
    }
  }
  gathered_ = Gathered{std::move(steps), std::move(state)};
  return {};
}

Status PartTarget::repair_tile(const Tile& tile, const TileRows& rows) {
  return can_.repair->repair_tile(map_.tile_in_whole(tile), rows);
}

Result<std::unique_ptr<KeptChanges>> PartTarget::resolve(std::span<TileChanges> changes) const {
  for (TileChanges& of : changes) of.tile = map_.tile_in_whole(of.tile);
  auto kept = can_.resolve->resolve(changes);
  for (TileChanges& of : changes) of.tile = *map_.tile_in_part(of.tile);
  return kept;
}

/// Rows of a part of the columns are not contiguous where the target has the whole rows.
std::byte* PartTarget::full_rows(std::uint32_t tensor) {
  const Tensor& mine = layout()->tensors()[tensor];
  const TensorSlice there = map_.slice_in_whole({tensor, {0, 0, mine.rows, mine.cols}});
  const Tensor& whole = map_.whole()->tensors()[there.tensor];
  if (mine.cols != whole.cols) return nullptr;
  std::byte* const rows = can_.rows->full_rows(there.tensor);
  return rows == nullptr ? nullptr : rows + there.rect.row * whole.row_bytes();
}

}  // namespace deltasync::receiver
