// Known answers: these values are part of every stored and transmitted format.
#include <gtest/gtest.h>

#include <cstdint>

#include "base/hash.hpp"
#include "deltasync/version.hpp"

namespace deltasync {
namespace {

TEST(Hash, KnownAnswers) {
  EXPECT_EQ(xxh3_64({}), 0x2D06800538D394C2ull);
  EXPECT_EQ(to_string(xxh3_128({})), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(xxh3_64(bytes_of(std::string_view("abc"))), 0x78AF5F94892F3950ull);
}

TEST(Version, OrdersByEpochThenNumber) {
  EXPECT_LT((VersionId{1, 9}), (VersionId{2, 0}));
  EXPECT_LT((VersionId{2, 1}), (VersionId{2, 2}));
  EXPECT_FALSE(VersionId{}.valid());
  EXPECT_TRUE((VersionId{1, 0}).valid());
}

TEST(Version, Text) {
  EXPECT_EQ(to_string(VersionId{0xE18C0A1B2C3D4E5Full, 12}), "e18c0a1b2c3d4e5f:12");
  EXPECT_EQ(to_string(Version{{1, 2}, "step_7"}), "step_7 (0000000000000001:2)");
  EXPECT_EQ(to_string(Version{{1, 2}, ""}), "0000000000000001:2");
}

constexpr std::uint64_t count_of(std::uint64_t epoch) {
  return epoch >> 32;
}

TEST(Version, AnEpochComesAfterTheOneBeforeAndDiffers) {
  EXPECT_EQ(count_of(make_epoch()), 1u);
  EXPECT_NE(make_epoch(), make_epoch()) << "by chance once in 2^32";
  // 44 bits of milliseconds and 20 random ones, as epochs once were: of 2026, and of 2036.
  for (const std::uint64_t by_clock : {1'795'000'000'000u << 20 | 0xFFFFFu, 2'111'000'000'000u << 20 | 0xFFFFFu}) {
    EXPECT_EQ(count_of(make_epoch(by_clock)), count_of(by_clock) + 1);
    EXPECT_GT(make_epoch(by_clock), by_clock);
  }
}

TEST(Version, EpochsThatAreUsedUpBeginAgain) {
  EXPECT_EQ(count_of(make_epoch(0xFFFFFFFE'00000000u)), 0xFFFFFFFFu);
  EXPECT_EQ(count_of(make_epoch(0xFFFFFFFF'00000000u)), 1u);
  EXPECT_EQ(count_of(make_epoch(~std::uint64_t{0})), 1u);
}

}  // namespace
}  // namespace deltasync
