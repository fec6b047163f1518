// The host as a device: for tiles that a placement has, wholly or in part, in host memory beside a real device's.
// Memory is the heap's, and everything has happened when its call returns.
#pragma once

#include <string>

#include "gpu/device.hpp"

namespace deltasync::gpu {

class HostDevice final : public Device {
 public:
  const std::string& name() const override { return name_; }
  Result<Memory> allocate(std::uint64_t bytes) override { return take(Memory::Kind::device, bytes); }
  Result<Memory> pin(std::uint64_t bytes) override { return take(Memory::Kind::pinned, bytes); }
  Result<Memory> register_host(std::byte* data, std::uint64_t bytes,
                               std::shared_ptr<const void> /*nothing to end*/) override {
    return Memory(*this, Memory::Kind::registered, data, bytes);
  }
  Result<std::unique_ptr<Stream>> make_stream() override;
  /// The host has none: unsupported.
  Result<std::unique_ptr<Stream>> adopt_stream(StreamHandle handle) override;
  Result<std::unique_ptr<Event>> make_event() override;

 protected:
  void give_back(Memory::Kind kind, std::byte* data, std::uint64_t bytes) noexcept override;

 private:
  Result<Memory> take(Memory::Kind kind, std::uint64_t bytes);
  const std::string name_ = "host";
};

}  // namespace deltasync::gpu
