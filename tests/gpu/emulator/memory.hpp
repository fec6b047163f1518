// The addresses that the emulated devices know: memory of theirs, which the host cannot touch at its address, and host
// memory that was pinned or registered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

namespace deltasync::emulator {

class Memory {
 public:
  static constexpr int kHost = -1;
  struct Range {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    int device = kHost;
    bool pinned = false;  ///< of the host: made by the driver, not registered
    bool is_there = true;

    bool has(std::uintptr_t at, std::uint64_t bytes) const { return begin <= at && at <= end && bytes <= end - at; }
  };

  /// `bytes_max` for each device.
  explicit Memory(std::uint64_t bytes_max);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  enum class When : std::uint8_t { now, later };
  /// Aligned to 256 bytes, never where something was before, with a gap behind it; null if the device has no room.
  /// Later: once arrive() is called.
  std::byte* allocate(int device, std::uint64_t bytes, When when = When::now);
  void arrive(const std::byte* data);
  /// False if it is no beginning of device memory. Later: its room is the device's when give_back() is called.
  bool free(const void* data, When room = When::now);
  void give_back(int device);
  /// False if part of it is known already.
  bool add_host(const void* data, std::uint64_t bytes, bool pinned);
  bool remove_host(const void* data, bool pinned);

  /// The range that this address is in, or just behind of.
  std::optional<Range> find(const void* at) const;
  /// Where the emulator finds what the device has at this address.
  std::byte* real(const void* at) const;
  std::byte* real(std::uintptr_t at) const { return real(reinterpret_cast<const void*>(at)); }

 private:
  bool is_device(const void* at) const;

  const std::uint64_t bytes_max_;
  std::byte* addresses_ = nullptr;  ///< without access
  std::byte* contents_ = nullptr;   ///< the same memory, with
  mutable std::mutex mutex_;
  std::uint64_t next_ = 0;                  ///< protected by mutex_
  std::map<int, std::uint64_t> used_;       ///< protected by mutex_; of each device
  std::map<int, std::uint64_t> freed_;      ///< protected by mutex_; of that
  std::map<std::uintptr_t, Range> ranges_;  ///< protected by mutex_; by where they begin
};

}  // namespace deltasync::emulator
