// Shuffles that bring chosen lanes of 16 bytes to the front, for instruction sets that have no compress instruction.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deltasync::delta {

// No other object may come to use a vector file's copy.
namespace {

/// By the mask of the chosen lanes, of kBytes bytes each; they stay in order.
template <std::size_t kBytes, unsigned kLanes>
struct Shuffles {
  alignas(16) std::uint8_t of_mask[1U << kLanes][16] = {};
  constexpr Shuffles() {
    for (unsigned mask = 0; mask < 1U << kLanes; ++mask) {
      std::size_t at = 0;
      for (unsigned lane = 0; lane < kLanes; ++lane) {
        if ((mask >> lane & 1) == 0) continue;
        for (std::size_t byte = 0; byte < kBytes; ++byte) {
          of_mask[mask][at++] = static_cast<std::uint8_t>(lane * kBytes + byte);
        }
      }
    }
  }
};

/// Elements that are looked at together: those of two words, or of one if they are bytes.
template <std::size_t kBytes>
inline constexpr unsigned kTogether = kBytes == 1 ? 8 : 16 / kBytes;
template <std::size_t kBytes>
inline constexpr Shuffles<kBytes, kTogether<kBytes>> kShuffles;

}  // namespace

}  // namespace deltasync::delta
