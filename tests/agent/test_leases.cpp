#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <thread>

#include "agent/plans/lease_budgets.hpp"
#include "agent/versions/leases.hpp"

namespace deltasync::agent {
namespace {

class Leases : public ::testing::Test {
 protected:
  const HalfKey half0_{1, 0, 5};
  const HalfKey half1_{1, 1, 6};
  int changes_ = 0;
  LeaseTable table_{[this] { ++changes_; }};
};

TEST_F(Leases, AHalfIsIdleWithoutLeases) {
  EXPECT_TRUE(table_.idle(half0_));
  const auto lease = table_.begin(half0_);
  EXPECT_FALSE(table_.idle(half0_));
  EXPECT_FALSE(table_.generation_idle(1));
  EXPECT_TRUE(table_.generation_idle(2));
  EXPECT_TRUE(table_.idle(half1_));
  EXPECT_TRUE(table_.idle(HalfKey{1, 0, 6})) << "a later fill of the same half is another content";
  table_.end(*lease);
  EXPECT_TRUE(table_.idle(half0_));
  EXPECT_EQ(changes_, 1);
}

TEST_F(Leases, EndingTwiceIsHarmless) {
  const auto a = table_.begin(half0_);
  const auto b = table_.begin(half0_);
  table_.end(*a);
  table_.end(*a);
  EXPECT_FALSE(table_.idle(half0_));
  table_.end(*b);
  EXPECT_TRUE(table_.idle(half0_));
}

TEST_F(Leases, AReaderInsideKeepsTheHalfBusyAfterTheLeaseEnded) {
  const auto lease = table_.begin(half0_);
  std::optional<LeaseTable::Reader> reader;
  {
    auto entered = table_.enter(lease, [] {});
    ASSERT_TRUE(entered);
    reader.emplace(std::move(entered).value());
  }
  EXPECT_TRUE(reader->may_send());
  table_.end(*lease);
  EXPECT_FALSE(reader->may_send());
  EXPECT_FALSE(table_.idle(half0_));
  changes_ = 0;
  reader.reset();
  EXPECT_TRUE(table_.idle(half0_));
  EXPECT_EQ(changes_, 1) << "who waits for the half hears of it";
}

TEST_F(Leases, NobodyEntersAfterTheEnd) {
  const auto lease = table_.begin(half0_);
  table_.end(*lease);
  const auto entered = table_.enter(lease, [] {});
  ASSERT_FALSE(entered);
  EXPECT_EQ(entered.error().code(), Errc::lease_revoked);
}

TEST_F(Leases, RevocationEndsAllOfThisContentAndWakesTheirReaders) {
  const auto a = table_.begin(half0_);
  const auto b = table_.begin(half0_);
  const auto other = table_.begin(half1_);
  int woken = 0;
  const auto reader_a = table_.enter(a, [&] { ++woken; });
  const auto reader_other = table_.enter(other, [&] { woken += 100; });
  EXPECT_EQ(table_.revoke(half0_).size(), 2u);
  EXPECT_EQ(woken, 1);
  EXPECT_FALSE(a->live());
  EXPECT_FALSE(b->live());
  EXPECT_TRUE(other->live());
  EXPECT_FALSE(table_.idle(half0_));  // reader_a is still inside
  EXPECT_TRUE(table_.revoke(half0_).empty());
  EXPECT_EQ(woken, 1);
}

TEST_F(Leases, ListShowsWhoIsInside) {
  const auto lease = table_.begin(half0_);
  const auto reader = table_.enter(lease, [] {});
  table_.end(*lease);
  const auto list = table_.list();
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0].key, half0_);
  EXPECT_FALSE(list[0].live);
  EXPECT_EQ(list[0].readers, 1u);
}

/// Readers that check between pieces, against a revoker that overwrites as soon as the half is idle.
TEST(LeasesUnderThreads, NoReaderSeesAnOverwrite) {
  std::atomic<std::uint64_t> cell_a{0};
  std::atomic<std::uint64_t> cell_b{0};
  LeaseTable table([] {});
  std::atomic<bool> stop{false};
  std::atomic<int> torn{0};
  std::mutex current_mutex;
  LeasePtr current;
  const auto read_some = [&] {
    while (!stop) {
      LeasePtr lease;
      {
        const std::lock_guard lock(current_mutex);
        lease = current;
      }
      if (!lease) continue;
      const auto reader = table.enter(lease, [] {});
      if (!reader) continue;
      const std::uint64_t a = cell_a;
      std::this_thread::yield();
      const std::uint64_t b = cell_b;
      // Even after a revocation nothing changes while a reader is inside.
      if (a != b || a != lease->key().sequence) ++torn;
    }
  };
  std::thread one(read_some);
  std::thread two(read_some);
  for (std::uint64_t i = 1; i <= 2000; ++i) {
    cell_a = i;
    cell_b = i;
    const HalfKey key{1, 0, i};
    {
      const std::lock_guard lock(current_mutex);
      current = table.begin(key);
    }
    if (i % 16 == 0) std::this_thread::yield();
    table.revoke(key);
    while (!table.idle(key)) std::this_thread::yield();
  }
  stop = true;
  one.join();
  two.join();
  EXPECT_EQ(torn, 0);
}

TEST(LeaseBudgets, HalvedByALossAndDoubledByGivingBack) {
  using namespace std::chrono_literals;
  LeaseBudgets budgets(1000ms);
  EXPECT_EQ(budgets.of("a"), 1000ms);
  budgets.gave_back("a");
  EXPECT_EQ(budgets.of("a"), 1000ms);
  budgets.lost("a");
  EXPECT_EQ(budgets.of("a"), 500ms);
  EXPECT_EQ(budgets.of("b"), 1000ms);
  for (int i = 0; i < 7; ++i) budgets.lost("a");
  EXPECT_EQ(budgets.of("a"), 0ms);
  budgets.gave_back("a");
  EXPECT_EQ(budgets.of("a"), LeaseBudgets::kLeast);
  for (int i = 0; i < 7; ++i) budgets.gave_back("a");
  EXPECT_EQ(budgets.of("a"), 1000ms);
}

TEST(LeaseBudgets, WhoWasHeardOfLongestAgoIsForgotten) {
  using namespace std::chrono_literals;
  LeaseBudgets budgets(1000ms);
  for (std::size_t i = 0; i < LeaseBudgets::kPeersMax; ++i) budgets.lost("peer " + std::to_string(i));
  budgets.lost("peer 0");  // heard of again
  budgets.lost("another");
  EXPECT_EQ(budgets.of("peer 0"), 250ms);
  EXPECT_EQ(budgets.of("peer 1"), 1000ms);
  EXPECT_EQ(budgets.of("peer 2"), 500ms);
}

}  // namespace
}  // namespace deltasync::agent
