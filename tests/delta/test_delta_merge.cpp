// Chains of deltas as one: it has the effect of the direct delta, and where the records alone cannot tell it, it says
// so.
#include <gmock/gmock-matchers.h>

#include <optional>

#include "merge_history.hpp"
#include "tests/support/model.hpp"

namespace deltasync::delta::test {
namespace {

using ::testing::HasSubstr;

void expect_same(const Delta& a, const Delta& b) {
  EXPECT_TRUE(same_bytes(to_container(a), to_container(b)));
  for (std::size_t c = 0; c < kCodecEnd; ++c) {
    EXPECT_EQ(a.stats[c].tiles, b.stats[c].tiles) << c;
    EXPECT_EQ(a.stats[c].changed, b.stats[c].changed) << c;
    EXPECT_EQ(a.stats[c].bytes, b.stats[c].bytes) << c;
  }
}

/// That `merged` leads from the first version to the last, in batches' frames, and survives its container.
void expect_leads_to_the_end(const History& history, const Delta& merged) {
  const Layout& layout = *history.layout;
  EXPECT_EQ(merged.from, history.deltas.front().from);
  EXPECT_EQ(merged.to, history.deltas.back().to);
  EXPECT_EQ(merged.from_root, history.deltas.front().from_root);
  EXPECT_EQ(merged.to_root, history.deltas.back().to_root);
  expect_round_trip(layout, history.halves.front(), history.halves.back(), merged);
  const auto again = from_container(to_container(merged), layout);
  ASSERT_TRUE(again.ok()) << again.error().to_string();
  expect_same(*again, merged);
  const std::vector<Batch> batches = make_batches(layout);
  auto batch = batches.begin();
  for (const Frame& frame : merged.frames) {
    while (batch != batches.end() && batch->end <= frame.first_tile) ++batch;
    ASSERT_NE(batch, batches.end());
    EXPECT_GE(frame.first_tile, batch->first);
    EXPECT_LT(frame.last_tile, batch->end);
    ++batch;  // one frame a batch
  }
}

// ---- the effect ------------------------------------------------------------------------------------------------

TEST(Merge, GentleStepsGiveTheDirectDeltaBitForBit) {
  const TestModel model = make_model(3, one_of_each_dtype());
  for (const std::size_t steps : {1U, 2U, 5U, 8U}) {
    for (const double density : {0.01, 0.1}) {
      History history(model);
      for (std::size_t i = 0; i < steps; ++i) {
        history.push(step_gently(history.halves.back(), *model.layout, density, 10 * steps + i));
      }
      const auto merged = merge_history(history);
      ASSERT_TRUE(merged.ok()) << merged.error().to_string();
      ASSERT_TRUE(merged->has_value());
      // A float that passes zero jumps over all that its sign bit means, in the direct delta as in the sum.
      expect_same(**merged, history.direct());
      if (steps > 1) {
        EXPECT_LT((*merged)->frame_bytes, history.chain_bytes());
      }
    }
  }
}

#ifdef __SANITIZE_THREAD__
constexpr std::uint64_t kChains = 2;  // each takes this build a minute
#elif defined(DELTASYNC_SANITIZED)
constexpr std::uint64_t kChains = 7;  // with each number of steps
#else
constexpr std::uint64_t kChains = 14;
#endif

/// The form of each step; none: drawn for each.
class RandomChains : public ::testing::TestWithParam<std::optional<ValueForm>> {};

TEST_P(RandomChains, LeadToTheEnd) {
  std::size_t without_target = 0;
  for (std::uint64_t seed = 1; seed <= kChains; ++seed) {
    const TestModel model = make_model(seed);
    Random random(seed);
    History history(model);
    const std::uint64_t steps = 2 + seed % 7;
    for (std::uint64_t i = 0; i < steps; ++i) {
      constexpr double kDensities[] = {0.0005, 0.01, 0.08, 0.4};
      std::vector<std::byte> half = history.halves.back();
      mutate(half, *model.layout, kDensities[random.below(4)], 100 * seed + i);
      for (const Tensor& tensor : model.layout->tensors()) {
        const auto first = half.begin() + static_cast<std::ptrdiff_t>(tensor.offset);
        const auto bytes = static_cast<std::ptrdiff_t>(tensor.bytes);
        switch (random.below(12)) {
          case 0:  // as it was some versions ago
            std::copy_n(history.halves[random.below(history.halves.size())].begin() + (first - half.begin()), bytes,
                        first);
            break;
          case 1:  // all new: raw
            std::generate_n(first, bytes, [&] { return static_cast<std::byte>(random.next()); });
            break;
          default: break;
        }
      }
      const ValueForm drawn = random.below(2) == 0 ? ValueForm::ulp : ValueForm::absolute;
      history.push(std::move(half), GetParam().value_or(drawn));
    }
    const auto merged = merge_history(history, history.with_target());
    ASSERT_TRUE(merged.ok()) << merged.error().to_string();
    ASSERT_TRUE(merged->has_value());
    expect_leads_to_the_end(history, **merged);
    const auto threaded = merge_history(history, history.with_target(), 3);
    ASSERT_TRUE(threaded.ok());
    expect_same(**threaded, **merged);
    const auto alone = merge_history(history);
    ASSERT_TRUE(alone.ok()) << alone.error().to_string();
    if (!alone->has_value()) continue;
    ++without_target;
    expect_leads_to_the_end(history, **alone);
  }
  if (GetParam() == ValueForm::absolute) {
    EXPECT_GT(without_target, kChains / 3);
  }
}
INSTANTIATE_TEST_SUITE_P(Forms, RandomChains,
                         ::testing::Values(ValueForm::ulp, ValueForm::absolute, std::optional<ValueForm>()),
                         [](const auto& form) {
                           return !form.param ? "mixed" : *form.param == ValueForm::ulp ? "ulp" : "absolute";
                         });

TEST(Merge, MergesOfMergesAreTheMergeOfAll) {
  const TestModel model = make_model(5);
  History history(model);
  for (std::uint64_t i = 0; i < 4; ++i) {
    std::vector<std::byte> half = history.halves.back();
    mutate(half, *model.layout, 0.02, 50 + i);
    history.push(std::move(half), ValueForm::absolute);
  }
  const auto chain = history.chain();
  ThreadPool pool(2, "test");
  const auto first = merge(*model.layout, std::span(chain).first(3), {}, pool);
  ASSERT_TRUE(first.ok() && first->has_value());
  const Delta* const rest[] = {&**first, chain[3]};
  const auto both = merge(*model.layout, rest, {}, pool);
  const auto all = merge_history(history);
  ASSERT_TRUE(both.ok() && both->has_value() && all.ok() && all->has_value());
  expect_same(**both, **all);
}

TEST(Merge, WhatGoesBackLeavesNoRecord) {
  const TestModel model = make_model(8, one_of_each_dtype());
  const Layout& layout = *model.layout;
  History history(model);
  history.push(step_gently(history.halves.back(), layout, 0.01, 1));
  history.push(step_gently(history.halves.back(), layout, 0.01, 2));
  // The first tensor goes back as a whole; of the others a few elements stay moved.
  std::vector<std::byte> end = model.half;
  for (std::size_t t = 1; t < layout.tensors().size(); ++t) {
    const Tensor& tensor = layout.tensors()[t];
    for (const std::size_t i : {0U, 7U, 14U, 15U}) end[tensor.offset + i * tensor.element_bytes] ^= std::byte{1};
  }
  history.push(end);
  const auto merged = merge_history(history);
  ASSERT_TRUE(merged.ok() && merged->has_value());
  EXPECT_EQ((*merged)->changed, 4 * (layout.tensors().size() - 1));
  for (const Frame& frame : (*merged)->frames) {
    for (const TileRecord& record : records_of(layout, frame.bytes)) {
      EXPECT_NE(layout.tensor_of_tile(record.tile), 0U);
      EXPECT_EQ(record.changed, 4U);
    }
  }
  expect_leads_to_the_end(history, **merged);
  history.push(model.half);
  const auto nothing = merge_history(history);
  ASSERT_TRUE(nothing.ok() && nothing->has_value());
  EXPECT_TRUE((*nothing)->frames.empty());
  EXPECT_EQ((*nothing)->to_root, (*nothing)->from_root);
}

/// One tile of `elements` elements.
TestModel one_tile(Dtype dtype, std::uint64_t elements) {
  return make_model(4, {{"t", dtype, {elements}, {}, {}}});
}

/// The model's half with elements [first, end) of one byte each moved by `by`, every `stride`-th of them.
std::vector<std::byte> moved(std::vector<std::byte> half, std::size_t first, std::size_t end, unsigned by,
                             std::size_t stride = 1) {
  for (std::size_t i = first; i < end; i += stride) {
    half[i] = static_cast<std::byte>(static_cast<unsigned>(half[i]) + by);
  }
  return half;
}

TEST(Merge, HalfOfTheRangeTwiceIsNothing) {
  const TestModel model = one_tile(Dtype::i64, 1000);
  History history(model);
  for (int i = 0; i < 2; ++i) {
    std::vector<std::byte> half = history.halves.back();
    for (std::size_t at = 0; at < 4000; at += 40) half[at] ^= std::byte{1};  // small ones, so that ulp is the smallest
    half[407] ^= std::byte{0x80};                                            // − 2^63 modulo 2^64, both times
    for (std::size_t at = 4000; at < 8000; at += 80) half[at] ^= static_cast<std::byte>(1 + i);
    history.push(std::move(half));
  }
  ASSERT_EQ(history.deltas[0].stats[static_cast<unsigned>(Codec::rice_ulp)].tiles, 1U);
  const auto merged = merge_history(history);
  ASSERT_TRUE(merged.ok() && merged->has_value());
  EXPECT_EQ((*merged)->changed, 50U);
  expect_same(**merged, history.direct());
}

// ---- what the records alone cannot tell --------------------------------------------------------------------------

TEST(Merge, DifferencesBesideValuesNeedTheTarget) {
  const TestModel model = one_tile(Dtype::u8, 4000);
  History history(model);
  history.push(moved(model.half, 0, 400, 1, 4));
  history.push(moved(history.halves.back(), 2000, 2040, 100, 4));
  ASSERT_EQ(history.deltas[0].stats[static_cast<unsigned>(Codec::rice_ulp)].tiles, 1U);
  ASSERT_EQ(history.deltas[1].stats[static_cast<unsigned>(Codec::rice_absolute)].tiles, 1U);
  const auto alone = merge_history(history);
  ASSERT_TRUE(alone.ok()) << alone.error().to_string();
  EXPECT_FALSE(alone->has_value());
  MergeOptions refuses;
  refuses.read_target = [](std::span<const std::uint64_t>, std::byte*) { return false; };
  EXPECT_FALSE(merge_history(history, refuses)->has_value());
  const auto merged = merge_history(history, history.with_target());
  ASSERT_TRUE(merged.ok() && merged->has_value());
  EXPECT_EQ((*merged)->stats[static_cast<unsigned>(Codec::rice_absolute)].changed, 110U);
  expect_leads_to_the_end(history, **merged);
}

TEST(Merge, DifferencesOnTopOfValuesAreValues) {
  for (const Dtype dtype : {Dtype::u8, Dtype::f8_e4m3}) {
    const TestModel model = one_tile(dtype, 4000);
    History history(model);
    history.push(moved(model.half, 2000, 2040, 100, 4));
    history.push(moved(history.halves.back(), 2000, 2040, 1, 4));
    history.push(moved(history.halves.back(), 2000, 2036, 1, 4));
    ASSERT_EQ(history.deltas[0].stats[static_cast<unsigned>(Codec::rice_absolute)].tiles, 1U);
    ASSERT_EQ(history.deltas[1].stats[static_cast<unsigned>(Codec::rice_ulp)].tiles, 1U);
    const auto merged = merge_history(history);
    ASSERT_TRUE(merged.ok() && merged->has_value());
    EXPECT_EQ((*merged)->stats[static_cast<unsigned>(Codec::rice_absolute)].changed, 10U);
    expect_leads_to_the_end(history, **merged);
  }
}

/// The same of every width; and a target that is not to be had is not needed either.
TEST(Merge, ValuesOfEveryWidthTakeDifferences) {
  for (const Dtype dtype : {Dtype::u8, Dtype::bf16, Dtype::i16, Dtype::f32, Dtype::i32, Dtype::f64, Dtype::i64}) {
    const TestModel model = one_tile(dtype, 4000);
    const std::size_t width = dtype_bytes(dtype);
    const auto step = [&](const std::vector<std::byte>& half, std::size_t end, unsigned by) {
      return moved(half, 2000 * width, end * width, by, 4 * width);
    };
    History history(model);
    history.push(step(model.half, 2400, 3), ValueForm::absolute);
    history.push(step(history.halves.back(), 2400, 1), ValueForm::ulp);
    history.push(step(history.halves.back(), 2200, 255), ValueForm::ulp);
    ASSERT_EQ(history.deltas[0].stats[static_cast<unsigned>(Codec::rice_absolute)].tiles, 1U) << to_string(dtype);
    for (const std::size_t i : {1U, 2U}) {
      ASSERT_EQ(history.deltas[i].stats[static_cast<unsigned>(Codec::rice_ulp)].tiles, 1U) << to_string(dtype);
    }
    MergeOptions refuses;
    refuses.read_target = [](std::span<const std::uint64_t>, std::byte*) { return false; };
    for (const MergeOptions& options : {MergeOptions(), refuses}) {
      const auto merged = merge_history(history, options);
      ASSERT_TRUE(merged.ok() && merged->has_value()) << to_string(dtype);
      EXPECT_EQ((*merged)->stats[static_cast<unsigned>(Codec::rice_absolute)].changed, 100U);
      expect_leads_to_the_end(history, **merged);
    }
  }
}

/// A tile with a raw record needs no target, whatever came before and after.
TEST(Merge, RawInTheMiddleStaysRaw) {
  const TestModel model = one_tile(Dtype::bf16, 4000);
  History history(model);
  history.push(step_gently(model.half, *model.layout, 0.1, 1));
  std::vector<std::byte> half = model.half;
  for (std::byte& b : half) b = ~b;
  history.push(half);
  history.push(step_gently(half, *model.layout, 0.1, 2));
  half = history.halves.back();
  std::fill_n(half.begin() + 100, 8, std::byte{0x55});
  history.push(half, ValueForm::absolute);
  ASSERT_EQ(history.deltas[1].stats[static_cast<unsigned>(Codec::raw)].tiles, 1U);
  const auto merged = merge_history(history);
  ASSERT_TRUE(merged.ok() && merged->has_value());
  EXPECT_EQ((*merged)->stats[static_cast<unsigned>(Codec::raw)].tiles, 1U);
  expect_leads_to_the_end(history, **merged);
}

/// A tile that changes here and there is of one kind all the same.
TEST(Merge, FewChangesBesideManyNeedNoTarget) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f8_e4m3, Dtype::i8}) {
    const TestModel model = one_tile(dtype, 4000);
    const std::size_t width = dtype_bytes(dtype);
    History history(model);
    history.push(moved(model.half, 40 * width, 41 * width, 1, width));
    history.push(step_gently(history.halves.back(), *model.layout, 0.1, 4));
    history.push(moved(history.halves.back(), 80 * width, 91 * width, 1, 10 * width));
    EXPECT_EQ(history.deltas[0].stats[static_cast<unsigned>(Codec::rice_ulp)].changed, 1U) << to_string(dtype);
    EXPECT_EQ(history.deltas[2].stats[static_cast<unsigned>(Codec::rice_ulp)].changed, 2U) << to_string(dtype);
    const auto merged = merge_history(history);
    ASSERT_TRUE(merged.ok() && merged->has_value()) << to_string(dtype);
    expect_same(**merged, history.direct());
  }
}

TEST(Merge, DifferencesLongerThanTheTileNeedTheTarget) {
  const TestModel model = one_tile(Dtype::u8, 4000);
  History history(model);
  // Each step by one every second element, but together far enough that their sum takes more than a byte each.
  for (unsigned i = 0; i < 44; ++i) history.push(moved(history.halves.back(), i % 2, 4000, 3, 2));
  ASSERT_EQ(history.deltas[0].stats[static_cast<unsigned>(Codec::rice_ulp)].tiles, 1U);
  const auto alone = merge_history(history);
  ASSERT_TRUE(alone.ok()) << alone.error().to_string();
  EXPECT_FALSE(alone->has_value());
  const auto merged = merge_history(history, history.with_target());
  ASSERT_TRUE(merged.ok() && merged->has_value());
  EXPECT_EQ((*merged)->stats[static_cast<unsigned>(Codec::raw)].tiles, 1U);
  expect_leads_to_the_end(history, **merged);
}

TEST(Merge, ATileOfAnotherVersionIsFound) {
  const TestModel model = one_tile(Dtype::u8, 4000);
  History history(model);
  history.push(moved(model.half, 0, 400, 1, 4));
  history.push(moved(history.halves.back(), 2000, 2040, 100, 4));
  MergeOptions options = history.with_target();
  history.halves.back()[0] ^= std::byte{1};
  const auto merged = merge_history(history, options);
  ASSERT_FALSE(merged.ok());
  EXPECT_EQ(merged.error().code(), Errc::corrupt);
  EXPECT_THAT(merged.error().message(), HasSubstr("tile 0 of t"));
}

}  // namespace
}  // namespace deltasync::delta::test
