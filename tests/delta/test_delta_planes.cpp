// raw_planes: every dtype, awkward shapes, all contents, every path; and payloads that break one bound each.
#include <gmock/gmock-matchers.h>
#include <zstd.h>

#include <numeric>

#include "base/hash.hpp"
#include "delta/frame.hpp"
#include "delta/raw_planes.hpp"
#include "delta_test_util.hpp"

namespace deltasync::delta::test {
namespace {

using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;

constexpr Dtype kAll[] = {Dtype::f64, Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::f8_e4m3, Dtype::f8_e5m2,
                          Dtype::i64, Dtype::i32, Dtype::i16, Dtype::i8,   Dtype::u8,      Dtype::boolean};

TileShape shape_of(Dtype dtype, std::uint32_t rows, std::uint32_t cols) {
  return {rows, cols, static_cast<std::uint32_t>(dtype_bytes(dtype)), dtype_is_float(dtype), mantissa_bits(dtype)};
}

enum class Contents : std::uint8_t { weights, arbitrary, zeros, ramp };

Bytes make_tile(const TileShape& shape, Contents contents, Random& random) {
  Bytes raw(shape.raw_bytes());
  const unsigned width = shape.element_bytes * 8;
  const unsigned mantissa = shape.is_float ? shape.mantissa_bits : width - 4;
  for (std::uint32_t i = 0; i < shape.elements(); ++i) {
    std::uint64_t x = 0;
    switch (contents) {
      case Contents::weights: {
        // Exponents as those of normally distributed numbers: each next one below the top half as often.
        const auto below = static_cast<std::uint64_t>(std::countr_zero(random.next() | 64));
        const std::uint64_t top = std::uint64_t{1} << (width - 1);
        x = random.below(2) * top +
            ((top / 2 >> mantissa) - std::min(below, top / 2 >> mantissa)) * (1ULL << mantissa) +
            random.below(std::uint64_t{1} << mantissa);
        break;
      }
      case Contents::arbitrary: x = random.next(); break;
      case Contents::zeros: break;
      case Contents::ramp: x = i;
    }
    std::memcpy(&raw[std::size_t{i} * shape.element_bytes], &x, shape.element_bytes);
  }
  return raw;
}

TEST(RawPlanes, RoundTripOfEveryDtype) {
  Random random(1);
  std::size_t packed = 0;
  for (const Dtype dtype : kAll) {
    for (const auto& [rows, cols] : {std::pair{1U, 1U}, {1U, 17U}, {3U, 50U}, {7U, 333U}, {256U, 256U}, {1U, 65536U}}) {
      const TileShape shape = shape_of(dtype, rows, cols);
      for (const Contents contents : {Contents::weights, Contents::arbitrary, Contents::zeros, Contents::ramp}) {
        const Bytes raw = make_tile(shape, contents, random);
        TileRecord record;
        Bytes out(5, std::byte{0xAB});
        if (!encode_planes(shape, raw, record, out)) {
          EXPECT_EQ(out.size(), 5U);
          EXPECT_EQ(record.changed, 0U);
          continue;
        }
        ++packed;
        record.payload = ByteSpan(out).subspan(5);
        ASSERT_EQ(record.codec, Codec::raw_planes);
        ASSERT_EQ(record.changed, shape.elements());
        ASSERT_LT(record.payload.size(), raw.size());
        const auto back = whole_tile_bytes(shape, record);
        ASSERT_TRUE(back.ok()) << to_string(dtype) << ": " << back.error().to_string();
        ASSERT_TRUE(std::equal(back->begin(), back->end(), raw.begin(), raw.end())) << to_string(dtype);
      }
    }
  }
  EXPECT_GT(packed, 100U);
}

TEST(RawPlanes, EveryPatternOfTwoBytes) {
  for (const Dtype dtype : {Dtype::f16, Dtype::bf16, Dtype::i16}) {
    const TileShape shape = shape_of(dtype, 256, 256);
    std::vector<std::uint16_t> elements(65536);
    std::iota(elements.begin(), elements.end(), std::uint16_t{0});
    const ByteSpan raw = std::as_bytes(std::span(elements));
    TileRecord record;
    Bytes out;
    ASSERT_TRUE(encode_planes(shape, raw, record, out));
    record.payload = out;
    const auto back = whole_tile_bytes(shape, record);
    ASSERT_TRUE(back.ok());
    EXPECT_TRUE(std::equal(back->begin(), back->end(), raw.begin(), raw.end())) << to_string(dtype);
  }
}

TEST(RawPlanes, WeightsOfBf16TakeTwoThirdsAndTheirMantissasAreLeftAlone) {
  Random random(2);
  const TileShape shape = shape_of(Dtype::bf16, 256, 256);
  const Bytes raw = make_tile(shape, Contents::weights, random);
  TileRecord record;
  Bytes out;
  ASSERT_TRUE(encode_planes(shape, raw, record, out));
  EXPECT_EQ(out[0], std::byte{2}) << "the plane of exponents is packed, the other is not";
  EXPECT_LT(out.size(), raw.size() * 2 / 3);
  EXPECT_GT(out.size(), raw.size() / 2);
}

TEST(RawPlanes, FloatsThatWereRoundedLoseTheirZeros) {
  Random random(3);
  const TileShape narrow = shape_of(Dtype::bf16, 256, 256);
  const Bytes raw = make_tile(narrow, Contents::weights, random);
  const TileShape shape = shape_of(Dtype::f32, 256, 256);
  Bytes wide(shape.raw_bytes());
  for (std::size_t i = 0; i < 65536; ++i) std::memcpy(&wide[i * 4 + 2], &raw[i * 2], 2);
  TileRecord record;
  Bytes narrow_out;
  Bytes out;
  ASSERT_TRUE(encode_planes(narrow, raw, record, narrow_out));
  ASSERT_TRUE(encode_planes(shape, wide, record, out));
  EXPECT_LT(out.size(), narrow_out.size() + 64) << "sign, exponent and mantissa lie as those of bf16";
}

// ---- frames ------------------------------------------------------------------------------------------------------

TEST(PackedFrame, ThroughEveryPathOverAnyBase) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    const TestModel model = make_model(seed);
    const Layout& layout = *model.layout;
    Bytes before = model.half;
    mutate(before, layout, 0.5, seed);
    const auto digests = digests_of(layout, model.half);
    std::vector<std::uint64_t> tiles(layout.tile_count());
    std::iota(tiles.begin(), tiles.end(), std::uint64_t{0});
    const Frame packed = packed_frame(layout, model.half, tiles, digests);
    const Frame raw = raw_frame(layout, model.half, tiles, digests);
    EXPECT_LT(packed.bytes.size(), raw.bytes.size());
    EXPECT_EQ(packed.changed, raw.changed);
    std::size_t in_planes = 0;
    for (const TileRecord& record : records_of(layout, packed.bytes)) {
      in_planes += record.codec == Codec::raw_planes ? 1 : 0;
    }
    EXPECT_GT(in_planes, 0U);
    EXPECT_LT(in_planes, tiles.size()) << "scalars do not pack";

    Delta delta;
    delta.layout = layout.digest();
    delta.from = kFrom;
    delta.to = kTo;
    delta.from_root = root_digest(digests_of(layout, before));
    delta.to_root = root_digest(digests);
    delta.changed = packed.changed;
    delta.frame_bytes = packed.bytes.size();
    delta.frames.push_back(packed);
    expect_round_trip(layout, before, model.half, delta);
    const auto read = from_container(to_container(delta), layout);
    ASSERT_TRUE(read.ok()) << read.error().to_string();
    EXPECT_EQ(read->stats[static_cast<unsigned>(Codec::raw_planes)].tiles, in_planes);
    // No agent keeps such a delta: nothing is made of it but what it is.
    const Frame compacted = compact_frame(layout, packed, before).value();
    const auto after = records_of(layout, compacted.bytes);
    for (std::size_t i = 0; const TileRecord& record : records_of(layout, packed.bytes)) {
      const ByteSpan now = after[i++].payload;
      if (record.codec != Codec::raw_planes) continue;
      EXPECT_TRUE(std::equal(now.begin(), now.end(), record.payload.begin(), record.payload.end()));
    }
    ThreadPool pool(1, "test");
    const Delta* const chain[] = {&delta};
    const auto merged = merge(layout, chain, {}, pool);
    ASSERT_FALSE(merged.ok());
    EXPECT_EQ(merged.error().code(), Errc::unsupported);
    EXPECT_THAT(merged.error().message(), HasSubstr("raw_planes"));
  }
}

// ---- bad payloads ------------------------------------------------------------------------------------------------

/// One tile of 8 × 8 bf16: two planes of 64.
class BadPlanes : public ::testing::Test {
 protected:
  static Bytes zstd_frame(const Bytes& from, bool checksum = false) {
    Bytes out(::ZSTD_compressBound(from.size()));
    ZSTD_CCtx* const context = ::ZSTD_createCCtx();
    ::ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, checksum ? 1 : 0);
    out.resize(::ZSTD_compress2(context, out.data(), out.size(), from.data(), from.size()));
    ::ZSTD_freeCCtx(context);
    return out;
  }
  static Bytes payload_of(std::initializer_list<unsigned> header, std::initializer_list<Bytes> planes) {
    Bytes out;
    for (const unsigned byte : header) out.push_back(static_cast<std::byte>(byte));
    for (const Bytes& plane : planes) out.insert(out.end(), plane.begin(), plane.end());
    return out;
  }
  void expect_refused(const Bytes& payload, const std::string& part) {
    TileRecord record;
    record.codec = Codec::raw_planes;
    record.changed = 64;
    record.payload = payload;
    Bytes base(128, std::byte{7});
    const Bytes untouched = base;
    const auto digest = apply_tile(*layout_, record, base.data(), 16, 0);
    ASSERT_FALSE(digest.ok()) << "accepted; expected: " << part;
    EXPECT_EQ(digest.error().code(), Errc::corrupt);
    EXPECT_THAT(digest.error().message(), HasSubstr("tile 0 of a: "));
    EXPECT_THAT(digest.error().message(), HasSubstr(part));
    EXPECT_EQ(base, untouched);
  }
  unsigned size_of(const Bytes& plane) const { return static_cast<unsigned>(plane.size()); }

  const LayoutPtr layout_ = Layout::build({{"a", Dtype::bf16, {8, 8}, {}, {}}}).value();
  const Bytes stored_ = Bytes(64, std::byte{0x11});
  const Bytes packed_ = zstd_frame(Bytes(64, std::byte{0x7F}));
};

TEST_F(BadPlanes, TheGoodOneIsGood) {
  Bytes base(128);
  TileRecord record;
  record.codec = Codec::raw_planes;
  record.changed = 64;
  for (const Bytes& plane : {packed_, zstd_frame(Bytes(64, std::byte{0x7F}), true)}) {
    const Bytes payload = payload_of({2, size_of(plane)}, {stored_, plane});
    record.payload = payload;
    const std::vector<std::uint16_t> expected(64, 0x3F91);
    record.digest_after = tile_digest(reinterpret_cast<const std::byte*>(expected.data()), 16, 8, 16);
    const auto digest = apply_tile(*layout_, record, base.data(), 16, 0);
    ASSERT_TRUE(digest.ok()) << digest.error().to_string();
    EXPECT_EQ(std::memcmp(base.data(), expected.data(), 128), 0);
  }
}

TEST_F(BadPlanes, Headers) {
  const unsigned size = size_of(packed_);
  expect_refused({}, "truncated header of the planes");
  expect_refused(payload_of({2}, {}), "truncated header of the planes");
  expect_refused(payload_of({2, 0x80 | size, 0}, {stored_, packed_}), "truncated header of the planes");
  expect_refused(payload_of({6, size}, {stored_, packed_}), "more planes");
  expect_refused(payload_of({0x82, size}, {stored_, packed_}), "more planes");
  expect_refused(payload_of({2, 64}, {stored_, stored_}), "no smaller");
  expect_refused(payload_of({2, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1}, {stored_, packed_}),
                 "no smaller");
  expect_refused(payload_of({2, size + 1}, {stored_, packed_}), "not as long");
  expect_refused(payload_of({2, size - 1}, {stored_, packed_}), "not as long");
  expect_refused(payload_of({2, size}, {stored_, packed_, {std::byte{0}}}), "not as long");
  expect_refused(payload_of({0}, {stored_}), "not as long");
}

TEST_F(BadPlanes, Frames) {
  const auto refused = [&](const Bytes& plane, const std::string& part) {
    expect_refused(payload_of({2, size_of(plane)}, {stored_, plane}), part);
  };
  refused({}, "no zstd frame");
  refused(Bytes(10, std::byte{0}), "no zstd frame");
  Bytes skippable(12, std::byte{0});
  store<std::uint32_t>(skippable.data(), 0x184D2A50);
  store<std::uint32_t>(skippable.data() + 4, 4);
  refused(skippable, "no zstd frame");
  Bytes twice = zstd_frame(Bytes(32, std::byte{1}));
  const Bytes half = twice;
  twice.insert(twice.end(), half.begin(), half.end());
  ASSERT_LT(twice.size(), 64U);
  refused(twice, "does not end with its zstd frame");
  Bytes cut = packed_;
  cut.pop_back();
  refused(cut, "does not end with its zstd frame");
  refused(zstd_frame(Bytes(63, std::byte{1})), "fewer bytes");
  refused(zstd_frame(Bytes(65, std::byte{1})), "does not decompress to its size");
  const Bytes bomb = zstd_frame(Bytes(100'000, std::byte{1}));
  ASSERT_LT(bomb.size(), 64U);
  refused(bomb, "does not decompress to its size");
  Bytes checked = zstd_frame(Bytes(64, std::byte{1}), true);
  checked.back() ^= std::byte{1};
  refused(checked, "does not decompress to its size");
}

TEST_F(BadPlanes, EveryBitAndEveryEndOfAGoodOne) {
  Random random(4);
  const LayoutPtr layout = Layout::build({{"a", Dtype::bf16, {64, 64}, {}, {}}}).value();
  const Bytes raw = make_tile(shape_of(Dtype::bf16, 64, 64), Contents::weights, random);
  const std::vector<std::uint64_t> digests = digests_of(*layout, raw);
  const std::vector<std::uint64_t> tiles = {0};
  const Frame frame = packed_frame(*layout, raw, tiles, digests);
  const TileRecord good = records_of(*layout, frame.bytes).at(0);
  ASSERT_EQ(good.codec, Codec::raw_planes);
  Bytes memory(raw.size());
  for (std::size_t bit = 0; bit < good.payload.size() * 8; ++bit) {
    Bytes payload(good.payload.begin(), good.payload.end());
    payload[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
    TileRecord record = good;
    record.payload = payload;
    const auto digest = verify_tile(*layout, record, memory.data(), 128, 0);
    // zstd has bits that say nothing about the content: then the content is right.
    if (digest.ok()) {
      EXPECT_EQ(*digest, good.digest_after);
    }
  }
  for (std::size_t end = 0; end < good.payload.size(); ++end) {
    const Bytes payload(good.payload.begin(), good.payload.begin() + static_cast<std::ptrdiff_t>(end));
    TileRecord record = good;
    record.payload = payload;
    ASSERT_FALSE(verify_tile(*layout, record, memory.data(), 128, 0).ok()) << end;
  }
}

TEST_F(BadPlanes, Records) {
  const auto parse = [&](std::uint8_t codec, std::uint32_t changed, std::size_t payload_bytes) {
    FrameBuilder builder;
    builder.payloads().resize(payload_bytes);
    TileRecord record;
    record.codec = static_cast<Codec>(codec & 15);
    record.rice_k = codec >> 4;
    record.changed = changed;
    builder.add(record);
    const Frame frame = builder.finish();
    auto records = parse_frame(*layout_, frame.bytes);
    return records.ok() ? std::string() : records.error().to_string();
  };
  EXPECT_EQ(parse(6, 64, 127), "");
  EXPECT_THAT(parse(6, 64, 128), HasSubstr("a packed tile is as long as the raw one"));
  EXPECT_THAT(parse(6, 64, 129), HasSubstr("longer than the raw tile"));
  EXPECT_THAT(parse(6, 63, 100), HasSubstr("does not count all of its elements"));
  EXPECT_THAT(parse(0x16, 64, 100), HasSubstr("has a Rice parameter"));
}

}  // namespace
}  // namespace deltasync::delta::test
