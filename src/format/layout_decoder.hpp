// Decoding a layout's canonical encoding while it arrives: a caller that decompresses one from a peer stops at the
// first tensor that no layout has, and holds no more than a layout of that many bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/bytes.hpp"
#include "deltasync/layout.hpp"

namespace deltasync {

class LayoutDecoder {
 public:
  /// The encoding will have so many bytes. Nothing is allocated for them.
  explicit LayoutDecoder(std::uint64_t encoded_bytes) : encoded_bytes_(encoded_bytes) {}

  /// `so_far` is the encoding from its first byte on, longer each time (and perhaps at another address). Takes the
  /// whole tensors in it. corrupt or unsupported as soon as no layout begins like this, naming the tensor.
  Status feed(ByteSpan so_far);
  /// `encoded` is all of it, and has been fed.
  Result<LayoutPtr> finish(ByteSpan encoded);

 private:
  Status read_head(ByteReader& in);
  /// False: it is not there as a whole.
  Result<bool> read_tensor(ByteReader& in);

  const std::uint64_t encoded_bytes_;
  std::size_t at_ = 0;                    ///< read so far
  std::optional<std::uint64_t> tensors_;  ///< that there are
  std::vector<Tensor> read_;              ///< and checked
};

}  // namespace deltasync
