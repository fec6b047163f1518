// The coordinator by itself: how it starts, how its calls end, and what is left when it is gone.
#include <gmock/gmock-matchers.h>

#include <future>

#include "base/deadline.hpp"
#include "tests/commit/pretend_target.hpp"
#include "tests/commit/server_fixture.hpp"

namespace deltasync::commit {
namespace {

using testing::HasSubstr;

TEST_F(CommitServer, AWideBindNeedsAToken) {
  CoordinatorOptions options;
  options.ranks = 1;
  options.log = dir_.path() / "commit.log";
  options.listen = "0.0.0.0:0";
  EXPECT_EQ(CoordinatorServer::start(options).error().code(), Errc::unauthenticated);
  options.token = kToken;
  EXPECT_TRUE(CoordinatorServer::start(options));
}

TEST_F(CommitServer, ASecondCoordinatorOfTheLogIsRefused) {
  start();
  CoordinatorOptions options;
  options.ranks = 2;
  options.log = dir_.path() / "commit.log";
  EXPECT_EQ(CoordinatorServer::start(options).error().code(), Errc::already_exists);
}

TEST_F(CommitServer, AnUpdateWithoutRanksEndsAtItsDeadlineAndNamesThem) {
  start();
  const auto ended = server_->update(Want(), Deadline::after(std::chrono::milliseconds(50)));
  ASSERT_FALSE(ended);
  EXPECT_EQ(ended.error().code(), Errc::timed_out);
  EXPECT_THAT(ended.error().message(), HasSubstr("rank 0 (never heard of), rank 1 (never heard of)"));
}

/// A rank without threads, which the test moves step by step.
class OneRank {
 public:
  explicit OneRank(Coordinator& coordinator) : coordinator_(coordinator) {}
  /// Reports, obeys and works; what was ordered.
  OrderKind step(const Version& newest) {
    const auto order = coordinator_.exchange(machine_.report(), Deadline::after({}), {});
    EXPECT_TRUE(order) << order.error().to_string();
    if (!order) return OrderKind::none;
    EXPECT_TRUE(machine_.on_order(*order));
    const Work work = machine_.work();
    if (work.kind != Work::Kind::none) machine_.done(work.serial, target_.work(work, newest));
    return order->kind;
  }
  bool step_to(OrderKind kind, const Version& newest) {
    return eventually([&] { return step(newest) == kind; });
  }

 private:
  Coordinator& coordinator_;
  ParticipantMachine machine_{0, 1, {}};
  PretendTarget target_;
};

/// The next call begins as soon as the transaction has ended, and mostly before the one that waits for it wakes up.
TEST_F(CommitServer, AnUpdateThatEndedIsNotConfusedWithTheNext) {
  start(1);
  OneRank rank(*server_);
  for (std::uint64_t number = 1; number < 20; ++number) {
    auto first = std::async(std::launch::async, [&] { return server_->update(Want(), soon()); });
    ASSERT_TRUE(rank.step_to(OrderKind::finish, version(number)));
    auto second = server_->update(Want(), Deadline::after({}));
    EXPECT_EQ(second.error().code(), Errc::timed_out) << second.error().to_string();
    const auto brought = first.get();
    ASSERT_TRUE(brought) << brought.error().to_string();
    EXPECT_EQ(brought->id.number, number);
  }
}

TEST_F(CommitServer, CallsEndWithTheCoordinator) {
  start(2);
  auto update = std::async(std::launch::async, [&] { return server_->update(Want(), soon()); });
  EXPECT_TRUE(OneRank(*server_).step_to(OrderKind::stage, version(1))) << "the call is under way";
  Report idle = busy(1, 5);
  idle.busy = false;
  idle.phase = Phase::staged;
  idle.transaction = {1, 1};
  idle.round = 1;
  auto exchange = std::async(std::launch::async, [&] { return server_->exchange(idle, soon(), {}); });
  ASSERT_TRUE(eventually([&] { return server_->ranks()[1].report.has_value(); }));
  server_.reset();
  EXPECT_EQ(update.get().error().code(), Errc::cancelled);
  EXPECT_EQ(exchange.get().error().code(), Errc::cancelled);
}

TEST_F(CommitServer, ALogThatIsGoneEndsWhatRestsOnIt) {
  start();
  std::filesystem::remove(dir_.path() / "commit.log");
  const auto ended = server_->update(Want(), Deadline::after({}));
  ASSERT_FALSE(ended);
  EXPECT_EQ(ended.error().code(), Errc::io);
  EXPECT_THAT(ended.error().message(), HasSubstr("commit.log was removed while it was in use"));
  EXPECT_EQ(server_->exchange(busy(0, 5), Deadline::after({}), {}).error().code(), Errc::io);
}

}  // namespace
}  // namespace deltasync::commit
