// Whether the copies of placed elements (tied weights, replicas) are what is read in the first place.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "gpu/device.hpp"
#include "placement/copies.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync {

/// Used by one thread at a time.
class CopyCheck {
 public:
  /// Reads the tiles of one layer, by their rank in its placement.
  class Reader {
   public:
    virtual ~Reader() = default;
    virtual Status digests(std::span<const std::uint64_t> ranks, std::span<std::uint64_t> out,
                           const CallContext& until) = 0;
    /// All elements, row by row without gaps.
    virtual Status gather(std::uint64_t rank, std::vector<std::byte>& to, const CallContext& until) = 0;
    /// Waits until nothing reads live memory any more, of what ended early too.
    virtual Status finish(const CallContext& /*until*/) { return {}; }
  };
  using Open = std::function<Result<std::unique_ptr<Reader>>(const std::shared_ptr<const Placement>& layer,
                                                             const CallContext& until)>;

  /// Opens a reader for each layer: none if the placement has no copies.
  static Result<CopyCheck> make(const Placement& placement, const Open& open, const CallContext& until);

  /// See CanReadCopies::wrong_copies.
  Result<std::vector<WrongCopy>> find(const Target& target, std::span<const std::uint64_t> tiles,
                                      const CallContext& until);
  /// See WaitsForDevices::finish_live.
  Status finish(const CallContext& until);

 private:
  struct Layer {
    placement::CopyLayer of;
    std::unique_ptr<Reader> reader;
  };
  /// Tiles of the layer that are wrong by their digests, or that these say nothing about.
  static Result<std::vector<std::uint64_t>> suspects(const Target& target, Layer& layer,
                                                     std::span<const std::uint64_t> tiles, const CallContext& until);
  /// The memory of the first element of the tile that is not what the target reads; kRestMemory: none.
  static Result<std::uint32_t> differing(const Target& target, Layer& layer, std::uint64_t tile,
                                         const CallContext& until);

  std::vector<Layer> layers_;
};

/// Of memories that are all the host's. The pool outlives what is opened.
CopyCheck::Open copies_on_host(ThreadPool& pool);
/// A device that a placement has memory on; it outlives what is opened.
struct CopyDevice {
  std::int32_t ordinal = 0;
  gpu::Device* device = nullptr;
};
/// Of memories on these devices and on the host. Takes as little staging of each as it can: no_space.
CopyCheck::Open copies_on_devices(std::vector<CopyDevice> devices, std::chrono::nanoseconds device_timeout);

}  // namespace deltasync
