// Device 0 of a machine that has none: linked before cuda_device.cpp into the very objects of the tests that want a
// real device, so that what these expect is seen to hold on a device that is not the tests' own (which counts, delays
// and breaks). What it does is done when its call returns.
#include "gpu/cuda_device.hpp"
#include "gpu/host_device.hpp"

namespace deltasync::gpu {
namespace {

class StandinDevice final : public Device {
 public:
  const std::string& name() const override { return name_; }
  Result<Memory> allocate(std::uint64_t bytes) override { return host_.allocate(bytes); }
  Result<Memory> pin(std::uint64_t bytes) override { return host_.pin(bytes); }
  Result<Memory> register_host(std::byte* data, std::uint64_t bytes) override {
    return host_.register_host(data, bytes);
  }
  Result<std::unique_ptr<Stream>> make_stream() override { return host_.make_stream(); }
  Result<std::unique_ptr<Stream>> adopt_stream(StreamHandle /*there is no engine*/) override {
    return host_.make_stream();
  }
  Result<std::unique_ptr<Event>> make_event() override { return host_.make_event(); }

 protected:
  void give_back(Memory::Kind /*kind*/, std::byte* /*data*/, std::uint64_t /*bytes*/) noexcept override {}

 private:
  HostDevice host_;  // owns all of it
  const std::string name_ = "cuda:0 (stand-in)";
};

}  // namespace

Result<std::int32_t> cuda_device_count() {
  return 1;
}

Result<std::unique_ptr<Device>> open_cuda_device(std::int32_t ordinal, Use /*use*/) {
  if (ordinal != 0) return Error(Errc::unsupported, "cuda:" + std::to_string(ordinal) + ": there is one device");
  return std::unique_ptr<Device>(std::make_unique<StandinDevice>());
}

}  // namespace deltasync::gpu
