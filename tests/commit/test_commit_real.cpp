// Two ranks with real receivers of a whole agent, each with its share of the model, brought from version to version by
// a coordinator over TCP. Whatever a rank serves is compared byte by byte with what the trainer had, when it begins to
// serve it and when it stops.
#include <gmock/gmock.h>

#include <condition_variable>
#include <fstream>
#include <future>

#include "commit/rank_link.hpp"
#include "tests/agent/agent_harness.hpp"
#include "tests/commit/child_process.hpp"
#include "tests/commit/real_rank.hpp"

namespace deltasync::commit {
namespace {

using agent::eventually;
using agent::test_deadline;
using testing::HasSubstr;

constexpr const char* kToken = "between ranks";
constexpr std::uint32_t kRanks = 2;

/// Names begin with how a tensor is divided: by rows, by columns, not at all.
std::vector<TensorSpec> specs() {
  return {{"r.embed", Dtype::bf16, {4096, 48}, {2048}, {}}, {"r.uncut", Dtype::bf16, {301, 200}, {}, {}},
          {"c.down", Dtype::bf16, {128, 512}, {}, {256}},   {"c.uncut", Dtype::f32, {96, 1001}, {}, {}},
          {"c.bias", Dtype::bf16, {700}, {}, {}},           {"n.norm", Dtype::f32, {333}, {}, {}}};
}

/// Where a rank waits until the test lets it go on.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    came_ = true;
    EXPECT_TRUE(changed_.wait_until(lock, test_deadline().at(), [&] { return open_; }));
  }
  bool came() const {
    const std::lock_guard lock(mutex_);
    return came_;
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool came_ = false;
  bool open_ = false;
};

struct Member {
  std::unique_ptr<Share> share;
  std::unique_ptr<RankReceiver> receiver;
  std::unique_ptr<RankEngine> engine;
  std::unique_ptr<ParticipantImpl> rank;  // ends before the others
};

/// Which ranks serve from an engine's own places; the others from host memory.
using Placed = std::pair<bool, bool>;

class CommitReal : public agent::AgentTest, public testing::WithParamInterface<Placed> {
 protected:
  void SetUp() override {
    model_ = test::make_model(21, specs());
    start_agent();
    publish();
  }
  void TearDown() override {
    for (std::uint32_t r = 0; r < kRanks; ++r) end(r);
    EXPECT_EQ(ledger_.wrong(), "");
  }

  void publish(double density = 0.01) {
    if (!writer_) writer_ = attach(model_.layout);
    ASSERT_NE(writer_, nullptr);
    if (number_ > 0) test::mutate(model_.half, *model_.layout, density, number_);
    ledger_.publish(number_ + 1, model_.half);
    const auto report = offload(*writer_, model_.half, ++number_);
    ASSERT_TRUE(report) << report.error().to_string();
  }

  void start_coordinator() {
    CoordinatorOptions options;
    options.ranks = kRanks;
    options.log = dir_.path() / "commit.log";
    options.listen = "127.0.0.1:" + std::to_string(port_);
    options.token = kToken;
    auto made = Coordinator::start(options);
    ASSERT_TRUE(made) << made.error().to_string();
    coordinator_ = *std::move(made);
    port_ = coordinator_->port();
  }
  ParticipantOptions options(std::uint32_t r) const {
    ParticipantOptions o;
    o.rank = r;
    o.ranks = kRanks;
    o.coordinator = "127.0.0.1:" + std::to_string(port_);
    o.token = kToken;
    return o;
  }
  /// A rank's process from its beginning: an empty target.
  void begin(std::uint32_t r, const Points& points = {}, bool loses_finish = false) {
    end(r);
    Member& m = members_[r];
    m.share = std::make_unique<Share>(model_.layout, r, r == 0 ? GetParam().first : GetParam().second);
    ReceiverOptions to_agent;
    to_agent.endpoint = "127.0.0.1:" + std::to_string(port());
    to_agent.streams = 2;
    to_agent.threads = 2;
    auto real = Receiver::connect(to_agent, test_deadline());
    ASSERT_TRUE(real) << real.error().to_string();
    m.receiver = std::make_unique<RankReceiver>(*std::move(real));
    auto subscribed = m.share->bind(*m.receiver, test_deadline());
    ASSERT_TRUE(subscribed) << subscribed.error().to_string();
    m.engine = std::make_unique<RankEngine>(r, *m.share, *m.receiver, ledger_);
    ParticipantOptions o = options(r);
    if (loses_finish) o.exchange = losing_finish(o);
    auto made = ParticipantImpl::start(o, *m.receiver, *m.engine, points);
    ASSERT_TRUE(made) << made.error().to_string();
    m.rank = *std::move(made);
  }
  void end(std::uint32_t r) {
    Member& m = members_[r];
    m.rank.reset();
    if (m.engine) {
      EXPECT_TRUE(m.engine->pause(test_deadline())) << "the last look at what it served";
    }
    m = Member();
  }
  /// TCP, but for one kind of order that does not come.
  Exchange losing_finish(const ParticipantOptions& o) {
    auto link = std::make_shared<RankLink>(o, *net::parse_endpoint(o.coordinator));
    return [this, link](const Report& report, Deadline /*for calls*/, const std::stop_token& stop) -> Result<Order> {
      DS_ASSIGN(Order order, link->exchange(report, Deadline::after(std::chrono::seconds(10)), stop));
      if (order.kind != OrderKind::finish || finish_comes_) return order;
      ++finishes_lost_;
      return Error(Errc::connection, "lost on the way");
    };
  }

  void expect_update() {
    const auto version = coordinator_->update(Want(), test_deadline());
    ASSERT_TRUE(version) << version.error().to_string();
    EXPECT_EQ(version->id.number, number_);
    EXPECT_EQ(version->label, "step_" + std::to_string(number_));
    expect_all_serve(number_);
  }
  bool serves(std::uint32_t r, std::uint64_t number) const {
    const auto version = members_[r].rank->serving();
    return version && version->id.number == number && ledger_.served_by(r) == number;
  }
  void expect_all_serve(std::uint64_t number) {
    EXPECT_TRUE(eventually([&] { return serves(0, number) && serves(1, number); })) << who_is_where();
    EXPECT_EQ(ledger_.wrong(), "");
  }
  std::string who_is_where() const {
    std::string all;
    for (const Member& m : members_) {
      const Report r = m.rank->report();
      const auto trouble = m.rank->trouble();
      all += std::string(to_string(r.state)) + " " + std::string(to_string(r.phase)) + " holds " + to_string(r.holds) +
             " \"" + r.problem + "\" " + (trouble ? trouble->to_string() : "") + "\n";
    }
    return all;
  }
  void begin_all() {
    start_coordinator();
    for (std::uint32_t r = 0; r < kRanks; ++r) {
      begin(r);
      ASSERT_FALSE(HasFatalFailure());
    }
  }

  /// The commit of one that fails begins when the other one's is done.
  void begin_with_one_that_fails(std::uint32_t failing) {
    start_coordinator();
    begin(1 - failing);
    begin(failing, [this, other = 1 - failing](const std::string& point) {
      if (point != "work commit" || !fails_last_) return;
      EXPECT_TRUE(eventually([&] { return members_[other].rank->report().phase == Phase::committed; }));
    });
  }
  void expect_failed_update(std::uint32_t failing) {
    fails_last_ = true;
    members_[failing].receiver->late_commits = 1;
    const auto failed = coordinator_->update(Want(), test_deadline());
    fails_last_ = false;
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().code(), Errc::timed_out) << failed.error().to_string();
    EXPECT_THAT(failed.error().message(), HasSubstr("rank " + std::to_string(failing)));
    const Member& other = members_[1 - failing];
    EXPECT_TRUE(eventually([&] { return other.rank->report().phase == Phase::none; })) << who_is_where();
    EXPECT_EQ(other.receiver->rollbacks, 1);
  }

  // The coordinator as a process, which can be killed at any of its points; it brings its ranks to the newest always.
  void start_coordinator_process() {
    const auto out = dir_.path() / "out-coordinator";
    std::filesystem::remove(out);
    process_ = std::make_unique<test::Process>(
        std::vector<std::string>{DELTASYNC_COMMIT_PROCESS, "coordinator", dir_.path().string(), "coordinator",
                                 std::to_string(port_), std::to_string(kRanks)},
        out);
    ASSERT_TRUE(eventually([&] {
      std::ifstream in(out);
      std::string line;
      if (!std::getline(in, line) || in.eof()) return false;
      port_ = static_cast<std::uint16_t>(std::stoul(line));
      return true;
    }));
  }
  void arm(const std::string& point) {
    const auto path = dir_.path() / "arm-coordinator";
    { std::ofstream(path.string() + ".new") << "KILL " << point << '\n'; }
    std::filesystem::rename(path.string() + ".new", path);
  }

  Ledger ledger_;
  std::uint16_t port_ = 0;
  std::atomic<bool> fails_last_{false};
  std::atomic<bool> finish_comes_{false};
  std::atomic<unsigned> finishes_lost_{0};
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<test::Process> process_;
  Member members_[kRanks];  // ends before what it is coordinated by
};

TEST_P(CommitReal, TheFirstVersionAndDeltasAfterIt) {
  begin_all();
  EXPECT_FALSE(members_[0].rank->serving() || members_[1].rank->serving());
  expect_update();
  for (const Member& m : members_) EXPECT_EQ(m.receiver->mode, PullMode::full);
  for (const double density : {0.01, 0.05, 0.001, 0.02}) {
    publish(density);
    expect_update();
    for (const Member& m : members_) EXPECT_EQ(m.receiver->mode, PullMode::delta);
  }
  publish();
  publish();  // one that nobody serves
  expect_update();
  expect_update();  // nothing new
}

/// The other rank has written the new version by then, and goes back bit for bit.
TEST_P(CommitReal, ACommitThatFailsIsTakenBackByTheOther) {
  for (std::uint32_t failing = 0; failing < kRanks; ++failing) {
    SCOPED_TRACE(failing);
    begin_with_one_that_fails(failing);
    ASSERT_FALSE(HasFatalFailure());
    expect_update();
    publish();
    expect_failed_update(failing);
    expect_all_serve(number_ - 1);
    EXPECT_EQ(coordinator_->served()->id.number, number_ - 1);
    expect_update();
    publish();
    expect_update();
    for (const Member& m : members_) EXPECT_EQ(m.receiver->mode, PullMode::delta);
    for (std::uint32_t r = 0; r < kRanks; ++r) end(r);
    coordinator_.reset();
  }
}

/// There is no version to go back to, and nobody serves.
TEST_P(CommitReal, AFirstCommitThatFails) {
  begin_with_one_that_fails(1);
  ASSERT_FALSE(HasFatalFailure());
  expect_failed_update(1);
  EXPECT_FALSE(members_[0].rank->serving() || members_[1].rank->serving());
  EXPECT_FALSE(ledger_.served_by(0) || ledger_.served_by(1));
  EXPECT_FALSE(coordinator_->served());
  expect_update();
  publish();
  expect_update();
}

TEST_P(CommitReal, ACoordinatorKilledAtEachStep) {
  start_coordinator_process();
  begin(0);
  begin(1);
  ASSERT_FALSE(HasFatalFailure());
  expect_all_serve(number_);
  for (const char* point : {"order stage", "order prepare", "log commit", "logged commit", "order commit", "log finish",
                            "logged finish", "order finish"}) {
    SCOPED_TRACE(point);
    arm(point);
    publish();
    ASSERT_TRUE(eventually([&] { return process_->has(WEXITED); })) << "it never came there";
    start_coordinator_process();
    ASSERT_FALSE(HasFatalFailure());
    expect_all_serve(number_);
  }
}

TEST_P(CommitReal, AFinishThatOnlyOneHasHeardIsSaidByTheNextCoordinator) {
  start_coordinator();
  begin(0);
  finish_comes_ = true;
  begin(1, {}, true);
  ASSERT_FALSE(HasFatalFailure());
  expect_update();
  publish();
  finish_comes_ = false;
  const auto version = coordinator_->update(Want(), test_deadline());
  ASSERT_TRUE(version) << version.error().to_string();
  ASSERT_TRUE(eventually([&] { return serves(0, number_) && finishes_lost_ > 0; })) << who_is_where();
  EXPECT_FALSE(members_[1].rank->serving());
  EXPECT_EQ(members_[1].rank->state(), RankState::committed_waiting);
  EXPECT_FALSE(ledger_.served_by(1));
  coordinator_.reset();
  finish_comes_ = true;
  start_coordinator();
  expect_all_serve(number_);
  EXPECT_EQ(coordinator_->served()->id.number, number_);
  publish();
  expect_update();
}

TEST_P(CommitReal, ARankMadeAnewServesOnlyOnceItHasCaughtUp) {
  begin_all();
  expect_update();
  publish();
  expect_update();
  for (std::uint32_t r = 0; r < kRanks; ++r) {
    SCOPED_TRACE(r);
    const auto gate = std::make_shared<Gate>();
    begin(r, [gate](const std::string& point) {
      if (point == "worked catch_up") gate->pass();
    });
    ASSERT_FALSE(HasFatalFailure());
    EXPECT_TRUE(eventually([&] { return gate->came(); })) << who_is_where();
    EXPECT_FALSE(members_[r].rank->serving()) << "nobody has told it that it may";
    EXPECT_FALSE(ledger_.served_by(r));
    EXPECT_TRUE(serves(1 - r, number_)) << "the other serves on";
    gate->open();
    expect_all_serve(number_);
    publish();
    expect_update();
  }
}

/// The trainer has gone on: what the others serve is not to be had whole any more.
TEST_P(CommitReal, ARankMadeAnewTooLateComesWithTheNextUpdate) {
  begin_all();
  expect_update();
  publish();
  begin(1);
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_TRUE(eventually([&] { return !members_[1].rank->report().problem.empty(); }));
  EXPECT_EQ(members_[1].rank->report().code, Errc::gone) << who_is_where();
  EXPECT_FALSE(members_[1].rank->serving());
  EXPECT_TRUE(serves(0, number_ - 1));
  expect_update();
}

TEST_P(CommitReal, AnUpdateWaitsForARankThatIsAway) {
  begin_all();
  expect_update();
  end(1);
  publish();
  auto update = std::async(std::launch::async, [&] { return coordinator_->update(Want(), test_deadline()); });
  EXPECT_TRUE(eventually([&] { return members_[0].rank->report().phase == Phase::staged; }));
  EXPECT_TRUE(serves(0, number_ - 1)) << "staging disturbs nobody";
  begin(1);
  const auto version = update.get();
  ASSERT_TRUE(version) << version.error().to_string();
  EXPECT_EQ(version->id.number, number_);
  expect_all_serve(number_);
}

INSTANTIATE_TEST_SUITE_P(Targets, CommitReal,
                         testing::Values(Placed(false, true), Placed(true, true), Placed(false, false)),
                         [](const auto& of) {
                           return std::string(of.param.first ? "Placed" : "Host") +
                                  (of.param.second ? "Placed" : "Host");
                         });

}  // namespace
}  // namespace deltasync::commit
