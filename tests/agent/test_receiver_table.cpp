// What the agent remembers of publications and receivers, without an agent.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "agent/serve/receiver_table.hpp"
#include "agent/versions/publications.hpp"

namespace deltasync::agent {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr Clock::time_point kStart{1000s};

class Published : public ::testing::Test {
 protected:
  Published() {
    for (std::uint64_t number = 1; number <= 3; ++number) log_.add({7, number}, kStart + number * 10s);
  }
  Behind behind(const VersionId& held) const { return log_.behind(held, kStart + 100s); }
  Publications log_;
};

TEST_F(Published, WhoHoldsTheNewestIsBehindByNothing) {
  EXPECT_EQ(behind({7, 3}), Behind());
}

TEST_F(Published, TimeIsSinceTheFirstThatIsMissing) {
  EXPECT_EQ(behind({7, 2}), (Behind{1, 70s}));
  EXPECT_EQ(behind({7, 1}), (Behind{2, 80s}));
}

TEST_F(Published, WhoHoldsNothingOrSomethingForgottenLacksAll) {
  EXPECT_EQ(behind({}), (Behind{3, 90s}));
  EXPECT_EQ(behind({6, 12}), (Behind{3, 90s}));
  EXPECT_EQ(behind({8, 1}), (Behind{3, 90s})) << "of an agent that was lost: it holds none of these";
}

TEST_F(Published, NumbersThatWereLeftOutCountForNothing) {
  log_.add({7, 50}, kStart + 90s);
  EXPECT_EQ(behind({7, 3}), (Behind{1, 10s}));
  EXPECT_EQ(behind({7, 40}), (Behind{1, 10s}));
}

TEST_F(Published, AnEpochMayEndBehindAnotherOne) {
  log_.add({9, 1}, kStart + 95s);
  EXPECT_EQ(behind({7, 3}), (Behind{1, 5s}));
  EXPECT_EQ(behind({9, 1}), Behind());
}

TEST_F(Published, SoManyAreRememberedAndNoMore) {
  for (std::uint64_t number = 4; number <= 2 * Publications::kRememberedMax; ++number) {
    log_.add({7, number}, kStart + 50s);
  }
  EXPECT_EQ(behind({7, 1}).versions, Publications::kRememberedMax);
}

/// Against what it means: a walk over all that are remembered.
TEST(Publications, ALookSaysWhatAWalkWould) {
  std::mt19937_64 random(5);
  Publications log;
  std::vector<VersionId> all;
  const auto walk = [&](const VersionId& held) -> std::uint64_t {
    const std::size_t first = all.size() - std::min(all.size(), Publications::kRememberedMax);
    for (std::size_t i = all.size(); i-- > first;) {
      if (all[i] == held) return all.size() - i - 1;
    }
    if (held.epoch == all.back().epoch && held.number > all.back().number) return 0;
    for (std::size_t i = first; i < all.size(); ++i) {
      if (held < all[i]) return all.size() - i;
    }
    return all.size() - first;
  };
  for (std::uint64_t number = 1; number <= 3 * Publications::kRememberedMax; ++number) {
    // Gaps, and now and then the same one again, as after damage.
    const VersionId id = random() % 8 == 0 && !all.empty() ? all.back() : VersionId{7 + number / 5000, 3 * number};
    all.push_back(id);
    log.add(id, kStart);
    if (number % 64 != 0) continue;
    const VersionId near = all[random() % all.size()];
    for (const VersionId& held : {near, VersionId{near.epoch, near.number + 1}, VersionId{}, VersionId{99, 1}}) {
      ASSERT_EQ(log.behind(held, kStart).versions, walk(held)) << number << " " << to_string(held);
    }
  }
}

TEST(Publications, NothingPublishedNobodyBehind) {
  EXPECT_EQ(Publications().behind({7, 1}, kStart), Behind());
}

/// A relay hands a version on before it has it served. An epoch that counts as earlier may follow.
TEST(Publications, WhoIsAheadIsNotBehind) {
  Publications log;
  for (std::uint64_t number = 1; number <= 5; ++number) log.add({900, number}, kStart);
  EXPECT_EQ(log.behind({900, 6}, kStart), Behind());
  EXPECT_EQ(log.behind({901, 1}, kStart).versions, 5u) << "of an agent that was lost";
  log.add({800, 1}, kStart);
  EXPECT_EQ(log.behind({800, 2}, kStart), Behind());
  EXPECT_EQ(log.behind({900, 6}, kStart).versions, 6u);
}

class Table : public ::testing::Test {
 protected:
  static ReceiverTable::Peer peer(std::uint64_t connection, std::string name = "rank", std::string host = "10.0.0.1") {
    return {connection, std::move(name), host + ":" + std::to_string(40'000 + connection)};
  }
  ReceiverTable table_{10min};
};

TEST_F(Table, AReceiverIsOneOverItsConnections) {
  table_.report(peer(1), 77, {{7, 1}, "one"}, "");
  table_.left(1, kStart);
  table_.report(peer(5), 77, {{7, 2}, "two"}, "no space");
  const auto rows = table_.rows(kStart);
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].committed.label, "two");
  EXPECT_EQ(rows[0].error, "no space");
  EXPECT_EQ(rows[0].connection, 5u);
  EXPECT_EQ(rows[0].host, "10.0.0.1");
  EXPECT_EQ(rows[0].address, "10.0.0.1:40005");
}

TEST_F(Table, TheEndOfAnOldConnectionIsNotTheReceivers) {
  table_.report(peer(1), 77, {}, "");
  table_.report(peer(2), 77, {}, "");
  table_.left(1, kStart);
  EXPECT_EQ(table_.rows(kStart)[0].connection, 2u);
}

TEST_F(Table, NamesakesAreToldApartAndFreeNumbersUsedAgain) {
  table_.report(peer(1), 71, {}, "");
  table_.report(peer(2), 72, {}, "");
  table_.report(peer(3, "rank", "10.0.0.2"), 73, {}, "");
  auto rows = table_.rows(kStart);
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].ordinal, 0u);
  EXPECT_EQ(rows[1].ordinal, 1u);
  EXPECT_EQ(rows[2].ordinal, 0u) << "another host";
  table_.left(1, kStart);
  table_.report(peer(4), 74, {}, "");
  EXPECT_EQ(table_.rows(kStart)[3].ordinal, 2u) << "it is remembered";
  EXPECT_EQ(table_.rows(kStart + 10min).size(), 3u);
  table_.report(peer(6), 76, {}, "");
  EXPECT_EQ(table_.rows(kStart + 10min).back().ordinal, 0u);
}

TEST_F(Table, WhoDoesNotReportIsKnownByWhatItPlansFrom) {
  table_.named_base(peer(1), {});
  EXPECT_FALSE(table_.rows(kStart)[0].committed.id.valid());
  table_.named_base(peer(1), {7, 4});
  ASSERT_EQ(table_.rows(kStart).size(), 1u);
  EXPECT_EQ(table_.rows(kStart)[0].committed.id, (VersionId{7, 4}));
}

TEST_F(Table, WhoLeavesWithoutAGoodbyeIsLost) {
  table_.report(peer(1), 71, {}, "");
  table_.report(peer(2), 72, {}, "");
  table_.named_base(peer(3), {7, 4});
  table_.goodbye(1);
  EXPECT_EQ(table_.rows(kStart)[0].connection, 1u) << "it is there until its connection ends";
  for (std::uint64_t i = 1; i <= 3; ++i) table_.left(i, kStart);
  auto rows = table_.rows(kStart);
  EXPECT_FALSE(rows[0].lost);
  EXPECT_TRUE(rows[1].lost);
  EXPECT_FALSE(rows[2].lost) << "it knows no goodbye";
  table_.report(peer(4), 71, {}, "");
  table_.report(peer(5), 72, {}, "");
  EXPECT_FALSE(table_.rows(kStart)[1].lost) << "it is back";
  table_.left(4, kStart);
  EXPECT_TRUE(table_.rows(kStart)[0].lost) << "of this connection it has not said goodbye";
}

TEST_F(Table, OnlySoManyThatHaveLeftAreRemembered) {
  for (std::uint64_t i = 1; i <= ReceiverTable::kGoneMax + 50; ++i) {
    table_.report(peer(i), i, {}, "");
    table_.left(i, kStart + std::chrono::milliseconds(i));
  }
  const auto rows = table_.rows(kStart + 1s);
  ASSERT_EQ(rows.size(), ReceiverTable::kGoneMax);
  EXPECT_EQ(rows.front().address, "10.0.0.1:40051") << "the first ones went";
}

}  // namespace
}  // namespace deltasync::agent
