// The scan with AVX2: which words differ, then their elements, sixteen bytes at a time.
#include "delta/avx2.hpp"
#include "delta/shuffles.hpp"

namespace deltasync::delta {

namespace {

/// Four numbers of words in lanes of 16 bits: those whose bits a mask has, in order.
struct WordLists {
  std::uint64_t of_mask[16] = {};
  constexpr WordLists() {
    for (std::uint64_t mask = 0; mask < 16; ++mask) {
      unsigned shift = 0;
      for (std::uint64_t word = 0; word < 4; ++word) {
        if ((mask >> word & 1) == 0) continue;
        of_mask[mask] |= word << shift;
        shift += 16;
      }
    }
  }
};
constexpr WordLists kWordLists;

/// What differs between element widths.
template <std::size_t kBytes>
struct Lanes;

template <>
struct Lanes<1> {
  static unsigned equal(__m128i a, __m128i b) { return static_cast<unsigned>(_mm_movemask_epi8(_mm_cmpeq_epi8(a, b))); }
  static __m128i subtract(__m128i a, __m128i b) { return _mm_sub_epi8(a, b); }
  static __m128i negative(__m128i x) { return _mm_cmpgt_epi8(_mm_setzero_si128(), x); }
  static __m128i most() { return _mm_set1_epi8(0x7F); }
};

template <>
struct Lanes<2> {
  static unsigned equal(__m128i a, __m128i b) {
    return static_cast<unsigned>(_mm_movemask_epi8(_mm_packs_epi16(_mm_cmpeq_epi16(a, b), _mm_setzero_si128())));
  }
  static __m128i subtract(__m128i a, __m128i b) { return _mm_sub_epi16(a, b); }
  static __m128i negative(__m128i x) { return _mm_srai_epi16(x, 15); }
  static __m128i most() { return _mm_set1_epi16(0x7FFF); }
};

template <>
struct Lanes<4> {
  static unsigned equal(__m128i a, __m128i b) {
    return static_cast<unsigned>(_mm_movemask_ps(_mm_castsi128_ps(_mm_cmpeq_epi32(a, b))));
  }
  static __m128i subtract(__m128i a, __m128i b) { return _mm_sub_epi32(a, b); }
  static __m128i negative(__m128i x) { return _mm_srai_epi32(x, 31); }
  static __m128i most() { return _mm_set1_epi32(0x7FFFFFFF); }
};

template <>
struct Lanes<8> {
  static unsigned equal(__m128i a, __m128i b) {
    return static_cast<unsigned>(_mm_movemask_pd(_mm_castsi128_pd(_mm_cmpeq_epi64(a, b))));
  }
  static __m128i subtract(__m128i a, __m128i b) { return _mm_sub_epi64(a, b); }
  static __m128i negative(__m128i x) { return _mm_cmpgt_epi64(_mm_setzero_si128(), x); }
  static __m128i most() { return _mm_set1_epi64x(0x7FFFFFFFFFFFFFFF); }
};

inline __m128i load128(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}

/// A run of vectors is compared first, which lists its changed words without a branch; then those are looked at, while
/// they are in the nearest cache, without a branch either. Short runs, and a loop that is not unrolled, for the reasons
/// given in scan_avx512.cpp.
///
/// kAheadBytes: memory is asked for so far ahead, since it waits while the changed words of a run are looked at. That
/// is worth a third on some processors; others fetch what follows by themselves. 0: it is not asked for.
template <class U, bool kFloat, std::size_t kAheadBytes>
class Scanner {
 public:
  Scanner(const std::byte* before, const std::byte* after, std::uint32_t first_position, std::uint64_t first_word,
          ScanOutput& out)
      : before_(before),
        after_(after),
        lanes_(_mm_add_epi16(_mm_and_si128(_mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7), _mm_set1_epi16(kLanes - 1)),
                             _mm_set1_epi16(static_cast<short>(first_position)))),
        word_offset_(set_all((first_word + 1) * kDigestStep)),
        out_(out) {}

  /// `vectors` of four words.
  void run(std::uint32_t vectors) {
    for (std::uint32_t first = 0; first < vectors; first += kRunVectors) {
      list(first, vectors - first < kRunVectors ? vectors : first + kRunVectors);
      drain();
    }
    if (begin_ != end_) last();
    out_.digest_change += sum_lanes(sum_);
  }

 private:
  static constexpr std::uint32_t kRunVectors = 64;
  static constexpr std::uint32_t kRoom = 1024;       ///< words on the list when it is moved to the front
  static constexpr unsigned kLanes = 8 / sizeof(U);  ///< of a word

  void list(std::uint32_t first, std::uint32_t end) {
    const std::byte* const before = before_;  // the stores below might change members, for all that the compiler knows
    const std::byte* const after = after_;
    std::uint32_t count = end_;
#pragma GCC unroll 1
    for (std::uint32_t v = first; v < end; ++v) {
      const std::size_t at = std::size_t{v} * 32;
      if constexpr (kAheadBytes != 0) {
        _mm_prefetch(reinterpret_cast<const char*>(before + at + kAheadBytes), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(after + at + kAheadBytes), _MM_HINT_T0);
      }
      const __m256i equal = _mm256_cmpeq_epi64(load256(before + at), load256(after + at));
      const unsigned differ = static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(equal))) ^ 15U;
      store_raw(words_ + count, kWordLists.of_mask[differ] + v * std::uint64_t{0x0004000400040004});
      count += static_cast<std::uint32_t>(_mm_popcnt_u32(differ));
    }
    end_ = count;
  }
  /// Looks at the words that are listed but for the last few, four at a time.
  void drain() {
    for (; end_ - begin_ >= 4; begin_ += 4) four(gather(before_), gather(after_));
    if (end_ <= kRoom) return;
    store_raw(words_, load_raw<std::uint64_t>(words_ + begin_));
    end_ -= begin_;
    begin_ = 0;
  }
  /// The last few are filled up with the first of them, as if it had not changed.
  void last() {
    for (std::uint32_t filler = end_; filler < begin_ + 4; ++filler) words_[filler] = words_[begin_];
    const __m256i real = _mm256_cmpgt_epi64(set_all(end_ - begin_), _mm256_setr_epi64x(0, 1, 2, 3));
    const __m256i before = gather(before_);
    four(before, _mm256_blendv_epi8(before, gather(after_), real));
  }

  /// The next four words that are listed.
  __m256i gather(const std::byte* from) const {
    const auto two = [&](std::uint32_t first) {
      const auto at = [&](std::uint32_t i) { return from + words_[begin_ + i] * std::size_t{8}; };
      const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at(first)));
      return _mm_castpd_si128(_mm_loadh_pd(_mm_castsi128_pd(low), reinterpret_cast<const double*>(at(first + 1))));
    };
    return _mm256_inserti128_si256(_mm256_castsi128_si256(two(0)), two(2), 1);
  }

  /// The next four that are listed.
  void four(__m256i before, __m256i after) {
    const __m128i words = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(words_ + begin_));
    const __m256i step = set_all(kDigestStep);
    const __m256i offset =
        _mm256_add_epi64(multiply(_mm256_cvtepu16_epi64(words), step, _mm256_srli_epi64(step, 32)), word_offset_);
    sum_ = _mm256_add_epi64(
        sum_, _mm256_sub_epi64(mixer_(_mm256_add_epi64(after, offset)), mixer_(_mm256_add_epi64(before, offset))));
    two(words, _mm256_castsi256_si128(before), _mm256_castsi256_si128(after));
    two(_mm_srli_epi64(words, 32), _mm256_extracti128_si256(before, 1), _mm256_extracti128_si256(after, 1));
  }

  /// The elements of two words, whose numbers come first in `words`.
  void two(__m128i words, __m128i before, __m128i after) {
    using L = Lanes<sizeof(U)>;
    const unsigned differ = ~L::equal(before, after);
    const __m128i diff = kFloat ? L::subtract(map(after), map(before)) : L::subtract(after, before);
    if constexpr (sizeof(U) == 1) {
      append(differ & 0xFF, diff, positions<0>(words));
      append(differ >> 8 & 0xFF, _mm_srli_si128(diff, 8), positions<1>(words));
    } else {
      append(differ & ((1U << kTogether<sizeof(U)>)-1), diff, positions<0>(words));
    }
  }
  static __m128i map(__m128i x) {
    using L = Lanes<sizeof(U)>;
    return _mm_xor_si128(x, _mm_and_si128(L::negative(x), L::most()));
  }

  /// Of the elements of two words, or of the bytes of one: each word's number in as many lanes as it has elements.
  template <unsigned kWord>
  __m128i positions(__m128i words) const {
    constexpr unsigned kShift = sizeof(U) == 1 ? 3 : sizeof(U) == 2 ? 2 : sizeof(U) == 4 ? 1 : 0;
    constexpr char kLow = kWord * 2;
    constexpr char kHigh = kLow + 1;
    __m128i of_lane = _mm_set1_epi16(static_cast<short>(kHigh << 8 | kLow));
    if constexpr (sizeof(U) == 2) of_lane = _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3);
    if constexpr (sizeof(U) == 4) of_lane = _mm_setr_epi8(0, 1, 0, 1, 2, 3, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0);
    if constexpr (sizeof(U) == 8) of_lane = _mm_setr_epi8(0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm_add_epi16(_mm_slli_epi16(_mm_shuffle_epi8(words, of_lane), kShift), lanes_);
  }

  void append(unsigned mask, __m128i diff, __m128i positions) {
    const __m128i front = load128(kShuffles<sizeof(U)>.of_mask[mask]);
    const __m128i positions_front = load128(kShuffles<2>.of_mask[mask]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out_.diffs + std::size_t{out_.count} * sizeof(U)),
                     _mm_shuffle_epi8(diff, front));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out_.positions + out_.count),
                     _mm_shuffle_epi8(positions, positions_front));
    out_.count += static_cast<std::uint32_t>(_mm_popcnt_u32(mask));
  }

  const std::byte* before_;
  const std::byte* after_;
  const __m128i lanes_;  ///< position of each lane's element, were it in the first word
  const __m256i word_offset_;
  const Mixer mixer_{};
  ScanOutput& out_;
  __m256i sum_ = _mm256_setzero_si256();
  std::uint32_t begin_ = 0;
  std::uint32_t end_ = 0;
  std::uint16_t words_[kRoom + kRunVectors * 4 + 8];
};

template <class U, bool kFloat, std::size_t kAheadBytes>
void scan(const std::byte* before, const std::byte* after, std::uint32_t elements, std::uint32_t first_position,
          std::uint64_t first_word, ScanOutput& out) {
  constexpr std::uint32_t kVectorElements = 32 / sizeof(U);
  const std::uint32_t vectors = elements / kVectorElements;
  Scanner<U, kFloat, kAheadBytes>(before, after, first_position, first_word, out).run(vectors);
  const std::size_t done = std::size_t{vectors} * 32;
  scan_scalar<U, kFloat>(before + done, after + done, elements % kVectorElements,
                         first_position + vectors * kVectorElements, first_word + vectors * 4, out);
}

}  // namespace

template <std::size_t kAheadBytes>
ScanTable avx2_scans() {
  return {{{scan<std::uint8_t, false, kAheadBytes>, scan<std::uint8_t, true, kAheadBytes>},
           {scan<std::uint16_t, false, kAheadBytes>, scan<std::uint16_t, true, kAheadBytes>},
           {scan<std::uint32_t, false, kAheadBytes>, scan<std::uint32_t, true, kAheadBytes>},
           {scan<std::uint64_t, false, kAheadBytes>, scan<std::uint64_t, true, kAheadBytes>}}};
}
template ScanTable avx2_scans<0>();
template ScanTable avx2_scans<kScanAheadBytes>();

}  // namespace deltasync::delta
