// The kernel of rice_class that all instruction sets with BMI2 have in common, `static` for the reason given in
// mix.hpp.
#pragma once

#include <immintrin.h>

#include "delta/class_scalar.hpp"

namespace deltasync::delta {

static bool select_bmi(const std::uint64_t* mask, std::uint32_t words, const std::uint16_t* gaps, std::uint32_t count,
                       std::uint16_t* positions) {
  return select_in_mask(mask, words, gaps, count, positions, [](std::uint64_t word, std::uint32_t n) {
    return static_cast<unsigned>(_tzcnt_u64(_pdep_u64(std::uint64_t{1} << n, word)));
  });
}

}  // namespace deltasync::delta
