// Many receivers of one agent, more than it has places for, and peers that are there to take places away.
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <latch>
#include <thread>

#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "receiver/pull/streams.hpp"
#include "tests/integration/receivers.hpp"

namespace deltasync::agent {
namespace {

using std::chrono::milliseconds;

/// Both ends of each connection are in this process.
void allow_many_files() {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

class ManyPeers : public ReceiverTest {
 protected:
  ManyPeers() { local_ = false; }  // there are to be data connections

  static receiver::Tuning quick() {
    receiver::Tuning tuning;
    tuning.wait_slice = milliseconds(100);
    tuning.busy_first = milliseconds(10);
    tuning.busy_max = milliseconds(50);
    return tuning;
  }
  static Want newer() {
    Want want;
    want.newer = true;
    return want;
  }
  std::size_t connections() const { return agent_->pull_server().connections(); }
};

TEST_F(ManyPeers, WhoWaitsForAVersionHoldsOneConnection) {
  options_.pull.limits.data_idle = std::chrono::hours(1);  // the receiver itself closes the others
  start_agent();
  next_version();
  const auto receiver = connect(quick());
  pull(*receiver);
  EXPECT_GT(connections(), 1u) << "kept for a version that comes soon";
  PullReport report;
  std::thread follows([&] { report = pull(*receiver, newer()); });
  EXPECT_TRUE(eventually([&] { return connections() == 1; }));
  next_version();
  follows.join();
  EXPECT_EQ(report.stream_restarts, 0u);
  EXPECT_TRUE(held(*receiver) == model_.half);
}

TEST_F(ManyPeers, ADataConnectionThatTheAgentClosedIsNoFault) {
  options_.pull.limits.data_idle = milliseconds(50);
  start_agent();
  next_version();
  const auto receiver = connect();
  pull(*receiver);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(eventually([&] { return connections() == 1; }));
    next_version();
    const PullReport report = pull(*receiver);
    EXPECT_EQ(report.stream_restarts, 0u);
    EXPECT_EQ(report.replans, 0u);
    EXPECT_TRUE(held(*receiver) == model_.half);
  }
  EXPECT_EQ(metrics().errors[static_cast<std::size_t>(Errc::timed_out)], 0u);
}

TEST_F(ManyPeers, WhoFindsNoPlaceIsToldAndComesBack) {
  options_.pull.limits.admission.receivers_max = 1;
  start_agent();
  next_version();
  auto first = connect();
  ReceiverOptions options;
  options.endpoint = "127.0.0.1:" + std::to_string(port());
  const auto second = Receiver::connect(options, test_deadline());
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), Errc::connection);
  EXPECT_NE(second.error().message().find("busy: 1 connections of at most 1; try another agent or a relay"),
            std::string::npos)
      << second.error().message();
  first.reset();
  EXPECT_TRUE(eventually([&] { return connections() == 0; }));
  pull(*connect());
}

/// It holds no lease while it waits, so the trainer waits for nobody.
TEST_F(ManyPeers, WhoFindsNoPlaceForDataHoldsUpNoTrainer) {
  options_.pull.limits.admission.data_max = 1;
  options_.pull.limits.data_idle = std::chrono::hours(1);
  start_agent();
  next_version();
  auto taken = std::make_unique<Client>(client(wire::Role::data));
  const auto receiver = connect(quick());
  std::thread pulls([&] { pull(*receiver); });
  EXPECT_TRUE(eventually([&] { return metrics().connections_refused >= 3; }));
  for (int i = 0; i < 4; ++i) next_version();
  EXPECT_EQ(metrics().leases_revoked, 0u);
  taken.reset();
  pulls.join();
  pull(*receiver);  // the one before may have been planned as the last version was on its way
  EXPECT_TRUE(held(*receiver) == model_.half);
}

TEST_F(ManyPeers, AStreamWithoutAPlaceLeavesItsItemsToTheOthers) {
  options_.pull.limits.admission.data_max = 1;
  start_agent();
  next_version();
  // One stream may be done before the other knocks: then once more.
  EXPECT_TRUE(eventually([&] {
    auto receiver = connect(quick());  // of two streams
    const PullReport report = pull(*receiver);
    EXPECT_EQ(report.replans, 0u);
    EXPECT_EQ(report.stream_restarts, 0u) << "nothing broke";
    EXPECT_TRUE(held(*receiver) == model_.half);
    receiver.reset();
    EXPECT_TRUE(eventually([&] { return connections() == 0; }));
    return metrics().connections_refused >= 1;
  }));
}

/// Asks for the layout, which any connection may. `breaks_first` loses stream 0 once both streams have asked.
class LayoutFetch : public receiver::Fetch {
 public:
  explicit LayoutFetch(bool breaks_first) : breaks_first_(breaks_first) {}

  Status ask(receiver::Connection& connection, std::uint64_t request, const receiver::Item&,
             Deadline deadline) override {
    return connection.send(wire::Type::get_layout, request, deadline);
  }
  receiver::Outcome receive(receiver::Connection& connection, std::uint64_t, receiver::Item& item, Deadline deadline,
                            unsigned stream) override {
    if (breaks_first_ && !asked_[stream].exchange(true)) both_asked_.arrive_and_wait();
    if (breaks_first_ && stream == 0) return receiver::Outcome::broken(Error(Errc::connection, "broken by the test"));
    auto header = connection.recv_header(deadline);
    if (!header) return receiver::Outcome::broken(std::move(header).error());
    auto payload = connection.recv_payload(*header, deadline);
    if (!payload) return receiver::Outcome::broken(std::move(payload).error());
    item.ranges.clear();
    return receiver::Outcome::ok();
  }
  std::string describe(const receiver::Item&) const override { return "the layout"; }

 private:
  const bool breaks_first_;
  std::array<std::atomic<bool>, 2> asked_{};
  std::latch both_asked_{2};
};

/// A small delta takes one stream. If that were one that has to dial, while an idle one of the same receiver has the
/// agent's last place, it would be refused for as long as the receiver asks.
TEST_F(ManyPeers, AReceiverUsesThePlaceThatItHas) {
  options_.pull.limits.admission.data_max = 2;
  options_.pull.limits.data_idle = std::chrono::hours(1);
  start_agent();
  next_version();
  const std::uint64_t instance = client().hello.instance;
  ASSERT_TRUE(eventually([&] { return connections() == 0; }));
  receiver::Tuning tuning = quick();
  tuning.backoff_first = tuning.backoff_max = kTestLimit;  // who broke does not come back in this round
  const std::vector<receiver::Address> addresses{{"the agent", "127.0.0.1", port()}};
  const receiver::Peer peer{std::make_shared<receiver::Addresses>(addresses), {}, "two streams", tuning};
  ThreadPool pool(2, "streams");
  receiver::Streams streams(peer, pool);
  const receiver::Item item{0, {{0, 1}}};

  LayoutFetch without_the_first(true);
  const auto broken = streams.run(without_the_first, {item, item}, instance, test_deadline());
  ASSERT_EQ(broken.end, receiver::FetchRoundEnd::complete);
  ASSERT_EQ(broken.stream_restarts, 1u);
  ASSERT_TRUE(eventually([&] { return connections() == 1; }));
  const Client taken = client(wire::Role::data);

  LayoutFetch intact(false);
  EXPECT_EQ(streams.run(intact, {item}, instance, test_deadline()).end, receiver::FetchRoundEnd::complete);
  EXPECT_EQ(metrics().connections_refused, 0u);
}

TEST_F(ManyPeers, AReceiverKeepsPullingThroughAFloodOfSilentPeers) {
  allow_many_files();
  options_.pull.limits.handshake = std::chrono::hours(1);
  options_.pull.limits.data_idle = milliseconds(1);  // so that each pull dials again
  start_agent();
  next_version();
  const auto receiver = connect();
  std::vector<Client> flood;
  for (int i = 0; i < 1100; ++i) {
    auto silent = Client::connect_raw(port());
    ASSERT_TRUE(silent) << i << ": " << silent.error().to_string();
    flood.push_back(std::move(*silent));
    if (i % 220 != 219) continue;
    next_version();
    pull(*receiver);
    EXPECT_TRUE(held(*receiver) == model_.half);
  }
  const auto newcomer = connect();
  pull(*newcomer);
  EXPECT_TRUE(held(*newcomer) == model_.half);
  EXPECT_GE(metrics().connections_evicted, 1100u - AdmissionLimits().strangers_per_loopback);
}

/// DELTASYNC_FOLLOWERS=2000 asks for more, and prints how long each version took to reach all of them.
TEST_F(ManyPeers, AllFollowersAreServedEveryVersion) {
  allow_many_files();
  const char* const wanted = std::getenv("DELTASYNC_FOLLOWERS");
  const int followers = wanted != nullptr ? std::atoi(wanted) : 50;
  constexpr std::uint64_t kVersions = 5;
  start_agent();
  next_version();
  std::vector<std::atomic<std::uint64_t>> has(static_cast<std::size_t>(followers));
  std::atomic<int> failed{0};
  std::stop_source stop;
  std::atomic<std::uint64_t> restarts{0};
  std::vector<std::thread> threads;
  const auto all_have = [&](std::uint64_t number) {
    return failed != 0 || std::all_of(has.begin(), has.end(), [&](const auto& h) { return h == number; });
  };
  for (std::atomic<std::uint64_t>& mine : has) {
    threads.emplace_back([&] {
      const Deadline deadline = Deadline::after(std::chrono::minutes(10));
      ReceiverOptions options;
      options.endpoint = "127.0.0.1:" + std::to_string(port());
      options.streams = 1;
      options.threads = 1;
      options.local = false;  // data connections are to be many
      auto receiver = Receiver::connect(options, CallContext(deadline, stop.get_token()));
      while (!receiver && !deadline.passed() && !stop.stop_requested()) {  // so many come at once
        receiver = Receiver::connect(options, CallContext(deadline, stop.get_token()));
      }
      const auto fail = [&](const Error& error) {
        if (++failed == 1) ADD_FAILURE() << error.to_string();
        stop.request_stop();
      };
      if (!receiver) return fail(receiver.error());
      if (auto bound = (*receiver)->bind(make_host_target(model_.layout), deadline); !bound) return fail(bound.error());
      while (mine < kVersions) {
        auto staged = (*receiver)->pull(newer(), CallContext(deadline, stop.get_token()));
        if (!staged) return fail(staged.error());
        if (auto committed = (*staged)->commit(); !committed) return fail(committed.error());
        const Version& version = (*staged)->report().version;
        if (version.id.number != mine + 1)
          return fail(Error(Errc::internal, "missed one before " + to_string(version)));
        restarts += (*staged)->report().stream_restarts;
        ++mine;
      }
    });
  }
  const auto wait_for_all = [&](std::uint64_t number) {
    const auto start = std::chrono::steady_clock::now();
    while (!all_have(number)) std::this_thread::sleep_for(milliseconds(2));
    const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("version %llu: all %d followers have it after %.2f s\n", static_cast<unsigned long long>(number),
                followers, s);
    std::fflush(stdout);
  };
  wait_for_all(1);
  for (std::uint64_t number = 2; number <= kVersions && failed == 0; ++number) {
    if (wanted != nullptr && number == kVersions) {
      EXPECT_TRUE(eventually([&] { return connections() == static_cast<std::size_t>(followers); }))
          << "an idle follower holds one connection; there are " << connections();
    }
    next_version();
    wait_for_all(number);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(restarts, 0u);
  EXPECT_EQ(metrics().connections_refused, 0u);
}

}  // namespace
}  // namespace deltasync::agent
