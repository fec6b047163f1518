#include "delta/kernel_scalar.hpp"

namespace deltasync::delta {

const Kernels& scalar_kernels() {
  static const Kernels kKernels{
      .name = "scalar",
      .scans = {{{{scan_scalar<std::uint8_t, false>, scan_scalar<std::uint8_t, true>},
                  {scan_scalar<std::uint16_t, false>, scan_scalar<std::uint16_t, true>},
                  {scan_scalar<std::uint32_t, false>, scan_scalar<std::uint32_t, true>},
                  {scan_scalar<std::uint64_t, false>, scan_scalar<std::uint64_t, true>}}}},
      .digest_run = digest_run_scalar,
      .copy_digests = {[](std::byte* to, const std::byte* from, std::size_t size, std::uint64_t word) {
        return copy_then_digest(to, from, size, word, digest_run_scalar);
      }},
      .digest_pairs = digest_pairs_scalar,
      .gaps = gaps_scalar,
      .quotient_sum = quotient_sum_scalar,
      .pack_low = pack_low_scalar,
      .pack_unary = pack_unary_scalar,
      .unpack_low = unpack_low_scalar,
      .split_signs = {split_signs_scalar<std::uint8_t>, split_signs_scalar<std::uint16_t>,
                      split_signs_scalar<std::uint32_t>, split_signs_scalar<std::uint64_t>},
      .decode = scalar_decode_kernels(),
      .classes = scalar_class_kernels(),
      .dense = scalar_dense_kernels(),
  };
  return kKernels;
}

}  // namespace deltasync::delta
