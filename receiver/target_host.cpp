// A version in host memory, laid out like a half. Memory comes from the user or is this target's own mapping.
//
// What is where:
//   live()    the committed version (and a full update that may go to its final place)
//   spare_    a staged full update; after its commit, the version before, until the next update begins
// A delta is applied in live(): its decoded changes are exchanged with what is there, and are the undo log from then
// on; of frames that come without them the frame itself is that log, with the bytes that it overwrote.
#include <algorithm>
#include <cstring>
#include <optional>

#include "base/log.hpp"
#include "receiver/host_memory.hpp"
#include "receiver/target_checks.hpp"
#include "receiver/tile_memory.hpp"

namespace deltasync {
namespace {

/// What takes one frame back: the bytes that commit_tile overwrote, record i's end at ends[i]. Records whose changes
/// were exchanged need none: what they overwrote is in StagedFrame::resolved.
struct FrameUndo {
  std::vector<std::byte> bytes;
  std::vector<std::size_t> ends;
};

/// Deals out the decoded changes of a frame, record by record.
class Resolved {
 public:
  Resolved(const Layout& layout, StagedFrame& frame) : layout_(layout), rest_(frame.resolved) {}
  /// Empty if there are none: a raw tile, or a frame that was not resolved.
  MutByteSpan next(const delta::TileRecord& record) {
    if (rest_.empty()) return {};
    const std::size_t bytes = delta::resolved_bytes(layout_, record);
    const MutByteSpan changes = rest_.first(bytes);
    rest_ = rest_.subspan(bytes);
    return changes;
  }

 private:
  const Layout& layout_;
  MutByteSpan rest_;
};

/// How to take the last commit back.
struct Undo {
  enum class Kind : std::uint8_t {
    none,    ///< nothing committed since the update began, or the version before is gone
    empty,   ///< the first full update: before it there was nothing
    spare,   ///< the version before is in spare_
    deltas,  ///< the version before is live() with `steps` reverted
  };
  Kind kind = Kind::none;
  std::optional<TargetState> state;  ///< of the version before
  std::vector<StagedStep> steps;
  std::vector<std::vector<FrameUndo>> bytes;  ///< by step, by frame
};

class HostTarget final : public Target {
 public:
  HostTarget(LayoutPtr layout, std::span<std::byte> memory)
      : layout_(std::move(layout)), user_(memory), tiles_(TileSet::whole(*layout_)) {}

  const LayoutPtr& layout() const override { return layout_; }
  Status subscribe(const TileSet& tiles) override;
  Status open(ThreadPool& pool, const Until& until) override;
  bool exchanges() const override { return true; }
  const TargetState* committed() const override { return committed_ ? &*committed_ : nullptr; }
  delta::TensorMemory live_memory(std::uint32_t tensor) const override;
  Status begin_full(FullOverLive policy, const Until& until) override;
  delta::TensorMemory full_memory(std::uint32_t tensor) override;
  Status commit_full(TargetState state) override;
  void discard_full() noexcept override;
  Status commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) override;
  Status rollback() override;
  void forget_rollback() noexcept override;

  std::span<std::byte> live() const noexcept { return user_.data() != nullptr ? user_ : own_.span(); }

 private:
  enum class Full : std::uint8_t {
    closed,
    first,     ///< nothing was committed: bytes land in the final place
    in_place,  ///< they land over the version before, which is lost
    staged,    ///< they land in spare_
  };

  /// Where a tile is, and the size of its row in memory.
  struct Place {
    std::byte* first = nullptr;
    std::size_t row_stride = 0;
  };
  Place place_of(const delta::TileRecord& record) const;
  bool memory_is_ours() const noexcept { return user_.data() == nullptr; }
  delta::TensorMemory tensor_in(std::span<std::byte> memory, std::uint32_t tensor) const;
  Result<HostMemory> map_half(const Until& until) const;
  void exchange_live_and_spare();
  void zero_padding(std::span<std::byte> memory) const;
  Status apply_step(StagedStep& step, std::vector<FrameUndo>& undo, Deadline deadline);
  void revert_step(StagedStep& step, const std::vector<FrameUndo>& undo);

  const LayoutPtr layout_;
  const std::span<std::byte> user_;
  TileSet tiles_;  ///< what is kept; all other bytes are left alone
  ThreadPool* pool_ = nullptr;
  HostMemory own_;
  HostMemory spare_;
  std::optional<TargetState> committed_;
  Full full_ = Full::closed;
  Undo undo_;
};

Status HostTarget::subscribe(const TileSet& tiles) {
  if (pool_ != nullptr) return Error(Errc::invalid_argument, "the target is open already");
  tiles_ = tiles;
  return {};
}

Status HostTarget::open(ThreadPool& pool, const Until& /*nothing is here to verify*/) {
  if (!memory_is_ours() && user_.size() < layout_->half_bytes()) {
    return Error(Errc::invalid_argument, "the memory given has " + std::to_string(user_.size()) +
                                             " bytes, the layout needs " + std::to_string(layout_->half_bytes()));
  }
  pool_ = &pool;
  return {};
}

delta::TensorMemory HostTarget::tensor_in(std::span<std::byte> memory, std::uint32_t tensor) const {
  const Tensor& t = layout_->tensors()[tensor];
  return {memory.data() + t.offset, static_cast<std::size_t>(t.row_bytes())};
}

delta::TensorMemory HostTarget::live_memory(std::uint32_t tensor) const {
  if (!committed_) return {};
  return tensor_in(live(), tensor);
}

delta::TensorMemory HostTarget::full_memory(std::uint32_t tensor) {
  if (full_ == Full::closed) return {};
  return tensor_in(full_ == Full::staged ? spare_.span() : live(), tensor);
}

/// With the pages of the subscribed tiles.
Result<HostMemory> HostTarget::map_half(const Until& until) const {
  if (tiles_.is_whole()) return HostMemory::map(layout_->half_bytes(), *pool_, until);
  return HostMemory::map_parts(layout_->half_bytes(), memory_parts(*layout_, tiles_), *pool_, until);
}

/// A transfer writes tensors only; what lies between them in a half is zero by definition.
void HostTarget::zero_padding(std::span<std::byte> memory) const {
  std::uint64_t end = 0;
  for (const Tensor& tensor : layout_->tensors()) {
    std::memset(memory.data() + end, 0, tensor.offset - end);
    end = tensor.offset + tensor.bytes;
  }
  std::memset(memory.data() + end, 0, layout_->half_bytes() - end);
}

Status HostTarget::begin_full(FullOverLive policy, const Until& until) {
  if (pool_ == nullptr) return Error(Errc::invalid_argument, "the target is not open");
  if (full_ != Full::closed) return Error(Errc::invalid_argument, "a full update is open already");
  if (committed_ && policy == FullOverLive::refuse) {
    return Error(Errc::no_space, "a full update over the live version " + to_string(committed_->version) +
                                     " needs a second copy, which the policy refuses");
  }
  undo_ = {};
  if (committed_ && policy == FullOverLive::stage) {
    if (!spare_) {
      DS_ASSIGN(spare_, map_half(until).with_context("second copy for a full update"));
    }
    full_ = Full::staged;
    return {};
  }
  if (memory_is_ours()) {
    if (!own_) {
      DS_ASSIGN(own_, map_half(until));
    }
  } else if (tiles_.is_whole()) {
    zero_padding(user_);
  }
  full_ = committed_ ? Full::in_place : Full::first;
  committed_.reset();
  spare_.release();
  return {};
}

/// Own memory changes place; the user's keeps its address and changes contents.
void HostTarget::exchange_live_and_spare() {
  if (memory_is_ours()) return own_.swap(spare_);
  swap_tiles(*layout_, tiles_, user_.data(), spare_.span().data(), *pool_);
}

Status HostTarget::commit_full(TargetState state) {
  if (full_ == Full::closed) return Error(Errc::invalid_argument, "no full update is open");
  DS_TRY(check_state(*layout_, tiles_, state));
  undo_ = {};
  if (full_ == Full::staged) {
    exchange_live_and_spare();
    undo_.kind = Undo::Kind::spare;
    spdlog::info("host_target keeps_for_rollback version={} bytes={}", to_string(committed_->version), tiles_.bytes());
  } else if (full_ == Full::first) {
    undo_.kind = Undo::Kind::empty;
  }
  undo_.state = std::move(committed_);
  committed_ = std::move(state);
  full_ = Full::closed;
  return {};
}

void HostTarget::discard_full() noexcept {
  if (full_ == Full::staged) spare_.release();
  full_ = Full::closed;
}

HostTarget::Place HostTarget::place_of(const delta::TileRecord& record) const {
  const Tile tile = layout_->tile(record.tile);
  const delta::TensorMemory memory = tensor_in(live(), tile.tensor);
  return {delta::tile_address(memory, tile, layout_->tensors()[tile.tensor].element_bytes), memory.row_stride};
}

/// On error some frames are applied, each of them whole: those whose undo has an end for each record.
Status HostTarget::apply_step(StagedStep& step, std::vector<FrameUndo>& undo, Deadline deadline) {
  undo.resize(step.frames.size());
  return run_all(*pool_, step.frames.size(), deadline, "applying a delta", [&](std::uint64_t i, unsigned) -> Status {
    StagedFrame& frame = step.frames[i];
    undo[i].ends.reserve(frame.records.size());
    Resolved resolved(*layout_, frame);
    for (const delta::TileRecord& record : frame.records) {
      const Place place = place_of(record);
      if (const MutByteSpan changes = resolved.next(record); !changes.empty()) {
        delta::exchange_tile(*layout_, record, place.first, place.row_stride, changes);
      } else {
        delta::save_undo(*layout_, record, place.first, place.row_stride, undo[i].bytes);
        delta::commit_tile(*layout_, record, place.first, place.row_stride);
      }
      undo[i].ends.push_back(undo[i].bytes.size());
    }
    return {};
  });
}

void HostTarget::revert_step(StagedStep& step, const std::vector<FrameUndo>& undo) {
  pool_->run(step.frames.size(), [&](std::uint64_t i, unsigned) {
    StagedFrame& frame = step.frames[i];
    Resolved resolved(*layout_, frame);
    std::size_t from = 0;
    for (std::size_t r = 0; r < undo[i].ends.size(); ++r) {
      const delta::TileRecord& record = frame.records[r];
      const Place place = place_of(record);
      const std::size_t end = undo[i].ends[r];
      if (const MutByteSpan changes = resolved.next(record); !changes.empty()) {
        delta::exchange_tile(*layout_, record, place.first, place.row_stride, changes);
      } else {
        delta::undo_tile(*layout_, record, place.first, place.row_stride,
                         ByteSpan(undo[i].bytes).subspan(from, end - from));
      }
      from = end;
    }
  });
}

Status HostTarget::commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) {
  if (full_ != Full::closed) return Error(Errc::invalid_argument, "a full update is open");
  DS_TRY(check_steps(*layout_, tiles_, committed(), steps, state));
  undo_ = {};
  spare_.release();  // the version before the last full update: from here on it cannot be rolled back to
  undo_.kind = Undo::Kind::deltas;
  undo_.bytes.resize(steps.size());
  for (std::size_t i = 0; i < steps.size(); ++i) {
    Status status = apply_step(steps[i], undo_.bytes[i], deadline);
    if (status.ok()) continue;
    for (std::size_t k = i + 1; k-- > 0;) revert_step(steps[k], undo_.bytes[k]);
    undo_ = {};
    return status;
  }
  undo_.steps = std::move(steps);
  undo_.state = std::move(committed_);
  committed_ = std::move(state);
  return {};
}

Status HostTarget::rollback() {
  if (full_ != Full::closed) return Error(Errc::invalid_argument, "a full update is open");
  switch (undo_.kind) {
    case Undo::Kind::none: return Error(Errc::unsupported, "there is no commit that could be taken back");
    case Undo::Kind::empty: break;
    case Undo::Kind::spare:
      exchange_live_and_spare();
      spare_.release();
      break;
    case Undo::Kind::deltas:
      for (std::size_t i = undo_.steps.size(); i-- > 0;) revert_step(undo_.steps[i], undo_.bytes[i]);
      break;
  }
  committed_ = std::move(undo_.state);
  undo_ = {};
  return {};
}

void HostTarget::forget_rollback() noexcept {
  undo_ = {};
  if (full_ != Full::staged) spare_.release();
}

}  // namespace

TargetPtr make_host_target(LayoutPtr layout, std::span<std::byte> memory) {
  return TargetPtr(new HostTarget(std::move(layout), memory));
}

std::span<const std::byte> host_target_memory(const Target& target) {
  const auto* host = dynamic_cast<const HostTarget*>(&target);
  if (host == nullptr) return {};
  return host->live();
}

}  // namespace deltasync
