#include "gpu/host_device.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace deltasync::gpu {
namespace {

constexpr std::align_val_t kAlignment{256};

class HostStream final : public Stream {
 public:
  Status copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes) override {
    if (bytes != 0) std::memcpy(device, host, static_cast<std::size_t>(bytes));
    return {};
  }
  Status copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes) override {
    if (bytes != 0) std::memcpy(host, device, static_cast<std::size_t>(bytes));
    return {};
  }
  Status copy_out_rows(std::byte* host, std::uint64_t host_stride, const std::byte* device, std::uint64_t device_stride,
                       std::uint64_t row_bytes, std::uint64_t rows) override {
    for (std::uint64_t row = 0; row < rows && row_bytes != 0; ++row) {
      std::memcpy(host + row * host_stride, device + row * device_stride, static_cast<std::size_t>(row_bytes));
    }
    return {};
  }
  Status zero(std::byte* device, std::uint64_t bytes) override {
    if (bytes != 0) std::memset(device, 0, static_cast<std::size_t>(bytes));
    return {};
  }
  Status launch(const Kernel& kernel) override {
    std::visit([](const auto& k) { run(k); }, kernel);
    return {};
  }
  Status record(Event& /*done at once*/) override { return {}; }
  Status wait_for(Event& /*likewise*/) override { return {}; }

 private:
  template <class K>
  static void run(const K& kernel) {
    for (std::uint64_t block = 0; block < kernel.blocks(); ++block) {
      for (std::uint32_t thread = 0; thread < kBlockThreads; ++thread) {
        if constexpr (requires { kernel.sum(block, thread); }) {
          *kernel.sum_of(block) += kernel.sum(block, thread);
        } else {
          kernel.run(block, thread);
        }
      }
    }
  }
};

class HostEvent final : public Event {
 public:
  Result<bool> done() override { return true; }
};

}  // namespace

Result<Memory> HostDevice::take(Memory::Kind kind, std::uint64_t bytes) {
  void* const data =
      ::operator new(static_cast<std::size_t>(std::max<std::uint64_t>(1, bytes)), kAlignment, std::nothrow);
  if (data == nullptr) return Error(Errc::no_space, "host: " + std::to_string(bytes) + " bytes");
  return Memory(*this, kind, static_cast<std::byte*>(data), bytes);
}

void HostDevice::give_back(Memory::Kind kind, std::byte* data, std::uint64_t /*bytes*/) noexcept {
  switch (kind) {
    case Memory::Kind::device:
    case Memory::Kind::pinned: return ::operator delete(data, kAlignment);
    case Memory::Kind::registered: return;
  }
}

Result<std::unique_ptr<Stream>> HostDevice::make_stream() {
  return std::unique_ptr<Stream>(std::make_unique<HostStream>());
}

Result<std::unique_ptr<Stream>> HostDevice::adopt_stream(StreamHandle /*of a device*/) {
  return Error(Errc::unsupported, "host: there are no streams to adopt");
}

Result<std::unique_ptr<Event>> HostDevice::make_event() {
  return std::unique_ptr<Event>(std::make_unique<HostEvent>());
}

}  // namespace deltasync::gpu
