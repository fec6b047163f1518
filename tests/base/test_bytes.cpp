// Bounds of the byte streams that every variable-length format is read with.
#include "base/bytes.hpp"

#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <limits>

namespace deltasync {
namespace {

using testing::HasSubstr;

std::vector<std::byte> bytes_from(std::initializer_list<int> values) {
  std::vector<std::byte> bytes;
  for (const int v : values) bytes.push_back(static_cast<std::byte>(v));
  return bytes;
}

TEST(Bytes, RoundTrip) {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.put<std::uint8_t>(0xAB);
  out.put<std::uint32_t>(0x01020304);
  out.put<std::int64_t>(-2);
  out.put_string("text");
  out.put_string("");
  out.append(bytes_from({7, 8}));
  EXPECT_EQ(bytes[1], std::byte{0x04});  // little-endian

  ByteReader in(bytes);
  EXPECT_EQ(in.get<std::uint8_t>(), 0xAB);
  EXPECT_EQ(in.get<std::uint32_t>(), 0x01020304u);
  EXPECT_EQ(in.get<std::int64_t>(), -2);
  EXPECT_EQ(in.get_string(4), "text");
  EXPECT_EQ(in.get_string(0), "");
  EXPECT_EQ(in.remaining(), 2u);
  EXPECT_EQ(in.take(2).size(), 2u);
  EXPECT_TRUE(in.finish("message").ok());
}

TEST(Bytes, VarintsRoundTripInTheirShortestForm) {
  std::vector<std::uint64_t> values = {0, 1, 127, 128, 16'383, 16'384, std::numeric_limits<std::uint64_t>::max()};
  for (unsigned bit = 0; bit < 64; ++bit) {
    values.push_back(std::uint64_t{1} << bit);
    values.push_back((std::uint64_t{1} << bit) - 1);
  }
  for (const auto value : values) {
    std::vector<std::byte> bytes;
    ByteWriter(bytes).put_varint(value);
    unsigned groups = 1;
    for (auto rest = value >> 7; rest != 0; rest >>= 7) ++groups;
    EXPECT_EQ(bytes.size(), groups);
    ByteReader in(bytes);
    EXPECT_EQ(in.get_varint(), value);
    EXPECT_TRUE(in.finish("varint").ok());
    for (std::size_t n = 0; n < bytes.size(); ++n) {
      ByteReader cut(ByteSpan(bytes).first(n));
      cut.get_varint();
      EXPECT_TRUE(cut.failed());
    }
  }
}

TEST(Bytes, RefusesVarintsThatAreNotCanonical) {
  for (const auto& bytes : {bytes_from({0x80, 0x00}), bytes_from({0xFF, 0x80, 0x00}),
                            bytes_from({0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x02}),
                            bytes_from({0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01}),
                            bytes_from({0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF})}) {
    ByteReader in(bytes);
    EXPECT_EQ(in.get_varint(), 0u);
    EXPECT_TRUE(in.failed());
  }
}

TEST(Bytes, ReadsBeyondTheEndFailAndStayFailed) {
  const auto bytes = bytes_from({1, 2, 3});
  ByteReader in(bytes);
  EXPECT_EQ(in.get<std::uint32_t>(), 0u);
  EXPECT_TRUE(in.failed());
  EXPECT_EQ(in.get<std::uint8_t>(), 0u);  // the byte is there, but nothing is read after a failure
  EXPECT_TRUE(in.take(0).empty());
  EXPECT_EQ(in.remaining(), 0u);
  const auto status = in.finish("thing");
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), Errc::corrupt);
  EXPECT_THAT(status.error().message(), HasSubstr("thing: truncated"));
}

TEST(Bytes, TakeOfAnyLengthIsBounded) {
  const auto bytes = bytes_from({1, 2, 3});
  for (const std::uint64_t n : {std::uint64_t{4}, std::uint64_t{1} << 32, std::numeric_limits<std::uint64_t>::max()}) {
    ByteReader in(bytes);
    in.get<std::uint8_t>();
    EXPECT_TRUE(in.take(n).empty());
    EXPECT_TRUE(in.failed());
  }
}

TEST(Bytes, StringsAreBoundedByTheirLimitAndByWhatIsThere) {
  std::vector<std::byte> bytes;
  ByteWriter(bytes).put_string("12345");
  ByteReader small(bytes);
  EXPECT_EQ(small.get_string(4), "");
  EXPECT_TRUE(small.failed());
  ByteReader cut(ByteSpan(bytes).first(8));
  EXPECT_EQ(cut.get_string(100), "");
  EXPECT_TRUE(cut.failed());
}

TEST(Bytes, FinishTellsOfWhatIsLeft) {
  const auto bytes = bytes_from({1, 2, 3});
  ByteReader in(bytes);
  in.get<std::uint8_t>();
  const auto status = in.finish("thing");
  ASSERT_FALSE(status.ok());
  EXPECT_THAT(status.error().message(), HasSubstr("thing: 2 bytes too many"));
}

}  // namespace
}  // namespace deltasync
