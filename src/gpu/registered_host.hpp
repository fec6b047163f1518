// Host memory that is registered with a device, in parts: drivers refuse to register 512 GiB at once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "gpu/device.hpp"

namespace deltasync::gpu {

class RegisteredHost {
 public:
  static constexpr std::uint64_t kPartBytes = std::uint64_t{64} << 30;

  RegisteredHost() = default;
  /// As Device::register_host; on error none of it is. `part_bytes` is a multiple of the page size; timed_out and
  /// cancelled are looked for between parts.
  static Result<RegisteredHost> make(Device& device, std::byte* data, std::uint64_t bytes,
                                     const std::shared_ptr<const void>& keeper, std::uint64_t part_bytes,
                                     const std::optional<CallContext>& until = {});

  /// No copy may cross from one part to the next: calls copy(at, length) for pieces of `bytes` bytes at `at` that do
  /// not, until one fails.
  template <class Byte, class Copy>
  Status each_piece(Byte* at, std::uint64_t bytes, const Copy& copy) const {
    while (bytes != 0) {
      const std::uint64_t left = part_bytes_ - static_cast<std::uint64_t>(at - data_) % part_bytes_;
      const std::uint64_t piece = std::min(left, bytes);
      DS_TRY(copy(at, piece));
      at += piece;
      bytes -= piece;
    }
    return {};
  }
  /// All of it lies in one part.
  bool in_one_part(const std::byte* at, std::uint64_t bytes) const noexcept {
    return bytes == 0 || part_of(at) == part_of(at + bytes - 1);
  }
  /// Memory::abandon().
  void abandon() noexcept {
    for (Memory& part : parts_) part.abandon();
  }

 private:
  std::uint64_t part_of(const std::byte* at) const noexcept {
    return static_cast<std::uint64_t>(at - data_) / part_bytes_;
  }

  std::byte* data_ = nullptr;
  std::uint64_t part_bytes_ = kPartBytes;
  std::vector<Memory> parts_;
};

}  // namespace deltasync::gpu
