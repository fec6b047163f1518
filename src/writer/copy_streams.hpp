// The copy streams of a writer's session, one for each device that it was given memory of; made when first needed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "writer/copy_stream.hpp"

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
class CopyStreams {
 public:
  CopyStreams(std::unique_ptr<DeviceFinder> finder, const DeviceLimits& limits)
      : finder_(std::move(finder)), limits_(limits) {}

  Result<CopyStream*> stream_for(std::int32_t ordinal, const std::shared_ptr<shm::Segment>& segment,
                                 shm::WriterRole& role, Copier& copier);
  /// Gives back what the streams have of the segment. None is busy.
  void close() { copy_streams_.clear(); }

  /// As of one stream; the first error.
  Status poll();
  Status wait(std::uint64_t ticket, Deadline deadline);
  Status settle(Deadline deadline);
  bool busy() const;

 private:
  const std::unique_ptr<DeviceFinder> finder_;  ///< outlives the streams
  const DeviceLimits limits_;
  std::map<std::int32_t, std::unique_ptr<CopyStream>> copy_streams_;
};

}  // namespace deltasync
