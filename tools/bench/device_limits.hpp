// What a device's bus and memory give at most, measured beside the work.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "bench/bench.hpp"
#include "gpu/device.hpp"

namespace deltasync::bench {

inline constexpr auto kDeviceLimit = std::chrono::seconds(300);  ///< of any wait for it

/// cuda:0, or the tests' device, where all of this can be tried and nothing measured.
struct BenchDevice {
  std::unique_ptr<gpu::Device> device;
  gpu::StreamHandle stream;  ///< the trainer's
  bool fake = false;
};
Result<BenchDevice> open_device(const Options& options);

struct BusLimits {
  double h2d_gbps = 0;  ///< of one long run of copies from pinned memory
  double d2h_gbps = 0;
  double hbm_gbps = 0;          ///< of a kernel that reads
  std::uint64_t hbm_bytes = 0;  ///< that it read each time: the device's caches hold little of them
};
/// The best of so many rounds. corrupt if the kernel did not read what is there.
Result<BusLimits> measure_device(const BenchDevice& device, unsigned rounds);

/// Through a little pinned memory; returns when it is there.
Status upload(gpu::Device& device, std::byte* to, std::span<const std::byte> from);

inline double gbps(std::uint64_t bytes, double seconds) {
  return static_cast<double>(bytes) / seconds / 1e9;
}

}  // namespace deltasync::bench
