// Moves tiles and changed elements between host memory and the places that a placement gives them on devices, and in
// host memory beside them. What placement::HostExecutor is for the host alone; but here every call can fail.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "gpu/device.hpp"
#include "gpu/registered_host.hpp"
#include "placement/word_table.hpp"
#include "receiver/targets/device/change_arena.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync {

class WordBatch;

/// Changes that lie where their tiles are.
class ChangesOnDevices final : public KeptChanges {
 public:
  struct InRoom {
    std::uint32_t part = 0;  ///< of the executor
    ChangeArena::Room room;
  };
  std::vector<InRoom> rooms;
};

/// Tiles are named by their rank in the placement's set. Thread-safe, but for what is said. All kernels go through one
/// stream of each device, so that what is asked for later sees what was asked for before. Slots of many tiles are
/// copied in streams beside it, while kernels work on others.
class DeviceExecutor {
 public:
  /// A device that the placement has memory on.
  struct PlacedDevice {
    std::int32_t ordinal = 0;
    std::unique_ptr<gpu::Device> own;                    ///< or null, if it is somebody else's
    gpu::Device* device = nullptr;                       ///< outlives this
    std::vector<std::unique_ptr<gpu::Stream>> engine{};  ///< the engine's streams that it named
  };
  static constexpr std::uint64_t kRegisterBytes = std::uint64_t{64} << 20;
  /// As in PlacedTargetOptions.
  struct Limits {
    std::uint64_t staging_bytes = 0;  ///< but a few tiles' at least
    std::uint64_t changes_bytes = 0;
    std::chrono::nanoseconds device_timeout{};
    /// Of lent memory at once, in whole pages: the driver may keep others waiting for so long.
    std::uint64_t register_bytes = kRegisterBytes;
  };
  /// unsupported if a memory's device is not among the sources; no_space; timed_out or cancelled by `until` (none: by
  /// the device_timeout alone, which also bounds what a failed call has still to wait for).
  static Result<std::unique_ptr<DeviceExecutor>> make(std::shared_ptr<const Placement> placement,
                                                      std::vector<PlacedDevice> sources, const Limits& limits,
                                                      const std::optional<CallContext>& until = {});
  /// Waits for the devices, as long as `device_timeout`; what one that does not end still uses is never given back.
  ~DeviceExecutor();
  DeviceExecutor(const DeviceExecutor&) = delete;
  DeviceExecutor& operator=(const DeviceExecutor&) = delete;

  const Placement& placement() const noexcept { return *placement_; }
  std::uint64_t tile_bytes(std::uint64_t rank) const noexcept;
  std::uint64_t staging_bytes() const noexcept;
  /// The end of a wait that begins now.
  CallContext patient(const CallContext& until) const { return until.earlier(Deadline::after(limits_.device_timeout)); }
  CallContext patient() const { return Deadline::after(limits_.device_timeout); }

  /// All elements of the tile, row by row without gaps.
  Status gather_tile(std::uint64_t rank, std::byte* to, const CallContext& until);
  /// And back, to every place that an element has, from rows that may have gaps. It has been read when this returns,
  /// and is on its way: finish() tells whether it came there. On error places may have the new elements, or the old.
  Status scatter_tile(std::uint64_t rank, const std::byte* from, std::uint64_t row_stride, const CallContext& until);
  /// The same for a full update, whose tiles go together, many in a copy and a launch: a tile is on its way when its
  /// batch is full, or send_tiles() is called, or somebody reads it. What goes wrong is returned by this call or by
  /// later ones, until send_tiles() has returned it too: some tiles are not there then, and nobody knows which.
  Status put_tile(std::uint64_t rank, const std::byte* from, std::uint64_t row_stride, const CallContext& until);
  /// CanBorrow::lend and put_lent. What put_lent returns is of the calls alone; send_tiles() tells the rest.
  Result<std::unique_ptr<RegisteredHostMemory>> lend(std::span<std::byte> memory,
                                                     const std::shared_ptr<const void>& keeper,
                                                     const CallContext& until);
  Status put_lent(RegisteredHostMemory& memory, std::uint64_t first, std::uint64_t end, const std::byte* rows,
                  const CallContext& until);
  /// All tiles that were put are there, or why some are not. Used by one thread, while nobody puts any.
  Status send_tiles(const CallContext& until);

  /// Tiles that go together when they change places with others: those from rank i of this on, to that of i + 1.
  const std::vector<std::uint64_t>& groups() const noexcept { return groups_; }
  /// Where the tile lies in host memory, row by row without gaps.
  using AsideOf = std::function<std::byte*(std::uint64_t rank)>;
  /// Exchanges the tiles of a group with those aside. On error nothing has changed, or live memory is `torn`.
  Status exchange_group(std::size_t group, const AsideOf& aside_of, const CallContext& until, std::atomic<bool>& torn);

  /// The state digests of tiles, read where they are. Used by one thread at a time.
  Status digests(std::span<const std::uint64_t> ranks, std::span<std::uint64_t> out, const CallContext& until);

  /// Resolves changes over live memory, and marks those that it has: of tiles that are read on one device, as far as
  /// the changes of one find room in staging. Those of tiles that have no other place stay there (`kept`), as long as
  /// there is room. `ranks` are their tiles'.
  Status resolve(std::span<TileChanges> changes, std::span<const std::uint64_t> ranks, ChangesOnDevices& kept,
                 const CallContext& until);
  /// An update begins: memory for changes that the last ones did not need goes back. Used by one thread at a time.
  void trim_changes(const CallContext& until);
  /// Of the devices' memory for changes: what may be taken.
  std::uint64_t changes_bytes_max() const noexcept { return changes_bytes_max_; }

  /// Waits until all is done that was asked for, and returns what went wrong of it.
  Status finish(const CallContext& until);
  /// The same of all streams, after calls that ended early, too: nothing of this uses live memory any more.
  Status finish_all(const CallContext& until);
  /// Waits for what the engine's streams have now: an engine that does not come to its end changes nothing here. And
  /// what these get later comes after all that came before.
  Status enter_engine(const CallContext& until);
  Status leave_engine();

 private:
  friend class WordBatch;
  /// Staging for one tile, or for many.
  struct Slot {
    gpu::Memory pinned;
    gpu::Memory device;
    std::unique_ptr<gpu::Event> event;   ///< behind the last use of both
    std::unique_ptr<gpu::Event> copied;  ///< behind a copy that a kernel waits for
    std::unique_ptr<gpu::Event> ran;     ///< behind a kernel that a copy waits for
    bool lost = false;                   ///< nobody knows when its last use ends: it is not used again
  };
  struct Slots {
    std::vector<Slot> all;
    std::vector<Slot*> idle;  ///< protected by mutex
    std::mutex mutex;
    std::condition_variable_any freed;
  };
  struct Batch;
  /// A device, or the host.
  struct Part {
    std::unique_ptr<gpu::Device> own;
    gpu::Device* device = nullptr;
    std::vector<std::unique_ptr<gpu::Stream>> engine;
    std::unique_ptr<gpu::Stream> stream;  ///< all kernels, and copies of small slots
    std::unique_ptr<gpu::Stream> in;      ///< copies of wide slots to the device
    std::unique_ptr<gpu::Stream> out;     ///< and from there
    std::unique_ptr<gpu::Event> event;    ///< for finish() and the engine
    std::mutex mutex;                     ///< held while the streams or that event are used
    gpu::Memory tiles;                    ///< of the table
    gpu::Memory regions;
    placement::WordTable table;
    std::unique_ptr<ChangeArena> changes;
    Slots small;  ///< for one tile
    Slots wide;   ///< for many

    // The batches of a full update, protected by batch_mutex.
    std::mutex batch_mutex;
    std::condition_variable_any batch_changed;
    std::unique_ptr<Batch> open;                ///< takes tiles
    std::deque<std::unique_ptr<Batch>> closed;  ///< in the order in which they go
    bool opening = false;                       ///< somebody waits for the next one's slot
    std::optional<Error> failed;                ///< what became of one that went
  };
  /// A slot that a thread has.
  class SlotGuard {
   public:
    SlotGuard(Slots& slots, Slot& slot) : slots_(&slots), slot_(&slot) {}
    ~SlotGuard();
    SlotGuard(SlotGuard&& other) noexcept : slots_(other.slots_), slot_(std::exchange(other.slot_, nullptr)) {}
    SlotGuard& operator=(SlotGuard&&) = delete;
    Slot* operator->() const noexcept { return slot_; }

   private:
    Slots* slots_;
    Slot* slot_;
  };
  /// A wide slot with tiles for a full update.
  struct Batch {
    SlotGuard slot;
    std::vector<gpu::StagedTile> tiles;
    std::uint64_t used = 0;     ///< bytes behind the descriptions
    std::uint64_t largest = 0;  ///< tile
    std::uint32_t writers = 0;  ///< who still copy into it

    bool has(std::uint64_t rank) const noexcept {
      return std::any_of(tiles.begin(), tiles.end(), [&](const auto& tile) { return tile.rank == rank; });
    }
  };

  static constexpr std::uint32_t kMixed = ~std::uint32_t{0};
  static constexpr std::uint64_t kTileAt = 256;    ///< in a slot: behind the tile's description
  static constexpr std::uint64_t kSlotsMin = 4;    ///< of one tile each
  static constexpr std::uint64_t kWideSlots = 4;   ///< one is filled, one copied, one worked on, one copied back
  static constexpr std::uint64_t kTilesMax = 512;  ///< in a wide slot
  static constexpr std::uint64_t kTilesAt = kTilesMax * sizeof(gpu::StagedTile);  ///< behind their descriptions

  DeviceExecutor(std::shared_ptr<const Placement> placement, const Limits& limits);
  Status add_part(PlacedDevice source, const std::optional<CallContext>& until);
  static Status make_slots(gpu::Device& device, Slots& slots, std::uint64_t count, std::uint64_t bytes);
  Status make_table(Part& part, std::uint32_t index, const std::optional<CallContext>& until);
  void find_source_parts();
  void find_groups();
  std::uint32_t part_of(std::uint32_t memory) const noexcept;
  static Result<SlotGuard> take_slot(Part& part, Slots& slots, const CallContext& until);
  /// All that is in the part's streams is done.
  static Status idle(Part& part, const CallContext& until);
  gpu::MoveTiles describe(const Part& part, const SlotGuard& slot, std::uint64_t rank, gpu::MoveTiles::Way way) const;
  /// Puts work into the part's stream. Whatever comes of it: what is in the stream already may use the slot.
  template <class Fn>
  static Status use(Part& part, const SlotGuard& slot, const Fn& put_work) {
    const std::lock_guard lock(part.mutex);
    Status put = put_work();
    Status recorded = part.stream->record(*slot->event);
    if (recorded.ok()) return put;
    slot->lost = true;
    return recorded;
  }
  // full updates (device_tiles.cpp)
  Status put_on(Part& part, std::uint64_t rank, const std::byte* from, std::uint64_t row_stride,
                const CallContext& until);
  Result<Batch*> room_for(Part& part, std::unique_lock<std::mutex>& lock, std::uint64_t rank, const CallContext& until);
  Status open_batch(Part& part, std::unique_lock<std::mutex>& lock, const CallContext& until);
  void close_batch_locked(Part& part);
  void send_closed_locked(Part& part);
  Status send(Part& part, Batch& batch);
  template <class Copy>
  static Status copy_and_run(Part& part, Slot& slot, const Copy& copy, const gpu::MoveTiles& kernel);
  Error with_tiles(Error error, std::span<const gpu::StagedTile> tiles) const;
  class Lent;
  Status put_lent_on(std::uint32_t part, Lent& memory, std::uint64_t first, std::uint64_t end, const std::byte* rows,
                     const CallContext& until);
  gpu::MoveTiles move_of(const Part& part, const Slot& slot, std::span<const gpu::StagedTile> tiles,
                         std::uint64_t largest, gpu::MoveTiles::Way way) const;
  Status send_before_reading(Part& part, std::uint64_t rank, const CallContext& until);
  std::uint64_t group_end(std::uint64_t first, std::uint64_t end) const;
  struct OnPart;
  Status fill(OnPart& on, std::uint64_t first, std::uint64_t end, const AsideOf& aside_of, const CallContext& until);
  Status launch_exchange(OnPart& on);
  Status roll_back(OnPart& on);

  Status gather_from(Part& part, const SlotGuard& slot, std::uint64_t rank);
  Status scatter_to(Part& part, const SlotGuard& slot, std::uint64_t rank);
  void merge(std::uint64_t rank, std::uint32_t part, const std::byte* from, std::byte* to) const;
  // digests (device_digests.cpp)
  struct DigestBatch;
  Status digests_on(std::uint32_t part, std::span<const std::uint64_t> ranks, std::span<std::uint64_t> out,
                    const CallContext& until);
  static Status send_digests(Part& part, DigestBatch& batch);
  Status take_digests(const Part& part, const DigestBatch& batch, std::span<std::uint64_t> out,
                      const CallContext& until) const;
  struct Resolving;
  Status resolve_on(std::uint32_t part, bool keep, const Resolving& all, const CallContext& until);
  Status resolve_some(std::uint32_t part, bool keep, const Resolving& all, std::span<const std::size_t> which,
                      const CallContext& until);
  std::uint64_t resolve_bytes(const TileChanges& changes, std::uint64_t rank) const noexcept;
  Status upload(Part& part, std::byte* to, std::span<const std::byte> bytes, const CallContext& until);

  const std::shared_ptr<const Placement> placement_;
  const Limits limits_;
  std::vector<std::byte> rest_;
  std::vector<std::unique_ptr<Part>> parts_;
  std::vector<std::uint32_t> part_of_memory_;  ///< by memory
  std::uint32_t host_part_ = kMixed;           ///< of the rest, too
  std::vector<std::uint32_t> rows_;            ///< of each tile
  std::vector<std::uint32_t> source_part_;     ///< the part that all of a tile is read from, or kMixed
  std::vector<std::uint32_t> places_;          ///< bit i: part i has places of the tile
  placement::WordTables shape_;                ///< of all tiles, no addresses
  std::vector<std::uint64_t> groups_;
  std::uint64_t slot_bytes_ = 0;
  std::uint64_t wide_bytes_ = 0;
  std::uint64_t changes_bytes_max_ = 0;  ///< on all devices
};

/// Changed elements of many tiles, exchanged with what is in memory by one launch a device and block of memory: the
/// first time that commits them, the next time it rolls that back. Ends before its executor.
class WordBatch {
 public:
  explicit WordBatch(DeviceExecutor& executor) : executor_(&executor) {}
  ~WordBatch();
  WordBatch(WordBatch&& other) noexcept = default;
  WordBatch& operator=(WordBatch&&) = delete;

  /// `changes` are `count` positions (16 bits each), then as many elements; borrowed until upload(). A tile once only.
  void add(std::uint64_t rank, std::uint32_t count, std::span<const std::byte> changes);
  /// What is on the devices already; outlives this.
  void add(const ChangesOnDevices& kept);
  /// Brings what is not there to the devices; nothing is added later. On error nothing has changed.
  Status upload(const CallContext& until);
  /// On error some devices may have exchanged them; exchange_back() rolls back what these did.
  Status exchange(const CallContext& until);
  Status exchange_back(const CallContext& until);

 private:
  struct Added {
    std::uint64_t rank = 0;
    std::uint32_t count = 0;
    std::span<const std::byte> changes;
  };
  struct Upload {
    DeviceExecutor::Part* part = nullptr;
    gpu::Memory memory;
  };
  struct Launch {
    DeviceExecutor::Part* part = nullptr;
    gpu::ExchangeWords kernel;
    bool done = false;
  };
  Status upload_to(DeviceExecutor::Part& part, std::uint32_t index, const CallContext& until);
  void join_rooms();

  DeviceExecutor* executor_;
  std::vector<Added> added_;
  std::vector<const ChangesOnDevices::InRoom*> kept_;
  std::vector<Upload> uploads_;
  std::vector<Launch> launches_;
};

}  // namespace deltasync
