// Single steps of the two machines; test_model.cpp has all of them in every order.
#include <gmock/gmock-matchers.h>

#include "tests/commit/group.hpp"

namespace deltasync::commit {
namespace {

using testing::HasSubstr;
using Outcome = CoordinatorState::Outcome;

TEST(Machines, AllComeToOneVersion) {
  Group group(3);
  group.bring_to(1);
  group.bring_to(2);
  EXPECT_EQ(group.coordinator().state().group, version(2));
  std::vector<RecordKind> kinds;
  for (const Record& r : group.log) kinds.push_back(r.kind);
  EXPECT_THAT(kinds, testing::ElementsAre(RecordKind::start, RecordKind::commit, RecordKind::finish, RecordKind::commit,
                                          RecordKind::finish));
}

TEST(Machines, NothingNewPausesNobodyAndIsNotLogged) {
  Group group(2);
  group.bring_to(1);
  const auto records = group.log.size();
  group.update();
  EXPECT_TRUE(group.coordinator().state().nothing_new);
  EXPECT_EQ(group.all_serve(), 1u);
  EXPECT_EQ(group.log.size(), records);
}

TEST(Machines, RanksThatStagedDifferentVersionsAgreeOnTheNewest) {
  Group group(3);
  group.newest = {version(4), version(6), version(5)};
  group.update();
  EXPECT_EQ(group.all_serve(), 6u);
  EXPECT_EQ(group.coordinator().state().round, 2u);
}

TEST(Machines, WhoHasStagedTheVersionOfTheNextRoundKeepsIt) {
  Group group(2);
  group.newest = {version(4), version(5)};
  group.begin();
  for (const std::uint32_t r : {0u, 1u}) group.ask_and_work(r);
  group.ask(0);
  group.ask(1);  // both have been heard of: round 2 wants 5
  group.ask(1);
  EXPECT_EQ(group.rank(1).work().kind, Work::Kind::none);
  EXPECT_EQ(group.rank(1).state().phase, Phase::staged);
  EXPECT_EQ(group.rank(1).state().round, 2u);
  group.run();
  EXPECT_EQ(group.all_serve(), 5u);
}

TEST(Machines, AVersionOutOfReachIsNotInsistedOn) {
  Group group(2);
  group.newest = {version(4), version(5)};
  group.begin();
  for (const std::uint32_t r : {0u, 1u}) group.ask_and_work(r);
  group.ask(0);
  group.ask(1);
  group.ask(0);  // round 2: 5, please
  ASSERT_EQ(group.rank(0).work().exact.number, 5u);
  group.work(0, Error(Errc::gone, "past"));
  group.newest = {version(7), version(7)};
  group.run();
  EXPECT_EQ(group.all_serve(), 7u);
}

TEST(Machines, SameSlicesWithDifferentContentsAreNotCommitted) {
  Group group(2);
  group.roots = {{0, 1}, {1, 2}};
  group.update();
  EXPECT_EQ(group.all_serve(), std::nullopt);
  EXPECT_EQ(group.coordinator().state().problem.code(), Errc::corrupt);
  EXPECT_THAT(group.coordinator().state().problem.message(), HasSubstr("rank 1 and rank 0"));
}

TEST(Machines, AFailedPullAbortsAndIsNamed) {
  Group group(2);
  group.bring_to(1);
  group.begin();
  group.ask(1);
  group.work(1, Error(Errc::no_space, "no memory"));
  group.run();
  EXPECT_EQ(group.all_serve(), 1u);
  EXPECT_EQ(group.coordinator().state().problem.code(), Errc::no_space);
  EXPECT_THAT(group.coordinator().state().problem.message(), HasSubstr("rank 1: no memory"));
}

TEST(Machines, AFailedPauseAborts) {
  Group group(2);
  group.bring_to(1);
  group.begin(2, Phase::staged);
  group.ask(0);
  EXPECT_EQ(group.rank(0).work().kind, Work::Kind::pause);
  EXPECT_FALSE(group.rank(0).serving());
  group.work(0, Error(Errc::timed_out, "a step does not end"));
  EXPECT_TRUE(group.rank(0).serving());
  group.run();
  EXPECT_EQ(group.all_serve(), 1u);
  EXPECT_EQ(group.log.back().kind, RecordKind::abort);
}

TEST(Machines, AFailedCommitTakesAllBack) {
  Group group(3);
  group.bring_to(1);
  group.begin(2, Phase::prepared);
  for (const std::uint32_t r : {0u, 1u, 2u}) {
    group.ask(r);
    ASSERT_EQ(group.rank(r).work().kind, Work::Kind::commit);
    group.work(r, r == 1 ? std::optional(Error(Errc::timed_out, "too slow")) : std::nullopt);
  }
  EXPECT_EQ(group.rank(0).rank_state(), RankState::committed_waiting);
  EXPECT_EQ(group.rank(0).state().holds.number, 2u);
  group.run();
  EXPECT_EQ(group.all_serve(), 1u);
  EXPECT_EQ(group.log.back().kind, RecordKind::roll_back);
  group.bring_to(3);
}

TEST(Machines, ASilentRankEndsTheTransactionAtTheDeadline) {
  Group group(2);
  group.bring_to(1);
  group.begin(2, Phase::prepared);
  group.ask_and_work(0);
  group.silent[1] = true;
  group.run();
  EXPECT_EQ(group.rank(0).rank_state(), RankState::committed_waiting);
  group.rank(1).time_is_up();
  EXPECT_EQ(group.rank(1).rank_state(), RankState::in_doubt);
  EXPECT_FALSE(group.rank(1).serving());
  group.coordinator().time_is_up();
  group.settle();
  EXPECT_THAT(group.coordinator().state().problem.message(), HasSubstr("waited for rank 1"));
  group.run();
  EXPECT_EQ(group.rank(0).serving(), (VersionId{1, 1}));
  group.silent.clear();
  group.run();
  EXPECT_EQ(group.all_serve(), 1u);
}

TEST(Machines, ARestartedCoordinatorGoesOnWithWhatWasDecided) {
  Group group(2);
  group.bring_to(1);
  group.begin(2, Phase::prepared);
  group.ask(0);  // the commit is decided
  ASSERT_EQ(group.log.back().kind, RecordKind::commit);
  group.restart_coordinator(2);
  group.run();
  EXPECT_EQ(group.all_serve(), 2u);
  EXPECT_EQ(group.coordinator().state().outcome, Outcome::finished);
}

TEST(Machines, ARestartedCoordinatorAbortsWhatWasNot) {
  Group group(2);
  group.bring_to(1);
  group.begin(2, Phase::staged);
  group.ask_and_work(0);
  ASSERT_EQ(group.rank(0).rank_state(), RankState::prepared);
  group.restart_coordinator(2);
  group.run();
  EXPECT_EQ(group.all_serve(), 1u);
}

TEST(Machines, ARestartedCoordinatorSaysFinishAndRollBackAgain) {
  for (const bool finish : {true, false}) {
    Group group(2);
    group.bring_to(1);
    group.begin(2, Phase::prepared);
    group.ask_and_work(0);
    if (finish) {
      group.ask_and_work(1);
      ASSERT_TRUE(group.coordinator().on_report(group.rank(0).report()));
      ASSERT_TRUE(group.coordinator().on_report(group.rank(1).report()));
    } else {
      ASSERT_TRUE(group.coordinator().on_report(group.rank(0).report()));
      group.coordinator().time_is_up();
    }
    group.settle();
    ASSERT_EQ(group.log.back().kind, finish ? RecordKind::finish : RecordKind::roll_back);
    group.restart_coordinator(2);
    group.run();
    EXPECT_EQ(group.all_serve(), finish ? 2u : 1u);
  }
}

TEST(Machines, ARestartedRankDoesNotServeBeforeItHasCaughtUp) {
  Group group(2);
  group.bring_to(1);
  group.restart_rank(1);
  EXPECT_FALSE(group.rank(1).serving());
  EXPECT_EQ(group.ask(1), OrderKind::catch_up);
  EXPECT_FALSE(group.rank(1).serving());
  group.work(1, Error(Errc::gone, "past"));
  EXPECT_EQ(group.rank(1).report().problem, "past");
  group.run();
  EXPECT_EQ(group.all_serve(), 1u);

  group.restart_rank(1, VersionId{1, 1});  // its directory has it
  EXPECT_EQ(group.ask(1), OrderKind::serve);
  EXPECT_EQ(group.all_serve(), 1u);
}

TEST(Machines, ARankThatComesBackWhileOthersStageServesFirst) {
  Group group(2);
  group.bring_to(1);
  group.begin();
  ASSERT_EQ(group.ask(0), OrderKind::stage);
  group.restart_rank(1);
  ASSERT_EQ(group.ask(1), OrderKind::catch_up);
  EXPECT_EQ(group.rank(1).work().exact, (VersionId{1, 1}));
  EXPECT_EQ(group.ask(1), OrderKind::none) << "it is at it";
  EXPECT_FALSE(group.rank(1).cancelled());
  group.work(1);
  EXPECT_EQ(group.ask(1), OrderKind::serve);
  EXPECT_EQ(group.all_serve(), 1u);
  EXPECT_EQ(group.coordinator().state().stage, CoordinatorState::Stage::staging);
  EXPECT_EQ(group.ask(1), OrderKind::stage);
  group.newest = {version(2), version(2)};
  group.run();
  EXPECT_EQ(group.all_serve(), 2u);
}

TEST(Machines, ARankThatComesBackWithTheGroupsVersionServesItWhateverOthersHaveStaged) {
  Group group(2);
  group.bring_to(1);
  group.begin(2);
  group.ask_and_work(0);
  group.ask(0);
  ASSERT_EQ(group.rank(0).state().phase, Phase::staged);
  group.restart_rank(1, VersionId{1, 1});
  EXPECT_EQ(group.ask(1), OrderKind::serve);
  EXPECT_EQ(group.all_serve(), 1u);
  EXPECT_EQ(group.ask(1), OrderKind::stage);
  group.run();
  EXPECT_EQ(group.all_serve(), 2u);
}

/// It has committed, and died before it could say so; the others rolled back.
TEST(Machines, ARankThatHoldsWhatOthersPullDoesNotWaitForMore) {
  Group group(2);
  group.bring_to(1);
  const Want newer{.newer = true};
  ASSERT_TRUE(group.coordinator().begin(newer));
  group.ask(0);
  EXPECT_TRUE(group.rank(0).work().want.newer);
  group.newest = {version(2), version(2)};
  group.work(0);
  group.ask(0);
  group.restart_rank(1, VersionId{1, 2});
  ASSERT_EQ(group.ask(1), OrderKind::stage);
  EXPECT_FALSE(group.rank(1).work().want.newer);
  group.run();
  EXPECT_EQ(group.all_serve(), 2u);
}

TEST(Machines, ARankThatCannotHaveTheGroupsVersionStages) {
  for (const Errc why : {Errc::gone, Errc::connection}) {
    Group group(2);
    group.bring_to(1);
    group.begin(2);
    group.restart_rank(1);
    ASSERT_EQ(group.ask(1), OrderKind::catch_up);
    group.work(1, Error(why, "not now"));
    EXPECT_EQ(group.ask(1), why == Errc::gone ? OrderKind::stage : OrderKind::catch_up);
    group.run();
    EXPECT_EQ(group.all_serve(), 2u);
  }
}

/// All wait for this rank alone; and the agent has the version no more, or not yet.
TEST(Machines, ACatchUpIsGivenUpOnceAnotherVersionIsStaged) {
  Group group(2);
  group.bring_to(1);
  group.restart_rank(1);
  ASSERT_EQ(group.ask(1), OrderKind::catch_up);
  group.begin(2);
  ASSERT_EQ(group.ask(1), OrderKind::none);
  EXPECT_FALSE(group.rank(1).cancelled());
  group.ask_and_work(0);
  group.ask(0);
  ASSERT_EQ(group.ask(1), OrderKind::stage);
  EXPECT_EQ(group.rank(1).work().kind, Work::Kind::catch_up);
  EXPECT_TRUE(group.rank(1).cancelled());
  group.work(1, Error(Errc::cancelled, "stopped"));
  EXPECT_FALSE(group.rank(1).cancelled());
  EXPECT_EQ(group.rank(1).report().problem, "") << "it was to end";
  group.run();
  EXPECT_EQ(group.all_serve(), 2u);
}

TEST(Machines, ACatchUpOfAReplacedProcessIsGivenUp) {
  Group group(2);
  group.bring_to(1);
  group.restart_rank(1);
  ASSERT_EQ(group.ask(1), OrderKind::catch_up);
  group.rank(1).replaced();
  EXPECT_TRUE(group.rank(1).cancelled());
}

TEST(Machines, APromiseLostWithItsProcessTakesAllBack) {
  Group group(2);
  group.bring_to(1);
  group.begin(2, Phase::prepared);
  group.ask_and_work(0);
  group.restart_rank(1, VersionId{1, 1});
  group.run();
  EXPECT_EQ(group.coordinator().state().problem.code(), Errc::peer_died);
  EXPECT_EQ(group.all_serve(), 1u);
}

TEST(Machines, OrdersThatAreLateOrForOthersChangeNothing) {
  Group group(2);
  group.bring_to(1);
  group.begin(2, Phase::staged);
  group.ask(0);
  const Order prepare = group.last_order;
  ASSERT_EQ(prepare.kind, OrderKind::prepare);
  group.work(0);
  group.coordinator().time_is_up();
  group.settle();
  group.run();
  ASSERT_EQ(group.all_serve(), 1u);

  const Report before = group.rank(0).report();
  ASSERT_TRUE(group.rank(0).on_order(prepare));  // replayed
  Order other = group.coordinator().order(0);
  other.incarnation = 5;
  other.step += 100;
  other.kind = OrderKind::expel;
  ASSERT_TRUE(group.rank(0).on_order(other));
  Order serve = group.coordinator().order(0);
  serve.step += 1;
  serve.kind = OrderKind::serve;
  serve.version = version(2);
  ASSERT_TRUE(group.rank(0).on_order(serve));
  EXPECT_EQ(group.rank(0).report(), before);
}

TEST(Machines, AnotherLogIsRefusedUntilTheRankIsResolved) {
  Group group(1);
  group.bring_to(1);
  Order order = group.coordinator().order(0);
  order.log = kTestLog + 1;
  order.kind = OrderKind::expel;
  const Status refused = group.rank(0).on_order(order);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::version_conflict);
  EXPECT_TRUE(group.rank(0).serving());
  ASSERT_TRUE(group.rank(0).resolve_by_pull(1000));
  EXPECT_FALSE(group.rank(0).serving());
  group.work(0);
  order.incarnation = 1000;
  order.kind = OrderKind::none;
  EXPECT_TRUE(group.rank(0).on_order(order));
  EXPECT_EQ(group.rank(0).state().log, kTestLog + 1);
}

TEST(Machines, AResolutionEndsAPullAndDropsWhatItBrings) {
  Group group(2);
  group.bring_to(1);
  group.begin(2);
  ASSERT_EQ(group.ask(1), OrderKind::stage);
  ASSERT_TRUE(group.rank(1).resolve_by_pull(1000));
  EXPECT_FALSE(group.rank(1).serving());
  EXPECT_TRUE(group.rank(1).cancelled());
  EXPECT_EQ(group.ask(1), OrderKind::none) << "it is busy";
  group.work(1);  // the pull came to its end before it was stopped
  EXPECT_EQ(group.rank(1).work().kind, Work::Kind::forget);
  EXPECT_EQ(group.rank(1).state().phase, Phase::none);
  EXPECT_EQ(group.rank(1).state().holds, (VersionId{1, 1}));
  group.work(1);
  EXPECT_EQ(group.ask(1), OrderKind::serve);
  group.run();
  EXPECT_EQ(group.all_serve(), 2u);
}

TEST(Machines, AResolutionWaitsForOtherWork) {
  Group group(2);
  group.bring_to(1);
  group.begin(2, Phase::prepared);
  group.ask(0);
  ASSERT_EQ(group.rank(0).work().kind, Work::Kind::commit);
  EXPECT_EQ(group.rank(0).resolve_by_pull(1000).error().code(), Errc::version_conflict);
}

/// The transactions of two logs have the same names.
TEST(Machines, ARankOfAnotherLogCountsForNothing) {
  Group group(2);
  group.begin(1, Phase::staged);
  const Report staged = group.rank(1).report();
  group.log.clear();
  group.new_log = kTestLog + 1;
  group.restart_coordinator(2);
  group.begin();
  ASSERT_EQ(group.coordinator().state().transaction, staged.transaction);
  ASSERT_TRUE(group.rank(0).resolve_by_pull(1000));
  group.work(0);
  group.ask_and_work(0);
  group.ask(0);
  ASSERT_EQ(group.rank(0).state().phase, Phase::staged);
  ASSERT_TRUE(group.coordinator().on_report(staged));
  EXPECT_EQ(group.coordinator().state().stage, CoordinatorState::Stage::staging);
  EXPECT_EQ(group.coordinator().order(1).kind, OrderKind::none);
  EXPECT_EQ(group.rank(1).on_order(group.coordinator().order(1)).error().code(), Errc::version_conflict);
  group.coordinator().time_is_up();
  EXPECT_THAT(group.coordinator().state().problem.message(),
              HasSubstr("waited for rank 1 (obeys another coordinator's log)"));
}

TEST(Machines, ReportsOfOthersAreRefused) {
  Group group(2);
  group.bring_to(1);
  Report report = group.rank(0).report();
  report.rank = 2;
  EXPECT_EQ(group.coordinator().on_report(report).error().code(), Errc::invalid_argument);
  report = group.rank(0).report();
  report.incarnation -= 1;
  EXPECT_EQ(group.coordinator().on_report(report).error().code(), Errc::version_conflict);
  report = group.rank(0).report();
  report.step -= 1;
  report.holds = {};
  EXPECT_TRUE(group.coordinator().on_report(report));
  EXPECT_EQ(group.coordinator().state().ranks[0]->holds, (VersionId{1, 1}));
}

TEST(Machines, ARankThatServesSomethingElseIsExpelledAndJoinsAgain) {
  Group group(2);
  group.bring_to(1);
  Report report = group.rank(1).report();
  report.step += 1;
  report.holds = {1, 99};
  ASSERT_TRUE(group.coordinator().on_report(report));
  EXPECT_EQ(group.coordinator().order(1).kind, OrderKind::expel);
  ASSERT_TRUE(group.rank(1).on_order(group.coordinator().order(1)));
  EXPECT_FALSE(group.rank(1).serving());
}

// ---- logs that are refused

Record record(RecordKind kind, std::uint64_t term, TransactionId transaction = {}, Version v = {}) {
  return {kind, kTestLog, term, 2, transaction, std::move(v)};
}

Errc refused(const std::vector<Record>& records, std::uint32_t ranks = 2) {
  const auto made = CoordinatorMachine::recover(ranks, records, 1);
  return made ? Errc::cancelled : made.error().code();
}

TEST(Machines, LogsThatCannotBeAreRefused) {
  const Record start = record(RecordKind::start, 1);
  const Record commit = record(RecordKind::commit, 1, {1, 1}, version(1));
  EXPECT_EQ(refused({commit}), Errc::corrupt);
  EXPECT_EQ(refused({start, start}), Errc::corrupt);
  EXPECT_EQ(refused({start, commit, commit}), Errc::corrupt);
  EXPECT_EQ(refused({start, record(RecordKind::commit, 1, {1, 1})}), Errc::corrupt);
  EXPECT_EQ(refused({start, record(RecordKind::finish, 1, {1, 1})}), Errc::corrupt);
  EXPECT_EQ(refused({start, commit, record(RecordKind::finish, 1, {1, 2})}), Errc::corrupt);
  EXPECT_EQ(refused({start, commit, record(RecordKind::finish, 2, {1, 1})}), Errc::corrupt);
  Record other = commit;
  other.log = 1;
  EXPECT_EQ(refused({start, other}), Errc::corrupt);
  EXPECT_EQ(refused({start, commit}, 3), Errc::invalid_argument);
  EXPECT_EQ(refused({start}, 0), Errc::invalid_argument);
  EXPECT_EQ(refused({start}, kRanksMax + 1), Errc::invalid_argument);
  EXPECT_EQ(
      refused({start, commit, record(RecordKind::finish, 1, {1, 1}), record(RecordKind::start, 2, {}, version(5))}),
      Errc::corrupt);
  EXPECT_EQ(refused({start, commit, record(RecordKind::finish, 1, {1, 1})}, 3), Errc::cancelled);
}

}  // namespace
}  // namespace deltasync::commit
