// NEON kernels of rice_class.
#include "delta/class_scalar.hpp"
#include "delta/neon.hpp"

namespace deltasync::delta {

namespace {

/// How many bytes of so many lines are -1 in `equal`.
template <class Equal>
std::uint32_t count_equal(const std::uint8_t* exponents, std::uint32_t lines, const Equal& equal) {
  constexpr std::uint32_t kOneSumMax = 255;
  std::uint32_t count = 0;
  for (std::uint32_t line = 0; line < lines;) {
    const std::uint32_t end = lines - line > kOneSumMax ? line + kOneSumMax : lines;
    uint8x16_t sums[4] = {};  // each addition would wait for the one before
    for (; line < end; ++line) {
      for (std::size_t v = 0; v < 4; ++v) {
        sums[v] = vsubq_u8(sums[v], equal(load128(exponents + std::size_t{line} * 64 + v * 16)));
      }
    }
    for (const uint8x16_t sum : sums) count += vaddlvq_u8(sum);
  }
  return count;
}

/// One pass for each exponent, as long as these are so few that a table of counts takes more instructions.
void count_neon(const std::uint8_t* exponents, std::uint32_t elements, unsigned lowest, unsigned top,
                std::uint32_t* counts) {
  constexpr unsigned kPassesMax = 32;
  if (top - lowest >= kPassesMax) {
    count_exponents_scalar(exponents, elements, lowest, top, counts);
    return;
  }
  const std::uint32_t lines = elements / 64;
  const uint8x16_t least = vdupq_n_u8(static_cast<std::uint8_t>(lowest));
  counts[0] = count_equal(exponents, lines, [&](uint8x16_t x) { return vcleq_u8(x, least); });
  for (unsigned e = lowest + 1; e <= top; ++e) {
    const uint8x16_t wanted = vdupq_n_u8(static_cast<std::uint8_t>(e));
    counts[e - lowest] = count_equal(exponents, lines, [&](uint8x16_t x) { return vceqq_u8(x, wanted); });
  }
  for (std::uint32_t i = lines * 64; i < elements; ++i) {
    if (exponents[i] <= top) ++counts[exponents[i] < lowest ? 0 : exponents[i] - lowest];
  }
}

void mask_neon(const std::uint8_t* exponents, std::uint32_t words, ExponentRange range, std::uint64_t* mask) {
  const uint8x16_t low = vdupq_n_u8(range.low);
  const uint8x16_t width = vdupq_n_u8(static_cast<std::uint8_t>(range.high - range.low));
  const uint8x16_t bits = Lanes<1>::bit_of_lane();
  for (std::uint32_t w = 0; w < words; ++w, exponents += 64) {
    const auto inside = [&](std::uint32_t i) {
      return vandq_u8(vcleq_u8(vsubq_u8(load128(exponents + i), low), width), bits);
    };
    // Each sum of neighbours halves the bytes, until there is one for eight exponents.
    const uint8x16_t twos = vpaddq_u8(vpaddq_u8(inside(0), inside(16)), vpaddq_u8(inside(32), inside(48)));
    mask[w] = vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(twos, twos)), 0);
  }
}

}  // namespace

ClassKernels neon_class_kernels() {
  ClassKernels kernels = scalar_class_kernels();
  kernels.count = count_neon;
  kernels.mask = mask_neon;
  return kernels;
}

}  // namespace deltasync::delta
