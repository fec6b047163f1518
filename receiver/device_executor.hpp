// Moves tiles and changed elements between host memory and the places that a placement gives them on devices, and in
// host memory beside them. What placement::HostExecutor is for the host alone; but here every call can fail.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "gpu/device.hpp"
#include "placement/word_table.hpp"
#include "receiver/target.hpp"

namespace deltasync {

class WordBatch;

/// Tiles are named by their rank in the placement's set. Thread-safe, but for what is said. All work goes through one
/// stream of each device, so that what is asked for later sees what was asked for before.
class DeviceExecutor {
 public:
  /// A device that the placement has memory on.
  struct Source {
    std::int32_t ordinal = 0;
    std::unique_ptr<gpu::Device> own;       ///< or null, if it is somebody else's
    gpu::Device* device = nullptr;          ///< outlives this
    std::unique_ptr<gpu::Stream> engine{};  ///< the engine's stream, if it named one
  };
  /// `staging_bytes` of pinned memory at most for each device, but a few tiles' at least. No wait for a device is
  /// longer than `patience`. unsupported if a memory's device is not among the sources; no_space.
  static Result<std::unique_ptr<DeviceExecutor>> make(PlacementPtr placement, std::vector<Source> sources,
                                                      std::uint64_t staging_bytes, std::chrono::nanoseconds patience);
  /// Waits for the devices, as long as `patience`; what one that does not end still uses is never given back.
  ~DeviceExecutor();
  DeviceExecutor(const DeviceExecutor&) = delete;
  DeviceExecutor& operator=(const DeviceExecutor&) = delete;

  const Placement& placement() const noexcept { return *placement_; }
  std::uint64_t tile_bytes(std::uint64_t rank) const noexcept;
  std::uint64_t staging_bytes() const noexcept;
  /// The end of a wait that begins now.
  Until patient(const Until& until) const { return until.earlier(Deadline::after(patience_)); }
  Until patient() const { return Deadline::after(patience_); }

  /// All elements of the tile, row by row without gaps.
  Status gather_tile(std::uint64_t rank, std::byte* to, const Until& until);
  /// And back, to every place that an element has, from rows that may have gaps. It has been read when this returns,
  /// and is on its way: finish() tells whether it came there. On error places may have the new elements, or the old.
  Status scatter_tile(std::uint64_t rank, const std::byte* from, std::uint64_t row_stride, const Until& until);
  /// The state digests of tiles, read where they are. Used by one thread at a time.
  Status digests(std::span<const std::uint64_t> ranks, std::span<std::uint64_t> out, const Until& until);

  /// Resolves changes over live memory, and marks those that it has: of tiles that are read on one device, as far as
  /// the changes of one find room in staging. `ranks` are their tiles'.
  Status resolve(std::span<TileChanges> changes, std::span<const std::uint64_t> ranks, const Until& until);

  /// Waits until all is done that was asked for, and returns what went wrong of it.
  Status finish(const Until& until);
  /// What follows comes after what the engine's streams have now; and what these get later, after what came before.
  Status enter_engine();
  Status leave_engine();

 private:
  friend class WordBatch;
  /// Staging for one tile.
  struct Slot {
    gpu::Memory pinned;
    gpu::Memory device;
    std::unique_ptr<gpu::Event> event;  ///< behind the last use of both
    bool lost = false;                  ///< nobody knows when its last use ends: it is not used again
  };
  /// A device, or the host.
  struct Part {
    std::unique_ptr<gpu::Device> own;
    gpu::Device* device = nullptr;
    std::unique_ptr<gpu::Stream> engine;
    std::unique_ptr<gpu::Stream> stream;
    std::unique_ptr<gpu::Event> event;  ///< for finish() and the engine
    std::mutex mutex;                   ///< whoever uses the streams, or that event, has it
    gpu::Memory tiles;                  ///< of the table
    gpu::Memory regions;
    placement::WordTable table;
    std::vector<Slot> slots;
    std::vector<Slot*> idle;  ///< protected by slots_mutex
    std::mutex slots_mutex;
    std::condition_variable freed;
  };
  /// A slot that a thread has.
  class Lease {
   public:
    Lease(Part& part, Slot& slot) : part_(&part), slot_(&slot) {}
    ~Lease();
    Lease(Lease&& other) noexcept : part_(other.part_), slot_(std::exchange(other.slot_, nullptr)) {}
    Lease& operator=(Lease&&) = delete;
    Slot* operator->() const noexcept { return slot_; }

   private:
    Part* part_;
    Slot* slot_;
  };

  static constexpr std::uint32_t kMixed = ~std::uint32_t{0};
  static constexpr std::uint64_t kTileAt = 256;  ///< in a slot: behind the tile's description

  DeviceExecutor(PlacementPtr placement, std::chrono::nanoseconds patience);
  Status add_part(Source source, std::uint64_t staging_bytes);
  Status make_table(Part& part, std::uint32_t index);
  void find_homes();
  std::uint32_t part_of(std::uint32_t memory) const noexcept;
  Result<Lease> take_slot(Part& part, const Until& until) const;
  gpu::MoveTiles describe(const Part& part, const Lease& slot, std::uint64_t rank, gpu::MoveTiles::Way way) const;
  /// Puts work into the part's stream. Whatever comes of it: what is in the stream already may use the slot.
  template <class Fn>
  static Status use(Part& part, const Lease& slot, const Fn& put_work) {
    const std::lock_guard lock(part.mutex);
    Status put = put_work();
    Status recorded = part.stream->record(*slot->event);
    if (recorded.ok()) return put;
    slot->lost = true;
    return recorded;
  }
  Status gather_from(Part& part, const Lease& slot, std::uint64_t rank);
  Status scatter_to(Part& part, const Lease& slot, std::uint64_t rank);
  void merge(std::uint64_t rank, std::uint32_t part, const std::byte* from, std::byte* to) const;
  Status digests_on(Part& part, std::span<const std::uint64_t> ranks, std::uint64_t* out, const Until& until);
  Status resolve_some(Part& part, std::span<const std::size_t> which, std::span<TileChanges> changes,
                      std::span<const std::uint64_t> ranks, const Until& until);
  std::uint64_t resolve_bytes(const TileChanges& changes, std::uint64_t rank) const noexcept;
  Status upload(Part& part, std::byte* to, std::span<const std::byte> bytes, const Until& until);

  const PlacementPtr placement_;
  const std::chrono::nanoseconds patience_;
  std::vector<std::byte> rest_;
  std::vector<std::unique_ptr<Part>> parts_;
  std::vector<std::uint32_t> part_of_memory_;  ///< by memory
  std::uint32_t host_part_ = kMixed;           ///< of the rest, too
  std::vector<std::uint32_t> rows_;            ///< of each tile
  std::vector<std::uint32_t> home_;            ///< the part that all of a tile is read from, or kMixed
  std::vector<std::uint32_t> places_;          ///< bit i: part i has places of the tile
  placement::WordTables shape_;                ///< of all tiles, no addresses
  std::uint64_t slot_bytes_ = 0;
};

/// Changed elements of many tiles, exchanged with what is in memory by one launch a device: the first time that commits
/// them, the next time it takes that back. Ends before its executor.
class WordBatch {
 public:
  explicit WordBatch(DeviceExecutor& executor) : executor_(&executor) {}
  ~WordBatch();
  WordBatch(WordBatch&& other) noexcept = default;
  WordBatch& operator=(WordBatch&&) = delete;

  /// `changes` are `count` positions (16 bits each), then as many elements; borrowed until upload(). A tile once only.
  void add(std::uint64_t rank, std::uint32_t count, std::span<const std::byte> changes);
  bool empty() const noexcept { return added_.empty(); }
  /// Brings all of them to the devices; nothing is added later. On error nothing has changed.
  Status upload(const Until& until);
  /// On error some devices may have exchanged them; exchange_back() takes back what these did.
  Status exchange(const Until& until);
  Status exchange_back(const Until& until);
  /// Of the devices' memory.
  std::uint64_t bytes() const noexcept;

 private:
  struct Added {
    std::uint64_t rank = 0;
    std::uint32_t count = 0;
    std::span<const std::byte> changes;
  };
  struct OnPart {
    DeviceExecutor::Part* part = nullptr;
    gpu::Memory memory;
    gpu::ExchangeWords kernel;
    bool launched = false;
  };
  Status upload_to(DeviceExecutor::Part& part, std::uint32_t index, const Until& until);

  DeviceExecutor* executor_;
  std::vector<Added> added_;
  std::vector<OnPart> on_;
};

}  // namespace deltasync
