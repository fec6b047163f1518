#include <gtest/gtest.h>

#include "base/log_limit.hpp"

namespace deltasync::log {
namespace {

using std::chrono::seconds;

TEST(LogLimit, AFewLinesOfAKindAreWrittenInAWhile) {
  LineLimit limit(2, seconds(10));
  const LineLimit::Clock::time_point start{};
  EXPECT_EQ(limit.admit(start), 0u);
  EXPECT_EQ(limit.admit(start + seconds(1)), 0u);
  EXPECT_EQ(limit.admit(start + seconds(2)), std::nullopt);
  EXPECT_EQ(limit.admit(start + seconds(9)), std::nullopt);
}

TEST(LogLimit, TheNextLineSaysHowManyWereLeftOut) {
  LineLimit limit(1, seconds(10));
  const LineLimit::Clock::time_point start{};
  EXPECT_EQ(limit.admit(start), 0u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(limit.admit(start + seconds(1)), std::nullopt);
  EXPECT_EQ(limit.admit(start + seconds(10)), 1000u);
  EXPECT_EQ(limit.admit(start + seconds(11)), std::nullopt);
  EXPECT_EQ(limit.admit(start + seconds(20)), 1u) << "each is counted once";
}

TEST(LogLimit, TheCountStandsAtTheEndOfTheLine) {
  LineLimit limit(1, std::chrono::nanoseconds(1));
  ::testing::internal::CaptureStdout();
  warn(limit, "peer_dropped peer={}", "a");
  const std::string first = ::testing::internal::GetCapturedStdout();
  EXPECT_NE(first.find("peer_dropped peer=a\n"), std::string::npos) << first;
  EXPECT_EQ(first.find("left_out"), std::string::npos) << first;
  LineLimit slow(1, seconds(1000));
  ASSERT_EQ(slow.admit(LineLimit::Clock::now() - seconds(2000)), 0u);
  ASSERT_EQ(slow.admit(LineLimit::Clock::now() - seconds(1500)), std::nullopt);
  ::testing::internal::CaptureStdout();
  warn(slow, "peer_dropped peer={}", "b");
  const std::string second = ::testing::internal::GetCapturedStdout();
  EXPECT_NE(second.find("peer_dropped peer=b left_out=1\n"), std::string::npos) << second;
}

}  // namespace
}  // namespace deltasync::log
