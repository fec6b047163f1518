// The inner loops, once per instruction set. kernel_scalar.cpp, decode_scalar.cpp and class_scalar.cpp are the
// truth; the others must agree with them bit for bit (tests/delta/test_delta_kernels.cpp,
// test_delta_decode_kernels.cpp, test_delta_class_kernels.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

namespace deltasync::delta {

/// Output buffers of the kernels have room for this many entries (or bytes) behind the last valid one: vector code
/// stores whole vectors and advances by what was valid.
inline constexpr std::size_t kSlack = 64;

/// Cursor of a scan: the changed elements of one tile so far.
struct ScanOutput {
  std::uint16_t* positions = nullptr;  ///< in the tile, ascending
  std::byte* diffs = nullptr;          ///< ulp_map(after) − ulp_map(before) modulo 2^w, one element each
  std::uint32_t count = 0;
  std::uint64_t digest_change = 0;  ///< digest after − digest before
};

/// Compares `elements` contiguous elements that begin at tile position `first_position` and digest word `first_word`,
/// and appends those that differ. Elements at the end that do not fill a word are zero-padded in the digest.
using ScanFn = void (*)(const std::byte* before, const std::byte* after, std::uint32_t elements,
                        std::uint32_t first_position, std::uint64_t first_word, ScanOutput& out);
struct ScanTable {
  ScanFn of[4][2] = {};  ///< [log2 of the element's bytes][is float]
};

struct SignSplit {
  std::uint32_t exceptions = 0;  ///< differences of magnitude above 1
  std::uint32_t gamma_bits = 0;  ///< Σ floor(log2(magnitude))
};

/// What the values of a decoded payload are.
enum class ValueKind : std::uint8_t {
  difference,      ///< of integers: new − old
  ulp_difference,  ///< of floats: ulp_map(new) − ulp_map(old)
  element,         ///< the new elements themselves
};
inline constexpr std::size_t kValueKinds = 3;

/// The loops of the decoder. Planes have kSlack readable bytes behind them; the caller has proved what is said
/// of the planes (rice_decode.cpp).
struct DecodeKernels {
  /// Set bits in `size` bytes.
  std::uint64_t (*count_ones)(const std::byte* plane, std::size_t size);
  /// The positions whose gaps have these low bits and quotients; the quotient plane of `size` bytes has exactly
  /// `count` ≥ 1 ones. Returns the last position, exactly; `positions` (count entries + kSlack) holds them modulo 2^16.
  std::uint64_t (*positions)(const std::byte* lows, const std::byte* quotients, std::size_t size, unsigned k,
                             std::uint32_t count, std::uint16_t* positions);
  /// [log2 of the element's bytes] 1, or −1 where the sign is set. Writes count elements + kSlack bytes.
  void (*unit_values[4])(const std::byte* signs, std::uint32_t count, std::byte* values);
  /// [log2 of the element's bytes] Puts the magnitudes above 1 behind the signs of `values`, which are all ±1. The
  /// length plane has exactly as many ones as there are values, the last one at its end, and the plane of low bits as
  /// many bits as the other has zeros. Returns what is wrong, or nullptr.
  const char* (*magnitudes[4])(const std::byte* lengths, std::uint64_t bits, const std::byte* low, std::byte* values);
  /// [log2 of the element's bytes][ValueKind] Turns values into new elements and returns the change of the digest of a
  /// tile whose rows are whole words: before[i] is the digest word that holds the element at positions[i], which
  /// ascend; all changed elements of a word are in one call. Reads nothing behind `count`.
  std::uint64_t (*resolve[4][kValueKinds])(const std::uint64_t* before, const std::uint16_t* positions,
                                           std::byte* values, std::uint32_t count);
};

/// Bytes low to high, of the exponents that share a class.
struct ExponentRange {
  std::uint8_t low = 0;
  std::uint8_t high = 0;  ///< below `low`: no exponent at all
};

/// The loops of rice_class that look at all elements of a tile. An exponent is a byte here (exponent_base in
/// class_tile.hpp), and a class is a mask of 64-bit words with one bit for each element.
struct ClassKernels {
  /// [log2 of the element's bytes] The exponents of `elements` contiguous floats, less `base`, as bytes: 0 for those
  /// below it, 255 for those further above it. `base` is 0 but for 64-bit elements.
  void (*exponents[4])(const std::byte* first, std::uint32_t elements, unsigned mantissa_bits, std::uint32_t base,
                       std::uint8_t* out);
  /// counts[i], i ≤ top − lowest: how many are lowest + i; those below `lowest` count as `lowest`.
  void (*count)(const std::uint8_t* exponents, std::uint32_t elements, unsigned lowest, unsigned top,
                std::uint32_t* counts);
  /// The mask of those in a range that is not empty. Reads 64 · `words` exponents.
  void (*mask)(const std::uint8_t* exponents, std::uint32_t words, ExponentRange range, std::uint64_t* mask);
  /// How many elements of a mask lie between each of the ascending positions and the one before, all of them in it.
  void (*gaps)(const std::uint64_t* mask, const std::uint16_t* positions, std::uint32_t count, std::uint16_t* gaps);
  /// The inverse. False if one lies behind the last word; then `positions` holds nothing of use.
  bool (*select)(const std::uint64_t* mask, std::uint32_t words, const std::uint16_t* gaps, std::uint32_t count,
                 std::uint16_t* positions);
};
inline constexpr std::size_t kTileMaskWords = 1024;  ///< of the largest tile

/// In dense_ulp, the quotient from which on a number's high bits stand apart.
inline constexpr unsigned kDenseEscape = 16;

struct DenseSums {
  std::uint64_t quotients = 0;  ///< each at most kDenseEscape
  std::uint32_t escapes = 0;
};

/// The planes of a dense_ulp payload, with kSlack readable bytes behind each.
struct DensePlanes {
  unsigned k = 0;
  const std::byte* low = nullptr;
  const std::uint16_t* quotients = nullptr;  ///< of each element, modulo 2^16
  const std::byte* escape = nullptr;
  std::uint64_t quotient_sum = 0;  ///< as the record says
  std::uint32_t escapes = 0;       ///< as the record says
};

/// The loops of dense_ulp, by log2 of the element's bytes. A number is the zigzag of an element's difference; there is
/// one for each element of the tile.
struct DenseKernels {
  /// The numbers of a list of differences; 0 for all elements that are not listed.
  void (*spread[4])(const std::uint16_t* positions, const std::byte* diffs, std::uint32_t count, std::uint32_t elements,
                    std::byte* numbers);
  /// counts[b]: numbers of b bits, 0 ≤ b ≤ w.
  void (*lengths[4])(const std::byte* numbers, std::uint32_t elements, std::uint32_t* counts);
  DenseSums (*sums[4])(const std::byte* numbers, std::uint32_t elements, unsigned k);
  /// The three planes of a payload. Each is followed by up to 8 bytes of garbage.
  void (*pack_low[4])(const std::byte* numbers, std::uint32_t elements, unsigned k, std::byte* plane);
  void (*pack_unary[4])(const std::byte* numbers, std::uint32_t elements, unsigned k, std::byte* plane);
  void (*pack_escapes[4])(const std::byte* numbers, std::uint32_t elements, unsigned k, std::byte* plane);
  /// The difference of each element; or what is wrong.
  const char* (*join[4])(const DensePlanes& planes, std::uint32_t elements, std::byte* diffs);
  /// Lists those that are not 0. Returns how many.
  std::uint32_t (*list[4])(const std::byte* diffs, std::uint32_t elements, std::uint16_t* positions, std::byte* listed);
};

struct Kernels {
  const char* name;
  /// Forms of one loop (base/form_choice.hpp); one that is not there is empty, and comes last.
  ScanTable scans[2];

  /// Sum over a contiguous run, zero-padded to whole words; word indices count from `first_word`.
  std::uint64_t (*digest_run)(const std::byte* bytes, std::size_t size, std::uint64_t first_word);
  /// Copies a run, and returns the digest of what was stored, as digest_run() of `to` would: also while others write to
  /// `from`. Long runs may go past the caches, and are there for other threads all the same.
  /// Forms of one loop, too; those that are not there are null, and come last.
  using CopyDigestFn = std::uint64_t (*)(std::byte* to, const std::byte* from, std::size_t size,
                                         std::uint64_t first_word);
  CopyDigestFn copy_digests[3];
  /// Σ mix_word(after[i], words[i]) − mix_word(before[i], words[i]).
  std::uint64_t (*digest_pairs)(const std::uint64_t* before, const std::uint64_t* after, const std::uint32_t* words,
                                std::uint32_t count);

  /// positions[0], then positions[i] − positions[i−1] − 1.
  void (*gaps)(const std::uint16_t* positions, std::uint32_t count, std::uint16_t* gaps);
  /// Σ (gaps[i] >> k).
  std::uint64_t (*quotient_sum)(const std::uint16_t* gaps, std::uint32_t count, unsigned k);
  /// Packs the k low bits of each gap, first gap in the lowest bits. k ≤ 15. Writes ceil(count·k/8) bytes + kSlack.
  void (*pack_low)(const std::uint16_t* gaps, std::uint32_t count, unsigned k, std::byte* out);
  /// For each gap, gaps[i] >> k zeros and a one. Writes the plane + kSlack.
  void (*pack_unary)(const std::uint16_t* gaps, std::uint32_t count, unsigned k, std::byte* out);
  /// The inverse of pack_low; `in` has kSlack readable bytes behind the plane. Writes count entries + kSlack.
  void (*unpack_low)(const std::byte* in, std::uint32_t count, unsigned k, std::uint16_t* gaps);
  /// [log2 of the element's bytes] Writes the sign plane (ceil(count/8) bytes + kSlack) and lists the indices of
  /// differences other than ±1.
  SignSplit (*split_signs[4])(const std::byte* diffs, std::uint32_t count, std::byte* signs, std::uint16_t* exceptions);

  DecodeKernels decode;
  ClassKernels classes;
  DenseKernels dense;
};

/// The one that this process uses: the widest that the CPU has, or what DELTASYNC_ISA names.
const Kernels& active_kernels();
/// By name; nullptr if unknown, not built, or not supported by this CPU.
const Kernels* find_kernels(const char* name);

const Kernels& scalar_kernels();
DecodeKernels scalar_decode_kernels();
ClassKernels scalar_class_kernels();
DenseKernels scalar_dense_kernels();
#ifdef DELTASYNC_X86_KERNELS
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
DecodeKernels avx2_decode_kernels();
DecodeKernels avx512_decode_kernels();
ClassKernels avx2_class_kernels();
ClassKernels avx512_class_kernels();
DenseKernels avx2_dense_kernels();
DenseKernels avx512_dense_kernels();
#endif
#ifdef DELTASYNC_NEON_KERNELS
const Kernels& neon_kernels();
DecodeKernels neon_decode_kernels();
ClassKernels neon_class_kernels();
DenseKernels neon_dense_kernels();
#endif

}  // namespace deltasync::delta
