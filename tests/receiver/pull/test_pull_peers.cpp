// Peers that are silent, absent or strangers: deadlines, tokens, protocols.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string_view>
#include <thread>
#include <tuple>

#include "base/cpu_affinity.hpp"
#include "base/trace.hpp"
#include "tests/receiver/pull_fixture.hpp"
#include "tests/support/held_port.hpp"

namespace deltasync::test {
namespace {

using wire::Type;

TEST_F(PullTest, EachHandshakeIsALookAtTheAgentsClock) {
  start_timeline();
  start();
  pull_and_commit();
  stop_timeline();
  const auto looks = trace::snapshot().clocks;
  EXPECT_GE(looks.size(), 2u);  // the control connection's, and a data stream's
  for (const trace::ClockSample& look : looks) {
    EXPECT_EQ(look.clock.bytes[15], 0xFA);
    EXPECT_EQ(look.theirs_ns, FakeAgent::kClockNs);
    EXPECT_LT(look.sent_ns, look.received_ns);
  }
}

TEST_F(PullTest, ALaterPullLooksAtTheClockAgain) {
  start_timeline();
  receiver::Tuning tuning = quick();
  tuning.clock_look = std::chrono::milliseconds(0);
  start({}, tuning);
  pull_and_commit();
  const auto looks = trace::snapshot().clocks.size();
  EXPECT_EQ(pull_and_commit().mode, PullMode::up_to_date);
  stop_timeline();
  EXPECT_GT(trace::snapshot().clocks.size(), looks);
}

TEST_F(PullTest, OneLookAtTheClockDoesForAPullHoweverLongItWaits) {
  start_timeline();
  receiver::Tuning tuning = quick();
  tuning.clock_look = std::chrono::milliseconds(0);
  tuning.wait_slice = std::chrono::milliseconds(20);
  start({}, tuning);
  pull_and_commit();
  const auto connections = agent_->connections();
  const auto plans = agent_->plans().size();
  const auto waited = pull({.newer = true}, 1'000);
  stop_timeline();
  ASSERT_FALSE(waited.ok());
  EXPECT_EQ(waited.error().code(), Errc::timed_out) << waited.error().to_string();
  EXPECT_GT(agent_->plans().size(), plans + 1) << "it asked several times";
  EXPECT_EQ(agent_->connections(), connections + 1);
}

TEST_F(PullTest, WhereNoNewConnectionComesAboutTheOldOneGoesOn) {
  start_timeline();
  receiver::Tuning tuning = quick();
  tuning.clock_look = std::chrono::milliseconds(0);
  start({}, tuning);
  pull_and_commit();
  std::atomic<unsigned> refused = 0;
  agent_->on_request([&](const Request& r) {
    if (r.type != Type::hello) return Fault::none;
    ++refused;
    return Fault::drop_midway;
  });
  const auto staged = pull();
  stop_timeline();
  agent_->on_request(nullptr);
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  EXPECT_EQ((*staged)->report().mode, PullMode::up_to_date);
  EXPECT_EQ(refused, 1u);
}

// ---- cores -------------------------------------------------------------------------------------------------------

/// By name, what the threads of this process may run on.
std::map<std::string, std::string> cores_by_thread() {
  std::map<std::string, std::string> cores;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    std::string name;
    constexpr std::string_view kName = "Name:\t";
    constexpr std::string_view kCores = "Cpus_allowed_list:\t";
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with(kName)) name = line.substr(kName.size());
      if (line.starts_with(kCores)) cores[name] = line.substr(kCores.size());
    }
  }
  return cores;
}

TEST_F(PullTest, ItsThreadsRunOnTheCoresThatItIsGivenAndTheCallersWhereItDid) {
  const CpuList allowed = allowed_cpus().value();
  options_.cores = std::to_string(allowed.back());
  options_.threads = 3;
  start();
  pull_and_commit();
  const auto cores = cores_by_thread();
  for (const char* name : {"ds-stream-1", "ds-receiver-1", "ds-receiver-2"}) {
    ASSERT_EQ(cores.count(name), 1u) << name;
    EXPECT_EQ(cores.at(name), options_.cores) << name;
  }
  EXPECT_EQ(allowed_cpus().value(), allowed);
}

TEST_F(PullTest, CoresThatCannotBeHadAreNamed) {
  start();
  for (const char* cores : {"8191", "zero"}) {
    options_.cores = cores;
    const auto made = receiver::ReceiverImpl::connect(options_, quick(), in_ms(60'000));
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.error().code(), Errc::invalid_argument);
    EXPECT_NE(made.error().message().find(cores), std::string::npos) << made.error().message();
  }
}

// ---- deadlines -----------------------------------------------------------------------------------------------

TEST_F(PullTest, StalledStreamsEndWithTheDeadlineAndTheNextPullResumes) {
  start();
  agent_->on_request(
      [](const Request& r) { return r.type == Type::get_extent && r.ordinal >= 12 ? Fault::stall : Fault::none; });
  auto staged = pull({}, 3'000);
  ASSERT_FALSE(staged.ok());
  EXPECT_EQ(staged.error().code(), Errc::timed_out);
  EXPECT_NE(staged.error().message().find("fetching tiles"), std::string::npos) << staged.error().message();
  EXPECT_NE(staged.error().message().find(agent_->endpoint()), std::string::npos) << staged.error().message();
  EXPECT_FALSE(receiver_->current().has_value());
  agent_->on_request(nullptr);
  const PullReport report = pull_and_commit();
  EXPECT_LT(report.tiles, model_.layout->tile_count()) << "verified tiles were fetched again";
  EXPECT_EQ(agent_->plans().back().partial, 1);
}

/// Its last words come before the receiver's own deadline, which would cut them off.
TEST_F(PullTest, WhoWaitsInVainForAVersionHearsTheAgentOut) {
  receiver::Tuning patient = quick();
  patient.wait_slice = std::chrono::hours(1);
  start({}, patient);
  const auto staged = pull({.number = 9}, 4'000);
  ASSERT_FALSE(staged.ok());
  EXPECT_EQ(staged.error().code(), Errc::timed_out);
  EXPECT_NE(staged.error().message().find("no such version came"), std::string::npos) << staged.error().message();
  EXPECT_LE(agent_->plans().front().wait_ms, 3'000u);
}

TEST_F(PullTest, OneStalledStreamHoldsUpNobodyForLong) {
  start({}, impatient());
  agent_->on_request(fault_on(Type::get_extent, Fault::stall, 3));
  EXPECT_EQ(pull_and_commit().stream_restarts, 1u);
}

TEST_F(PullTest, StalledDeltaLeavesTheOldVersion) {
  start();
  pull_and_commit();
  const auto before = agent_->newest();
  const Version version = *receiver_->current();
  step();
  agent_->on_request(fault_on(Type::get_frames, Fault::stall, 0, kAlways));
  auto staged = pull({}, 3'000);
  ASSERT_FALSE(staged.ok());
  EXPECT_EQ(staged.error().code(), Errc::timed_out);
  EXPECT_NE(staged.error().message().find("fetching the delta"), std::string::npos) << staged.error().message();
  expect_memory(before);
  EXPECT_EQ(*receiver_->current(), version);
  agent_->on_request(nullptr);
  EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
}

TEST_F(PullTest, SilentAndAbsentPeers) {
  // A listener that never says a word.
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(listener.get(), 4), 0);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  options_.endpoint = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  auto silent = receiver::ReceiverImpl::connect(options_, quick(), in_ms(300));
  ASSERT_FALSE(silent.ok());
  EXPECT_EQ(silent.error().code(), Errc::timed_out);
  EXPECT_NE(silent.error().message().find(options_.endpoint), std::string::npos) << silent.error().message();
  const HeldPort nobody;
  options_.endpoint = nobody.endpoint();
  auto absent = receiver::ReceiverImpl::connect(options_, quick(), in_ms(300));
  ASSERT_FALSE(absent.ok());
  EXPECT_EQ(absent.error().code(), Errc::connection);
}

TEST_F(PullTest, AgentThatGoesAwayForGood) {
  const HeldPort port;
  FakeAgent::Setup setup;
  setup.port = port.number();
  start(setup);
  pull_and_commit();
  const auto before = agent_->newest();
  const std::string endpoint = agent_->endpoint();
  agent_.reset();
  auto staged = pull({}, 1'500);
  ASSERT_FALSE(staged.ok());
  EXPECT_EQ(staged.error().code(), Errc::timed_out);
  EXPECT_NE(staged.error().message().find(endpoint), std::string::npos) << staged.error().message();
  EXPECT_NE(staged.error().message().find("connecting"), std::string::npos) << staged.error().message();
  expect_memory(before);
}

// ---- authentication ------------------------------------------------------------------------------------------

TEST_F(PullTest, RightToken) {
  FakeAgent::Setup setup;
  setup.token = "open sesame";
  start(setup);
  pull_and_commit();
}

TEST_F(PullTest, WrongMissingAndUnprovenTokens) {
  FakeAgent::Setup setup;
  setup.token = "open sesame";
  agent_ = std::make_unique<FakeAgent>(model_.layout, setup);
  options_.endpoint = agent_->endpoint();
  for (const char* token : {"", "open sesam", "Open sesame"}) {
    options_.token = token;
    auto made = receiver::ReceiverImpl::connect(options_, quick(), in_ms(60'000));
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.error().code(), Errc::unauthenticated) << made.error().to_string();
  }
  setup.proves_token = false;
  agent_ = std::make_unique<FakeAgent>(model_.layout, setup);
  options_.endpoint = agent_->endpoint();
  options_.token = setup.token;
  EXPECT_EQ(receiver::ReceiverImpl::connect(options_, quick(), in_ms(60'000)).error().code(), Errc::unauthenticated);
}

/// An agent of protocol 4 names no newest one.
TEST_F(PullTest, TheNewestProtocolOfBothIsSpoken) {
  struct Case {
    wire::Protocols agent;
    std::uint16_t agreed;  // 0: none
  };
  for (const Case& each : {Case{{4, 0}, 4}, Case{{4, 5}, 5}, Case{{5, 6}, 5}, Case{{98, 99}, 0}, Case{{3, 0}, 0}}) {
    FakeAgent::Setup setup;
    setup.protocols = each.agent;
    agent_ = std::make_unique<FakeAgent>(model_.layout, setup);
    options_.endpoint = agent_->endpoint();
    const auto receiver = receiver::ReceiverImpl::connect(options_, quick(), in_ms(60'000));
    if (each.agreed == 0) {
      EXPECT_EQ(receiver.error().code(), Errc::unsupported);
      continue;
    }
    ASSERT_TRUE(receiver) << receiver.error().to_string();
    EXPECT_EQ(agent_->protocols_spoken(), std::set<std::uint16_t>{each.agreed});
  }
}

/// Bytes that change on their way come whole another time. What the agent itself got wrong is said at once, and
/// whatever goes on being wrong is said as what it is, never as a handshake that ran out of time.
TEST_F(PullTest, ALayoutThatIsWrongIsCalledSo) {
  start();
  options_.endpoint = agent_->endpoint();
  const auto attempt = [&](Fault fault, std::uint64_t times, int ms) {
    const std::uint64_t before = agent_->requests(Type::get_layout);
    agent_->on_request(fault_on(Type::get_layout, fault, before, times));
    auto made = receiver::ReceiverImpl::connect(options_, quick(), in_ms(ms));
    return std::pair(std::move(made), agent_->requests(Type::get_layout) - before);
  };
  const auto recovered = attempt(Fault::flip_in_transit, 2, 60'000);
  EXPECT_TRUE(recovered.first.ok()) << recovered.first.error().to_string();
  EXPECT_EQ(recovered.second, 3u);

  for (const auto& [fault, code, asked] :
       {std::tuple(Fault::flip_in_transit, Errc::corrupt, 3u), std::tuple(Fault::lie_huge, Errc::protocol, 3u),
        std::tuple(Fault::flip_at_source, Errc::corrupt, 1u)}) {
    const auto failed = attempt(fault, kAlways, 60'000);
    ASSERT_FALSE(failed.first.ok());
    EXPECT_EQ(failed.first.error().code(), code) << failed.first.error().to_string();
    EXPECT_EQ(failed.second, asked) << failed.first.error().to_string();
  }

  // The second answer never comes within the deadline: what was wrong with the first is still the reason.
  agent_->on_request([n = agent_->requests(Type::get_layout)](const Request& r) {
    if (r.type != Type::get_layout) return Fault::none;
    return r.ordinal == n ? Fault::flip_in_transit : Fault::stall;
  });
  const auto late = receiver::ReceiverImpl::connect(options_, quick(), in_ms(5'000));
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Errc::corrupt) << late.error().to_string();
  EXPECT_NE(late.error().message().find("payload hash"), std::string::npos) << late.error().to_string();
}

TEST_F(PullTest, ConnectWaitsForALayout) {
  agent_ = std::make_unique<FakeAgent>(nullptr);
  options_.endpoint = agent_->endpoint();
  auto early = receiver::ReceiverImpl::connect(options_, quick(), in_ms(3'000));
  ASSERT_FALSE(early.ok());
  EXPECT_EQ(early.error().code(), Errc::timed_out);
  EXPECT_NE(early.error().message().find("layout"), std::string::npos) << early.error().message();
  std::thread trainer([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    agent_->change_layout(model_.layout);
    agent_->publish(model_.half);
  });
  connect();
  trainer.join();
  pull_and_commit();
}

}  // namespace
}  // namespace deltasync::test
