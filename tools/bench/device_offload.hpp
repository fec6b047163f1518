// What a trainer waits for whose weights lie on a device: a real writer copies them into the halves of a real agent,
// which diffs meanwhile.
#pragma once

#include <array>

#include "base/thread_pool.hpp"
#include "bench/device_limits.hpp"
#include "deltasync/layout.hpp"

namespace deltasync::bench {

/// Two versions of a model on a device, each laid out like a half.
struct OnDevice {
  LayoutPtr layout;
  std::array<gpu::Memory, 2> memory;
  std::array<Digest128, 2> roots;
};

struct DeviceOffload {
  double offload_s = 1e300;  ///< begin() called → commit() returned; the best
  double write_s = 1e300;    ///< of that one: inside write()
  bool registered = false;   ///< the halves with the device: else every byte goes through a buffer
};
/// Both in turn, as versions of one agent. corrupt if a half has other bytes then.
Result<DeviceOffload> offload_from_device(const Options& options, const BenchDevice& device, const OnDevice& model,
                                          ThreadPool& pool);

}  // namespace deltasync::bench
