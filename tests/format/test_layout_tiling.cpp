// Properties of the tile grid: disjoint, complete, within size, cut where the cuts are.
#include <gtest/gtest.h>

#include <algorithm>

#include "deltasync/layout.hpp"
#include "format/tiling.hpp"
#include "random_specs.hpp"

namespace deltasync {
namespace {

using testing_support::RandomSpecs;

LayoutPtr build(std::vector<TensorSpec> specs) {
  auto layout = Layout::build(std::move(specs));
  EXPECT_TRUE(layout.ok()) << layout.error().to_string();
  return std::move(layout).value();
}

TensorSpec spec(std::vector<std::uint64_t> shape, Dtype dtype = Dtype::bf16) {
  TensorSpec s;
  s.name = "w";
  s.dtype = dtype;
  s.shape = std::move(shape);
  return s;
}

bool crosses(const std::vector<std::uint64_t>& cuts, std::uint64_t start, std::uint64_t length) {
  return std::any_of(cuts.begin(), cuts.end(), [&](auto cut) { return start < cut && cut < start + length; });
}

/// Checks every property for one tensor of a layout, by enumeration of all of its tiles.
void check_tensor(const Layout& layout, std::uint32_t index) {
  const Tensor& t = layout.tensors()[index];
  const auto grid = grid_of(layout, index);
  ASSERT_EQ(grid.bands() * grid.panels(), t.tile_count) << t.spec.name;
  std::uint64_t elements = 0;
  std::uint64_t next_row = 0;
  for (std::uint64_t band = 0; band < grid.bands(); ++band) {
    const auto [first_row, rows] = grid.band(band);
    ASSERT_EQ(first_row, next_row);
    ASSERT_GT(rows, 0u);
    ASSERT_LE(rows, grid.band_rows);
    ASSERT_FALSE(crosses(t.spec.row_cuts, first_row, rows));
    next_row += rows;
    for (std::uint64_t panel = 0; panel < grid.panels(); ++panel) {
      const auto tile = tile_of(layout, t.first_tile + band * grid.panels() + panel);
      ASSERT_EQ(tile.tensor, index);
      ASSERT_EQ(layout.tensor_of_tile(tile.index), index);
      ASSERT_EQ(tile.rect, (Rect{first_row, grid.panel_starts[panel], rows,
                                 grid.panel_starts[panel + 1] - grid.panel_starts[panel]}));
      ASSERT_GT(tile.rect.cols, 0u);
      ASSERT_LE(tile.rect.elements(), kTileElementsMax);
      ASSERT_FALSE(crosses(t.spec.col_cuts, tile.rect.col, tile.rect.cols));
      elements += tile.rect.elements();
    }
  }
  // Bands follow each other and panels too (the starts ascend), so the tiles are disjoint; with the sum they cover.
  if (t.tile_count != 0) {
    ASSERT_EQ(next_row, t.rows);
    ASSERT_EQ(grid.panel_starts.front(), 0u);
    ASSERT_EQ(grid.panel_starts.back(), t.cols);
    ASSERT_TRUE(std::is_sorted(grid.panel_starts.begin(), grid.panel_starts.end(), std::less_equal<>()));
  }
  ASSERT_EQ(elements, t.rows * t.cols);
}

TEST(Tiling, RandomShapesAndCutsAreCoveredOnce) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    RandomSpecs random(seed);
    const auto layout = build(random.list(6));
    std::uint64_t first = 0;
    for (std::uint32_t i = 0; i < layout->tensors().size(); ++i) {
      ASSERT_EQ(layout->tensors()[i].first_tile, first);
      check_tensor(*layout, i);
      if (HasFatalFailure()) FAIL() << "seed " << seed << " tensor " << i;
      first += layout->tensors()[i].tile_count;
    }
    ASSERT_EQ(layout->tile_count(), first);
  }
}

/// True if tiles that touch the rectangle lie inside of it.
bool is_whole_tiles(const Layout& layout, const Rect& slice) {
  std::uint64_t inside = 0;
  for (std::uint64_t i = 0; i < layout.tile_count(); ++i) {
    const auto r = tile_of(layout, i).rect;
    const bool touches = r.row < slice.row + slice.rows && slice.row < r.row + r.rows &&
                         r.col < slice.col + slice.cols && slice.col < r.col + r.cols;
    const bool within = r.row >= slice.row && r.row + r.rows <= slice.row + slice.rows && r.col >= slice.col &&
                        r.col + r.cols <= slice.col + slice.cols;
    if (touches && !within) return false;
    if (within) inside += r.elements();
  }
  return inside == slice.elements();
}

TEST(Tiling, TensorParallelSlicesAreWholeTiles) {
  const std::vector<std::vector<std::uint64_t>> shapes = {{151'936, 3584}, {3584, 18'944}, {18'944, 3584}, {512, 3584},
                                                          {152'064},       {4096, 14'336}, {28'672},       {7, 24}};
  for (const auto& shape : shapes) {
    std::vector<TensorSpec> specs = {spec(shape)};
    add_even_cuts(specs, 8);
    const auto layout = build(specs);
    const Tensor& t = layout->tensors()[0];
    for (const std::uint64_t parallel : {2u, 4u, 8u}) {
      for (std::uint64_t rank = 0; rank < parallel; rank += parallel - 1) {  // the first and the last
        if (shape.size() == 2 && t.rows % parallel == 0) {
          const auto rows = t.rows / parallel;
          EXPECT_TRUE(is_whole_tiles(*layout, {rank * rows, 0, rows, t.cols})) << t.rows << "×" << t.cols;
        }
        const auto cols = t.cols / parallel;
        EXPECT_TRUE(is_whole_tiles(*layout, {0, rank * cols, t.rows, cols})) << t.rows << "×" << t.cols;
      }
    }
  }
}

TEST(Tiling, WithoutCutsASliceMayCrossTiles) {
  // The counterpart of the test above: without the cuts, 151,936 / 8 = 18,992 rows are not a multiple of the band.
  const auto layout = build({spec({151'936, 3584})});
  EXPECT_FALSE(is_whole_tiles(*layout, {18'992, 0, 18'992, 3584}));
}

TEST(Tiling, GoldenGrids) {
  struct Golden {
    std::vector<std::uint64_t> shape, row_cuts, col_cuts;
    std::uint64_t band_rows, bands;
    std::vector<std::uint64_t> panel_starts;
  };
  // Worked by hand from layout_format.md "Tiling": these numbers are the format.
  const std::vector<Golden> goldens = {
      {{}, {}, {}, 65'536, 1, {0, 1}},                        // scalar: W = 1
      {{100, 4096}, {}, {}, 16, 7, {0, 4096}},                // 65,536 / 4096
      {{3, 65'537}, {}, {}, 1, 3, {0, 32'776, 65'537}},       // ceil(65,537 / 2) = 32,769 → 32,776
      {{10, 65'536}, {}, {}, 1, 10, {0, 65'536}},             // exactly one panel
      {{10, 100'000}, {}, {}, 1, 10, {0, 50'000, 100'000}},   // 65,536 / 50,000
      {{40, 4096}, {20}, {}, 16, 4, {0, 4096}},               // bands 16 + 4 | 16 + 4
      {{40, 4096}, {}, {2048}, 32, 2, {0, 2048, 4096}},       // W = 2048
      {{5, 3000}, {}, {1000}, 32, 1, {0, 1000, 3000}},        // W = 2000
      {{9, 70'000}, {4}, {1}, 1, 9, {0, 1, 35'001, 70'000}},  // 69,999 → two of 35,000 and 34,999
  };
  for (const auto& g : goldens) {
    auto s = spec(g.shape);
    s.row_cuts = g.row_cuts;
    s.col_cuts = g.col_cuts;
    const auto layout = build({s});
    const auto grid = grid_of(*layout, 0);
    EXPECT_EQ(grid.band_rows, g.band_rows) << testing::PrintToString(g.shape);
    EXPECT_EQ(grid.bands(), g.bands) << testing::PrintToString(g.shape);
    EXPECT_EQ(grid.panel_starts, g.panel_starts) << testing::PrintToString(g.shape);
  }
}

TEST(Tiling, HugeSegmentsHaveNoEmptyPanel) {
  // Rounding panel widths up to 8 takes the most from the last panel where there are the most panels.
  for (const std::uint64_t cols : {(std::uint64_t{1} << 30) + 1, (std::uint64_t{1} << 34) + 65'537,
                                   (std::uint64_t{1} << 40) - 7, std::uint64_t{65'535} * 65'536 * 8 + 1}) {
    const auto layout = build({spec({cols}, Dtype::u8)});
    const auto& t = layout->tensors()[0];
    const auto last = tile_of(*layout, t.tile_count - 1).rect;
    EXPECT_GT(last.cols, 0u);
    EXPECT_EQ(last.col + last.cols, cols);
    EXPECT_LE(tile_of(*layout, 0).rect.cols, kTileElementsMax);
    EXPECT_EQ(t.tile_count, (cols + kTileElementsMax - 1) / kTileElementsMax);
  }
}

}  // namespace
}  // namespace deltasync
