#include "capacity/fluid.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace deltasync::capacity {
namespace {

Work work(double amount, std::vector<Use> uses, std::uint32_t stage = 0) {
  Work out;
  out.amount = amount;
  out.uses = std::move(uses);
  out.stage = stage;
  return out;
}

TEST(Fluid, OneLink) {
  Fluid fluid;
  const auto link = fluid.add_resource(10);
  const auto only = fluid.add(work(100, {{link, 1}}));
  fluid.run();
  EXPECT_DOUBLE_EQ(fluid.end_s(only), 10);
}

TEST(Fluid, WhoEndsLeavesItsShareToTheOthers) {
  Fluid fluid;
  const auto link = fluid.add_resource(10);
  const auto small = fluid.add(work(10, {{link, 1}}));
  const auto large = fluid.add(work(20, {{link, 1}}));
  fluid.run();
  EXPECT_DOUBLE_EQ(fluid.end_s(small), 2);  // both at 5
  EXPECT_DOUBLE_EQ(fluid.end_s(large), 3);  // the other 10 at 10
}

TEST(Fluid, WhatANarrowLinkDoesNotTakeGoesToTheOthers) {
  Fluid fluid;
  const auto shared = fluid.add_resource(10);
  const auto narrow = fluid.add_resource(4);
  const auto wide = fluid.add(work(60, {{shared, 1}}));
  const auto held = fluid.add(work(40, {{shared, 1}, {narrow, 1}}));
  fluid.run();
  EXPECT_DOUBLE_EQ(fluid.end_s(wide), 10);  // at 6, not at 5
  EXPECT_DOUBLE_EQ(fluid.end_s(held), 10);
  EXPECT_EQ(fluid.path_to(wide)[0].limit, shared);
  EXPECT_EQ(fluid.path_to(held)[0].limit, narrow);
}

TEST(Fluid, AWeightIsAShare) {
  Fluid fluid;
  const auto cores = fluid.add_resource(1);
  Work heavy = work(30, {{cores, 1}});
  heavy.weight = 3;
  const auto first = fluid.add(std::move(heavy));
  const auto second = fluid.add(work(20, {{cores, 1}}));
  fluid.run();
  EXPECT_DOUBLE_EQ(fluid.end_s(first), 40);   // at 3/4
  EXPECT_DOUBLE_EQ(fluid.end_s(second), 50);  // 10 at 1/4, 10 alone
}

TEST(Fluid, AUnitMayTakeMoreThanOneOfAResource) {
  Fluid fluid;
  const auto a = fluid.add_resource(10);
  const auto b = fluid.add_resource(10);
  const auto only = fluid.add(work(10, {{a, 1}, {b, 4}}));
  fluid.run();
  EXPECT_DOUBLE_EQ(fluid.end_s(only), 4);
  EXPECT_EQ(fluid.path_to(only)[0].limit, b);
}

TEST(Fluid, ThePathIsThatOfTheLastThatWasWaitedFor) {
  Fluid fluid;
  const auto a = fluid.add_resource(1);
  const auto b = fluid.add_resource(1);
  const auto quick = fluid.add(work(1, {{a, 1}}, 1));
  const auto slow = fluid.add(work(5, {{b, 1}}, 2));
  Work last = work(2, {{a, 1}}, 3);
  last.delay_s = 0.5;
  const WorkId after[] = {quick, slow};
  const auto end = fluid.add(std::move(last), after);
  fluid.run();
  EXPECT_DOUBLE_EQ(fluid.end_s(end), 7.5);
  const auto path = fluid.path_to(end);
  ASSERT_EQ(path.size(), 3U);
  EXPECT_EQ(path[0].stage, 3U);
  EXPECT_DOUBLE_EQ(path[0].seconds, 2);
  EXPECT_EQ(path[1].limit, kNobody);
  EXPECT_DOUBLE_EQ(path[1].seconds, 0.5);
  EXPECT_EQ(path[2].stage, 2U);
  EXPECT_EQ(path[2].limit, b);
}

TEST(Fluid, WithoutALimitOrAnAmountNoTimePasses) {
  Fluid fluid;
  const auto unlimited = fluid.add_resource(kUnlimited);
  const auto link = fluid.add_resource(1);
  const auto first = fluid.add(work(1e9, {{unlimited, 1}}));
  const auto second = fluid.add(work(0, {{link, 1}}), std::span(&first, 1));
  fluid.run();
  EXPECT_EQ(fluid.end_s(second), 0);
}

TEST(Fluid, RandomWorkEndsWithItsPathAndAlwaysAlike) {
  for (unsigned seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto pick = [&](unsigned from, unsigned to) { return std::uniform_int_distribution(from, to)(random); };
    std::vector<double> ends[2];
    const auto state = random;
    for (auto& out : ends) {
      random = state;
      Fluid fluid;
      for (unsigned i = 0; i < 6; ++i) fluid.add_resource(pick(1, 20));
      for (WorkId id = 0; id < 40; ++id) {
        std::vector<Use> uses;
        for (ResourceId r = 0; r < 6; ++r) {
          if (pick(0, 2) == 0) uses.push_back({r, static_cast<double>(pick(1, 5))});
        }
        Work next = work(pick(0, 30), uses);
        next.delay_s = pick(0, 3);
        std::vector<WorkId> after;
        for (WorkId before = 0; before < id; ++before) {
          if (pick(0, 15) == 0) after.push_back(before);
        }
        fluid.add(std::move(next), after);
      }
      fluid.run();
      for (WorkId id = 0; id < 40; ++id) {
        double sum = 0;
        for (const PathPart& part : fluid.path_to(id)) sum += part.seconds;
        EXPECT_NEAR(sum, fluid.end_s(id), 1e-6);
        out.push_back(fluid.end_s(id));
      }
    }
    EXPECT_EQ(ends[0], ends[1]);
  }
}

}  // namespace
}  // namespace deltasync::capacity
