// NCCL among the CUDA devices of one process. The library is opened when it is first asked for, so that builds need
// neither it nor its headers.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "deltasync/result.hpp"
#include "gpu/device.hpp"

namespace deltasync::gpu {

/// Bytes of one device to all of a group. What is under way when this ends is broken off.
class Broadcast {
 public:
  virtual ~Broadcast() = default;
  /// Queues it and returns: what memories[0] has by then in streams[0] comes to the other memories, in their streams.
  /// Both are as many as the group has devices, in its order.
  virtual Status run(std::span<std::byte* const> memories, std::uint64_t bytes, std::span<Stream* const> streams) = 0;
};

/// Waits, without a deadline, until the devices know each other. Devices are CUDA's, by their ordinals, and each once.
/// unsupported, saying why, where libnccl.so.2 cannot be loaded; io with what NCCL said.
Result<std::unique_ptr<Broadcast>> open_nccl_broadcast(std::span<const std::int32_t> ordinals);

}  // namespace deltasync::gpu
