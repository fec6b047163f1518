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
#include "receiver/delta_log.hpp"
#include "receiver/host_memory.hpp"
#include "receiver/target_checks.hpp"
#include "receiver/tile_memory.hpp"

namespace deltasync {
namespace {

/// How to take the last commit back.
struct Undo {
  enum class Kind : std::uint8_t {
    none,    ///< nothing committed since the update began, or the version before is gone
    empty,   ///< the first full update: before it there was nothing
    spare,   ///< the version before is in spare_
    deltas,  ///< the version before is live() with `log` reverted
  };
  Kind kind = Kind::none;
  std::optional<TargetState> state;  ///< of the version before
  DeltaLog log;
};

class HostTarget final : public Target, private TileStore {
 public:
  HostTarget(LayoutPtr layout, std::span<std::byte> memory)
      : layout_(std::move(layout)), user_(memory), tiles_(TileSet::whole(*layout_)) {}

  const LayoutPtr& layout() const override { return layout_; }
  Status subscribe(const TileSet& tiles) override;
  Status open(ThreadPool& pool, const Until& until) override;
  bool exchanges() const override { return true; }
  bool shares_memory() const override { return !memory_is_ours() && (full_ == Full::first || full_ == Full::in_place); }
  const TargetState* committed() const override { return committed_ ? &*committed_ : nullptr; }
  TileRows live_tile(const Tile& tile, std::vector<std::byte>& scratch) const override;
  Status begin_full(FullOverLive policy, const Until& until) override;
  TileRows full_tile(const Tile& tile, std::vector<std::byte>& scratch) override;
  void put_tile(const Tile& tile, const TileRows& rows) override;
  std::byte* full_rows(std::uint32_t tensor) override;
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

  TileRows open_tile(const Tile& tile, std::vector<std::byte>& scratch) override;
  void close_tile(const Tile&, const TileRows&) override {}
  void exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) override;

  bool memory_is_ours() const noexcept { return user_.data() == nullptr; }
  TileRows tile_in(std::span<std::byte> memory, const Tile& tile) const;
  std::span<std::byte> full() const noexcept { return full_ == Full::staged ? spare_.span() : live(); }
  Result<HostMemory> map_half(const Until& until) const;
  void exchange_live_and_spare();
  void zero_padding(std::span<std::byte> memory) const;

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

TileRows HostTarget::tile_in(std::span<std::byte> memory, const Tile& tile) const {
  const Tensor& t = layout_->tensors()[tile.tensor];
  return tile_rows(*layout_, tile, {memory.data() + t.offset, static_cast<std::size_t>(t.row_bytes())});
}

TileRows HostTarget::live_tile(const Tile& tile, std::vector<std::byte>& /*they lie as in a half*/) const {
  if (!committed_) return {};
  return tile_in(live(), tile);
}

TileRows HostTarget::full_tile(const Tile& tile, std::vector<std::byte>& /*they lie as in a half*/) {
  if (full_ == Full::closed) return {};
  return tile_in(full(), tile);
}

void HostTarget::put_tile(const Tile& tile, const TileRows& rows) {
  if (full_ != Full::closed) copy_tile_rows(*layout_, tile, rows, tile_in(full(), tile));
}

std::byte* HostTarget::full_rows(std::uint32_t tensor) {
  if (full_ == Full::closed) return nullptr;
  return full().data() + layout_->tensors()[tensor].offset;
}

TileRows HostTarget::open_tile(const Tile& tile, std::vector<std::byte>& /*changed in place*/) {
  return tile_in(live(), tile);
}

void HostTarget::exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) {
  const TileRows rows = tile_in(live(), tile);
  delta::exchange_tile(*layout_, record, rows.first, rows.row_stride, changes);
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

Status HostTarget::commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) {
  if (full_ != Full::closed) return Error(Errc::invalid_argument, "a full update is open");
  DS_TRY(check_steps(*layout_, tiles_, committed(), steps, state));
  undo_ = {};
  spare_.release();  // the version before the last full update: from here on it cannot be rolled back to
  DS_TRY(undo_.log.apply(*layout_, std::move(steps), *this, *pool_, deadline));
  undo_.kind = Undo::Kind::deltas;
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
    case Undo::Kind::deltas: undo_.log.revert(*layout_, *this, *pool_); break;
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
