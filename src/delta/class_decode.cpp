// Decoding must be total: the payload comes from a peer, and the old tile may be any. What makes the loops safe: the
// header has proved its counts against the record's; the reader of the unary bits knows its end; a gap is proved to be
// below the largest tile and an exception to be among the changes before they are stored; and a position only ever
// comes from the walk over the tile's own elements, which ends with the tile, whatever the gaps say.
#include <limits>

#include "delta/class_codec.hpp"
#include "delta/plane_bits.hpp"

namespace deltasync::delta {

namespace {

struct DecodeScratch {
  std::uint16_t exponents[kTileElementsMax];
  std::uint16_t gaps[kTileElementsMax];                ///< class after class
  std::uint16_t exceptions[kTileElementsMax];          ///< numbers in `stream`
  std::uint16_t positions[kTileElementsMax];           ///< ascending
  alignas(64) std::byte stream[kTileElementsMax * 8];  ///< differences, class after class
  alignas(64) std::byte values[kTileElementsMax * 8];  ///< differences by position
  alignas(64) std::byte payload[kTileElementsMax * 8 + kSlack];
};

DecodeScratch& decode_scratch() {
  thread_local const std::unique_ptr<DecodeScratch> scratch(new DecodeScratch);
  return *scratch;
}

Error bad_payload(const char* what) {
  return {Errc::corrupt, std::string("payload: ") + what};
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
const char* decode_differences(const ClassPayload& payload, UnaryReader& unary, const std::uint16_t* exceptions,
                               std::byte* stream) {
  constexpr unsigned kBits = sizeof(U) * 8;
  for (std::uint64_t i = 0; i < payload.changed; ++i) {
    const std::uint64_t negative = read_bits(payload.bytes, payload.at.signs + i, 1);
    store_raw(stream + i * sizeof(U), static_cast<U>(U{1} - U{2} * static_cast<U>(negative)));
  }
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

/// Walks over the tile's elements and writes down where each class's next change is, in the order of the elements.
/// Returns how many there were.
template <class U>
std::uint32_t place(const TileShape& shape, const ClassHeader& header, DecodeScratch& scratch) {
  constexpr std::uint32_t kNever = std::numeric_limits<std::uint32_t>::max();  // more than a tile has elements
  const ClassMap map(header, exponent_count(shape));
  std::uint32_t until[kClassesMax + 1];  // elements of each class that come before its next change
  std::uint32_t next[kClassesMax + 1] = {};
  std::uint32_t end[kClassesMax + 1] = {};
  std::uint32_t at = 0;
  until[ClassMap::kNoClass] = kNever;
  for (unsigned c = 0; c < header.classes; ++c) {
    next[c] = at;
    end[c] = at += header.changed[c];
    until[c] = next[c] < end[c] ? scratch.gaps[next[c]] : kNever;
  }
  const U* const stream = reinterpret_cast<const U*>(scratch.stream);
  U* const values = reinterpret_cast<U*>(scratch.values);
  std::uint32_t placed = 0;
  for (std::uint32_t position = 0; position < shape.elements(); ++position) {
    const unsigned c = map[scratch.exponents[position]];
    if (until[c]-- != 0) continue;
    scratch.positions[placed] = static_cast<std::uint16_t>(position);
    values[placed++] = stream[next[c]++];
    until[c] = next[c] < end[c] ? scratch.gaps[next[c]] : kNever;
  }
  return placed;
}

}  // namespace

Result<DecodedTile> decode_class(const TileShape& shape, const TileRecord& record, const std::byte* first,
                                 std::size_t row_stride) {
  const std::uint32_t n = record.changed;
  if (!shape.is_float) return bad_payload("exponent classes in a tensor without exponents");
  if (n == 0 || n > shape.elements() || record.rice_k > kClassRiceKMax || record.payload.size() > shape.raw_bytes()) {
    return bad_payload("its record breaks a bound");
  }
  ByteSpan rest = record.payload;
  DS_ASSIGN(const ClassHeader header, read_class_header(shape, n, rest));
  if (header.exceptions == 0 && record.rice_k != 0) return bad_payload("a Rice parameter without exceptions");

  DecodeScratch& scratch = decode_scratch();
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

  const auto decode = [&]<class U>(U) {
    wrong = decode_differences<U>(payload, unary, scratch.exceptions, scratch.stream);
    if (wrong != nullptr) return std::uint32_t{0};
    read_exponents(shape, first, row_stride, scratch.exponents);
    return place<U>(shape, header, scratch);
  };
  std::uint32_t placed = 0;
  switch (shape.element_bytes) {
    case 1: placed = decode(std::uint8_t{}); break;
    case 2: placed = decode(std::uint16_t{}); break;
    case 4: placed = decode(std::uint32_t{}); break;
    default: placed = decode(std::uint64_t{});
  }
  if (wrong != nullptr) return bad_payload(wrong);
  if (placed != n) return bad_payload("a position is behind the last element of its class");
  return DecodedTile{scratch.positions, scratch.values, n};
}

}  // namespace deltasync::delta
