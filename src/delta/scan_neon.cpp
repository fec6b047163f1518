// The scan with NEON: which words differ, eight at a time and without a branch, then the elements of two at a time. Why
// in short runs, and why memory may be asked for ahead, is said in scan_avx2.cpp.
#include "delta/neon.hpp"

namespace deltasync::delta {

namespace {

template <class U, bool kFloat, std::size_t kAheadBytes>
class Scanner {
 public:
  Scanner(const std::byte* before, const std::byte* after, std::uint32_t first_position, std::uint64_t first_word,
          ScanOutput& out)
      : before_(before),
        after_(after),
        first_position_(first_position),
        first_word_(first_word),
        lanes_(vaddq_u16(vandq_u16(iota(), vdupq_n_u16(kLanes - 1)),
                         vdupq_n_u16(static_cast<std::uint16_t>(first_position)))),
        out_(out) {}

  /// `lines` of eight words.
  void run(std::uint32_t lines) {
    for (std::uint32_t first = 0; first < lines; first += kRunLines) {
      list(first, lines - first < kRunLines ? lines : first + kRunLines);
      drain();
    }
    if (begin_ == end_) return;
    const std::uint32_t word = words_[begin_];
    scan_word<U, kFloat>(word_of(before_, word), word_of(after_, word), first_position_ + word * kLanes,
                         first_word_ + word, out_);
  }

 private:
  static constexpr std::uint32_t kRunLines = 32;
  static constexpr std::uint32_t kRoom = 1024;       ///< words on the list when it is moved to the front
  static constexpr unsigned kLanes = 8 / sizeof(U);  ///< of a word

  static uint16x8_t iota() {
    static constexpr std::uint16_t kIota[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    return vld1q_u16(kIota);
  }
  static std::uint64_t word_of(const std::byte* from, std::uint32_t word) {
    return load_raw<std::uint64_t>(from + word * std::size_t{8});
  }

  void list(std::uint32_t first, std::uint32_t end) {
    const std::byte* const before = before_;  // the stores below might change members, for all that the compiler knows
    const std::byte* const after = after_;
    std::uint32_t count = end_;
    uint16x8_t numbers = vaddq_u16(iota(), vdupq_n_u16(static_cast<std::uint16_t>(first * 8)));
#pragma GCC unroll 1
    for (std::uint32_t line = first; line < end; ++line) {
      const std::size_t at = std::size_t{line} * 64;
      if constexpr (kAheadBytes != 0) {
        __builtin_prefetch(before + at + kAheadBytes);
        __builtin_prefetch(after + at + kAheadBytes);
      }
      const auto equal = [&](std::size_t two) {
        return vreinterpretq_u32_u8(Lanes<8>::equal(load128(before + at + two), load128(after + at + two)));
      };
      const uint16x8_t low = vreinterpretq_u16_u32(vuzp1q_u32(equal(0), equal(16)));
      const uint16x8_t high = vreinterpretq_u16_u32(vuzp1q_u32(equal(32), equal(48)));
      const unsigned differ = Lanes<2>::bits(vmvnq_u8(vreinterpretq_u8_u16(vuzp1q_u16(low, high))));
      const uint8x16_t front = load128(kShuffles<2>.of_mask[differ]);
      store128(words_ + count, vqtbl1q_u8(vreinterpretq_u8_u16(numbers), front));
      count += kByteOnes.of[differ];
      numbers = vaddq_u16(numbers, vdupq_n_u16(8));
    }
    end_ = count;
  }
  /// Looks at the words that are listed but for the last one, two at a time.
  void drain() {
    std::uint64_t change = out_.digest_change;
    std::uint32_t count = out_.count;
    for (; end_ - begin_ >= 2; begin_ += 2) two(change, count);
    out_.digest_change = change;
    out_.count = count;
    if (end_ <= kRoom) return;
    words_[0] = words_[begin_];
    end_ -= begin_;
    begin_ = 0;
  }

  void two(std::uint64_t& change, std::uint32_t& count) const {
    const std::uint32_t words[2] = {words_[begin_], words_[begin_ + 1]};
    const std::uint64_t before[2] = {word_of(before_, words[0]), word_of(before_, words[1])};
    const std::uint64_t after[2] = {word_of(after_, words[0]), word_of(after_, words[1])};
    // NEON has no product of 64 bits, and what it has instead takes longer than two of these.
    for (unsigned i = 0; i < 2; ++i) {
      change += mix_word(after[i], first_word_ + words[i]) - mix_word(before[i], first_word_ + words[i]);
    }
    using L = Lanes<sizeof(U)>;
    const auto vector = [](const std::uint64_t(&of)[2]) {
      return vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(of[0]), vcreate_u64(of[1])));
    };
    const uint8x16_t a = vector(before);
    const uint8x16_t b = vector(after);
    const unsigned differ = L::bits(vmvnq_u8(L::equal(a, b)));
    const uint8x16_t diff = L::subtract(map_ulps<sizeof(U), kFloat>(b), map_ulps<sizeof(U), kFloat>(a));
    if constexpr (sizeof(U) == 1) {
      append_lanes<1>(differ & 0xFF, diff, positions(vld1q_dup_u16(words_ + begin_)), out_.positions, out_.diffs,
                      count);
      append_lanes<1>(differ >> 8, vextq_u8(diff, diff, 8), positions(vld1q_dup_u16(words_ + begin_ + 1)),
                      out_.positions, out_.diffs, count);
    } else {
      static constexpr std::uint8_t kOfLane[3][16] = {
          {0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3}, {0, 1, 0, 1, 2, 3, 2, 3}, {0, 1, 2, 3}};
      const auto both = vreinterpretq_u8_u32(vdupq_n_u32(words[0] | words[1] << 16));
      const uint8x16_t of_lane = vqtbl1q_u8(both, load128(kOfLane[sizeof(U) == 2 ? 0 : sizeof(U) == 4 ? 1 : 2]));
      append_lanes<sizeof(U)>(differ, diff, positions(vreinterpretq_u16_u8(of_lane)), out_.positions, out_.diffs,
                              count);
    }
  }
  /// From the number of each lane's word.
  uint16x8_t positions(uint16x8_t words) const {
    return vmlaq_u16(lanes_, words, vdupq_n_u16(kLanes));
  }

  const std::byte* before_;
  const std::byte* after_;
  const std::uint32_t first_position_;
  const std::uint64_t first_word_;
  const uint16x8_t lanes_;  ///< position of each lane's element, were it in the first word
  ScanOutput& out_;
  std::uint32_t begin_ = 0;
  std::uint32_t end_ = 0;
  std::uint16_t words_[kRoom + kRunLines * 8 + 8];
};

template <class U, bool kFloat, std::size_t kAheadBytes>
void scan(const std::byte* before, const std::byte* after, std::uint32_t elements, std::uint32_t first_position,
          std::uint64_t first_word, ScanOutput& out) {
  constexpr std::uint32_t kLineElements = 64 / sizeof(U);
  const std::uint32_t lines = elements / kLineElements;
  Scanner<U, kFloat, kAheadBytes>(before, after, first_position, first_word, out).run(lines);
  const std::size_t done = std::size_t{lines} * 64;
  scan_scalar<U, kFloat>(before + done, after + done, elements % kLineElements, first_position + lines * kLineElements,
                         first_word + lines * 8, out);
}

}  // namespace

template <std::size_t kAheadBytes>
ScanTable neon_scans() {
  return {{{scan<std::uint8_t, false, kAheadBytes>, scan<std::uint8_t, true, kAheadBytes>},
           {scan<std::uint16_t, false, kAheadBytes>, scan<std::uint16_t, true, kAheadBytes>},
           {scan<std::uint32_t, false, kAheadBytes>, scan<std::uint32_t, true, kAheadBytes>},
           {scan<std::uint64_t, false, kAheadBytes>, scan<std::uint64_t, true, kAheadBytes>}}};
}
template ScanTable neon_scans<0>();
template ScanTable neon_scans<kNeonAheadBytes>();

}  // namespace deltasync::delta
