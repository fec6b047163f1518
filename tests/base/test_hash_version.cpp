// Known answers: these values are part of every stored and transmitted format.
#include <gtest/gtest.h>

#include <chrono>

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

TEST(Version, EpochsHoldTheClockAndDiffer) {
  const auto now = [] {
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
            .count());
  };
  const auto before = now();
  const auto a = make_epoch();
  const auto b = make_epoch();
  const auto after = now();
  EXPECT_GE(a >> 20, before);
  EXPECT_LE(b >> 20, after);
  EXPECT_NE(a, b);
}

}  // namespace
}  // namespace deltasync
