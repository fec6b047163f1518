// Which form is chosen, by the times that are recorded of each.
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "base/form_choice.hpp"

namespace deltasync {
namespace {

constexpr std::size_t kLong = FormChoice::kTimedBytesMin;

/// Each form as often as is wanted, with the time that `time` says.
template <class Time>
void record_all(FormChoice& choice, Time time) {
  for (unsigned turn = 0; turn < FormChoice::kTimesEach; ++turn) {
    for (unsigned form = 0; form < choice.forms(); ++form) {
      EXPECT_FALSE(choice.chosen()) << turn << " " << form;
      choice.record(form, time(form, turn));
    }
  }
}

TEST(FormChoice, TheFastestOfAllIsChosen) {
  FormChoice choice(4, 1);
  record_all(choice, [](unsigned form, unsigned) { return form == 2 ? 1.0 : 2.0 + form; });
  EXPECT_EQ(choice.chosen(), 2u);
}

TEST(FormChoice, TheUsualOneStaysForASmallGain) {
  FormChoice choice(3, 1);
  record_all(choice, [](unsigned form, unsigned) { return form == 0 ? 1.0 : 1.03; });
  EXPECT_EQ(choice.chosen(), 1u);
}

/// A thread that was descheduled in the middle of some pieces: fewer than half of them.
TEST(FormChoice, OutliersDoNotDecide) {
  FormChoice choice(3, 0);
  record_all(choice, [](unsigned form, unsigned turn) {
    const double time = form == 2 ? 1.0 : 1.5;
    return form == 2 && turn % 2 == 1 ? 100.0 : time;
  });
  EXPECT_EQ(choice.chosen(), 2u);
}

TEST(FormChoice, EachInTurnThenOneForever) {
  FormChoice choice(3, 1);
  std::vector<unsigned> ran;
  const auto take = [&](unsigned form) { ran.push_back(form); };
  for (unsigned i = 0; i < 3 * FormChoice::kTimesEach; ++i) choice.run(kLong, true, take);
  for (unsigned i = 0; i < ran.size(); ++i) EXPECT_EQ(ran[i], i % 3);
  ASSERT_TRUE(choice.chosen());
  ran.clear();
  for (unsigned i = 0; i < 5; ++i) choice.run(kLong, true, take);
  EXPECT_EQ(std::set<unsigned>(ran.begin(), ran.end()), std::set<unsigned>{*choice.chosen()});
}

TEST(FormChoice, WhatIsShortOrUnsteadyIsDoneInTheUsualFormAndSaysNothing) {
  FormChoice choice(2, 1);
  const auto expect_usual = [](unsigned form) { EXPECT_EQ(form, 1u); };
  for (int i = 0; i < 100; ++i) {
    choice.run(kLong - 1, true, expect_usual);
    choice.run(kLong, false, expect_usual);
  }
  EXPECT_FALSE(choice.chosen());
}

TEST(FormChoice, ManyThreadsAtOnce) {
  FormChoice choice(3, 0);
  std::atomic<unsigned> runs{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) choice.run(kLong, true, [&](unsigned form) { runs += form < 3 ? 1 : 1000; });
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(runs, 4000u);
  EXPECT_TRUE(choice.chosen());
}

}  // namespace
}  // namespace deltasync
