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

struct Isa {
  static constexpr auto exponents8 = exponents_scalar<std::uint8_t>;
  static constexpr auto exponents16 = exponents_scalar<std::uint16_t>;
  static constexpr auto exponents32 = exponents_scalar<std::uint32_t>;
  static constexpr auto count = count_exponents_scalar;
  static constexpr auto mask = class_mask_scalar;
  static constexpr auto select = select_scalar;
};

}  // namespace

ClassKernels scalar_class_kernels() {
  return class_kernels<Isa>();
}

}  // namespace deltasync::delta
