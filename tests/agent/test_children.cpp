// Who gets a place at an agent with --children-max, and where the others are sent.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "agent/serve/children.hpp"

namespace deltasync::agent {
namespace {

using Endpoints = std::vector<std::string>;

/// A relay that has a version, on a connection of its own.
void add_relay(Children& children, std::uint64_t connection, const std::string& endpoint) {
  children.relays(connection, 1000 + connection, endpoint);
  EXPECT_FALSE(children.ask(connection, true));
  children.stands(connection, true);
}

TEST(Children, AnyNumberIfNoneIsSaid) {
  Children children(0);
  for (std::uint64_t c = 1; c < 100; ++c) EXPECT_FALSE(children.ask(c, true));
}

TEST(Children, OneTooManyIsSentToWhoWasSentTheFewest) {
  Children children(2);
  add_relay(children, 1, "a:1");
  add_relay(children, 2, "b:1");
  EXPECT_EQ(children.count(), 2u);
  EXPECT_EQ(children.ask(3, true)->endpoints, (Endpoints{"a:1", "b:1"}));
  EXPECT_EQ(children.ask(4, true)->endpoints, (Endpoints{"b:1", "a:1"}));
  EXPECT_EQ(children.ask(5, false)->endpoints, (Endpoints{"a:1", "b:1"}));
  EXPECT_EQ(children.ask(6, true)->endpoints, (Endpoints{"b:1", "a:1"}));
  EXPECT_FALSE(children.ask(1, true)) << "who has a place keeps it";
  children.left(2);
  EXPECT_FALSE(children.ask(7, true)) << "a place is free";
  EXPECT_EQ(children.ask(8, true)->endpoints, (Endpoints{"a:1"}));
}

TEST(Children, NobodyIsSentToARelayThatHasNothingYetOrIsInTrouble) {
  Children children(1);
  children.relays(1, 11, "a:1");
  EXPECT_FALSE(children.ask(1, true));
  EXPECT_EQ(children.ask(2, true)->endpoints, Endpoints());
  children.stands(1, true);
  EXPECT_EQ(children.ask(2, true)->endpoints, (Endpoints{"a:1"}));
  children.stands(1, false);
  EXPECT_EQ(children.ask(2, true)->endpoints, Endpoints());
}

/// So that a tree comes about no matter who came first.
TEST(Children, ARelayTakesThePlaceOfTheReceiverThatCameLast) {
  Children children(2);
  EXPECT_FALSE(children.ask(1, true));
  EXPECT_FALSE(children.ask(2, true));
  children.relays(3, 13, "a:1");
  EXPECT_FALSE(children.ask(3, true));
  EXPECT_EQ(children.count(), 3u);
  EXPECT_FALSE(children.must_go(2)) << "there is nowhere to go";
  EXPECT_FALSE(children.ask(2, true));
  children.stands(3, true);
  EXPECT_FALSE(children.must_go(1));
  EXPECT_FALSE(children.must_go(3));
  EXPECT_TRUE(children.must_go(2));
  EXPECT_EQ(children.ask(2, true)->endpoints, (Endpoints{"a:1"}));
  EXPECT_EQ(children.count(), 2u);
  EXPECT_FALSE(children.must_go(1));
  EXPECT_FALSE(children.ask(1, true));
  // Relays that come now take the last place that a receiver has, and no relay's.
  add_relay(children, 4, "b:1");
  EXPECT_TRUE(children.must_go(1));
  EXPECT_TRUE(children.ask(1, true));
  children.relays(5, 15, "c:1");
  EXPECT_EQ(children.ask(5, true)->endpoints, (Endpoints{"a:1", "b:1"}));
}

TEST(Children, OneThatCannotFollowKeepsItsPlace) {
  Children children(1);
  EXPECT_FALSE(children.ask(1, false));
  children.relays(2, 12, "a:1");
  EXPECT_TRUE(children.ask(2, true));
  EXPECT_FALSE(children.ask(1, false));
}

TEST(Children, ARelayIsNotSentToItsOwnAgent) {
  Children children(2);
  add_relay(children, 1, "a:1");
  add_relay(children, 2, "b:1");
  children.relays(3, 1001, "a:1");
  EXPECT_EQ(children.ask(3, true)->endpoints, (Endpoints{"b:1"}));
}

/// Its new connection may ask before the end of the one before is seen.
TEST(Children, AReceiverThatConnectsAgainKeepsItsPlace) {
  Children children(1);
  children.is(1, 77);
  EXPECT_FALSE(children.ask(1, true));
  EXPECT_TRUE(children.ask(2, true));
  children.is(3, 77);
  EXPECT_FALSE(children.ask(3, true));
  children.left(1);
  EXPECT_EQ(children.count(), 1u);
  EXPECT_TRUE(children.ask(2, true));
}

/// Its process may be stopped, or gone with its socket held by a forked child.
TEST(Children, OneThatIsSilentForLongMakesWay) {
  using std::chrono::seconds;
  const Children::Clock::time_point start{};
  Children children(2, seconds(120));
  children.relays(1, 11, "a:1");
  EXPECT_FALSE(children.ask(1, true, start));
  children.stands(1, true);
  EXPECT_FALSE(children.ask(2, true, start));
  children.heard(2, start + seconds(60));
  EXPECT_EQ(children.ask(3, true, start + seconds(120))->endpoints, (Endpoints{"a:1"}));
  EXPECT_EQ(children.endpoints(start + seconds(121)), Endpoints()) << "nobody is sent to a relay that is silent";
  EXPECT_FALSE(children.ask(1, true, start + seconds(130))) << "it keeps its place while nobody asks for it";
  EXPECT_TRUE(children.ask(3, true, start + seconds(180)));
  EXPECT_FALSE(children.ask(3, true, start + seconds(181)));
  EXPECT_EQ(children.ask(2, true, start + seconds(182))->endpoints, (Endpoints{"a:1"}));
  children.heard(4, start + seconds(182));
  EXPECT_EQ(children.count(), 2u);
}

}  // namespace
}  // namespace deltasync::agent
