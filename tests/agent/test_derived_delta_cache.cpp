// The bookkeeping of merged deltas: who is wanted, what is kept, what goes.
#include <gtest/gtest.h>

#include <algorithm>

#include "agent/derive/derived_delta_cache.hpp"

namespace deltasync::agent {
namespace {

using State = DerivedDeltaCache::State;

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

DeltaKey key(std::uint64_t from, std::uint64_t to, DeltaForm form = DeltaForm::plain) {
  return {{7, from}, root_of(from), {7, to}, form};
}

std::vector<RingEntryPtr> ring(std::uint64_t from, std::uint64_t to) {
  std::vector<RingEntryPtr> out;
  for (std::uint64_t i = from; i < to; ++i) out.push_back(entry(i, i + 1));
  return out;
}

/// Wanted and made.
std::vector<RingEntryPtr> make(DerivedDeltaCache& cache, std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
  const DerivedDeltaCache::Request request = cache.request(key(from, to));
  EXPECT_TRUE(request);
  return cache.put(key(from, to), entry(from, to, bytes));
}

TEST(DerivedDeltaCache, MakesWhatWasWantedFirst) {
  DerivedDeltaCache cache(100);
  EXPECT_EQ(cache.begin(DeltaForm::plain), std::nullopt);
  const auto first = cache.request(key(1, 4));
  const auto second = cache.request(key(2, 4));
  EXPECT_TRUE(first && second);
  EXPECT_EQ(cache.request(key(1, 4)), first) << "twice is once";
  EXPECT_EQ(cache.wanted(), 2u);
  EXPECT_EQ(cache.begin(DeltaForm::compact), std::nullopt);
  EXPECT_EQ(cache.begin(DeltaForm::plain), key(1, 4));
  EXPECT_EQ(cache.state(key(1, 4)), State::wanted);
  EXPECT_EQ(cache.find(key(1, 4)), nullptr);
  EXPECT_EQ(cache.begin(DeltaForm::plain), key(2, 4)) << "each is begun once";
  EXPECT_EQ(cache.begin(DeltaForm::plain), std::nullopt);
  const RingEntryPtr made = entry(1, 4, 10);
  EXPECT_TRUE(cache.put(key(1, 4), made).empty());
  EXPECT_EQ(cache.state(key(1, 4)), State::made);
  EXPECT_EQ(cache.find(key(1, 4)), made);
  EXPECT_EQ(cache.request(key(1, 4)), nullptr) << "it is there";
  EXPECT_EQ(cache.bytes(), 10u);
  cache.fail(key(2, 4));
  EXPECT_EQ(cache.state(key(2, 4)), State::impossible);
  EXPECT_EQ(cache.request(key(2, 4)), nullptr) << "it would fail again";
  EXPECT_EQ(cache.wanted(), 0u);
}

TEST(DerivedDeltaCache, WhatNobodyWaitsForIsNotBegun) {
  DerivedDeltaCache cache(100);
  auto first = cache.request(key(1, 4));
  auto again = cache.request(key(1, 4));
  auto second = cache.request(key(2, 4));
  first.reset();
  EXPECT_EQ(cache.state(key(1, 4)), State::wanted) << "one of two has left";
  again.reset();
  EXPECT_EQ(cache.state(key(1, 4)), State::none);
  EXPECT_EQ(cache.wanted(), 1u);
  EXPECT_EQ(cache.begin(DeltaForm::plain), key(2, 4));
  second.reset();
  EXPECT_EQ(cache.state(key(2, 4)), State::wanted) << "begun is made";
  EXPECT_TRUE(cache.request(key(2, 4))) << "for whom it is good";
  EXPECT_EQ(cache.wanted(), 1u);
  EXPECT_EQ(cache.begin(DeltaForm::plain), std::nullopt);
  EXPECT_TRUE(cache.put(key(2, 4), entry(2, 4, 10)).empty());
  EXPECT_EQ(cache.state(key(2, 4)), State::made);
  EXPECT_EQ(cache.state(key(1, 4)), State::none);
  first = cache.request(key(1, 4));
  EXPECT_EQ(cache.begin(DeltaForm::plain), key(1, 4)) << "it may be wanted again";
}

TEST(DerivedDeltaCache, TheRootIsPartOfTheName) {
  DerivedDeltaCache cache(100);
  static_cast<void>(make(cache, 1, 4, 10));
  DeltaKey other = key(1, 4);
  other.from_root.bytes[5] ^= 1;
  EXPECT_EQ(cache.state(other), State::none);
}

TEST(DerivedDeltaCache, BothFormsShareTheBytes) {
  DerivedDeltaCache cache(100);
  const DeltaKey compact = key(1, 4, DeltaForm::compact);
  static_cast<void>(make(cache, 1, 4, 60));
  EXPECT_EQ(cache.state(compact), State::none);
  const auto request = cache.request(compact);
  EXPECT_EQ(cache.begin(DeltaForm::compact), compact);
  EXPECT_EQ(cache.put(compact, entry(1, 4, 41)).size(), 1u) << "the other is older";
  EXPECT_EQ(cache.state(key(1, 4)), State::none);
  EXPECT_EQ(cache.state(compact), State::made);
  EXPECT_EQ(cache.bytes(), 41u);
  EXPECT_EQ(cache.retain(ring(2, 4)).size(), 1u) << "its base is gone";
  EXPECT_EQ(cache.state(compact), State::none);
}

TEST(DerivedDeltaCache, WhatWasMadeFromAnotherRevisionOfTheRingIsAnotherDelta) {
  DerivedDeltaCache cache(100);
  static_cast<void>(make(cache, 1, 4, 60));
  DeltaKey amended = key(1, 4);
  amended.revision = 1;
  EXPECT_EQ(cache.find(amended), nullptr);
  EXPECT_EQ(cache.state(amended), State::none);
  EXPECT_EQ(cache.retain(ring(1, 4), 0).size(), 0u);
  EXPECT_EQ(cache.retain(ring(1, 4), 1).size(), 1u) << "both ends are there, and other deltas between them";
  EXPECT_EQ(cache.state(key(1, 4)), State::none);
  EXPECT_EQ(cache.bytes(), 0u);
  EXPECT_EQ(cache.request(key(1, 4)), nullptr) << "by one who still looks at the ring before";
  EXPECT_NE(cache.request(amended), nullptr);
}

TEST(DerivedDeltaCache, EvictsTheOldestOverItsBytes) {
  DerivedDeltaCache cache(100);
  EXPECT_TRUE(make(cache, 1, 4, 40).empty());
  EXPECT_TRUE(make(cache, 2, 4, 40).empty());
  const auto before = cache.request(key(0, 4));  // wanted before, made last
  EXPECT_TRUE(make(cache, 3, 5, 20).empty());
  EXPECT_EQ(cache.bytes(), 100u);
  auto evicted = cache.put(key(0, 4), entry(0, 4, 41));
  ASSERT_EQ(evicted.size(), 2u);
  EXPECT_EQ(evicted[0]->from.id.number, 1u);
  EXPECT_EQ(evicted[1]->from.id.number, 2u);
  EXPECT_EQ(cache.bytes(), 61u);
  EXPECT_EQ(cache.state(key(1, 4)), State::none);
  EXPECT_TRUE(cache.request(key(1, 4))) << "and may be made again";
  const auto kept = cache.entries();
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_EQ(kept[0]->from.id.number, 3u);
  EXPECT_EQ(kept[1]->from.id.number, 0u);
}

TEST(DerivedDeltaCache, WhatIsLargerThanTheBoundEvictsNothing) {
  DerivedDeltaCache cache(100);
  EXPECT_TRUE(make(cache, 1, 4, 40).empty());
  const auto evicted = make(cache, 2, 4, 101);
  ASSERT_EQ(evicted.size(), 1u);
  EXPECT_EQ(evicted[0]->from.id.number, 2u);
  EXPECT_EQ(cache.state(key(2, 4)), State::impossible);
  EXPECT_EQ(cache.state(key(1, 4)), State::made);
  EXPECT_EQ(cache.bytes(), 40u);
}

TEST(DerivedDeltaCache, ForgetsWhatNobodyCanAskFor) {
  DerivedDeltaCache cache(100);
  static_cast<void>(make(cache, 1, 4, 10));
  static_cast<void>(make(cache, 2, 4, 20));
  const std::vector<DerivedDeltaCache::Request> requests = {cache.request(key(1, 5)), cache.request(key(2, 5))};
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

TEST(DerivedDeltaCache, RequestsAreBounded) {
  DerivedDeltaCache cache(100, 2);
  const auto first = cache.request(key(1, 4));
  const auto second = cache.request(key(2, 4));
  EXPECT_EQ(cache.request(key(3, 5)), nullptr);
  EXPECT_EQ(cache.request(key(1, 4)), first) << "with those who want it there is room";
  cache.forget(key(1, 4));
  const auto third = cache.request(key(3, 5));
  EXPECT_TRUE(third);
  // What is impossible takes no bytes, but room.
  std::uint64_t failed = 0;
  for (std::uint64_t to = 10; to < 2000; ++to) {
    cache.forget(key(2, 4));
    const auto request = cache.request(key(1, to));
    if (!request) break;
    cache.fail(key(1, to));
    ++failed;
  }
  EXPECT_LT(failed, 300u);
}

/// They take long to make, and would hold up all others.
TEST(DerivedDeltaCache, HalfOfTheRequestsMayBeForCompactOnes) {
  DerivedDeltaCache cache(100, 8);
  std::vector<DerivedDeltaCache::Request> requests;
  const auto request = [&](std::uint64_t from, DeltaForm form) {
    DerivedDeltaCache::Request taken = cache.request(key(from, 50, form));
    if (taken) requests.push_back(taken);
    return taken != nullptr;
  };
  for (std::uint64_t from = 1; from <= 4; ++from) EXPECT_TRUE(request(from, DeltaForm::compact));
  EXPECT_FALSE(request(5, DeltaForm::compact));
  EXPECT_EQ(cache.begin(DeltaForm::compact), key(1, 50, DeltaForm::compact));
  EXPECT_FALSE(request(5, DeltaForm::compact)) << "what is begun counts";
  for (std::uint64_t from = 1; from <= 4; ++from) EXPECT_TRUE(request(from, DeltaForm::plain));
  EXPECT_FALSE(request(5, DeltaForm::plain));
  cache.forget(key(1, 50, DeltaForm::compact));
  EXPECT_TRUE(request(5, DeltaForm::compact));
  requests.clear();
  EXPECT_TRUE(request(6, DeltaForm::compact)) << "nobody waits for the others any more";
  EXPECT_EQ(cache.wanted(), 1u);
  for (std::uint64_t from = 1; from <= 7; ++from) EXPECT_TRUE(request(from, DeltaForm::plain));
  EXPECT_FALSE(request(8, DeltaForm::plain));
}

}  // namespace
}  // namespace deltasync::agent
