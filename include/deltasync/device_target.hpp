// A target that writes versions where a running engine keeps its weights on CUDA devices.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "deltasync/placement.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

/// A stream in which an engine uses its weights.
struct EngineStream {
  std::int32_t device = 0;  ///< its CUDA ordinal
  void* stream = nullptr;   ///< a cudaStream_t of the calling process; null is the default stream. Outlives the target
};

struct DeviceTargetOptions {
  /// As in PlacedTargetOptions: the engine computes with what is in live memory already.
  bool live = false;
  /// Commits and rollbacks come after what these streams have when they begin, and before what these get afterwards.
  /// One a device at most. Of a device without one the caller sees to both.
  std::vector<EngineStream> engine_streams;
  /// Pinned host memory for each device, for what is on its way: half of it for single tiles (four at least, 64 at
  /// most), half for four slots of many (of 16 MiB at most). As much again is taken on the device. The log line
  /// `device_target stages` names what it is in all.
  std::uint64_t staging_bytes = std::uint64_t{32} << 20;
  /// Device memory for the changes of an update, on each device at most. They are brought there while they are
  /// verified, and not in the commit. It is taken when it is needed and stays for the next update (`device_target
  /// keeps_changes` in the log says how much there is); what eight updates in a row did not need goes back. What finds
  /// no room, here or on the device, is brought there by the commit, in memory that it takes for that. 0 = an eighth of
  /// what is placed there.
  std::uint64_t changes_bytes = 0;
  /// No wait for a device is longer, whatever the deadline: then the call fails with timed_out.
  std::chrono::nanoseconds patience = std::chrono::seconds(30);
};

/// Keeps one version in the placement's live memories: on CUDA devices of this process, and on the host those that are
/// there. The rest of tiles that slices cut through is kept on the host. unsupported if there is no such device, no
/// driver, or the build has no CUDA; no_space. Bind it with placement->subscription().
///
/// When live memory is written, and that nobody else may write it meanwhile, is as with make_placed_target(). Beside
/// that, an update's changes are in memory of the device from when they are verified until the next update begins (or
/// it is known that it will not be rolled back): the changed elements, 2 bytes for each, and some 40 for each tile.
///
/// A device that fails during a commit or a rollback: the version before stays, or is put back; where that fails too,
/// Receiver::current() is empty, and the engine must not use its weights until a pull has brought them anew.
Result<TargetPtr> make_device_target(PlacementPtr placement, const DeviceTargetOptions& options = {});

}  // namespace deltasync
