// compact_from_target(): the same as from the base, without it.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include "format/tiling.hpp"
#include "merge_history.hpp"

namespace deltasync::delta {
namespace {

using namespace deltasync::delta::test;
using deltasync::test::make_model;
using deltasync::test::mutate;
using deltasync::test::step_small;
using testing::HasSubstr;

History one_step(double density, std::uint64_t seed) {
  History history(make_model(seed, one_of_each_dtype()));
  auto next = history.halves.back();
  step_small(next, *history.layout, density, seed);
  history.push(std::move(next));
  return history;
}

Result<std::optional<Delta>> from_target(const History& history, const Delta& delta, unsigned threads = 1) {
  ThreadPool pool(threads, "test");
  return compact_from_target(*history.layout, delta, history.with_target(), pool);
}

Delta from_base(const Layout& layout, const Delta& delta, const std::vector<std::byte>& before) {
  ThreadPool pool(1, "test");
  return compact(layout, delta, before, pool).value();
}

TEST(CompactFromTarget, IsWhatTheBaseGives) {
  for (const double density : {0.0001, 0.005, 0.05}) {
    const History history = one_step(density, 3);
    const Delta& delta = history.deltas.front();
    const Delta expected = from_base(*history.layout, delta, history.halves.front());
    ASSERT_GT(expected.stats[static_cast<unsigned>(Codec::rice_class)].tiles, 0u) << density;
    for (const unsigned threads : {1U, 3U}) {
      const auto made = from_target(history, delta, threads);
      ASSERT_TRUE(made) << made.error().to_string();
      ASSERT_TRUE(made->has_value());
      EXPECT_EQ(to_container(**made), to_container(expected)) << density;
      EXPECT_LT((*made)->frame_bytes, delta.frame_bytes);
      for (std::size_t c = 0; c < kCodecEnd; ++c) {
        EXPECT_EQ((*made)->stats[c].tiles, expected.stats[c].tiles);
        EXPECT_EQ((*made)->stats[c].bytes, expected.stats[c].bytes);
      }
    }
  }
}

/// Values and whole tiles do not tell what was there: they stay, and all others are as the base gives them.
TEST(CompactFromTarget, TilesThatAreNotReversibleStay) {
  History history(make_model(5));
  auto next = history.halves.back();
  step_small(next, *history.layout, 0.01, 6);
  for (const Tensor& tensor : history.layout->tensors()) {  // every third in new bit patterns, sparse and dense
    if (tensor.offset % 3 != 0) continue;
    deltasync::test::Random random(tensor.offset);
    for (std::uint64_t i = 0; i < tensor.bytes; ++i) {
      if (i % 5 == 0) next[tensor.offset + i] = static_cast<std::byte>(random.next());
    }
  }
  history.push(std::move(next));
  for (const ValueForm form : {ValueForm::ulp, ValueForm::absolute}) {
    const Delta delta = encode_between(*history.layout, history.halves[0], history.halves[1], form);
    const Delta expected = from_base(*history.layout, delta, history.halves[0]);
    const auto made = from_target(history, delta);
    ASSERT_TRUE(made) << made.error().to_string();
    ASSERT_TRUE(made->has_value());
    ASSERT_EQ((*made)->frames.size(), delta.frames.size());
    unsigned stayed = 0;
    for (std::size_t i = 0; i < delta.frames.size(); ++i) {
      const auto was = parse_frame(*history.layout, delta.frames[i].bytes).value();
      const auto best = parse_frame(*history.layout, expected.frames[i].bytes).value();
      const auto is = parse_frame(*history.layout, (*made)->frames[i].bytes).value();
      ASSERT_EQ(is.size(), was.size());
      for (std::size_t r = 0; r < is.size(); ++r) {
        const bool differences = was[r].codec == Codec::rice_ulp || was[r].codec == Codec::dense_ulp;
        const TileRecord& same = differences ? best[r] : was[r];
        stayed += differences ? 0 : 1;
        ASSERT_EQ(is[r].codec, same.codec);
        ASSERT_EQ(is[r].digest_after, same.digest_after);
        ASSERT_THAT(is[r].payload, ::testing::ElementsAreArray(same.payload));
      }
    }
    EXPECT_GT(stayed, 0u);
    expect_round_trip(*history.layout, history.halves[0], history.halves[1], **made);
  }
}

/// With the base at hand, they are compared with it.
TEST(Compact, WholeTilesAndValuesBecomeClassesToo) {
  const History history = one_step(0.005, 17);
  const Delta& delta = history.deltas.front();
  const Delta expected = from_base(*history.layout, delta, history.halves[0]);
  const Delta values = encode_between(*history.layout, history.halves[0], history.halves[1], ValueForm::absolute);
  const Delta of_values = from_base(*history.layout, values, history.halves[0]);
  const auto digests = digests_of(*history.layout, history.halves[1]);
  std::uint64_t classes = 0;
  for (std::size_t i = 0; i < delta.frames.size(); ++i) {
    std::vector<std::uint64_t> tiles;
    const auto best = parse_frame(*history.layout, expected.frames[i].bytes).value();
    for (const TileRecord& record : best) tiles.push_back(record.tile);
    const Frame raw = raw_frame(*history.layout, history.halves[1], tiles, digests);
    const Frame of_raw = compact_frame(*history.layout, raw, history.halves[0]).value();
    for (const Frame* made : {&of_raw, &of_values.frames.at(i)}) {
      const auto is = parse_frame(*history.layout, made->bytes).value();
      ASSERT_EQ(is.size(), best.size());
      for (std::size_t r = 0; r < is.size(); ++r) {
        if (best[r].codec != Codec::rice_class) continue;
        ++classes;
        ASSERT_EQ(is[r].codec, Codec::rice_class);
        ASSERT_THAT(is[r].payload, ::testing::ElementsAreArray(best[r].payload));
      }
    }
  }
  EXPECT_GT(classes, 0u);
}

TEST(CompactFromTarget, OfAMergedDelta) {
  History history(make_model(7, one_of_each_dtype()));
  for (std::uint64_t i = 0; i < 4; ++i) {
    auto next = history.halves.back();
    step_small(next, *history.layout, 0.004, 20 + i);
    history.push(std::move(next));
  }
  const Delta merged = merge_history(history, history.with_target()).value().value();
  const auto made = from_target(history, merged);
  ASSERT_TRUE(made) << made.error().to_string();
  ASSERT_TRUE(made->has_value());
  EXPECT_EQ(to_container(**made), to_container(from_base(*history.layout, merged, history.halves.front())));
  EXPECT_LT((*made)->frame_bytes, merged.frame_bytes);
  expect_round_trip(*history.layout, history.halves.front(), history.halves.back(), **made);
}

TEST(CompactFromTarget, ReadsOnlyWhatItNeeds) {
  const History history = one_step(0.01, 9);
  const Delta absolute = encode_between(*history.layout, history.halves[0], history.halves[1], ValueForm::absolute);
  ThreadPool pool(1, "test");
  const auto same = compact_from_target(*history.layout, absolute, {}, pool);
  ASSERT_TRUE(same) << same.error().to_string();
  ASSERT_TRUE(same->has_value()) << "nothing had to be read";
  EXPECT_EQ(to_container(**same), to_container(absolute));
  MergeOptions options = history.with_target();
  std::uint64_t most = 0;
  const auto read = options.read_target;
  options.read_target = [&](std::span<const std::uint64_t> tiles, std::byte* out) {
    std::uint64_t bytes = 0;
    for (const std::uint64_t tile : tiles) {
      EXPECT_TRUE(dtype_is_float(history.layout->tensors()[history.layout->tensor_of_tile(tile)].spec.dtype));
      bytes += tile_shape(*history.layout, tile).raw_bytes();
    }
    most = std::max(most, bytes);
    return read(tiles, out);
  };
  ASSERT_TRUE(compact_from_target(*history.layout, history.deltas[0], options, pool));
  EXPECT_GT(most, 0u);
  EXPECT_LE(most, kBatchBytesTarget);
}

TEST(CompactFromTarget, WithoutTheTargetThereIsNone) {
  const History history = one_step(0.01, 11);
  ThreadPool pool(2, "test");
  MergeOptions options;
  auto made = compact_from_target(*history.layout, history.deltas[0], options, pool);
  ASSERT_TRUE(made) << made.error().to_string();
  EXPECT_FALSE(made->has_value());
  options.read_target = [](auto, auto*) { return false; };
  made = compact_from_target(*history.layout, history.deltas[0], options, pool);
  ASSERT_TRUE(made) << made.error().to_string();
  EXPECT_FALSE(made->has_value());
}

TEST(CompactFromTarget, AnotherVersionsTilesAreFound) {
  History history = one_step(0.01, 13);
  const TileRecord first = [&] {
    for (const Frame& frame : history.deltas[0].frames) {
      const auto records = parse_frame(*history.layout, frame.bytes).value();
      for (const TileRecord& r : records) {
        if (r.codec == Codec::rice_ulp) return r;
      }
    }
    return TileRecord();
  }();
  const Tile tile = tile_of(*history.layout, first.tile);
  const Tensor& tensor = history.layout->tensors()[tile.tensor];
  history.halves[1][tensor.offset + tile.rect.row * tensor.row_bytes() + tile.rect.col * tensor.element_bytes] ^=
      std::byte{1};
  const auto made = from_target(history, history.deltas[0]);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code(), Errc::corrupt);
  EXPECT_THAT(made.error().message(), HasSubstr(tile_name(*history.layout, first.tile)));
  EXPECT_THAT(made.error().message(), HasSubstr("not of the delta's target"));
}

TEST(CompactFromTarget, BadDeltasAndCancelling) {
  History history = one_step(0.01, 15);
  std::atomic<bool> cancel{true};
  MergeOptions options = history.with_target();
  options.cancel = &cancel;
  ThreadPool pool(2, "test");
  EXPECT_EQ(compact_from_target(*history.layout, history.deltas[0], options, pool).error().code(), Errc::cancelled);
  history.deltas[0].frames[0].bytes.back() ^= std::byte{1};
  EXPECT_EQ(from_target(history, history.deltas[0]).error().code(), Errc::corrupt);
}

}  // namespace
}  // namespace deltasync::delta
