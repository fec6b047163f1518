// Random placements against a reference that looks at elements one by one: which tiles are needed, where each element
// is, and what the executor and a device's threads do with it.
#include <gtest/gtest.h>

#include <set>

#include "format/tiling.hpp"
#include "placement/host_executor.hpp"
#include "placement/regions.hpp"
#include "tests/placement/plan_fixture.hpp"

namespace deltasync {
namespace {

using placement::HostExecutor;
using test::Random;
using test::RandomPlan;

#ifdef DELTASYNC_SANITIZED
constexpr std::uint64_t kSeeds = 4;
#else
constexpr std::uint64_t kSeeds = 40;
#endif

/// Without the widest tensors: the reference is slow.
std::vector<TensorSpec> small_specs() {
  std::vector<TensorSpec> specs = test::sample_specs();
  for (TensorSpec& spec : specs) {
    if (spec.name == "ffn.down") spec.shape = {300, 592}, spec.col_cuts = {200};
    if (spec.name == "wide.row") spec.shape = {2, 70000};
  }
  return specs;
}

class RandomPlacement : public testing::TestWithParam<std::uint64_t> {
 protected:
  RandomPlacement()
      : model_(test::make_model(GetParam(), small_specs())),
        random_(GetParam() + 1000),
        made_(*model_.layout, GetParam()) {
    auto built = Placement::build(model_.layout, made_.plan);
    if (!built.ok()) ADD_FAILURE() << built.error().to_string();
    placement_ = *built;
    auto executor = HostExecutor::make(placement_, HostExecutor::Rest::given);
    if (!executor.ok()) ADD_FAILURE() << executor.error().to_string();
    executor_.emplace(*std::move(executor));
    rest_.resize(placement_->rest_bytes() / 8 + 1);
    executor_->set_rest(reinterpret_cast<std::byte*>(rest_.data()));
  }

  const TileSet& tiles() const { return parts_of(*placement_).tiles; }
  const Layout& layout() const { return *model_.layout; }

  void scatter_all(const std::vector<std::byte>& half) {
    for (std::uint64_t rank = 0; rank < tiles().tiles(); ++rank) {
      const std::vector<std::byte> bytes = test::tile_bytes(layout(), half, tiles().nth(rank));
      ASSERT_EQ(executor_->tile_bytes(rank), bytes.size());
      executor_->scatter_tile(rank, bytes.data(), bytes.size() / tile_of(layout(), tiles().nth(rank)).rect.rows);
    }
  }
  /// Every tile is what the half has, and live memory what the plan makes of it.
  void expect_holds(const std::vector<std::byte>& half) {
    EXPECT_EQ(made_.engine.contents(), test::placed_contents(made_.engine, layout(), made_.plan, half));
    for (std::uint64_t rank = 0; rank < tiles().tiles(); ++rank) {
      std::vector<std::byte> bytes(executor_->tile_bytes(rank));
      executor_->gather_tile(rank, bytes.data());
      ASSERT_EQ(bytes, test::tile_bytes(layout(), half, tiles().nth(rank))) << "tile " << tiles().nth(rank);
    }
  }

  test::TestModel model_;
  Random random_;
  RandomPlan made_;
  std::shared_ptr<const Placement> placement_;
  std::vector<std::uint64_t> rest_;
  std::optional<HostExecutor> executor_;
};

TEST_P(RandomPlacement, NeedsTheTilesOfItsSlices) {
  std::set<std::uint64_t> needed;
  std::uint64_t placed_bytes = 0;
  for (const PlacedSlice& s : made_.plan.slices) {
    const Tensor& t = layout().tensors()[*layout().find(s.tensor)];
    placed_bytes += s.rect.elements() * t.element_bytes;
    for (std::uint64_t i = t.first_tile; i < t.first_tile + t.tile_count; ++i) {
      if (intersection(tile_of(layout(), i).rect, s.rect).elements() != 0) needed.insert(i);
    }
  }
  ASSERT_EQ(tiles().tiles(), needed.size());
  std::uint64_t rank = 0;
  for (const std::uint64_t tile : needed) {
    EXPECT_EQ(tiles().nth(rank), tile);
    EXPECT_EQ(tiles().rank(tile), rank);
    ++rank;
  }
  EXPECT_EQ(placement_->placed_bytes(), placed_bytes);
  const auto again = TileSet::of(layout(), placement_->slices());
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->ranges(), tiles().ranges());
}

TEST_P(RandomPlacement, EveryElementHasItsPlaces) {
  const placement::WordTable table = executor_->table();
  const ByteSpan rest = std::as_bytes(std::span(rest_));
  std::set<const std::byte*> rest_places;
  std::uint64_t rest_elements = 0;
  for (std::uint64_t rank = 0; rank < tiles().tiles(); ++rank) {
    const Tile tile = tile_of(layout(), tiles().nth(rank));
    const Tensor& t = layout().tensors()[tile.tensor];
    for (std::uint32_t local = 0; local < tile.rect.elements(); ++local) {
      if (tile.rect.elements() > 500 && random_.below(40) != 0 && local % 997 > 3) continue;
      const std::uint64_t row = tile.rect.row + local / tile.rect.cols;
      const std::uint64_t col = tile.rect.col + local % tile.rect.cols;
      auto expected = test::places_of(made_.plan, t.spec.name, row, col);
      std::vector<std::byte*> places;
      placement::for_each_place(table, rank, local, [&](std::byte* at) { places.push_back(at); });
      ASSERT_FALSE(places.empty());
      EXPECT_EQ(placement::word_address(table, rank, local), places.front());
      if (expected.empty()) {
        ASSERT_EQ(places.size(), 1u);
        ASSERT_TRUE(places[0] >= rest.data() && places[0] + t.element_bytes <= rest.data() + rest.size());
        EXPECT_TRUE(rest_places.insert(places[0]).second);
        EXPECT_EQ((places[0] - rest.data()) % t.element_bytes, 0);
        rest_elements += t.element_bytes;
        continue;
      }
      EXPECT_EQ(places.front(), expected.front()) << "the first slice is the one that is read";
      std::sort(places.begin(), places.end());
      std::sort(expected.begin(), expected.end());
      ASSERT_EQ(places, expected) << t.spec.name << " " << row << "," << col;
    }
  }
  EXPECT_LE(rest_elements, rest.size());
}

/// What makes it two searches to find an element (words.hpp).
TEST_P(RandomPlacement, RegionsAreInBands) {
  const PlacementParts& parts = parts_of(*placement_);
  for (std::uint64_t rank = 0; rank < tiles().tiles(); ++rank) {
    const Rect tile = tile_of(layout(), tiles().nth(rank)).rect;
    const auto primaries = parts.primaries(parts.of_tile[rank]);
    std::uint64_t elements = 0;
    for (std::size_t i = 0; i < primaries.size(); ++i) {
      const Rect& a = primaries[i].rect;
      elements += intersection(a, tile).elements();
      for (std::size_t k = 0; k < primaries.size(); ++k) {
        const Rect& b = primaries[k].rect;
        EXPECT_TRUE(k <= i || a.row < b.row || (a.row == b.row && a.col < b.col));
        const bool begins_within = b.row > a.row && b.row < std::min(a.row + a.rows, tile.row + tile.rows);
        EXPECT_FALSE(begins_within) << "tile " << tiles().nth(rank);
      }
    }
    EXPECT_EQ(elements, tile.elements());
  }
}

TEST_P(RandomPlacement, TilesGoToTheirPlacesAndBack) {
  scatter_all(model_.half);
  expect_holds(model_.half);
}

TEST_P(RandomPlacement, TilesAreExchangedAndExchangedBack) {
  scatter_all(model_.half);
  std::vector<std::byte> after = model_.half;
  test::mutate(after, layout(), 0.3, GetParam());
  std::vector<std::byte> scratch;
  std::vector<std::vector<std::byte>> staged;
  for (std::uint64_t rank = 0; rank < tiles().tiles(); ++rank) {
    staged.push_back(test::tile_bytes(layout(), after, tiles().nth(rank)));
    executor_->exchange_tile(rank, staged[rank].data(), scratch);
    EXPECT_EQ(staged[rank], test::tile_bytes(layout(), model_.half, tiles().nth(rank)));
  }
  expect_holds(after);
  for (std::uint64_t rank = 0; rank < tiles().tiles(); ++rank) {
    executor_->exchange_tile(rank, staged[rank].data(), scratch);
  }
  expect_holds(model_.half);
}

template <class U>
void exchange_by_words(const placement::WordTable& table, std::uint64_t rank, std::uint32_t count, std::byte* changes) {
  std::byte* const elements = changes + count * sizeof(std::uint16_t);
  for (std::uint32_t i = 0; i < count; ++i) {
    std::uint16_t local = 0;
    std::memcpy(&local, changes + i * sizeof local, sizeof local);
    U value;
    std::memcpy(&value, elements + i * sizeof(U), sizeof(U));
    value = placement::exchange_word<U>(table, rank, local, value);
    std::memcpy(elements + i * sizeof(U), &value, sizeof(U));
  }
}

void exchange_by_words(const placement::WordTable& table, std::uint64_t rank, std::uint32_t count, std::byte* changes) {
  switch (table.tiles[rank].element_bytes) {
    case 1: return exchange_by_words<std::uint8_t>(table, rank, count, changes);
    case 2: return exchange_by_words<std::uint16_t>(table, rank, count, changes);
    case 4: return exchange_by_words<std::uint32_t>(table, rank, count, changes);
    default: return exchange_by_words<std::uint64_t>(table, rank, count, changes);
  }
}

/// Changed elements between two halves, as resolve_tile leaves them.
std::vector<std::byte> changes_of(const std::vector<std::byte>& before, const std::vector<std::byte>& after,
                                  std::uint32_t width, std::uint32_t& count) {
  std::vector<std::byte> positions;
  std::vector<std::byte> elements;
  count = 0;
  for (std::size_t at = 0; at < before.size(); at += width) {
    if (std::memcmp(before.data() + at, after.data() + at, width) == 0) continue;
    const auto local = static_cast<std::uint16_t>(at / width);
    const auto* bytes = reinterpret_cast<const std::byte*>(&local);
    positions.insert(positions.end(), bytes, bytes + sizeof local);
    elements.insert(elements.end(), after.begin() + static_cast<std::ptrdiff_t>(at),
                    after.begin() + static_cast<std::ptrdiff_t>(at + width));
    ++count;
  }
  positions.insert(positions.end(), elements.begin(), elements.end());
  return positions;
}

TEST_P(RandomPlacement, ChangesAreExchangedAndExchangedBack) {
  scatter_all(model_.half);
  std::vector<std::byte> after = model_.half;
  test::mutate(after, layout(), 0.05, GetParam());
  std::vector<std::vector<std::byte>> logs;
  std::vector<std::uint32_t> counts;
  const auto exchange_all = [&](bool by_words) {
    for (std::uint64_t rank = 0; rank < tiles().tiles(); ++rank) {
      if (by_words) {
        exchange_by_words(executor_->table(), rank, counts[rank], logs[rank].data());
      } else {
        executor_->exchange_words(rank, counts[rank], logs[rank]);
      }
    }
  };
  for (std::uint64_t rank = 0; rank < tiles().tiles(); ++rank) {
    const std::uint64_t tile = tiles().nth(rank);
    std::uint32_t count = 0;
    logs.push_back(changes_of(test::tile_bytes(layout(), model_.half, tile), test::tile_bytes(layout(), after, tile),
                              layout().tensors()[layout().tensor_of_tile(tile)].element_bytes, count));
    counts.push_back(count);
  }
  const auto changes = logs;
  exchange_all(false);
  expect_holds(after);
  exchange_all(true);
  expect_holds(model_.half);
  EXPECT_EQ(logs, changes);
  exchange_all(true);
  expect_holds(after);
  exchange_all(false);
  expect_holds(model_.half);
  for (std::uint64_t rank = 0; rank < tiles().tiles(); ++rank) {
    executor_->scatter_words(rank, counts[rank], changes[rank]);
  }
  expect_holds(after);
}

/// What a device's threads do, in whatever order: each writes one element to all of its places.
TEST_P(RandomPlacement, WordsAreScatteredInAnyOrder) {
  std::vector<std::pair<std::uint64_t, std::uint32_t>> words;
  for (std::uint64_t rank = 0; rank < tiles().tiles(); ++rank) {
    const auto elements = static_cast<std::uint32_t>(tile_of(layout(), tiles().nth(rank)).rect.elements());
    for (std::uint32_t local = 0; local < elements; ++local) words.emplace_back(rank, local);
  }
  for (std::size_t i = words.size(); i > 1; --i) std::swap(words[i - 1], words[random_.below(i)]);
  const placement::WordTable table = executor_->table();
  for (const auto& [rank, local] : words) {
    const Tile tile = tile_of(layout(), tiles().nth(rank));
    const Tensor& t = layout().tensors()[tile.tensor];
    const std::uint64_t row = tile.rect.row + local / tile.rect.cols;
    const std::uint64_t col = tile.rect.col + local % tile.rect.cols;
    const std::byte* from = model_.half.data() + t.offset + row * t.row_bytes() + col * t.element_bytes;
    switch (t.element_bytes) {
      case 1: placement::scatter_word(table, rank, local, placement::load_element<std::uint8_t>(from)); break;
      case 2: placement::scatter_word(table, rank, local, placement::load_element<std::uint16_t>(from)); break;
      case 4: placement::scatter_word(table, rank, local, placement::load_element<std::uint32_t>(from)); break;
      default: placement::scatter_word(table, rank, local, placement::load_element<std::uint64_t>(from)); break;
    }
  }
  expect_holds(model_.half);
}

TEST_P(RandomPlacement, TilesThatLieAsInAHalfAreKnown) {
  for (std::uint64_t rank = 0; rank < tiles().tiles(); ++rank) {
    const auto rows = executor_->rows_of(rank);
    if (!rows) continue;
    const Tile tile = tile_of(layout(), tiles().nth(rank));
    const Tensor& t = layout().tensors()[tile.tensor];
    for (const std::uint64_t r : {std::uint64_t{0}, tile.rect.rows - 1}) {
      for (const std::uint64_t c : {std::uint64_t{0}, tile.rect.cols - 1}) {
        const auto places = test::places_of(made_.plan, t.spec.name, tile.rect.row + r, tile.rect.col + c);
        ASSERT_EQ(places.size(), 1u);
        EXPECT_EQ(places[0], rows->first + r * rows->row_stride + c * t.element_bytes);
      }
    }
  }
}

TEST_P(RandomPlacement, TilesAreReadWhereTheirFirstPlacesLieAsInAHalf) {
  for (std::uint64_t rank = 0; rank < tiles().tiles(); ++rank) {
    const auto rows = executor_->read_rows_of(rank);
    if (const auto written = executor_->rows_of(rank)) {
      ASSERT_TRUE(rows);
      EXPECT_EQ(rows->first, written->first);
    }
    if (!rows) continue;
    const Tile tile = tile_of(layout(), tiles().nth(rank));
    const Tensor& t = layout().tensors()[tile.tensor];
    for (const std::uint64_t r : {std::uint64_t{0}, tile.rect.rows - 1}) {
      for (const std::uint64_t c : {std::uint64_t{0}, tile.rect.cols - 1}) {
        const auto places = test::places_of(made_.plan, t.spec.name, tile.rect.row + r, tile.rect.col + c);
        ASSERT_FALSE(places.empty());
        EXPECT_EQ(places[0], rows->first + r * rows->row_stride + c * t.element_bytes);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPlacement, testing::Range<std::uint64_t>(1, kSeeds + 1));

/// A table for one device has the places on it and no others.
TEST(WordTables, AreOfOneDevice) {
  auto layout = Layout::build({{"a", Dtype::bf16, {8, 16}, {}, {}}});
  ASSERT_TRUE(layout.ok());
  alignas(8) std::byte here[512];
  PlacementPlan plan;
  plan.memories = {{"here", here, 256, {0}, {}}, {"there", here + 256, 256, {1}, {}}};
  plan.slices = {
      {"a", {0, 0, 4, 16}, 0, 0, 32, 2}, {"a", {4, 0, 4, 16}, 1, 0, 32, 2}, {"a", {0, 0, 1, 16}, 1, 128, 32, 2}};
  const auto placement = Placement::build(*layout, plan);
  ASSERT_TRUE(placement.ok()) << placement.error().to_string();
  EXPECT_FALSE(HostExecutor::make(*placement).ok());
  const auto of = [&](std::int32_t device) {
    return placement::make_word_tables(**placement, [&, device](std::uint32_t memory) -> std::byte* {
      const LiveMemory& live = (*placement)->memories()[memory];
      return live.device.ordinal == device ? live.base : nullptr;
    });
  };
  const auto first = of(0);
  const auto second = of(1);
  EXPECT_EQ(placement::word_address(first.view(), 0, 17), here + 34);
  EXPECT_EQ(placement::word_address(second.view(), 0, 17), nullptr);
  EXPECT_EQ(placement::word_address(second.view(), 0, 64), here + 256);
  EXPECT_EQ(placement::word_address(first.view(), 0, 64), nullptr);
  std::memset(here, 0, sizeof here);
  placement::scatter_word<std::uint16_t>(second.view(), 0, 1, 0xABCD);  // the copy only
  EXPECT_EQ(here[2], std::byte{0});
  EXPECT_EQ(here[256 + 128 + 2], std::byte{0xCD});
}

/// Tens of thousands of slices, thousands in one tile and in one memory.
TEST(ManySlices, RowsInReverseOrder) {
  constexpr std::uint64_t kRows = 40'000;
  auto layout = Layout::build({{"a", Dtype::bf16, {kRows, 4}, {}, {}}});
  ASSERT_TRUE(layout.ok());
  test::Engine engine;
  PlacementPlan plan;
  plan.memories.push_back(engine.add("m", kRows * 8));
  for (std::uint64_t r = 0; r < kRows; ++r) plan.slices.push_back({"a", {r, 0, 1, 4}, 0, (kRows - 1 - r) * 8, 0, 2});
  const auto placement = Placement::build(*layout, plan);
  ASSERT_TRUE(placement.ok()) << placement.error().to_string();
  const test::TestModel model = test::make_model(3, {{"a", Dtype::bf16, {kRows, 4}, {}, {}}});
  auto executor = HostExecutor::make(*placement);
  ASSERT_TRUE(executor.ok());
  for (std::uint64_t t = 0; t < (*layout)->tile_count(); ++t) {
    executor->scatter_tile(t, test::tile_bytes(**layout, model.half, t).data(), 8);
  }
  for (std::uint64_t r = 0; r < kRows; r += 1 + r / 7) {
    EXPECT_EQ(std::memcmp(engine.base(0) + (kRows - 1 - r) * 8, model.half.data() + r * 8, 8), 0) << r;
    const std::uint64_t tile = r * 4 / kTileElementsMax;
    EXPECT_EQ(placement::word_address(executor->table(), tile, static_cast<std::uint32_t>(r * 4 % kTileElementsMax)),
              engine.base(0) + (kRows - 1 - r) * 8);
  }
}

/// Thousands of columns beside each other, and one that is cut into rows.
TEST(ManySlices, ColumnsOfOneTile) {
  constexpr std::uint64_t kRows = 8;
  constexpr std::uint64_t kCols = 5'000;
  auto layout = Layout::build({{"a", Dtype::bf16, {kRows, kCols}, {}, {}}});
  ASSERT_TRUE(layout.ok());
  ASSERT_EQ((*layout)->tile_count(), 1u);
  test::Engine engine;
  PlacementPlan plan;
  plan.memories.push_back(engine.add("m", kRows * kCols * 2));
  const auto at = [](std::uint64_t row, std::uint64_t col) { return ((kCols - 1 - col) * kRows + row) * 2; };
  for (std::uint64_t c = 1; c < kCols; ++c) plan.slices.push_back({"a", {0, c, kRows, 1}, 0, at(0, c), 2, 0});
  for (const std::uint64_t cut_rows : {kRows, kRows / 2}) {
    PlacementPlan cut = plan;
    for (std::uint64_t r = 0; r < kRows; r += cut_rows)
      cut.slices.push_back({"a", {r, 0, cut_rows, 1}, 0, at(r, 0), 2, 0});
    const auto placement = Placement::build(*layout, cut);
    ASSERT_TRUE(placement.ok()) << placement.error().to_string();
    EXPECT_EQ(parts_of(*(*placement)).regions.size(), kCols * kRows / cut_rows);
    auto executor = HostExecutor::make(*placement);
    ASSERT_TRUE(executor.ok());
    for (std::uint64_t r = 0; r < kRows; ++r) {
      for (std::uint64_t c = 0; c < kCols; ++c) {
        const auto local = static_cast<std::uint32_t>(r * kCols + c);
        ASSERT_EQ(placement::word_address(executor->table(), 0, local), engine.base(0) + at(r, c)) << r << "," << c;
      }
    }
  }
}

/// Tiles that lie alike share their list, the one in the row above as well.
TEST(SharedLists, TilesBesideEachOtherThatRepeat) {
  auto layout = Layout::build({{"a", Dtype::bf16, {4096, 1024}, {}, {512}}});
  ASSERT_TRUE(layout.ok());
  ASSERT_GT((*layout)->tile_count(), 16u);
  test::Engine engine;
  PlacementPlan plan;
  plan.memories.push_back(engine.add("left", std::uint64_t{4096} * 512 * 2));
  plan.memories.push_back(engine.add("right", std::uint64_t{4096} * 512 * 2));
  plan.slices.push_back({"a", {0, 0, 4096, 512}, 0, 0, 1024, 2});
  plan.slices.push_back({"a", {0, 512, 4096, 512}, 1, 0, 1024, 2});
  const auto placement = Placement::build(*layout, plan);
  ASSERT_TRUE(placement.ok()) << placement.error().to_string();
  EXPECT_EQ(parts_of(*(*placement)).regions.size(), 2u);
}

}  // namespace
}  // namespace deltasync
