#include "delta/class_scalar.hpp"

namespace deltasync::delta {

namespace {

bool select_scalar(const std::uint64_t* mask, std::uint32_t words, const std::uint16_t* gaps, std::uint32_t count,
                   std::uint16_t* positions) {
  return select_in_mask(mask, words, gaps, count, positions, [](std::uint64_t word, std::uint32_t n) {
    for (; n != 0; --n) word &= word - 1;
    return static_cast<unsigned>(__builtin_ctzll(word));
  });
}

}  // namespace

ClassKernels scalar_class_kernels() {
  return {
      .exponents = {exponents_scalar<std::uint8_t>, exponents_scalar<std::uint16_t>, exponents_scalar<std::uint32_t>,
                    exponents_scalar<std::uint64_t>},
      .count = count_exponents_scalar,
      .mask = class_mask_scalar,
      .gaps = gaps_in_mask,
      .select = select_scalar,
  };
}

}  // namespace deltasync::delta
