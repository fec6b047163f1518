// A kind of MemoryTarget as a device's would be: tiles are copied out and in, changes wait until settle(), and every
// step may fail.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/memory_target.hpp"
#include "receiver/targets/tile_memory.hpp"

namespace deltasync::test {

class RemoteMemory final : public TileTarget {
 public:
  explicit RemoteMemory(const LayoutPtr& layout, bool served = false)
      : TileTarget("remote_target", layout, TileSet::whole(*layout), served), live_(layout->half_bytes()) {}

  /// This step fails once, after so many more calls.
  void fail(const std::string& step, std::size_t after = 0) {
    const std::lock_guard lock(mutex_);
    failing_[step] = after;
  }
  bool failed() const { return failed_; }
  /// Steps that were to fail and have not come up will not; how many.
  std::size_t forget_faults() {
    const std::lock_guard lock(mutex_);
    const std::size_t left = failing_.size();
    failing_.clear();
    return left;
  }
  /// When live memory was last opened to be written: how much time that had.
  Deadline opened_until() const { return opened_until_; }
  /// From now on this byte has this value once something is put anywhere.
  void stick(std::size_t at, std::byte value) { stuck_ = {at, value}; }
  std::vector<std::byte>& memory() { return live_; }
  bool has_staging() const { return !staging_.empty(); }
  TargetCapabilities capabilities() override {
    TargetCapabilities can = TileTarget::capabilities();
    can.in_live_memory = true;
    return can;
  }

 private:
  Status step(std::string_view name) const {
    const std::lock_guard lock(mutex_);
    const auto found = failing_.find(name);
    if (found == failing_.end() || found->second-- > 0) return {};
    failing_.erase(found);
    failed_ = true;
    return Error(Errc::io, "the device says no to " + std::string(name));
  }
  TileRows in(const std::vector<std::byte>& memory, const Tile& tile) const {
    const Tensor& t = layout_of().tensors()[tile.tensor];
    auto* const bytes = const_cast<std::byte*>(memory.data());
    return tile_rows(layout_of(), tile, {bytes + t.offset, static_cast<std::size_t>(t.row_bytes())});
  }
  TileRows copy_out(const Tile& tile, std::vector<std::byte>& scratch) const {
    scratch.resize(static_cast<std::size_t>(tile.rect.rows) * row_bytes(tile));
    const TileRows copy{scratch.data(), row_bytes(tile)};
    copy_tile_rows(layout_of(), tile, in(live_, tile), copy);
    return copy;
  }

  Status open_memory(const CallContext& /*until*/) override { return step("open_memory"); }
  Status open_live(const CallContext& until) override {
    opened_until_ = until.deadline();
    return step("open_live");
  }
  Result<TileRows> read_tile(const Tile& tile, std::vector<std::byte>& scratch) const override {
    DS_TRY(step("read_tile"));
    return copy_out(tile, scratch);
  }
  Result<TileRows> open_tile(const Tile& tile, std::vector<std::byte>& scratch) override {
    DS_TRY(step("open_tile"));
    return copy_out(tile, scratch);
  }
  Status put(const Tile& tile, const TileRows& rows) override {
    Status status = step("put");
    const TileRows place = in(live_, tile);
    if (status.ok()) {
      copy_tile_rows(layout_of(), tile, rows, place);
      const std::lock_guard lock(mutex_);
      if (stuck_) live_[stuck_->first] = stuck_->second;
    } else {
      std::memset(place.first, 0xDD, 1);
    }
    return status;
  }
  Status exchange(const Tile& tile, const delta::TileRecord& record, MutByteSpan changes) override {
    DS_TRY(step("exchange"));
    const std::lock_guard lock(mutex_);
    waiting_.push_back({tile, &record, changes});
    return {};
  }
  Status settle() override {
    const Status status = step("settle");
    std::size_t count = waiting_.size();
    if (!status.ok()) count /= 2;
    for (std::size_t i = 0; i < count; ++i) {
      const Waiting& w = waiting_[i];
      const TileRows rows = in(live_, w.tile);
      delta::exchange_tile(layout_of(), *w.record, rows.first, rows.row_stride, w.changes);
    }
    waiting_.clear();
    return status;
  }
  Status open_staging(const CallContext& /*until*/) override {
    DS_TRY(step("open_staging"));
    staging_.resize(live_.size());
    return {};
  }
  void close_staging() noexcept override { staging_ = {}; }
  TileRows staged_tile(const Tile& tile) const override { return in(staging_, tile); }
  Status exchange_staging(const CallContext& /*until*/) override {
    const Status status = step("exchange_staging");
    const std::size_t bytes = status.ok() ? live_.size() : live_.size() / 2;
    std::swap_ranges(live_.begin(), live_.begin() + static_cast<std::ptrdiff_t>(bytes), staging_.begin());
    return status;
  }
  std::uint64_t staging_bytes() const override { return staging_.size(); }

  struct Waiting {
    Tile tile;
    const delta::TileRecord* record;
    MutByteSpan changes;
  };

  mutable std::mutex mutex_;
  mutable std::map<std::string, std::size_t, std::less<>> failing_;
  mutable std::atomic<bool> failed_{false};
  std::vector<Waiting> waiting_;
  Deadline opened_until_{std::chrono::steady_clock::time_point()};
  std::optional<std::pair<std::size_t, std::byte>> stuck_;
  std::vector<std::byte> live_;
  std::vector<std::byte> staging_;
};

}  // namespace deltasync::test
