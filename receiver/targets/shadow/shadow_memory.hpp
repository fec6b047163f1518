// A version in host memory of its own, tile behind tile: as large as the tiles that are kept, however they lie in their
// tensors. The target that it is a shadow of may write from there without a copy in between: then it is pinned.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "deltasync/target.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/host_memory.hpp"
#include "receiver/targets/memory_target.hpp"

namespace deltasync {

class ShadowMemory final : public TileTarget {
 public:
  /// `live` outlives this.
  ShadowMemory(Target& live, const ShadowOptions& options)
      : TileTarget("shadow", live.layout(), *live.capabilities().slices->kept()), live_(live), options_(options) {}

  TargetCapabilities capabilities() override {
    TargetCapabilities can = TileTarget::capabilities();
    can.shared = nullptr;
    return can;
  }
  std::uint64_t bytes() const noexcept { return kept_.bytes(); }
  /// Lets devices read it where it is, if they can by then and options ask for it.
  void pin(const CallContext& until);
  bool is_pinned() const noexcept { return kept_.is_lent(); }
  /// The ranks at which the tiles are best cut for put_live(), from 0 to their number.
  std::vector<std::uint64_t> batches() const;
  /// Puts tiles of the committed version, with these ranks, to the full update that is open in live memory. `corrupt`
  /// if one is not what was committed: then none of them is put.
  Status put_live(std::uint64_t first, std::uint64_t end) const;
  /// All tiles of the committed version are valid; or of the one that rollback() brings back from staging (if it does).
  /// `corrupt` names one that is not.
  Status check(const CallContext& until) const;
  Status check_before(const CallContext& until) const;
  bool keeps_before() const noexcept { return staged_before() != nullptr; }

 private:
  Status open_memory(const CallContext& until) override;
  Status open_live(const CallContext& /*it is there*/) override { return {}; }
  Result<TileRows> read_tile(const Tile& tile, std::vector<std::byte>& /*it is there*/) const override {
    return tile_in(kept_, tile);
  }
  Result<TileRows> open_tile(const Tile& tile, std::vector<std::byte>& /*changed in place*/) override {
    return tile_in(kept_, tile);
  }
  Status put(const Tile& tile, const TileRows& rows) override;
  Status exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) override;
  Status open_staging(const CallContext& until) override;
  void close_staging() noexcept override { staging_ = {}; }
  TileRows staged_tile(const Tile& tile) const override { return tile_in(staging_, tile); }
  Status exchange_staging(const CallContext& until) override;
  std::uint64_t staging_bytes() const override { return staging_.bytes(); }

  /// Room for one version.
  class Room {
   public:
    Room() = default;
    explicit Room(HostMemory memory) : memory_(std::make_shared<HostMemory>(std::move(memory))) {}
    Room(Room&& other) noexcept = default;
    Room& operator=(Room&& other) noexcept {
      release();
      memory_ = std::move(other.memory_);
      lent_ = std::move(other.lent_);
      return *this;
    }
    ~Room() { release(); }

    /// On error devices do not read it where it is.
    Status lend_to(Target& live, const CallContext& until);
    explicit operator bool() const noexcept { return memory_ != nullptr; }
    std::byte* data() const noexcept { return memory_->span().data(); }
    std::uint64_t bytes() const noexcept { return memory_ == nullptr ? 0 : memory_->span().size(); }
    bool is_lent() const noexcept { return lent_ != nullptr; }
    RegisteredHostMemory& lent() const noexcept { return *lent_; }

   private:
    void release() noexcept;
    std::shared_ptr<HostMemory> memory_;  ///< also of drivers that still know it
    std::unique_ptr<RegisteredHostMemory> lent_;
  };

  Status check_tile(const Room& room, const Tile& tile, const TargetState& state) const;
  Status check(const Room& room, const TargetState& state, const CallContext& until) const;
  TileRows tile_in(const Room& room, const Tile& tile) const {
    const auto rank = static_cast<std::size_t>(tiles().rank(tile.index).value());
    return {room.data() + at_[rank], row_bytes(tile)};
  }

  Target& live_;
  const ShadowOptions options_;
  std::vector<std::uint64_t> at_;  ///< of each tile, by rank
  Room kept_;
  Room staging_;
};

}  // namespace deltasync
