// Deltas some of whose tiles are replaced: by their bytes, whatever the base, or by nothing.
#include <algorithm>
#include <numeric>

#include "delta/frame.hpp"
#include "format/tiling.hpp"
#include "tests/delta/delta_test_util.hpp"

namespace deltasync::delta {
namespace {

using deltasync::test::make_model;
using deltasync::test::mutate;
using deltasync::test::Random;
using test::digests_of;
using test::encode_between;
using test::records_of;

struct Amended : ::testing::Test {
  void make_step(std::uint64_t seed) {
    model = make_model(seed);
    batches = make_batches(*model.layout);
    after = model.half;
    mutate(after, *model.layout, 0.01, seed + 1);
    delta = encode_between(*model.layout, model.half, after);
    digests = digests_of(*model.layout, after);
  }
  std::vector<std::uint64_t> some_tiles(Random& random, std::uint64_t one_in) const {
    std::vector<std::uint64_t> tiles;
    for (std::uint64_t t = 0; t < model.layout->tile_count(); ++t) {
      if (random.below(one_in) == 0 && tile_of(*model.layout, t).rect.elements() != 0) tiles.push_back(t);
    }
    return tiles;
  }
  Delta amend_with(std::span<const std::uint64_t> tiles, bool bytes) const {
    const ByteSpan half(after);
    return amend(*model.layout, batches, delta, tiles, bytes ? &half : nullptr, digests, delta.to_root).value();
  }
  /// Applies it to `half` in place; tiles that are in it, in order.
  std::vector<std::uint64_t> apply(const Delta& d, std::vector<std::byte>& half) const {
    std::vector<std::uint64_t> tiles;
    for (const Frame& frame : d.frames) {
      for (const TileRecord& record : records_of(*model.layout, frame.bytes)) {
        tiles.push_back(record.tile);
        const Tile tile = tile_of(*model.layout, record.tile);
        const Tensor& tensor = model.layout->tensors()[tile.tensor];
        const TensorMemory memory{half.data() + tensor.offset, static_cast<std::size_t>(tensor.row_bytes())};
        const std::uint64_t before = tile_digest(*model.layout, half, record.tile);
        std::byte* const first = tile_address(memory, tile, tensor.element_bytes);
        EXPECT_TRUE(apply_tile(*model.layout, record, first, memory.row_stride, before)) << record.tile;
      }
    }
    EXPECT_TRUE(std::is_sorted(tiles.begin(), tiles.end()));
    return tiles;
  }

  deltasync::test::TestModel model;
  std::vector<Batch> batches;
  std::vector<std::byte> after;
  Delta delta;
  std::vector<std::uint64_t> digests;
};

TEST_F(Amended, LeadsToTheSameHalfWhateverTheTilesHeld) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE(seed);
    make_step(seed);
    Random random(seed);
    const auto tiles = some_tiles(random, 1 + random.below(6));
    const Delta made = amend_with(tiles, true);
    std::vector<std::byte> half = model.half;
    for (const std::uint64_t t : tiles) {  // anything at all
      const Tile tile = tile_of(*model.layout, t);
      const Tensor& tensor = model.layout->tensors()[tile.tensor];
      half[tensor.offset + tile.rect.row * tensor.row_bytes() + tile.rect.col * tensor.element_bytes] ^= std::byte{9};
    }
    apply(made, half);
    EXPECT_TRUE(half == after);
    EXPECT_EQ(made.to_root, delta.to_root);
    // What it says of itself is what it is, and it is divided as others are: it can be merged.
    const auto read = from_container(to_container(made), *model.layout);
    ASSERT_TRUE(read) << read.error().to_string();
    EXPECT_EQ(read->changed, made.changed);
    EXPECT_EQ(read->frame_bytes, made.frame_bytes);
    for (std::size_t c = 0; c < kCodecEnd; ++c) {
      EXPECT_EQ(read->stats[c].tiles, made.stats[c].tiles);
      EXPECT_EQ(read->stats[c].bytes, made.stats[c].bytes);
    }
    ThreadPool pool(1, "test");
    const Delta* const chain[] = {&made};
    const auto merged = merge(*model.layout, chain, {}, pool);
    EXPECT_TRUE(merged) << merged.error().to_string();
  }
}

TEST_F(Amended, WithoutTilesItLeavesThemAlone) {
  make_step(7);
  Random random(7);
  const auto tiles = some_tiles(random, 3);
  std::vector<std::byte> half = model.half;
  const auto applied = apply(amend_with(tiles, false), half);
  for (const std::uint64_t t : tiles) {
    EXPECT_FALSE(std::binary_search(applied.begin(), applied.end(), t));
    EXPECT_EQ(tile_digest(*model.layout, half, t), tile_digest(*model.layout, model.half, t));
  }
  std::vector<std::byte> whole = model.half;
  const auto all = apply(delta, whole);
  std::vector<std::uint64_t> rest;
  std::set_difference(all.begin(), all.end(), tiles.begin(), tiles.end(), std::back_inserter(rest));
  EXPECT_EQ(applied, rest);
}

TEST_F(Amended, AllTilesAndNone) {
  make_step(8);
  std::vector<std::uint64_t> all(model.layout->tile_count());
  std::iota(all.begin(), all.end(), 0u);
  std::erase_if(all, [&](std::uint64_t t) { return tile_of(*model.layout, t).rect.elements() == 0; });
  std::vector<std::byte> half(model.half.size());
  apply(amend_with(all, true), half);
  EXPECT_TRUE(half == after);
  EXPECT_TRUE(amend_with(all, false).frames.empty());
  EXPECT_EQ(to_container(amend_with({}, true)), to_container(delta));
}

TEST_F(Amended, ADamagedFrameIsNamed) {
  make_step(9);
  delta.frames.at(0).bytes.back() ^= std::byte{1};
  const std::uint64_t tiles[] = {delta.frames[0].first_tile};
  const ByteSpan half(after);
  const auto made = amend(*model.layout, batches, delta, tiles, &half, digests, delta.to_root);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code(), Errc::corrupt);
}

}  // namespace
}  // namespace deltasync::delta
