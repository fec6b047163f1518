// The lanes of a writer's session, one for each device that it was given memory of; made when first needed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "writer/device_lane.hpp"

namespace deltasync {

/// Where a session finds a device. Tests have one of their own.
class DeviceFinder {
 public:
  virtual ~DeviceFinder() = default;
  /// Stays valid as long as the finder. unsupported if there is none of this number.
  virtual Result<gpu::Device*> find(std::int32_t ordinal) = 0;
};
std::unique_ptr<DeviceFinder> cuda_devices();

/// Used by one thread at a time.
class DeviceLanes {
 public:
  DeviceLanes(std::unique_ptr<DeviceFinder> finder, const DeviceLimits& limits)
      : finder_(std::move(finder)), limits_(limits) {}

  Result<DeviceLane*> lane(std::int32_t ordinal, shm::Segment& segment, shm::WriterRole& role, ThreadPool& pool);
  /// Gives back what the lanes have of the segment. None is busy.
  void close() { lanes_.clear(); }

  /// As of one lane; the first error.
  Status poll();
  Status wait(std::uint64_t ticket, Deadline deadline);
  Status settle(Deadline deadline);
  bool busy() const;

 private:
  const std::unique_ptr<DeviceFinder> finder_;  ///< outlives the lanes
  const DeviceLimits limits_;
  std::map<std::int32_t, std::unique_ptr<DeviceLane>> lanes_;
};

}  // namespace deltasync
