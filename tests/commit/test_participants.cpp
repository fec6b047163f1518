// Ranks as their engines and their coordinator meet them.
#include <gmock/gmock-matchers.h>

#include <future>

#include "base/deadline.hpp"
#include "commit/rank_link.hpp"
#include "tests/commit/log_lines.hpp"
#include "tests/commit/pretend_target.hpp"
#include "tests/commit/rank_fixture.hpp"

namespace deltasync::commit {
namespace {

using testing::HasSubstr;

TEST_F(CommitRanks, OverTcpAndByCalls) {
  start();
  join(0, true);
  join(1);
  for (const char* label : {"one", "two", "three"}) {
    if (std::string(label) != "one") trainer_.publish(label);
    const auto version = server_->update(Want(), soon());
    ASSERT_TRUE(version) << version.error().to_string();
    EXPECT_EQ(version->label, label);
    EXPECT_TRUE(all_serve(label));
    EXPECT_TRUE(memories_are(version->id.number));
  }
  EXPECT_EQ(server_->served()->label, "three");
  const auto again = server_->update(Want(), soon());
  ASSERT_TRUE(again) << "nothing new is no error";
  EXPECT_TRUE(members_[0].engine.runs && members_[1].engine.runs);
}

TEST_F(CommitRanks, AnEngineThatDoesNotPauseHoldsAllAtTheVersionBefore) {
  bring_up();
  trainer_.publish("two");
  members_[1].engine.refuse_pause = true;
  const auto refused = server_->update(Want(), soon());
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("rank 1: a step does not end"));
  EXPECT_TRUE(all_serve("one"));
  EXPECT_TRUE(memories_are(1));
  members_[1].engine.refuse_pause = false;
  ASSERT_TRUE(server_->update(Want(), soon()));
  EXPECT_TRUE(all_serve("two"));
}

TEST_F(CommitRanks, AnEngineThatPausedHalfWayIsResumed) {
  bring_up();
  trainer_.publish("two");
  members_[1].engine.half_pause = true;
  ASSERT_FALSE(server_->update(Want(), soon()));
  members_[1].engine.half_pause = false;
  EXPECT_TRUE(eventually([&] { return members_[1].rank->serving() && members_[1].engine.admits; }));
  EXPECT_TRUE(all_serve("one"));
}

TEST_F(CommitRanks, ACommitThatFailsIsRolledBackEverywhere) {
  bring_up();
  trainer_.publish("two");
  members_[1].receiver->fail_commits = 1;
  const auto failed = server_->update(Want(), soon());
  ASSERT_FALSE(failed);
  EXPECT_THAT(failed.error().message(), HasSubstr("rank 1: the commit takes too long"));
  EXPECT_TRUE(all_serve("one"));
  EXPECT_TRUE(memories_are(1));
  EXPECT_LE(members_[0].receiver->rollbacks, 1u);  // none if it had not begun
  ASSERT_TRUE(server_->update(Want(), soon()));
  EXPECT_TRUE(all_serve("two"));
  EXPECT_TRUE(memories_are(2));
}

TEST_F(CommitRanks, ANewProcessCatchesUpAndTheOthersServeOn) {
  bring_up();
  join(1);
  EXPECT_TRUE(all_serve("one"));
  EXPECT_TRUE(memories_are(1));
}

TEST_F(CommitRanks, AnotherLogIsObeyedOnlyAfterTheOperatorsWord) {
  bring_up();
  lose_log();
  start();  // with another log
  ASSERT_FALSE(HasFatalFailure());
  for (Member& m : members_) {
    EXPECT_TRUE(eventually([&] {
      const auto trouble = m.rank->last_error();
      return trouble && trouble->code() == Errc::version_conflict;
    }));
    EXPECT_TRUE(m.rank->serving());
  }
  for (Member& m : members_) {
    EXPECT_TRUE(eventually([&] { return m.rank->resolve_by_pull().ok(); }));
    EXPECT_FALSE(m.rank->serving());
  }
  trainer_.publish("two");
  ASSERT_TRUE(eventually([&] { return server_->update(Want(), soon()).ok(); }));
  EXPECT_TRUE(all_serve("two"));
}

TEST_F(CommitRanks, TheOperatorsWordEndsAPullThatWaits) {
  bring_up();
  auto update = std::async(std::launch::async, [&] { return server_->update(newer(), soon()); });
  ASSERT_TRUE(both_wait());
  lose_log();
  EXPECT_EQ(update.get().error().code(), Errc::cancelled);
  for (Member& m : members_) {
    const Status resolved = m.rank->resolve_by_pull();
    EXPECT_TRUE(resolved) << resolved.error().to_string();
    EXPECT_FALSE(m.rank->serving());
  }
  EXPECT_TRUE(eventually([&] { return !members_[0].engine.runs && !members_[1].engine.runs; }));
  start();  // with another log
  ASSERT_FALSE(HasFatalFailure());
  trainer_.publish("two");
  ASSERT_TRUE(eventually([&] { return server_->update(Want(), soon()).ok(); }));
  EXPECT_TRUE(all_serve("two"));
}

TEST_F(CommitRanks, AHookThatThrowsIsAnErrorThatNamesIt) {
  bring_up();
  trainer_.publish("two");
  members_[1].engine.pause_throws = true;
  const auto failed = server_->update(Want(), soon());
  ASSERT_FALSE(failed);
  EXPECT_THAT(failed.error().message(), HasSubstr("rank 1: the engine's pause threw: no such step"));
  EXPECT_TRUE(all_serve("one"));
  members_[1].engine.pause_throws = false;
  members_[1].engine.resume_throws = true;
  ASSERT_TRUE(server_->update(Want(), soon())) << "the decision does not wait for an engine to resume";
  EXPECT_TRUE(eventually([&] {
    const auto report = server_->ranks()[1].report;
    return report && report->problem.find("the engine's resume threw something") != std::string::npos;
  }));
  EXPECT_FALSE(members_[1].engine.runs);
  members_[1].engine.resume_throws = false;
  EXPECT_TRUE(all_serve("two"));
  EXPECT_TRUE(eventually([&] { return members_[1].rank->report().problem.empty(); }));
}

TEST_F(CommitRanks, AnEngineThatDoesNotResumeHoldsUpNoUpdate) {
  bring_up();
  trainer_.publish("two");
  members_[0].engine.refuse_resume = true;
  ASSERT_TRUE(server_->update(Want(), soon()));
  EXPECT_TRUE(eventually([&] { return members_[0].engine.refused >= 2; })) << "it is asked again";
  EXPECT_EQ(members_[0].rank->report().problem, "no cache");
  trainer_.publish("three");
  ASSERT_TRUE(server_->update(Want(), soon()));
  members_[0].engine.refuse_resume = false;
  EXPECT_TRUE(all_serve("three"));
  EXPECT_TRUE(memories_are(3));
}

TEST_F(CommitRanks, AnEngineThatDoesNotResumeIsAskedAgainWhileAPullWaits) {
  bring_up();
  trainer_.publish("two");
  members_[0].engine.refuse_resume = true;
  ASSERT_TRUE(server_->update(Want(), soon()));
  auto update = std::async(std::launch::async, [&] { return server_->update(newer(), soon()); });
  ASSERT_TRUE(both_wait());
  EXPECT_FALSE(members_[0].engine.runs);
  members_[0].engine.refuse_resume = false;
  EXPECT_TRUE(all_serve("two"));
  EXPECT_EQ(members_[0].rank->report().phase, Phase::staging) << "of the same pull";
  trainer_.publish("three");
  const auto version = update.get();
  ASSERT_TRUE(version) << version.error().to_string();
  EXPECT_TRUE(all_serve("three"));
}

/// A driver that follows its trainer has an update open always.
TEST_F(CommitRanks, ARankThatComesBackWhileAnUpdateWaitsServesMeanwhile) {
  bring_up();
  auto update = std::async(std::launch::async, [&] { return server_->update(newer(), soon()); });
  ASSERT_TRUE(both_wait());
  join(1);
  EXPECT_TRUE(all_serve("one"));
  EXPECT_TRUE(eventually([&] { return members_[1].receiver->waits.load(); })) << "for the next one, like the other";
  EXPECT_EQ(update.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  trainer_.publish("two");
  const auto version = update.get();
  ASSERT_TRUE(version) << version.error().to_string();
  EXPECT_TRUE(all_serve("two"));
  EXPECT_TRUE(memories_are(2));
}

TEST_F(CommitRanks, AnUpdateEndsACatchUpThatWaits) {
  bring_up();
  join(1, options(1), true);
  ASSERT_TRUE(eventually([&] { return members_[1].receiver->waits.load(); }));
  trainer_.publish("two");
  ASSERT_TRUE(server_->update(Want(), soon()));
  EXPECT_TRUE(all_serve("two"));
}

TEST_F(CommitRanks, AParticipantThatEndsEndsItsCatchUp) {
  bring_up();
  join(1, options(1), true);
  ASSERT_TRUE(eventually([&] { return members_[1].receiver->waits.load(); }));
  const Deadline limit = soon();
  members_[1].rank.reset();
  EXPECT_FALSE(limit.passed());
}

/// It was cut off while a later process of its rank joined, and comes back while that is connected.
TEST_F(CommitRanks, AnEarlierProcessThatComesBackStopsServing) {
  bring_up();
  struct Cable {
    std::atomic<bool> cut{false};
    std::optional<RankLink> link;  // of the asking thread
  };
  const auto cable = std::make_shared<Cable>();
  ParticipantOptions o = options(1);
  o.exchange = [to = o, cable](const Report& report, Deadline /*for calls*/, const std::stop_token& stop) {
    if (cable->cut) {
      cable->link.reset();
      return Result<Order>(Error(Errc::connection, "cut off"));
    }
    if (!cable->link) cable->link.emplace(to, *net::parse_endpoint(to.coordinator));
    return cable->link->exchange(report, soon(), stop);
  };
  join(1, o);
  ASSERT_TRUE(all_serve("one"));
  cable->cut = true;
  EXPECT_TRUE(eventually([&] { return !server_->ranks()[1].connected; }));
  EXPECT_TRUE(members_[1].rank->serving()) << "nobody has told it";

  FakeReceiver receiver(trainer_);
  CountingEngine engine;
  auto later = ParticipantImpl::start(options(1), receiver, engine);
  ASSERT_TRUE(later) << later.error().to_string();
  ASSERT_TRUE(eventually([&] { return (*later)->serving() && engine.runs; }));
  cable->cut = false;
  EXPECT_TRUE(eventually([&] { return !members_[1].rank->serving() && !members_[1].engine.runs; }));
  EXPECT_EQ(members_[1].rank->last_error()->code(), Errc::version_conflict);
  EXPECT_TRUE((*later)->serving());
}

/// Every process begins with the lowest count; an earlier one of the rank may have come further.
TEST_F(CommitRanks, ARankThatHearsOfALaterNameTakesAStillLaterOne) {
  enum class Way { calls, tcp, tcp_in_a_hook };
  for (const Way way : {Way::calls, Way::tcp, Way::tcp_in_a_hook}) {
    SCOPED_TRACE(static_cast<int>(way));
    for (Member& m : members_) m.rank.reset();
    server_.reset();
    start();
    Report late = busy(1, make_epoch() + (1ull << 40));
    ASSERT_TRUE(server_->exchange(late, Deadline::after({}), {}));
    join(0);
    ParticipantOptions o = options(1, way == Way::calls);
    if (way == Way::tcp_in_a_hook) {
      const auto link = std::make_shared<RankLink>(o, *net::parse_endpoint(o.coordinator));
      o.exchange = [link](const Report& report, Deadline /*for calls*/, const std::stop_token& stop) {
        return link->exchange(report, soon(), stop);
      };
    }
    join(1, o);
    const auto version = server_->update(Want(), soon());
    ASSERT_TRUE(version) << version.error().to_string();
    EXPECT_TRUE(all_serve("one"));
    EXPECT_GT(members_[1].rank->report().incarnation, late.incarnation);
  }
}

TEST_F(CommitRanks, AnEarlierProcessOfThisHostStopsServing) {
  bring_up();
  join(1, true);
  ASSERT_TRUE(all_serve("one"));
  ASSERT_TRUE(server_->exchange(busy(1, make_epoch() + (1ull << 40)), Deadline::after({}), {}));
  EXPECT_TRUE(eventually([&] { return !members_[1].rank->serving() && !members_[1].engine.runs; }));
  EXPECT_EQ(members_[1].rank->last_error()->code(), Errc::version_conflict);
  EXPECT_EQ(members_[1].rank->resolve_by_pull().error().code(), Errc::version_conflict) << "it has been told";
}

TEST_F(CommitRanks, AReceiverThatOverwritesWhatItServesIsRefused) {
  start();
  FakeReceiver receiver(trainer_);
  CountingEngine engine;
  receiver.policy = FullUpdatePolicy::in_place;
  const auto made = ParticipantImpl::start(options(0), receiver, engine);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code(), Errc::invalid_argument);
  EXPECT_THAT(made.error().message(), HasSubstr("in place"));
  EXPECT_TRUE(engine.runs) << "it is not even paused";
  receiver.policy = FullUpdatePolicy::refuse;
  EXPECT_TRUE(ParticipantImpl::start(options(0), receiver, engine));
  engine.pause_throws = true;
  EXPECT_THAT(ParticipantImpl::start(options(0), receiver, engine).error().message(),
              HasSubstr("the engine's pause threw: no such step"));
}

TEST_F(CommitRanks, ATargetThatDoesNotRollBackIsRefused) {
  start();
  FakeReceiver receiver(trainer_);
  CountingEngine engine;
  receiver.commits_are_final = true;
  const auto made = ParticipantImpl::start(options(0), receiver, engine);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code(), Errc::unsupported);
  EXPECT_THAT(made.error().message(), HasSubstr("commits of the receiver's target are final"));
  EXPECT_TRUE(engine.runs) << "it is not even paused";
}

TEST_F(CommitRank, NothingIsWrittenUnderAnEngineThatDoesNotPause) {
  std::atomic<bool> replace{false};
  bool expelled = false;
  start([&](const Report& report) {
    if (!replace) return bring(report, {1, 1});
    if (expelled) return bring(report, {1, 2});
    expelled = true;
    Order order;
    order.kind = OrderKind::expel;
    return order;
  });
  ASSERT_TRUE(eventually([&] { return rank_->serving() && engine_.runs; }));
  engine_.refuse_pause = true;
  receiver_.forbidden_while = &engine_.runs;
  trainer_.publish("two");
  replace = true;
  EXPECT_TRUE(eventually([&] { return engine_.refused >= 3; })) << "it is asked again";
  EXPECT_TRUE(rank_->report().busy);
  EXPECT_FALSE(rank_->serving());
  EXPECT_EQ(receiver_.memory, 1u);
  engine_.refuse_pause = false;
  EXPECT_TRUE(eventually([&] { return rank_->serving() && engine_.runs; }));
  EXPECT_EQ(receiver_.memory, 2u);
  EXPECT_FALSE(receiver_.broke_in) << "the engine was stepping";
}

TEST_F(CommitRank, AVersionToCatchUpWithIsNamedWithItsEpoch) {
  start([&](const Report& report) { return bring(report, {7, 1}); });  // the trainer's epoch is 1
  EXPECT_TRUE(eventually([&] { return rank_->report().code == Errc::gone; }));
  EXPECT_EQ(receiver_.wanted_epoch, 7u);
  EXPECT_FALSE(rank_->serving());
  EXPECT_EQ(receiver_.memory, 0u);
}

TEST_F(CommitRank, AnExchangeThatThrowsIsTrouble) {
  std::atomic<bool> throws{true};
  start([&](const Report& report) -> Result<Order> {
    if (throws) throw std::runtime_error("no transport");
    return bring(report, {1, 1});
  });
  EXPECT_TRUE(eventually([&] {
    const auto trouble = rank_->last_error();
    return trouble && trouble->message() == "the exchange threw: no transport";
  }));
  throws = false;
  EXPECT_TRUE(eventually([&] { return rank_->serving() && engine_.runs; }));
}

TEST_F(CommitRank, DoubtAndItsEndAreLogged) {
  const LogLines log;
  std::atomic<bool> decided{false};
  ParticipantOptions o;
  o.decide_limit = std::chrono::milliseconds(1);
  start(
      [&](const Report& report) {
        Order order;
        order.transaction = {1, 4};
        order.round = 1;
        order.version = version(1);
        if (report.phase == Phase::none && !decided) order.kind = OrderKind::stage;
        if (report.phase == Phase::staged) order.kind = OrderKind::prepare;
        if (report.phase == Phase::prepared && decided) order.kind = OrderKind::roll_back;
        return order;
      },
      std::move(o));
  EXPECT_TRUE(eventually([&] { return rank_->state() == RankState::in_doubt; }));
  EXPECT_TRUE(log.has("commit_in_doubt rank=0 transaction=1.4 phase=prepared")) << log.text();
  EXPECT_FALSE(log.has("commit_doubt_ended"));
  decided = true;
  EXPECT_TRUE(eventually([&] { return rank_->state() == RankState::paused; }));
  EXPECT_TRUE(eventually([&] { return log.has("commit_doubt_ended rank=0 transaction=1.4 by=roll_back"); }))
      << log.text();
  rank_.reset();
}

TEST_F(CommitRank, AReplacedProcessStopsServingAndAsksNoMore) {
  std::atomic<bool> replaced{false};
  std::atomic<unsigned> refused{0};
  start([&](const Report& report) -> Result<Order> {
    if (!replaced) return bring(report, {1, 1});
    if (refused++ == 0) return Error(Errc::version_conflict, "this process has been replaced by a later one");
    return bring(report, {1, 1});
  });
  ASSERT_TRUE(eventually([&] { return rank_->serving() && engine_.runs; }));
  replaced = true;
  EXPECT_TRUE(eventually([&] { return refused != 0 && !rank_->serving() && !engine_.runs; }));
  EXPECT_EQ(rank_->last_error()->code(), Errc::version_conflict);
  EXPECT_EQ(rank_->resolve_by_pull().error().code(), Errc::version_conflict);
  EXPECT_EQ(refused, 1u);
}

}  // namespace
}  // namespace deltasync::commit
