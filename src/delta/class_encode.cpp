#include <algorithm>
#include <cassert>
#include <cstring>

#include "delta/class_codec.hpp"
#include "delta/frame.hpp"
#include "delta/kernel_scalar.hpp"

namespace deltasync::delta {

namespace {

/// The Rice parameter for c changes among n elements that are independent and alike: the smallest k with
/// 2^k × c/n ≥ 0.481, which is −ln of the golden ratio's inverse (Gallager and van Voorhis, "Optimal source codes for
/// geometrically distributed integer alphabets", 1975, for small c/n).
unsigned rice_k_for(std::uint64_t n, std::uint64_t c) {
  unsigned k = 0;
  while (k < kClassRiceKMax && (c << k) * 1000 < n * 481) ++k;
  return k;
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

/// How many elements, and how many changed ones, have an exponent below a given one.
struct ExponentCounts {
  std::uint32_t elements_below[kExponentsMax + 1];
  std::uint32_t changed_below[kExponentsMax + 1];
  std::uint32_t lowest = 0;  ///< of a changed element
  std::uint32_t top = 0;     ///< of a changed element
};

void count_exponents(const TileShape& shape, const ChangedElements& changed, const std::uint16_t* exponents,
                     ExponentCounts& counts) {
  const std::uint32_t end = exponent_count(shape);
  std::memset(counts.elements_below, 0, sizeof(counts.elements_below[0]) * (end + 1));
  std::memset(counts.changed_below, 0, sizeof(counts.changed_below[0]) * (end + 1));
  for (std::uint32_t i = 0; i < shape.elements(); ++i) ++counts.elements_below[exponents[i] + 1];
  for (std::uint32_t i = 0; i < changed.count; ++i) ++counts.changed_below[exponents[changed.positions[i]] + 1];
  counts.lowest = end;
  for (std::uint32_t e = 0; e < end; ++e) {
    if (counts.changed_below[e + 1] != 0) {
      counts.lowest = std::min(counts.lowest, e);
      counts.top = e;
    }
    counts.elements_below[e + 1] += counts.elements_below[e];
    counts.changed_below[e + 1] += counts.changed_below[e];
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
ClassHeader choose_classes(const ExponentCounts& counts) {
  constexpr std::uint64_t kHeaderBitsOfClass = 12;  // k, and mostly one byte of count
  std::uint64_t best_bits = ~std::uint64_t{0};
  ClassHeader header;
  header.top = counts.top;
  for (unsigned shift = 0; shift <= kClassShiftMax; ++shift) {
    for (unsigned classes = shift == 0 ? 1 : 2; classes <= kClassesMax; ++classes) {
      if ((counts.top - counts.lowest) >> shift < classes - 1) break;  // the lowest class would be empty
      std::uint64_t bits = classes * kHeaderBitsOfClass;
      for_each_class(counts, classes, shift,
                     [&](unsigned, std::uint32_t n, std::uint32_t c) { bits += estimated_bits(n, c); });
      if (bits >= best_bits) continue;
      best_bits = bits;
      header.classes = classes;
      header.shift = shift;
    }
  }
  for_each_class(counts, header.classes, header.shift, [&](unsigned c, std::uint32_t n, std::uint32_t changed) {
    header.k[c] = static_cast<std::uint8_t>(changed == 0 ? 0 : rice_k_for(n, changed));
    header.changed[c] = changed;
  });
  return header;
}

/// Sorts the changes by class, each with the number of elements of its class since the one before.
std::uint32_t order_by_class(const ClassHeader& header, std::uint32_t exponents, const ChangedElements& changed,
                             ClassEncodeScratch& scratch) {
  const ClassMap map(header, exponents);
  std::uint32_t next[kClassesMax + 1] = {};
  std::uint32_t since[kClassesMax + 1] = {};
  for (unsigned c = 1; c < header.classes; ++c) next[c] = next[c - 1] + header.changed[c - 1];
  std::uint32_t quotient_sum = 0;
  std::uint32_t position = 0;
  for (std::uint32_t i = 0; i < changed.count; ++i, ++position) {
    for (; position < changed.positions[i]; ++position) ++since[map[scratch.exponents[position]]];
    const unsigned c = map[scratch.exponents[position]];
    scratch.gaps[next[c]] = static_cast<std::uint16_t>(since[c]);
    scratch.order[next[c]++] = static_cast<std::uint16_t>(i);
    quotient_sum += since[c] >> header.k[c];
    since[c] = 0;
  }
  return quotient_sum;
}

/// The differences in the order of the classes.
template <class U>
class Differences {
 public:
  Differences(const ChangedElements& changed, const ClassEncodeScratch& scratch)
      : diffs_(changed.diffs), order_(scratch.order.data()) {}
  std::uint64_t magnitude_of(std::uint32_t i) const { return magnitude(at(i)); }
  bool negative(std::uint32_t i) const { return at(i) >> (sizeof(U) * 8 - 1) != 0; }

 private:
  U at(std::uint32_t i) const { return load_raw<U>(diffs_ + std::size_t{order_[i]} * sizeof(U)); }
  const std::byte* diffs_;
  const std::uint16_t* order_;
};

/// Lists the changes by more than 1 ulp. Returns the Rice parameter of the gaps between them.
template <class U>
unsigned find_exceptions(const Differences<U>& differences, std::uint32_t count, ClassHeader& header,
                         std::uint16_t* exceptions) {
  for (std::uint32_t i = 0; i < count; ++i) {
    if (differences.magnitude_of(i) != 1) exceptions[header.exceptions++] = static_cast<std::uint16_t>(i);
  }
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
                           unsigned k, std::uint32_t quotient_sum, const std::uint16_t* exceptions) {
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
  for (std::uint32_t i = 0; i < changed; ++i) out.put(differences.negative(i) ? 1 : 0, 1);
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
bool encode(const TileShape& shape, const ChangedElements& changed, std::size_t limit, ClassEncodeScratch& scratch,
            TileRecord& record, std::vector<std::byte>& out) {
  ExponentCounts counts;
  count_exponents(shape, changed, scratch.exponents.data(), counts);
  ClassHeader header = choose_classes(counts);
  const std::uint32_t quotient_sum = order_by_class(header, exponent_count(shape), changed, scratch);
  const Differences<U> differences(changed, scratch);
  std::uint16_t* const exceptions = scratch.exceptions.data();
  const unsigned k = find_exceptions(differences, changed.count, header, exceptions);
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

bool encode_class(const TileShape& shape, const ChangedElements& changed, const std::byte* before,
                  std::size_t row_stride, std::size_t limit, ClassEncodeScratch& scratch, TileRecord& record,
                  std::vector<std::byte>& out) {
  if (!shape.is_float || changed.count == 0) return false;
  read_exponents(shape, before, row_stride, scratch.exponents.data());
  switch (shape.element_bytes) {
    case 1: return encode<std::uint8_t>(shape, changed, limit, scratch, record, out);
    case 2: return encode<std::uint16_t>(shape, changed, limit, scratch, record, out);
    case 4: return encode<std::uint32_t>(shape, changed, limit, scratch, record, out);
    default: return encode<std::uint64_t>(shape, changed, limit, scratch, record, out);
  }
}

}  // namespace deltasync::delta
