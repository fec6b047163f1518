// What becomes of a version when its memory refuses a step (receiver/targets/memory_target.hpp): it stays, or the
// target says that it has none. That the calls do what they should is what the conformance suite looks at, with this
// kind too.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include "format/tiling.hpp"
#include "receiver/targets/verify.hpp"
#include "tests/receiver/remote_memory.hpp"
#include "tests/receiver/trainer_model.hpp"
#include "tests/support/model.hpp"

namespace deltasync::test {
namespace {

using testing::HasSubstr;

class MemoryTargetFaults : public testing::Test {
 protected:
  void SetUp() override {
    target_ = std::make_unique<RemoteMemory>(trainer_.layout());
    ASSERT_TRUE(target_->open(pool_, in_time()).ok());
    first_ = trainer_.now();
    ASSERT_TRUE(commit_whole(*target_, first_).ok());
    second_ = trainer_.step(0.05);
  }

  /// Of one step, with its changes decoded or not.
  std::vector<StagedStep> steps(bool resolved) {
    std::vector<StagedStep> steps;
    steps.push_back(trainer_.delta(first_, second_));
    if (!resolved) return steps;
    ResolvedBudget budget(1ull << 40);
    std::vector<std::uint64_t> digests = first_.state.digests;
    for (StagedFrame& frame : steps[0].frames) {
      EXPECT_TRUE(verify_frame(*target_, frame, first_.state.digests, digests, budget).ok());
    }
    EXPECT_EQ(digests, second_.state.digests);
    return steps;
  }
  Status commit_delta(bool resolved) { return target_->commit_delta(steps(resolved), second_.state, in_time()); }
  Status stage_full() {
    DS_TRY(target_->begin_full(FullUpdatePolicy::stage, in_time()));
    fill_full(*target_, second_);
    return target_->commit_full(second_.state, in_time());
  }

  void expect_refused(const Status& status, const std::string& step) {
    ASSERT_FALSE(status.ok()) << step;
    EXPECT_EQ(status.error().code(), Errc::io);
    EXPECT_THAT(status.error().message(), HasSubstr(step));
    EXPECT_TRUE(target_->failed());
    EXPECT_EQ(target_->forget_faults(), 0u) << "a fault never came up";
  }
  void expect_holds(const Reference& reference) {
    ASSERT_NE(target_->committed(), nullptr);
    EXPECT_EQ(target_->committed()->version, reference.state.version);
    EXPECT_TRUE(same_bytes(target_->memory(), reference.half));
  }
  /// No version, and no undo log; a full update helps.
  void expect_lost(const Status& status, const std::string& step) {
    expect_refused(status, step);
    EXPECT_THAT(status.error().message(), HasSubstr("no whole version"));
    EXPECT_EQ(target_->committed(), nullptr);
    std::vector<std::byte> scratch;
    EXPECT_EQ(target_->live_tile(tile_of(*trainer_.layout(), 0), scratch)->first, nullptr);
    EXPECT_EQ(target_->rollback().error().code(), Errc::unsupported);
    ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::refuse, in_time()).ok()) << "there is nothing to be kept";
    EXPECT_TRUE(target_->shares_memory());
    fill_full(*target_, second_);
    ASSERT_TRUE(target_->commit_full(second_.state, in_time()).ok());
    expect_holds(second_);
  }

  ThreadPool pool_{3, "memory"};
  TrainerModel trainer_{7};
  std::unique_ptr<RemoteMemory> target_;
  Reference first_;
  Reference second_;
};

TEST_F(MemoryTargetFaults, HalfAnExchangeAtCommitIsNoVersion) {
  target_->fail("exchange_staging");
  expect_lost(stage_full(), "exchange_staging");
}

TEST_F(MemoryTargetFaults, HalfAnExchangeAtRollbackIsNoVersion) {
  ASSERT_TRUE(stage_full().ok());
  target_->fail("exchange_staging");
  expect_lost(target_->rollback(), "exchange_staging");
}

/// What was served before is in pieces as well: nothing is to be kept of it.
TEST_F(MemoryTargetFaults, HalfAnExchangeOverServedMemoryIsNothing) {
  target_ = std::make_unique<RemoteMemory>(trainer_.layout(), /*served=*/true);
  ASSERT_TRUE(target_->open(pool_, in_time()).ok());
  EXPECT_EQ(target_->begin_full(FullUpdatePolicy::refuse, in_time()).error().code(), Errc::no_space);
  target_->fail("exchange_staging");
  expect_lost(stage_full(), "exchange_staging");
}

TEST_F(MemoryTargetFaults, StagingIsGivenBackAsSoonAsItCan) {
  ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::stage, in_time()).ok());
  EXPECT_TRUE(target_->has_staging());
  target_->discard_full();
  EXPECT_FALSE(target_->has_staging());
  ASSERT_TRUE(stage_full().ok());
  EXPECT_TRUE(target_->has_staging()) << "the version before is there";
  target_->forget_rollback();
  EXPECT_FALSE(target_->has_staging());
}

TEST_F(MemoryTargetFaults, ADeltaThatCannotBeWrittenIsNoVersion) {
  target_->fail("put", 3);
  expect_lost(commit_delta(false), "put");
}

TEST_F(MemoryTargetFaults, ADeltaThatCannotBeExchangedIsNoVersion) {
  target_->fail("exchange", 3);
  expect_lost(commit_delta(true), "exchange");
}

TEST_F(MemoryTargetFaults, ADeltaThatDoesNotSettleIsNoVersion) {
  target_->fail("settle");
  expect_lost(commit_delta(true), "settle");
}

TEST_F(MemoryTargetFaults, ADeltaThatCannotBeReadLeavesTheVersionBefore) {
  target_->fail("open_tile", 3);
  expect_refused(commit_delta(false), "open_tile");
  expect_holds(first_);
  EXPECT_EQ(target_->rollback().error().code(), Errc::unsupported);
  ASSERT_TRUE(commit_delta(false).ok());
  expect_holds(second_);
}

/// The first step is written, the second cannot be read, and then nothing can be rolled back.
TEST_F(MemoryTargetFaults, ADeltaThatCannotBeRolledBackIsNoVersion) {
  ThreadPool one(1, "one");
  target_ = std::make_unique<RemoteMemory>(trainer_.layout());
  ASSERT_TRUE(target_->open(one, in_time()).ok());
  for (const bool lost : {false, true}) {
    ASSERT_TRUE(commit_whole(*target_, first_).ok());
    const Reference third = trainer_.step(0.05);
    std::vector<StagedStep> chain = steps(false);
    chain.push_back(trainer_.delta(second_, third));
    std::size_t records = 0;
    for (const StagedFrame& frame : chain[0].frames) records += frame.records.size();
    target_->fail("open_tile", records + 2);
    if (lost) target_->fail("put", records + 2);
    const Status status = target_->commit_delta(std::move(chain), third.state, in_time());
    if (lost) {
      expect_lost(status, "open_tile");
    } else {
      expect_refused(status, "open_tile");
      expect_holds(first_);
    }
  }
}

TEST_F(MemoryTargetFaults, ARollbackOfADeltaThatFailsIsNoVersion) {
  for (const char* step : {"put", "open_tile"}) {
    ASSERT_TRUE(commit_delta(false).ok());
    target_->fail(step, 3);
    expect_lost(target_->rollback(), step);
    ASSERT_TRUE(commit_whole(*target_, first_).ok());
  }
  for (const char* step : {"exchange", "settle"}) {
    ASSERT_TRUE(commit_delta(true).ok());
    target_->fail(step);
    expect_lost(target_->rollback(), step);
    ASSERT_TRUE(commit_whole(*target_, first_).ok());
  }
}

TEST_F(MemoryTargetFaults, NoRoomForTheSecondCopyChangesNothing) {
  target_->fail("open_staging");
  expect_refused(target_->begin_full(FullUpdatePolicy::stage, in_time()), "second copy for a full update");
  expect_holds(first_);
  ASSERT_TRUE(stage_full().ok());
  expect_holds(second_);
}

TEST_F(MemoryTargetFaults, NoLiveMemoryChangesNothing) {
  target_->fail("open_live");
  expect_refused(target_->begin_full(FullUpdatePolicy::in_place, in_time()), "open_live");
  expect_holds(first_);
  ASSERT_TRUE(stage_full().ok());
  expect_holds(second_);
}

TEST_F(MemoryTargetFaults, AFullUpdateInPlaceThatCannotBeWritten) {
  ASSERT_TRUE(target_->begin_full(FullUpdatePolicy::in_place, in_time()).ok());
  const Tile tile = tile_of(*trainer_.layout(), 0);
  target_->fail("put");
  expect_refused(put_from_half(*target_, second_, tile), "put");
  fill_full(*target_, second_);
  target_->fail("settle");
  expect_lost(target_->commit_full(second_.state, in_time()), "settle");
}

TEST_F(MemoryTargetFaults, ATargetThatDoesNotOpenIsNotOpen) {
  RemoteMemory target(trainer_.layout());
  target.fail("open_memory");
  EXPECT_FALSE(target.open(pool_, in_time()).ok());
  EXPECT_EQ(target.forget_faults(), 0u);
  EXPECT_EQ(target.begin_full(FullUpdatePolicy::stage, in_time()).error().code(), Errc::invalid_argument);
  ASSERT_TRUE(target.open(pool_, in_time()).ok());
  EXPECT_TRUE(commit_whole(target, first_).ok());
}

/// Records in exponent classes that come without decoded changes are decoded over live memory once more.
class LateClasses : public MemoryTargetFaults {
 protected:
  void SetUp() override {
    MemoryTargetFaults::SetUp();
    second_ = trainer_.small_step(0.03);
    third_ = trainer_.small_step(0.03);
    ASSERT_TRUE(commit_whole(*target_, second_).ok());
  }
  std::vector<StagedStep> compact() {
    std::vector<StagedStep> steps;
    steps.push_back(trainer_.compact_delta(second_, third_));
    return steps;
  }
  Reference third_;
};

TEST_F(LateClasses, WhatSomebodyWroteIsAnErrorAndNothingChanges) {
  const Layout& layout = *trainer_.layout();
  std::size_t found = 0;
  const std::vector<StagedStep> steps = compact();
  for (const StagedFrame& frame : steps[0].frames) {
    for (const delta::TileRecord& record : frame.records) {
      if (record.codec != delta::Codec::rice_class) continue;
      const Tile tile = tile_of(layout, record.tile);
      const Tensor& tensor = layout.tensors()[tile.tensor];
      SCOPED_TRACE(tensor.spec.name);
      // Every element becomes one of another class.
      for (std::uint64_t r = 0; r < tile.rect.rows; ++r) {
        const std::uint64_t at = tensor.offset + (tile.rect.row + r) * tensor.row_bytes();
        for (std::uint64_t c = 0; c < tile.rect.cols; ++c) {
          target_->memory()[at + (tile.rect.col + c + 1) * tensor.element_bytes - 1] ^= std::byte{0x2A};
        }
      }
      const std::vector<std::byte> written = target_->memory();
      const Status status = target_->commit_delta(compact(), third_.state, in_time());
      ASSERT_FALSE(status.ok());
      EXPECT_EQ(status.error().code(), Errc::corrupt);
      EXPECT_THAT(status.error().message(), HasSubstr("somebody wrote to live memory"));
      EXPECT_THAT(status.error().message(), HasSubstr("tile " + std::to_string(record.tile)));
      EXPECT_THAT(status.error().message(), HasSubstr(tensor.spec.name));
      EXPECT_TRUE(same_bytes(target_->memory(), written));
      ASSERT_NE(target_->committed(), nullptr);
      EXPECT_EQ(target_->committed()->version, second_.state.version);
      target_->memory() = second_.half;
      ++found;
    }
  }
  ASSERT_GT(found, 2u);
  ASSERT_TRUE(target_->commit_delta(compact(), third_.state, in_time()).ok());
  expect_holds(third_);
}

/// A single changed element shows in the digest, though its class may be the same.
TEST_F(LateClasses, OneElementThatChangesIsEnough) {
  const Layout& layout = *trainer_.layout();
  const std::vector<StagedStep> steps = compact();
  for (const StagedFrame& frame : steps[0].frames) {
    for (const delta::TileRecord& record : frame.records) {
      if (record.codec != delta::Codec::rice_class) continue;
      const Tile tile = tile_of(layout, record.tile);
      const Tensor& tensor = layout.tensors()[tile.tensor];
      std::uint64_t at = tensor.offset + tile.rect.row * tensor.row_bytes() + tile.rect.col * tensor.element_bytes;
      while (second_.half[at] == third_.half[at]) ++at;
      target_->memory()[at] ^= std::byte{1};
      EXPECT_EQ(target_->commit_delta(compact(), third_.state, in_time()).error().code(), Errc::corrupt);
      target_->memory()[at] ^= std::byte{1};
      return;
    }
  }
  FAIL() << "no tile in classes";
}

}  // namespace
}  // namespace deltasync::test
