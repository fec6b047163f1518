// Diffing and encoding with chosen kernels: what encode() of delta.hpp does with those of this process.
#pragma once

#include <memory>

#include "delta/delta.hpp"
#include "delta/frame.hpp"
#include "delta/geometry.hpp"
#include "delta/kernels.hpp"
#include "delta/rice.hpp"

namespace deltasync::delta {

/// What the diff of one batch gave.
struct EncodedBatch {
  Frame frame;                         ///< empty if nothing changed
  std::vector<std::uint64_t> digests;  ///< of the batch's tiles, after it
  CodecStats stats[kCodecEnd];
};

/// Diffs batches of tiles. One per worker, since it keeps the working memory; the result is a function of the bytes
/// alone.
class BatchEncoder {
 public:
  BatchEncoder(const Kernels& kernels, const Layout& layout, ValueForm form)
      : kernels_(kernels), layout_(layout), form_(form) {}

  /// `digests` are those of all tiles of `before`.
  EncodedBatch encode(const Batch& batch, ByteSpan before, ByteSpan after, std::span<const std::uint64_t> digests);

 private:
  /// Changed elements of one panel's tile while a strip is scanned.
  struct PanelBuffer {
    std::unique_ptr<std::byte[]> memory;
    ScanOutput out;
  };
  void encode_strip(const Strip& strip, ByteSpan before, ByteSpan after, const Batch& batch, EncodedBatch& to);
  void scan_strip(const Strip& strip, ByteSpan before, ByteSpan after);
  void scan_strip(const Strip& strip, ScanFn scan, ByteSpan before, ByteSpan after);
  void scan_flat_tile(const Strip& strip, std::uint32_t panel, ScanFn scan, ByteSpan before, ByteSpan after);
  void reset_panels(std::uint32_t panels, std::uint32_t element_bytes);

  const Kernels& kernels_;
  const Layout& layout_;
  const ValueForm form_;
  std::vector<PanelBuffer> panels_;
  std::uint32_t panel_element_bytes_ = 0;
  RiceScratch scratch_;
  FrameBuilder builder_;
};

Delta encode_with(const Kernels& kernels, const Layout& layout, ByteSpan before, ByteSpan after,
                  std::span<std::uint64_t> digests, const EncodeRequest& request, ThreadPool& pool);

}  // namespace deltasync::delta
