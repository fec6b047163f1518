// Blocks that go round: what was given back is given out again, and to one at a time.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "receiver/targets/recycled_bytes.hpp"

namespace deltasync {
namespace {

constexpr std::size_t kMin = BlockPool::kBlockMin;

TEST(BlockPool, GivesOutAgainWhatWasGivenBack) {
  BlockPool pool;
  void* const first = pool.take(1'000'000);
  std::memset(first, 1, 1'000'000);
  EXPECT_EQ(pool.idle_bytes(), 0U);
  pool.give_back(first, 1'000'000);
  EXPECT_GE(pool.idle_bytes(), 1'000'000U);
  EXPECT_EQ(pool.take(1'000'000), first);
  EXPECT_EQ(pool.idle_bytes(), 0U) << "it is taken";
  void* const second = pool.take(1'000'000);
  EXPECT_NE(second, first) << "the first is still in use";
  pool.give_back(first, 1'000'000);
  pool.give_back(second, 1'000'000);
}

TEST(BlockPool, SizesWasteAQuarterAtMostAndHoldWhatWasAskedFor) {
  for (std::size_t bytes = kMin; bytes < (std::size_t{64} << 20); bytes = bytes * 9 / 8 + 1) {
    BlockPool pool;
    void* const block = pool.take(bytes);
    std::memset(block, 2, bytes);  // AddressSanitizer sees a block that is too small
    pool.give_back(block, bytes);
    EXPECT_GE(pool.idle_bytes(), bytes);
    EXPECT_LE(pool.idle_bytes(), bytes + bytes / 4 + 1);
  }
}

/// A block goes to requests of its own size only. AddressSanitizer sees one that was given for a larger one.
TEST(BlockPool, AnotherSizeGetsRoomForIt) {
  BlockPool pool;
  for (std::size_t bytes = kMin; bytes < (std::size_t{1} << 22); bytes += bytes / 7 + 4097) {
    for (const std::size_t other : {bytes + bytes / 3, bytes + 2 * bytes, bytes - bytes / 2}) {
      if (other < kMin) continue;
      void* const block = pool.take(bytes);
      pool.give_back(block, bytes);
      void* const got = pool.take(other);
      std::memset(got, 3, other);
      pool.give_back(got, other);
      pool.trim();
    }
  }
}

TEST(BlockPool, TrimLeavesNothingIdleAndTouchesNothingInUse) {
  BlockPool pool;
  void* const used = pool.take(3 * kMin);
  std::memset(used, 7, 3 * kMin);
  for (int i = 1; i < 20; ++i) pool.give_back(pool.take(i * kMin), i * kMin);
  EXPECT_GT(pool.idle_bytes(), 0U);
  pool.trim();
  EXPECT_EQ(pool.idle_bytes(), 0U);
  for (std::size_t i = 0; i < 3 * kMin; ++i) ASSERT_EQ(static_cast<unsigned char*>(used)[i], 7);
  pool.give_back(used, 3 * kMin);
}

/// Changes of updates that grow move to the next size: what the smaller ones leave does not stay beside it.
TEST(BlockPool, SizesThatAreNotWantedAnyMoreGiveWay) {
  BlockPool pool;
  std::vector<void*> blocks(8);
  for (void*& block : blocks) block = pool.take(4 * kMin);
  for (void* block : blocks) pool.give_back(block, 4 * kMin);
  EXPECT_EQ(pool.idle_bytes(), 32 * kMin);
  for (void*& block : blocks) block = pool.take(5 * kMin);
  EXPECT_EQ(pool.idle_bytes(), 0U);
  for (void* block : blocks) pool.give_back(block, 5 * kMin);
  void* const small = pool.take(kMin);
  EXPECT_EQ(pool.idle_bytes(), 35 * kMin) << "no more than the one that was wanted";
  pool.give_back(small, kMin);
}

TEST(BlockPool, SmallOnesAreNotKept) {
  BlockPool pool;
  pool.give_back(pool.take(kMin - 1), kMin - 1);
  pool.give_back(pool.take(1), 1);
  EXPECT_EQ(pool.idle_bytes(), 0U);
}

TEST(BlockPool, ManyThreadsNeverShareABlock) {
  BlockPool pool;
  std::vector<std::jthread> threads;
  std::atomic<int> torn{0};
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, &torn, t] {
      for (std::size_t i = 0; i < 500; ++i) {
        const std::size_t bytes = kMin + i % 5 * (kMin / 2);
        auto* const block = static_cast<unsigned char*>(pool.take(bytes));
        std::memset(block, static_cast<int>(t + 1), bytes);
        if (i % 3 == 0) std::this_thread::yield();
        for (std::size_t at = 0; at < bytes; at += 4096) torn += block[at] == t + 1 ? 0 : 1;
        pool.give_back(block, bytes);
      }
    });
  }
  threads.clear();
  EXPECT_EQ(torn, 0);
}

TEST(RecycledBytes, AVectorsMemoryComesBackAndResizeLeavesItAlone) {
  const std::byte* at = nullptr;
  {
    RecycledBytes bytes(5 * kMin);
    at = bytes.data();
    bytes[kMin] = std::byte{9};
  }
  const RecycledBytes again(5 * kMin);
  EXPECT_EQ(again.data(), at);
  EXPECT_EQ(again[kMin], std::byte{9});
  EXPECT_EQ(RecycledBytes(3, std::byte{4})[2], std::byte{4});
}

}  // namespace
}  // namespace deltasync
