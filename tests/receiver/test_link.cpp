#include <gtest/gtest.h>

#include <utility>

#include "receiver/link.hpp"

namespace deltasync::receiver {
namespace {

constexpr double kGbps = 1e9 / 8;
constexpr std::uint64_t kMb = 1'000'000;

TEST(SmallerPays, OnlyOnAKnownLink) {
  const TwoForms forms{1000 * kMb, 1, 0, 0};
  EXPECT_FALSE(smaller_pays(forms, LinkRate()));
  EXPECT_TRUE(smaller_pays(forms, LinkRate{kGbps}));
}

TEST(SmallerPays, NeverWithoutFewerBytes) {
  EXPECT_FALSE(smaller_pays({1000, 1000, 0, 0}, LinkRate{1}));
  EXPECT_FALSE(smaller_pays({1000, 1001, 0, 0}, LinkRate{1}));
  EXPECT_FALSE(smaller_pays({0, 0, 0, 0}, LinkRate{1}));
}

TEST(SmallerPays, TheWorkBesideTheTransferIsHiddenByIt) {
  // 8 s plain, 5.3 s packed.
  EXPECT_TRUE(smaller_pays({1000 * kMb, 667 * kMb, 5, 0}, LinkRate{kGbps}));
  EXPECT_FALSE(smaller_pays({1000 * kMb, 667 * kMb, 7, 0}, LinkRate{kGbps}));
  // What comes first is not.
  EXPECT_TRUE(smaller_pays({1000 * kMb, 667 * kMb, 0, 1}, LinkRate{kGbps}));
  EXPECT_FALSE(smaller_pays({1000 * kMb, 667 * kMb, 0, 5}, LinkRate{kGbps}));
}

TEST(SmallerPays, ALittleIsNotEnough) {
  EXPECT_FALSE(smaller_pays({1000 * kMb, 900 * kMb, 0, 0}, LinkRate{kGbps}));
  // A third of almost nothing: a few milliseconds are lost in the noise.
  EXPECT_FALSE(smaller_pays({1 * kMb, kMb * 2 / 3, 0, 0}, LinkRate{kGbps}));
}

TEST(LinkMeter, WhatIsGivenIsBelieved) {
  LinkMeter meter(10);
  EXPECT_FALSE(meter.measures());
  EXPECT_FALSE(meter.wants_sample());
  meter.add(1000 * kMb, 1000);
  EXPECT_DOUBLE_EQ(meter.rate().bytes_per_s, 10 * kGbps);
  EXPECT_DOUBLE_EQ(LinkMeter(400).rate().bytes_per_s, 400 * kGbps);
}

TEST(LinkMeter, UnknownUntilEnoughBytesCame) {
  LinkMeter meter;
  EXPECT_TRUE(meter.wants_sample());
  EXPECT_FALSE(meter.rate().known());
  // Many small rounds are many waits for something else.
  for (int i = 0; i < 100; ++i) meter.add(LinkMeter::kSampleBytes / 2, 0.05);
  EXPECT_TRUE(meter.wants_sample());
  EXPECT_FALSE(meter.rate().known());
  meter.add(LinkMeter::kSampleBytes, 0.1);
  EXPECT_DOUBLE_EQ(meter.rate().bytes_per_s, static_cast<double>(LinkMeter::kSampleBytes) / 0.1);
  meter.add(LinkMeter::kSampleBytes - 1, 0.01);
  EXPECT_DOUBLE_EQ(meter.rate().bytes_per_s, static_cast<double>(LinkMeter::kSampleBytes) / 0.1);
}

TEST(LinkMeter, OneMeasurementIsConfirmedByAnother) {
  LinkMeter meter;
  meter.add(10 * kMb, 0.1);
  EXPECT_TRUE(meter.wants_sample());
  EXPECT_TRUE(meter.rate().known()) << "better than nothing";
  meter.at_least(20 * kMb, 0.15);
  EXPECT_TRUE(meter.wants_sample()) << "at least is no measurement";
  meter.add(20 * kMb, 0.2);
  EXPECT_FALSE(meter.wants_sample());
  EXPECT_TRUE(meter.rate().known());
}

TEST(LinkMeter, ASlowStartIsNoSlowLink) {
  LinkMeter meter;
  // 10 Gbit/s over 100 ms: what is under way doubles with each round trip.
  meter.add(10 * kMb, 0.6);
  for (const auto& [bytes, waited_s] :
       {std::pair(16 * kMb, 0.15), std::pair(32 * kMb, 0.1), std::pair(64 * kMb, 0.1)}) {
    meter.add(bytes, waited_s);
    EXPECT_TRUE(meter.wants_sample()) << bytes;
    EXPECT_FALSE(meter.rate().known()) << bytes;
  }
  meter.add(128 * kMb, 0.14);
  EXPECT_FALSE(meter.wants_sample());
  EXPECT_DOUBLE_EQ(meter.rate().bytes_per_s, static_cast<double>(128 * kMb) / 0.14);
  // From there on a worse one changes nothing, and a much better one says that it was not all.
  meter.add(256 * kMb, 0.5);
  EXPECT_TRUE(meter.rate().known());
  meter.add(256 * kMb, 0.17);
  EXPECT_FALSE(meter.rate().known());
  EXPECT_TRUE(meter.wants_sample());
}

TEST(LinkMeter, RisingIsMoreThanNoise) {
  for (const auto& [waited_s, rising] : {std::pair(0.67, false), std::pair(0.66, true)}) {
    LinkMeter meter;
    meter.add(100 * kMb, 1);
    meter.add(100 * kMb, waited_s);
    EXPECT_EQ(meter.wants_sample(), rising) << waited_s;
    EXPECT_NE(meter.rate().known(), rising) << waited_s;
  }
}

TEST(LinkMeter, AFastOneNeedsNoOther) {
  LinkMeter meter;
  meter.add(100 * kMb, 1);
  meter.add(100 * kMb, 0.01);
  EXPECT_FALSE(meter.wants_sample());
  EXPECT_FALSE(meter.rate().known());
  // What is slower after it is not believed before the fast one is forgotten.
  meter.add(100 * kMb, 1);
  EXPECT_FALSE(meter.rate().known());
  EXPECT_FALSE(meter.wants_sample());
}

TEST(LinkMeter, APullThatWaitsForItsOwnWorkShowsAFastLink) {
  LinkMeter meter;
  // A gigabyte in which the streams waited for a tenth of a second only, however long the whole took.
  meter.add(1000 * kMb, 0.1);
  EXPECT_FALSE(meter.wants_sample());
  EXPECT_FALSE(meter.rate().known());
  meter.add(1000 * kMb, 0);
  EXPECT_FALSE(meter.rate().known());
}

/// However the division is rounded.
TEST(LinkMeter, FastIsFastForAnyNumberOfBytes) {
  for (std::uint64_t bytes = LinkMeter::kSampleBytes; bytes < LinkMeter::kSampleBytes + 2000; ++bytes) {
    LinkMeter meter;
    meter.add(bytes, 0);
    ASSERT_FALSE(meter.rate().known()) << bytes;
    ASSERT_FALSE(meter.wants_sample()) << bytes;
  }
}

TEST(LinkMeter, AMeasurementThatWasTooLowIsRaised) {
  LinkMeter meter;
  meter.at_least(100 * kMb, 1);
  EXPECT_TRUE(meter.wants_sample());
  EXPECT_FALSE(meter.rate().known()) << "at least is no rate";
  meter.add(100 * kMb, 1);
  for (int i = 0; i < 4; ++i) meter.at_least(100 * kMb, 5);
  EXPECT_DOUBLE_EQ(meter.rate().bytes_per_s, 1e8) << "nor does it push measurements out";
  meter.at_least(LinkMeter::kSampleBytes - 1, 0.01);
  EXPECT_DOUBLE_EQ(meter.rate().bytes_per_s, 1e8) << "few bytes say nothing here either";
  meter.at_least(100 * kMb, 0.5);
  EXPECT_DOUBLE_EQ(meter.rate().bytes_per_s, 2e8);
  meter.at_least(100 * kMb, 0.01);
  EXPECT_FALSE(meter.rate().known()) << "fast";
}

TEST(LinkMeter, TheBestOfTheLastOnes) {
  LinkMeter meter;
  meter.add(100 * kMb, 1);
  meter.add(100 * kMb, 4);  // a stall makes no slow link
  EXPECT_DOUBLE_EQ(meter.rate().bytes_per_s, 1e8);
  for (int i = 0; i < 3; ++i) meter.add(100 * kMb, 2);
  EXPECT_DOUBLE_EQ(meter.rate().bytes_per_s, 5e7) << "what is long past does not count";
}

TEST(Classes, PayWhereTheirBytesTakeLongerThanTheirMaking) {
  constexpr std::uint64_t kModel = 2048u << 20;
  constexpr std::uint64_t kChanged = kModel / 2 / 100;  // 4 MB saved, a second of work
  constexpr double kPatience = 2.5;
  EXPECT_TRUE(classes_pay(kChanged, kModel, {0.01 * kGbps}, kPatience));
  EXPECT_FALSE(classes_pay(kChanged, kModel, {1 * kGbps}, kPatience));
  EXPECT_FALSE(classes_pay(kChanged, kModel, LinkRate(), kPatience)) << "not known, or fast";
  EXPECT_FALSE(classes_pay(0, kModel, {0.01 * kGbps}, kPatience)) << "nothing is known of deltas";
  EXPECT_FALSE(classes_pay(kChanged, kModel, {0.01 * kGbps}, 0.5)) << "the plan would not wait for them";
}

TEST(Classes, APlanAllowsFourTimesWhatTheirMakingTakes) {
  constexpr std::uint64_t kSmall = 15'000 * kMb;
  constexpr std::uint64_t kLarge = 40'000 * kMb;  // takes longer than any agent waits
  EXPECT_TRUE(classes_pay(kSmall / 200, kSmall, {0.01 * kGbps}, kClassesPatienceS));
  EXPECT_FALSE(classes_pay(kLarge / 200, kLarge, {0.01 * kGbps}, kClassesPatienceS));
  EXPECT_DOUBLE_EQ(classes_plan_s(kSmall), 30);
  EXPECT_DOUBLE_EQ(classes_plan_s(kLarge), 4 * kClassesPatienceS) << "what is asked for all the same";
  EXPECT_LT(classes_plan_s(1 * kMb), 0.01);
}

}  // namespace
}  // namespace deltasync::receiver
