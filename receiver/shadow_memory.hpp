// A version in host memory of its own, tile behind tile: as large as the tiles that are kept, however they lie in their
// tensors.
#pragma once

#include <vector>

#include "receiver/host_memory.hpp"
#include "receiver/memory_target.hpp"

namespace deltasync {

class ShadowMemory final : public TileTarget {
 public:
  /// `bytes_max` as in ShadowOptions.
  ShadowMemory(LayoutPtr layout, TileSet tiles, std::uint64_t bytes_max)
      : TileTarget("shadow", std::move(layout), std::move(tiles)), bytes_max_(bytes_max) {}

  bool shares_memory() const override { return false; }
  std::uint64_t bytes() const noexcept { return memory_.span().size(); }
  /// A tile of the committed version, for who writes it elsewhere: `corrupt` if it is not what was committed.
  Result<TileRows> sound_tile(const Tile& tile) const;
  /// All tiles of the committed version are sound; or of the one that rollback() brings back from staging (if it does).
  /// `corrupt` names one that is not.
  Status check(const Until& until) const;
  Status check_before(const Until& until) const;
  bool keeps_before() const noexcept { return staged_before() != nullptr; }

 private:
  Status open_memory(const Until& until) override;
  Status open_live(const Until& /*it is there*/) override { return {}; }
  Result<TileRows> read_tile(const Tile& tile, std::vector<std::byte>& /*it is there*/) const override {
    return tile_in(memory_, tile);
  }
  Result<TileRows> open_tile(const Tile& tile, std::vector<std::byte>& /*changed in place*/) override {
    return tile_in(memory_, tile);
  }
  Status put(const Tile& tile, const TileRows& rows) override;
  Status exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) override;
  Status open_staging(const Until& until) override;
  void close_staging() noexcept override { staging_.release(); }
  TileRows staged_tile(const Tile& tile) const override { return tile_in(staging_, tile); }
  Status exchange_staging(const Until& until) override;
  std::uint64_t staging_bytes() const override { return staging_.span().size(); }

  Result<TileRows> sound_tile(const HostMemory& memory, const Tile& tile, const TargetState& state) const;
  Status check(const HostMemory& memory, const TargetState& state, const Until& until) const;
  TileRows tile_in(const HostMemory& memory, const Tile& tile) const {
    const auto rank = static_cast<std::size_t>(tiles().rank(tile.index).value());
    return {memory.span().data() + at_[rank], row_bytes(tile)};
  }

  const std::uint64_t bytes_max_;
  std::vector<std::uint64_t> at_;  ///< of each tile, by rank
  HostMemory memory_;
  HostMemory staging_;
};

}  // namespace deltasync
