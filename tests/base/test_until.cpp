// The two ends of a call: its deadline, and a stop that its caller asks for.
#include "base/until.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <stop_token>
#include <thread>

namespace deltasync {
namespace {

constexpr std::chrono::minutes kFar(5);

TEST(Until, NamesWhatWasBeingDone) {
  EXPECT_TRUE(Until(Deadline::after(kFar)).check("reading").ok());
  const auto late = Until(Deadline::after(std::chrono::seconds(0))).check("reading");
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().to_string(), "timed_out: deadline passed while reading");
  std::stop_source stop;
  const Until until(Deadline::after(kFar), stop.get_token());
  EXPECT_TRUE(until.check("reading").ok());
  EXPECT_FALSE(until.over());
  stop.request_stop();
  EXPECT_TRUE(until.over());
  EXPECT_EQ(until.check("reading").error().to_string(), "cancelled: stopped while reading");
}

TEST(Until, APauseEndsWithTheDeadlineAndWithAStop) {
  const Deadline far = Deadline::after(kFar);
  Until(Deadline::after(std::chrono::milliseconds(1))).pause(kFar * 2);
  std::stop_source stop;
  std::jthread other([&] { stop.request_stop(); });
  Until(far, stop.get_token()).pause(kFar * 2);
  EXPECT_FALSE(far.passed()) << "the stop woke nobody";
}

TEST(Until, TheEarlierDeadlineKeepsTheStop) {
  std::stop_source stop;
  stop.request_stop();
  const Until until = Until(Deadline::after(kFar), stop.get_token()).earlier(Deadline::after(std::chrono::seconds(0)));
  EXPECT_TRUE(until.deadline().passed());
  EXPECT_TRUE(until.stop_requested());
}

}  // namespace
}  // namespace deltasync
