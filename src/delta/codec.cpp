#include "delta/codec.hpp"

#include "delta/class_codec.hpp"
#include "delta/dense_codec.hpp"

namespace deltasync::delta {
namespace {

Result<DecodedTile> rice(const Kernels&, const TileShape& shape, const TileRecord& record, const std::byte*,
                         std::size_t) {
  return decode_rice(shape, record);
}

Result<DecodedTile> dense(const Kernels& kernels, const TileShape& shape, const TileRecord& record, const std::byte*,
                          std::size_t) {
  return decode_dense(kernels, shape, record);
}

Result<DecodedTile> exponent_classes(const Kernels& kernels, const TileShape& shape, const TileRecord& record,
                                     const std::byte* old, std::size_t row_stride) {
  return decode_class(kernels, shape, record, old, row_stride);
}

}  // namespace

// By the codec's number.
const CodecTraits kCodecTraits[kCodecEnd] = {
    {.whole_tile = true},
    {.name = "raw", .whole_tile = true},
    {.name = "rice_absolute", .record_sums = 1, .decode = rice},
    {.name = "rice_ulp", .differences = true, .record_sums = 2, .decode = rice},
    {.name = "rice_class",
     .differences = true,
     .needs_old_tile = true,
     .floats_only = true,
     .own_header = true,
     .decode = exponent_classes},
    {.name = "dense_ulp", .differences = true, .record_sums = 2, .decode = dense},
    {.name = "raw_planes", .whole_tile = true, .own_header = true},
};

}  // namespace deltasync::delta
