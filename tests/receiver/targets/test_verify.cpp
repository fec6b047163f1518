// What is verified of a delta before anything is published: here what a refused frame leaves behind of the budget for
// decoded changes. That right frames are taken and wrong ones found is what the tests of targets and pulls look at.
#include <gtest/gtest.h>

#include "delta/frame.hpp"
#include "receiver/targets/verify.hpp"
#include "tests/receiver/trainer_model.hpp"

namespace deltasync::test {
namespace {

class VerifyFrame : public testing::Test {
 protected:
  void SetUp() override {
    target_ = make_host_target(trainer_.layout());
    ASSERT_TRUE(target_->open(pool_, in_time()));
    before_ = trainer_.now();
    ASSERT_TRUE(commit_whole(*target_, before_));
    Reference after = before_;
    ++after.state.version.id.number;
    step_small(after.half, *trainer_.layout(), 0.03, 5);
    for (StagedFrame& frame : trainer_.delta(before_, after).frames) {
      if (frame.records.size() > frame_.records.size()) frame_ = std::move(frame);
    }
    ASSERT_GT(frame_.records.size(), 2u);
  }
  /// The same changes in exponent classes, as far as there are such for their dtypes.
  void make_compact() {
    delta::Frame plain;
    plain.first_tile = frame_.records.front().tile;
    plain.last_tile = frame_.records.back().tile;
    plain.bytes = frame_.bytes;
    auto compact = delta::compact_frame(*trainer_.layout(), plain, before_.half);
    ASSERT_TRUE(compact) << compact.error().to_string();
    frame_.bytes = std::move(compact->bytes);
    auto records = delta::parse_frame(*trainer_.layout(), frame_.bytes);
    ASSERT_TRUE(records) << records.error().to_string();
    frame_.records = std::move(*records);
  }
  /// Right in form, and not what it says that it is.
  void break_last() { frame_.records.back().digest_after ^= 1; }
  Status verify(ResolvedBudget& budget) {
    std::vector<std::uint64_t> digests = before_.state.digests;
    return verify_frame(*target_, frame_, before_.state.digests, digests, budget);
  }
  std::uint64_t all_bytes() const { return resolved_bytes(*trainer_.layout(), frame_); }
  std::uint64_t in_classes() const { return class_bytes(*trainer_.layout(), frame_); }

  ThreadPool pool_{1, "verify"};
  TrainerModel trainer_{7};
  std::unique_ptr<Target> target_;
  Reference before_;
  StagedFrame frame_;
};

/// Exactly so many bytes are left.
void expect_left(ResolvedBudget& budget, std::uint64_t bytes) {
  EXPECT_TRUE(budget.take(bytes));
  EXPECT_FALSE(budget.take(1));
}

TEST_F(VerifyFrame, TakesWhatItKeeps) {
  ResolvedBudget budget(all_bytes() + 5);
  ASSERT_TRUE(verify(budget));
  EXPECT_EQ(frame_.resolved.size(), all_bytes());
  expect_left(budget, 5);
}

TEST_F(VerifyFrame, WithoutRoomItKeepsAndTakesNothing) {
  ResolvedBudget budget(all_bytes() - 1);
  ASSERT_TRUE(verify(budget));
  EXPECT_TRUE(frame_.resolved.empty());
  expect_left(budget, all_bytes() - 1);
}

TEST_F(VerifyFrame, ARefusedOneGivesBackWhatItTook) {
  ResolvedBudget budget(all_bytes());
  break_last();
  for (int i = 0; i < 3; ++i) {
    const Status status = verify(budget);
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code(), Errc::corrupt);
    EXPECT_TRUE(frame_.resolved.empty());
  }
  frame_.records.back().digest_after ^= 1;
  ASSERT_TRUE(verify(budget));
  EXPECT_EQ(frame_.resolved.size(), all_bytes()) << "it came right, and there was room";
  expect_left(budget, 0);
}

TEST_F(VerifyFrame, ARefusedOneInClassesGivesBackToo) {
  ASSERT_NO_FATAL_FAILURE(make_compact());
  ASSERT_GT(in_classes(), 0u);
  ASSERT_LT(in_classes(), all_bytes()) << "the rest has no classes";
  ResolvedBudget budget(in_classes());
  break_last();
  ASSERT_FALSE(verify(budget));
  frame_.records.back().digest_after ^= 1;
  ASSERT_TRUE(verify(budget)) << "undoing it has its room again";
  expect_left(budget, 0);
}

TEST_F(VerifyFrame, ClassesWithoutRoomTakeNothing) {
  ASSERT_NO_FATAL_FAILURE(make_compact());
  ResolvedBudget budget(in_classes() - 1);
  const Status status = verify(budget);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code(), Errc::protocol);
  expect_left(budget, in_classes() - 1);
}

}  // namespace
}  // namespace deltasync::test
