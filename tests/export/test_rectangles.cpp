#include "export/rectangles.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "tests/support/model.hpp"

namespace deltasync::exporting {
namespace {

constexpr std::uint32_t kNothing = 0;

/// What the rectangles write into a tensor of so many columns, of pieces of `piece_elements` each, whose elements all
/// have numbers of their own, from 1 on.
std::vector<std::uint32_t> written(const Rectangles& rectangles, std::uint64_t elements, std::uint64_t cols,
                                   std::uint64_t piece_elements) {
  std::vector<std::uint32_t> out(elements, kNothing);
  for (const Rectangle& one : rectangles.made) {
    const std::uint64_t ways = one.runs.size();
    EXPECT_EQ(one.rect.cols % ways, 0u);
    for (std::uint64_t row = 0; row < one.rect.rows; ++row) {
      for (std::uint64_t col = 0; col < one.rect.cols; ++col) {
        const Run& run = one.runs[col % ways];
        const std::uint64_t from = run.offset + row * run.row_stride + col / ways * run.col_stride;
        std::uint32_t& to = out.at((one.rect.row + row) * cols + one.rect.col + col);
        EXPECT_EQ(to, kNothing) << "written twice";
        to = static_cast<std::uint32_t>(run.piece * piece_elements + from + 1);
      }
    }
  }
  return out;
}

void apply(const ExportCopy& copy, std::uint64_t piece_elements, std::vector<std::uint32_t>& out) {
  for (std::uint64_t number = 0; number < copy.elements(); ++number) {
    std::uint64_t rest = number;
    std::uint64_t from = copy.source_offset;
    std::uint64_t to = copy.target_offset;
    for (std::size_t i = copy.steps.size(); i-- > 0;) {
      from += rest % copy.steps[i].count * copy.steps[i].source_stride;
      to += rest % copy.steps[i].count * copy.steps[i].target_stride;
      rest /= copy.steps[i].count;
    }
    out.at(to) = static_cast<std::uint32_t>(copy.piece * piece_elements + from + 1);
  }
}

TEST(Rectangles, OfCopiesThatAlternateOrDoNot) {
  test::Random random(3);
  for (unsigned round = 0; round < 400; ++round) {
    const std::uint64_t ways = 1 + random.below(3);
    const std::uint64_t of = random.below(3) == 0 ? ways + 1 : ways;  // columns between those of one copy
    const std::uint64_t experts = 1 + random.below(3);
    const std::uint64_t rows = 1 + random.below(4);
    const std::uint64_t each = 1 + random.below(5);
    const std::uint64_t first = random.below(each);
    const std::uint64_t here = 1 + random.below(each - first);
    const std::uint64_t cols = each * of + random.below(2) * random.below(3);  // which may not be divided evenly
    const std::uint64_t piece_elements = here * rows;
    std::vector<ExportCopy> copies;
    std::vector<std::uint32_t> expected(experts * rows * cols, kNothing);
    for (std::uint64_t expert = 0; expert < experts; ++expert) {
      for (std::uint64_t way = 0; way < ways; ++way) {
        ExportCopy& copy = copies.emplace_back();
        copy.piece = static_cast<std::uint32_t>(copies.size() - 1);
        copy.target_offset = expert * rows * cols + first * of + way;
        copy.steps = {{rows, 1, cols}, {here, rows, of}};  // transposed
        apply(copy, piece_elements, expected);
      }
    }
    for (std::size_t i = copies.size(); i > 1; --i) std::swap(copies[i - 1], copies[random.below(i)]);
    const Rectangles found = rectangles_of(copies, cols);
    ASSERT_EQ(found.apart, nullptr);
    ASSERT_EQ(written(found, expected.size(), cols, piece_elements), expected) << round;
    if (of == ways && cols % ways == 0) {
      ASSERT_EQ(found.made.size(), experts);
    }
  }
}

TEST(Rectangles, TheCopyWhoseElementsLieApartIsNamed) {
  const std::vector<ExportCopy> copies = {{.target_offset = 1, .steps = {{3, 1, 1}}},
                                          {.target_offset = 64, .steps = {{8, 1, 8}, {4, 8, 2}}}};
  EXPECT_EQ(rectangles_of(copies, 64, 32).apart, nullptr);
  EXPECT_EQ(rectangles_of(copies, 64, 31).apart, &copies[1]);
  EXPECT_TRUE(rectangles_of(copies, 0).made.empty());
}

TEST(Rectangles, ThatSomethingElseIsAddedToDoNotAlternate) {
  std::vector<ExportCopy> copies = {{.steps = {{4, 1, 2}}}, {.piece = 1, .target_offset = 1, .steps = {{4, 1, 2}}}};
  EXPECT_EQ(rectangles_of(copies, 8).made.size(), 1u);
  copies[1].add = 1;
  EXPECT_EQ(rectangles_of(copies, 8).made.size(), 8u);
}

}  // namespace
}  // namespace deltasync::exporting
