// The scan with AVX-512: which words differ, then their elements, eight words at a time.
#include "delta/avx512.hpp"

namespace deltasync::delta {

namespace {

inline __m512i iota8() {
  return _mm512_set_epi64(0x3F3E3D3C3B3A3938, 0x3736353433323130, 0x2F2E2D2C2B2A2928, 0x2726252423222120,
                          0x1F1E1D1C1B1A1918, 0x1716151413121110, 0x0F0E0D0C0B0A0908, 0x0706050403020100);
}

/// What differs between element widths: the compare mask, the difference and its compression.
template <std::size_t kBytes>
struct Lanes;

template <>
struct Lanes<1> {
  static std::uint64_t differ(__m512i a, __m512i b) { return bits_of(_mm512_cmpneq_epi8_mask(a, b)); }
  static __m512i subtract(__m512i a, __m512i b) { return _mm512_sub_epi8(a, b); }
  static __m512i map(__m512i x) {
    const __mmask64 negative = _mm512_movepi8_mask(x);
    return _mm512_xor_si512(x, _mm512_maskz_mov_epi8(negative, _mm512_set1_epi8(0x7F)));
  }
  static __m512i compress(std::uint64_t mask, __m512i x) { return _mm512_maskz_compress_epi8(mask, x); }
};

template <>
struct Lanes<2> {
  static std::uint64_t differ(__m512i a, __m512i b) { return bits_of(_mm512_cmpneq_epi16_mask(a, b)); }
  static __m512i subtract(__m512i a, __m512i b) { return _mm512_sub_epi16(a, b); }
  static __m512i map(__m512i x) { return _mm512_xor_si512(x, _mm512_srli_epi16(_mm512_srai_epi16(x, 15), 1)); }
  static __m512i compress(std::uint64_t mask, __m512i x) {
    return _mm512_maskz_compress_epi16(static_cast<__mmask32>(mask), x);
  }
};

template <>
struct Lanes<4> {
  static std::uint64_t differ(__m512i a, __m512i b) { return bits_of(_mm512_cmpneq_epi32_mask(a, b)); }
  static __m512i subtract(__m512i a, __m512i b) { return _mm512_sub_epi32(a, b); }
  static __m512i map(__m512i x) { return _mm512_xor_si512(x, _mm512_srli_epi32(_mm512_srai_epi32(x, 31), 1)); }
  static __m512i compress(std::uint64_t mask, __m512i x) {
    return _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), x);
  }
};

template <>
struct Lanes<8> {
  static std::uint64_t differ(__m512i a, __m512i b) { return bits_of(_mm512_cmpneq_epi64_mask(a, b)); }
  static __m512i subtract(__m512i a, __m512i b) { return _mm512_sub_epi64(a, b); }
  static __m512i map(__m512i x) { return _mm512_xor_si512(x, _mm512_srli_epi64(_mm512_srai_epi64(x, 63), 1)); }
  static __m512i compress(std::uint64_t mask, __m512i x) {
    return _mm512_maskz_compress_epi64(static_cast<__mmask8>(mask), x);
  }
};

/// A run of words is compared, and those that differ are listed, without a branch; then they are gathered from both
/// halves, eight at a time, and looked at. Runs are short, so that the hardware goes on fetching what follows
/// meanwhile; asking for it ahead of time only gets into its way.
template <class U, bool kFloat>
class Scanner {
 public:
  Scanner(const std::byte* before, const std::byte* after, std::uint32_t first_position, std::uint64_t first_word,
          ScanOutput& out)
      : before_(before),
        after_(after),
        lanes_(_mm512_add_epi16(_mm512_and_si512(iota16(), _mm512_set1_epi16(kLanes - 1)),
                                _mm512_set1_epi16(static_cast<short>(first_position)))),
        word_offset_(set_all((first_word + 1) * kDigestStep)),
        out_(out) {}

  /// `words` ≤ 65,536 whole ones.
  void run(std::uint32_t words) {
    std::uint32_t word = 0;
    for (; words - word >= kRun; word += kRun) {
#pragma GCC unroll 1
      for (std::uint32_t chunk = word; chunk != word + kRun; chunk += 64) list(chunk, compare64(chunk));
      drain();
    }
    for (; word < words; word += 64) list(word, words - word >= 64 ? compare64(word) : compare_rest(word, words));
    drain();
    if (begin_ != end_) {
      const __m128i filler = _mm_set1_epi16(static_cast<short>(words_[begin_]));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(words_ + end_), filler);
      eight(static_cast<__mmask8>((1U << (end_ - begin_)) - 1));
    }
    out_.digest_change += sum_lanes(sum_);
  }

 private:
  static constexpr std::uint32_t kRun = 256;    ///< words
  static constexpr std::uint32_t kRoom = 1024;  ///< words on the list when it is moved to the front
  static constexpr unsigned kLanes = 8 / sizeof(U);

  /// Bit i: whether word `word` + i differs. Unrolled, each load of the loop would step over those of the others, and
  /// the hardware fetches ahead by what a load's address steps: at 1,024 bytes the scan takes half as long again.
  std::uint64_t compare64(std::uint32_t word) const {
    std::uint64_t differ = 0;
#pragma GCC unroll 1
    for (unsigned v = 0; v < 8; ++v) {
      const std::size_t at = (std::size_t{word} + v * 8) * 8;
      differ |= compare(_mm512_loadu_si512(before_ + at), _mm512_loadu_si512(after_ + at)) << (v * 8);
    }
    return differ;
  }
  /// The same of fewer than 64 words, up to `words`.
  std::uint64_t compare_rest(std::uint32_t word, std::uint32_t words) const {
    std::uint64_t differ = 0;
    for (std::uint32_t w = word; w < words; w += 8) {
      const std::size_t at = std::size_t{w} * 8;
      const std::size_t bytes = (std::size_t{words} - w) * 8;
      differ |= compare(load_part(before_ + at, bytes), load_part(after_ + at, bytes)) << (w - word);
    }
    return differ;
  }
  static std::uint64_t compare(__m512i a, __m512i b) {
    return bits_of(_mm512_cmpneq_epi64_mask(a, b));
  }

  void list(std::uint32_t word, std::uint64_t differ) {
    const __m512i which = _mm512_maskz_compress_epi8(differ, iota8());
    const __m512i first = _mm512_set1_epi16(static_cast<short>(word));
    const __m512i low = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(which));
    const auto count = static_cast<std::uint32_t>(_mm_popcnt_u64(differ));
    _mm512_storeu_si512(words_ + end_, _mm512_add_epi16(low, first));
    if (count > 32) {
      const __m512i high = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(which, 1));
      _mm512_storeu_si512(words_ + end_ + 32, _mm512_add_epi16(high, first));
    }
    end_ += count;
  }
  /// Looks at the words that are listed but for the last few, eight at a time.
  void drain() {
    for (; end_ - begin_ >= 8; begin_ += 8) eight(0xFF);
    if (end_ <= kRoom) return;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(words_), indices());
    end_ -= begin_;
    begin_ = 0;
  }

  __m128i indices() const {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(words_ + begin_));
  }

  /// The next eight words that are listed. (Inserting is faster than the gather instruction.)
  __m512i gather(const std::byte* from) const {
    const auto two = [&](unsigned i) {
      const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + words_[begin_ + i] * std::size_t{8}));
      return _mm_insert_epi64(low, load_raw<long long>(from + words_[begin_ + i + 1] * std::size_t{8}), 1);
    };
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(two(0)), two(2), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(two(4)), two(6), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }

  /// The next eight, of which only some may be `real`.
  void eight(__mmask8 real) {
    using L = Lanes<sizeof(U)>;
    const __m128i words = indices();
    const __m512i before = gather(before_);
    const __m512i after = _mm512_mask_mov_epi64(before, real, gather(after_));
    const __m512i offset =
        _mm512_add_epi64(_mm512_mullo_epi64(_mm512_cvtepu16_epi64(words), set_all(kDigestStep)), word_offset_);
    sum_ = _mm512_add_epi64(sum_, _mm512_sub_epi64(mix_lanes(_mm512_add_epi64(after, offset)),
                                                   mix_lanes(_mm512_add_epi64(before, offset))));
    const std::uint64_t mask = L::differ(before, after);
    const __m512i diff = kFloat ? L::subtract(L::map(after), L::map(before)) : L::subtract(after, before);
    _mm512_storeu_si512(out_.diffs + std::size_t{out_.count} * sizeof(U), L::compress(mask, diff));
    store_positions(static_cast<__mmask32>(mask), positions<0>(words));
    if constexpr (sizeof(U) == 1) store_positions(static_cast<__mmask32>(mask >> 32), positions<4>(words));
  }
  /// Of the elements of the words from the kFirst-th on, as many as there is room for.
  template <short kFirst>
  __m512i positions(__m128i words) const {
    constexpr unsigned kShift = kLanes == 8 ? 3 : kLanes == 4 ? 2 : kLanes == 2 ? 1 : 0;
    const __m512i word = _mm512_add_epi16(_mm512_srli_epi16(iota16(), kShift), _mm512_set1_epi16(kFirst));
    const __m512i of_lane = _mm512_permutexvar_epi16(word, _mm512_castsi128_si512(words));
    return _mm512_add_epi16(_mm512_slli_epi16(of_lane, kShift), lanes_);
  }
  void store_positions(__mmask32 mask, __m512i positions) {
    _mm512_storeu_si512(out_.positions + out_.count, _mm512_maskz_compress_epi16(mask, positions));
    out_.count += static_cast<std::uint32_t>(_mm_popcnt_u32(mask));
  }

  const std::byte* before_;
  const std::byte* after_;
  const __m512i lanes_;  ///< position of each lane's element, were it in the first word
  const __m512i word_offset_;
  ScanOutput& out_;
  __m512i sum_ = _mm512_setzero_si512();
  std::uint32_t begin_ = 0;
  std::uint32_t end_ = 0;
  std::uint16_t words_[kRoom + kRun + 32];
};

template <class U, bool kFloat>
void scan(const std::byte* before, const std::byte* after, std::uint32_t elements, std::uint32_t first_position,
          std::uint64_t first_word, ScanOutput& out) {
  constexpr std::uint32_t kLanes = 8 / sizeof(U);
  const std::uint32_t words = elements / kLanes;
  Scanner<U, kFloat>(before, after, first_position, first_word, out).run(words);
  const std::size_t done = std::size_t{words} * 8;
  scan_scalar<U, kFloat>(before + done, after + done, elements % kLanes, first_position + words * kLanes,
                         first_word + words, out);
}

}  // namespace

ScanTable avx512_scans() {
  return {{{scan<std::uint8_t, false>, scan<std::uint8_t, true>},
           {scan<std::uint16_t, false>, scan<std::uint16_t, true>},
           {scan<std::uint32_t, false>, scan<std::uint32_t, true>},
           {scan<std::uint64_t, false>, scan<std::uint64_t, true>}}};
}

}  // namespace deltasync::delta
