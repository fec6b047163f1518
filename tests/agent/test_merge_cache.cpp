// The bookkeeping of merged deltas: who is wanted, what is kept, what goes.
#include <gtest/gtest.h>

#include "agent/merge_cache.hpp"

namespace deltasync::agent {
namespace {

using State = MergeCache::State;

Digest128 root_of(std::uint64_t number) {
  Digest128 digest;
  digest.bytes[0] = static_cast<std::uint8_t>(number);
  return digest;
}

RingEntryPtr entry(std::uint64_t from, std::uint64_t to, std::uint64_t bytes = 1) {
  delta::Delta delta;
  delta.from = {7, from};
  delta.to = {7, to};
  delta.from_root = root_of(from);
  delta.to_root = root_of(to);
  delta.frame_bytes = bytes;
  return RingEntry::make(std::move(delta), {{7, from}, ""}, {{7, to}, ""}, 0);
}

MergeKey key(std::uint64_t from, std::uint64_t to) {
  return {{7, from}, root_of(from), {7, to}};
}

std::deque<RingEntryPtr> ring(std::uint64_t from, std::uint64_t to) {
  std::deque<RingEntryPtr> out;
  for (std::uint64_t i = from; i < to; ++i) out.push_back(entry(i, i + 1));
  return out;
}

/// Wanted and made.
std::vector<RingEntryPtr> make(MergeCache& cache, std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
  EXPECT_TRUE(cache.want(key(from, to)));
  return cache.put(key(from, to), entry(from, to, bytes));
}

TEST(MergeCache, MakesWhatWasWantedFirst) {
  MergeCache cache(100);
  EXPECT_EQ(cache.next(), std::nullopt);
  EXPECT_TRUE(cache.want(key(1, 4)));
  EXPECT_TRUE(cache.want(key(2, 4)));
  EXPECT_FALSE(cache.want(key(1, 4))) << "twice";
  EXPECT_EQ(cache.wanted(), 2u);
  EXPECT_EQ(cache.next(), key(1, 4));
  EXPECT_EQ(cache.state(key(1, 4)), State::wanted);
  EXPECT_EQ(cache.find(key(1, 4)), nullptr);
  const RingEntryPtr made = entry(1, 4, 10);
  EXPECT_TRUE(cache.put(key(1, 4), made).empty());
  EXPECT_EQ(cache.state(key(1, 4)), State::made);
  EXPECT_EQ(cache.find(key(1, 4)), made);
  EXPECT_EQ(cache.bytes(), 10u);
  EXPECT_EQ(cache.next(), key(2, 4));
  cache.fail(key(2, 4));
  EXPECT_EQ(cache.state(key(2, 4)), State::impossible);
  EXPECT_FALSE(cache.want(key(2, 4))) << "it would fail again";
  EXPECT_EQ(cache.next(), std::nullopt);
}

TEST(MergeCache, TheRootIsPartOfTheName) {
  MergeCache cache(100);
  static_cast<void>(make(cache, 1, 4, 10));
  MergeKey other = key(1, 4);
  other.from_root.bytes[5] ^= 1;
  EXPECT_EQ(cache.state(other), State::none);
}

TEST(MergeCache, BothFormsShareTheBytes) {
  MergeCache cache(100);
  MergeKey compact = key(1, 4);
  compact.form = DeltaForm::compact;
  static_cast<void>(make(cache, 1, 4, 60));
  EXPECT_EQ(cache.state(compact), State::none);
  EXPECT_TRUE(cache.want(compact));
  EXPECT_EQ(cache.put(compact, entry(1, 4, 41)).size(), 1u) << "the other is older";
  EXPECT_EQ(cache.state(key(1, 4)), State::none);
  EXPECT_EQ(cache.state(compact), State::made);
  EXPECT_EQ(cache.bytes(), 41u);
  EXPECT_EQ(cache.retain(ring(2, 4)).size(), 1u) << "its base is gone";
  EXPECT_EQ(cache.state(compact), State::none);
}

TEST(MergeCache, EvictsTheOldestOverItsBytes) {
  MergeCache cache(100);
  EXPECT_TRUE(make(cache, 1, 4, 40).empty());
  EXPECT_TRUE(make(cache, 2, 4, 40).empty());
  EXPECT_TRUE(cache.want(key(0, 4)));  // wanted before, made last
  EXPECT_TRUE(make(cache, 3, 5, 20).empty());
  EXPECT_EQ(cache.bytes(), 100u);
  auto evicted = cache.put(key(0, 4), entry(0, 4, 41));
  ASSERT_EQ(evicted.size(), 2u);
  EXPECT_EQ(evicted[0]->from.id.number, 1u);
  EXPECT_EQ(evicted[1]->from.id.number, 2u);
  EXPECT_EQ(cache.bytes(), 61u);
  EXPECT_EQ(cache.state(key(1, 4)), State::none);
  EXPECT_TRUE(cache.want(key(1, 4))) << "and may be made again";
  const auto kept = cache.entries();
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_EQ(kept[0]->from.id.number, 3u);
  EXPECT_EQ(kept[1]->from.id.number, 0u);
}

TEST(MergeCache, WhatIsLargerThanTheBoundEvictsNothing) {
  MergeCache cache(100);
  EXPECT_TRUE(make(cache, 1, 4, 40).empty());
  const auto evicted = make(cache, 2, 4, 101);
  ASSERT_EQ(evicted.size(), 1u);
  EXPECT_EQ(evicted[0]->from.id.number, 2u);
  EXPECT_EQ(cache.state(key(2, 4)), State::impossible);
  EXPECT_EQ(cache.state(key(1, 4)), State::made);
  EXPECT_EQ(cache.bytes(), 40u);
}

TEST(MergeCache, ForgetsWhatNobodyCanAskFor) {
  MergeCache cache(100);
  static_cast<void>(make(cache, 1, 4, 10));
  static_cast<void>(make(cache, 2, 4, 20));
  EXPECT_TRUE(cache.want(key(1, 5)));
  EXPECT_TRUE(cache.want(key(2, 5)));
  cache.fail(key(2, 5));
  auto gone = cache.retain(ring(2, 6));
  ASSERT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone[0]->from.id.number, 1u);
  EXPECT_EQ(cache.bytes(), 20u);
  EXPECT_EQ(cache.state(key(1, 5)), State::none) << "wanted, but its base left the ring";
  EXPECT_EQ(cache.state(key(2, 4)), State::made) << "a past version can still be asked for";
  EXPECT_EQ(cache.state(key(2, 5)), State::impossible);
  // One that was being made when its base left.
  gone = cache.put(key(1, 5), entry(1, 5, 10));
  EXPECT_EQ(gone.size(), 1u);
  EXPECT_EQ(cache.bytes(), 20u);
  EXPECT_EQ(cache.retain({}).size(), 1u);
  EXPECT_EQ(cache.bytes(), 0u);
  EXPECT_TRUE(cache.entries().empty());
}

TEST(MergeCache, WishesAreBounded) {
  MergeCache cache(100, 2);
  EXPECT_TRUE(cache.want(key(1, 4)));
  EXPECT_TRUE(cache.want(key(2, 4)));
  EXPECT_FALSE(cache.want(key(3, 5)));
  cache.forget(key(1, 4));
  EXPECT_TRUE(cache.want(key(3, 5)));
  // What is impossible takes no bytes, but room.
  std::uint64_t failed = 0;
  for (std::uint64_t to = 10; to < 2000; ++to) {
    cache.forget(key(2, 4));
    if (!cache.want(key(1, to))) break;
    cache.fail(key(1, to));
    ++failed;
  }
  EXPECT_LT(failed, 300u);
}

}  // namespace
}  // namespace deltasync::agent
