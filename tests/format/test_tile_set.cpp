// Slices become exactly the tiles that they cut: against a loop over all tiles; and what a set says of its tiles.
#include "format/tile_set.hpp"

#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/hash.hpp"
#include "format/tiling.hpp"
#include "tests/support/model.hpp"

namespace deltasync {
namespace {

using test::Random;
using testing::HasSubstr;

LayoutPtr sample_layout() {
  auto layout = Layout::build(test::sample_specs());
  EXPECT_TRUE(layout.ok());
  return *layout;
}

/// By the definition: tiles that share an element with a slice.
std::vector<std::uint64_t> tiles_cut(const Layout& layout, const std::vector<Slice>& subscription) {
  std::vector<std::uint64_t> tiles;
  for (std::uint64_t i = 0; i < layout.tile_count(); ++i) {
    const Tile tile = tile_of(layout, i);
    const Tensor& tensor = layout.tensors()[tile.tensor];
    for (const Slice& slice : subscription) {
      if (slice.tensor != tensor.spec.name) continue;
      const Rect r = slice.rect.value_or(Rect{0, 0, tensor.rows, tensor.cols});
      const bool rows = std::max(r.row, tile.rect.row) < std::min(r.row + r.rows, tile.rect.row + tile.rect.rows);
      const bool cols = std::max(r.col, tile.rect.col) < std::min(r.col + r.cols, tile.rect.col + tile.rect.cols);
      if (!rows || !cols) continue;
      tiles.push_back(i);
      break;
    }
  }
  return tiles;
}

void expect_is(const Layout& layout, const TileSet& set, const std::vector<std::uint64_t>& tiles) {
  ASSERT_EQ(set.tiles(), tiles.size());
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> table(layout.tile_count());
  std::vector<std::uint64_t> of_set;
  std::size_t hint = 0;
  std::size_t next = 0;
  for (std::uint64_t i = 0; i < layout.tile_count(); ++i) {
    table[i] = i * 0x9E3779B97F4A7C15u + 1;
    const bool in = next < tiles.size() && tiles[next] == i;
    EXPECT_EQ(set.contains(i), in) << i;
    EXPECT_EQ(set.rank(i, hint), in ? std::optional<std::uint64_t>(next) : std::nullopt) << i;
    if (!in) continue;
    EXPECT_EQ(set.nth(next), i);
    const Tile tile = tile_of(layout, i);
    bytes += tile.rect.elements() * layout.tensors()[tile.tensor].element_bytes;
    of_set.push_back(table[i]);
    ++next;
  }
  EXPECT_EQ(set.bytes(), bytes);
  EXPECT_EQ(set.gather(table), of_set);
  EXPECT_EQ(set.root(table), xxh3_128(std::as_bytes(std::span(of_set))));
  std::vector<std::uint64_t> back(layout.tile_count(), 7);
  set.scatter(of_set, back);
  for (std::uint64_t i = 0; i < back.size(); ++i) EXPECT_EQ(back[i], set.contains(i) ? table[i] : 7) << i;
  for (std::size_t i = 1; i < set.ranges().size(); ++i) {
    EXPECT_GT(set.ranges()[i].first, set.ranges()[i - 1].end) << "ranges that could be one";
  }
}

TEST(TileSet, SlicesAreTheTilesThatTheyCut) {
  const LayoutPtr layout = sample_layout();
  Random random(3);
  for (int round = 0; round < 400; ++round) {
    std::vector<Slice> subscription;
    for (std::uint64_t n = 1 + random.below(4); n > 0; --n) {
      const Tensor& tensor = layout->tensors()[random.below(layout->tensors().size())];
      Slice slice{tensor.spec.name, std::nullopt};
      if (random.below(4) != 0) {
        Rect r;
        r.row = random.below(tensor.rows + 1);
        r.col = random.below(tensor.cols + 1);
        r.rows = random.below(tensor.rows - r.row + 1);
        r.cols = random.below(tensor.cols - r.col + 1);
        slice.rect = r;
      }
      subscription.push_back(slice);
    }
    const auto tiles = tiles_cut(*layout, subscription);
    const auto set = TileSet::of(*layout, subscription);
    if (tiles.empty()) {
      ASSERT_FALSE(set.ok());
      EXPECT_EQ(set.error().code(), Errc::invalid_argument);
      continue;
    }
    ASSERT_TRUE(set.ok()) << set.error().to_string();
    expect_is(*layout, *set, tiles);
    // Ranges of the set's tiles, and the few that stand for them.
    std::vector<wire::TileRange> part;
    for (const std::uint64_t tile : tiles) {
      if (random.below(5) == 0) continue;
      if (!part.empty() && part.back().end == tile) {
        ++part.back().end;
      } else {
        part.push_back({tile, tile + 1});
      }
    }
    const auto windows = set->windows(part);
    EXPECT_LE(windows.size(), part.size());
    EXPECT_EQ(set->intersect(windows), part);
    EXPECT_EQ(set->windows(set->ranges()).size(), 1u);
    EXPECT_EQ(set->intersect({{0, layout->tile_count()}}), set->ranges());
    // The agent makes the same of the ranges.
    const auto again = TileSet::make(*layout, set->ranges());
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(again->digest(), set->digest());
    EXPECT_EQ(again->ranges(), set->ranges());
    const wire::Subscribe message{layout->digest(), set->ranges()};
    EXPECT_EQ(set->digest(), set->is_whole() ? Digest128() : xxh3_128(message.encode()));
  }
}

TEST(TileSet, EverythingIsWhole) {
  const LayoutPtr layout = sample_layout();
  std::vector<Slice> all;
  for (const Tensor& tensor : layout->tensors()) all.push_back({tensor.spec.name, std::nullopt});
  for (const auto& set : {TileSet::of(*layout, {}), TileSet::of(*layout, all),
                          TileSet::make(*layout, {{0, 1}, {1, layout->tile_count()}})}) {
    ASSERT_TRUE(set.ok());
    EXPECT_TRUE(set->is_whole());
    EXPECT_EQ(set->digest(), Digest128());
    EXPECT_EQ(set->bytes(), layout->model_bytes());
    EXPECT_EQ(set->tiles(), layout->tile_count());
  }
}

TEST(TileSet, TheDigestNamesRangesAndLayout) {
  const LayoutPtr layout = sample_layout();
  auto specs = test::sample_specs();
  specs.back().name += "2";
  const LayoutPtr other = Layout::build(specs).value();
  const Digest128 digest = TileSet::make(*layout, {{1, 3}, {5, 6}})->digest();
  EXPECT_EQ(TileSet::make(*layout, {{1, 2}, {2, 3}, {5, 6}})->digest(), digest);
  EXPECT_NE(TileSet::make(*layout, {{1, 3}, {5, 7}})->digest(), digest);
  EXPECT_NE(TileSet::make(*other, {{1, 3}, {5, 6}})->digest(), digest);
}

TEST(TileSet, RefusesWhatIsNotThere) {
  const LayoutPtr layout = sample_layout();
  const auto refused = [&](const Slice& slice, Errc code, const std::string& text) {
    const auto set = TileSet::of(*layout, {{{"norm.scale", std::nullopt}, slice}});
    ASSERT_FALSE(set.ok());
    EXPECT_EQ(set.error().code(), code);
    EXPECT_THAT(set.error().message(), HasSubstr(text));
  };
  refused({"norm.bias", std::nullopt}, Errc::not_found, "no tensor 'norm.bias'");
  refused({"attn.q", Rect{90, 0, 7, 96}}, Errc::out_of_range, "'attn.q': rows 90 to 97");
  refused({"attn.q", Rect{0, 97, 1, 0}}, Errc::out_of_range, "with 96 rows and 96 columns");
  refused({"attn.q", Rect{0, 1, 1, ~std::uint64_t{0}}}, Errc::out_of_range, "'attn.q'");
  EXPECT_EQ(TileSet::make(*layout, {}).error().code(), Errc::invalid_argument);
  EXPECT_EQ(TileSet::make(*layout, {{3, layout->tile_count() + 1}}).error().code(), Errc::out_of_range);
}

TEST(TileSet, SlicesOfRanks) {
  const LayoutPtr layout = sample_layout();
  const Rect third = *row_slice(*layout, "attn.q", 2, 3)->rect;
  EXPECT_EQ(third, (Rect{64, 0, 32, 96}));
  const Rect column = *col_slice(*layout, "norm.scale", 1, 4)->rect;
  EXPECT_EQ(column, (Rect{0, 24, 1, 24}));
  // Uneven: 257 rows over 8.
  std::uint64_t next = 0;
  for (std::uint64_t i = 0; i < 8; ++i) {
    const Rect r = *row_slice(*layout, "quant.i8", i, 8)->rect;
    EXPECT_EQ(r.row, next);
    EXPECT_EQ(r.rows, i == 0 ? 33u : 32u);
    next += r.rows;
  }
  EXPECT_EQ(next, 257u);
  EXPECT_EQ(row_slice(*layout, "none", 0, 2).error().code(), Errc::not_found);
  EXPECT_EQ(row_slice(*layout, "attn.q", 2, 2).error().code(), Errc::invalid_argument);
  EXPECT_EQ(col_slice(*layout, "attn.q", 0, 0).error().code(), Errc::invalid_argument);
  const auto narrow = row_slice(*layout, "norm.scale", 0, 2);
  ASSERT_FALSE(narrow.ok());
  EXPECT_THAT(narrow.error().message(), HasSubstr("1 rows, too few for 2 slices"));
}

}  // namespace
}  // namespace deltasync
