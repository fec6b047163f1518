// The protocol as it is: every interleaving of each configuration, and nothing goes wrong. And with executors that
// break one rule each: the explorer finds the damage that the rule prevents.
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/commit/model.hpp"

namespace deltasync::commit::model {
namespace {

struct Case {
  const char* name;
  Budget budget;
};

class CommitModelClean : public testing::TestWithParam<Case> {};

TEST_P(CommitModelClean, NothingGoesWrong) {
  const Budget& budget = GetParam().budget;
  const Outcome out = explore(budget);
  EXPECT_FALSE(out.truncated) << "the bound cut the search: it proves nothing";
  EXPECT_EQ(out.violation, Violation::none) << name(out.violation);
  EXPECT_GT(out.finished, 0u) << "the search never came to the end of a transaction";
  EXPECT_EQ(out.in_doubt > 0, budget.in_doubt);
  for (const auto& line : out.trace) std::printf("      %s\n", line.c_str());
  std::printf("      %llu states\n", static_cast<unsigned long long>(out.states));
}

INSTANTIATE_TEST_SUITE_P(
    Two, CommitModelClean,
    testing::ValuesIn(std::initializer_list<Case>{
        {"FirstVersion", {.in_doubt = true, .all_serve_first = false}},
        {"CoordinatorDies", {.coordinator_deaths = 1, .in_doubt = true}},
        {"CoordinatorDiesTwice", {.coordinator_deaths = 2}},
        {"RankDies", {.rank_deaths = 1, .timeouts = 1}},
        {"RankWithDirectoryDies", {.rank_deaths = 1, .timeouts = 1, .directories = true}},
        {"AnyoneDies", {.coordinator_deaths = 1, .rank_deaths = 1, .directories = true}},
        {"WorkFailsAndTimeIsUp", {.publications = 1, .failures = 1, .timeouts = 1}},
        {"Transactions", {.transactions = 2, .publications = 1, .timeouts = 1}},
        {"ResolvedByPull", {.messages = 1, .coordinator_deaths = 1, .resolutions = 1}},
        {"EnginesLag", {.messages = 1, .rank_deaths = 1, .timeouts = 1, .engine_lags = true}},
        {"EnginesLagAndAreResolved", {.messages = 1, .resolutions = 1, .failures = 1, .engine_lags = true}},
        {"PastIsGone", {.messages = 1, .publications = 1, .rank_deaths = 1, .timeouts = 1, .past_is_gone = true}},
        {"UpdateWaitsAndRankDies", {.messages = 1, .publications = 1, .rank_deaths = 1, .timeouts = 1, .waits = true}},
        {"UpdateWaitsAndAnyoneDies",
         {.messages = 1,
          .publications = 1,
          .coordinator_deaths = 1,
          .rank_deaths = 1,
          .directories = true,
          .past_is_gone = true,
          .waits = true}},
        {"UpdateWaitsAndIsResolved", {.messages = 1, .publications = 1, .resolutions = 1, .waits = true}},
        {"LoseAVersion", {.messages = 1, .coordinator_deaths = 1, .failures = 1, .timeouts = 1, .losses = 1}},
        {"LogIsLost", {.messages = 1, .coordinator_deaths = 1, .resolutions = 1, .log_losses = 1}},
    }),
    [](const auto& of) { return of.param.name; });

INSTANTIATE_TEST_SUITE_P(Three, CommitModelClean,
                         testing::ValuesIn(std::initializer_list<Case>{
                             {"TimeIsUp", {.ranks = 3, .messages = 1, .timeouts = 1}},
                             {"CoordinatorDies", {.ranks = 3, .messages = 1, .coordinator_deaths = 1}},
                             {"RankDies", {.ranks = 3, .messages = 1, .rank_deaths = 1}},
                         }),
                         [](const auto& of) { return of.param.name; });

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
    b.waits = b.failures == 0 && b.losses == 0;  // who failed for good waits for the next version
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

const Budget kLively = {
    .coordinator_deaths = 1, .rank_deaths = 1, .timeouts = 1, .in_doubt = true, .directories = true};

TEST(CommitModelBroken, ActingBeforeLoggingIsFound) {
  Rules rules;
  rules.acts_before_logging = true;
  rules.check_stuck = false;
  EXPECT_EQ(explore(kLively, rules).violation, Violation::undecided);
}
TEST(CommitModelBroken, ServingInDoubtIsFound) {
  Rules rules;
  rules.serves_in_doubt = true;
  rules.check_stuck = false;
  const Violation found = explore(kLively, rules).violation;
  EXPECT_TRUE(found == Violation::split || found == Violation::undecided) << name(found);
}
TEST(CommitModelBroken, LosingRecordsIsFound) {
  Rules rules;
  rules.loses_records = true;
  rules.check_stuck = false;
  EXPECT_EQ(explore(kLively, rules).violation, Violation::split);
}
TEST(CommitModelBroken, ARestartUnderTheSameNameIsFound) {
  Rules rules;
  rules.same_incarnation = true;
  EXPECT_STREQ(name(explore(kLively, rules).violation), "stuck");
}

}  // namespace
}  // namespace deltasync::commit::model
