// Where a receiver keeps its version: host memory, the live memory of an engine (on the host or on devices), or a
// directory of model directories. Targets are made here and handed to Receiver::bind(). targets.md is the guide.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>

#include "deltasync/layout.hpp"
#include "deltasync/placement.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

/// Keeps one version, and the one before as long as that may be wanted back. Opaque: a receiver calls it.
class Target;

}  // namespace deltasync

template <>
struct std::default_delete<deltasync::Target> {
  void operator()(deltasync::Target* target) const noexcept;
};

namespace deltasync {

/// Keeps a version in host memory, laid out like a half (Tensor::offset). `memory` is not owned, outlives the target
/// and has at least layout->half_bytes(); empty: the target allocates. With slices (Receiver::bind) only their tiles
/// are valid. Memory of its own then has pages (of 2 MiB) for the rows of these tiles only, so that a slice of rows
/// takes its own size, one of columns its tensor's. Other bytes are zero, or in the user's memory what they were.
///
/// ```cpp
/// DS_TRY(receiver.bind(make_host_target(receiver.layout())));
/// DS_ASSIGN(auto update, receiver.pull());
/// DS_TRY(update->commit());
/// const std::span<const std::byte> half = host_target_memory(*receiver.target());
/// ```
std::unique_ptr<Target> make_host_target(LayoutPtr layout, std::span<std::byte> memory = {});
/// The memory of a host target; empty for any other kind, and for memory of its own before the first pull. Memory given
/// by the user keeps its address. Memory of its own changes place at the commit of a full update over a live version
/// and at a rollback of one, and is unmapped with the target: ask again after each commit, and do not read the old
/// span.
std::span<const std::byte> host_target_memory(const Target& target);

struct HfTargetOptions {
  /// Each version is on the disk before it is committed (fsync of its files, its directory and the link): a power
  /// failure leaves the committed version. Without it, whatever the system has written by then.
  bool flush = true;
  /// Bytes of the disk that a new directory leaves free. Nothing: 5 % of the file system, 1 GiB at most. What does not
  /// fit is Errc::no_space before anything is written.
  std::optional<std::uint64_t> disk_reserve_bytes = std::nullopt;
  /// Versions may go into a directory that holds another model: beside it, and who loads the directory itself goes on
  /// loading that one.
  bool beside_model = false;
  /// How many versions before the committed one stay, but for FullUpdatePolicy::in_place: what other hosts load over a
  /// network file system cannot be seen. As many as are committed while a model is loaded. Beyond 1 each comes whole.
  unsigned keep_before = 1;
};
/// Keeps HF model directories: `out/versions/<epoch>-<number>/…` are immutable, and the symlink `out/current` names the
/// committed one and is swapped atomically. The version before is patched forward only if no process of this host has
/// its files open or mapped; else a new directory is written. Directories older than HfTargetOptions::keep_before are
/// removed when unused. It keeps whole models.
///   - Errc::already_exists: another process keeps versions there, or another model is there.
///   - Errc::invalid_argument: the sidecar is not of this layout, or keep_before is 0.
///   - Errc::permission, Errc::no_space, Errc::io: the directory cannot be made or written.
///
/// ```cpp
/// DS_ASSIGN(auto directory, make_hf_target(receiver.layout(), receiver.sidecar(), "/models/live"));
/// DS_TRY(receiver.bind(std::move(directory)));
/// ```
Result<std::unique_ptr<Target>> make_hf_target(LayoutPtr layout, Sidecar sidecar, std::filesystem::path out,
                                               HfTargetOptions options = {});

/// A copy on the host of what a target in live memory has, always of the same version.
struct ShadowOptions {
  /// Host memory that it may take, in bytes; what the subscribed tiles need beyond it is Errc::no_space. 0: as much as
  /// the machine and its cgroup have room for.
  std::uint64_t bytes_max = 0;
  /// Lets devices read it where it is, which saves a copy on the host; binding and Receiver::release() take longer for
  /// it. Where a device refuses, the log line `shadow not_pinned` says why, and all works without.
  bool pin = true;
};

struct PlacedTargetOptions {
  /// The engine computes with what is in live memory already (weights that it loaded itself, or that an earlier
  /// receiver left there): the first full update goes by FullUpdatePolicy, as any later one does. Staged, its rollback
  /// brings back what was there.
  bool live = false;
  /// Keeps a shadow too: a rank can sleep and wake without the network (Receiver::release() and restore()), and repairs
  /// come from there. It takes as much host memory as the subscribed tiles, for good; a full update that is staged over
  /// a live version, or can be rolled back, as much again. targets.md says what else it changes.
  std::optional<ShadowOptions> shadow = std::nullopt;

  // Of devices; without meaning where all live memory is the host's.

  /// By the CUDA ordinal of a device: each cudaStream_t of this process in which the engine uses its weights there;
  /// null is the default stream. They outlive the target. Commits and rollbacks come after what these have when they
  /// begin, and before what they get afterwards. Of a device without one the caller sees to both.
  std::multimap<std::int32_t, void*> engine_streams = {};
  /// Pinned host memory for each device, in bytes, for what is on its way: half of it for single tiles (4 to 64), half
  /// for four slots of many (16 MiB each at most). As much again is taken on the device. The log line `device_target
  /// stages` names what it is in all.
  std::uint64_t staging_bytes = std::uint64_t{32} << 20;
  /// Memory of each device, in bytes at most, for the changes of an update, which then are there before the commit. It
  /// is taken when it is needed and stays for the next update; what eight updates in a row did not need goes back. What
  /// finds no room is brought there by the commit. 0: an eighth of what is placed there.
  std::uint64_t changes_bytes = 0;
  /// No wait for a device is longer, whatever the deadline: then the call fails with Errc::timed_out.
  std::chrono::nanoseconds device_timeout = std::chrono::seconds(30);
};
/// Keeps a version where an engine has its weights: in the placement's live memories, on the host and on CUDA devices
/// of this process. The rest of tiles that slices cut through is kept in host memory, which binding takes. Bind it with
/// placement->slices().
///
/// It writes live memory at these times and at no other, and then the engine may not compute with it:
///   - commits, rollbacks, Receiver::repair() and restore().
///   - pulls while Receiver::current() is empty, unless the target was made with `live`, and pulls of a full update
///     by FullUpdatePolicy::in_place: tiles go straight to their places. From the beginning of the first such pull to
///     the commit the memory has no version, failed pulls included, and nobody else may write it.
/// Other full updates are staged in host memory, as large as the subscribed tiles, until the commit.
///
/// If a device fails during a commit or a rollback, the version before stays, or is put back. Where that fails too,
/// Receiver::current() is empty, and the engine must not use its weights until a pull has brought them again.
///   - Errc::unsupported: no such device, no driver, or a build without CUDA.
///   - Errc::invalid_argument: an engine's stream of a device that the placement does not use.
///   - Errc::no_space: memory of the device.
///
/// ```cpp
/// std::vector<float> weight(64 * 64);  // the engine's
/// PlacementPlan plan;
/// plan.memories = {{.name = "up", .base = reinterpret_cast<std::byte*>(weight.data()), .bytes = weight.size() * 4}};
/// plan.slices = {{.tensor = "up.weight", .rect = {0, 0, 64, 64}, .row_stride = 64 * 4, .col_stride = 4}};
/// DS_ASSIGN(const auto placement, Placement::build(receiver.layout(), plan));
/// DS_ASSIGN(auto live, make_placed_target(placement, {.shadow = ShadowOptions()}));
/// DS_TRY(receiver.bind(std::move(live), placement->slices(), {}));
/// ```
Result<std::unique_ptr<Target>> make_placed_target(std::shared_ptr<const Placement> placement,
                                                   const PlacedTargetOptions& options = {});

}  // namespace deltasync
