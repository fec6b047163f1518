// One device's copies into the halves. They are queued in a stream of its own, behind what the trainer's stream
// has so far, and counted as in place when an event says that they have arrived, in order. Each is inside a copy
// bracket of the half protocol from before it is queued until it has arrived: a half into which a device may still
// write is never handed on, whatever becomes of the fill.
//
// A copy goes into the half itself, which is registered with the device. Where that is refused it goes into a small
// pinned buffer, and from there into the half once it has arrived. A source whose columns lie apart is put into rows
// first, in the device's memory, part after part.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "base/deadline.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/result.hpp"
#include "format/segment.hpp"
#include "gpu/device.hpp"
#include "gpu/registered_host.hpp"
#include "shm/roles.hpp"
#include "shm/segment.hpp"
#include "writer/copy.hpp"
#include "writer/progress.hpp"

namespace deltasync {

/// What bounds the copies under way. A flight is what one event stands for.
struct DeviceLimits {
  std::uint64_t flight_bytes_max = 32u << 20;
  std::size_t flights_max = 32;
  std::uint64_t bounce_bytes = 8u << 20;  ///< of one flight, without registration
  std::size_t bounce_flights = 4;
  std::uint64_t register_bytes = gpu::RegisteredHost::kPartBytes;  ///< of a half at once, in whole pages
};

/// Used by one thread at a time.
class CopyStream {
 public:
  /// What it copies for and through; all of it outlives this. The driver may know the segment for longer.
  struct Surroundings {
    gpu::Device& device;
    std::shared_ptr<shm::Segment> segment;
    shm::WriterRole& role;
    Copier& copier;  ///< moves what went through the buffer
  };
  /// Registers both halves, or makes the buffer and logs why. Errors: no_space, io.
  static Result<std::unique_ptr<CopyStream>> open(const Surroundings& around, const DeviceLimits& limits);
  CopyStream(const Surroundings& around, const DeviceLimits& limits) : around_(around), limits_(limits) {}
  /// While copies are under way it leaves their brackets open, and abandons what they use.
  ~CopyStream();
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  const std::string& device_name() const { return around_.device.name(); }
  /// Of the jobs of one flight.
  std::uint64_t flight_bytes_max() const noexcept {
    return bounces() ? limits_.bounce_bytes : limits_.flight_bytes_max;
  }

  /// What is queued from now on comes after what the trainer's stream has by now.
  Status follow(gpu::StreamHandle stream);
  /// Queues copies from device memory into a half as one flight; waits for the oldest flight if there are too many.
  /// `parts` is what they add to the progress of the fill. After an error abort the fill and settle().
  Status queue(const shm::Fill& fill, std::span<const CopyJob> jobs, std::span<const BatchCounter::Part> parts,
               std::uint64_t ticket, Deadline deadline);
  /// Counts what has arrived.
  Status poll();
  /// Until all flights of this ticket and earlier ones have arrived and are counted.
  Status wait(std::uint64_t ticket, Deadline deadline);

  /// Copies are under way, or may be.
  bool busy() const noexcept { return !flights_.empty(); }
  /// Of an aborted fill: waits until the device is done with its copies, and closes their brackets; they count for
  /// nothing. On an error, timed_out among them, they stay open: call it again.
  Status settle(Deadline deadline);

 private:
  struct Flight {
    shm::Fill fill;
    std::uint64_t ticket = 0;
    std::vector<BatchCounter::Part> parts;
    std::unique_ptr<gpu::Event> arrived;
    bool recorded = false;             ///< if not, `arrived` speaks of an earlier flight, or of nothing
    std::vector<CopyJob> from_buffer;  ///< once it has arrived
    std::byte* buffer = nullptr;
  };

  Status prepare();
  Status register_halves();
  Status make_buffer();
  bool bounces() const noexcept { return static_cast<bool>(buffer_); }
  std::size_t flights_max() const noexcept { return bounces() ? limits_.bounce_flights : limits_.flights_max; }
  Result<Flight> take_flight();
  Status put(Flight& flight, std::span<const CopyJob> jobs);
  Result<CopyJob> in_rows(const CopyJob& job);
  Status put_in_place(unsigned half, const CopyJob& job);
  Status wait_for_oldest(Deadline deadline);
  void land_oldest();
  void release(bool count);
  std::string describe(const char* what) const;

  const Surroundings around_;
  const DeviceLimits limits_;
  std::array<gpu::RegisteredHost, shm::kHalves> registered_;
  gpu::Memory buffer_;
  gpu::Memory rows_;  ///< of the device: a transposed job in rows, while it is copied on; made for the first one
  std::unique_ptr<gpu::Stream> stream_;
  std::unique_ptr<gpu::Event> ready_;    ///< in the trainer's stream
  std::unique_ptr<gpu::Event> settled_;  ///< behind everything, once a fill was aborted
  bool settling_ = false;                ///< settled_ is recorded
  std::deque<Flight> flights_;           ///< oldest first
  std::vector<Flight> spare_;
};

}  // namespace deltasync
