// The plan board alone, with a check that wants each of the rows 0..n-1 of tensor 0 once.
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <utility>

#include "agent/trainer/trainer_plans.hpp"

namespace deltasync::agent {
namespace {

std::vector<TensorSlice> rows(std::initializer_list<std::uint64_t> list) {
  std::vector<TensorSlice> out;
  for (const auto row : list) out.push_back({0, Rect{row, 0, 1, 1}});
  return out;
}

/// A board whose trials are made at once.
struct Board : WriterPlanBoard {
  explicit Board(std::size_t n) : wanted(n) {}

  Status check(const Trial& trial) const {
    std::set<std::uint64_t> seen;
    for (const WriterPlan& plan : trial.plans) {
      for (const TensorSlice& s : *plan) {
        if (!seen.insert(s.rect.row).second) return Error(Errc::coverage, "twice " + std::to_string(s.rect.row));
      }
    }
    if (seen.size() != wanted) return Error(Errc::coverage, "incomplete");
    return {};
  }
  static WriterPlan plan(std::vector<TensorSlice> slices) {
    return std::make_shared<const std::vector<TensorSlice>>(std::move(slices));
  }
  void submit(std::uint32_t slot, std::uint32_t writers, std::vector<TensorSlice> slices) {
    WriterPlanBoard::submit(slot, writers, plan(std::move(slices)));
    while (const auto trial = next_trial()) conclude(*trial, check(*trial));
  }
  void restore(std::uint32_t slot, std::uint32_t writers, std::vector<TensorSlice> slices) {
    WriterPlanBoard::restore(slot, writers, plan(std::move(slices)));
    while (const auto trial = next_trial()) conclude(*trial, check(*trial));
  }
  std::size_t wanted;
};
Board board_of(std::size_t wanted) {
  return Board(wanted);
}

bool ok(std::optional<Status> outcome) {
  return outcome && outcome->ok();
}
Errc code(std::optional<Status> outcome) {
  return outcome ? outcome->error().code() : Errc::internal;
}

TEST(WriterPlanBoard, WaitsForAllThenAcceptsAll) {
  Board board = board_of(4);
  board.submit(0, 2, rows({0, 1}));
  EXPECT_FALSE(board.take_outcome(0));
  EXPECT_FALSE(board.accepted(0));
  board.submit(1, 2, rows({2, 3}));
  EXPECT_TRUE(ok(board.take_outcome(0)));
  EXPECT_TRUE(ok(board.take_outcome(1)));
  EXPECT_TRUE(board.accepted(0) && board.accepted(1));
}

TEST(WriterPlanBoard, MisfitIsToldToAll) {
  Board board = board_of(4);
  board.submit(0, 2, rows({0, 1}));
  board.submit(1, 2, rows({1, 2}));
  EXPECT_EQ(code(board.take_outcome(0)), Errc::coverage);
  EXPECT_EQ(code(board.take_outcome(1)), Errc::coverage);
  EXPECT_FALSE(board.accepted(0));
  board.submit(0, 2, rows({0, 1}));
  board.submit(1, 2, rows({2, 3}));
  EXPECT_TRUE(ok(board.take_outcome(0)) && ok(board.take_outcome(1)));
}

TEST(WriterPlanBoard, RestartedWriterFitsIntoTheOldPlans) {
  Board board = board_of(4);
  board.submit(0, 2, rows({0, 1}));
  board.submit(1, 2, rows({2, 3}));
  EXPECT_TRUE(ok(board.take_outcome(0)) && ok(board.take_outcome(1)));
  board.remove(1, Error(Errc::peer_died, "writer 1 died"));
  board.submit(1, 2, rows({2, 3}));
  EXPECT_TRUE(ok(board.take_outcome(1)));
}

TEST(WriterPlanBoard, PlansOfBeforeTheAgentsRestartAreNotJudgedButCount) {
  Board board = board_of(4);
  board.submit(1, 2, rows({2, 3}));
  EXPECT_FALSE(board.take_outcome(1));
  board.restore(0, 2, rows({0, 1}));
  EXPECT_TRUE(board.accepted(0));
  EXPECT_FALSE(board.waiting(0));
  EXPECT_TRUE(ok(board.take_outcome(1)));

  Board both = board_of(4);
  both.restore(0, 2, rows({0, 1}));
  both.restore(1, 2, rows({2, 3}));
  EXPECT_FALSE(both.next_trial()) << "nobody waits for one";
}

TEST(WriterPlanBoard, NewPlanThatMisfitsOldOnesWaitsForTheOthers) {
  Board board = board_of(4);
  board.submit(0, 2, rows({0, 1}));
  board.submit(1, 2, rows({2, 3}));
  EXPECT_TRUE(ok(board.take_outcome(0)) && ok(board.take_outcome(1)));
  board.submit(1, 2, rows({0, 1}));
  EXPECT_FALSE(board.take_outcome(1)) << "writer 0 may be about to register again";
  board.submit(0, 2, rows({2, 3}));
  EXPECT_TRUE(ok(board.take_outcome(0)) && ok(board.take_outcome(1)));

  board.submit(1, 2, rows({0}));
  EXPECT_FALSE(board.take_outcome(1));
  const Error error = board.give_up(1);
  EXPECT_EQ(error.code(), Errc::timed_out);
  EXPECT_NE(error.message().find("incomplete"), std::string::npos) << error.message();
}

TEST(WriterPlanBoard, GivingUpNamesWhoIsMissing) {
  Board board = board_of(4);
  board.submit(1, 4, rows({0, 1}));
  const Error error = board.give_up(1);
  EXPECT_EQ(error.code(), Errc::timed_out);
  EXPECT_NE(error.message().find("0, 2, 3"), std::string::npos) << error.message();
  EXPECT_EQ(code(board.take_outcome(1)), Errc::aborted);
}

TEST(WriterPlanBoard, DeathEndsTheOthersWait) {
  Board board = board_of(4);
  board.submit(0, 3, rows({0}));
  board.submit(1, 3, rows({1}));
  board.remove(2, Error(Errc::peer_died, "writer 2 died"));  // it had no plan yet
  EXPECT_EQ(code(board.take_outcome(0)), Errc::peer_died);
  EXPECT_EQ(code(board.take_outcome(1)), Errc::peer_died);
}

TEST(WriterPlanBoard, AnotherJobStartsAgain) {
  Board board = board_of(2);
  board.submit(0, 3, rows({0}));
  board.submit(0, 2, rows({0}));
  board.submit(1, 2, rows({1}));
  EXPECT_TRUE(ok(board.take_outcome(0)) && ok(board.take_outcome(1)));
}

TEST(WriterPlanBoard, ATrialIsMadeOnceAndOneAtATime) {
  Board board = board_of(2);
  board.WriterPlanBoard::submit(0, 2, Board::plan(rows({0})));
  EXPECT_FALSE(board.next_trial()) << "a plan is missing";
  board.WriterPlanBoard::submit(1, 2, Board::plan(rows({1})));
  const auto trial = board.next_trial();
  ASSERT_TRUE(trial);
  EXPECT_EQ(trial->plans.size(), 2u);
  EXPECT_FALSE(board.next_trial());
  EXPECT_FALSE(board.take_outcome(0)) << "still open";
  board.conclude(*trial, {});
  EXPECT_FALSE(board.next_trial());
  EXPECT_TRUE(ok(board.take_outcome(0)) && ok(board.take_outcome(1)));
}

TEST(WriterPlanBoard, AVerdictOnPlansThatWereReplacedMeanwhileIsNone) {
  Board board = board_of(2);
  board.WriterPlanBoard::submit(0, 2, Board::plan(rows({0})));
  board.WriterPlanBoard::submit(1, 2, Board::plan(rows({1})));
  const auto old = board.next_trial();
  ASSERT_TRUE(old);
  board.WriterPlanBoard::submit(1, 2, Board::plan(rows({0})));
  board.conclude(*old, board.check(*old));
  EXPECT_FALSE(board.take_outcome(0));
  const auto trial = board.next_trial();
  ASSERT_TRUE(trial);
  board.conclude(*trial, board.check(*trial));
  EXPECT_EQ(code(board.take_outcome(0)), Errc::coverage);
  EXPECT_EQ(code(board.take_outcome(1)), Errc::coverage);
}

TEST(WriterPlanBoard, AWriterThatLeavesDuringATrialEndsIt) {
  Board board = board_of(2);
  board.WriterPlanBoard::submit(0, 2, Board::plan(rows({0})));
  board.WriterPlanBoard::submit(1, 2, Board::plan(rows({1})));
  const auto trial = board.next_trial();
  ASSERT_TRUE(trial);
  board.remove(1, Error(Errc::peer_died, "writer 1 died"));
  board.conclude(*trial, {});
  EXPECT_EQ(code(board.take_outcome(0)), Errc::peer_died);
  EXPECT_FALSE(board.accepted(0));
}

TEST(WriterPlanBoard, GivingUpDuringATrialSaysSo) {
  Board board = board_of(1);
  board.WriterPlanBoard::submit(0, 1, Board::plan(rows({0})));
  const auto trial = board.next_trial();
  ASSERT_TRUE(trial);
  const Error error = board.give_up(0);
  EXPECT_EQ(error.code(), Errc::timed_out);
  EXPECT_NE(error.message().find("check is not done"), std::string::npos) << error.message();
  board.conclude(*trial, {});
  EXPECT_FALSE(board.accepted(0));
}

TEST(WriterPlanBoard, ATrialThatCannotBeMadeIsToldToAllAndTheNextOneCounts) {
  Board board = board_of(2);
  board.WriterPlanBoard::submit(0, 2, Board::plan(rows({0})));
  board.WriterPlanBoard::submit(1, 2, Board::plan(rows({1})));
  const auto trial = board.next_trial();
  ASSERT_TRUE(trial);
  board.fail(*trial, Error(Errc::no_space, "out of memory"));
  EXPECT_EQ(code(board.take_outcome(0)), Errc::no_space);
  EXPECT_EQ(code(board.take_outcome(1)), Errc::no_space);
  board.submit(0, 2, rows({0}));
  board.submit(1, 2, rows({1}));
  EXPECT_TRUE(ok(board.take_outcome(0)) && ok(board.take_outcome(1)));
}

}  // namespace
}  // namespace deltasync::agent
