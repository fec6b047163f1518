#include "delta/class_codec.hpp"

namespace deltasync::delta {

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
      return bad_payload("a Rice parameter behind the last class");
    }
  }
  std::uint64_t left = changed;
  for (unsigned c = 1; c < header.classes; ++c) {
    const std::uint64_t count = in.get_varint();
    if (count > left) return bad_payload("its classes have more changed elements than the record");
    header.changed[c] = static_cast<std::uint32_t>(count);
    left -= count;
  }
  header.changed[0] = static_cast<std::uint32_t>(left);
  const std::uint64_t exceptions = in.get_varint();
  if (in.failed()) return bad_payload("truncated class header");
  if (header.classes == 0) return bad_payload("no classes");
  if (first >> 6 != 0) return bad_payload("reserved bits of the class header are set");
  if (top >= exponent_count(shape)) return bad_payload("its largest exponent is none of the dtype");
  if (exceptions > changed) return bad_payload("more exceptions than changed elements");
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

std::array<ExponentRange, kClassesMax> class_ranges(const ClassHeader& header, std::uint32_t base) noexcept {
  std::array<ExponentRange, kClassesMax> ranges;
  const std::uint32_t top = header.top - base;
  for (unsigned c = 0; c < header.classes; ++c) {
    const std::uint32_t above = (header.classes - 1 - c) << header.shift;  // exponents of the classes above
    if (above > top) {
      ranges[c] = {1, 0};
      continue;
    }
    const std::uint32_t high = top - above;
    const std::uint32_t width = 1u << header.shift;
    ranges[c].high = static_cast<std::uint8_t>(high);
    ranges[c].low = static_cast<std::uint8_t>(c == 0 || high < width ? 0 : high + 1 - width);
  }
  return ranges;
}

void read_exponents(const ClassKernels& kernels, const TileShape& shape, const std::byte* first, std::size_t row_stride,
                    std::uint32_t base, std::uint8_t* out) {
  const auto read = kernels.exponents[shape.width_log2()];
  if (row_stride == shape.row_bytes()) {
    read(first, shape.elements(), shape.mantissa_bits, base, out);
    return;
  }
  for (std::uint32_t r = 0; r < shape.rows; ++r, first += row_stride, out += shape.cols) {
    read(first, shape.cols, shape.mantissa_bits, base, out);
  }
}

}  // namespace deltasync::delta
