// How the tiles of a raw answer are divided into frames.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "agent/serve/raw_tiles.hpp"
#include "format/tiling.hpp"
#include "tests/support/model.hpp"

namespace deltasync::agent {
namespace {

using Runs = std::vector<std::vector<std::uint64_t>>;
using Ranges = std::vector<wire::TileRange>;

class RawTiles : public ::testing::Test {
 protected:
  RawTiles() {
    std::vector<TensorSpec> specs = test::sample_specs();
    for (int i = 0; i < 4; ++i) {
      specs.push_back({"w" + std::to_string(i), Dtype::bf16, {1500, 2048}, {}, {{512, 1024}}});
      specs.push_back({"n" + std::to_string(i), Dtype::f32, {33}, {}, {}});
    }
    layout_ = test::make_model(3, specs).layout;
    batches_ = delta::make_batches(*layout_);
  }
  Runs runs(Ranges ranges) const {
    Runs all;
    for (RawTileRuns cut(*layout_, batches_, std::move(ranges)); cut.more();) all.push_back(cut.next());
    return all;
  }
  std::uint64_t bytes(const std::vector<std::uint64_t>& tiles) const {
    std::uint64_t sum = 0;
    for (const std::uint64_t t : tiles) {
      const Tile tile = tile_of(*layout_, t);
      sum += tile.rect.elements() * layout_->tensors()[tile.tensor].element_bytes;
    }
    return sum;
  }
  /// Every tile of the ranges once, in order, in runs that are not too large.
  void expect_divided(const Ranges& ranges, const Runs& made) const {
    std::vector<std::uint64_t> wanted;
    for (const auto& r : ranges) {
      for (std::uint64_t t = r.first; t < r.end; ++t) wanted.push_back(t);
    }
    std::vector<std::uint64_t> came;
    for (const auto& run : made) {
      EXPECT_FALSE(run.empty());
      EXPECT_TRUE(run.size() == 1 || bytes(run) <= 4u << 20);
      EXPECT_LE(run.size(), 4096u);
      came.insert(came.end(), run.begin(), run.end());
    }
    EXPECT_EQ(came, wanted);
  }

  LayoutPtr layout_;
  std::vector<delta::Batch> batches_;
};

TEST_F(RawTiles, OfNothingThereIsNone) {
  EXPECT_TRUE(runs({}).empty());
}

TEST_F(RawTiles, OfEverythingEachBatchIsARun) {
  const Ranges all{{0, layout_->tile_count()}};
  const Runs made = runs(all);
  expect_divided(all, made);
  ASSERT_EQ(made.size(), batches_.size());
  for (std::size_t i = 0; i < made.size(); ++i) {
    EXPECT_EQ(made[i].front(), batches_[i].first);
    EXPECT_EQ(made[i].back() + 1, batches_[i].end);
  }
}

TEST_F(RawTiles, DividedRequestsGetTheSameRuns) {
  const Runs whole = runs({{0, layout_->tile_count()}});
  const std::set<std::vector<std::uint64_t>> known(whole.begin(), whole.end());
  for (std::uint64_t cut = 1; cut < layout_->tile_count(); cut += 7) {
    for (const Ranges& part : {Ranges{{0, cut}}, Ranges{{cut, layout_->tile_count()}}}) {
      const Runs made = runs(part);
      expect_divided(part, made);
      const auto unknown =
          std::count_if(made.begin(), made.end(), [&](const auto& run) { return !known.contains(run); });
      EXPECT_LE(unknown, 1) << "only the batch that was cut, at " << cut;
    }
  }
}

TEST_F(RawTiles, ScatteredTilesAreGathered) {
  Ranges odd;
  for (std::uint64_t t = 1; t < layout_->tile_count(); t += 2) odd.push_back({t, t + 1});
  const Runs made = runs(odd);
  expect_divided(odd, made);
  EXPECT_LT(made.size(), batches_.size()) << "not a frame for each batch";
}

TEST_F(RawTiles, RandomRanges) {
  test::Random random(11);
  for (int round = 0; round < 200; ++round) {
    Ranges ranges;
    for (std::uint64_t t = random.below(20); t < layout_->tile_count();) {
      const std::uint64_t end = std::min(t + 1 + random.below(120), layout_->tile_count());
      ranges.push_back({t, end});
      t = end + 1 + random.below(30);
    }
    expect_divided(ranges, runs(ranges));
  }
}

}  // namespace
}  // namespace deltasync::agent
