// The plan board alone, with a check that wants each of the rows 0..n-1 of tensor 0 once.
#include <gtest/gtest.h>

#include <set>

#include "agent/trainer_plans.hpp"

namespace deltasync::agent {
namespace {

std::vector<TensorSlice> rows(std::initializer_list<std::uint64_t> list) {
  std::vector<TensorSlice> out;
  for (const auto row : list) out.push_back({0, Rect{row, 0, 1, 1}});
  return out;
}

PlanBoard board_of(std::size_t wanted) {
  return PlanBoard([wanted](std::span<const TensorSlice> slices) -> Status {
    std::set<std::uint64_t> seen;
    for (const TensorSlice& s : slices) {
      if (!seen.insert(s.rect.row).second) return Error(Errc::coverage, "twice " + std::to_string(s.rect.row));
    }
    if (seen.size() != wanted) return Error(Errc::coverage, "incomplete");
    return {};
  });
}

bool ok(std::optional<Status> outcome) {
  return outcome && outcome->ok();
}
Errc code(std::optional<Status> outcome) {
  return outcome ? outcome->error().code() : Errc::internal;
}

TEST(PlanBoard, WaitsForAllThenAcceptsAll) {
  PlanBoard board = board_of(4);
  board.submit(0, 2, rows({0, 1}));
  EXPECT_FALSE(board.take_outcome(0));
  EXPECT_FALSE(board.accepted(0));
  board.submit(1, 2, rows({2, 3}));
  EXPECT_TRUE(ok(board.take_outcome(0)));
  EXPECT_TRUE(ok(board.take_outcome(1)));
  EXPECT_TRUE(board.accepted(0) && board.accepted(1));
}

TEST(PlanBoard, MisfitIsToldToAll) {
  PlanBoard board = board_of(4);
  board.submit(0, 2, rows({0, 1}));
  board.submit(1, 2, rows({1, 2}));
  EXPECT_EQ(code(board.take_outcome(0)), Errc::coverage);
  EXPECT_EQ(code(board.take_outcome(1)), Errc::coverage);
  EXPECT_FALSE(board.accepted(0));
  board.submit(0, 2, rows({0, 1}));
  board.submit(1, 2, rows({2, 3}));
  EXPECT_TRUE(ok(board.take_outcome(0)) && ok(board.take_outcome(1)));
}

TEST(PlanBoard, RestartedWriterFitsIntoTheOldPlans) {
  PlanBoard board = board_of(4);
  board.submit(0, 2, rows({0, 1}));
  board.submit(1, 2, rows({2, 3}));
  EXPECT_TRUE(ok(board.take_outcome(0)) && ok(board.take_outcome(1)));
  board.remove(1, Error(Errc::peer_died, "writer 1 died"));
  board.submit(1, 2, rows({2, 3}));
  EXPECT_TRUE(ok(board.take_outcome(1)));
}

TEST(PlanBoard, NewPlanThatMisfitsOldOnesWaitsForTheOthers) {
  PlanBoard board = board_of(4);
  board.submit(0, 2, rows({0, 1}));
  board.submit(1, 2, rows({2, 3}));
  EXPECT_TRUE(ok(board.take_outcome(0)) && ok(board.take_outcome(1)));
  board.submit(1, 2, rows({0, 1}));
  EXPECT_FALSE(board.take_outcome(1)) << "writer 0 may be about to register anew";
  board.submit(0, 2, rows({2, 3}));
  EXPECT_TRUE(ok(board.take_outcome(0)) && ok(board.take_outcome(1)));

  board.submit(1, 2, rows({0}));
  EXPECT_FALSE(board.take_outcome(1));
  const Error error = board.give_up(1);
  EXPECT_EQ(error.code(), Errc::timed_out);
  EXPECT_NE(error.message().find("incomplete"), std::string::npos) << error.message();
}

TEST(PlanBoard, GivingUpNamesWhoIsMissing) {
  PlanBoard board = board_of(4);
  board.submit(1, 4, rows({0, 1}));
  const Error error = board.give_up(1);
  EXPECT_EQ(error.code(), Errc::timed_out);
  EXPECT_NE(error.message().find("0, 2, 3"), std::string::npos) << error.message();
  EXPECT_EQ(code(board.take_outcome(1)), Errc::aborted);
}

TEST(PlanBoard, DeathEndsTheOthersWait) {
  PlanBoard board = board_of(4);
  board.submit(0, 3, rows({0}));
  board.submit(1, 3, rows({1}));
  board.remove(2, Error(Errc::peer_died, "writer 2 died"));  // it had no plan yet
  EXPECT_EQ(code(board.take_outcome(0)), Errc::peer_died);
  EXPECT_EQ(code(board.take_outcome(1)), Errc::peer_died);
}

TEST(PlanBoard, AnotherJobStartsAnew) {
  PlanBoard board = board_of(2);
  board.submit(0, 3, rows({0}));
  board.submit(0, 2, rows({0}));
  board.submit(1, 2, rows({1}));
  EXPECT_TRUE(ok(board.take_outcome(0)) && ok(board.take_outcome(1)));
}

}  // namespace
}  // namespace deltasync::agent
