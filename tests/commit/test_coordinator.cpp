// The coordinator as its ranks and its enemies meet it: over TCP, and by calls in its own process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <thread>
#include <tuple>

#include "base/hash.hpp"
#include "commit/coordinator_server.hpp"
#include "commit/participant.hpp"
#include "format/wire_commit.hpp"
#include "net/auth.hpp"
#include "tests/commit/fake_receiver.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::commit {
namespace {

using testing::HasSubstr;

constexpr auto kLimit = std::chrono::seconds(60);  ///< no wait of a test that passes comes near it
constexpr const char* kToken = "between ranks";

Deadline soon() {
  return Deadline::after(kLimit);
}

/// A rank's end of a connection, small enough to misbehave.
struct Peer {
  net::MessageSocket socket;
  wire::Hello hello;

  static Peer connect(std::uint16_t port) {
    Peer peer;
    auto fd = net::connect_tcp("127.0.0.1", port, soon());
    EXPECT_TRUE(fd) << fd.error().to_string();
    peer.socket = net::MessageSocket(*std::move(fd));
    auto hello = peer.socket.recv_as<wire::Hello>(0, soon());
    EXPECT_TRUE(hello) << hello.error().to_string();
    if (hello) peer.hello = *hello;
    return peer;
  }
  wire::RankJoin join_message(std::uint32_t rank, std::uint32_t ranks, std::uint64_t incarnation,
                              const std::string& token = kToken) const {
    wire::RankJoin join;
    join.rank = rank;
    join.ranks = ranks;
    join.incarnation = incarnation;
    join.nonce = net::make_nonce();
    join.proof = net::rank_proof(token, hello.nonce, join.nonce, rank, ranks, incarnation);
    return join;
  }
  Result<wire::RankWelcome> join(const wire::RankJoin& message) {
    DS_TRY(socket.send(0, message, soon()));
    return socket.recv_as<wire::RankWelcome>(0, soon());
  }
  Result<Order> report(const Report& report) {
    DS_TRY(socket.send(7, wire::RankReport{report}, soon()));
    DS_ASSIGN(const auto order, socket.recv_as<wire::RankOrder>(7, soon()));
    return order.order;
  }
  /// What it is told before it is dropped.
  Error last_words() {
    auto message = socket.recv(wire::kControlBytesMax, soon());
    if (!message) return std::move(message).error();
    auto said = wire::ErrorMessage::decode(message->payload);
    if (!said) return std::move(said).error();
    EXPECT_EQ(message->header.request, 0u);
    EXPECT_EQ(socket.recv(wire::kControlBytesMax, soon()).error().code(), Errc::connection);
    return {said->code, said->message};
  }
};

class CommitServer : public ::testing::Test {
 protected:
  void start(std::uint32_t ranks = 2, const std::string& token = kToken) {
    CoordinatorOptions options;
    options.ranks = ranks;
    options.log = dir_.path() / "commit.log";
    options.token = token;
    auto made = CoordinatorServer::start(options);
    ASSERT_TRUE(made) << made.error().to_string();
    server_ = *std::move(made);
  }
  Peer peer() const { return Peer::connect(server_->port()); }
  /// An honest rank is heard after whatever happened.
  void expect_unharmed() {
    Peer honest = peer();
    const auto welcome = honest.join(honest.join_message(1, 2, 1000));
    ASSERT_TRUE(welcome) << welcome.error().to_string();
    const auto order = honest.report(busy(1, 1000));
    ASSERT_TRUE(order) << order.error().to_string();
    EXPECT_EQ(order->kind, OrderKind::none);
    EXPECT_EQ(server_->ranks().at(1).report->incarnation, 1000u);
  }
  static Report busy(std::uint32_t rank, std::uint64_t incarnation) {
    Report report;
    report.rank = rank;
    report.incarnation = incarnation;
    report.step = 1;
    report.busy = true;
    return report;
  }

  test::TempDir dir_;
  std::unique_ptr<CoordinatorServer> server_;
};

TEST_F(CommitServer, WrongTokensAndProofsForOthersAreRefused) {
  start();
  for (const char* token : {"", "wrong"}) {
    Peer stranger = peer();
    EXPECT_EQ(stranger.join(stranger.join_message(0, 2, 5, token)).error().code(), Errc::unauthenticated);
  }
  Peer thief = peer();  // a proof for rank 0 does not make a rank 1
  auto join = thief.join_message(0, 2, 5);
  join.rank = 1;
  EXPECT_EQ(thief.join(join).error().code(), Errc::unauthenticated);
  Peer mirror = peer();  // recorded on another connection
  const auto recorded = mirror.join_message(0, 2, 5);
  Peer replay = peer();
  EXPECT_EQ(replay.join(recorded).error().code(), Errc::unauthenticated);
  Peer receiver = peer();  // a receiver's proof is none of a rank
  auto other = receiver.join_message(0, 2, 5);
  other.proof = net::client_proof(kToken, receiver.hello.nonce, other.nonce, wire::Role::control);
  EXPECT_EQ(receiver.join(other).error().code(), Errc::unauthenticated);
  for (const RankStatus& rank : server_->ranks()) EXPECT_FALSE(rank.connected || rank.report);
  expect_unharmed();
}

TEST_F(CommitServer, RanksThatCannotBeAreRefused) {
  start();
  for (const auto& [rank, ranks, incarnation] :
       {std::tuple(2u, 2u, 5u), std::tuple(0u, 3u, 5u), std::tuple(~0u, 2u, 5u), std::tuple(0u, 2u, 0u)}) {
    Peer wrong = peer();
    EXPECT_EQ(wrong.join(wrong.join_message(rank, ranks, incarnation)).error().code(), Errc::invalid_argument);
  }
  Peer old = peer();
  auto join = old.join_message(0, 2, 5);
  join.protocol = 99;
  EXPECT_EQ(old.join(join).error().code(), Errc::unsupported);
  expect_unharmed();
}

TEST_F(CommitServer, ARankThatClaimsAnothersNumberIsRefusedAsLongAsThatIsThere) {
  start();
  std::optional<Peer> first = peer();
  ASSERT_TRUE(first->join(first->join_message(0, 2, 5)));
  ASSERT_TRUE(first->report(busy(0, 5)));
  Peer second = peer();
  EXPECT_EQ(second.join(second.join_message(0, 2, 6)).error().code(), Errc::already_exists);
  ASSERT_TRUE(first->report(busy(0, 5))) << "the first one is not disturbed";
  Peer again = peer();  // its own second connection takes the place of the first
  EXPECT_TRUE(again.join(again.join_message(0, 2, 5)));
  again.socket.close();
  first.reset();
  const Deadline deadline = soon();
  for (;;) {
    Peer later = peer();
    const auto welcome = later.join(later.join_message(0, 2, 6));
    if (welcome) break;
    ASSERT_EQ(welcome.error().code(), Errc::already_exists);
    ASSERT_FALSE(deadline.passed());
  }
  expect_unharmed();
}

TEST_F(CommitServer, AnEarlierProcessIsToldThatItHasBeenReplaced) {
  start();
  ASSERT_TRUE(server_->exchange(busy(0, 9), Deadline::after({}), {}));
  Peer old = peer();
  const auto welcome = old.join(old.join_message(0, 2, 8));
  ASSERT_TRUE(welcome);
  EXPECT_EQ(welcome->incarnation, 9u);
  EXPECT_EQ(old.report(busy(0, 8)).error().code(), Errc::version_conflict);
  expect_unharmed();
}

TEST_F(CommitServer, GarbageIsDropped) {
  start();
  {
    Peer garbage = peer();
    const std::string noise(4096, 'x');
    ASSERT_EQ(::send(garbage.socket.fd(), noise.data(), noise.size(), MSG_NOSIGNAL), 4096);
    EXPECT_EQ(garbage.last_words().code(), Errc::connection) << "who speaks something else is told nothing";
  }
  {
    Peer wrong = peer();  // not a join
    ASSERT_TRUE(wrong.socket.send(0, wire::RankReport{busy(0, 5)}, soon()));
    EXPECT_EQ(wrong.last_words().code(), Errc::protocol);
  }
  {
    Peer long_join = peer();  // claims more than anybody may before a proof
    wire::Header header = wire::make_header(wire::Type::rank_join, 0, {});
    header.payload_bytes = 1u << 20;
    header.header_hash = xxh3_64(bytes_of(header).first(offsetof(wire::Header, header_hash)));
    ASSERT_EQ(::send(long_join.socket.fd(), &header, sizeof header, MSG_NOSIGNAL), ssize_t{sizeof header});
    EXPECT_EQ(long_join.last_words().code(), Errc::connection);
  }
  {
    Peer torn = peer();
    const auto payload = torn.join_message(0, 2, 5).encode();
    ASSERT_TRUE(torn.socket.send(wire::Type::rank_join, 0, ByteSpan(payload).first(payload.size() - 1), soon()));
    EXPECT_EQ(torn.last_words().code(), Errc::corrupt);
  }
  expect_unharmed();
}

TEST_F(CommitServer, AMemberThatMisbehavesIsDropped) {
  start();
  const auto joined = [&](std::uint64_t incarnation) {
    Peer member = peer();
    const Deadline deadline = soon();
    while (!member.join(member.join_message(0, 2, incarnation)) && !deadline.passed()) member = peer();
    return member;
  };
  Peer liar = joined(5);
  ASSERT_TRUE(liar.socket.send(1, wire::RankReport{busy(1, 5)}, soon()));
  EXPECT_EQ(liar.last_words().code(), Errc::protocol);
  Peer other = joined(6);
  ASSERT_TRUE(other.socket.send(1, wire::RankReport{busy(0, 7)}, soon()));
  EXPECT_EQ(other.last_words().code(), Errc::protocol);
  Peer talker = joined(7);
  ASSERT_TRUE(talker.socket.send(wire::Type::get_layout, 1, {}, soon()));
  EXPECT_EQ(talker.last_words().code(), Errc::protocol);
  Peer large = joined(8);
  const std::vector<std::byte> bytes(wire::kRankMessageBytesMax + 1);
  ASSERT_TRUE(large.socket.send(wire::Type::rank_report, 1, bytes, soon()));
  EXPECT_EQ(large.last_words().code(), Errc::connection);
  EXPECT_FALSE(server_->ranks().at(1).report);
  expect_unharmed();
}

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

// ---- participants ------------------------------------------------------------------------------------------------

class CountingEngine final : public Engine {
 public:
  Status pause(Deadline /*at once*/) override {
    if (half_pause) admits = false;
    if (half_pause || refuse_pause) {
      ++refused;
      return Error(Errc::timed_out, "a step does not end");
    }
    admits = false;
    runs = false;
    return {};
  }
  Status resume(const Version& version) override {
    label = version.label;
    runs = true;
    admits = true;
    return {};
  }
  std::atomic<bool> admits{true};  ///< new requests
  std::atomic<bool> runs{true};
  std::atomic<bool> refuse_pause{false};
  std::atomic<bool> half_pause{false};  ///< admits nothing any more, and then fails
  std::atomic<unsigned> refused{0};
  std::string label;  // read when nothing runs
};

template <class F>
bool eventually(const F& done) {
  const Deadline deadline = soon();
  while (!deadline.passed()) {
    if (done()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

class CommitRanks : public CommitServer {
 protected:
  struct Member {
    std::unique_ptr<FakeReceiver> receiver;
    CountingEngine engine;
    std::unique_ptr<ParticipantImpl> rank;  // before the others
  };

  void SetUp() override { trainer_.publish("one"); }
  ParticipantOptions options(std::uint32_t rank, bool by_calls) {
    ParticipantOptions o;
    o.rank = rank;
    o.ranks = 2;
    o.coordinator = "127.0.0.1:" + std::to_string(server_->port());
    o.token = kToken;
    if (by_calls) {
      o.exchange = [this](const Report& report, Deadline hold, std::stop_token stop) {
        return server_->exchange(report, hold, std::move(stop));
      };
    }
    return o;
  }
  void join(std::uint32_t rank, bool by_calls = false) {
    Member& m = members_[rank];
    m.rank.reset();
    m.receiver = std::make_unique<FakeReceiver>(trainer_);
    auto made = ParticipantImpl::start(options(rank, by_calls), *m.receiver, m.engine);
    ASSERT_TRUE(made) << made.error().to_string();
    m.rank = *std::move(made);
  }
  bool all_serve(const std::string& label) {
    return eventually([&] {
      return std::all_of(std::begin(members_), std::end(members_), [&](const Member& m) {
        const auto v = m.rank->serving();
        return v && v->label == label && m.engine.runs;
      });
    });
  }
  bool memories_are(std::uint64_t number) const {
    return members_[0].receiver->memory == number && members_[1].receiver->memory == number;
  }

  FakeTrainer trainer_;
  Member members_[2];
};

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
  start();
  join(0);
  join(1);
  ASSERT_TRUE(server_->update(Want(), soon()));
  ASSERT_TRUE(all_serve("one"));
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
  start();
  join(0);
  join(1);
  ASSERT_TRUE(server_->update(Want(), soon()));
  ASSERT_TRUE(all_serve("one"));
  trainer_.publish("two");
  members_[1].engine.half_pause = true;
  ASSERT_FALSE(server_->update(Want(), soon()));
  members_[1].engine.half_pause = false;
  EXPECT_TRUE(eventually([&] { return members_[1].rank->serving() && members_[1].engine.admits; }));
  EXPECT_TRUE(all_serve("one"));
}

/// One rank whose coordinator says what the test says.
class CommitRank : public ::testing::Test {
 protected:
  using Script = std::function<Result<Order>(const Report&)>;

  void SetUp() override { trainer_.publish("one"); }
  void start(Script script) {
    ParticipantOptions o;
    o.ranks = 1;
    o.exchange = [this, script = std::move(script)](const Report& report, Deadline /*at once*/,
                                                    std::stop_token /*at once*/) -> Result<Order> {
      ++asked_;
      DS_ASSIGN(Order order, script(report));
      order.log = 7;
      order.term = 1;
      order.step = ++step_;
      order.incarnation = report.incarnation;
      return order;
    };
    auto made = ParticipantImpl::start(std::move(o), receiver_, engine_);
    ASSERT_TRUE(made) << made.error().to_string();
    rank_ = *std::move(made);
  }
  /// A rank on its way to serve a version.
  static Order bring(const Report& report, VersionId to) {
    Order order;
    order.kind = report.holds == to ? OrderKind::serve : OrderKind::catch_up;
    order.version.id = to;
    return order;
  }

  FakeTrainer trainer_;
  FakeReceiver receiver_{trainer_};
  CountingEngine engine_;
  std::atomic<unsigned> asked_{0};
  std::uint64_t step_ = 0;                 // of the asking thread
  std::unique_ptr<ParticipantImpl> rank_;  // last: it uses all of the above
};

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
  EXPECT_EQ(rank_->trouble()->code(), Errc::version_conflict);
  EXPECT_EQ(rank_->resolve_by_pull().error().code(), Errc::version_conflict);
  EXPECT_EQ(refused, 1u);
}

TEST_F(CommitRanks, ACommitThatFailsIsTakenBackEverywhere) {
  start();
  join(0);
  join(1);
  ASSERT_TRUE(server_->update(Want(), soon()));
  ASSERT_TRUE(all_serve("one"));
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
  start();
  join(0);
  join(1);
  ASSERT_TRUE(server_->update(Want(), soon()));
  ASSERT_TRUE(all_serve("one"));
  join(1);
  EXPECT_TRUE(all_serve("one"));
  EXPECT_TRUE(memories_are(1));
}

TEST_F(CommitRanks, AnotherLogIsObeyedOnlyAfterTheOperatorsWord) {
  start();
  join(0);
  join(1);
  ASSERT_TRUE(server_->update(Want(), soon()));
  ASSERT_TRUE(all_serve("one"));
  const std::string endpoint = "127.0.0.1:" + std::to_string(server_->port());
  server_.reset();
  std::filesystem::remove(dir_.path() / "commit.log");
  CoordinatorOptions options;
  options.ranks = 2;
  options.log = dir_.path() / "commit.log";
  options.token = kToken;
  options.listen = endpoint;
  auto made = CoordinatorServer::start(options);
  ASSERT_TRUE(made) << made.error().to_string();
  server_ = *std::move(made);
  for (Member& m : members_) {
    EXPECT_TRUE(eventually([&] {
      const auto trouble = m.rank->trouble();
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

}  // namespace
}  // namespace deltasync::commit
