#include "export/element_map.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "export/boxes.hpp"

namespace deltasync::exporting {
namespace {

Result<std::optional<double>> names(const std::string& name) {
  if (name == "G") return std::optional<double>(3);
  if (name == "E") return std::optional<double>(1);
  return std::optional<double>();
}

/// The element of the target for each of the source, by the copies of pieces that cover it; -1: none.
std::vector<std::int64_t> moved(const ElementMap& map, const std::vector<std::uint64_t>& shape,
                                const std::vector<ShardPiece>& pieces) {
  std::uint64_t elements = 1;
  for (const std::uint64_t size : shape) elements *= size;
  std::vector<std::int64_t> out(elements, -1);
  for (const ShardPiece& piece : pieces) {
    for (const ExportCopy& copy : copies_of(map, piece)) {
      std::function<void(std::size_t, std::uint64_t, std::uint64_t)> walk = [&](std::size_t i, std::uint64_t from,
                                                                                std::uint64_t to) {
        if (i < copy.steps.size()) {
          for (std::uint64_t k = 0; k < copy.steps[i].count; ++k) {
            walk(i + 1, from + k * copy.steps[i].source_stride, to + k * copy.steps[i].target_stride);
          }
          return;
        }
        std::uint64_t global = 0;
        std::uint64_t rest = from;
        std::uint64_t local = 1;
        for (const std::uint64_t size : piece.shape) local *= size;
        for (std::size_t dim = 0; dim < shape.size(); ++dim) {
          local /= piece.shape[dim];
          const std::uint64_t at = rest / local;
          rest %= local;
          ASSERT_LT(at, piece.shape[dim]);
          global = global * shape[dim] + piece.offset[dim] + at;
        }
        ASSERT_EQ(out[global], -1) << "twice";
        out[global] = static_cast<std::int64_t>(to);
      };
      walk(0, copy.source_offset, copy.target_offset);
    }
  }
  return out;
}

/// Cuts each dimension at random places.
std::vector<ShardPiece> cut(const std::vector<std::uint64_t>& shape, std::mt19937_64& random) {
  std::vector<ShardPiece> pieces{{"t", Dtype::f32, shape, {}, {}}};
  for (const std::uint64_t size : shape) {
    std::vector<std::uint64_t> edges{0, size};
    for (int i = 0; i < 3; ++i) edges.push_back(random() % (size + 1));
    std::sort(edges.begin(), edges.end());
    std::vector<ShardPiece> next;
    for (const ShardPiece& piece : pieces) {
      for (std::size_t i = 0; i + 1 < edges.size(); ++i) {
        if (edges[i] == edges[i + 1]) continue;
        ShardPiece part = piece;
        part.offset.push_back(edges[i]);
        part.shape.push_back(edges[i + 1] - edges[i]);
        next.push_back(std::move(part));
      }
    }
    pieces = std::move(next);
  }
  return pieces;
}

using Formula = std::function<std::int64_t(std::uint64_t row, std::uint64_t col)>;

/// For many ways to cut the source: what the formula says, element by element.
void expect_map(const char* parts_text, const char* part_name, const char* view,
                const std::vector<std::uint64_t>& shape, const std::vector<std::uint64_t>& target_shape,
                const Formula& formula) {
  const auto parts = parse_parts(parts_text, shape.front(), names);
  ASSERT_TRUE(parts) << parts.error().to_string();
  const auto part =
      std::find_if(parts->parts.begin(), parts->parts.end(), [&](const Parts::Part& p) { return p.name == part_name; });
  ASSERT_NE(part, parts->parts.end());
  const auto map = map_part(*parts, *part, view, shape, names);
  ASSERT_TRUE(map) << map.error().to_string();
  EXPECT_EQ(map->target_shape, target_shape);
  std::mt19937_64 random(7);
  for (int round = 0; round < 50; ++round) {
    const auto made = moved(*map, shape, cut(shape, random));
    for (std::uint64_t row = 0; row < shape[0]; ++row) {
      for (std::uint64_t col = 0; col < shape[1]; ++col) {
        ASSERT_EQ(made[row * shape[1] + col], formula(row, col))
            << parts_text << " " << view << " " << row << "," << col;
      }
    }
  }
}

constexpr std::int64_t at(std::uint64_t row, std::uint64_t col, std::uint64_t cols) {
  return static_cast<std::int64_t>(row * cols + col);
}

TEST(ElementMap, TheWhole) {
  expect_map("", "", "", {6, 5}, {6, 5}, [](auto row, auto col) { return at(row, col, 5); });
}

TEST(ElementMap, GroupsOfHeads) {
  // Three groups of two query heads, a key and a value, of 4 rows each.
  const auto query = [](auto row, auto col) { return row % 16 < 8 ? at(row / 16 * 8 + row % 16, col, 5) : -1; };
  const auto key = [](auto row, auto col) { return row % 16 / 4 == 2 ? at(row / 16 * 4 + row % 4, col, 5) : -1; };
  expect_map("G * [q: 8, k: 4, v: 4]", "q", "", {48, 5}, {24, 5}, query);
  expect_map("G*[q: 8, k: 4, v: *]", "k", "", {48, 5}, {12, 5}, key);
}

TEST(ElementMap, WhatIsLeftIsDropped) {
  expect_map("[words: 10, _: *]", "words", "", {16, 3}, {10, 3},
             [](auto row, auto col) { return row < 10 ? at(row, col, 3) : -1; });
}

TEST(ElementMap, TransposedAndInterleaved) {
  // Expert 1 of 3; gate and up alternate in its last dimension.
  expect_map("[gate: 4, up: 4]", "up", "f h -> E/3 h (f 1/2)", {8, 5}, {3, 5, 8},
             [](std::uint64_t row, std::uint64_t col) -> std::int64_t {
               return row < 4 ? -1 : at(5 + col, (row - 4) * 2 + 1, 8);
             });
}

TEST(ElementMap, TheRestStaysAsItIs) {
  expect_map("", "", "(half:2 f) ... -> (f half) ...", {6, 4}, {6, 4},
             [](std::uint64_t row, std::uint64_t col) { return at(row % 3 * 2 + row / 3, col, 4); });
}

TEST(ElementMap, AViewThatCrossesBlocks) {
  // In each of three groups two kinds of 2 heads of 2 rows; outside they lie head by head.
  expect_map("G * [q: 8, k: 2]", "q", "(G kind:2 head:2 d:2) c -> (G head kind d) c", {30, 3}, {24, 3},
             [](std::uint64_t row, std::uint64_t col) -> std::int64_t {
               const std::uint64_t in = row % 10;
               if (in >= 8) return -1;
               const std::uint64_t kind = in / 4;
               const std::uint64_t head = in / 2 % 2;
               return at(row / 10 * 8 + head * 4 + kind * 2 + in % 2, col, 3);
             });
}

TEST(ElementMap, ARangeOfPlaces) {
  // Three groups of 4 rows go to rows 3 to 6 of three groups of 10.
  expect_map("", "", "(G:G d) c -> (G d@3/10) c", {12, 2}, {30, 2},
             [](std::uint64_t row, std::uint64_t col) { return at(row / 4 * 10 + 3 + row % 4, col, 2); });
  // The columns go to the second half of twice as many; the rows lie apart in their own range.
  expect_map("", "", "(a:2 b) c -> (b@E*2/7 a) c@5/10", {6, 5}, {14, 10},
             [](std::uint64_t row, std::uint64_t col) { return at((row % 3 + 2) * 2 + row / 3, 5 + col, 10); });
  // A name that goes over the border of a block keeps its range.
  expect_map("G * [q: 4, k: 1]", "q", "x c -> x@2/20 c", {15, 2}, {20, 2}, [](std::uint64_t row, std::uint64_t col) {
    return row % 5 == 4 ? -1 : at(2 + row / 5 * 4 + row % 5, col, 2);
  });
}

TEST(ElementMap, WhatDoesNotFitIsRefused) {
  for (const char* text :
       {"q: 4", "[q]", "[q: 5, k: 4]", "2 * [q: 5]", "0 * [q: 4]", "G [q: 4]", "[q: x]", "[q: *, k: 2]", "[q: 100]"}) {
    EXPECT_FALSE(parse_parts(text, 8, names)) << text;
  }
  const auto parts = parse_parts("2 * [q: 3, k: 1]", 8, names);
  ASSERT_TRUE(parts);
  const std::vector<std::uint64_t> shape{8, 5};
  for (const char* view : {"a b",
                           "a b c -> a b c",
                           "a -> a",
                           "a b -> a",
                           "a b -> a b a",
                           "a b -> a c",
                           "(a:4 x) b -> (a x) b",
                           "(a x) b -> (a x) b",
                           "(a b -> a b",
                           "a) b -> a b",
                           "a b -> a b 2/2",
                           "a b -> a@3/8 b",
                           "a b -> a@0/5 b",
                           "a b -> a@0 b",
                           "a b -> c@0/9 b",
                           "a b -> a@/9 b",
                           "a b -> a@0/9 a b",
                           "a a -> a a",
                           "(a:2 x:2) b -> (a x) b",
                           "... b c d -> ... b c d",
                           "a b -> (5/274177 7/67280421310721 a) b",
                           "a b -> (0/4611686018427387904 a) b"}) {
    EXPECT_FALSE(map_part(*parts, parts->parts.front(), view, shape, names)) << view;
  }
}

}  // namespace
}  // namespace deltasync::exporting
