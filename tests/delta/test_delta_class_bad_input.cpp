// rice_class payloads that break one bound each, every bit flip and every truncation of good ones.
#include <gmock/gmock-matchers.h>

#include "delta/class_codec.hpp"
#include "delta/mix.hpp"
#include "delta_test_util.hpp"

namespace deltasync::delta::test {
namespace {

using ::testing::HasSubstr;

/// One tile of 8 × 8 bf16.
LayoutPtr small_layout() {
  return Layout::build({{"a", Dtype::bf16, {8, 8}, {}, {}}}).value();
}

/// Bytes of a header, then a string of 0 and 1 (blanks are for the reader).
std::vector<std::byte> payload_of(const std::vector<unsigned>& header, const std::string& bits) {
  std::vector<std::byte> out;
  for (const unsigned byte : header) out.push_back(static_cast<std::byte>(byte));
  unsigned count = 0;
  for (const char c : bits) {
    if (c == ' ') continue;
    if (count % 8 == 0) out.push_back(std::byte{0});
    if (c == '1') out.back() |= static_cast<std::byte>(1U << (count % 8));
    ++count;
  }
  return out;
}

// Two classes up to exponent 103: class 1 has exponent 103, every fourth element; class 0 the others. One change in
// each: the fifth element of class 0 (gap 4: low bit 0, quotient 2), by +1, and the sixth of class 1 (gap 5: low bits
// 1, 0, quotient 1), by −3, which is exception number 1 (gap 1, no low bits; m − 1 = 2: one zero, low bit 0).
const std::vector<unsigned> kHeader = {0x02, 103, 0x21, 1, 1};
const char* const kBits = "0 10  01    001 01  01 01  0";

class BadClassPayload : public ::testing::Test {
 protected:
  BadClassPayload() {
    base_.resize(64);
    for (std::size_t i = 0; i < base_.size(); ++i) base_[i] = static_cast<std::uint16_t>((100 + i % 4) << 7 | i);
    digest_ = tile_digest(bytes(base_), 16, 8, 16);
  }
  static std::byte* bytes(std::vector<std::uint16_t>& tile) { return reinterpret_cast<std::byte*>(tile.data()); }

  TileRecord record(const std::vector<std::byte>& payload) const {
    TileRecord out;
    out.codec = Codec::rice_class;
    out.changed = 2;
    out.payload = payload;
    return out;
  }
  void expect_refused(const TileRecord& record, const std::string& part) {
    const auto untouched = base_;
    for (const bool apply : {false, true}) {
      const auto digest = apply ? apply_tile(*layout_, record, bytes(base_), 16, digest_)
                                : verify_tile(*layout_, record, bytes(base_), 16, digest_);
      ASSERT_FALSE(digest.ok()) << "accepted; expected: " << part;
      EXPECT_EQ(digest.error().code(), Errc::corrupt);
      EXPECT_THAT(digest.error().message(), HasSubstr("tile 0 of a: payload: "));
      EXPECT_THAT(digest.error().message(), HasSubstr(part));
      EXPECT_EQ(base_, untouched);
    }
  }
  void expect_refused(const std::vector<unsigned>& header, const std::string& bits, const std::string& part) {
    const auto payload = payload_of(header, bits);
    expect_refused(record(payload), part);
  }

  const LayoutPtr layout_ = small_layout();
  std::vector<std::uint16_t> base_;
  std::uint64_t digest_ = 0;
};

TEST_F(BadClassPayload, TheGoodOneIsGood) {
  auto expected = base_;
  expected[5] += 1;   // positions 0, 1, 2, 4, 5 are the first five of class 0
  expected[23] -= 3;  // positions 3, 7, 11, 15, 19, 23 the first six of class 1
  const auto payload = payload_of(kHeader, kBits);
  TileRecord good = record(payload);
  good.digest_after = tile_digest(bytes(expected), 16, 8, 16);
  const auto digest = apply_tile(*layout_, good, bytes(base_), 16, digest_);
  ASSERT_TRUE(digest.ok()) << digest.error().to_string();
  EXPECT_EQ(base_, expected);
}

TEST_F(BadClassPayload, Records) {
  const auto payload = payload_of(kHeader, kBits);
  TileRecord r = record(payload);
  r.changed = 0;
  expect_refused(r, "breaks a bound");
  r.changed = 65;
  expect_refused(r, "breaks a bound");
  const std::vector<std::byte> long_payload(129);
  expect_refused(record(long_payload), "breaks a bound");
  r = record(payload);
  r.rice_k = 16;
  expect_refused(r, "breaks a bound");
}

TEST_F(BadClassPayload, Headers) {
  expect_refused({}, "", "truncated class header");
  expect_refused({0x02, 103, 0x21, 1}, "", "truncated class header");
  expect_refused({0x02, 0x80, 0x00, 0x21, 1, 1}, kBits, "truncated class header");  // a longer varint than it needs
  expect_refused({0x00, 103, 0}, kBits, "no classes");
  expect_refused({0x42, 103, 0x21, 1, 1}, kBits, "reserved bits");
  expect_refused({0x82, 103, 0x21, 1, 1}, kBits, "reserved bits");
  expect_refused({0x01, 103, 0x21, 0}, kBits, "behind the last class");
  expect_refused({0x02, 0x80, 2, 0x21, 1, 1}, kBits, "none of the dtype");  // 256
  expect_refused({0x02, 103, 0x21, 3, 1}, kBits, "more changed elements than the record");
  expect_refused({0x03, 103, 0x21, 0, 2, 1, 1}, kBits, "more changed elements than the record");
  expect_refused({0x02, 103, 0x21, 1, 3}, kBits, "more exceptions");
  const auto payload = payload_of({0x02, 103, 0x21, 1, 0}, "0 10 01 001 01");
  TileRecord r = record(payload);
  r.rice_k = 1;
  expect_refused(r, "without exceptions");
}

TEST_F(BadClassPayload, Ends) {
  expect_refused(kHeader, "", "truncated before its unary bits");
  expect_refused({0x02, 103, 0xFF, 1, 1}, kBits, "truncated before its unary bits");
  expect_refused(kHeader, "0 10 01 000", "end before the gaps");
  expect_refused(kHeader, "0 10 01 001", "end before the gaps");
  expect_refused(kHeader, "0 10 01 001 01 01 000000", "end before the magnitudes");
  expect_refused(kHeader, "0 10 01 001 01 01 0001", "truncated magnitudes");
  expect_refused(kHeader, std::string(kBits) + "1", "bits behind its end");
  expect_refused(kHeader, std::string(kBits) + std::string(16, '0'), "bytes behind its last bit");
}

TEST_F(BadClassPayload, Positions) {
  // Class 1 has 16 elements, class 0 has 48: gap 16 = quotient 4, low bits 0; gap 48 = quotient 24, low bit 0.
  expect_refused(kHeader, "0 00  01    001 00001  01 01  0", "last element of its class");
  expect_refused(kHeader, "0 10  01    " + std::string(24, '0') + "1 01  01 01  0", "last element of its class");
  // A largest exponent below that of all elements leaves the classes empty.
  expect_refused({0x02, 20, 0x21, 1, 1}, kBits, "last element of its class");
  expect_refused({0x02, 103, 0xFF, 1, 1}, std::string(30, '0') + "01 001 01 01 01 0", "longer than a tile");
  expect_refused(kHeader, "0 10  01    001 01  001 01  0", "behind the changed elements");
  // One class, one change, k = 15: gap 2 × 2^15 is the first that no tile has.
  const auto payload = payload_of({0x01, 103, 0x0F, 0}, std::string(15, '0') + "0 001");
  TileRecord r = record(payload);
  r.changed = 1;
  expect_refused(r, "longer than a tile");
}

TEST_F(BadClassPayload, Magnitudes) {
  expect_refused(kHeader, "0 10 01 001 01 01 " + std::string(15, '0') + "1" + std::string(15, '0'), "more bits than");
  // m − 1 = 2^15 − 1 is allowed down, not up.
  const std::string largest = std::string(14, '0') + "1" + std::string(14, '1');
  expect_refused(kHeader, "0 10 00 001 01 01 " + largest, "above half");
  const auto payload = payload_of(kHeader, "0 10 01 001 01 01 " + largest);
  auto expected = base_;
  expected[5] += 1;
  expected[23] = ulp_map<std::uint16_t, true>(static_cast<std::uint16_t>(base_[23] - 0x8000));
  TileRecord r = record(payload);
  r.digest_after = tile_digest(bytes(expected), 16, 8, 16);
  EXPECT_TRUE(verify_tile(*layout_, r, bytes(base_), 16, digest_).ok());
}

TEST_F(BadClassPayload, IntegersHaveNoExponents) {
  const auto layout = Layout::build({{"a", Dtype::i16, {8, 8}, {}, {}}}).value();
  const auto payload = payload_of(kHeader, kBits);
  const auto digest = verify_tile(*layout, record(payload), bytes(base_), 16, digest_);
  ASSERT_FALSE(digest.ok());
  EXPECT_THAT(digest.error().message(), HasSubstr("without exponents"));
}

TEST_F(BadClassPayload, DigestsAreChecked) {
  const auto payload = payload_of(kHeader, kBits);
  const auto digest = apply_tile(*layout_, record(payload), bytes(base_), 16, digest_);
  ASSERT_FALSE(digest.ok());
  EXPECT_THAT(digest.error().message(), HasSubstr("state digest"));
}

/// Tiles of one dtype between bytes that must stay as they are, with a compact record for each.
struct GuardedCase {
  LayoutPtr layout;
  std::vector<std::byte> memory;  ///< the tile from kGuard on, guards around it
  std::vector<std::byte> frame;
  std::uint64_t digest_before = 0;
  std::size_t row_bytes = 0;
};
constexpr std::size_t kGuard = 64;

GuardedCase guarded_case(Dtype dtype) {
  GuardedCase c;
  c.layout = Layout::build({{"t", dtype, {24, 40}, {}, {}}}).value();
  std::vector<std::byte> before(c.layout->half_bytes());
  Random random(3);
  const std::size_t width = dtype_bytes(dtype);
  const unsigned mantissa = mantissa_bits(dtype);
  const std::uint64_t middle = std::uint64_t{1} << (width * 8 - 2 - mantissa);
  for (std::size_t i = 0; i < 960; ++i) {
    const std::uint64_t element = (middle - random.below(5)) << mantissa | random.below(std::uint64_t{1} << mantissa);
    std::memcpy(&before[i * width], &element, width);
  }
  std::vector<std::byte> after = before;
  for (std::size_t i = 0; i < 960; ++i) {
    std::uint64_t element = 0;
    std::memcpy(&element, &after[i * width], width);
    const bool small = element >> mantissa == middle - 4;
    if (random.below(small ? 2 : 60) == 0) element += random.below(6) == 0 ? 0 - (2 + random.below(9)) : 1;
    std::memcpy(&after[i * width], &element, width);
  }
  const Delta delta = encode_between(*c.layout, before, after);
  c.frame = compact_frame(*c.layout, delta.frames.at(0), before).value().bytes;
  c.row_bytes = 40 * width;
  c.digest_before = digests_of(*c.layout, before).at(0);
  c.memory.assign(2 * kGuard + 24 * c.row_bytes, std::byte{0x5A});
  std::copy(before.begin(), before.begin() + static_cast<std::ptrdiff_t>(24 * c.row_bytes), c.memory.begin() + kGuard);
  return c;
}

/// A damaged record is refused and nothing is written; or, if the damage leaves its meaning, the same comes out.
void expect_harmless(GuardedCase& c, const TileRecord& record, std::uint64_t good_digest) {
  const auto untouched = c.memory;
  const auto verified = verify_tile(*c.layout, record, c.memory.data() + kGuard, c.row_bytes, c.digest_before);
  const auto applied = apply_tile(*c.layout, record, c.memory.data() + kGuard, c.row_bytes, c.digest_before);
  ASSERT_EQ(verified.ok(), applied.ok());
  if (applied.ok()) {
    ASSERT_EQ(*applied, good_digest);
    for (std::size_t i = 0; i < kGuard; ++i) {
      ASSERT_EQ(c.memory[i], std::byte{0x5A});
      ASSERT_EQ(c.memory[c.memory.size() - 1 - i], std::byte{0x5A});
    }
    c.memory = untouched;
    return;
  }
  ASSERT_EQ(applied.error().code(), Errc::corrupt);
  ASSERT_THAT(applied.error().message(), HasSubstr("tile 0 of t: "));
  ASSERT_EQ(c.memory, untouched);
}

TEST(DamagedClassPayload, EveryBitFlipAndEveryTruncation) {
  for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::f8_e4m3, Dtype::f8_e5m2}) {
    GuardedCase c = guarded_case(dtype);
    const auto records = records_of(*c.layout, c.frame);
    ASSERT_EQ(records.size(), 1U);
    ASSERT_EQ(records[0].codec, Codec::rice_class) << to_string(dtype);
    const std::vector<std::byte> good(records[0].payload.begin(), records[0].payload.end());
    for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
      std::vector<std::byte> damaged = good;
      damaged[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
      TileRecord record = records[0];
      record.payload = damaged;
      expect_harmless(c, record, records[0].digest_after);
      if (::testing::Test::HasFatalFailure()) return;
    }
    for (std::size_t size = 0; size < good.size(); ++size) {
      const std::vector<std::byte> damaged(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size));
      TileRecord record = records[0];
      record.payload = damaged;
      expect_harmless(c, record, records[0].digest_after);
      if (::testing::Test::HasFatalFailure()) return;
    }
    for (const unsigned k : {0U, 1U, 7U, 15U}) {
      for (const std::uint32_t changed : {1U, records[0].changed - 1, records[0].changed + 1, 960U}) {
        TileRecord record = records[0];
        record.rice_k = static_cast<std::uint8_t>(k);
        record.changed = changed;
        expect_harmless(c, record, records[0].digest_after);
      }
    }
  }
}

TEST(DamagedClassPayload, AnythingAtAll) {
  GuardedCase c = guarded_case(Dtype::bf16);
  Random random(9);
  for (int trial = 0; trial < 3000; ++trial) {
    std::vector<std::byte> noise(random.below(200));
    for (std::byte& b : noise) b = static_cast<std::byte>(random.next() >> 56);
    // Mostly a header that is believed, so that what stands behind it is reached.
    if (noise.size() > 4 && trial % 4 != 0) {
      noise[0] = static_cast<std::byte>(1 + random.below(3));
      noise[1] = static_cast<std::byte>(60 + random.below(8));
    }
    TileRecord record;
    record.codec = Codec::rice_class;
    record.rice_k = static_cast<std::uint8_t>(random.below(4));
    record.changed = static_cast<std::uint32_t>(1 + random.below(960));
    record.digest_after = 1;
    record.payload = noise;
    expect_harmless(c, record, 1);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace deltasync::delta::test
