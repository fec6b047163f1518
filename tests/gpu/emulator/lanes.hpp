// Registers of a warp: each has a value for every lane. What only computes with them is here.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tests/gpu/emulator/ptx.hpp"

namespace deltasync::emulator {

inline constexpr std::uint32_t kLanes = 32;

/// Some lanes of a warp, a bit each.
using LaneMask = std::uint32_t;

template <class Fn>
void each_lane(LaneMask lanes, const Fn& fn) {
  if (lanes == ~LaneMask{0}) {
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) fn(lane);
    return;
  }
  for (; lanes != 0; lanes &= lanes - 1) fn(static_cast<std::uint32_t>(std::countr_zero(lanes)));
}

class Lanes {
 public:
  explicit Lanes(const Function& function);

  std::uint64_t* of(std::uint32_t number) { return values_.data() + std::size_t{number} * kLanes; }
  const std::uint64_t* of(std::uint32_t number) const { return values_.data() + std::size_t{number} * kLanes; }
  void fill(std::uint32_t number, std::uint64_t value);
  /// Of these lanes those whose predicate is true.
  LaneMask where(std::uint32_t predicate, LaneMask lanes) const;

 private:
  std::vector<std::uint64_t> values_;  ///< lane by lane, register by register
};

constexpr std::uint64_t low_bits(std::uint32_t bits) {
  return bits >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1;
}
constexpr std::int64_t sign_extended(std::uint64_t value, std::uint32_t bits) {
  return static_cast<std::int64_t>(value << (64 - bits)) >> (64 - bits);
}

/// For instructions from mov to shr. What is wrong, or empty.
std::string_view compute(const Instruction& instruction, Lanes& lanes, LaneMask active);

/// The smaller or larger one of two values of the type.
std::uint64_t lesser(Type type, std::uint64_t a, std::uint64_t b);
std::uint64_t greater(Type type, std::uint64_t a, std::uint64_t b);

}  // namespace deltasync::emulator
