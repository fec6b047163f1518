#include "delta/class_codec.hpp"

#include <cstring>
#include <string>

#include "delta/mix.hpp"

namespace deltasync::delta {

namespace {

Error bad_header(const char* what) {
  return {Errc::corrupt, std::string("payload: ") + what};
}

template <class U>
void read_exponents_of(const TileShape& shape, const std::byte* first, std::size_t row_stride, std::uint16_t* out) {
  constexpr U kMagnitude = static_cast<U>(~U{0}) >> 1;
  const unsigned mantissa = shape.mantissa_bits;
  for (std::uint32_t r = 0; r < shape.rows; ++r, first += row_stride, out += shape.cols) {
    for (std::uint32_t c = 0; c < shape.cols; ++c) {
      const U x = load_raw<U>(first + std::size_t{c} * sizeof(U));
      out[c] = static_cast<std::uint16_t>(static_cast<U>(x & kMagnitude) >> mantissa);
    }
  }
}

}  // namespace

void write_class_header(const ClassHeader& header, std::vector<std::byte>& out) {
  ByteWriter w(out);
  w.put<std::uint8_t>(static_cast<std::uint8_t>(header.classes | header.shift << 4));
  w.put_varint(header.top);
  for (unsigned c = 0; c < header.classes; c += 2) {
    const unsigned high = c + 1 < header.classes ? header.k[c + 1] : 0U;
    w.put<std::uint8_t>(static_cast<std::uint8_t>(header.k[c] | high << 4));
  }
  for (unsigned c = 1; c < header.classes; ++c) w.put_varint(header.changed[c]);
  w.put_varint(header.exceptions);
}

Result<ClassHeader> read_class_header(const TileShape& shape, std::uint32_t changed, ByteSpan& payload) {
  ByteReader in(payload);
  ClassHeader header;
  const unsigned first = in.get<std::uint8_t>();
  header.classes = first & 15;
  header.shift = first >> 4 & kClassShiftMax;
  const std::uint64_t top = in.get_varint();
  for (unsigned c = 0; c < header.classes; c += 2) {
    const unsigned both = in.get<std::uint8_t>();
    header.k[c] = both & 15;
    if (c + 1 < header.classes) {
      header.k[c + 1] = static_cast<std::uint8_t>(both >> 4);
    } else if (both >> 4 != 0) {
      return bad_header("a Rice parameter behind the last class");
    }
  }
  std::uint64_t left = changed;
  for (unsigned c = 1; c < header.classes; ++c) {
    const std::uint64_t count = in.get_varint();
    if (count > left) return bad_header("its classes have more changed elements than the record");
    header.changed[c] = static_cast<std::uint32_t>(count);
    left -= count;
  }
  header.changed[0] = static_cast<std::uint32_t>(left);
  const std::uint64_t exceptions = in.get_varint();
  if (in.failed()) return bad_header("truncated class header");
  if (header.classes == 0) return bad_header("no classes");
  if (first >> 6 != 0) return bad_header("reserved bits of the class header are set");
  if (top >= exponent_count(shape)) return bad_header("its largest exponent is none of the dtype");
  if (exceptions > changed) return bad_header("more exceptions than changed elements");
  header.top = static_cast<std::uint32_t>(top);
  header.exceptions = static_cast<std::uint32_t>(exceptions);
  payload = payload.subspan(in.position());
  return header;
}

ClassBits class_bits(const ClassHeader& header, std::uint32_t changed, unsigned rice_k) noexcept {
  ClassBits bits;
  for (unsigned c = 0; c < header.classes; ++c) bits.signs += std::uint64_t{header.changed[c]} * header.k[c];
  bits.exception_low = bits.signs + changed;
  bits.unary = bits.exception_low + std::uint64_t{header.exceptions} * rice_k;
  return bits;
}

ClassMap::ClassMap(const ClassHeader& header, std::uint32_t exponents) {
  for (std::uint32_t e = 0; e < exponents; ++e) {
    if (e > header.top) {
      of_[e] = kNoClass;
      continue;
    }
    const std::uint32_t below_top = (header.top - e) >> header.shift;
    of_[e] = static_cast<std::uint8_t>(below_top < header.classes ? header.classes - 1 - below_top : 0);
  }
}

void read_exponents(const TileShape& shape, const std::byte* first, std::size_t row_stride, std::uint16_t* out) {
  switch (shape.element_bytes) {
    case 1: read_exponents_of<std::uint8_t>(shape, first, row_stride, out); break;
    case 2: read_exponents_of<std::uint16_t>(shape, first, row_stride, out); break;
    case 4: read_exponents_of<std::uint32_t>(shape, first, row_stride, out); break;
    default: read_exponents_of<std::uint64_t>(shape, first, row_stride, out);
  }
}

}  // namespace deltasync::delta
