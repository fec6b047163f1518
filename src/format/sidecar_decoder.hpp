// Decoding a sidecar's encoding while it arrives, as layout_decoder.hpp does with a layout: a file that no sidecar of
// this layout has is refused when its name, its lengths or its header are there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/bytes.hpp"
#include "deltasync/layout.hpp"

namespace deltasync {

class SidecarDecoder {
 public:
  /// The encoding will have so many bytes. `layout` is borrowed. `of_part`: it may be that of a part.
  SidecarDecoder(const Layout& layout, std::uint64_t encoded_bytes, bool of_part = true)
      : layout_(layout), encoded_bytes_(encoded_bytes), of_part_(of_part), seen_(layout.tensors().size()) {}

  /// `so_far` is the encoding from its first byte on, longer each time. Takes the whole files in it. corrupt or
  /// unsupported as soon as no sidecar begins like this, naming the file.
  Status feed(ByteSpan so_far);
  /// After all of it has been fed.
  Result<Sidecar> finish();

 private:
  Status read_head(ByteReader& in);
  /// False: it is not there as a whole.
  Result<bool> read_weight_file(ByteReader& in);
  Result<bool> read_other_file(ByteReader& in);
  Status read_part(ByteSpan so_far);

  const Layout& layout_;
  const std::uint64_t encoded_bytes_;
  const bool of_part_;
  std::size_t at_ = 0;  ///< read so far
  bool has_head_ = false;
  bool has_part_ = false;
  std::uint64_t weights_ = 0;  ///< how many there will be
  std::uint64_t others_ = 0;
  Sidecar sidecar_;
  std::vector<bool> seen_;  ///< tensors, by layout index
};

}  // namespace deltasync
