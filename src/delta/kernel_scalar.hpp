// The scalar truth as templates, `static` for the reason given in mix.hpp: the vector kernels take their tails from
// here.
#pragma once

#include "delta/kernels.hpp"
#include "delta/mix.hpp"

namespace deltasync::delta {

static inline unsigned log2_floor(std::uint64_t x) noexcept {
  return 63U - static_cast<unsigned>(__builtin_clzll(x));
}

/// Appends the changed elements of one word (`bytes` of it are real).
template <class U, bool kFloat>
static inline void scan_word(std::uint64_t before, std::uint64_t after, std::uint32_t position, std::uint64_t word,
                             ScanOutput& out) noexcept {
  constexpr unsigned kBits = sizeof(U) * 8;
  out.digest_change += mix_word(after, word) - mix_word(before, word);
  std::uint64_t differs = before ^ after;
  U* const diffs = reinterpret_cast<U*>(out.diffs);
  while (differs != 0) {
    const unsigned lane = static_cast<unsigned>(__builtin_ctzll(differs)) / kBits;
    const unsigned shift = lane * kBits;
    const U a = static_cast<U>(before >> shift);
    const U b = static_cast<U>(after >> shift);
    out.positions[out.count] = static_cast<std::uint16_t>(position + lane);
    diffs[out.count] = static_cast<U>(ulp_map<U, kFloat>(b) - ulp_map<U, kFloat>(a));
    ++out.count;
    const std::uint64_t lane_mask = static_cast<std::uint64_t>(static_cast<U>(~U{0})) << shift;
    differs &= ~lane_mask;
  }
}

template <class U, bool kFloat>
static inline void scan_scalar(const std::byte* before, const std::byte* after, std::uint32_t elements,
                               std::uint32_t first_position, std::uint64_t first_word, ScanOutput& out) noexcept {
  constexpr std::uint32_t kLanes = 8 / sizeof(U);
  const std::size_t size = std::size_t{elements} * sizeof(U);
  std::size_t at = 0;
  std::uint32_t position = first_position;
  std::uint64_t word = first_word;
  for (; at + 8 <= size; at += 8, position += kLanes, ++word) {
    const auto a = load_raw<std::uint64_t>(before + at);
    const auto b = load_raw<std::uint64_t>(after + at);
    if (a != b) scan_word<U, kFloat>(a, b, position, word, out);
  }
  if (at < size) {
    const std::uint64_t a = load_word(before + at, size - at);
    const std::uint64_t b = load_word(after + at, size - at);
    if (a != b) scan_word<U, kFloat>(a, b, position, word, out);
  }
}

static inline std::uint64_t digest_run_scalar(const std::byte* bytes, std::size_t size, std::uint64_t word) noexcept {
  std::uint64_t sum = 0;
  std::size_t at = 0;
  for (; at + 8 <= size; at += 8, ++word) sum += mix_word(load_raw<std::uint64_t>(bytes + at), word);
  if (at < size) sum += mix_word(load_word(bytes + at, size - at), word);
  return sum;
}

/// `digest_run` of the copy while it is in the nearest cache.
template <class DigestRun>
static inline std::uint64_t copy_then_digest(std::byte* to, const std::byte* from, std::size_t size, std::uint64_t word,
                                             DigestRun digest_run) noexcept {
  constexpr std::size_t kBlock = 4096;
  std::uint64_t sum = 0;
  for (std::size_t at = 0; at < size; at += kBlock) {
    const std::size_t n = size - at < kBlock ? size - at : kBlock;
    std::memcpy(to + at, from + at, n);
    sum += digest_run(to + at, n, word + at / 8);
  }
  return sum;
}

static constexpr std::size_t kLine = 64;
static constexpr std::size_t kPage = 4096;

/// The whole lines of a run by `lines_digest`, where it is long and the copy's lines hold whole words; the rest, or all
/// of it, as copy_then_digest().
template <class DigestRun, class LinesDigest>
static inline std::uint64_t stream_lines_digest(std::byte* to, const std::byte* from, std::size_t size,
                                                std::uint64_t word, DigestRun digest_run,
                                                LinesDigest lines_digest) noexcept {
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (size < kPage || head % 8 != 0) return copy_then_digest(to, from, size, word, digest_run);
  const std::size_t lines = (size - head) / kLine * kLine;
  const std::size_t tail = head + lines;
  return copy_then_digest(to, from, head, word, digest_run) +
         lines_digest(to + head, from + head, lines, word + head / 8) +
         copy_then_digest(to + tail, from + tail, size - tail, word + tail / 8, digest_run);
}

static inline std::uint64_t digest_pairs_scalar(const std::uint64_t* before, const std::uint64_t* after,
                                                const std::uint32_t* words, std::uint32_t count) noexcept {
  std::uint64_t sum = 0;
  for (std::uint32_t i = 0; i < count; ++i) sum += mix_word(after[i], words[i]) - mix_word(before[i], words[i]);
  return sum;
}

static inline void gaps_scalar(const std::uint16_t* positions, std::uint32_t count, std::uint16_t* gaps) noexcept {
  if (count == 0) return;
  gaps[0] = positions[0];
  for (std::uint32_t i = 1; i < count; ++i) {
    gaps[i] = static_cast<std::uint16_t>(positions[i] - positions[i - 1] - 1);
  }
}

static inline std::uint64_t quotient_sum_scalar(const std::uint16_t* gaps, std::uint32_t count, unsigned k) noexcept {
  std::uint64_t sum = 0;
  for (std::uint32_t i = 0; i < count; ++i) sum += static_cast<std::uint32_t>(gaps[i]) >> k;
  return sum;
}

// No other object may come to use a vector file's copy of its functions.
namespace {

/// Appends bit fields to a plane, lowest bits first. Stores 8 bytes at a time.
class BitPacker {
 public:
  explicit BitPacker(std::byte* out) : out_(out) {}
  /// `bits` ≤ 56, value < 2^bits.
  void put(std::uint64_t value, unsigned bits) noexcept {
    pending_ |= value << filled_;
    filled_ += bits;
    store_raw(out_, pending_);
    const unsigned whole = filled_ >> 3;
    out_ += whole;
    pending_ = whole == 8 ? 0 : pending_ >> (whole * 8);
    filled_ &= 7;
  }

 private:
  std::byte* out_;
  std::uint64_t pending_ = 0;
  unsigned filled_ = 0;
};

/// So many zeros and a one.
inline void put_unary(BitPacker& packer, unsigned zeros) noexcept {
  for (; zeros > 55; zeros -= 55) packer.put(0, 55);
  packer.put(std::uint64_t{1} << zeros, zeros + 1);
}

}  // namespace

static inline void pack_low_scalar(const std::uint16_t* gaps, std::uint32_t count, unsigned k,
                                   std::byte* out) noexcept {
  if (k == 0) return;
  BitPacker packer(out);
  const std::uint64_t mask = (std::uint64_t{1} << k) - 1;
  for (std::uint32_t i = 0; i < count; ++i) packer.put(gaps[i] & mask, k);
}

static inline void pack_unary_scalar(const std::uint16_t* gaps, std::uint32_t count, unsigned k,
                                     std::byte* out) noexcept {
  constexpr std::uint64_t kOnes = 0x0001000100010001;
  constexpr unsigned kBitsMax = 56;  // of one put()
  const std::uint64_t quotient_bits = (0xFFFFU >> k) * kOnes;
  BitPacker packer(out);
  std::uint32_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const std::uint64_t quotients = load_raw<std::uint64_t>(gaps + i) >> k & quotient_bits;
    const std::uint64_t ends = (quotients + kOnes) * kOnes;  // in each lane, behind its stop bit
    const auto end = [&](unsigned lane) { return static_cast<unsigned>(ends >> (16 * lane)) & 0xFFFF; };
    if (end(3) - 1 >= kBitsMax) {  // 0 if it is 65,536
      for (std::uint32_t j = i; j < i + 4; ++j) put_unary(packer, gaps[j] >> k);
      continue;
    }
    const auto stop = [&](unsigned lane) { return std::uint64_t{1} << (end(lane) - 1); };
    packer.put(stop(0) | stop(1) | stop(2) | stop(3), end(3));
  }
  for (; i < count; ++i) put_unary(packer, gaps[i] >> k);
}

static inline void unpack_low_scalar(const std::byte* in, std::uint32_t count, unsigned k,
                                     std::uint16_t* gaps) noexcept {
  const std::uint32_t mask = (1U << k) - 1;
  std::uint64_t bit = 0;
  for (std::uint32_t i = 0; i < count; ++i, bit += k) {
    gaps[i] = static_cast<std::uint16_t>((load_raw<std::uint32_t>(in + (bit >> 3)) >> (bit & 7)) & mask);
  }
}

/// |d| of a difference read as signed: 1 … 2^(w−1).
template <class U>
static inline U magnitude(U d) noexcept {
  using S = std::make_signed_t<U>;
  return static_cast<S>(d) < 0 ? static_cast<U>(U{0} - d) : d;
}

/// Handles differences [i, count); `i` is a multiple of 8.
template <class U>
static inline void split_signs_tail(const std::byte* diffs, std::uint32_t i, std::uint32_t count, std::byte* signs,
                                    std::uint16_t* exceptions, SignSplit& out) noexcept {
  while (i < count) {
    unsigned byte = 0;
    for (unsigned j = 0; j < 8 && i < count; ++j, ++i) {
      const U d = load_raw<U>(diffs + std::size_t{i} * sizeof(U));
      byte |= static_cast<unsigned>(d >> (sizeof(U) * 8 - 1)) << j;
      const U m = magnitude(d);
      if (m != 1) {
        exceptions[out.exceptions++] = static_cast<std::uint16_t>(i);
        out.gamma_bits += log2_floor(m);
      }
    }
    signs[(i - 1) / 8] = static_cast<std::byte>(byte);
  }
}

template <class U>
static inline SignSplit split_signs_scalar(const std::byte* diffs, std::uint32_t count, std::byte* signs,
                                           std::uint16_t* exceptions) noexcept {
  SignSplit out;
  split_signs_tail<U>(diffs, 0, count, signs, exceptions, out);
  return out;
}

}  // namespace deltasync::delta
