// A version in host memory, laid out like a half. Memory comes from the user or is this target's own mapping, and so is
// staging: at commit own memory changes place with it, the user's keeps its address and changes contents.
#include <cstring>
#include <utility>

#include "format/tiling.hpp"
#include "receiver/targets/host_memory.hpp"
#include "receiver/targets/memory_target.hpp"
#include "receiver/targets/tile_memory.hpp"

namespace deltasync {
namespace {

class HostTarget final : public TileTarget, public CanLendRows {
 public:
  HostTarget(LayoutPtr layout, TileSet tiles, std::span<std::byte> memory)
      : TileTarget("host_target", std::move(layout), std::move(tiles)), user_(memory) {}

  TargetCapabilities capabilities() override {
    TargetCapabilities can = TileTarget::capabilities();
    can.rows = this;
    if (memory_is_ours()) can.shared = nullptr;
    return can;
  }
  std::byte* full_rows(std::uint32_t tensor) override {
    if (full() == Full::closed) return nullptr;
    return (full() == Full::staged ? staging_.span() : live()).data() + layout_of().tensors()[tensor].offset;
  }
  std::span<std::byte> live() const noexcept { return user_.data() != nullptr ? user_ : own_.span(); }

 private:
  Status open_memory(const CallContext& until) override;
  Status open_live(const CallContext& until) override;
  Result<TileRows> read_tile(const Tile& tile, std::vector<std::byte>& /*they lie as in a half*/) const override {
    return tile_in(live(), tile);
  }
  Result<TileRows> open_tile(const Tile& tile, std::vector<std::byte>& /*changed in place*/) override {
    return tile_in(live(), tile);
  }
  Status put(const Tile& tile, const TileRows& rows) override {
    copy_tile_rows(layout_of(), tile, rows, tile_in(live(), tile));
    return {};
  }
  Status exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) override;
  Status open_staging(const CallContext& until) override;
  void close_staging() noexcept override { staging_.release(); }
  TileRows staged_tile(const Tile& tile) const override { return tile_in(staging_.span(), tile); }
  Status exchange_staging(const CallContext& until) override;
  std::uint64_t staging_bytes() const override { return tiles().bytes(); }

  bool memory_is_ours() const noexcept { return user_.data() == nullptr; }
  TileRows tile_in(std::span<std::byte> memory, const Tile& tile) const;
  Result<HostMemory> map_half(const CallContext& until) const;
  void zero_padding(std::span<std::byte> memory) const;

  const std::span<std::byte> user_;
  HostMemory own_;
  HostMemory staging_;
};

Status HostTarget::open_memory(const CallContext& /*nothing is here to verify*/) {
  if (memory_is_ours() || user_.size() >= layout_of().half_bytes()) return {};
  return Error(Errc::invalid_argument, "the memory given has " + std::to_string(user_.size()) +
                                           " bytes, the layout needs " + std::to_string(layout_of().half_bytes()));
}

TileRows HostTarget::tile_in(std::span<std::byte> memory, const Tile& tile) const {
  const Tensor& t = layout_of().tensors()[tile.tensor];
  return tile_rows(layout_of(), tile, {memory.data() + t.offset, static_cast<std::size_t>(t.row_bytes())});
}

Status HostTarget::exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) {
  const TileRows rows = tile_in(live(), tile);
  delta::exchange_tile(layout_of(), record, rows.first, rows.row_stride, changes);
  return {};
}

/// With the pages of the subscribed tiles.
Result<HostMemory> HostTarget::map_half(const CallContext& until) const {
  if (tiles().is_whole()) return HostMemory::map(layout_of().half_bytes(), pool(), until);
  return HostMemory::map_parts(layout_of().half_bytes(), memory_parts(layout_of(), tiles()), pool(), until);
}

/// A transfer writes tensors only; what lies between them in a half is zero by definition.
void HostTarget::zero_padding(std::span<std::byte> memory) const {
  std::uint64_t end = 0;
  for (const Tensor& tensor : layout_of().tensors()) {
    std::memset(memory.data() + end, 0, tensor.offset - end);
    end = tensor.offset + tensor.bytes;
  }
  std::memset(memory.data() + end, 0, layout_of().half_bytes() - end);
}

Status HostTarget::open_live(const CallContext& until) {
  if (!memory_is_ours()) {
    if (tiles().is_whole()) zero_padding(user_);
  } else if (!own_) {
    DS_ASSIGN(own_, map_half(until));
  }
  return {};
}

Status HostTarget::open_staging(const CallContext& until) {
  if (!staging_) {
    DS_ASSIGN(staging_, map_half(until));
  }
  return {};
}

Status HostTarget::exchange_staging(const CallContext& /*memory alone, and done at once*/) {
  if (memory_is_ours()) {
    own_.swap(staging_);
  } else {
    swap_tiles(layout_of(), tiles(), user_.data(), staging_.span().data(), pool());
  }
  return {};
}

}  // namespace

std::unique_ptr<Target> make_host_target(LayoutPtr layout, std::span<std::byte> memory) {
  TileSet all = TileSet::whole(*layout);
  return std::unique_ptr<Target>(new HostTarget(std::move(layout), std::move(all), memory));
}

std::span<const std::byte> host_target_memory(const Target& target) {
  const auto* host = dynamic_cast<const HostTarget*>(&target);
  if (host == nullptr) return {};
  return host->live();
}

}  // namespace deltasync
