// The group commit as it is: every interleaving of each configuration, and nothing goes wrong. And with one guard
// removed: the explorer finds the damage that the guard prevents.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "tests/commit/model.hpp"

namespace deltasync::commit::model {
namespace {

void print(const Seen& out) {
  for (const auto& line : out.trace) std::printf("      %s\n", line.c_str());
  std::printf("      %llu states\n", static_cast<unsigned long long>(out.states));
}

struct Case {
  const char* name;
  Budget budget;
};

class CommitModel : public testing::TestWithParam<Case> {};

TEST_P(CommitModel, NothingGoesWrong) {
  const Budget& budget = GetParam().budget;
  const Seen out = explore(budget);
  print(out);
  EXPECT_FALSE(out.truncated) << "the bound cut the search: it proves nothing";
  EXPECT_EQ(out.violation, Violation::none) << name(out.violation);
  EXPECT_GT(budget.updates ? out.unwritten : out.voted, 0U);
  EXPECT_EQ(out.kept > 0, budget.updates && !budget.lacks);
  EXPECT_EQ(out.as_before > 0, budget.updates && !budget.lacks && !budget.loads);  // a deadline may pass at any time
}

INSTANTIATE_TEST_SUITE_P(Updates, CommitModel,
                         testing::ValuesIn(std::initializer_list<Case>{
                             {"Two", {.noes = 1, .others = 1, .commit_fails = 1, .rollback_fails = 1, .interrupts = 1}},
                             {"TwoLoseTheStore", {.store_fails = 2, .commit_fails = 1}},
                             {"TwoCounted", {.counted = true, .noes = 1, .store_fails = 1, .commit_fails = 1}},
                             {"TwoCountedRestart", {.counted = true, .noes = 1, .deaths = 1}},
                             {"TwoRestart", {.noes = 1, .deaths = 2}},
                             {"TwoTwice", {.times = 2, .store_fails = 1}},
                             {"TwoCountedTwice", {.times = 2, .counted = true}},
                             {"TwoTwiceErased", {.times = 2, .erases = true, .store_fails = 1}},
                             {"TwoLack", {.lacks = true, .store_fails = 1}},
                             {"TwoLoad", {.loads = true, .deaths = 1, .store_fails = 1, .commit_fails = 1}},
                             {"Three", {.ranks = 3}},
                         }),
                         [](const auto& of) { return of.param.name; });

INSTANTIATE_TEST_SUITE_P(Votes, CommitModel,
                         testing::ValuesIn(std::initializer_list<Case>{
                             {"ThreeVote", {.ranks = 3, .updates = false, .noes = 1, .store_fails = 1}},
                             {"ThreeVoteAndRestart", {.ranks = 3, .updates = false, .noes = 1, .deaths = 1}},
                             {"ThreeVoteCounted", {.ranks = 3, .updates = false, .counted = true, .store_fails = 1}},
                             {"ThreeVoteTwiceErased", {.ranks = 3, .times = 2, .updates = false, .erases = true}},
                             {"FourVote", {.ranks = 4, .updates = false}},
                         }),
                         [](const auto& of) { return of.param.name; });

struct Mutant {
  const char* name;
  Budget budget;
  Rules rules;
  Violation expected;
};

class BrokenCommit : public testing::TestWithParam<Mutant> {};

TEST_P(BrokenCommit, IsFound) {
  const Seen out = explore(GetParam().budget, GetParam().rules);
  print(out);
  EXPECT_EQ(out.violation, GetParam().expected)
      << "found: " << name(out.violation) << ", expected: " << name(GetParam().expected);
}

INSTANTIATE_TEST_SUITE_P(
    Model, BrokenCommit,
    testing::ValuesIn(std::initializer_list<Mutant>{
        {"AllVotes", {}, {.guard = Guard::all_votes}, Violation::unfounded},
        {"NoesCount", {.noes = 1}, {.guard = Guard::noes_count}, Violation::unfounded},
        {"SameSubject", {.others = 1}, {.guard = Guard::same_subject}, Violation::unfounded},
        {"LacksCount", {.lacks = true}, {.guard = Guard::lacks_count}, Violation::unfounded},
        {"TakesWhatStands", {}, {.guard = Guard::takes_what_stands}, Violation::unfounded},
        {"OwnVoteStands", {.noes = 1, .deaths = 1}, {.guard = Guard::own_vote_stands}, Violation::unfounded},
        {"UnknownAfterYes", {.store_fails = 1}, {.guard = Guard::unknown_after_yes}, Violation::split},
        {"SkipsDecided", {.counted = true}, {.guard = Guard::skips_decided}, Violation::stuck},
        {"GivesUp", {}, {.guard = Guard::gives_up}, Violation::stuck},
        {"CommitsOnYes", {}, {.guard = Guard::commits_on_yes}, Violation::unfounded},
        {"RollsBack", {.commit_fails = 1}, {.guard = Guard::rolls_back}, Violation::mixed},
        {"VoidsUnknown", {.store_fails = 1}, {.guard = Guard::voids_unknown}, Violation::mixed},
        {"InterruptVoids", {.interrupts = 1}, {.guard = Guard::interrupt_voids}, Violation::mixed},
        {"DoubtsCount", {.loads = true}, {.guard = Guard::doubts_count}, Violation::mixed},
        {"SettlesOnYes", {.loads = true}, {.guard = Guard::settles_on_yes}, Violation::mixed},
        {"RegistersAreOverwritten", {}, {.overwrites = true}, Violation::split},
        {"NoDeadline", {}, {.never_ends = true}, Violation::stuck},
        {"ErasesEarly", {.times = 2, .erases = true}, {.erases_early = true}, Violation::split},
    }),
    [](const auto& of) { return of.param.name; });

}  // namespace
}  // namespace deltasync::commit::model
