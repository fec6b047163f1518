// The codec dense_ulp (delta_format.md "Dense differences"): the difference of every element of a tile, changed or
// not, for tiles in which most have changed.
#pragma once

#include <vector>

#include "base/bytes.hpp"
#include "delta/delta.hpp"
#include "delta/geometry.hpp"
#include "delta/kernels.hpp"
#include "delta/rice.hpp"

namespace deltasync::delta {

/// What a payload is made with, and what its size follows from.
struct DenseChoice {
  unsigned k = 0;
  DenseSums sums;
};
/// Bytes of the planes of a payload, in the order in which they lie.
struct DensePlaneSizes {
  std::size_t low = 0;
  std::size_t unary = 0;
  std::size_t escape = 0;

  std::size_t total() const noexcept { return low + unary + escape; }
};
DensePlaneSizes dense_plane_sizes(const TileShape& shape, const DenseChoice& choice) noexcept;
/// The choice that a record says.
DenseChoice dense_choice(const TileRecord& record) noexcept;

/// Below a quarter of changed elements, an encoder does not look: naming them is shorter.
inline bool dense_may_win(const TileShape& shape, std::uint32_t changed) noexcept {
  return changed >= shape.elements() / 4;
}
/// Writes the number of each element to `numbers` and chooses k from how many have how many bits.
DenseChoice measure_dense(const DenseKernels& kernels, const TileShape& shape, const ChangedElements& changed,
                          std::vector<std::byte>& numbers);
/// Appends the payload of measured numbers, and fills in the record's codec, rice_k, changed, quotient_sum and
/// gamma_bits (the number of escapes).
void append_dense(const DenseKernels& kernels, const TileShape& shape, const DenseChoice& choice,
                  const std::vector<std::byte>& numbers, std::uint32_t changed, TileRecord& record,
                  std::vector<std::byte>& out);

/// Lists the changed elements and their differences, in a scratch memory of the calling thread (about 2 MiB) that lives
/// until its next decode. Total over hostile payloads, as decode_rice is. The record's fields and payload size must
/// have passed parse_frame.
Result<DecodedTile> decode_dense(const Kernels& kernels, const TileShape& shape, const TileRecord& record);

}  // namespace deltasync::delta
