// The two ends of a call: its deadline, and a stop that its caller asks for.
#include "base/call_context.hpp"
#include "base/deadline.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <stop_token>
#include <thread>

namespace deltasync {
namespace {

constexpr std::chrono::minutes kFar(5);

TEST(CallContext, NamesWhatWasBeingDone) {
  EXPECT_TRUE(CallContext(Deadline::after(kFar)).check("reading").ok());
  const auto late = CallContext(Deadline::after(std::chrono::seconds(0))).check("reading");
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().to_string(), "timed_out: deadline passed while reading");
  std::stop_source stop;
  const CallContext until(Deadline::after(kFar), stop.get_token());
  EXPECT_TRUE(until.check("reading").ok());
  EXPECT_FALSE(until.over());
  stop.request_stop();
  EXPECT_TRUE(until.over());
  EXPECT_EQ(until.check("reading").error().to_string(), "cancelled: stopped while reading");
}

TEST(CallContext, APauseEndsWithTheDeadlineAndWithAStop) {
  const Deadline far = Deadline::after(kFar);
  CallContext(Deadline::after(std::chrono::milliseconds(1))).pause(kFar * 2);
  std::stop_source stop;
  std::jthread other([&] { stop.request_stop(); });
  CallContext(far, stop.get_token()).pause(kFar * 2);
  EXPECT_FALSE(far.passed()) << "the stop woke nobody";
}

TEST(CallContext, TheEarlierDeadlineKeepsTheStop) {
  std::stop_source stop;
  stop.request_stop();
  const CallContext until =
      CallContext(Deadline::after(kFar), stop.get_token()).earlier(Deadline::after(std::chrono::seconds(0)));
  EXPECT_TRUE(until.deadline().passed());
  EXPECT_TRUE(until.stop_requested());
}

TEST(CallContext, WithoutALimitThereIsMuchLeftButNotEndless) {
  const CallContext until = CallOptions();
  EXPECT_FALSE(until.over());
  EXPECT_GT(until.deadline().remaining(), std::chrono::hours(24 * 365));
  EXPECT_LT(until.deadline().at() + std::chrono::hours(24 * 365), std::chrono::steady_clock::time_point::max())
      << "what is added to it does not wrap";
  EXPECT_FALSE(until.stop().stop_possible());
}

TEST(CallContext, OptionsAreTheSameThereAndBack) {
  std::stop_source stop;
  const CallContext until = CallOptions::within(kFar, stop.get_token());
  EXPECT_GT(until.deadline().remaining(), kFar / 2);
  const CallOptions back = until;
  EXPECT_EQ(back.deadline, until.deadline().at());
  stop.request_stop();
  EXPECT_TRUE(back.stop.stop_requested());
  EXPECT_TRUE(CallContext(CallOptions::within(std::chrono::seconds(-1))).over());
}

}  // namespace
}  // namespace deltasync
