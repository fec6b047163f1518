// Whether destinations share a byte, against marking every byte.
#include "placement/destinations.hpp"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tests/support/model.hpp"

namespace deltasync {
namespace {

using test::Random;

std::uint64_t end_of(const Destination& d) {
  return d.offset + (d.rows - 1) * d.row_stride + (d.cols - 1) * d.col_stride + d.element_bytes;
}

bool folds(const Destination& d) {
  std::set<std::uint64_t> taken;
  for (std::uint64_t r = 0; r < d.rows; ++r) {
    for (std::uint64_t c = 0; c < d.cols; ++c) {
      if (!taken.insert(r * d.row_stride + c * d.col_stride).second) return true;
    }
  }
  return false;
}

/// The destinations that have each byte.
std::map<std::uint64_t, std::set<std::size_t>> takers(const std::vector<Destination>& list) {
  std::map<std::uint64_t, std::set<std::size_t>> bytes;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Destination& d = list[i];
    for (std::uint64_t r = 0; r < d.rows; ++r) {
      for (std::uint64_t c = 0; c < d.cols; ++c) {
        for (std::uint64_t b = 0; b < d.element_bytes; ++b) {
          bytes[d.offset + r * d.row_stride + c * d.col_stride + b].insert(i);
        }
      }
    }
  }
  return bytes;
}

void expect_as_marked(const std::vector<Destination>& list, int round, std::size_t& overlapping) {
  bool any = false;
  std::set<std::pair<std::size_t, std::size_t>> pairs;
  for (const auto& [byte, who] : takers(list)) {
    any = any || who.size() > 1;
    for (const std::size_t a : who) {
      for (const std::size_t b : who) pairs.emplace(a, b);
    }
  }
  const auto found = find_shared_byte(list);
  ASSERT_EQ(found.has_value(), any) << "round " << round;
  if (!found) return;
  ++overlapping;
  EXPECT_LT(found->first, found->second);
  EXPECT_TRUE(pairs.contains(*found)) << "round " << round << ": " << found->first << " and " << found->second;
}

std::uint32_t random_width(Random& random) {
  return 1u << random.below(4);
}

TEST(Destinations, FoldAsTheElementsDo) {
  Random random(5);
  int folding = 0;
  for (int round = 0; round < 20000; ++round) {
    const std::uint32_t width = random_width(random);
    const Destination d{
        0, 1 + random.below(7), 1 + random.below(7), random.below(12) * width, random.below(12) * width, width};
    ASSERT_EQ(folds_onto_itself(d), folds(d)) << d.rows << "x" << d.cols << " " << d.row_stride << " " << d.col_stride;
    folding += folds(d) ? 1 : 0;
  }
  EXPECT_GT(folding, 1000);
  EXPECT_LT(folding, 19000);
}

TEST(Destinations, AnyStridesAreCheckedExactly) {
  Random random(6);
  std::size_t overlapping = 0;
  int checked = 0;
  for (int round = 0; round < 6000; ++round) {
    std::vector<Destination> list;
    for (std::uint64_t n = 2 + random.below(3); list.size() < n;) {
      const std::uint32_t width = random_width(random);
      const Destination d{random.below(60) * width, 1 + random.below(4),      1 + random.below(4),
                          random.below(14) * width, random.below(14) * width, width};
      if (!folds(d)) list.push_back(d);
    }
    expect_as_marked(list, round, overlapping);
    ++checked;
  }
  EXPECT_GT(overlapping, 500u);
  EXPECT_LT(overlapping, 5500u);
  EXPECT_EQ(checked, 6000);
}

/// What engines have: rows, columns and transposed parts of one parameter, and runs that go over its rows' ends.
TEST(Destinations, PartsOfOneParameterAreCheckedExactly) {
  Random random(7);
  std::size_t overlapping = 0;
  for (int round = 0; round < 6000; ++round) {
    const std::uint32_t width = random_width(random);
    const std::uint64_t pitch = 2 + random.below(9);
    const std::uint64_t rows = 2 + random.below(6);
    std::vector<Destination> list;
    for (std::uint64_t n = 2 + random.below(4); list.size() < n;) {
      const std::uint64_t at = random.below(rows * pitch);
      if (random.below(4) == 0) {
        list.push_back({at * width, 1, 1 + random.below(3 * pitch), 0, width, width});
        continue;
      }
      const std::uint64_t high = 1 + random.below(3);
      const std::uint64_t wide = 1 + random.below(pitch);
      if (random.below(2) == 0) {
        list.push_back({at * width, high, wide, pitch * width, width, width});
      } else {
        list.push_back({at * width, wide, high, width, pitch * width, width});
      }
    }
    expect_as_marked(list, round, overlapping);
  }
  EXPECT_GT(overlapping, 500u);
  EXPECT_LT(overlapping, 5500u);
}

/// Mixed pitches over more bytes than any machine has: nothing may be as large as what they span.
TEST(Destinations, WideSpansTakeNoMemory) {
  constexpr std::uint64_t kWide = 1ull << 45;
  const Destination high{0, 1u << 9, 1u << 9, kWide, 1u << 20, 2};
  const auto beside = [](std::uint64_t offset) { return Destination{offset, 1u << 9, 1u << 9, kWide, 1u << 21, 2}; };
  EXPECT_FALSE(find_shared_byte(std::vector<Destination>{high, beside(2)}));
  EXPECT_TRUE(find_shared_byte(std::vector<Destination>{high, beside(0)}));
  const std::uint64_t last = (1u << 8) * kWide + (std::uint64_t{511} << 20);
  EXPECT_TRUE(find_shared_byte(std::vector<Destination>{high, {last, 3, 3, 32, 8, 2}}));
  EXPECT_FALSE(find_shared_byte(std::vector<Destination>{high, {last + 2, 3, 3, 32, 8, 2}}));
}

/// Rows that lie within each other's columns.
TEST(Destinations, RowsThatInterleaveAreCheckedExactly) {
  Random random(8);
  std::size_t overlapping = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<Destination> list;
    while (list.size() < 2) {
      const std::uint32_t width = random_width(random);
      const std::uint64_t row_stride = (1 + random.below(40)) * width;
      const std::uint64_t col_stride = (1 + random.below(40)) * width;
      const Destination d{
          random.below(200) * width, 2 + random.below(4), 2 + random.below(4), row_stride, col_stride, width};
      if (!folds(d)) list.push_back(d);
    }
    expect_as_marked(list, round, overlapping);
  }
  EXPECT_GT(overlapping, 300u);
  EXPECT_LT(overlapping, 2700u);
}

TEST(Destinations, EndsThatTouchAreApart) {
  EXPECT_FALSE(find_shared_byte(std::vector<Destination>{{0, 4, 8, 32, 2, 2}, {16, 4, 8, 32, 2, 2}}));
  EXPECT_TRUE(find_shared_byte(std::vector<Destination>{{0, 4, 8, 32, 2, 2}, {14, 4, 8, 32, 2, 2}}));
  EXPECT_FALSE(find_shared_byte(std::vector<Destination>{{0, 1, 8, 0, 2, 2}, {16, 1, 8, 0, 2, 2}}));
  EXPECT_FALSE(find_shared_byte(std::vector<Destination>{{0, 4, 4, 16, 4, 2}, {2, 4, 4, 16, 4, 2}}));  // interleaved
  EXPECT_EQ(end_of({0, 4, 8, 32, 2, 2}), 112u);
}

}  // namespace
}  // namespace deltasync
