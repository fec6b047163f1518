// Two ranks with real receivers of a whole agent, each with its share of the model, brought from version to version by
// a coordinator over TCP. Whatever a rank serves is compared byte by byte with what the trainer had, when it begins to
// serve it and when it stops.
#pragma once

#include <gmock/gmock-matchers.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.hpp"
#include "commit/rank_link.hpp"
#include "tests/agent/agent_harness.hpp"
#include "tests/commit/child_process.hpp"
#include "tests/commit/real_rank.hpp"
#include "tests/support/held_port.hpp"

namespace deltasync::commit {

using agent::eventually;
using agent::test_deadline;
using testing::HasSubstr;

inline constexpr const char* kToken = "known between ranks";
inline constexpr std::uint32_t kRanks = 2;

/// Names begin with how a tensor is divided: by rows, by columns, not at all.
inline std::vector<TensorSpec> specs() {
  return {{"r.embed", Dtype::bf16, {4096, 48}, {2048}, {}}, {"r.uncut", Dtype::bf16, {301, 200}, {}, {}},
          {"c.down", Dtype::bf16, {128, 512}, {}, {256}},   {"c.uncut", Dtype::f32, {96, 1001}, {}, {}},
          {"c.bias", Dtype::bf16, {700}, {}, {}},           {"n.norm", Dtype::f32, {333}, {}, {}}};
}

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
    options.listen = port_.endpoint();
    options.token = kToken;
    auto made = Coordinator::start(options);
    ASSERT_TRUE(made) << made.error().to_string();
    coordinator_ = *std::move(made);
  }
  ParticipantOptions options(std::uint32_t r) const {
    ParticipantOptions o;
    o.rank = r;
    o.ranks = kRanks;
    o.coordinator = port_.endpoint();
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
    auto subscribed = m.share->bind(*m.receiver, test_deadline(), shadows_);
    ASSERT_TRUE(subscribed) << subscribed.error().to_string();
    m.engine = std::make_unique<RankEngine>(r, *m.share, *m.receiver, ledger_);
    join(r, points, loses_finish);
  }
  void join(std::uint32_t r, const Points& points = {}, bool loses_finish = false) {
    Member& m = members_[r];
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
      const auto trouble = m.rank->last_error();
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
                                 std::to_string(port_.number()), std::to_string(kRanks)},
        out);
    ASSERT_TRUE(eventually([&] {
      std::ifstream in(out);
      std::string line;
      return std::getline(in, line) && !in.eof();
    }));
  }
  void arm(const std::string& point) {
    const auto path = dir_.path() / "arm-coordinator";
    { std::ofstream(path.string() + ".new") << "KILL " << point << '\n'; }
    std::filesystem::rename(path.string() + ".new", path);
  }

  Ledger ledger_;
  bool shadows_ = false;  ///< beside ranks that serve from an engine's own places
  const test::HeldPort port_;
  std::atomic<bool> fails_last_{false};
  std::atomic<bool> finish_comes_{false};
  std::atomic<unsigned> finishes_lost_{0};
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<test::Process> process_;
  Member members_[kRanks];  // ends before what it is coordinated by
};

}  // namespace deltasync::commit
