// A device that computes with memory of its own: what a target needs of one, without naming a CUDA type. There are
// three kinds: CUDA (cuda_device.hpp), the host itself (host_device.hpp), and one for tests that breaks what may break
// (fake_device.hpp). One suite runs over all of them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/call_context.hpp"
#include "deltasync/result.hpp"
#include "gpu/kernels.hpp"

namespace deltasync::gpu {

class Device;

/// Memory of a device, or host memory that it copies from and to without help: made for that, or registered. Gives
/// itself back; see abandon().
class Memory {
 public:
  enum class Kind : std::uint8_t {
    device,
    pinned,
    registered,
  };

  Memory() = default;
  Memory(Device& owner, Kind kind, std::byte* data, std::uint64_t bytes)
      : owner_(&owner), kind_(kind), data_(data), bytes_(bytes) {}
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    Memory(std::move(other)).swap(*this);
    return *this;
  }
  ~Memory() { release(); }

  Kind kind() const noexcept { return kind_; }
  /// Of device memory: for copies and kernels only, the host must not follow it.
  std::byte* data() const noexcept { return data_; }
  std::uint64_t bytes() const noexcept { return bytes_; }
  explicit operator bool() const noexcept { return data_ != nullptr; }
  /// Gives it back now. Whatever a stream still does with it must have ended.
  void release() noexcept;
  /// Forgets it: for what a stream that does not end may still use. Giving it back would wait for that without a
  /// deadline, or pull it from under a copy.
  void abandon() noexcept { data_ = nullptr; }
  void swap(Memory& other) noexcept {
    std::swap(owner_, other.owner_);
    std::swap(kind_, other.kind_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

 private:
  Device* owner_ = nullptr;
  Kind kind_ = Kind::device;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

/// A point in a stream. Used by one thread at a time.
class Event {
 public:
  virtual ~Event() = default;
  /// True once all is done that was in the stream when Stream::record() was called; true if it never was. A device
  /// error that happened until then is returned here.
  virtual Result<bool> done() = 0;
};

/// A stream as its driver knows it: a cudaStream_t. Null is CUDA's default stream.
struct StreamHandle {
  void* raw = nullptr;
};

/// Work that a device does in order, beside its other streams. Every call returns at once; the host memory of a copy
/// and what a kernel points to are in use until an event behind it is done. Used by one thread at a time. An error
/// names the device, the call, and what the driver said.
class Stream {
 public:
  virtual ~Stream() = default;
  /// `host` is pinned or registered memory of the same device.
  virtual Status copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes) = 0;
  virtual Status copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes) = 0;
  /// Of a rectangle: rows that lie a stride apart. Nothing happens if it has no bytes.
  virtual Status copy_out_rows(std::byte* host, std::uint64_t host_stride, const std::byte* device,
                               std::uint64_t device_stride, std::uint64_t row_bytes, std::uint64_t rows) = 0;
  virtual Status zero(std::byte* device, std::uint64_t bytes) = 0;
  /// Nothing happens if it has no blocks.
  virtual Status launch(const Kernel& kernel) = 0;
  virtual Status record(Event& event) = 0;
  /// What follows in this stream begins when the event, of any stream of the device, is done.
  virtual Status wait_for(Event& event) = 0;
  /// Whether somebody records what is put into it as a graph, so that it would not run now, or end the recording: see
  /// wait_for_capture().
  virtual Result<bool> is_captured() { return false; }
  /// For other libraries that put work into it; null of devices that are none of CUDA's.
  virtual StreamHandle handle() const noexcept { return {}; }
};

/// Thread-safe. Outlives all that comes from it.
class Device {
 public:
  virtual ~Device() = default;
  /// "cuda:0 (NVIDIA H200)": how messages name it.
  virtual const std::string& name() const = 0;
  /// no_space if the device has not so much left. What is in it is left to chance; aligned to 256 bytes.
  virtual Result<Memory> allocate(std::uint64_t bytes) = 0;
  /// Host memory; no_space.
  virtual Result<Memory> pin(std::uint64_t bytes) = 0;
  /// Lets the device copy from and to host memory that is there already, as if it were pinned, until what is returned
  /// is given back. That may be later than this returns, behind all that runs on a device: `keeper` has the host memory
  /// mapped until then, or it is for as long as the process lives. Other devices register the same for themselves. io
  /// if somebody else has registered any of it. Takes long for much memory. `data` begins a page.
  virtual Result<Memory> register_host(std::byte* data, std::uint64_t bytes, std::shared_ptr<const void> keeper) = 0;
  virtual Result<std::unique_ptr<Stream>> make_stream() = 0;
  /// The stream goes on when what is returned here ends.
  virtual Result<std::unique_ptr<Stream>> adopt_stream(StreamHandle handle) = 0;
  virtual Result<std::unique_ptr<Event>> make_event() = 0;

 protected:
  friend class Memory;
  virtual void give_back(Memory::Kind kind, std::byte* data, std::uint64_t bytes) noexcept = 0;
};

/// How long a wait looks without sleeping: a commit takes milliseconds, in which an engine stands still.
inline constexpr std::chrono::microseconds kEager{2000};
/// Where many threads wait at a time, whose looks would hold each other up, and nobody stands still.
inline constexpr std::chrono::microseconds kBriefly{50};

/// Polls until the event is done: the driver's own waits have no deadline. timed_out or cancelled, naming `what`.
Status wait(Event& event, const CallContext& until, std::string_view what, std::chrono::microseconds eager = kEager);

/// Until nobody captures the stream as a graph; timed_out or cancelled, which say so. `whose` names the stream.
Status wait_for_capture(Stream& stream, const CallContext& until, std::string_view whose);

}  // namespace deltasync::gpu
