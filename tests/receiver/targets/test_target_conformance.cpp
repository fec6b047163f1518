// What every kind of target promises (receiver/targets/target.hpp); what only some do is in
// test_target_capabilities.cpp. A new kind joins by one more Kind in the list of target_places.hpp.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>

#include "base/deadline.hpp"
#include "format/tiling.hpp"
#include "tests/receiver/target_conformance.hpp"
#include "tests/receiver/target_places.hpp"
#include "tests/support/late_clock.hpp"

namespace deltasync::test {
namespace {

using delta::ValueForm;

TEST_P(TargetConformance, StartsWithNothing) {
  EXPECT_TRUE(holds_nothing());
  EXPECT_TRUE(fails(roll_back(*target_), Errc::unsupported));
  EXPECT_EQ(target_->layout()->digest(), trainer_->layout()->digest());
}

TEST_P(TargetConformance, FullThenDeltas) {
  Reference before = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, before)));
  EXPECT_TRUE(holds(before));
  for (const double density : {0.01, 0.001, 0.3, 0.0, 1.0, 0.01, 0.01, 0.01}) {
    const Reference after = trainer_->step(density);
    ASSERT_TRUE(ok(commit_delta(before, after))) << density;
    ASSERT_TRUE(holds(after)) << density;
    before = after;
  }
  EXPECT_EQ(resolved_frames_ != 0, GetParam().resolves);
}

TEST_P(TargetConformance, AbsoluteValuesToo) {
  Reference before = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, before)));
  for (const double density : {0.01, 0.3, 1.0, 0.01}) {
    const Reference after = trainer_->step(density);
    ASSERT_TRUE(ok(commit_delta(before, after, ValueForm::absolute)));
    ASSERT_TRUE(holds(after));
    before = after;
  }
}

TEST_P(TargetConformance, OnlySomeTensorsChange) {
  const Reference before = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, before)));
  Reference after = before;
  after.state.version = {{before.state.version.id.epoch, 9}, "one element"};
  const Tensor& tensor = trainer_->layout()->tensors()[5];  // has column cuts
  after.half[tensor.offset + tensor.bytes / 2] ^= std::byte{1};
  delta::half_digests(*trainer_->layout(), after.half, after.state.digests, pool_);
  after.state.root = delta::root_digest(after.state.digests);
  ASSERT_TRUE(ok(commit_delta(before, after)));
  EXPECT_TRUE(holds(after));
}

/// The deadline of a call passes at one of its looks at the clock after the other, until the call is in time. `call`
/// says how it ended; whenever it was late, `kept` must hold. Returns how often that was.
std::size_t end_at_each_look(const std::function<Status(Deadline)>& call,
                             const std::function<testing::AssertionResult()>& kept, bool slow) {
  std::size_t times = 0;
  for (std::uint64_t look = 1;; look += 1 + look / (slow ? 2 : 8)) {
    // Nearer than a device's patience, and than the grace of what takes a commit back.
    const Deadline deadline = Deadline::after(std::chrono::seconds(5));
    const Status status = [&] {
      const LateClock late(deadline, look);
      return call(deadline);
    }();
    if (status.ok()) return times;
    ++times;
    EXPECT_EQ(status.error().code(), Errc::timed_out) << status.error().to_string();
    EXPECT_TRUE(kept()) << "after look " << look;
    if (testing::Test::HasFailure()) return times;
  }
}

TEST_P(TargetConformance, ADeadlineThatPassesKeepsTheOldVersion) {
  start(std::make_unique<TrainerModel>(7, std::vector<TensorSpec>{{"a", Dtype::bf16, {64, 48}, {16, 32, 48}, {}},
                                                                  {"b", Dtype::bf16, {64, 48}, {16, 32, 48}, {}}}));
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  const Reference second = trainer_->step(0.05);
  const Reference third = trainer_->step(0.05);
  const auto steps = [&] {
    std::vector<StagedStep> made;
    if (GetParam().resolves) {
      made.push_back(trainer_->delta_by_tile(first, third));
    } else {
      made.push_back(trainer_->delta_by_tile(first, second));
      made.push_back(trainer_->delta_by_tile(second, third));
    }
    return made;
  };
  ASSERT_EQ(steps()[0].frames.size(), 8u);
  const auto commit = [&](Deadline deadline) { return commit_steps(steps(), third.state, deadline); };
  EXPECT_GT(end_at_each_look(
                commit, [&] { return holds(first); }, GetParam().slow),
            1u);
  ASSERT_TRUE(holds(third));
  ASSERT_TRUE(ok(roll_back(*target_)));
  ASSERT_TRUE(ok(commit_steps(steps(), third.state, in_time())));
  EXPECT_TRUE(holds(third));
}

TEST_P(TargetConformance, ForgottenRollback) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  const Reference second = trainer_->step(0.1);
  ASSERT_TRUE(ok(commit_delta(first, second)));
  forget_rollback(*target_);
  EXPECT_TRUE(fails(roll_back(*target_), Errc::unsupported));
  EXPECT_TRUE(holds(second));
  const Reference third = trainer_->step(0.1);
  ASSERT_TRUE(ok(commit_whole(*target_, third)));
  forget_rollback(*target_);
  EXPECT_TRUE(fails(roll_back(*target_), Errc::unsupported));
  EXPECT_TRUE(holds(third));
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  forget_rollback(*target_);  // an open update is not touched
  const Reference fourth = trainer_->step(0.1);
  fill_full(*target_, fourth);
  ASSERT_TRUE(ok(target_->commit_full(fourth.state, in_time())));
  EXPECT_TRUE(holds(fourth));
  ASSERT_TRUE(ok(roll_back(*target_)));
  EXPECT_TRUE(holds(third));
}

TEST_P(TargetConformance, RollbackOfTheFirstFullLeavesNothing) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  ASSERT_TRUE(ok(roll_back(*target_)));
  EXPECT_TRUE(holds_nothing());
  EXPECT_TRUE(fails(roll_back(*target_), Errc::unsupported));
  ASSERT_TRUE(ok(commit_whole(*target_, first)));  // the same version once more
  EXPECT_TRUE(holds(first));
}

TEST_P(TargetConformance, RollbackOfDeltas) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  for (const double density : {0.01, 1.0}) {
    for (const ValueForm form : {ValueForm::ulp, ValueForm::absolute}) {
      const Reference before = trainer_->now();
      const Reference after = trainer_->step(density);
      ASSERT_TRUE(ok(commit_delta(before, after, form)));
      ASSERT_TRUE(ok(roll_back(*target_)));
      ASSERT_TRUE(holds(before)) << density;
      EXPECT_TRUE(fails(roll_back(*target_), Errc::unsupported));
      ASSERT_TRUE(ok(commit_delta(before, after, form)));  // the same version once more
      ASSERT_TRUE(holds(after));
    }
  }
}

TEST_P(TargetConformance, AChainIsOneUpdate) {
  ASSERT_TRUE(ok(commit_whole(*target_, trainer_->now())));
  for (const ValueForm form : {ValueForm::ulp, ValueForm::absolute}) {
    std::vector<Reference> versions{trainer_->now()};
    for (const double density : {0.05, 0.5, 0.05, 0.9}) versions.push_back(trainer_->step(density));
    ASSERT_TRUE(ok(commit_chain(versions, form)));
    ASSERT_TRUE(holds(versions.back()));
    ASSERT_TRUE(ok(roll_back(*target_)));
    ASSERT_TRUE(holds(versions.front()));
    ASSERT_TRUE(ok(commit_chain(versions, form)));
    ASSERT_TRUE(holds(versions.back()));
  }
}

TEST_P(TargetConformance, ExponentClassesToo) {
  ASSERT_TRUE(ok(commit_whole(*target_, trainer_->now())));
  for (const std::size_t length : {1, 3}) {
    std::vector<Reference> versions{trainer_->now()};
    std::size_t classes = 0;
    for (std::size_t i = 0; i < length; ++i) versions.push_back(trainer_->small_step(0.03));
    const auto steps = [&] {
      std::vector<StagedStep> made;
      for (std::size_t i = 0; i < length; ++i) made.push_back(trainer_->compact_delta(versions[i], versions[i + 1]));
      for (const StagedFrame& frame : made.back().frames) {
        for (const delta::TileRecord& record : frame.records) {
          classes += record.codec == delta::Codec::rice_class ? 1 : 0;
        }
      }
      return made;
    };
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(ok(target_->commit_delta(steps(), versions.back().state, in_time())));
      ASSERT_TRUE(holds(versions.back()));
      if (i == 1) break;
      ASSERT_TRUE(ok(roll_back(*target_)));
      ASSERT_TRUE(holds(versions.front()));
    }
    EXPECT_GT(classes, 0u);
  }
}

TEST_P(TargetConformance, FullOverLiveStages) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  const Reference second = trainer_->step(0.5);
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  EXPECT_TRUE(holds(first));
  fill_full(*target_, second);
  EXPECT_TRUE(holds(first)) << "bytes of an uncommitted version are visible";
  ASSERT_TRUE(ok(target_->commit_full(second.state, in_time())));
  EXPECT_TRUE(holds(second));
  ASSERT_TRUE(ok(roll_back(*target_)));
  EXPECT_TRUE(holds(first));
  EXPECT_TRUE(fails(roll_back(*target_), Errc::unsupported));
  ASSERT_TRUE(ok(commit_delta(first, second)));
  EXPECT_TRUE(holds(second));
}

TEST_P(TargetConformance, AStagedFullThatIsLateKeepsTheOldVersion) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  const Reference second = trainer_->step(0.5);
  const auto commit = [&](Deadline deadline) -> Status {
    DS_TRY(target_->begin_full(FullUpdatePolicy::stage, in_time()));
    fill_full(*target_, second);
    return target_->commit_full(second.state, deadline);
  };
  const auto kept = [&] {
    target_->discard_full();
    return holds(first);
  };
  end_at_each_look(commit, kept, GetParam().slow);
  EXPECT_TRUE(holds(second));
  ASSERT_TRUE(ok(roll_back(*target_)));
  EXPECT_TRUE(holds(first));
}

TEST_P(TargetConformance, DeltasAfterAStagedFull) {
  ASSERT_TRUE(ok(commit_whole(*target_, trainer_->now())));
  Reference before = trainer_->step(0.5);
  ASSERT_TRUE(ok(commit_whole(*target_, before)));
  for (int i = 0; i < 3; ++i) {
    const Reference after = trainer_->step(0.02);
    ASSERT_TRUE(ok(commit_delta(before, after)));
    ASSERT_TRUE(holds(after));
    before = after;
  }
}

TEST_P(TargetConformance, DiscardedFullLeavesNoTrace) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  fill_full(*target_, first);
  target_->discard_full();
  EXPECT_TRUE(holds_nothing());
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  const Reference second = trainer_->step(0.5);
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  fill_full(*target_, second);
  target_->discard_full();
  target_->discard_full();  // nothing open: nothing happens
  EXPECT_TRUE(holds(first));
  EXPECT_TRUE(fails(roll_back(*target_), Errc::unsupported)) << "an update began since the commit";
  ASSERT_TRUE(ok(commit_delta(first, second)));
  EXPECT_TRUE(holds(second));
}

TEST_P(TargetConformance, InPlaceGivesUpTheLiveVersion) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first, FullUpdatePolicy::in_place)));  // nothing was live: like any other
  const Reference second = trainer_->step(0.5);
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::in_place, in_time())));
  EXPECT_TRUE(holds_nothing());
  fill_full(*target_, second);
  ASSERT_TRUE(ok(target_->commit_full(second.state, in_time())));
  EXPECT_TRUE(holds(second));
  EXPECT_TRUE(fails(roll_back(*target_), Errc::unsupported));
  EXPECT_TRUE(holds(second));
}

TEST_P(TargetConformance, DiscardedInPlaceHoldsNothing) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  const Reference second = trainer_->step(0.5);
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::in_place, in_time())));
  target_->discard_full();
  EXPECT_TRUE(holds_nothing());
  EXPECT_TRUE(fails(commit_delta(first, second), Errc::version_conflict));
  ASSERT_TRUE(ok(commit_whole(*target_, second)));
  EXPECT_TRUE(holds(second));
}

TEST_P(TargetConformance, RefusesAFullOverLiveWhenTold) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first, FullUpdatePolicy::refuse)));
  EXPECT_TRUE(fails(target_->begin_full(FullUpdatePolicy::refuse, in_time()), Errc::no_space));
  EXPECT_TRUE(holds(first));
  EXPECT_TRUE(fails(target_->commit_full(first.state, in_time()), Errc::invalid_argument));
}

TEST_P(TargetConformance, CallsOutOfOrderAreRefused) {
  const Reference first = trainer_->now();
  EXPECT_TRUE(fails(target_->commit_full(first.state, in_time()), Errc::invalid_argument));
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  const Reference second = trainer_->step(0.1);
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  EXPECT_TRUE(fails(target_->begin_full(FullUpdatePolicy::stage, in_time()), Errc::invalid_argument));
  EXPECT_TRUE(fails(commit_delta(first, second), Errc::invalid_argument));
  EXPECT_TRUE(fails(roll_back(*target_), Errc::invalid_argument));
  target_->discard_full();
  EXPECT_TRUE(holds(first));
}

TEST_P(TargetConformance, WrongFullStatesAreRefused) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  fill_full(*target_, first);
  TargetState state = first.state;
  state.digests.pop_back();
  EXPECT_TRUE(fails(target_->commit_full(state, in_time()), Errc::layout_mismatch));
  state = first.state;
  state.digests[3] ^= 1;
  EXPECT_TRUE(fails(target_->commit_full(state, in_time()), Errc::corrupt));
  state = first.state;
  state.version.id.epoch = 0;
  EXPECT_TRUE(fails(target_->commit_full(state, in_time()), Errc::invalid_argument));
  EXPECT_TRUE(holds_nothing());
  EXPECT_TRUE(ok(target_->commit_full(first.state, in_time())));  // still open
  EXPECT_TRUE(holds(first));
}

TEST_P(TargetConformance, WrongDeltasAreRefusedBeforeAByteChanges) {
  const Reference first = trainer_->now();
  const Reference second = trainer_->step(0.1);
  const Reference third = trainer_->step(0.1);
  EXPECT_TRUE(fails(commit_delta(first, second), Errc::version_conflict)) << "nothing is committed";
  ASSERT_TRUE(ok(commit_whole(*target_, first)));

  EXPECT_TRUE(fails(commit_delta(second, third), Errc::version_conflict));
  EXPECT_TRUE(fails(target_->commit_delta({}, first.state, in_time()), Errc::invalid_argument));
  const auto refused = [&](const std::function<void(std::vector<StagedStep>&, TargetState&)>& spoil, Errc code) {
    std::vector<StagedStep> steps;
    steps.push_back(trainer_->delta(first, second));
    steps.push_back(trainer_->delta(second, third));
    TargetState state = third.state;
    spoil(steps, state);
    const auto result = fails(target_->commit_delta(std::move(steps), std::move(state), in_time()), code);
    if (!result) return result;
    return holds(first);
  };
  EXPECT_TRUE(refused([](auto& steps, auto&) { std::swap(steps[0], steps[1]); }, Errc::version_conflict));
  EXPECT_TRUE(refused([](auto& steps, auto&) { steps.pop_back(); }, Errc::version_conflict));
  EXPECT_TRUE(refused([](auto& steps, auto&) { steps[1].from.number = 77; }, Errc::version_conflict));
  EXPECT_TRUE(refused([](auto&, auto& state) { state.digests.pop_back(); }, Errc::layout_mismatch));
  EXPECT_TRUE(refused([](auto&, auto& state) { state.root.bytes[0] ^= 1; }, Errc::corrupt));
  EXPECT_TRUE(
      refused([&](auto& steps, auto&) { steps[0].frames[0].records[0].tile = trainer_->layout()->tile_count(); },
              Errc::out_of_range));
  // A tile twice in one step would be written by two threads at once.
  EXPECT_TRUE(refused([](auto& steps, auto&) { steps[1].frames[0].records.push_back(steps[1].frames[0].records[0]); },
                      Errc::corrupt));
  EXPECT_TRUE(refused(
      [&](auto& steps, auto&) {
        StagedFrame again;
        again.bytes = steps[1].frames[0].bytes;
        again.records = delta::parse_frame(*trainer_->layout(), again.bytes).value();
        again.records.resize(1);
        steps[1].frames.push_back(std::move(again));
      },
      Errc::corrupt));
  // The last step of a tile must end at the digest to be committed.
  EXPECT_TRUE(refused([](auto& steps, auto&) { steps[1].frames[0].records[0].digest_after ^= 1; }, Errc::corrupt));
  // A tile that changes must have a step.
  EXPECT_TRUE(refused(
      [](auto& steps, auto&) {
        for (StagedStep& step : steps) step.frames.clear();
      },
      Errc::corrupt));
  std::vector<Reference> versions{first, second, third};
  ASSERT_TRUE(ok(commit_chain(versions)));
  EXPECT_TRUE(holds(third));
}

TEST_P(TargetConformance, LayoutsWithoutAnElement) {
  std::vector<TensorSpec> specs(2);
  specs[0] = {"none", Dtype::bf16, {0, 5}, {}, {}};
  specs[1] = {"nothing", Dtype::f32, {3, 0}, {}, {}};
  start(std::make_unique<TrainerModel>(1, specs));
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  const Reference second = trainer_->step(1.0);
  ASSERT_TRUE(ok(commit_delta(first, second)));
  EXPECT_TRUE(holds(second));
}

#ifdef DELTASYNC_SANITIZED
constexpr std::uint64_t kWalks = 1;
#else
constexpr std::uint64_t kWalks = 3;
#endif
/// Random walks: after every call the target is on the version that the calls so far imply.
TEST_P(TargetConformance, RandomWalks) {
  const std::uint64_t walks = GetParam().slow ? 1 : kWalks;
  for (std::uint64_t seed = 1; seed <= walks; ++seed) {
    start(std::make_unique<TrainerModel>(seed, small_specs()));
    Random random(seed);
    std::optional<Reference> now;
    std::optional<std::optional<Reference>> undo;  // what rollback leads to, if it is possible
    for (int i = 0; i < 25; ++i) {
      const double density = std::vector<double>{0.001, 0.01, 0.2, 1.0}[random.below(4)];
      const std::uint64_t choice = random.below(10);
      SCOPED_TRACE("seed " + std::to_string(seed) + " call " + std::to_string(i) + " choice " + std::to_string(choice));
      if (choice < 5 && now) {
        std::vector<Reference> versions{*now};
        // The trainer's history may be ahead of us after a rollback or a discard: the first step is a jump to it.
        for (std::uint64_t n = 1 + random.below(3); n > 0; --n) versions.push_back(trainer_->step(density));
        ASSERT_TRUE(ok(commit_chain(versions, random.below(2) == 0 ? ValueForm::ulp : ValueForm::absolute)));
        undo = now;
        now = versions.back();
      } else if (choice < 7) {
        const bool in_place = random.below(3) == 0;
        const bool lost = in_place && now;
        const Reference next = trainer_->step(density);
        ASSERT_TRUE(
            ok(target_->begin_full(in_place ? FullUpdatePolicy::in_place : FullUpdatePolicy::stage, in_time())));
        if (random.below(3) == 0) {
          target_->discard_full();
          undo.reset();
          if (lost) now.reset();
        } else {
          fill_full(*target_, next);
          ASSERT_TRUE(ok(target_->commit_full(next.state, in_time())));
          undo = now;
          if (lost) undo.reset();
          now = next;
        }
      } else if (undo) {
        ASSERT_TRUE(ok(roll_back(*target_)));
        now = *undo;
        undo.reset();
      } else {
        ASSERT_TRUE(fails(roll_back(*target_), Errc::unsupported));
      }
      ASSERT_TRUE(now ? holds(*now) : holds_nothing());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, TargetConformance, testing::ValuesIn(kinds()),
                         [](const auto& param_info) { return param_info.param.name; });

}  // namespace
}  // namespace deltasync::test
