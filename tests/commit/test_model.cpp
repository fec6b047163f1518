// The protocol as it is: every interleaving of each configuration, and nothing goes wrong. And with executors that
// break one rule each: the explorer finds the damage that the rule prevents.
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/commit/model.hpp"

namespace deltasync::commit::model {
namespace {

Outcome expect_clean(const Budget& budget) {
  Outcome out = explore(budget);
  EXPECT_FALSE(out.truncated) << "the bound cut the search: it proves nothing";
  EXPECT_EQ(out.violation, Violation::none) << name(out.violation);
  EXPECT_GT(out.finished, 0u) << "the search never came to the end of a transaction";
  for (const auto& line : out.trace) std::printf("      %s\n", line.c_str());
  std::printf("      %llu states\n", static_cast<unsigned long long>(out.states));
  return out;
}

Budget two_ranks() {
  Budget b;
  b.all_serve_first = true;
  return b;
}

TEST(CommitModel, FirstVersionOfTwoRanks) {
  Budget b;
  b.in_doubt = true;
  expect_clean(b);
}
TEST(CommitModel, TwoRanksCoordinatorDies) {
  Budget b = two_ranks();
  b.coordinator_deaths = 1;
  b.in_doubt = true;
  EXPECT_GT(expect_clean(b).in_doubt, 0u);
}
TEST(CommitModel, TwoRanksCoordinatorDiesTwice) {
  Budget b = two_ranks();
  b.coordinator_deaths = 2;
  expect_clean(b);
}
TEST(CommitModel, TwoRanksRankDies) {
  Budget b = two_ranks();
  b.rank_deaths = 1;
  b.timeouts = 1;
  expect_clean(b);
}
TEST(CommitModel, TwoRanksWithDirectoriesRankDies) {
  Budget b = two_ranks();
  b.rank_deaths = 1;
  b.directories = true;
  b.timeouts = 1;
  expect_clean(b);
}
TEST(CommitModel, TwoRanksAnyoneDies) {
  Budget b = two_ranks();
  b.rank_deaths = 1;
  b.coordinator_deaths = 1;
  b.directories = true;
  expect_clean(b);
}
TEST(CommitModel, TwoRanksWorkFailsAndTimeIsUp) {
  Budget b = two_ranks();
  b.failures = 1;
  b.timeouts = 1;
  b.publications = 1;
  expect_clean(b);
}
TEST(CommitModel, TwoTransactionsOfTwoRanks) {
  Budget b = two_ranks();
  b.transactions = 2;
  b.publications = 1;
  b.timeouts = 1;
  expect_clean(b);
}
TEST(CommitModel, TwoRanksResolvedByPull) {
  Budget b = two_ranks();
  b.resolutions = 1;
  b.coordinator_deaths = 1;
  b.messages = 1;
  expect_clean(b);
}
TEST(CommitModel, TwoRanksWhoseEnginesLag) {
  Budget b = two_ranks();
  b.engine_lags = true;
  b.messages = 1;
  b.rank_deaths = 1;
  b.timeouts = 1;
  expect_clean(b);
}
TEST(CommitModel, TwoRanksWhoseEnginesLagAreResolved) {
  Budget b = two_ranks();
  b.engine_lags = true;
  b.messages = 1;
  b.resolutions = 1;
  b.failures = 1;
  expect_clean(b);
}
TEST(CommitModel, TwoRanksWhosePastIsGone) {
  Budget b = two_ranks();
  b.past_is_gone = true;
  b.messages = 1;
  b.publications = 1;
  b.rank_deaths = 1;
  b.timeouts = 1;
  expect_clean(b);
}
TEST(CommitModel, TwoRanksLoseAVersion) {
  Budget b = two_ranks();
  b.losses = 1;
  b.failures = 1;
  b.timeouts = 1;
  b.coordinator_deaths = 1;
  b.messages = 1;
  expect_clean(b);
}
TEST(CommitModel, TwoRanksWhoseLogIsLost) {
  Budget b = two_ranks();
  b.log_losses = 1;
  b.coordinator_deaths = 1;
  b.resolutions = 1;
  b.messages = 1;
  expect_clean(b);
}
TEST(CommitModel, ThreeRanks) {
  Budget b = two_ranks();
  b.ranks = 3;
  b.messages = 1;
  b.timeouts = 1;
  expect_clean(b);
}
TEST(CommitModel, ThreeRanksCoordinatorDies) {
  Budget b = two_ranks();
  b.ranks = 3;
  b.messages = 1;
  b.coordinator_deaths = 1;
  expect_clean(b);
}
TEST(CommitModel, ThreeRanksRankDies) {
  Budget b = two_ranks();
  b.ranks = 3;
  b.messages = 1;
  b.rank_deaths = 1;
  expect_clean(b);
}

TEST(CommitModel, RandomWalks) {
  std::uint64_t finished = 0;
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    Budget b;
    b.ranks = 2 + seed % 2;
    b.messages = static_cast<std::uint8_t>(1 + seed % 5);
    b.transactions = b.publications = 6;
    b.coordinator_deaths = static_cast<std::uint8_t>(seed % 4);
    b.rank_deaths = static_cast<std::uint8_t>(seed / 4 % 4);
    b.resolutions = static_cast<std::uint8_t>(seed / 16 % 2);
    b.failures = static_cast<std::uint8_t>(seed / 32 % 4);
    b.timeouts = static_cast<std::uint8_t>(seed / 128 % 4);
    b.losses = static_cast<std::uint8_t>(seed / 64 % 3);
    b.log_losses = static_cast<std::uint8_t>(seed % 5 == 0);
    b.engine_lags = seed % 7 < 3;
    b.past_is_gone = seed % 11 < 5;
    b.gones = 8;
    b.in_doubt = true;
    b.directories = seed % 3 == 0;
    b.all_serve_first = seed % 2 == 0;
    const Outcome out = walk(b, seed, 800);
    finished += out.finished;
    ASSERT_EQ(out.violation, Violation::none) << name(out.violation) << ", seed " << seed;
  }
  EXPECT_GT(finished, 0u);
}

// ---- broken executors

Budget lively() {
  Budget b = two_ranks();
  b.coordinator_deaths = 1;
  b.rank_deaths = 1;
  b.timeouts = 1;
  b.in_doubt = true;
  b.directories = true;
  return b;
}

TEST(CommitModelBroken, ActingBeforeLoggingIsFound) {
  Rules rules;
  rules.acts_before_logging = true;
  rules.check_stuck = false;
  EXPECT_EQ(explore(lively(), rules).violation, Violation::undecided);
}
TEST(CommitModelBroken, ServingInDoubtIsFound) {
  Rules rules;
  rules.serves_in_doubt = true;
  rules.check_stuck = false;
  const Violation found = explore(lively(), rules).violation;
  EXPECT_TRUE(found == Violation::split || found == Violation::undecided) << name(found);
}
TEST(CommitModelBroken, LosingRecordsIsFound) {
  Rules rules;
  rules.loses_records = true;
  rules.check_stuck = false;
  EXPECT_EQ(explore(lively(), rules).violation, Violation::split);
}
TEST(CommitModelBroken, ARestartUnderTheSameNameIsFound) {
  Rules rules;
  rules.same_incarnation = true;
  EXPECT_STREQ(name(explore(lively(), rules).violation), "stuck");
}

}  // namespace
}  // namespace deltasync::commit::model
