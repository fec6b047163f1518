// The coordinator as its enemies meet it over TCP: whatever they send is refused, and an honest rank is heard after it.
#include <sys/socket.h>

#include <list>
#include <tuple>

#include "base/deadline.hpp"
#include "base/hash.hpp"
#include "tests/commit/log_lines.hpp"
#include "tests/commit/server_fixture.hpp"

namespace deltasync::commit {
namespace {

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
  Peer earlier = peer();
  EXPECT_EQ(earlier.join(earlier.join_message(0, 2, 4)).error().code(), Errc::version_conflict) << "it has to stop";
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

/// Those who only connect keep out no rank, and a rank that has joined is not the one to go.
TEST_F(CommitServer, WhoDoesNotJoinMakesRoom) {
  const LogLines log;
  start(2, kToken, {kLimit, kLimit});  // so many connections take a while
  Peer member = peer();
  ASSERT_TRUE(member.join(member.join_message(0, 2, 5)));
  ASSERT_TRUE(member.report(busy(0, 5)));
  std::list<Peer> idle;
  while (!log.has("commit_connections_full") && idle.size() < 200) idle.push_back(peer());
  EXPECT_TRUE(log.has("which=oldest")) << log.text();
  EXPECT_EQ(idle.size(), 66u) << "2 ranks and 64 more; the member is one of them";
  EXPECT_EQ(idle.front().socket.recv(wire::kControlBytesMax, soon()).error().code(), Errc::connection);
  Peer& newest = idle.back();
  EXPECT_TRUE(newest.join(newest.join_message(1, 2, 5)));
  EXPECT_TRUE(member.report(busy(0, 5)));
  for (int i = 0; i < 3; ++i) idle.push_back(peer());
  EXPECT_TRUE(member.report(busy(0, 5)));
  EXPECT_TRUE(newest.report(busy(1, 5)));
  server_.reset();
}

}  // namespace
}  // namespace deltasync::commit
