// AVX2 and BMI kernels of the decoder. The rules of kernel_avx2.cpp hold here too. Most are the scalar truth, compiled
// for a CPU that counts and finds bits in one instruction: that alone is worth a factor of two.
#include "delta/decode_scalar.hpp"

namespace deltasync::delta {

namespace {

std::uint64_t positions_avx2(const std::byte* lows, const std::byte* quotients, std::size_t size, unsigned k,
                             std::uint32_t count, std::uint16_t* positions) {
  avx2_kernels().unpack_low(lows, count, k, positions);
  return positions_from_lows(quotients, size, k, positions);
}

/// Lists the changed words, and lets the digest kernel mix them in runs that stay in the nearest cache.
template <class U, ValueKind kKind>
std::uint64_t resolve_avx2(const std::uint64_t* before, const std::uint16_t* positions, std::byte* values,
                           std::uint32_t count) {
  constexpr std::uint32_t kRun = 256;
  std::uint64_t old_words[kRun];
  std::uint64_t new_words[kRun];
  std::uint32_t words[kRun];
  std::uint32_t pending = 0;
  std::uint64_t sum = 0;
  const auto digest_pairs = avx2_kernels().digest_pairs;
  resolve_words<U, kKind>(before, positions, values, count,
                          [&](std::uint64_t old_word, std::uint64_t new_word, std::uint32_t word) {
                            old_words[pending] = old_word;
                            new_words[pending] = new_word;
                            words[pending] = word;
                            if (++pending < kRun) return;
                            sum += digest_pairs(old_words, new_words, words, pending);
                            pending = 0;
                          });
  return sum + digest_pairs(old_words, new_words, words, pending);
}

struct Isa {
  static constexpr auto positions = positions_avx2;
  template <class U>
  static constexpr auto unit_values = unit_values_scalar<U>;
  template <class U, ValueKind kKind>
  static constexpr auto resolve = resolve_avx2<U, kKind>;
};

}  // namespace

DecodeKernels avx2_decode_kernels() {
  return decode_kernels<Isa>();
}

}  // namespace deltasync::delta
