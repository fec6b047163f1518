// Kernels of aarch64, every processor of which has NEON. Only what takes fewer instructions differs from the scalar
// truth; the others are what the compiler makes vectors of, or do not gain. NEON has no product of 64 bits, so that
// digests are made in ordinary registers.
#include "delta/neon.hpp"

namespace deltasync::delta {

namespace {

// ---- digest ----------------------------------------------------------------------------------------------------

/// Four words at a time, whose loads and steps go together.
std::uint64_t digest_run_neon(const std::byte* bytes, std::size_t size, std::uint64_t word) {
  std::uint64_t sum = 0;
  std::uint64_t offset = (word + 1) * kDigestStep;
  std::size_t at = 0;
  for (; at + 32 <= size; at += 32, offset += 4 * kDigestStep) {
    for (std::size_t i = 0; i < 4; ++i) {
      sum += mix(load_raw<std::uint64_t>(bytes + at + i * 8) + (offset + i * kDigestStep));
    }
  }
  return sum + digest_run_scalar(bytes + at, size - at, word + at / 8);
}

std::uint64_t copy_digest_neon(std::byte* to, const std::byte* from, std::size_t size, std::uint64_t word) {
  return copy_then_digest(to, from, size, word, digest_run_neon);
}

/// A word that is loaded once, whatever the compiler thinks of memory that others write to.
inline std::uint64_t load_once(const std::byte* from) {
  auto word = load_raw<std::uint64_t>(from);
  asm("" : "+r"(word));
  return word;
}

/// A run whose place is aligned to a line, in lines, past the caches, with pages side by side as in
/// writer/copy_forms.hpp.
template <std::size_t kPages>
std::uint64_t stream_digest(std::byte* to, const std::byte* from, std::size_t size, std::uint64_t word) {
  std::uint64_t sum = 0;
  const auto take = [&](std::size_t at) {
    for (std::size_t two = at; two < at + kLine; two += 16) {
      const std::uint64_t low = load_once(from + two);
      const std::uint64_t high = load_once(from + two + 8);
      asm volatile("stnp %0, %1, [%2]" : : "r"(low), "r"(high), "r"(to + two) : "memory");
      sum += mix_word(low, word + two / 8) + mix_word(high, word + two / 8 + 1);
    }
  };
  std::size_t at = 0;
  for (; size - at >= kPages * kPage; at += kPages * kPage) {
    for (std::size_t line = 0; line < kPage; line += kLine) {
      for (std::size_t p = 0; p < kPages; ++p) take(at + p * kPage + line);
    }
  }
  for (; at < size; at += kLine) take(at);
  return sum;
}

template <std::size_t kPages>
std::uint64_t stream_digest_neon(std::byte* to, const std::byte* from, std::size_t size, std::uint64_t word) {
  return stream_lines_digest(to, from, size, word, digest_run_neon, stream_digest<kPages>);
}

// ---- planes ----------------------------------------------------------------------------------------------------

/// Masks of sixteen differences, as many vectors as these have bytes, as one of bytes.
template <class U>
inline uint8x16_t narrow(const uint8x16_t* masks) {
  const auto two16 = [&](unsigned i) {
    return vuzp1q_u16(vreinterpretq_u16_u8(masks[i]), vreinterpretq_u16_u8(masks[i + 1]));
  };
  if constexpr (sizeof(U) == 1) return masks[0];
  if constexpr (sizeof(U) == 2) return vuzp1q_u8(masks[0], masks[1]);
  if constexpr (sizeof(U) == 4) return vuzp1q_u8(vreinterpretq_u8_u16(two16(0)), vreinterpretq_u8_u16(two16(2)));
}

template <class U>
SignSplit split_signs_neon(const std::byte* diffs, std::uint32_t count, std::byte* signs, std::uint16_t* exceptions) {
  using L = Lanes<sizeof(U)>;
  SignSplit out;
  std::uint32_t i = 0;
  for (; i + 16 <= count; i += 16) {
    uint8x16_t negative[sizeof(U)];
    uint8x16_t plain[sizeof(U)];
    for (unsigned v = 0; v < sizeof(U); ++v) {
      const uint8x16_t d = load128(diffs + std::size_t{i} * sizeof(U) + v * std::size_t{16});
      negative[v] = L::negative(d);
      plain[v] = L::equal(L::magnitude(d), L::set(1));
    }
    store_raw(signs + i / 8, static_cast<std::uint16_t>(Lanes<1>::bits(narrow<U>(negative))));
    // Four bits of each byte, of which one is kept.
    const uint8x8_t nibbles = vshrn_n_u16(vreinterpretq_u16_u8(vmvnq_u8(narrow<U>(plain))), 4);
    std::uint64_t left = vget_lane_u64(vreinterpret_u64_u8(nibbles), 0) & 0x1111111111111111;
    for (; left != 0; left &= left - 1) {
      const std::uint32_t at = i + static_cast<std::uint32_t>(__builtin_ctzll(left)) / 4;
      exceptions[out.exceptions++] = static_cast<std::uint16_t>(at);
      out.gamma_bits += log2_floor(magnitude(load_raw<U>(diffs + std::size_t{at} * sizeof(U))));
    }
  }
  split_signs_tail<U>(diffs, i, count, signs, exceptions, out);
  return out;
}

void pack_low_neon(const std::uint16_t* gaps, std::uint32_t count, unsigned k, std::byte* out) {
  if (k == 0) return;
  const FieldPacker pack(k);
  std::uint32_t i = 0;
  for (; i + 8 <= count; i += 8, out += k) pack(vld1q_u16(gaps + i), out);
  pack_low_scalar(gaps + i, count - i, k, out);
}

void unpack_low_neon(const std::byte* in, std::uint32_t count, unsigned k, std::uint16_t* gaps) {
  const FieldUnpacker unpack(k);
  for (std::uint32_t i = 0; i < count; i += 8, in += k) vst1q_u16(gaps + i, unpack(in));
}

}  // namespace

const Kernels& neon_kernels() {
  static const Kernels kKernels{
      .name = "neon",
      .scans = {neon_scans<0>(), neon_scans<kNeonAheadBytes>()},
      .digest_run = digest_run_neon,
      .copy_digests = {copy_digest_neon, stream_digest_neon<1>, stream_digest_neon<4>},
      .digest_pairs = digest_pairs_scalar,
      .gaps = gaps_scalar,
      .quotient_sum = quotient_sum_scalar,
      .pack_low = pack_low_neon,
      .pack_unary = pack_unary_scalar,
      .unpack_low = unpack_low_neon,
      .split_signs = {split_signs_neon<std::uint8_t>, split_signs_neon<std::uint16_t>, split_signs_neon<std::uint32_t>,
                      split_signs_scalar<std::uint64_t>},
      .decode = neon_decode_kernels(),
      .classes = neon_class_kernels(),
      .dense = neon_dense_kernels(),
  };
  return kKernels;
}

}  // namespace deltasync::delta
