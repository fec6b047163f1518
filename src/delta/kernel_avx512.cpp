// AVX-512 kernels (F, BW, DQ, VL, VBMI2). The rules of kernel_avx2.cpp hold here too.
#include "delta/avx512.hpp"

namespace deltasync::delta {

namespace {

/// (index + 1) · kDigestStep of eight words from `index` on.
inline __m512i offsets_from(std::uint64_t index) {
  const __m512i lanes = _mm512_setr_epi64(1, 2, 3, 4, 5, 6, 7, 8);
  return _mm512_mullo_epi64(_mm512_add_epi64(lanes, set_all(index)), set_all(kDigestStep));
}

std::uint64_t digest_run_avx512(const std::byte* bytes, std::size_t size, std::uint64_t word) {
  const __m512i advance = set_all(8 * kDigestStep);
  __m512i offsets = offsets_from(word);
  __m512i sum = _mm512_setzero_si512();
  __m512i other = sum;
  std::size_t at = 0;
  for (; at + 128 <= size; at += 128) {
    const __m512i next = _mm512_add_epi64(offsets, advance);
    sum = _mm512_add_epi64(sum, mix_lanes(_mm512_add_epi64(_mm512_loadu_si512(bytes + at), offsets)));
    other = _mm512_add_epi64(other, mix_lanes(_mm512_add_epi64(_mm512_loadu_si512(bytes + at + 64), next)));
    offsets = _mm512_add_epi64(next, advance);
  }
  for (; at < size; at += 64) {
    const std::size_t left = size - at;
    const __m512i mixed = mix_lanes(_mm512_add_epi64(load_part(bytes + at, left), offsets));
    const auto words = static_cast<__mmask8>(left >= 64 ? 0xFF : (1U << ((left + 7) / 8)) - 1);
    sum = _mm512_mask_add_epi64(sum, words, sum, mixed);
    offsets = _mm512_add_epi64(offsets, advance);
  }
  return sum_lanes(_mm512_add_epi64(sum, other));
}

/// A line that is loaded once, whatever the compiler thinks of memory that others write to.
inline __m512i load_once(const std::byte* from) {
  __m512i line = _mm512_loadu_si512(from);
  asm("" : "+v"(line));
  return line;
}

/// A run whose place is aligned to a line, in lines, past the caches, with pages side by side as in
/// writer/copy_forms.hpp.
template <std::size_t kPages>
std::uint64_t stream_digest(std::byte* to, const std::byte* from, std::size_t size, std::uint64_t word) {
  const __m512i advance = set_all(8 * kDigestStep);
  __m512i pages[kPages];
  for (std::size_t p = 0; p < kPages; ++p) pages[p] = set_all(p * (kPage / 8) * kDigestStep);
  __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  const auto take = [&](std::size_t at, __m512i offsets, std::size_t sum) {
    const __m512i line = load_once(from + at);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), line);
    sums[sum] = _mm512_add_epi64(sums[sum], mix_lanes(_mm512_add_epi64(line, offsets)));
  };
  std::size_t at = 0;
  for (; size - at >= kPages * kPage; at += kPages * kPage) {
    __m512i offsets = offsets_from(word + at / 8);
    for (std::size_t line = 0; line < kPage; line += kLine) {
      for (std::size_t p = 0; p < kPages; ++p) {
        take(at + p * kPage + line, _mm512_add_epi64(offsets, pages[p]), p % 2);
      }
      offsets = _mm512_add_epi64(offsets, advance);
    }
  }
  __m512i offsets = offsets_from(word + at / 8);
  for (; at < size; at += kLine) {
    take(at, offsets, 0);
    offsets = _mm512_add_epi64(offsets, advance);
  }
  _mm_sfence();  // nothing else orders such stores
  return sum_lanes(_mm512_add_epi64(sums[0], sums[1]));
}

std::uint64_t copy_digest_avx512(std::byte* to, const std::byte* from, std::size_t size, std::uint64_t word) {
  return copy_then_digest(to, from, size, word, digest_run_avx512);
}

template <std::size_t kPages>
std::uint64_t stream_digest_avx512(std::byte* to, const std::byte* from, std::size_t size, std::uint64_t word) {
  return stream_lines_digest(to, from, size, word, digest_run_avx512, stream_digest<kPages>);
}

std::uint64_t digest_pairs_avx512(const std::uint64_t* before, const std::uint64_t* after, const std::uint32_t* words,
                                  std::uint32_t count) {
  __m512i sum = _mm512_setzero_si512();
  for (std::uint32_t i = 0; i < count; i += 8) {
    const auto lanes = static_cast<__mmask8>(count - i >= 8 ? 0xFF : (1U << (count - i)) - 1);
    const __m512i index = _mm512_cvtepu32_epi64(_mm256_maskz_loadu_epi32(lanes, words + i));
    const __m512i offset = _mm512_mullo_epi64(_mm512_add_epi64(index, set_all(1)), set_all(kDigestStep));
    const __m512i new_mix = mix_lanes(_mm512_add_epi64(_mm512_maskz_loadu_epi64(lanes, after + i), offset));
    const __m512i old_mix = mix_lanes(_mm512_add_epi64(_mm512_maskz_loadu_epi64(lanes, before + i), offset));
    sum = _mm512_add_epi64(sum, _mm512_sub_epi64(new_mix, old_mix));  // both mixes of a lane left out are equal
  }
  return sum_lanes(sum);
}

// ---- planes ----------------------------------------------------------------------------------------------------

void gaps_avx512(const std::uint16_t* positions, std::uint32_t count, std::uint16_t* gaps) {
  if (count == 0) return;
  gaps[0] = positions[0];
  const __m512i one = _mm512_set1_epi16(1);
  for (std::uint32_t i = 1; i < count; i += 32) {
    const __mmask32 lanes = count - i >= 32 ? ~__mmask32{0} : (__mmask32{1} << (count - i)) - 1;
    const __m512i here = _mm512_maskz_loadu_epi16(lanes, positions + i);
    const __m512i last = _mm512_maskz_loadu_epi16(lanes, positions + i - 1);
    _mm512_mask_storeu_epi16(gaps + i, lanes, _mm512_sub_epi16(_mm512_sub_epi16(here, last), one));
  }
}

std::uint64_t quotient_sum_avx512(const std::uint16_t* gaps, std::uint32_t count, unsigned k) {
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(k));
  __m512i sum = _mm512_setzero_si512();
  for (std::uint32_t i = 0; i < count; i += 32) {
    const __mmask32 lanes = count - i >= 32 ? ~__mmask32{0} : (__mmask32{1} << (count - i)) - 1;
    const __m512i q = _mm512_srl_epi16(_mm512_maskz_loadu_epi16(lanes, gaps + i), shift);
    const __m512i pairs = _mm512_add_epi32(_mm512_and_si512(q, _mm512_set1_epi32(0xFFFF)), _mm512_srli_epi32(q, 16));
    sum = _mm512_add_epi32(sum, pairs);  // gaps of a tile add up to less than 2^16: no lane overflows
  }
  return static_cast<std::uint32_t>(_mm512_reduce_add_epi32(sum));
}

template <class U>
struct SignLanes;
template <>
struct SignLanes<std::uint8_t> {
  static std::uint64_t negative(__m512i d) { return bits_of(_mm512_movepi8_mask(d)); }
  static std::uint64_t exception(__m512i d) {
    return bits_of(_mm512_cmpneq_epi8_mask(_mm512_abs_epi8(d), _mm512_set1_epi8(1)));
  }
};
template <>
struct SignLanes<std::uint16_t> {
  static std::uint64_t negative(__m512i d) { return bits_of(_mm512_movepi16_mask(d)); }
  static std::uint64_t exception(__m512i d) {
    return bits_of(_mm512_cmpneq_epi16_mask(_mm512_abs_epi16(d), _mm512_set1_epi16(1)));
  }
};
template <>
struct SignLanes<std::uint32_t> {
  static std::uint64_t negative(__m512i d) { return bits_of(_mm512_movepi32_mask(d)); }
  static std::uint64_t exception(__m512i d) {
    return bits_of(_mm512_cmpneq_epi32_mask(_mm512_abs_epi32(d), _mm512_set1_epi32(1)));
  }
};
template <>
struct SignLanes<std::uint64_t> {
  static std::uint64_t negative(__m512i d) { return bits_of(_mm512_movepi64_mask(d)); }
  static std::uint64_t exception(__m512i d) {
    return bits_of(_mm512_cmpneq_epi64_mask(_mm512_abs_epi64(d), set_all(1)));
  }
};

/// ⌊log2⌋ of 16-bit lanes, by halves of bytes; 0 of 0.
inline __m512i log2_lanes(__m512i x) {
  const __m512i low_log2 = _mm512_set4_epi32(0x03030303, 0x03030303, 0x02020202, 0x01010000);
  const __m512i high_log2 = _mm512_set4_epi32(0x07070707, 0x07070707, 0x06060606, 0x05050400);
  const __m512i half = _mm512_set1_epi8(15);
  const __m512i low = _mm512_shuffle_epi8(low_log2, _mm512_and_si512(x, half));
  const __m512i high = _mm512_shuffle_epi8(high_log2, _mm512_and_si512(_mm512_srli_epi16(x, 4), half));
  const __m512i bytes = _mm512_max_epu8(low, high);
  const std::uint64_t large = bits_of(_mm512_cmpgt_epu16_mask(x, _mm512_set1_epi16(255)));
  const __m512i of_large = _mm512_add_epi16(_mm512_srli_epi16(bytes, 8), _mm512_set1_epi16(8));
  return _mm512_mask_mov_epi16(bytes, static_cast<__mmask32>(large), of_large);
}

/// The 16-bit form of split_signs, up to a multiple of 32 differences. Returns where it stopped.
std::uint32_t split_signs_u16(const std::byte* diffs, std::uint32_t count, std::byte* signs, std::uint16_t* exceptions,
                              SignSplit& out) {
  __m512i lengths = _mm512_setzero_si512();
  __m512i index = iota16();
  std::uint32_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m512i d = _mm512_loadu_si512(diffs + std::size_t{i} * 2);
    store_raw(signs + i / 8, static_cast<std::uint32_t>(SignLanes<std::uint16_t>::negative(d)));
    const auto which = static_cast<__mmask32>(SignLanes<std::uint16_t>::exception(d));
    _mm512_storeu_si512(exceptions + out.exceptions, _mm512_maskz_compress_epi16(which, index));
    out.exceptions += static_cast<std::uint32_t>(_mm_popcnt_u32(which));
    index = _mm512_add_epi16(index, _mm512_set1_epi16(32));
    lengths = _mm512_add_epi32(lengths, _mm512_madd_epi16(log2_lanes(_mm512_abs_epi16(d)), _mm512_set1_epi16(1)));
  }
  out.gamma_bits = static_cast<std::uint32_t>(_mm512_reduce_add_epi32(lengths));
  return i;
}

template <class U>
SignSplit split_signs_avx512(const std::byte* diffs, std::uint32_t count, std::byte* signs, std::uint16_t* exceptions) {
  constexpr std::uint32_t kElements = 64 / sizeof(U);
  SignSplit out;
  std::uint32_t i = 0;
  if constexpr (sizeof(U) == 2) i = split_signs_u16(diffs, count, signs, exceptions, out);
  for (; i + kElements <= count; i += kElements) {
    const __m512i d = _mm512_loadu_si512(diffs + std::size_t{i} * sizeof(U));
    store_raw(signs + i / 8, SignLanes<U>::negative(d));  // 8 bytes; the next vector overwrites what is too much
    for (std::uint64_t left = SignLanes<U>::exception(d); left != 0; left &= left - 1) {
      const std::uint32_t at = i + static_cast<std::uint32_t>(__builtin_ctzll(left));
      exceptions[out.exceptions++] = static_cast<std::uint16_t>(at);
      out.gamma_bits += log2_floor(magnitude(load_raw<U>(diffs + std::size_t{at} * sizeof(U))));
    }
  }
  split_signs_tail<U>(diffs, i, count, signs, exceptions, out);
  return out;
}

/// Runs of zeros with a one behind each, into a plane.
class UnaryPacker {
 public:
  explicit UnaryPacker(std::byte* out) : packer_(out) {}

  void put_one(std::uint32_t zeros) {
    for (; zeros >= 56; zeros -= 56) packer_.put(0, 56);
    packer_.put(std::uint64_t{1} << zeros, zeros + 1);
  }
  /// Thirty-two runs, as many zeros as the 16-bit lanes say. Four that are in a 64-bit lane become one string of bits,
  /// then its neighbours are put behind it as long as that fits. Longer strings lose bits, but not their length.
  void put(__m512i zeros) {
    const __m512i one = _mm512_set1_epi16(1);
    __m512i ends = _mm512_add_epi16(_mm512_min_epu16(zeros, _mm512_set1_epi16(255)), one);
    ends = _mm512_add_epi16(ends, _mm512_slli_epi64(ends, 16));
    ends = _mm512_add_epi16(ends, _mm512_slli_epi64(ends, 32));
    const __m512i ones = _mm512_sub_epi16(ends, one);
    const Strings four{
        _mm512_or_si512(_mm512_or_si512(bit(ones), bit(_mm512_srli_epi64(ones, 16))),
                        _mm512_or_si512(bit(_mm512_srli_epi64(ones, 32)), bit(_mm512_srli_epi64(ones, 48)))),
        _mm512_srli_epi64(ends, 48)};
    const Strings eight = join(four, {swap_in_128(four.bits), swap_in_128(four.length)});
    const Strings sixteen = join(eight, {swap_in_256(eight.bits), swap_in_256(eight.length)});
    if (fits(sixteen, 0x11)) {
      packer_.put(lane(sixteen.bits), static_cast<unsigned>(lane(sixteen.length)));
      packer_.put(lane(_mm512_alignr_epi64(sixteen.bits, sixteen.bits, 4)),
                  static_cast<unsigned>(lane(_mm512_alignr_epi64(sixteen.length, sixteen.length, 4))));
    } else if (fits(eight, 0x55)) {
      put_lanes(eight);
    } else {
      alignas(64) std::uint16_t each[32];
      _mm512_store_si512(each, zeros);
      for (const std::uint16_t z : each) put_one(z);
    }
  }

 private:
  struct Strings {
    __m512i bits;
    __m512i length;
  };
  static constexpr unsigned kFits = 56;  ///< what BitPacker takes at once

  static __m512i bit(__m512i at) { return _mm512_sllv_epi64(set_all(1), _mm512_and_si512(at, set_all(0xFFFF))); }
  static Strings join(const Strings& first, const Strings& second) {
    return {_mm512_or_si512(first.bits, _mm512_sllv_epi64(second.bits, first.length)),
            _mm512_add_epi64(first.length, second.length)};
  }
  static __m512i swap_in_128(__m512i x) { return _mm512_shuffle_epi32(x, _MM_PERM_BADC); }
  static __m512i swap_in_256(__m512i x) { return _mm512_permutex_epi64(x, 0x4E); }
  static bool fits(const Strings& strings, unsigned lanes) {
    return (bits_of(_mm512_cmpgt_epu64_mask(strings.length, set_all(kFits))) & lanes) == 0;
  }
  static std::uint64_t lane(__m512i x) {
    return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm512_castsi512_si128(x)));
  }
  void put_lanes(const Strings& strings) {
    alignas(64) std::uint64_t bits[8];
    alignas(64) std::uint64_t length[8];
    _mm512_store_si512(bits, strings.bits);
    _mm512_store_si512(length, strings.length);
    for (unsigned i = 0; i < 8; i += 2) packer_.put(bits[i], static_cast<unsigned>(length[i]));
  }

  BitPacker packer_;
};

void pack_unary_avx512(const std::uint16_t* gaps, std::uint32_t count, unsigned k, std::byte* out) {
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(k));
  UnaryPacker packer(out);
  std::uint32_t i = 0;
  for (; i + 32 <= count; i += 32) packer.put(_mm512_srl_epi16(_mm512_loadu_si512(gaps + i), shift));
  for (; i < count; ++i) packer.put_one(static_cast<std::uint32_t>(gaps[i]) >> k);
}

}  // namespace

const Kernels& avx512_kernels() {
  // pext and pdep are as fast as anything for packing; those two are shared with AVX2.
  static const Kernels kKernels{
      .name = "avx512",
      .scans = {avx512_scans()},
      .digest_run = digest_run_avx512,
      .copy_digests = {copy_digest_avx512, stream_digest_avx512<1>, stream_digest_avx512<4>},
      .digest_pairs = digest_pairs_avx512,
      .gaps = gaps_avx512,
      .quotient_sum = quotient_sum_avx512,
      .pack_low = avx2_kernels().pack_low,
      .pack_unary = pack_unary_avx512,
      .unpack_low = avx2_kernels().unpack_low,
      .split_signs = {split_signs_avx512<std::uint8_t>, split_signs_avx512<std::uint16_t>,
                      split_signs_avx512<std::uint32_t>, split_signs_avx512<std::uint64_t>},
      .decode = avx512_decode_kernels(),
      .classes = avx512_class_kernels(),
      .dense = avx512_dense_kernels(),
  };
  return kKernels;
}

}  // namespace deltasync::delta
