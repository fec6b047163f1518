// The planner's whole table: it is a pure function of question and offer.
#include <gtest/gtest.h>

#include "agent/plans/planner.hpp"

namespace deltasync::agent {
namespace {

using Kind = Decision::Kind;

constexpr std::uint64_t kEpoch = 0x1000;
constexpr std::uint64_t kHalfBytes = 1000;

Digest128 root_of(std::uint64_t number) {
  Digest128 digest;
  digest.bytes[0] = static_cast<std::uint8_t>(number);
  digest.bytes[15] = 0xAA;
  return digest;
}
Digest128 layout_a() {
  Digest128 digest;
  digest.bytes[3] = 0xA;
  return digest;
}
Version version(std::uint64_t number) {
  return {{kEpoch, number}, "step_" + std::to_string(number)};
}
RingStep step(std::uint64_t from, std::uint64_t bytes) {
  return {version(from), version(from + 1), root_of(from), root_of(from + 1), 2, bytes, 10, {}, false};
}

/// Versions 3 → 4 → 5 → 6 in the ring, 6 served; each step 100 bytes of a half of 1000.
Offer offer() {
  Offer o;
  o.has_layout = true;
  o.layout = layout_a();
  o.has_version = true;
  o.served = version(6);
  o.served_root = root_of(6);
  o.full_bytes = kHalfBytes;
  o.ring = {step(3, 100), step(4, 100), step(5, 100)};
  return o;
}

wire::PlanRequest ask(wire::WantKind want = wire::WantKind::newest) {
  wire::PlanRequest plan;
  plan.layout = layout_a();
  plan.want = want;
  return plan;
}
wire::PlanRequest ask_from(std::uint64_t base, wire::WantKind want = wire::WantKind::newest) {
  wire::PlanRequest plan = ask(want);
  plan.base = {kEpoch, base};
  plan.base_root = root_of(base);
  return plan;
}

void expect_delta(const Decision& d, std::size_t first, std::size_t steps, std::uint64_t target) {
  EXPECT_EQ(d.kind, Kind::delta) << d.message;
  EXPECT_EQ(d.first_step, first);
  EXPECT_EQ(d.steps, steps);
  EXPECT_EQ(d.target, version(target));
  EXPECT_EQ(d.target_root, root_of(target));
}
void expect_full(const Decision& d, std::size_t steps = 0) {
  EXPECT_EQ(d.kind, Kind::full) << d.message;
  EXPECT_EQ(d.target, version(6));
  EXPECT_EQ(d.target_root, root_of(6));
  EXPECT_EQ(d.steps, steps);
}
void expect_error(const Decision& d, Errc code) {
  EXPECT_EQ(d.kind, Kind::error);
  EXPECT_EQ(d.code, code) << d.message;
  EXPECT_FALSE(d.message.empty());
}
/// Who waits in vain shall read what it could have had.
void expect_wait_naming_what_there_is(const Decision& d) {
  EXPECT_EQ(d.kind, Kind::wait);
  EXPECT_NE(d.message.find("the newest, " + to_string(version(6))), std::string::npos) << d.message;
  EXPECT_NE(d.message.find("the oldest, " + to_string(version(3))), std::string::npos) << d.message;
}

TEST(Planner, NoLayoutAndNoVersionAreWaitedFor) {
  Offer nothing;
  EXPECT_EQ(decide(ask(), nothing).kind, Kind::wait);
  Offer no_version = offer();
  no_version.has_version = false;
  no_version.ring.clear();
  EXPECT_EQ(decide(ask(), no_version).kind, Kind::wait);
}

TEST(Planner, AnotherLayoutIsAMismatchEvenBeforeTheFirstVersion) {
  wire::PlanRequest plan = ask();
  plan.layout.bytes[0] ^= 1;
  expect_error(decide(plan, offer()), Errc::layout_mismatch);
  Offer no_version = offer();
  no_version.has_version = false;
  expect_error(decide(plan, no_version), Errc::layout_mismatch);
}

TEST(Planner, WithoutABaseItIsFull) {
  expect_full(decide(ask(), offer()));
}

TEST(Planner, TheSameVersionAndRootIsUpToDate) {
  const Decision d = decide(ask_from(6), offer());
  EXPECT_EQ(d.kind, Kind::up_to_date);
  EXPECT_EQ(d.target, version(6));
}

TEST(Planner, TheChainBeginsAtExactlyTheBase) {
  expect_delta(decide(ask_from(5), offer()), 2, 1, 6);
  expect_delta(decide(ask_from(4), offer()), 1, 2, 6);
  expect_delta(decide(ask_from(3), offer()), 0, 3, 6);
}

TEST(Planner, ChainsOfSeveralStepsMayBeMerged) {
  EXPECT_EQ(decide(ask_from(5), offer()).merge_steps, 0u);
  EXPECT_EQ(decide(ask_from(4), offer()).merge_steps, 2u);
  wire::PlanRequest past = ask_from(3, wire::WantKind::number);
  past.number = 5;
  EXPECT_EQ(decide(past, offer()).merge_steps, 2u);
  Offer large = offer();
  large.ring = {step(3, 400), step(4, 400), step(5, 600)};
  const Decision full = decide(ask_from(4), large);
  expect_full(full);
  EXPECT_EQ(full.first_step, 1u);
  EXPECT_EQ(full.merge_steps, 2u);
  EXPECT_EQ(decide(ask_from(5), large).merge_steps, 0u);
  for (const Offer& o : {offer(), large}) {
    wire::PlanRequest plan = ask_from(4);
    plan.full_only = 1;
    EXPECT_EQ(decide(plan, o).merge_steps, 0u);
    plan.full_only = 0;
    plan.partial = 1;
    EXPECT_EQ(decide(plan, o).merge_steps, 0u);
  }
}

TEST(Planner, SlowLinksMayGetWhatLeadsToTheServedVersionCompact) {
  const auto expect = [](wire::PlanRequest plan, const Offer& o, bool compact, std::size_t merge_steps) {
    plan.compact = 1;
    const Decision d = decide(plan, o);
    EXPECT_EQ(d.compact, compact);
    EXPECT_EQ(d.merge_steps, merge_steps);
    plan.compact = 0;
    EXPECT_FALSE(decide(plan, o).compact);
  };
  expect(ask_from(5), offer(), true, 1);
  expect(ask_from(4), offer(), true, 2);
  expect(ask_from(3, wire::WantKind::newer), offer(), true, 3);
  wire::PlanRequest past = ask_from(4, wire::WantKind::number);
  past.number = 5;
  expect(past, offer(), false, 0);
  past.base = {kEpoch, 3};
  past.base_root = root_of(3);
  expect(past, offer(), false, 2);
  Offer large = offer();
  large.ring = {step(3, 400), step(4, 400), step(5, 1600)};
  expect(ask_from(4), large, true, 2);
  expect(ask_from(5), large, false, 0);
  wire::PlanRequest partial = ask_from(5);
  partial.partial = 1;
  expect(partial, offer(), false, 0);
  wire::PlanRequest full = ask_from(5);
  full.full_only = 1;
  expect(full, offer(), false, 0);
  expect(ask_from(6), offer(), false, 0);
  expect(ask(), offer(), false, 0);
}

TEST(Planner, AWrongRootOfAKnownVersionIsFull) {
  for (const std::uint64_t base : {3, 4, 5, 6}) {
    wire::PlanRequest plan = ask_from(base);
    plan.base_root.bytes[7] ^= 1;
    expect_full(decide(plan, offer()));
  }
}

TEST(Planner, AnUnknownBaseIsFull) {
  expect_full(decide(ask_from(2), offer()));
  expect_full(decide(ask_from(7), offer()));  // ahead of us: from an agent that saw more
  wire::PlanRequest other_epoch = ask_from(5);
  other_epoch.base.epoch = kEpoch - 1;
  expect_full(decide(other_epoch, offer()));
}

TEST(Planner, AChainThatIsNotSmallerThanAHalfIsFull) {
  Offer o = offer();
  o.ring = {step(3, 1), step(4, 400), step(5, 600)};
  expect_full(decide(ask_from(4), o));  // 1000 of 1000
  expect_delta(decide(ask_from(5), o), 2, 1, 6);
  o.ring[2].frame_bytes = 599;
  expect_delta(decide(ask_from(4), o), 1, 2, 6);
  expect_full(decide(ask_from(3), o));  // 1000 again
}

TEST(Planner, AnEmptyDeltaIsStillADelta) {
  Offer o = offer();
  o.ring[2].frame_bytes = 0;
  expect_delta(decide(ask_from(5), o), 2, 1, 6);
}

TEST(Planner, ATooLongChainIsFull) {
  Offer o = offer();
  o.ring.clear();
  o.full_bytes = ~std::uint64_t{0};
  const std::uint64_t steps = wire::kDeltaStepsMax + 1;
  for (std::uint64_t i = 0; i < steps; ++i) {
    RingStep s = step(0, 1);
    s.from.id = {kEpoch, i + 1};
    s.to.id = {kEpoch, i + 2};
    s.from_root = s.to_root = root_of(6);
    o.ring.push_back(s);
  }
  o.served.id = {kEpoch, steps + 1};
  wire::PlanRequest plan = ask();
  plan.base = {kEpoch, 1};
  plan.base_root = root_of(6);
  EXPECT_EQ(decide(plan, o).kind, Kind::full);
  plan.base = {kEpoch, 2};
  EXPECT_EQ(decide(plan, o).kind, Kind::delta);
}

TEST(Planner, FullOnlyNeverGetsADelta) {
  for (const std::uint64_t base : {5, 6}) {
    wire::PlanRequest plan = ask_from(base);
    plan.full_only = 1;
    expect_full(decide(plan, offer()));
  }
}

TEST(Planner, APartialStateGetsTheHalfAndTheSteps) {
  wire::PlanRequest plan = ask_from(4);
  plan.partial = 1;
  const Decision d = decide(plan, offer());
  expect_full(d, 2);
  EXPECT_EQ(d.first_step, 1u);
}

TEST(Planner, APartialStateAtTheTargetGetsTheRestOfIt) {
  wire::PlanRequest plan = ask_from(6);
  plan.partial = 1;
  expect_full(decide(plan, offer()), 0);
}

TEST(Planner, APartialStateOutOfTheRingGetsNoSteps) {
  wire::PlanRequest plan = ask_from(2);
  plan.partial = 1;
  expect_full(decide(plan, offer()), 0);
  wire::PlanRequest expensive = ask_from(3);
  expensive.partial = 1;
  Offer o = offer();
  o.ring[0].frame_bytes = kHalfBytes;
  expect_full(decide(expensive, o), 0);
}

/// Its trainer is another one than the agent's, and went on elsewhere, or its clock was wrong.
TEST(Planner, ABaseOfALaterEpochIsAnsweredWithWhatThereIs) {
  for (const wire::WantKind want : {wire::WantKind::newer, wire::WantKind::newest}) {
    wire::PlanRequest plan = ask(want);
    plan.base = {kEpoch + 1, 9};
    plan.base_root = root_of(9);
    expect_full(decide(plan, offer()));

    // A trainer of an older epoch took over at this agent: the ring leads back.
    Offer took_over = offer();
    took_over.ring[2].from = {{kEpoch + 1, 9}, "later"};
    took_over.ring[2].from_root = root_of(9);
    expect_delta(decide(plan, took_over), 2, 1, 6);
  }
  Offer took_over = offer();
  took_over.ring[1].to = took_over.ring[2].from = {{kEpoch + 1, 9}, "later"};
  took_over.ring[1].to_root = took_over.ring[2].from_root = root_of(9);
  wire::PlanRequest past = ask_from(4, wire::WantKind::number);
  past.epoch = kEpoch + 1;
  past.number = 9;
  const Decision d = decide(past, took_over);
  EXPECT_EQ(d.kind, Kind::delta) << "of a later epoch, and past all the same: " << d.message;
  past.number = 10;
  EXPECT_EQ(decide(past, took_over).kind, Kind::wait);
}

TEST(Planner, NewerWaitsForSomethingThatTheReceiverDoesNotHold) {
  EXPECT_EQ(decide(ask_from(6, wire::WantKind::newer), offer()).kind, Kind::wait);
  EXPECT_EQ(decide(ask_from(7, wire::WantKind::newer), offer()).kind, Kind::wait);
  expect_delta(decide(ask_from(5, wire::WantKind::newer), offer()), 2, 1, 6);
  expect_full(decide(ask(wire::WantKind::newer), offer()));
  wire::PlanRequest wrong_root = ask_from(6, wire::WantKind::newer);
  wrong_root.base_root.bytes[0] ^= 1;
  expect_full(decide(wrong_root, offer()));
  wire::PlanRequest partial = ask_from(6, wire::WantKind::newer);
  partial.partial = 1;
  expect_full(decide(partial, offer()));
}

TEST(Planner, ANumberIsServedOrReachedOrWaitedForOrGone) {
  const auto number = [](wire::PlanRequest plan, std::uint64_t n) {
    plan.want = wire::WantKind::number;
    plan.number = n;
    return plan;
  };
  expect_delta(decide(number(ask_from(5), 6), offer()), 2, 1, 6);
  expect_full(decide(number(ask(), 6), offer()));
  // A past one: by deltas alone, to the middle of the ring.
  expect_delta(decide(number(ask_from(3), 5), offer()), 0, 2, 5);
  expect_delta(decide(number(ask_from(4), 5), offer()), 1, 1, 5);
  EXPECT_EQ(decide(number(ask_from(5), 5), offer()).kind, Kind::up_to_date);
  EXPECT_EQ(decide(number(ask_from(3), 3), offer()).kind, Kind::up_to_date);  // where the ring begins
  expect_error(decide(number(ask(), 5), offer()), Errc::gone);
  expect_error(decide(number(ask_from(6), 5), offer()), Errc::gone);  // no delta leads to an older one
  expect_error(decide(number(ask_from(3), 2), offer()), Errc::gone);
  wire::PlanRequest full_only = number(ask_from(4), 5);
  full_only.full_only = 1;
  expect_error(decide(full_only, offer()), Errc::gone);
  wire::PlanRequest wrong_root = number(ask_from(4), 5);
  wrong_root.base_root.bytes[0] ^= 1;
  expect_error(decide(wrong_root, offer()), Errc::gone);
  expect_wait_naming_what_there_is(decide(number(ask_from(5), 7), offer()));
}

TEST(Planner, APastVersionIsReachedWhateverItsDeltasWeigh) {
  Offer o = offer();
  o.ring[1].frame_bytes = 10 * kHalfBytes;
  wire::PlanRequest plan = ask_from(4, wire::WantKind::number);
  plan.number = 5;
  expect_delta(decide(plan, o), 1, 1, 5);
}

TEST(Planner, GoneListsWhatThereIs) {
  wire::PlanRequest plan = ask(wire::WantKind::number);
  plan.number = 1;
  const Decision d = decide(plan, offer());
  expect_error(d, Errc::gone);
  for (const std::uint64_t number : {3, 4, 5, 6}) {
    EXPECT_NE(d.message.find(to_string(version(number))), std::string::npos) << d.message;
  }
}

TEST(Planner, ALabelIsServedOrReachedOrWaitedFor) {
  const auto label = [](wire::PlanRequest plan, const char* text) {
    plan.want = wire::WantKind::label;
    plan.label = text;
    return plan;
  };
  expect_delta(decide(label(ask_from(5), "step_6"), offer()), 2, 1, 6);
  expect_delta(decide(label(ask_from(3), "step_4"), offer()), 0, 1, 4);
  EXPECT_EQ(decide(label(ask_from(4), "step_4"), offer()).kind, Kind::up_to_date);
  expect_error(decide(label(ask(), "step_4"), offer()), Errc::gone);
  expect_wait_naming_what_there_is(decide(label(ask(), "step_99"), offer()));
  expect_error(decide(label(ask(), ""), offer()), Errc::invalid_argument);
}

TEST(Planner, OfTwoVersionsWithOneLabelTheNewestIsMeant) {
  Offer o = offer();
  o.ring[1].to.label = o.ring[2].from.label = "step_6";  // version 5 as well
  wire::PlanRequest plan = ask_from(3, wire::WantKind::label);
  plan.label = "step_6";
  expect_delta(decide(plan, o), 0, 3, 6);
}

TEST(Planner, AChainAcrossTrainersIsAChain) {
  Offer o = offer();
  // 6 is the first version of a new trainer, diffed against the old one's 5.
  o.served.id = {kEpoch + 1, 1};
  o.ring[2].to.id = o.served.id;
  const Decision d = decide(ask_from(4), o);
  EXPECT_EQ(d.kind, Kind::delta);
  EXPECT_EQ(d.target.id, o.served.id);
  wire::PlanRequest number = ask_from(4, wire::WantKind::number);
  number.number = 5;  // of the newest epoch: still to come
  EXPECT_EQ(decide(number, o).kind, Kind::wait);
  number.epoch = kEpoch;  // of the one before: the ring knows it
  expect_delta(decide(number, o), 1, 1, 5);
  number.number = 7;  // never came, and never will
  expect_error(decide(number, o), Errc::gone);
  number.epoch = kEpoch + 2;
  EXPECT_EQ(decide(number, o).kind, Kind::wait);
}

TEST(Planner, LongListsAreShortened) {
  Offer o = offer();
  for (std::uint64_t i = 6; i < 60; ++i) o.ring.push_back(step(i, 1));
  EXPECT_LT(list_versions(o).size(), 1200u);
  EXPECT_NE(list_versions(o).find("more, and the oldest, "), std::string::npos) << list_versions(o);
}

Digest128 former_root(std::uint64_t number) {
  Digest128 digest = root_of(number);
  digest.bytes[7] = 1;
  return digest;
}

/// The state that a version was published with before a damaged tile's digest was taken again is as good a base.
TEST(Planner, AFormerStateOfAVersionIsABase) {
  Offer o = offer();
  o.served_former_roots = {former_root(6)};
  o.ring[2].from_former_roots = {former_root(5)};
  wire::PlanRequest plan = ask_from(5);
  plan.base_root = former_root(5);
  expect_delta(decide(plan, o), 2, 1, 6);
  plan = ask_from(4);
  plan.base_root = former_root(4);  // of a version that never was in such a state
  EXPECT_EQ(decide(plan, o).kind, Kind::full);

  plan = ask_from(6);
  plan.base_root = former_root(6);
  const Decision there = decide(plan, o);
  EXPECT_EQ(there.kind, Kind::up_to_date);
  EXPECT_EQ(there.target_root, former_root(6)) << "what it holds, not what others get";
  plan.want = wire::WantKind::newer;
  EXPECT_EQ(decide(plan, o).kind, Kind::wait);
  plan.want = wire::WantKind::number;
  plan.number = 5;
  plan.base = {kEpoch, 5};
  plan.base_root = former_root(5);
  EXPECT_EQ(decide(plan, o).kind, Kind::up_to_date);
}

/// Steps that tiles were left out of lead to the version behind them only.
TEST(Planner, APartialStepLeadsOnOnly) {
  Offer o = offer();
  o.ring[0].partial = o.ring[1].partial = true;
  expect_delta(decide(ask_from(3), o), 0, 3, 6);
  expect_delta(decide(ask_from(4), o), 1, 2, 6);
  for (const std::uint64_t number : {4, 5}) {
    wire::PlanRequest plan = ask_from(3, wire::WantKind::number);
    plan.number = number;
    const Decision d = decide(plan, o);
    EXPECT_EQ(d.kind, Kind::error);
    EXPECT_EQ(d.code, Errc::gone);
  }
}

}  // namespace
}  // namespace deltasync::agent
