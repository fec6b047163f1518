// dense_ulp payloads and records that break one bound each.
#include <gmock/gmock-matchers.h>

#include "base/hash.hpp"
#include "delta/dense_codec.hpp"
#include "delta/frame.hpp"
#include "delta/mix.hpp"
#include "delta_test_util.hpp"

namespace deltasync::delta::test {
namespace {

using ::testing::HasSubstr;

/// Four bf16 elements, k = 2: numbers 5, 0, 3, 16 × 4 + 1 = an escape.
class BadDense : public ::testing::Test {
 protected:
  BadDense() {
    layout_ = Layout::build({{"a", Dtype::bf16, {1, 4}, {}, {}}}).value();
    memory_.resize(8);
    // Low bits 01 00 11 01; quotients 1, 0, 0, 16: "01" "1" "1" and sixteen zeros and a one; escape 16 in 14 bits.
    payload_ = {std::byte{0b01110001}, std::byte{0b00001110}, std::byte{0},
                std::byte{0b00010000}, std::byte{16},         std::byte{0}};
    record_.codec = Codec::dense_ulp;
    record_.rice_k = 2;
    record_.changed = 3;
    record_.quotient_sum = 17;
    record_.gamma_bits = 1;
    record_.digest_after = digest_of({0xFFFD + 0, 0, 0, 0});
  }
  static std::uint64_t digest_of(const std::vector<std::uint16_t>& elements) {
    return tile_digest(reinterpret_cast<const std::byte*>(elements.data()), 8, 1, 8);
  }
  void expect_refused(const char* part) {
    record_.payload = payload_;
    const auto digest = verify_tile(*layout_, record_, memory_.data(), 8, 0);
    ASSERT_FALSE(digest.ok()) << part;
    EXPECT_EQ(digest.error().code(), Errc::corrupt);
    EXPECT_THAT(digest.error().message(), HasSubstr(part));
  }
  LayoutPtr layout_;
  std::vector<std::byte> memory_;
  std::vector<std::byte> payload_;
  TileRecord record_;
};

TEST_F(BadDense, TheGoodOne) {
  // Numbers 5, 0, 3, 65 are −3, 0, −2, −33 ulp of zero: patterns of negative floats.
  const auto pattern = [](std::int16_t ulps) { return ulp_map<std::uint16_t, true>(static_cast<std::uint16_t>(ulps)); };
  record_.digest_after = digest_of({pattern(-3), 0, pattern(-2), pattern(-33)});
  record_.payload = payload_;
  const auto digest = apply_tile(*layout_, record_, memory_.data(), 8, digest_of({0, 0, 0, 0}));
  ASSERT_TRUE(digest.ok()) << digest.error().to_string();
  undo_tile(*layout_, record_, memory_.data(), 8, {});
  EXPECT_EQ(memory_, std::vector<std::byte>(8));
}
TEST_F(BadDense, Digest) {
  expect_refused("state digest");
}
TEST_F(BadDense, Sizes) {
  payload_.pop_back();
  expect_refused("its size");
  payload_.resize(7);
  expect_refused("its size");
  record_.rice_k = 16;
  expect_refused("breaks a bound");
}
TEST_F(BadDense, NumberOfChanges) {
  record_.changed = 4;
  expect_refused("another number of changed elements");
  record_.changed = 2;
  expect_refused("another number of changed elements");
}
TEST_F(BadDense, Quotients) {
  payload_[1] = std::byte{0b00000110};  // a stop bit is missing
  expect_refused("quotient plane");
  payload_[1] = std::byte{0b00011110};  // one too many
  expect_refused("quotient plane");
  payload_[1] = std::byte{0b00001110};
  payload_[3] = std::byte{0b00110000};  // behind the end
  expect_refused("quotient plane");
}
TEST_F(BadDense, LongQuotients) {
  // "1" "1" "1" and seventeen zeros.
  payload_[1] = std::byte{0b00000111};
  expect_refused("longer than an escape");
}
/// k = 3: twelve low bits 101 000 011 001, from the last to the first 0010 1100 0101; quotients 0, 0, 0, 8.
TEST_F(BadDense, LowBits) {
  payload_ = {std::byte{0b11000101}, std::byte{0b00000010}, std::byte{0b00000111}, std::byte{0b00001000}};
  record_.rice_k = 3;
  record_.quotient_sum = 8;
  record_.gamma_bits = 0;
  expect_refused("state digest");  // all else is well
  for (unsigned bit = 4; bit < 8; ++bit) {
    payload_[1] = static_cast<std::byte>(0b00000010U | 1U << bit);
    expect_refused("plane of low bits has bits behind");
  }
}
TEST_F(BadDense, Escapes) {
  payload_[4] = std::byte{15};
  expect_refused("an escape that is none");
  payload_[4] = std::byte{16};
  payload_[5] = std::byte{0b01000000};
  expect_refused("plane of escapes has bits behind");
  payload_[5] = std::byte{0};
  payload_.resize(4);
  record_.gamma_bits = 0;
  expect_refused("more escapes than its record says");
}
TEST_F(BadDense, FewerEscapesThanTheRecordSays) {
  // Quotients 4, 4, 4, 5 of the same sum, and no escape among them.
  payload_[1] = std::byte{0b00010000};
  payload_[2] = std::byte{0b01000010};
  payload_[3] = std::byte{0b00010000};
  record_.changed = 4;
  expect_refused("not what its record says");
}

TEST(BadDenseRuns, ANumberLongerThanItsElementIsSeen) {
  const auto layout = Layout::build({{"a", Dtype::i8, {1, 4}, {}, {}}}).value();
  TileRecord record;
  record.codec = Codec::dense_ulp;
  record.rice_k = 6;
  record.changed = 1;
  record.quotient_sum = 4;
  // Quotients 4, 0, 0, 0, the low bits of the first are 1: the number is 257.
  const std::vector<std::byte> payload{std::byte{1}, std::byte{0}, std::byte{0}, std::byte{0b11110000}};
  record.payload = payload;
  const std::vector<std::byte> memory(4);
  const auto digest = verify_tile(*layout, record, memory.data(), memory.size(), 0);
  ASSERT_FALSE(digest.ok());
  EXPECT_THAT(digest.error().message(), HasSubstr("longer than the element"));
}

/// A quotient of 65,536 + 16 zeros looks like an escape modulo 2^16.
TEST(BadDenseRuns, ARunOfZerosAsLongAsATileIsSeen) {
  const auto layout = Layout::build({{"a", Dtype::f32, {1, 4200}, {}, {}}}).value();
  TileRecord record;
  record.codec = Codec::dense_ulp;
  record.rice_k = 0;
  record.changed = 1;
  record.gamma_bits = 1;
  record.quotient_sum = 65'536 + 16;
  const std::size_t unary_bits = 4200 + record.quotient_sum;
  std::vector<std::byte> payload((unary_bits + 7) / 8 + 4);
  const auto set = [&](std::size_t bit) { payload[bit / 8] |= static_cast<std::byte>(1U << (bit % 8)); };
  for (std::size_t i = 0; i < 4199; ++i) set(i);
  set(unary_bits - 1);
  payload[payload.size() - 4] = std::byte{16};
  ASSERT_LE(payload.size(), 4200U * 4);
  record.payload = payload;
  std::vector<std::byte> memory(4200 * 4);
  const auto digest = verify_tile(*layout, record, memory.data(), memory.size(), 0);
  ASSERT_FALSE(digest.ok());
  EXPECT_THAT(digest.error().message(), HasSubstr("not what its record says"));
}

/// Each field of a record that has to be checked before its payload is looked at.
TEST(BadDenseRecords, AreRefused) {
  const auto layout = Layout::build({{"a", Dtype::f32, {32, 32}, {}, {}}}).value();
  struct Fields {
    const char* part;
    unsigned codec_byte;
    std::uint64_t quotients;
    std::uint64_t escapes;
    unsigned k;
  };
  const Fields cases[] = {{"in the wrong place", 5 | 3 << 4, 0, 0, 3},
                          {"as long as the element", 5, 0, 0, 32},
                          {"more quotients than", 5, 16 * 1024 + 1, 0, 3},
                          {"more escapes than", 5, 160, 11, 3},
                          {"does not follow from its record", 5, 160, 10, 3}};
  for (const Fields& fields : cases) {
    std::vector<std::byte> table;
    ByteWriter out(table);
    out.put_varint(0);
    out.put<std::uint8_t>(static_cast<std::uint8_t>(fields.codec_byte));
    out.put_varint(1024);
    out.put_varint(600);
    out.put_varint(fields.quotients);
    out.put_varint(fields.escapes);
    out.put<std::uint8_t>(static_cast<std::uint8_t>(fields.k));
    out.put<std::uint64_t>(0);
    std::vector<std::byte> frame(sizeof(FrameHeader));
    FrameHeader header;
    header.tiles = 1;
    header.table_bytes = static_cast<std::uint32_t>(table.size());
    header.changed = 1024;
    frame.insert(frame.end(), table.begin(), table.end());
    frame.resize(frame.size() + 600);
    const ByteSpan body = ByteSpan(frame).subspan(sizeof(header));
    header.body_bytes = body.size();
    header.body_hash = xxh3_64(body);
    header.header_hash = xxh3_64(bytes_of(header).first(offsetof(FrameHeader, header_hash)));
    store(frame.data(), header);
    const auto records = parse_frame(*layout, frame);
    ASSERT_FALSE(records.ok()) << fields.part;
    EXPECT_THAT(records.error().message(), HasSubstr(fields.part));
  }
}

}  // namespace
}  // namespace deltasync::delta::test
