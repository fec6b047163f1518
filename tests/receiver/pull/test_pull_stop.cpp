// A caller that changes its mind: a requested stop ends a call whatever it is doing, and costs nothing of what is held.
// Every wait of the receiver itself is far longer here than the test waits, so that only the stop can have ended it.
// And a deadline that passes while there is always something to do.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <fstream>
#include <functional>
#include <iomanip>
#include <sstream>
#include <stop_token>
#include <thread>

#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "format/tiling.hpp"
#include "receiver/pull/fetch_round.hpp"
#include "tests/receiver/pull_fixture.hpp"

namespace deltasync::test {
namespace {

using wire::Type;

constexpr int kPatienceMs = 60'000;

receiver::Tuning endless() {
  constexpr std::chrono::minutes kLong(30);
  receiver::Tuning t;
  t.handshake = kLong;
  t.silence = kLong;
  t.wait_slice = kLong;
  t.backoff_first = kLong;
  t.backoff_max = kLong;
  t.item_bytes = 192u << 10;
  t.frame_item_bytes = 8u << 10;
  t.piece_bytes = 64u << 10;
  return t;
}

/// A listener on a free port of 127.0.0.1.
struct Listener {
  explicit Listener(int backlog) : fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(fd.get(), backlog), 0);
    EXPECT_EQ(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    port = ntohs(address.sin_port);
  }
  std::string endpoint() const { return "127.0.0.1:" + std::to_string(port); }

  UniqueFd fd;
  std::uint16_t port = 0;
};

struct ClientSocket {
  std::string state;   ///< as the kernel's table has it: "01" established, "02" waits for an answer to its connect()
  std::string queues;  ///< bytes in hexadecimal, to send ":" to be read
};

/// All sockets of this machine whose peer is 127.0.0.1 and this port.
std::vector<ClientSocket> clients_of(std::uint16_t port) {
  std::ifstream table("/proc/self/net/tcp");
  std::ostringstream wanted;
  wanted << "0100007F:" << std::hex << std::uppercase << std::setw(4) << std::setfill('0') << port;
  std::vector<ClientSocket> found;
  for (std::string line; std::getline(table, line);) {
    std::istringstream fields(line);
    std::string number;
    std::string local;
    std::string remote;
    ClientSocket client;
    fields >> number >> local >> remote >> client.state >> client.queues;
    if (remote == wanted.str()) found.push_back(client);
  }
  return found;
}

/// Sockets that wait for an answer to their connect() to this port.
std::ptrdiff_t connecting_to(std::uint16_t port) {
  const auto clients = clients_of(port);
  return std::count_if(clients.begin(), clients.end(), [](const ClientSocket& c) { return c.state == "02"; });
}

/// There are connections to this port, and all that came over them has been read.
bool clients_have_read_all(std::uint16_t port) {
  const auto clients = clients_of(port);
  return !clients.empty() && std::all_of(clients.begin(), clients.end(), [](const ClientSocket& c) {
    return c.state == "01" && c.queues.ends_with(":00000000");
  });
}

/// The main thread of this process, which is the test's own, waits inside the kernel.
bool test_thread_sleeps() {
  std::ifstream stat("/proc/self/task/" + std::to_string(::getpid()) + "/stat");
  std::string text;
  std::getline(stat, text);
  const std::size_t name_end = text.rfind(')');  // the name may hold anything
  return name_end != std::string::npos && text.compare(name_end, 3, ") S") == 0;
}

class PullStopTest : public PullTest {
 protected:
  /// Its hooks use members of the tests.
  void TearDown() override { agent_.reset(); }

  /// Over before any wait of its own could have ended it.
  template <class T>
  void expect_cancelled(const Result<T>& result, Deadline patience, const std::string& stage) {
    EXPECT_FALSE(patience.passed()) << "the stop woke nobody";
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.error().code(), Errc::cancelled) << result.error().to_string();
    EXPECT_NE(result.error().message().find(stage), std::string::npos) << result.error().message();
  }
  void expect_pull_cancelled(const Want& want, const std::string& stage) {
    const Deadline patience = in_ms(kPatienceMs);
    expect_cancelled(receiver_->pull(want, CallContext(patience, stop_.get_token())), patience, stage);
  }
  /// Stops, from a thread of its own, as soon as this is so.
  std::jthread stop_once(std::function<bool()> reached) {
    return std::jthread([this, reached = std::move(reached)] {
      const Deadline limit = in_ms(kPatienceMs);
      while (!reached() && !limit.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      stop_.request_stop();
    });
  }
  /// Stops when so many requests of this type have been left without an answer.
  void stop_when_stalled(Type type, std::uint64_t from, int times) {
    agent_->on_request([this, type, from, times](const Request& r) {
      if (r.type != type || r.ordinal < from) return Fault::none;
      if (++stalled_ == times) stop_.request_stop();
      return Fault::stall;
    });
  }

  std::stop_source stop_;
  int stalled_ = 0;  // hooks are called one at a time
};

// ---- where a call may be -------------------------------------------------------------------------------------

TEST_F(PullStopTest, WhileTheAgentDoesNotTakeTheConnection) {
  // The kernel drops what comes to a full backlog: connect() gets no answer.
  const Listener full(0);
  std::vector<Result<UniqueFd>> filling;
  std::jthread stopper;
  for (int i = 0; i < 4 && connecting_to(full.port) == 0; ++i) {
    filling.push_back(net::connect_tcp("127.0.0.1", full.port, in_ms(200)));
    if (!filling.back()) break;
  }
  if (filling.back().ok()) GTEST_SKIP() << "this system takes any number of connections";
  stopper = std::jthread([&] {
    const Deadline limit = in_ms(kPatienceMs);
    while (connecting_to(full.port) == 0 && !limit.passed()) std::this_thread::yield();
    stop_.request_stop();
  });
  options_.endpoint = full.endpoint();
  const Deadline patience = in_ms(kPatienceMs);
  expect_cancelled(receiver::ReceiverImpl::connect(options_, endless(), {patience, stop_.get_token()}), patience,
                   "connecting");
}

TEST_F(PullStopTest, WhileTheAgentDoesNotSayHello) {
  const Listener silent(4);
  options_.endpoint = silent.endpoint();
  UniqueFd accepted;
  std::jthread stopper([&] {
    accepted = UniqueFd(::accept4(silent.fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
    stop_.request_stop();
  });
  const Deadline patience = in_ms(kPatienceMs);
  expect_cancelled(receiver::ReceiverImpl::connect(options_, endless(), {patience, stop_.get_token()}), patience,
                   "handshake");
}

TEST_F(PullStopTest, WhileThereIsNoLayout) {
  agent_ = std::make_unique<FakeAgent>(nullptr);
  options_.endpoint = agent_->endpoint();
  const auto port = static_cast<std::uint16_t>(std::stoi(options_.endpoint.substr(options_.endpoint.rfind(':') + 1)));
  // It has read the answer that there is none: it sleeps until it asks again, and no socket can wake it.
  const std::jthread stopper =
      stop_once([this, port] { return agent_->answers() == 1 && clients_have_read_all(port) && test_thread_sleeps(); });
  const Deadline patience = in_ms(kPatienceMs);
  expect_cancelled(receiver::ReceiverImpl::connect(options_, endless(), {patience, stop_.get_token()}), patience,
                   "waiting for a layout");
}

TEST_F(PullStopTest, WhileWaitingForAVersion) {
  start({}, endless());
  pull_and_commit();
  stop_when_stalled(Type::plan, 0, 1);
  expect_pull_cancelled({.newer = true}, "waiting for a newer version");
  EXPECT_TRUE(receiver_->current().has_value());
  agent_->on_request(nullptr);
  step();
  EXPECT_EQ(pull_and_commit({.newer = true}).mode, PullMode::delta);
}

TEST_F(PullStopTest, BetweenTwoTriesToConnect) {
  start({}, endless());
  pull_and_commit();
  agent_->on_request([](const Request& r) { return r.type == Type::hello ? Fault::drop_midway : Fault::none; });
  agent_->restart();
  {
    // It has closed its socket: it sleeps until it tries again, and no socket can wake it.
    const std::jthread stopper = stop_once([this] { return agent_->hangups_seen() == 1 && test_thread_sleeps(); });
    expect_pull_cancelled({}, "connecting");
  }
  agent_->on_request(nullptr);
  step();
  pull_and_commit();
  expect_holds_newest();
}

TEST_F(PullStopTest, WhileEveryStreamIsSilentAndTheNextPullResumes) {
  options_.streams = 4;
  start({}, endless());
  stop_when_stalled(Type::get_extent, 12, 4);
  expect_pull_cancelled({}, "fetching tiles");
  EXPECT_FALSE(receiver_->current().has_value());
  agent_->on_request(nullptr);
  const PullReport report = pull_and_commit();
  EXPECT_LT(report.tiles, model_.layout->tile_count()) << "verified tiles were fetched again";
  EXPECT_EQ(agent_->plans().back().partial, 1);
}

TEST_F(PullStopTest, WhileADeltaComesTheOldVersionStays) {
  start({}, endless());
  pull_and_commit();
  const auto before = agent_->newest();
  const Version version = *receiver_->current();
  step(0.2);
  stop_when_stalled(Type::get_frames, 1, 1);
  expect_pull_cancelled({}, "fetching the delta");
  expect_memory(before);
  EXPECT_EQ(*receiver_->current(), version);
  agent_->on_request(nullptr);
  EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
}

// ---- work without a wait -------------------------------------------------------------------------------------

/// A host target that says when its memory is asked for.
class WatchedTarget final : public Target, public CanLendRows, public WaitsForDevices {
 public:
  WatchedTarget(const LayoutPtr& layout, std::function<void()> live, std::function<void()> full)
      : host_(make_host_target(layout)), live_(std::move(live)), full_(std::move(full)) {}

  const LayoutPtr& layout() const override { return host_->layout(); }
  TargetCapabilities capabilities() override {
    TargetCapabilities can;
    can.rollback = host_->capabilities().rollback;
    can.rows = this;
    can.devices = this;
    return can;
  }
  void begin_pull(const CallContext& until) override {
    EXPECT_FALSE(pull_.has_value());
    pull_ = until;
    ++pulls_;
  }
  void end_pull() noexcept override { pull_.reset(); }
  Status wait_for_engine(const CallContext& /*until*/) override { return {}; }
  Status finish_live(const CallContext& /*until*/) override { return {}; }
  Status open(ThreadPool& pool, const CallContext& until) override { return host_->open(pool, until); }
  const TargetState* committed() const override { return host_->committed(); }
  Result<TileRows> live_tile(const Tile& tile, std::vector<std::byte>& scratch) const override {
    live_();
    EXPECT_TRUE(pull_.has_value());
    return host_->live_tile(tile, scratch);
  }
  Status begin_full(FullUpdatePolicy policy, const CallContext& until) override {
    return host_->begin_full(policy, until);
  }
  Result<TileRows> full_tile(const Tile& tile, std::vector<std::byte>& scratch) override {
    full_();
    return host_->full_tile(tile, scratch);
  }
  Status put_tile(const Tile& tile, const TileRows& rows) override { return host_->put_tile(tile, rows); }
  std::byte* full_rows(std::uint32_t tensor) override {
    full_();
    return host_->capabilities().rows->full_rows(tensor);
  }
  Status commit_full(TargetState state, Deadline deadline) override {
    return host_->commit_full(std::move(state), deadline);
  }
  void discard_full() noexcept override { host_->discard_full(); }
  Status commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) override {
    return host_->commit_delta(std::move(steps), std::move(state), deadline);
  }
  void invalidate() noexcept override { host_->invalidate(); }

  const Target& host() const { return *host_; }
  /// The one that is under way, and how many there were.
  const std::optional<CallContext>& pull() const { return pull_; }
  int pulls() const { return pulls_; }

 private:
  const std::unique_ptr<Target> host_;
  std::optional<CallContext> pull_;
  int pulls_ = 0;
  const std::function<void()> live_;
  const std::function<void()> full_;
};

class PullStopWorkTest : public PullStopTest {
 protected:
  void start_watched(receiver::Tuning tuning) {
    options_.threads = 1;
    start({}, tuning);
    auto* watched = new WatchedTarget(
        receiver_->layout(), [this] { touch_live(); },
        [this] {
          touch(armed_full_);
          const Deadline* const until = hold_until_.load();
          while (until != nullptr && !until->passed()) std::this_thread::sleep_for(until->remaining());
        });
    watched_ = watched;
    host_ = &watched->host();
    ASSERT_TRUE(receiver_->bind(std::unique_ptr<Target>(watched), in_ms(kPatienceMs)).ok());
  }
  void touch(const std::atomic<bool>& armed) {
    if (armed) stop_.request_stop();
  }
  void touch_live() {
    touch(armed_live_);
    if (++live_calls_ == stop_at_live_call_) stop_.request_stop();
  }
  void commit_pull() {
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    ASSERT_TRUE((*staged)->commit().ok());
    const auto memory = host_target_memory(*host_);
    const auto half = agent_->half_of(receiver_->current()->id);
    ASSERT_EQ(memory.size(), half.size());
    EXPECT_EQ(std::memcmp(memory.data(), half.data(), half.size()), 0) << "memory differs from the published half";
  }

  std::atomic<bool> armed_live_{false};
  std::atomic<std::uint64_t> live_calls_{0};
  std::atomic<std::uint64_t> stop_at_live_call_{0};
  std::atomic<bool> armed_full_{false};
  std::atomic<const Deadline*> hold_until_{nullptr};  ///< full memory is had after it
  const WatchedTarget* watched_ = nullptr;
  const Target* host_ = nullptr;
};

TEST_F(PullStopWorkTest, WhileSeveralDeltaStepsAreVerified) {
  start_watched(endless());
  commit_pull();
  for (int i = 0; i < 3; ++i) step(0.2);
  armed_live_ = true;
  const int pulls = watched_->pulls();
  expect_pull_cancelled({}, "verifying 3 delta steps");
  EXPECT_EQ(watched_->pulls(), pulls + 1);
  EXPECT_FALSE(watched_->pull().has_value()) << "the pull is over, and so are its deadline and stop";
  armed_live_ = false;
  const std::size_t plans = agent_->plans().size();
  commit_pull();
  EXPECT_EQ(agent_->plans()[plans].full_only, 0) << "a stop does not invalidate what is held";
}

TEST_F(PullStopWorkTest, WhileHeldTilesAreReadAgain) {
  options_.scrub_tiles = ~std::uint64_t{0};
  start_watched(endless());
  commit_pull();
  step(0.2);
  // One step asks for each tile's memory once at most: what comes after as many calls as there are tiles re-reads.
  live_calls_ = 0;
  stop_at_live_call_ = model_.layout->tile_count() + 1;
  expect_pull_cancelled({}, "re-reading tiles");
  EXPECT_LT(live_calls_, stop_at_live_call_ + 64);
  stop_at_live_call_ = 0;
  const std::size_t plans = agent_->plans().size();
  commit_pull();
  EXPECT_EQ(agent_->plans()[plans].full_only, 0) << "a stop does not invalidate what is held";
}

TEST_F(PullStopWorkTest, WhileVerifiedTilesAreAdvanced) {
  receiver::Tuning tuning = quick();
  tuning.item_bytes = 64u << 10;
  start_watched(tuning);
  agent_->revoke_after(model_.layout->half_bytes() / 2, [&] {
    step(0.3);
    agent_->revoke_after(0, nullptr);
  });
  // The frames of a step are asked for when no extent is under way: the next to touch the memory applies them.
  agent_->on_request([this](const Request& r) {
    if (r.type == Type::get_frames) armed_full_ = true;
    return Fault::none;
  });
  expect_pull_cancelled({}, "advancing verified tiles");
  ASSERT_TRUE(armed_full_) << "nothing was to be advanced: this test proves nothing";
  armed_full_ = false;
  agent_->on_request(nullptr);
  commit_pull();
}

// ---- before, and after something else ------------------------------------------------------------------------

TEST_F(PullStopTest, AStopBeforeACommitLeavesTheUpdateStaged) {
  start();
  pull_and_commit();
  const auto before = agent_->newest();
  step();
  const auto staged = receiver_->pull({}, in_ms(kPatienceMs));
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  stop_.request_stop();
  const Deadline patience = in_ms(kPatienceMs);
  expect_cancelled((*staged)->commit(CallContext(patience, stop_.get_token())), patience, "commit");
  expect_memory(before);
  ASSERT_TRUE((*staged)->commit(in_ms(kPatienceMs)).ok());
  expect_memory(agent_->newest());
}

TEST_F(PullStopTest, ANumberAndALabelTogetherAreRefused) {
  start();
  const auto both = receiver_->pull({.number = 1, .label = "first"}, in_ms(kPatienceMs));
  ASSERT_FALSE(both.ok());
  EXPECT_EQ(both.error().code(), Errc::invalid_argument);
}

TEST_F(PullStopTest, AStopThatWasRequestedBeforeChangesNothing) {
  start();
  pull_and_commit();
  const auto before = agent_->newest();
  step();
  stop_.request_stop();
  const std::uint64_t plans = agent_->plans().size();
  const std::uint64_t connections = agent_->connections();
  expect_pull_cancelled({}, "stopped while");
  const Deadline patience = in_ms(kPatienceMs);
  expect_cancelled(receiver_->bind(make_host_target(receiver_->layout()), CallContext(patience, stop_.get_token())),
                   patience, "bind");
  expect_cancelled(receiver::ReceiverImpl::connect(options_, quick(), {patience, stop_.get_token()}), patience,
                   "connecting");
  EXPECT_EQ(agent_->plans().size(), plans);
  EXPECT_EQ(agent_->connections(), connections);
  expect_memory(before);
  EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
}

TEST_F(PullStopTest, AStopAfterAPullIsNobodysBusiness) {
  options_.streams = 1;  // one connection is all that there will be, unless it breaks
  receiver::Tuning tuning = endless();
  tuning.release = std::chrono::minutes(30);
  start({}, tuning);
  auto staged = receiver_->pull({}, CallContext(in_ms(kPatienceMs), stop_.get_token()));
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  stop_.request_stop();
  ASSERT_TRUE((*staged)->commit().ok());
  const std::uint64_t connections = agent_->connections();
  step();
  pull_and_commit();
  EXPECT_EQ(agent_->connections(), connections) << "the stop of an earlier pull broke the connections";
}

// ---- a deadline, while data keep coming ------------------------------------------------------------------------

/// As if bytes came faster than they can be verified: the memory is had after the deadline only.
TEST_F(PullStopWorkTest, ADeadlineEndsAFullTransferWhoseBytesKeepComing) {
  receiver::Tuning tuning = endless();
  tuning.item_bytes = 64u << 10;
  options_.streams = 1;
  start_watched(tuning);
  const Deadline deadline = in_ms(2'000);
  hold_until_.store(&deadline);
  const auto staged = receiver_->pull({}, deadline);
  hold_until_.store(nullptr);
  ASSERT_FALSE(staged.ok());
  EXPECT_EQ(staged.error().code(), Errc::timed_out) << staged.error().to_string();
  EXPECT_LT(agent_->requests(Type::get_extent), 8u) << "the round went on";
  commit_pull();
}

TEST_F(PullStopTest, ADeadlineBetweenTwoPlansNamesTheAgent) {
  start({}, endless());
  agent_->on_request(fault_on(Type::get_extent, Fault::refuse, 0, kAlways));  // half an hour until the next plan
  const auto staged = pull({}, 2'000);
  ASSERT_FALSE(staged.ok());
  EXPECT_EQ(staged.error().code(), Errc::timed_out);
  EXPECT_EQ(staged.error().message().find("pull from " + options_.endpoint), 0u) << staged.error().message();
  EXPECT_EQ(staged.error().message().find("pull from", 1), std::string::npos) << staged.error().message();
}

TEST(FetchRoundDeadline, EndsARoundThatAlwaysHasSomethingUnderWay) {
  receiver::FetchRound round(std::vector<receiver::Item>(8), in_ms(0), 1);
  EXPECT_FALSE(round.take_ahead(1).has_value());
  EXPECT_TRUE(round.over());
  EXPECT_TRUE(round.stop().stop_requested());
  EXPECT_EQ(round.result().error->code(), Errc::timed_out);
}

TEST(ConnectionDeadline, IsLookedAtThoughBytesAreThere) {
  const Listener listener(4);
  const std::vector<receiver::Address> addresses{{listener.endpoint(), "127.0.0.1", listener.port}};
  const receiver::Peer peer{std::make_shared<receiver::Addresses>(addresses), "", "test", endless()};
  auto connection = receiver::Connection::dial(peer, in_ms(kPatienceMs));
  ASSERT_TRUE(connection.ok()) << connection.error().to_string();
  const UniqueFd agent(::accept4(listener.fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
  std::array<char, 100> bytes{};
  ASSERT_EQ(::send(agent.get(), bytes.data(), bytes.size(), 0), 100);
  iovec first{bytes.data(), 50};
  ASSERT_TRUE(connection->recv_scattered({&first, 1}, in_ms(kPatienceMs)).ok());
  iovec rest{bytes.data(), 50};
  const Status late = connection->recv_scattered({&rest, 1}, in_ms(0));
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Errc::timed_out);
}

TEST(FetchRoundStop, TheFirstReasonStays) {
  std::stop_source stop;
  const CallContext until(in_ms(kPatienceMs), stop.get_token());
  receiver::FetchRound failed({receiver::Item{}}, until, 1);
  receiver::FetchRound untouched({receiver::Item{}}, until, 1);
  failed.finish(receiver::FetchRoundEnd::failed, Error(Errc::corrupt, "a reason"));
  EXPECT_TRUE(failed.stop().stop_requested());
  EXPECT_FALSE(untouched.stop().stop_requested());
  stop.request_stop();
  EXPECT_EQ(failed.result().error->code(), Errc::corrupt);
  EXPECT_EQ(untouched.result().error->code(), Errc::cancelled);
  EXPECT_TRUE(untouched.stop().stop_requested());
  EXPECT_FALSE(untouched.take().has_value());
  untouched.finish(receiver::FetchRoundEnd::failed, Error(Errc::corrupt, "a later reason"));
  EXPECT_EQ(untouched.result().error->code(), Errc::cancelled);
}

}  // namespace
}  // namespace deltasync::test
