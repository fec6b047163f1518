// A set of rectangles against a grid of flags.
#include "format/rect_set.hpp"

#include <gtest/gtest.h>

#include "tests/support/model.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t kRows = 13;
constexpr std::uint64_t kCols = 11;

struct Grid {
  int at[kRows][kCols] = {};

  void add(const Rect& r, int n = 1) {
    for (std::uint64_t i = r.row; i < r.row + r.rows; ++i) {
      for (std::uint64_t j = r.col; j < r.col + r.cols; ++j) at[i][j] += n;
    }
  }
};

Rect random_rect(test::Random& random) {
  Rect r{random.below(kRows), random.below(kCols), 0, 0};
  r.rows = 1 + random.below(kRows - r.row);
  r.cols = 1 + random.below(kCols - r.col);
  if (random.below(3) == 0) r.cols = 1 + random.below(std::min<std::uint64_t>(3, kCols - r.col));
  return r;
}

TEST(RectSet, SplitsAndAddsAsAGridOfFlags) {
  test::Random random(11);
  for (int round = 0; round < 500; ++round) {
    RectSet set;
    Grid has;
    for (int i = 0; i < 12; ++i) {
      const Rect rect = random_rect(random);
      std::vector<Rect> inside;
      std::vector<Rect> outside;
      set.split(rect, inside, outside);
      Grid parts;
      for (const Rect& part : inside) parts.add(part, 1);
      for (const Rect& part : outside) parts.add(part, 10);
      bool any = false;
      for (std::uint64_t r = 0; r < kRows; ++r) {
        for (std::uint64_t c = 0; c < kCols; ++c) {
          const bool in_rect = r >= rect.row && r < rect.row + rect.rows && c >= rect.col && c < rect.col + rect.cols;
          const int expected = !in_rect ? 0 : has.at[r][c] != 0 ? 1 : 10;
          ASSERT_EQ(parts.at[r][c], expected) << "round " << round << " rect " << i;
          any = any || expected == 1;
        }
      }
      ASSERT_EQ(set.overlap(rect).has_value(), any);
      const std::vector<Rect> added = set.add(rect);
      EXPECT_EQ(added, outside);
      for (const Rect& part : added) has.add(part);
    }
  }
}

TEST(RectSet, ColumnsOverManyBandsAreOnePart) {
  RectSet set;
  for (std::uint64_t row = 0; row < 100; row += 2) ASSERT_FALSE(set.insert({row, 0, 1, 5}));
  for (std::uint64_t row = 1; row < 100; row += 2) ASSERT_FALSE(set.insert({row, 0, 1, 5}));
  std::vector<Rect> inside;
  std::vector<Rect> outside;
  set.split({0, 0, 100, 9}, inside, outside);
  EXPECT_EQ(inside, (std::vector<Rect>{{0, 0, 100, 5}}));
  EXPECT_EQ(outside, (std::vector<Rect>{{0, 5, 100, 4}}));
}

}  // namespace
}  // namespace deltasync
