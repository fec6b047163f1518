#include <gtest/gtest.h>

#include "agent/versions/ring.hpp"
#include "base/hash.hpp"

namespace deltasync::agent {
namespace {

constexpr std::uint64_t kHalfBytes = 1000;

Digest128 root_of(std::uint64_t number) {
  Digest128 digest;
  digest.bytes[0] = static_cast<std::uint8_t>(number);
  return digest;
}

RingEntryPtr entry(std::uint64_t from, std::uint64_t bytes) {
  delta::Delta delta;
  delta.from = {7, from};
  delta.to = {7, from + 1};
  delta.from_root = root_of(from);
  delta.to_root = root_of(from + 1);
  delta::Frame frame;
  frame.bytes.assign(bytes, static_cast<std::byte>(from));
  delta.frame_bytes = bytes;
  delta.frames.push_back(std::move(frame));
  return RingEntry::make(std::move(delta), {{7, from}, ""}, {{7, from + 1}, ""}, 0);
}

std::vector<std::uint64_t> held(const DeltaRing& ring) {
  std::vector<std::uint64_t> from;
  for (const auto& e : ring.entries()) from.push_back(e->from.id.number);
  return from;
}
using Numbers = std::vector<std::uint64_t>;

TEST(DeltaRing, HashesItsFramesForTheWire) {
  const auto e = entry(1, 100);
  ASSERT_EQ(e->frame_hashes.size(), 1u);
  EXPECT_EQ(e->frame_hashes[0], xxh3_64(e->delta->frames[0].bytes));
}

TEST(DeltaRing, EvictsTheOldestOverItsBytes) {
  DeltaRing ring(300, 100);
  EXPECT_TRUE(ring.push(entry(1, 100), kHalfBytes).empty());
  EXPECT_TRUE(ring.push(entry(2, 100), kHalfBytes).empty());
  EXPECT_TRUE(ring.push(entry(3, 100), kHalfBytes).empty());
  EXPECT_EQ(ring.bytes(), 300u);
  const auto evicted = ring.push(entry(4, 101), kHalfBytes);
  EXPECT_EQ(evicted.size(), 2u);
  EXPECT_EQ(held(ring), (Numbers{3, 4}));
  EXPECT_EQ(ring.bytes(), 201u);
}

TEST(DeltaRing, EvictsTheOldestOverItsCount) {
  DeltaRing ring(1000, 2);
  for (std::uint64_t i = 1; i <= 4; ++i) static_cast<void>(ring.push(entry(i, 1), kHalfBytes));
  EXPECT_EQ(held(ring), (Numbers{3, 4}));
}

TEST(DeltaRing, KeepsTheNewestWhileItIsSmallerThanAHalf) {
  DeltaRing ring(300, 100);
  static_cast<void>(ring.push(entry(1, 100), kHalfBytes));
  static_cast<void>(ring.push(entry(2, 999), kHalfBytes));
  EXPECT_EQ(held(ring), Numbers{2});
  static_cast<void>(ring.push(entry(3, 1000), kHalfBytes));
  EXPECT_TRUE(ring.entries().empty());
  EXPECT_EQ(ring.bytes(), 0u);
  // And goes on from there.
  static_cast<void>(ring.push(entry(4, 10), kHalfBytes));
  EXPECT_EQ(held(ring), Numbers{4});
}

TEST(DeltaRing, AGapEmptiesIt) {
  DeltaRing ring(300, 100);
  static_cast<void>(ring.push(entry(1, 10), kHalfBytes));
  static_cast<void>(ring.push(entry(2, 10), kHalfBytes));
  EXPECT_EQ(ring.push(entry(4, 10), kHalfBytes).size(), 2u);
  EXPECT_EQ(held(ring), Numbers{4});
}

TEST(DeltaRing, AnotherRootOfTheSameVersionIsAGap) {
  DeltaRing ring(300, 100);
  static_cast<void>(ring.push(entry(1, 10), kHalfBytes));
  delta::Delta other = *entry(2, 10)->delta;
  other.from_root.bytes[9] = 1;
  static_cast<void>(ring.push(RingEntry::make(std::move(other), {{7, 2}, ""}, {{7, 3}, ""}, 0), kHalfBytes));
  EXPECT_EQ(held(ring), Numbers{2});
}

TEST(DeltaRing, EvictionDoesNotTakeAnEntryFromWhoHoldsIt) {
  DeltaRing ring(10, 100);
  const auto mine = entry(1, 10);
  static_cast<void>(ring.push(mine, kHalfBytes));
  static_cast<void>(ring.push(entry(2, 10), kHalfBytes));
  EXPECT_EQ(held(ring), Numbers{2});
  EXPECT_EQ(mine->delta->frames[0].bytes.size(), 10u);
}

}  // namespace
}  // namespace deltasync::agent
