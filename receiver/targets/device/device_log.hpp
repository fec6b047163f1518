// A delta applied through a DeviceExecutor, and what rolls it back: decoded changes all at once by one launch a device,
// other tiles one by one, read, changed and written on the host.
#pragma once

#include <optional>
#include <vector>

#include "base/thread_pool.hpp"
#include "format/tile_set.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/device/device_executor.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync {

class DeviceLog {
 public:
  /// Takes verified steps, oldest first.
  DeviceLog(const TileSet& tiles, DeviceExecutor& executor, std::vector<StagedStep> steps);
  DeviceLog(DeviceLog&&) = default;

  /// Once. `digests` are those of all tiles before. On error memory is as before or, if `torn` is set, unknown.
  /// corrupt: somebody wrote to a tile since it was verified, as far as that is seen.
  Status apply(std::span<const std::uint64_t> digests, ThreadPool& pool, const CallContext& until, bool& torn);
  /// Rolls back what apply() did, likewise.
  Status revert(ThreadPool& pool, const CallContext& until, bool& torn);

 private:
  /// All records of a tile of which no changes were kept, oldest first.
  struct TileWork {
    Tile tile;
    std::uint64_t rank = 0;
    std::vector<const delta::TileRecord*> records;
    std::vector<std::byte> undo;    ///< what delta::save_undo gave for each
    std::vector<std::size_t> ends;  ///< of each in `undo`
    bool applied = false;
  };
  void sort_out();
  Status apply_tile(TileWork& work, std::uint64_t digest, std::vector<std::byte>& scratch, const CallContext& until,
                    bool& torn);
  Status revert_tile(TileWork& work, std::vector<std::byte>& scratch, const CallContext& until, bool& torn);
  Status rewrite(const TileWork& work, const std::vector<std::byte>& now, const std::vector<std::byte>& before,
                 const CallContext& until, bool& torn);
  Status revert_tiles(ThreadPool& pool, const CallContext& until, bool& torn);

  const TileSet* tiles_;
  DeviceExecutor* executor_;
  std::vector<StagedStep> steps_;
  std::vector<TileWork> work_;
  WordBatch batch_;
};

}  // namespace deltasync
