// Closed forms, by hand. A gigabit is 125 MB/s; kFraming is what Ethernet adds at an MTU of 9000.
#include "capacity/plan.hpp"

#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>

namespace deltasync::capacity {
namespace {

constexpr double kGigabit = 125e6;
constexpr double kFraming = 9038.0 / 8948.0;
constexpr double kModel = 2e9;  ///< bytes
/// A whole model over a gigabit.
constexpr double kWholeS = kModel * kFraming / kGigabit;

Group group(const std::string& name, std::uint32_t count, std::uint32_t from = 0) {
  Group out;
  out.name = name;
  out.count = count;
  out.from = from;
  out.link = kGigabit;
  out.cores = 1;
  return out;
}

/// A billion parameters of bf16 and whole models. The levels are trainers, relays …, engines.
Topology topology(const std::vector<std::uint32_t>& levels) {
  Topology out;
  out.model.parameters = kModel / 2;
  out.model.changed = 1;
  out.mtu = 9000;
  for (std::uint32_t i = 0; i < levels.size(); ++i) {
    out.groups.push_back(group("level" + std::to_string(i), levels[i], i > 0 ? i - 1 : 0));
  }
  out.relay_groups = static_cast<std::uint32_t>(levels.size() - 2);
  return out;
}

/// Where links alone cost anything.
Rates no_work() {
  return {};
}

TEST(Plan, OneLink) {
  const Prediction one = predict(topology({1, 1}), no_work());
  EXPECT_TRUE(one.full);
  EXPECT_EQ(one.wire_bytes, kModel);
  EXPECT_NEAR(one.all_s(), kWholeS, 1e-6);
}

TEST(Plan, ReceiversShareTheUplink) {
  const Prediction eight = predict(topology({1, 8}), no_work());
  EXPECT_NEAR(eight.all_s(), 8 * kWholeS, 1e-6);
  EXPECT_NEAR(eight.until(0.5), 8 * kWholeS, 1e-6);  // all end together
  EXPECT_EQ(eight.bottleneck().limit, "up links of level0");
  EXPECT_NEAR(eight.bottleneck().seconds, 8 * kWholeS, 1e-6);
}

TEST(Plan, TrainersShareTheModel) {
  EXPECT_NEAR(predict(topology({4, 8}), no_work()).all_s(), 2 * kWholeS, 1e-6);
  const Prediction enough = predict(topology({8, 4}), no_work());
  EXPECT_NEAR(enough.all_s(), kWholeS, 1e-6);
  EXPECT_EQ(enough.bottleneck().limit, "down links of level1");
}

TEST(Plan, RelaysHandOnWhatComes) {
  EXPECT_NEAR(predict(topology({1, 1, 1, 1}), no_work()).all_s(), kWholeS, 1e-6);
  EXPECT_NEAR(predict(topology({1, 2, 4, 8}), no_work()).all_s(), 2 * kWholeS, 1e-6);
  EXPECT_NEAR(predict(topology({1, 2, 12}), no_work()).all_s(), 6 * kWholeS, 1e-6);
  // However fast it is: nobody has all of it before its relay has.
  Topology fast = topology({1, 1, 1});
  fast.groups[2].link = 10 * kGigabit;
  EXPECT_NEAR(predict(fast, no_work()).all_s(), kWholeS, 1e-6);
  // An engine of several hosts takes slices: once the relay has all of it.
  Topology slices = topology({1, 1, 1});
  slices.groups[2].hosts = 2;
  EXPECT_NEAR(predict(slices, no_work()).all_s(), 2 * kWholeS, 1e-6);
}

/// Parts of several trainers are put together first, by the relay next to them.
TEST(Plan, PartsAreServedOnceTheyAreWhole) {
  EXPECT_NEAR(predict(topology({4, 1, 1}), no_work()).all_s(), 2 * kWholeS, 1e-6);
  EXPECT_NEAR(predict(topology({4, 1, 1, 1}), no_work()).all_s(), 2 * kWholeS, 1e-6);
  // Three engines on two relays: the one that is alone has all of its relay's link.
  const Prediction uneven = predict(topology({4, 2, 3}), no_work());
  EXPECT_NEAR(uneven.ready_s[0], (1 + 1) * kWholeS, 1e-6);
  EXPECT_NEAR(uneven.ready_s[2], (1 + 2) * kWholeS, 1e-6);
}

TEST(Plan, ADeltaIsWhatChanged) {
  Topology fleet = topology({1, 10});
  fleet.model.changed = 0.01;
  fleet.model.bits_per_change = 10;
  const Prediction delta = predict(fleet, no_work());
  EXPECT_FALSE(delta.full);
  EXPECT_NEAR(delta.wire_bytes, 1e9 * 0.01 * 10 / 8, 1e-3);
  EXPECT_NEAR(delta.all_s(), 10 * delta.wire_bytes * kFraming / kGigabit, 1e-9);
  fleet.model.changed = 0.9;
  fleet.model.bits_per_change = 0;
  Rates rates;
  rates.bits_per_change = 20;  // 18 of 16 bits
  EXPECT_TRUE(predict(fleet, rates).full);
}

TEST(Plan, WorkTakesTheCoresOfItsHost) {
  Topology fleet = topology({2, 1, 1});
  fleet.model.changed = 0.01;
  for (Group& each : fleet.groups) each.link = 0;
  fleet.groups[0].cores = 2;
  Rates rates;
  rates.bits_per_change = 8;
  rates.offload_s = 1e-9;       // 2 core-seconds
  rates.diff_s = 2e-9;          // 4
  rates.relay_commit_s = 3e-9;  // 6
  rates.relay_diff_s = 4e-9;    // 8
  rates.commit_s = 1e-7;        // 1, of 1e7 changes
  rates.pull_s = 0.25;
  const Prediction delta = predict(fleet, rates);
  EXPECT_NEAR(delta.all_s(), (2 + 4) / 4.0 + 0.25 + 6 + 8 + 0.25 + 1, 1e-9);
  std::vector<std::string> stages;
  for (const PathShare& part : delta.path) stages.push_back(part.stage);
  EXPECT_THAT(stages, testing::ElementsAre("offload", "diff", "pull by level1", "commit by level1", "diff by level1",
                                           "pull by level2", "commit by level2"));
  fleet.model.changed = 1;  // a relay copies and diffs like a trainer; an engine has it in place
  EXPECT_NEAR(predict(fleet, rates).all_s(), (2 + 4) / 4.0 + 0.25 + 2 + 4 + 0.25, 1e-9);
}

TEST(Plan, BytesCostBothEndsTheirCores) {
  Topology fleet = topology({1, 2});
  for (Group& each : fleet.groups) each.link = 0;
  Rates rates;
  rates.send_s = 1e-9;
  rates.receive_s = 1.5e-9;
  EXPECT_NEAR(predict(fleet, rates).all_s(), 2 * kModel * 1e-9, 1e-6);  // the trainer sends to both
  fleet.processors["lab"] = 2;
  for (Group& each : fleet.groups) each.processor = "lab";
  EXPECT_NEAR(predict(fleet, rates).all_s(), 2 * kModel * 2.5e-9 / 2, 1e-6);
  EXPECT_EQ(predict(fleet, rates).bottleneck().limit, "the processor lab");
}

TEST(Plan, SharedLinksMemoryAndDelays) {
  Topology fleet = topology({4, 4});
  fleet.links["wan"] = kGigabit / 2;
  fleet.groups[1].through = "wan";
  fleet.groups[0].delay_ms = 10;
  fleet.groups[1].delay_ms = 40;
  const Prediction far = predict(fleet, no_work());
  EXPECT_NEAR(far.all_s(), 8 * kWholeS + 4 * 0.1, 1e-6);  // four round trips
  EXPECT_EQ(far.bottleneck().limit, "the link wan");

  Topology narrow = topology({1, 1});
  narrow.groups[0].memory_gbps = 1;
  narrow.groups[1].link = 0;
  narrow.groups[0].link = 0;
  Rates rates;
  rates.offload_s = 1e-12;
  EXPECT_NEAR(predict(narrow, rates).all_s(), (2 + 2 + 1) * kModel / 1e9, 0.01);  // copied, compared, sent
}

TEST(Plan, HostsOfAnEngineShareItsModel) {
  Topology fleet = topology({8, 2});
  fleet.groups[1].hosts = 4;
  const Prediction shared = predict(fleet, no_work());
  EXPECT_EQ(shared.ready_s.size(), 2U);
  EXPECT_NEAR(shared.all_s(), kWholeS / 4, 1e-6);
}

TEST(Plan, PartsOfTheEngines) {
  Prediction some;
  some.ready_s = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  EXPECT_EQ(some.until(0.5), 5);
  EXPECT_EQ(some.until(0.9), 9);
  EXPECT_EQ(some.until(0.91), 10);
  EXPECT_EQ(some.until(0), 1);
}

TEST(Plan, TheSeedSaysWhichHostsAreSlower) {
  Topology fleet = topology({1, 20});
  fleet.model.changed = 0.01;
  fleet.groups[1].slower = 0.5;
  Rates rates;
  rates.bits_per_change = 8;
  rates.commit_s = 1e-7;  // a second on a core
  const Prediction first = predict(fleet, rates, 1);
  EXPECT_EQ(first.ready_s, predict(fleet, rates, 1).ready_s);
  EXPECT_NE(first.ready_s, predict(fleet, rates, 2).ready_s);
  EXPECT_GT(first.all_s(), first.until(0.5));
  fleet.groups[1].slower = 0;
  const Prediction alike = predict(fleet, rates, 1);
  EXPECT_EQ(alike.all_s(), predict(fleet, rates, 2).all_s());
  EXPECT_GE(first.ready_s[0], alike.all_s());
  EXPECT_LE(first.all_s(), alike.all_s() + 0.5);
}

TEST(Plan, TrainersThatAreAlikeAreOne) {
  Topology fleet = topology({5, 7});
  const Prediction one = predict(fleet, builtin_rates());
  fleet.groups[0].slower = 1e-12;
  const Prediction five = predict(fleet, builtin_rates());
  EXPECT_NEAR(one.all_s(), five.all_s(), 1e-6);
  EXPECT_EQ(one.bottleneck().limit, five.bottleneck().limit);
}

TEST(Plan, AnotherLevelOfRelays) {
  // Links alone: k relays cost k and at the same time 64/k models, best with 8.
  const Topology links = topology({1, 64});
  const auto level = add_relay_level(links, no_work(), 1, predict(links, no_work()));
  ASSERT_TRUE(level);
  EXPECT_EQ(level->count, 8U);
  EXPECT_EQ(level->before, "level1");
  EXPECT_NEAR(level->then.all_s(), 8 * kWholeS, 1e-6);
  // Only relays pass the line between the sites.
  Topology sites = topology({1, 64});
  sites.links["wan"] = kGigabit / 100;
  sites.groups[1].through = "wan";
  const auto remote = add_relay_level(sites, no_work(), 1, predict(sites, no_work()));
  EXPECT_EQ(remote->count, 1U);
  EXPECT_NEAR(remote->then.all_s(), 100 * kWholeS, 1e-4);
  EXPECT_FALSE(add_relay_level(topology({1, 1}), no_work(), 1, predict(topology({1, 1}), no_work())));
}

TEST(Plan, ThePathIsAllOfTheTime) {
  Topology fleet = topology({3, 4, 50});
  fleet.groups[1].slower = fleet.groups[2].slower = 0.3;
  const Prediction full = predict(fleet, builtin_rates(), 7);
  const double sum = std::accumulate(full.path.begin(), full.path.end(), 0.0,
                                     [](double s, const PathShare& part) { return s + part.seconds; });
  EXPECT_NEAR(sum, full.all_s(), 1e-6 * full.all_s());
}

}  // namespace
}  // namespace deltasync::capacity
