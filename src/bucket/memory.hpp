// The memory of a channel: two halves that the trainer writes and the engine reads, made once and kept for all
// versions. One kind is here, shared memory of the host. Device memory would be another: what crosses is a descriptor,
// which is also how CUDA exports its own (cuMemExportToShareableHandle). That is not written.
#pragma once

#include <cstdint>
#include <memory>

#include "base/bytes.hpp"
#include "base/fd.hpp"
#include "deltasync/result.hpp"

namespace deltasync::bucket {

class BucketMemory {
 public:
  virtual ~BucketMemory() = default;
  virtual std::uint64_t half_bytes() const noexcept = 0;
  virtual ByteSpan half(unsigned index) const noexcept = 0;
  /// The same to be written; empty where this process only reads.
  virtual MutByteSpan room(unsigned index) noexcept = 0;
  /// What the other process opens it with.
  virtual int descriptor() const noexcept = 0;
};

/// The trainer's: every page is there, and the size cannot change any more. no_space says how much is needed.
Result<std::unique_ptr<BucketMemory>> make_host_buckets(std::uint64_t half_bytes);
/// The engine's, to be read. corrupt if the descriptor is of no such memory: another file, another size, or one that
/// its owner could shrink, so that reading it would end this process.
Result<std::unique_ptr<BucketMemory>> open_host_buckets(UniqueFd file, std::uint64_t half_bytes);

}  // namespace deltasync::bucket
