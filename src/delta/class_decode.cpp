// Decoding must be total: the payload comes from a peer, and the old tile may be any. What makes the loops safe: the
// header has proved its counts against the record's; the reader of the unary bits knows its end; a gap is proved to be
// below the largest tile and an exception to be among the changes before they are stored; and a position only ever
// comes from the masks of the tile's own elements, which end with the tile and share none, whatever the gaps say.
#include "delta/class_codec.hpp"
#include "delta/plane_bits.hpp"

namespace deltasync::delta {

namespace {

struct ClassDecodeScratch {
  std::uint8_t exponents[kTileElementsMax];
  std::uint64_t mask[kTileMaskWords];                           ///< of one class
  std::uint64_t changed[kTileMaskWords];                        ///< of all classes
  std::uint16_t gaps[kTileElementsMax];                         ///< class after class
  std::uint16_t exceptions[kTileElementsMax];                   ///< numbers in `stream`
  std::uint16_t in_class[kTileElementsMax];                     ///< positions in one class, ascending
  std::uint16_t positions[kTileElementsMax];                    ///< ascending
  alignas(64) std::byte signs[kTileElementsMax / 8 + kSlack];   ///< of `stream`
  alignas(64) std::byte stream[kTileElementsMax * 8 + kSlack];  ///< differences, class after class
  alignas(64) std::byte by_element[kTileElementsMax * 8];       ///< differences, where `changed` has a one
  alignas(64) std::byte values[kTileElementsMax * 8];           ///< differences by position
  alignas(64) std::byte payload[kTileElementsMax * 8 + kSlack];
};

ClassDecodeScratch& class_decode_scratch() {
  thread_local const std::unique_ptr<ClassDecodeScratch> scratch(new ClassDecodeScratch);
  return *scratch;
}

/// Follows runs of zeros and their stop bits. Never reads behind its end, and remembers having come there.
class UnaryReader {
 public:
  /// Bits [first, end) of a payload with readable slack behind `end`.
  UnaryReader(const std::byte* payload, std::uint64_t first, std::uint64_t end)
      : payload_(payload), end_(end), base_(first / 8 * 8), next_(first) {
    word_ = load() & ~std::uint64_t{0} << (first - base_);
  }
  /// Zeros before the next stop bit; 0 once the end was reached.
  std::uint64_t next() noexcept {
    while (word_ == 0) {
      if (base_ + 64 >= end_) {
        failed_ = true;
        return 0;
      }
      base_ += 64;
      word_ = load();
    }
    const std::uint64_t bit = base_ + static_cast<unsigned>(__builtin_ctzll(word_));
    word_ &= word_ - 1;
    const std::uint64_t zeros = bit - next_;
    next_ = bit + 1;
    return zeros;
  }
  /// Bit behind the last stop bit.
  std::uint64_t position() const noexcept { return next_; }
  bool failed() const noexcept { return failed_; }

 private:
  std::uint64_t load() const noexcept { return base_ < end_ ? load_raw<std::uint64_t>(payload_ + base_ / 8) : 0; }

  const std::byte* payload_;
  std::uint64_t end_;
  std::uint64_t base_;  ///< first bit of the word
  std::uint64_t next_;
  std::uint64_t word_ = 0;  ///< its bits from next_ on
  bool failed_ = false;
};

/// What stands behind the header of a payload, in scratch memory with readable slack behind it.
struct ClassPayload {
  const ClassHeader& header;
  std::uint32_t changed;
  unsigned exception_k;
  const std::byte* bytes;
  std::uint64_t bits_end;  ///< of the bytes
  ClassBits at;
};

/// The gaps of all classes, one after the other.
const char* decode_gaps(const ClassPayload& payload, UnaryReader& unary, std::uint16_t* gaps) {
  std::uint64_t low_at = 0;
  for (unsigned c = 0; c < payload.header.classes; ++c) {
    const unsigned k = payload.header.k[c];
    for (std::uint32_t i = 0; i < payload.header.changed[c]; ++i, low_at += k) {
      const std::uint64_t gap = unary.next() << k | read_bits(payload.bytes, low_at, k);
      if (gap >= kTileElementsMax) return "a gap is longer than a tile";
      *gaps++ = static_cast<std::uint16_t>(gap);
    }
  }
  return unary.failed() ? "the unary bits end before the gaps" : nullptr;
}

/// Which changes are by more than 1 ulp.
const char* decode_exceptions(const ClassPayload& payload, UnaryReader& unary, std::uint16_t* exceptions) {
  const unsigned k = payload.exception_k;
  std::uint64_t next = 0;  // first change behind the last exception
  std::uint64_t low_at = payload.at.exception_low;
  for (std::uint32_t e = 0; e < payload.header.exceptions; ++e, low_at += k) {
    const std::uint64_t i = next + (unary.next() << k | read_bits(payload.bytes, low_at, k));
    if (i >= payload.changed) return "an exception lies behind the changed elements";
    exceptions[e] = static_cast<std::uint16_t>(i);
    next = i + 1;
  }
  return nullptr;
}

/// The differences of all classes, one after the other. The unary reader stands before the magnitude lengths.
template <class U>
const char* decode_differences(const Kernels& kernels, unsigned width_log2, const ClassPayload& payload,
                               UnaryReader& unary, ClassDecodeScratch& scratch) {
  constexpr unsigned kBits = sizeof(U) * 8;
  const std::uint16_t* const exceptions = scratch.exceptions;
  std::byte* const stream = scratch.stream;
  for (std::uint64_t i = 0; i < payload.changed; i += 32) {
    const std::uint64_t signs = read_bits(payload.bytes, payload.at.signs + i, 32);
    store_raw(scratch.signs + i / 8, static_cast<std::uint32_t>(signs));
  }
  kernels.decode.unit_values[width_log2](scratch.signs, payload.changed, stream);
  // The magnitudes stand behind all of the lengths, which a second reader skips.
  UnaryReader lengths = unary;
  for (std::uint32_t e = 0; e < payload.header.exceptions; ++e) {
    if (unary.next() > kBits - 2) return "a magnitude has more bits than the element";
  }
  if (unary.failed()) return "the unary bits end before the magnitudes";
  std::uint64_t low_at = unary.position();
  for (std::uint32_t e = 0; e < payload.header.exceptions; ++e) {
    const auto length = static_cast<unsigned>(lengths.next());
    if (length > payload.bits_end - low_at) return "truncated magnitudes";
    const std::uint64_t m = (std::uint64_t{1} << length | read_bits(payload.bytes, low_at, length)) + 1;
    low_at += length;
    std::byte* const value = stream + std::size_t{exceptions[e]} * sizeof(U);
    const bool negative = load_raw<U>(value) != 1;
    if (m == std::uint64_t{1} << (kBits - 1) && !negative) return "a magnitude is above half of the element's range";
    store_raw(value, static_cast<U>(negative ? std::uint64_t{0} - m : m));
  }
  if ((low_at + 7) / 8 != payload.bits_end / 8) return "bytes behind its last bit";
  if (!padding_ok(payload.bytes, low_at)) return "bits behind its end";
  return nullptr;
}

/// Marks the elements that change, each with its difference. False if a class has not enough elements.
template <class U>
bool place(const ClassKernels& kernels, const TileShape& shape, const ClassHeader& header,
           ClassDecodeScratch& scratch) {
  const std::uint32_t words = (shape.elements() + 63) / 64;
  const unsigned in_last = shape.elements() % 64;
  const auto ranges = class_ranges(header, exponent_base(shape, header.top));
  std::memset(scratch.exponents + shape.elements(), 0, words * std::size_t{64} - shape.elements());
  std::memset(scratch.changed, 0, words * sizeof(scratch.changed[0]));
  const U* diff = reinterpret_cast<const U*>(scratch.stream);
  U* const by_element = reinterpret_cast<U*>(scratch.by_element);
  const std::uint16_t* gaps = scratch.gaps;
  for (unsigned c = 0; c < header.classes; ++c) {
    const std::uint32_t n = header.changed[c];
    if (n == 0) continue;
    if (ranges[c].low > ranges[c].high) return false;
    kernels.mask(scratch.exponents, words, ranges[c], scratch.mask);
    if (in_last != 0) scratch.mask[words - 1] &= (std::uint64_t{1} << in_last) - 1;
    if (!kernels.select(scratch.mask, words, gaps, n, scratch.in_class)) return false;
    for (std::uint32_t i = 0; i < n; ++i) {
      const std::uint16_t position = scratch.in_class[i];
      scratch.changed[position / 64] |= std::uint64_t{1} << (position % 64);
      by_element[position] = diff[i];
    }
    diff += n;
    gaps += n;
  }
  return true;
}

/// Lists the marked elements in their order.
template <class U>
void list_placed(const TileShape& shape, ClassDecodeScratch& scratch) {
  const U* const by_element = reinterpret_cast<const U*>(scratch.by_element);
  U* value = reinterpret_cast<U*>(scratch.values);
  std::uint16_t* to = scratch.positions;
  for (std::uint32_t w = 0; w < (shape.elements() + 63) / 64; ++w) {
    for (std::uint64_t left = scratch.changed[w]; left != 0; left &= left - 1) {
      const std::uint32_t position = w * 64 + static_cast<unsigned>(__builtin_ctzll(left));
      *to++ = static_cast<std::uint16_t>(position);
      *value++ = by_element[position];
    }
  }
}

}  // namespace

Result<DecodedTile> decode_class(const Kernels& kernels, const TileShape& shape, const TileRecord& record,
                                 const std::byte* first, std::size_t row_stride) {
  const std::uint32_t n = record.changed;
  if (!shape.is_float) return bad_payload("exponent classes in a tensor without exponents");
  if (n == 0 || n > shape.elements() || record.rice_k > kRiceKMax || record.payload.size() > shape.raw_bytes()) {
    return bad_payload("its record breaks a bound");
  }
  ByteSpan rest = record.payload;
  DS_ASSIGN(const ClassHeader header, read_class_header(shape, n, rest));
  if (header.exceptions == 0 && record.rice_k != 0) return bad_payload("a Rice parameter without exceptions");

  ClassDecodeScratch& scratch = class_decode_scratch();
  // A copy with readable slack behind it lets all of it be read in whole words.
  std::memcpy(scratch.payload, rest.data(), rest.size());
  std::memset(scratch.payload + rest.size(), 0, kSlack);
  const ClassPayload payload{
      header, n, record.rice_k, scratch.payload, rest.size() * 8, class_bits(header, n, record.rice_k)};
  if (payload.at.unary > payload.bits_end) return bad_payload("truncated before its unary bits");
  UnaryReader unary(payload.bytes, payload.at.unary, payload.bits_end);
  const char* wrong = decode_gaps(payload, unary, scratch.gaps);
  if (wrong == nullptr) wrong = decode_exceptions(payload, unary, scratch.exceptions);
  if (wrong != nullptr) return bad_payload(wrong);

  bool placed = false;
  const auto decode = [&]<class U>(U) {
    wrong = decode_differences<U>(kernels, shape.width_log2(), payload, unary, scratch);
    if (wrong != nullptr) return;
    read_exponents(kernels.classes, shape, first, row_stride, exponent_base(shape, header.top), scratch.exponents);
    placed = place<U>(kernels.classes, shape, header, scratch);
    if (placed) list_placed<U>(shape, scratch);
  };
  switch (shape.element_bytes) {
    case 1: decode(std::uint8_t{}); break;
    case 2: decode(std::uint16_t{}); break;
    case 4: decode(std::uint32_t{}); break;
    default: decode(std::uint64_t{});
  }
  if (wrong != nullptr) return bad_payload(wrong);
  if (!placed) return bad_payload("a position is behind the last element of its class");
  return DecodedTile{scratch.positions, scratch.values, n};
}

}  // namespace deltasync::delta
