// AVX2 and BMI kernels. Only what pays differs from the scalar truth. Compiled with -mavx2 -mbmi -mbmi2 -mpopcnt
// -mlzcnt: nothing in this file may be called before the CPU was asked (dispatch.cpp), and no inline function with
// external linkage may be used here.
#include "delta/avx2.hpp"

namespace deltasync::delta {

namespace {

// ---- digest ----------------------------------------------------------------------------------------------------

std::uint64_t digest_run_avx2(const std::byte* bytes, std::size_t size, std::uint64_t word) {
  const Mixer mixer;
  __m256i sum = _mm256_setzero_si256();
  __m256i other = sum;
  const auto offset = [](std::uint64_t index) {
    const std::uint64_t bits = (index + 1) * kDigestStep;
    return static_cast<long long>(bits);
  };
  __m256i step = _mm256_setr_epi64x(offset(word), offset(word + 1), offset(word + 2), offset(word + 3));
  constexpr std::uint64_t kFourSteps = 4 * kDigestStep;
  const __m256i advance = _mm256_set1_epi64x(static_cast<long long>(kFourSteps));
  std::size_t at = 0;
  for (; at + 64 <= size; at += 64) {
    const __m256i next = _mm256_add_epi64(step, advance);
    sum = _mm256_add_epi64(sum, mixer(_mm256_add_epi64(load256(bytes + at), step)));
    other = _mm256_add_epi64(other, mixer(_mm256_add_epi64(load256(bytes + at + 32), next)));
    step = _mm256_add_epi64(next, advance);
  }
  return sum_lanes(_mm256_add_epi64(sum, other)) + digest_run_scalar(bytes + at, size - at, word + at / 8);
}

std::uint64_t copy_digest_avx2(std::byte* to, const std::byte* from, std::size_t size, std::uint64_t word) {
  return copy_then_digest(to, from, size, word, digest_run_avx2);
}

/// Half a line that is loaded once, whatever the compiler thinks of memory that others write to.
inline __m256i load_once(const std::byte* from) {
  __m256i half = load256(from);
  asm("" : "+x"(half));
  return half;
}

/// A run whose place is aligned to a line, in lines, past the caches, with pages side by side as in
/// writer/copy_forms.hpp.
template <std::size_t kPages>
std::uint64_t stream_digest(std::byte* to, const std::byte* from, std::size_t size, std::uint64_t word) {
  const Mixer mixer;
  const __m256i half_line = set_all(4 * kDigestStep);
  const __m256i line_step = set_all(8 * kDigestStep);
  const __m256i page_step = set_all(kPage / 8 * kDigestStep);
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  const auto take = [&](std::size_t at, __m256i offsets) {
    const __m256i low = load_once(from + at);
    const __m256i high = load_once(from + at + 32);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at + 32), high);
    sums[0] = _mm256_add_epi64(sums[0], mixer(_mm256_add_epi64(low, offsets)));
    sums[1] = _mm256_add_epi64(sums[1], mixer(_mm256_add_epi64(high, _mm256_add_epi64(offsets, half_line))));
  };
  const auto offsets_from = [&](std::uint64_t index) {
    const std::uint64_t first = (index + 1) * kDigestStep;
    return _mm256_add_epi64(set_all(first), _mm256_setr_epi64x(0, static_cast<long long>(kDigestStep),
                                                               static_cast<long long>(2 * kDigestStep),
                                                               static_cast<long long>(3 * kDigestStep)));
  };
  std::size_t at = 0;
  for (; size - at >= kPages * kPage; at += kPages * kPage) {
    __m256i offsets = offsets_from(word + at / 8);
    for (std::size_t line = 0; line < kPage; line += kLine) {
      __m256i of_page = offsets;
      for (std::size_t p = 0; p < kPages; ++p) {
        take(at + p * kPage + line, of_page);
        of_page = _mm256_add_epi64(of_page, page_step);
      }
      offsets = _mm256_add_epi64(offsets, line_step);
    }
  }
  __m256i offsets = offsets_from(word + at / 8);
  for (; at < size; at += kLine) {
    take(at, offsets);
    offsets = _mm256_add_epi64(offsets, line_step);
  }
  _mm_sfence();  // nothing else orders such stores
  return sum_lanes(_mm256_add_epi64(sums[0], sums[1]));
}

template <std::size_t kPages>
std::uint64_t stream_digest_avx2(std::byte* to, const std::byte* from, std::size_t size, std::uint64_t word) {
  return stream_lines_digest(to, from, size, word, digest_run_avx2, stream_digest<kPages>);
}

std::uint64_t digest_pairs_avx2(const std::uint64_t* before, const std::uint64_t* after, const std::uint32_t* words,
                                std::uint32_t count) {
  const Mixer mixer;
  const __m256i step = _mm256_set1_epi64x(static_cast<long long>(kDigestStep));
  const __m256i step_high = _mm256_set1_epi64x(static_cast<long long>(kDigestStep >> 32));
  const __m256i one = _mm256_set1_epi64x(1);
  __m256i sum = _mm256_setzero_si256();
  std::uint32_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const __m256i index = _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words + i)));
    const __m256i offset = multiply(_mm256_add_epi64(index, one), step, step_high);
    sum = _mm256_add_epi64(sum, mixer(_mm256_add_epi64(load256(after + i), offset)));
    sum = _mm256_sub_epi64(sum, mixer(_mm256_add_epi64(load256(before + i), offset)));
  }
  return sum_lanes(sum) + digest_pairs_scalar(before + i, after + i, words + i, count - i);
}

// ---- planes ----------------------------------------------------------------------------------------------------

void gaps_avx2(const std::uint16_t* positions, std::uint32_t count, std::uint16_t* gaps) {
  if (count == 0) return;
  gaps[0] = positions[0];
  const __m256i one = _mm256_set1_epi16(1);
  std::uint32_t i = 1;
  for (; i + 16 <= count; i += 16) {
    const __m256i gap = _mm256_sub_epi16(_mm256_sub_epi16(load256(positions + i), load256(positions + i - 1)), one);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(gaps + i), gap);
  }
  for (; i < count; ++i) gaps[i] = static_cast<std::uint16_t>(positions[i] - positions[i - 1] - 1);
}

std::uint64_t quotient_sum_avx2(const std::uint16_t* gaps, std::uint32_t count, unsigned k) {
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(k));
  const __m256i low = _mm256_set1_epi32(0xFFFF);
  __m256i sum = _mm256_setzero_si256();
  std::uint32_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256i q = _mm256_srl_epi16(load256(gaps + i), shift);
    sum = _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_and_si256(q, low), _mm256_srli_epi32(q, 16)));
  }
  // Gaps of a tile add up to less than 2^16, so no lane overflows.
  const __m256i pairs =
      _mm256_add_epi64(_mm256_and_si256(sum, _mm256_set1_epi64x(0xFFFFFFFF)), _mm256_srli_epi64(sum, 32));
  return sum_lanes(pairs) + quotient_sum_scalar(gaps + i, count - i, k);
}

/// Four fields of k bits, from the low ends of four 16-bit lanes.
inline std::uint64_t lane_mask(unsigned k) {
  return ((std::uint64_t{1} << k) - 1) * 0x0001000100010001;
}

void pack_low_avx2(const std::uint16_t* gaps, std::uint32_t count, unsigned k, std::byte* out) {
  if (k == 0) return;
  const std::uint64_t mask = lane_mask(k);
  std::uint32_t i = 0;
  for (; i + 8 <= count; i += 8, out += k) {  // eight fields are k bytes
    const std::uint64_t first = _pext_u64(load_raw<std::uint64_t>(gaps + i), mask);
    const std::uint64_t second = _pext_u64(load_raw<std::uint64_t>(gaps + i + 4), mask);
    store_raw(out, first | second << (4 * k));
    if (k > 8) store_raw(out + 8, second >> (64 - 4 * k));
  }
  BitPacker packer(out);
  for (; i < count; ++i) packer.put(gaps[i] & mask & 0xFFFF, k);
}

void unpack_low_avx2(const std::byte* in, std::uint32_t count, unsigned k, std::uint16_t* gaps) {
  const std::uint64_t mask = lane_mask(k);
  std::uint64_t bit = 0;
  for (std::uint32_t i = 0; i < count; i += 4, bit += 4 * k) {
    std::uint64_t four = load_raw<std::uint64_t>(in + bit / 8) >> (bit % 8);
    if (k == 15) four |= static_cast<std::uint64_t>(in[bit / 8 + 8]) << 1 << (63 - bit % 8);
    store_raw(gaps + i, _pdep_u64(four, mask));
  }
}

/// Bit i set where 16-bit difference i is negative, and where it is neither 1 nor −1.
struct SignMasks {
  std::uint32_t negative;
  std::uint32_t exception;
};

inline std::uint32_t mask16(__m256i low, __m256i high) {
  // Packing interleaves the 128-bit halves; the permutation puts them back in order.
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(packed));
}

inline SignMasks sign_masks(const std::byte* diffs) {
  const __m256i one = _mm256_set1_epi16(1);
  const __m256i low = load256(diffs);
  const __m256i high = load256(diffs + 32);
  const auto plain = [&](__m256i d) { return _mm256_cmpeq_epi16(_mm256_abs_epi16(d), one); };
  return {mask16(_mm256_srai_epi16(low, 15), _mm256_srai_epi16(high, 15)), ~mask16(plain(low), plain(high))};
}

SignSplit split_signs_avx2_u16(const std::byte* diffs, std::uint32_t count, std::byte* signs,
                               std::uint16_t* exceptions) {
  SignSplit out;
  std::uint32_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const SignMasks masks = sign_masks(diffs + std::size_t{i} * 2);
    store_raw(signs + i / 8, masks.negative);
    for (std::uint32_t left = masks.exception; left != 0; left &= left - 1) {
      const std::uint32_t at = i + static_cast<std::uint32_t>(__builtin_ctz(left));
      exceptions[out.exceptions++] = static_cast<std::uint16_t>(at);
      out.gamma_bits += log2_floor(magnitude(load_raw<std::uint16_t>(diffs + std::size_t{at} * 2)));
    }
  }
  split_signs_tail<std::uint16_t>(diffs, i, count, signs, exceptions, out);
  return out;
}

}  // namespace

const Kernels& avx2_kernels() {
  static const Kernels kKernels{
      .name = "avx2",
      .scans = {avx2_scans<0>(), avx2_scans<kScanAheadBytes>()},
      .digest_run = digest_run_avx2,
      .copy_digests = {copy_digest_avx2, stream_digest_avx2<1>, stream_digest_avx2<4>},
      .digest_pairs = digest_pairs_avx2,
      .gaps = gaps_avx2,
      .quotient_sum = quotient_sum_avx2,
      .pack_low = pack_low_avx2,
      .pack_unary = pack_unary_scalar,
      .unpack_low = unpack_low_avx2,
      .split_signs = {split_signs_scalar<std::uint8_t>, split_signs_avx2_u16, split_signs_scalar<std::uint32_t>,
                      split_signs_scalar<std::uint64_t>},
      .decode = avx2_decode_kernels(),
      .classes = avx2_class_kernels(),
      .dense = avx2_dense_kernels(),
  };
  return kKernels;
}

}  // namespace deltasync::delta
