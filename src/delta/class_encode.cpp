#include <algorithm>

#include "delta/class_codec.hpp"
#include "delta/frame.hpp"
#include "delta/kernel_scalar.hpp"

namespace deltasync::delta {

namespace {

/// The Rice parameter for c changes among n elements that are independent and alike: the smallest k with
/// 2^k × c/n ≥ 0.481, which is −ln of the golden ratio's inverse (Gallager and van Voorhis, "Optimal source codes for
/// geometrically distributed integer alphabets", 1975, for small c/n).
unsigned rice_k_for(std::uint64_t n, std::uint64_t c) {
  const std::uint64_t wanted = n * 481;
  const std::uint64_t one = c * 1000;
  if (one >= wanted) return 0;
  // The first power of two that lifts `one` to the highest bit of `wanted`, or the next one.
  const unsigned k = log2_floor(wanted) - log2_floor(one);
  return std::min((one << k) >= wanted ? k : k + 1, kRiceKMax);
}

/// What naming c of n elements is about to cost in bits, without looking at which.
std::uint64_t estimated_bits(std::uint64_t n, std::uint64_t c) {
  if (c == 0) return 0;
  const unsigned k = rice_k_for(n, c);
  // A gap's low bits hold half of 2^k − 1 on average; the rest of the elements between changes are quotients.
  const std::uint64_t in_low_bits = c * ((std::uint64_t{1} << k) - 1) / 2;
  const std::uint64_t between = n - c;
  return c * (k + 1) + (between > in_low_bits ? (between - in_low_bits) >> k : 0);
}

/// How many elements, and how many changed ones, have an exponent byte below a given one.
struct ExponentCounts {
  std::uint32_t elements_below[257];
  std::uint32_t changed_below[257];
  std::uint32_t lowest = 0;  ///< of a changed element; what is said of exponents below it holds for all of them alone
  std::uint32_t top = 0;     ///< of a changed element
};

/// Of 64-bit elements, whose exponents are bytes only in sight of the largest one that changed.
std::uint32_t base_of(const TileShape& shape, const ChangedElements& changed, const std::byte* before,
                      std::size_t row_stride) {
  if (exponent_count(shape) <= 256) return 0;
  std::uint64_t largest = 0;
  for_each_position<std::uint64_t>(RowGeometry(shape, row_stride), changed.positions, changed.count,
                                   [&](std::uint32_t, std::size_t offset) {
                                     const auto x = load_raw<std::uint64_t>(before + offset);
                                     largest = std::max(largest, x & ~std::uint64_t{0} >> 1);
                                   });
  return exponent_base(shape, static_cast<std::uint32_t>(largest >> shape.mantissa_bits));
}

void count_exponents(const ClassKernels& kernels, const TileShape& shape, const ChangedElements& changed,
                     const std::uint8_t* exponents, ExponentCounts& counts) {
  std::uint32_t changes[256] = {};
  for (std::uint32_t i = 0; i < changed.count; ++i) ++changes[exponents[changed.positions[i]]];
  counts.lowest = 255;
  for (std::uint32_t e = 0; e < 256; ++e) {
    if (changes[e] == 0) continue;
    counts.lowest = std::min(counts.lowest, e);
    counts.top = e;
  }
  std::uint32_t elements[256];
  kernels.count(exponents, shape.elements(), counts.lowest, counts.top, elements);
  for (std::uint32_t e = 0; e <= counts.lowest; ++e) counts.elements_below[e] = counts.changed_below[e] = 0;
  for (std::uint32_t e = counts.lowest; e <= counts.top; ++e) {
    counts.elements_below[e + 1] = counts.elements_below[e] + elements[e - counts.lowest];
    counts.changed_below[e + 1] = counts.changed_below[e] + changes[e];
  }
}

/// Calls fn(class, elements, changed) for each class, from the largest exponents down.
template <class Fn>
void for_each_class(const ExponentCounts& counts, unsigned classes, unsigned shift, Fn&& fn) {
  std::uint32_t end = counts.top + 1;
  for (unsigned c = classes; c-- > 0;) {
    const std::uint32_t width = 1u << shift;
    const std::uint32_t first = c == 0 || end < width ? 0 : end - width;
    fn(c, counts.elements_below[end] - counts.elements_below[first],
       counts.changed_below[end] - counts.changed_below[first]);
    end = first;
  }
}

/// The division into classes with the smallest estimate, and a Rice parameter for each class, all from the counts.
ClassHeader choose_classes(const ExponentCounts& counts, std::uint32_t base) {
  constexpr std::uint64_t kHeaderBitsOfClass = 12;  // k, and mostly one byte of count
  std::uint64_t best_bits = ~std::uint64_t{0};
  ClassHeader header;
  header.top = counts.top + base;
  for (unsigned shift = 0; shift <= kClassShiftMax; ++shift) {
    std::uint64_t upper_bits = 0;  // of all classes but the lowest, which has what they leave
    std::uint32_t end = counts.top + 1;
    for (unsigned classes = 1; classes <= kClassesMax; ++classes) {
      if ((counts.top - counts.lowest) >> shift < classes - 1) break;  // the lowest class would be empty
      if (classes > 1 || shift == 0) {
        const std::uint64_t lowest_bits = estimated_bits(counts.elements_below[end], counts.changed_below[end]);
        const std::uint64_t bits = classes * kHeaderBitsOfClass + upper_bits + lowest_bits;
        if (bits < best_bits) {
          best_bits = bits;
          header.classes = classes;
          header.shift = shift;
        }
      }
      const std::uint32_t first = end < 1u << shift ? 0 : end - (1u << shift);
      upper_bits += estimated_bits(counts.elements_below[end] - counts.elements_below[first],
                                   counts.changed_below[end] - counts.changed_below[first]);
      end = first;
    }
  }
  for_each_class(counts, header.classes, header.shift, [&](unsigned c, std::uint32_t n, std::uint32_t changed) {
    header.k[c] = static_cast<std::uint8_t>(changed == 0 ? 0 : rice_k_for(n, changed));
    header.changed[c] = changed;
  });
  return header;
}

/// Puts positions and differences in the order of the classes.
template <class U>
void order_by_class(const ClassHeader& header, const std::array<ExponentRange, kClassesMax>& ranges,
                    const ChangedElements& changed, ClassEncodeScratch& scratch) {
  std::uint8_t class_of[256] = {};  // of exponents above the top, none of which changed, anything
  for (unsigned c = 0; c < header.classes; ++c) {
    for (unsigned e = ranges[c].low; e <= ranges[c].high; ++e) class_of[e] = static_cast<std::uint8_t>(c);
  }
  std::uint32_t next[kClassesMax] = {};
  for (unsigned c = 1; c < header.classes; ++c) next[c] = next[c - 1] + header.changed[c - 1];
  scratch.diffs.resize(std::max(scratch.diffs.size(), changed.count * sizeof(U) + kSlack));
  for (std::uint32_t i = 0; i < changed.count; ++i) {
    const std::uint16_t position = changed.positions[i];
    const std::uint32_t to = next[class_of[scratch.exponents[position]]]++;
    scratch.positions[to] = position;
    store_raw(&scratch.diffs[to * sizeof(U)], load_raw<U>(changed.diffs + std::size_t{i} * sizeof(U)));
  }
}

/// The gaps within the classes. Returns the sum of their quotients.
std::uint64_t measure_gaps(const Kernels& kernels, const TileShape& shape, const ClassHeader& header,
                           const std::array<ExponentRange, kClassesMax>& ranges, ClassEncodeScratch& scratch) {
  const std::uint32_t words = (shape.elements() + 63) / 64;
  std::uint64_t quotient_sum = 0;
  std::uint32_t at = 0;
  for (unsigned c = 0; c < header.classes; ++c) {
    if (header.changed[c] == 0) continue;
    // What stands behind the tile's elements is behind every position.
    kernels.classes.mask(scratch.exponents.data(), words, ranges[c], scratch.mask.data());
    std::uint16_t* const gaps = &scratch.gaps[at];
    kernels.classes.gaps(scratch.mask.data(), &scratch.positions[at], header.changed[c], gaps);
    quotient_sum += kernels.quotient_sum(gaps, header.changed[c], header.k[c]);
    at += header.changed[c];
  }
  return quotient_sum;
}

/// The differences in the order of the classes.
template <class U>
class Differences {
 public:
  explicit Differences(const ClassEncodeScratch& scratch) : diffs_(scratch.diffs.data()) {}
  std::uint64_t magnitude_of(std::uint32_t i) const {
    return magnitude(load_raw<U>(diffs_ + std::size_t{i} * sizeof(U)));
  }

 private:
  const std::byte* diffs_;
};

/// The Rice parameter of the gaps between the exceptions.
unsigned exception_k(const ClassHeader& header, const std::uint16_t* exceptions) {
  if (header.exceptions == 0) return 0;
  // Among the changes up to the last one: the classes of large exponents, which come last, hardly have any.
  return rice_k_for(exceptions[header.exceptions - 1] + 1U, header.exceptions);
}

/// Calls fn(gap, magnitude) for each exception.
template <class U, class Fn>
void for_each_exception(const Differences<U>& differences, const ClassHeader& header, const std::uint16_t* exceptions,
                        Fn&& fn) {
  std::uint32_t next = 0;
  for (std::uint32_t e = 0; e < header.exceptions; ++e) {
    fn(exceptions[e] - next, differences.magnitude_of(exceptions[e]));
    next = exceptions[e] + 1U;
  }
}

/// Bits behind the header.
template <class U>
std::uint64_t payload_bits(const Differences<U>& differences, const ClassHeader& header, std::uint32_t changed,
                           unsigned k, std::uint64_t quotient_sum, const std::uint16_t* exceptions) {
  std::uint64_t bits = class_bits(header, changed, k).unary + changed + quotient_sum;
  for_each_exception(differences, header, exceptions,
                     [&](std::uint32_t gap, std::uint64_t m) { bits += (gap >> k) + 1 + 2 * log2_floor(m - 1) + 1; });
  return bits;
}

/// Zeros and a stop bit.
void put_unary(BitPacker& out, std::uint64_t zeros) {
  for (; zeros > 32; zeros -= 32) out.put(0, 32);
  out.put(std::uint64_t{1} << zeros, static_cast<unsigned>(zeros) + 1);
}

/// The `bits` low bits of a value, of which there may be more than the packer takes at once.
void put_low(BitPacker& out, std::uint64_t value, unsigned bits) {
  for (; bits > 32; bits -= 32, value >>= 32) out.put(value & 0xFFFFFFFF, 32);
  out.put(value & ((std::uint64_t{1} << bits) - 1), bits);
}

template <class U>
void write_bits(const Differences<U>& differences, const ClassHeader& header, std::uint32_t changed, unsigned k,
                const ClassEncodeScratch& scratch, std::byte* to) {
  BitPacker out(to);
  const std::uint16_t* gap = scratch.gaps.data();
  for (unsigned c = 0; c < header.classes; ++c) {
    for (std::uint32_t i = 0; i < header.changed[c]; ++i) put_low(out, *gap++, header.k[c]);
  }
  for (std::uint32_t i = 0; i < changed; i += 32) {
    put_low(out, load_raw<std::uint32_t>(&scratch.signs[i / 8]), std::min(changed - i, 32U));
  }
  const std::uint16_t* const exceptions = scratch.exceptions.data();
  for_each_exception(differences, header, exceptions, [&](std::uint32_t g, std::uint64_t) { put_low(out, g, k); });

  gap = scratch.gaps.data();
  for (unsigned c = 0; c < header.classes; ++c) {
    for (std::uint32_t i = 0; i < header.changed[c]; ++i) put_unary(out, std::uint64_t{*gap++} >> header.k[c]);
  }
  for_each_exception(differences, header, exceptions, [&](std::uint32_t g, std::uint64_t) { put_unary(out, g >> k); });
  for_each_exception(differences, header, exceptions,
                     [&](std::uint32_t, std::uint64_t m) { put_unary(out, log2_floor(m - 1)); });
  for_each_exception(differences, header, exceptions,
                     [&](std::uint32_t, std::uint64_t m) { put_low(out, m - 1, log2_floor(m - 1)); });
}

template <class U>
bool encode(const Kernels& kernels, const TileShape& shape, const ChangedElements& changed, std::uint32_t base,
            std::size_t limit, ClassEncodeScratch& scratch, TileRecord& record, std::vector<std::byte>& out) {
  ExponentCounts counts;
  count_exponents(kernels.classes, shape, changed, scratch.exponents.data(), counts);
  ClassHeader header = choose_classes(counts, base);
  const auto ranges = class_ranges(header, base);
  order_by_class<U>(header, ranges, changed, scratch);
  const std::uint64_t quotient_sum = measure_gaps(kernels, shape, header, ranges, scratch);
  std::uint16_t* const exceptions = scratch.exceptions.data();
  const auto split_signs = kernels.split_signs[shape.width_log2()];
  header.exceptions = split_signs(scratch.diffs.data(), changed.count, scratch.signs.data(), exceptions).exceptions;
  const unsigned k = exception_k(header, exceptions);
  const Differences<U> differences(scratch);
  scratch.header.clear();
  write_class_header(header, scratch.header);
  const std::uint64_t bits = payload_bits(differences, header, changed.count, k, quotient_sum, exceptions);
  const auto size = static_cast<std::size_t>((bits + 7) / 8);

  TileRecord coded = record;
  coded.codec = Codec::rice_class;
  coded.rice_k = static_cast<std::uint8_t>(k);
  coded.changed = changed.count;
  coded.quotient_sum = coded.gamma_bits = 0;
  const std::size_t payload_size = scratch.header.size() + size;
  if (payload_size > shape.raw_bytes() || record_bytes(coded, payload_size) + payload_size >= limit) return false;
  record = coded;
  out.insert(out.end(), scratch.header.begin(), scratch.header.end());
  const std::size_t begin = out.size();
  out.resize(begin + size + kSlack);  // the packer stores whole words
  write_bits(differences, header, changed.count, k, scratch, out.data() + begin);
  out.resize(begin + size);
  return true;
}

}  // namespace

bool encode_class(const Kernels& kernels, const TileShape& shape, const ChangedElements& changed,
                  const std::byte* before, std::size_t row_stride, std::size_t limit, ClassEncodeScratch& scratch,
                  TileRecord& record, std::vector<std::byte>& out) {
  if (!shape.is_float || changed.count == 0) return false;
  const std::uint32_t base = base_of(shape, changed, before, row_stride);
  read_exponents(kernels.classes, shape, before, row_stride, base, scratch.exponents.data());
  switch (shape.element_bytes) {
    case 1: return encode<std::uint8_t>(kernels, shape, changed, base, limit, scratch, record, out);
    case 2: return encode<std::uint16_t>(kernels, shape, changed, base, limit, scratch, record, out);
    case 4: return encode<std::uint32_t>(kernels, shape, changed, base, limit, scratch, record, out);
    default: return encode<std::uint64_t>(kernels, shape, changed, base, limit, scratch, record, out);
  }
}

bool encode_class(const TileShape& shape, const ChangedElements& changed, const std::byte* before,
                  std::size_t row_stride, std::size_t limit, ClassEncodeScratch& scratch, TileRecord& record,
                  std::vector<std::byte>& out) {
  return encode_class(active_kernels(), shape, changed, before, row_stride, limit, scratch, record, out);
}

}  // namespace deltasync::delta
