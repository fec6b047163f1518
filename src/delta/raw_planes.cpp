#include "delta/raw_planes.hpp"

#include <zstd.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>

#include "delta/mix.hpp"

namespace deltasync::delta {

namespace {

constexpr std::size_t kPlanesMax = 8;

struct FreeContext {
  void operator()(ZSTD_CCtx* context) const { ::ZSTD_freeCCtx(context); }
  void operator()(ZSTD_DCtx* context) const { ::ZSTD_freeDCtx(context); }
};

// ---- elements and planes -----------------------------------------------------------------------------------------

/// The sign goes below the exponent, which so begins a byte. No mantissa: no sign of a float, and nothing moves.
template <class U, unsigned kMantissa>
constexpr U without_sign_on_top(U x) noexcept {
  if constexpr (kMantissa == 0) return x;
  constexpr U kLow = static_cast<U>((U{1} << kMantissa) - 1);
  constexpr unsigned kSign = sizeof(U) * 8 - 1;
  const U exponent = static_cast<U>(static_cast<U>(x << 1) & static_cast<U>(~U{0} << (kMantissa + 1)));
  return static_cast<U>(exponent | static_cast<U>(x >> kSign) << kMantissa | (x & kLow));
}
template <class U, unsigned kMantissa>
constexpr U with_sign_on_top(U y) noexcept {
  if constexpr (kMantissa == 0) return y;
  constexpr U kLow = static_cast<U>((U{1} << kMantissa) - 1);
  constexpr unsigned kSign = sizeof(U) * 8 - 1;
  const U exponent = static_cast<U>(static_cast<U>(y >> 1) & static_cast<U>(~U{0} << kMantissa));
  return static_cast<U>((exponent & static_cast<U>(~U{0} >> 1)) | static_cast<U>((y >> kMantissa & 1) << kSign) |
                        (y & kLow));
}
static_assert(without_sign_on_top<std::uint16_t, 7>(0xBF81) == 0x7F81);  // −1.0078: exponent 127, sign 1, mantissa 1
static_assert(with_sign_on_top<std::uint16_t, 7>(0x7F81) == 0xBF81);

template <class U, unsigned kMantissa>
void split(const std::byte* __restrict raw, std::uint32_t n, std::byte* __restrict planes) {
  // Plane after plane, so that each loop has one output and becomes vector code.
  for (unsigned p = 0; p < sizeof(U); ++p) {
    std::byte* __restrict const plane = planes + std::size_t{p} * n;
    for (std::uint32_t i = 0; i < n; ++i) {
      const U x = without_sign_on_top<U, kMantissa>(load_raw<U>(raw + std::size_t{i} * sizeof(U)));
      plane[i] = static_cast<std::byte>(x >> (8 * p));
    }
  }
}
template <class U, unsigned kMantissa>
void join(const std::byte* const* planes, std::uint32_t n, std::byte* __restrict raw) {
  const std::byte* from[sizeof(U)];  // of its own: nothing that is written can be one of these pointers
  for (unsigned p = 0; p < sizeof(U); ++p) from[p] = planes[p];
  for (std::uint32_t i = 0; i < n; ++i) {
    U y = 0;
    for (unsigned p = 0; p < sizeof(U); ++p) {
      y = static_cast<U>(y | static_cast<U>(static_cast<U>(std::to_integer<std::uint8_t>(from[p][i])) << (8 * p)));
    }
    store_raw(raw + std::size_t{i} * sizeof(U), with_sign_on_top<U, kMantissa>(y));
  }
}

/// Calls fn.operator()<U, mantissa bits>(), 0 of them where nothing moves: in integers, and in elements of one byte.
template <class Fn>
void with_planes(const TileShape& shape, Fn&& fn) {
  switch (shape.element_bytes) {
    case 1: fn.template operator()<std::uint8_t, 0>(); return;
    case 2:
      if (!shape.is_float) return fn.template operator()<std::uint16_t, 0>();
      if (shape.mantissa_bits == 7) return fn.template operator()<std::uint16_t, 7>();
      return fn.template operator()<std::uint16_t, 10>();
    case 4:
      if (!shape.is_float) return fn.template operator()<std::uint32_t, 0>();
      return fn.template operator()<std::uint32_t, 23>();
    default:
      if (!shape.is_float) return fn.template operator()<std::uint64_t, 0>();
      return fn.template operator()<std::uint64_t, 52>();
  }
}

// ---- packing -----------------------------------------------------------------------------------------------------

/// What there is to gain is in how often each byte comes. Matches hardly exist: those that level 1 finds by chance make
/// the plane of exponents longer (37.5% against 33.1% of a bf16 model) and take twice the time. A tiny table of long
/// matches finds runs, and little else.
std::unique_ptr<ZSTD_CCtx, FreeContext> make_packer() {
  std::unique_ptr<ZSTD_CCtx, FreeContext> context(::ZSTD_createCCtx());
  if (context == nullptr) return context;
  const std::pair<ZSTD_cParameter, int> parameters[] = {
      {ZSTD_c_compressionLevel, 1}, {ZSTD_c_strategy, ZSTD_fast}, {ZSTD_c_windowLog, 16},  {ZSTD_c_hashLog, 6},
      {ZSTD_c_minMatch, 7},         {ZSTD_c_contentSizeFlag, 0},  {ZSTD_c_checksumFlag, 0}};
  for (const auto& [parameter, value] : parameters) {
    if (::ZSTD_isError(::ZSTD_CCtx_setParameter(context.get(), parameter, value)) != 0) return nullptr;
  }
  return context;
}

struct Packer {
  std::unique_ptr<ZSTD_CCtx, FreeContext> context = make_packer();
  std::vector<std::byte> planes;
  std::vector<std::byte> packed;
};

Packer& packer() {
  thread_local const std::unique_ptr<Packer> packer(new Packer);
  return *packer;
}

// ---- unpacking ---------------------------------------------------------------------------------------------------

struct Unpacker {
  std::unique_ptr<ZSTD_DCtx, FreeContext> context{::ZSTD_createDCtx()};
  std::unique_ptr<std::byte[]> planes{new std::byte[std::size_t{kTileElementsMax} * kPlanesMax]};
  std::unique_ptr<std::byte[]> raw{new std::byte[std::size_t{kTileElementsMax} * kPlanesMax]};
};

Unpacker& unpacker() {
  thread_local const std::unique_ptr<Unpacker> unpacker(new Unpacker);
  return *unpacker;
}

/// Exactly one zstd frame of exactly `n` bytes. Returns what is wrong, or nullptr.
const char* unpack_plane(ZSTD_DCtx* context, ByteSpan packed, std::byte* plane, std::uint32_t n) {
  // The library may know formats that are older than the one of RFC 8878, and frames to be skipped.
  if (packed.size() < 4 || load<std::uint32_t>(packed.data()) != ZSTD_MAGICNUMBER) return "a plane is no zstd frame";
  if (::ZSTD_findFrameCompressedSize(packed.data(), packed.size()) != packed.size()) {
    return "a plane does not end with its zstd frame";
  }
  const std::size_t unpacked = ::ZSTD_decompressDCtx(context, plane, n, packed.data(), packed.size());
  if (::ZSTD_isError(unpacked) != 0) return "a plane does not decompress to its size";
  return unpacked == n ? nullptr : "a plane decompresses to fewer bytes than the tile has elements";
}

struct PlaneList {
  std::array<bool, kPlanesMax> packed{};
  std::array<std::size_t, kPlanesMax> bytes{};
};

/// Reads the header and takes it off the payload. What it lists is all of the rest then.
Result<PlaneList> read_planes_header(const TileShape& shape, ByteSpan& payload) {
  const std::uint32_t n = shape.elements();
  ByteReader in(payload);
  PlaneList list;
  const unsigned forms = in.get<std::uint8_t>();
  std::uint64_t total = 0;
  for (unsigned p = 0; p < shape.element_bytes; ++p) {
    list.packed[p] = (forms >> p & 1) != 0;
    const std::uint64_t bytes = list.packed[p] ? in.get_varint() : n;
    if (list.packed[p] && bytes >= n && !in.failed()) return bad_payload("a packed plane is no smaller than it was");
    list.bytes[p] = static_cast<std::size_t>(bytes);
    total += bytes;
  }
  if (in.failed()) return bad_payload("truncated header of the planes");
  if (forms >> shape.element_bytes != 0) return bad_payload("more planes than an element has bytes");
  payload = payload.subspan(in.position());
  if (total != payload.size()) return bad_payload("the planes are not as long as the payload");
  return list;
}

Result<ByteSpan> decode_planes(const TileShape& shape, const TileRecord& record) {
  Unpacker& memory = unpacker();
  if (memory.context == nullptr) return Error(Errc::no_space, "unpacking a tile: out of memory");
  const std::uint32_t n = shape.elements();
  if (n == 0 || n > kTileElementsMax || shape.element_bytes > kPlanesMax) return bad_payload("the tile has no size");
  ByteSpan rest = record.payload;
  DS_ASSIGN(const PlaneList list, read_planes_header(shape, rest));
  std::array<const std::byte*, kPlanesMax> planes{};
  for (unsigned p = 0; p < shape.element_bytes; ++p) {
    const ByteSpan bytes = rest.first(list.bytes[p]);
    rest = rest.subspan(list.bytes[p]);
    planes[p] = bytes.data();
    if (!list.packed[p]) continue;
    std::byte* const plane = memory.planes.get() + std::size_t{p} * kTileElementsMax;
    if (const char* wrong = unpack_plane(memory.context.get(), bytes, plane, n)) return bad_payload(wrong);
    planes[p] = plane;
  }
  with_planes(shape, [&]<class U, unsigned kMantissa>() { join<U, kMantissa>(planes.data(), n, memory.raw.get()); });
  return ByteSpan(memory.raw.get(), shape.raw_bytes());
}

}  // namespace

bool encode_planes(const TileShape& shape, ByteSpan raw, TileRecord& record, std::vector<std::byte>& out) {
  Packer& memory = packer();
  const std::uint32_t n = shape.elements();
  if (memory.context == nullptr || n == 0) return false;
  memory.planes.resize(raw.size());
  memory.packed.resize(::ZSTD_compressBound(n));
  with_planes(shape, [&]<class U, unsigned kMantissa>() { split<U, kMantissa>(raw.data(), n, memory.planes.data()); });

  const std::size_t begin = out.size();
  std::vector<std::byte> header;
  ByteWriter sizes(header);
  unsigned forms = 0;
  sizes.put<std::uint8_t>(0);
  for (unsigned p = 0; p < shape.element_bytes; ++p) {
    const std::byte* const plane = memory.planes.data() + std::size_t{p} * n;
    const std::size_t bytes =
        ::ZSTD_compress2(memory.context.get(), memory.packed.data(), memory.packed.size(), plane, n);
    // Few bytes less are not worth the other side's work.
    const bool smaller = ::ZSTD_isError(bytes) == 0 && bytes + n / 64 + 4 < n;
    const std::byte* const from = smaller ? memory.packed.data() : plane;
    out.insert(out.end(), from, from + (smaller ? bytes : n));
    if (!smaller) continue;
    forms |= 1U << p;
    sizes.put_varint(bytes);
  }
  header.front() = static_cast<std::byte>(forms);
  if (out.size() - begin + header.size() >= raw.size()) {
    out.resize(begin);
    return false;
  }
  out.insert(out.begin() + static_cast<std::ptrdiff_t>(begin), header.begin(), header.end());
  record.codec = Codec::raw_planes;
  record.rice_k = 0;
  record.changed = n;
  record.quotient_sum = 0;
  record.gamma_bits = 0;
  return true;
}

Result<ByteSpan> whole_tile_bytes(const TileShape& shape, const TileRecord& record) {
  if (record.codec == Codec::raw_planes) return decode_planes(shape, record);
  if (record.payload.size() != shape.raw_bytes()) return bad_payload("not the raw tile's size");
  return record.payload;
}

}  // namespace deltasync::delta
