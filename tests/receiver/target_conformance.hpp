// A target of any kind under test, its trainer, and what somebody sees who looks at its versions.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/verify.hpp"
#include "tests/receiver/place.hpp"
#include "tests/receiver/trainer_model.hpp"

namespace deltasync::test {

/// All shapes of sample_specs(), of several bands and panels too, with as few elements as that takes.
inline std::vector<TensorSpec> small_specs() {
  std::vector<TensorSpec> specs = sample_specs();
  const auto change = [&](const std::string& name, std::vector<std::uint64_t> shape) -> TensorSpec& {
    const auto spec = std::find_if(specs.begin(), specs.end(), [&](const TensorSpec& s) { return s.name == name; });
    spec->shape = std::move(shape);
    return *spec;
  };
  change("embed.weight", {200, 96}).row_cuts = {30, 100};
  change("wide.row", {1, 70000});                    // two panels
  TensorSpec& ffn = change("ffn.down", {150, 592});  // two panels, and two bands of the second part
  ffn.row_cuts = {20};
  ffn.col_cuts = {40};
  return specs;
}

class TargetConformance : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override { start(std::make_unique<TrainerModel>(7, small_specs())); }

  void start(std::unique_ptr<TrainerModel> trainer) {
    target_.reset();
    place_ = GetParam().make();
    trainer_ = std::move(trainer);
    auto target = place_->make(trainer_->layout());
    if (GetParam().may_be_missing && !target.ok() && target.error().code() == Errc::unsupported) {
      GTEST_SKIP() << target.error().to_string();
    }
    ASSERT_TRUE(target.ok()) << target.error().to_string();
    target_ = *std::move(target);
    ASSERT_TRUE(ok(target_->open(pool_, in_time())));
  }

  static testing::AssertionResult ok(const Status& status) {
    if (status.ok()) return testing::AssertionSuccess();
    return testing::AssertionFailure() << status.error().to_string();
  }
  static testing::AssertionResult fails(const Status& status, Errc code) {
    if (status.ok()) return testing::AssertionFailure() << "succeeded";
    if (status.error().code() == code) return testing::AssertionSuccess();
    return testing::AssertionFailure() << status.error().to_string();
  }
  /// The target has exactly this version, inside and outside.
  testing::AssertionResult holds(const Reference& reference) {
    const TargetState* state = target_->committed();
    if (state == nullptr) return testing::AssertionFailure() << "nothing is committed";
    if (!(state->version == reference.state.version)) {
      return testing::AssertionFailure() << "version is " << to_string(state->version);
    }
    if (state->root != reference.state.root || state->digests != reference.state.digests) {
      return testing::AssertionFailure() << "other digests";
    }
    if (read_live(*target_) != reference.half) return testing::AssertionFailure() << "live memory differs";
    const std::string outside = place_->outside(*target_, &reference.half);
    return outside.empty() ? testing::AssertionSuccess() : testing::AssertionFailure() << outside;
  }
  testing::AssertionResult holds_nothing() {
    if (target_->committed() != nullptr) return testing::AssertionFailure() << "something is committed";
    std::vector<std::byte> scratch;
    const Tile first = trainer_->layout()->tile_count() == 0 ? Tile() : tile_of(*trainer_->layout(), 0);
    if (target_->live_tile(first, scratch)->first != nullptr)
      return testing::AssertionFailure() << "live memory of nothing";
    const std::string outside = place_->outside(*target_, nullptr);
    return outside.empty() ? testing::AssertionSuccess() : testing::AssertionFailure() << outside;
  }
  Status commit_delta(const Reference& before, const Reference& after, delta::ValueForm form = delta::ValueForm::ulp) {
    std::vector<StagedStep> steps;
    steps.push_back(trainer_->delta(before, after, form));
    return commit_steps(std::move(steps), after.state, in_time());
  }
  Status commit_steps(std::vector<StagedStep> steps, const TargetState& after, Deadline deadline) {
    const TargetState* now = target_->committed();
    if (GetParam().resolves && steps.size() == 1 && now != nullptr && now->version.id == steps[0].from) {
      constexpr std::uint64_t kBudgets[] = {1ull << 40, 20'000, 0};
      ResolvedBudget budget(kBudgets[commits_++ % std::size(kBudgets)]);
      std::vector<std::uint64_t> digests = now->digests;
      for (StagedFrame& frame : steps[0].frames) {
        DS_TRY(verify_frame(*target_, frame, now->digests, digests, budget));
        if (!frame.resolved.empty() || !frame.kept.empty()) ++resolved_frames_;
      }
      EXPECT_EQ(digests, after.digests);
    }
    return target_->commit_delta(std::move(steps), after, deadline);
  }
  /// Commits a chain of steps through all of `versions` as one update.
  Status commit_chain(const std::vector<Reference>& versions, delta::ValueForm form = delta::ValueForm::ulp) {
    std::vector<StagedStep> steps;
    for (std::size_t i = 1; i < versions.size(); ++i) {
      steps.push_back(trainer_->delta(versions[i - 1], versions[i], form));
    }
    return commit_steps(std::move(steps), versions.back().state, in_time());
  }

  ThreadPool pool_{3, "target"};
  std::unique_ptr<Place> place_;
  std::unique_ptr<TrainerModel> trainer_;
  std::unique_ptr<Target> target_;
  std::size_t commits_ = 0;
  std::size_t resolved_frames_ = 0;  ///< that came with decoded changes
};

}  // namespace deltasync::test
