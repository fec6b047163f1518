// Every byte exactly once: plans of many writers, and the calls of one.
#include "format/coverage.hpp"

#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace deltasync {
namespace {

using testing::HasSubstr;

LayoutPtr layout_of(std::vector<std::pair<std::string, std::vector<std::uint64_t>>> tensors) {
  std::vector<TensorSpec> specs;
  for (auto& [name, shape] : tensors) {
    TensorSpec s;
    s.name = name;
    s.shape = shape;
    specs.push_back(std::move(s));
  }
  auto layout = Layout::build(std::move(specs));
  EXPECT_TRUE(layout.ok()) << layout.error().to_string();
  return std::move(layout).value();
}

LayoutPtr example() {
  return layout_of({{"x", {10, 64}}, {"empty", {0, 3}}, {"y", {4, 8}}, {"z", {}}});
}

TensorSlice whole(const Layout& layout, std::uint32_t tensor) {
  const auto& t = layout.tensors()[tensor];
  return {tensor, {0, 0, t.rows, t.cols}};
}

void expect_error(const Status& status, Errc code, const std::string& message) {
  ASSERT_FALSE(status.ok()) << "expected: " << message;
  EXPECT_EQ(status.error().code(), code) << status.error().to_string();
  EXPECT_THAT(status.error().message(), HasSubstr(message));
}

// ---- plans of all writers -------------------------------------------------------------------------------------

TEST(CheckCoverage, AcceptsWhatCoversOnce) {
  const auto layout = example();
  const std::vector<TensorSlice> slices = {{2, {0, 0, 4, 8}},  {0, {5, 0, 5, 64}},  {3, {0, 0, 1, 1}},
                                           {0, {0, 0, 5, 20}}, {0, {0, 20, 5, 44}}, {1, {0, 0, 0, 0}},
                                           {0, {10, 64, 0, 0}}};
  const auto status = check_coverage(*layout, slices);
  EXPECT_TRUE(status.ok()) << status.error().to_string();
  EXPECT_TRUE(check_coverage(*layout_of({}), {}).ok());
}

TEST(CheckCoverage, NamesWhatIsWrittenTwice) {
  const auto layout = example();
  const auto rest = std::vector<TensorSlice>{whole(*layout, 2), whole(*layout, 3)};
  const auto with = [&](std::vector<TensorSlice> slices) {
    slices.insert(slices.end(), rest.begin(), rest.end());
    return check_coverage(*layout, slices);
  };
  expect_error(with({{0, {0, 0, 9, 64}}, {0, {3, 0, 7, 64}}}), Errc::coverage, "written twice: x rows 3..9");
  expect_error(with({{0, {0, 0, 10, 33}}, {0, {0, 32, 10, 32}}}), Errc::coverage, "written twice: x columns 32..33");
  expect_error(with({{0, {0, 0, 10, 64}}, {0, {4, 5, 1, 1}}}), Errc::coverage,
               "written twice: x rows 4..5, columns 5..6");
  expect_error(with({whole(*layout, 0), whole(*layout, 0)}), Errc::coverage, "written twice: x");
  // Areas that add up although one part is written twice and another never.
  expect_error(with({{0, {0, 0, 6, 64}}, {0, {5, 0, 4, 64}}}), Errc::coverage, "written twice: x rows 5..6");
}

TEST(CheckCoverage, NamesWhatIsNeverWritten) {
  const auto layout = example();
  const auto rest = std::vector<TensorSlice>{whole(*layout, 0), whole(*layout, 3)};
  const auto with = [&](std::vector<TensorSlice> slices) {
    slices.insert(slices.end(), rest.begin(), rest.end());
    return check_coverage(*layout, slices);
  };
  expect_error(with({}), Errc::coverage, "never written: y");
  expect_error(with({{2, {2, 0, 2, 8}}}), Errc::coverage, "never written: y rows 0..2");
  expect_error(with({{2, {0, 0, 3, 8}}}), Errc::coverage, "never written: y rows 3..4");
  expect_error(with({{2, {0, 0, 1, 8}}, {2, {2, 0, 2, 8}}}), Errc::coverage, "never written: y rows 1..2");
  expect_error(with({{2, {0, 0, 4, 3}}, {2, {0, 5, 4, 3}}}), Errc::coverage, "never written: y columns 3..5");
  expect_error(with({{2, {0, 0, 2, 8}}, {2, {2, 1, 2, 7}}}), Errc::coverage,
               "never written: y rows 2..4, columns 0..1");
}

TEST(CheckCoverage, RefusesSlicesOutsideTheirTensor) {
  const auto layout = example();
  const std::uint64_t huge = ~std::uint64_t{0};
  for (const Rect& rect : {Rect{0, 0, 11, 64}, Rect{0, 0, 10, 65}, Rect{10, 0, 1, 64}, Rect{0, 60, 1, 5},
                           Rect{huge, 0, 2, 64}, Rect{1, 1, huge, huge}, Rect{0, 0, huge, 1}}) {
    expect_error(check_coverage(*layout, std::vector<TensorSlice>{{0, rect}}), Errc::out_of_range, "x has 10 rows");
  }
  expect_error(check_coverage(*layout, std::vector<TensorSlice>{{4, {0, 0, 1, 1}}}), Errc::out_of_range,
               "tensor 4 of 4");
  expect_error(check_disjoint(*layout, std::vector<TensorSlice>{{1, {0, 0, 1, 1}}}), Errc::out_of_range,
               "empty has 0 rows");
}

TEST(CheckCoverage, DisjointNeedsNoWholeLayout) {
  const auto layout = example();
  EXPECT_TRUE(check_disjoint(*layout, std::vector<TensorSlice>{{0, {1, 1, 2, 2}}, {0, {1, 3, 2, 2}}}).ok());
  expect_error(check_disjoint(*layout, std::vector<TensorSlice>{{0, {1, 1, 2, 2}}, {0, {2, 2, 2, 2}}}), Errc::coverage,
               "written twice: x rows 2..3, columns 2..3");
}

/// Cuts a rectangle at random into disjoint parts that cover it.
void split(const Rect& rect, std::mt19937_64& random, int depth, std::vector<Rect>& out) {
  if (depth == 0 || rect.elements() < 2) {
    out.push_back(rect);
    return;
  }
  Rect a = rect;
  Rect b = rect;
  if ((random() & 1) != 0 ? rect.rows > 1 : rect.cols == 1) {
    a.rows = 1 + random() % (rect.rows - 1);
    b.row += a.rows;
    b.rows -= a.rows;
  } else if (rect.cols > 1) {
    a.cols = 1 + random() % (rect.cols - 1);
    b.col += a.cols;
    b.cols -= a.cols;
  } else {
    out.push_back(rect);
    return;
  }
  split(a, random, depth - 1, out);
  split(b, random, depth - 1, out);
}

struct RandomPartition {
  LayoutPtr layout;
  std::vector<TensorSlice> slices;
};
RandomPartition make_partition(std::mt19937_64& random) {
  RandomPartition p;
  p.layout = layout_of({{"a", {1 + random() % 9, 1 + random() % 9}}, {"b", {1 + random() % 30, 1 + random() % 30}}});
  for (std::uint32_t t = 0; t < 2; ++t) {
    std::vector<Rect> rects;
    split(whole(*p.layout, t).rect, random, static_cast<int>(random() % 6), rects);
    for (const auto& r : rects) p.slices.push_back({t, r});
  }
  std::shuffle(p.slices.begin(), p.slices.end(), random);
  return p;
}

/// One of the ways to spoil a partition: drop, double, grow or shrink one rectangle.
bool spoil(RandomPartition& p, std::mt19937_64& random) {
  const auto i = random() % p.slices.size();
  const auto& t = p.layout->tensors()[p.slices[i].tensor];
  Rect& r = p.slices[i].rect;
  switch (random() % 4) {
    case 0: p.slices.erase(p.slices.begin() + static_cast<std::ptrdiff_t>(i)); return true;
    case 1: p.slices.push_back(p.slices[i]); return true;
    case 2:
      if (r.row + r.rows < t.rows) return ++r.rows, true;
      if (r.col > 0) return --r.col, ++r.cols, true;
      return false;
    default:
      if (r.cols > 1) return --r.cols, true;
      if (r.rows > 1) return ++r.row, --r.rows, true;
      return false;
  }
}

Status add_all(Coverage& coverage, const std::vector<TensorSlice>& slices) {
  for (const auto& s : slices) DS_TRY(coverage.add(s.tensor, s.rect));
  return coverage.finish();
}

TEST(CheckCoverage, RandomPartitionsPassAndSpoiledOnesFail) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 3000; ++i) {
    auto p = make_partition(random);
    ASSERT_TRUE(check_coverage(*p.layout, p.slices).ok()) << i;
    if (!spoil(p, random)) continue;
    const auto status = check_coverage(*p.layout, p.slices);
    ASSERT_FALSE(status.ok()) << i;
    ASSERT_EQ(status.error().code(), Errc::coverage);
  }
}

TEST(CheckCoverage, HundredThousandTensorsOfEightWriters) {
  std::vector<TensorSpec> specs(100'000);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    specs[i].name = "t" + std::to_string(i);
    specs[i].shape = {64, 64};
  }
  const auto layout = Layout::build(std::move(specs));
  ASSERT_TRUE(layout.ok());
  std::vector<TensorSlice> slices;
  for (std::uint64_t writer = 0; writer < 8; ++writer) {
    for (std::uint32_t t = 0; t < 100'000; ++t) slices.push_back({t, {writer * 8, 0, 8, 64}});
  }
  EXPECT_TRUE(check_coverage(**layout, slices).ok());
  slices.pop_back();
  expect_error(check_coverage(**layout, slices), Errc::coverage, "never written: t99999 rows 56..64");
}

TEST(CheckCoverage, ManySlicesOfOneTensorStayFast) {
  // 300,000 slices as rows, and as a staircase that keeps half of them active at once: quadratic work would take hours.
  const std::uint64_t n = 300'000;
  const auto layout = layout_of({{"w", {n, n}}});
  std::vector<TensorSlice> rows;
  std::vector<TensorSlice> stairs;
  for (std::uint64_t i = 0; i < n; ++i) {
    rows.push_back({0, {i, 0, 1, n}});
    stairs.push_back({0, {0, i, i + 1, 1}});
    if (i + 1 < n) stairs.push_back({0, {i + 1, i, n - i - 1, 1}});
  }
  EXPECT_TRUE(check_coverage(*layout, rows).ok());
  EXPECT_TRUE(check_coverage(*layout, stairs).ok());
}

// ---- one writer's fills ---------------------------------------------------------------------------------------

TEST(Coverage, WithoutAPlanEverythingMustBeWrittenOnce) {
  const auto layout = example();
  Coverage c(layout);
  EXPECT_TRUE(add_all(c, {whole(*layout, 0), whole(*layout, 2), whole(*layout, 3)}).ok());

  c.reset();
  expect_error(c.finish(), Errc::coverage, "never written: x");

  c.reset();
  expect_error(add_all(c, {whole(*layout, 0), whole(*layout, 0)}), Errc::coverage, "written twice: x");

  c.reset();
  expect_error(add_all(c, {{0, {0, 0, 4, 64}}, {0, {3, 0, 2, 64}}}), Errc::coverage, "written twice: x rows 3..4");

  c.reset();
  expect_error(add_all(c, {{0, {0, 0, 4, 64}}, whole(*layout, 0)}), Errc::coverage, "written twice: x rows 0..4");

  c.reset();
  expect_error(add_all(c, {whole(*layout, 0), {0, {2, 2, 1, 1}}}), Errc::coverage,
               "written twice: x rows 2..3, columns 2..3");

  c.reset();
  expect_error(add_all(c, {{0, {0, 0, 4, 64}}, {0, {6, 0, 4, 64}}, whole(*layout, 2), whole(*layout, 3)}),
               Errc::coverage, "never written: x rows 4..6");

  c.reset();
  expect_error(add_all(c, {whole(*layout, 0), whole(*layout, 3)}), Errc::coverage, "never written: y");

  c.reset();
  expect_error(c.add(0, {5, 0, 6, 64}), Errc::out_of_range, "x has 10 rows");
  expect_error(c.add(9, {0, 0, 0, 0}), Errc::out_of_range, "tensor 9 of 4");
}

TEST(Coverage, EmptyRectanglesCountForNothing) {
  const auto layout = example();
  Coverage c(layout);
  const std::vector<TensorSlice> calls = {whole(*layout, 0),   whole(*layout, 1), whole(*layout, 1),
                                          {0, {10, 0, 0, 64}}, whole(*layout, 2), whole(*layout, 3)};
  for (int i = 0; i < 3; ++i) {
    c.reset();
    EXPECT_TRUE(add_all(c, calls).ok());
  }
}

TEST(Coverage, AFillThatLeavesTheLastOnesCallsIsCheckedInFull) {
  const auto layout = example();
  const std::vector<TensorSlice> calls = {{0, {0, 0, 5, 64}}, {0, {5, 0, 5, 64}}, whole(*layout, 2), whole(*layout, 3)};
  Coverage c(layout);
  const auto again = [&](const std::vector<TensorSlice>& list) {
    c.reset();
    return add_all(c, list);
  };
  ASSERT_TRUE(again(calls).ok());
  ASSERT_TRUE(again(calls).ok());
  expect_error(again({calls[0], calls[1], calls[2]}), Errc::coverage, "never written: z");
  expect_error(again({calls[0], calls[1], calls[2], calls[3], calls[1]}), Errc::coverage,
               "written twice: x rows 5..10");
  expect_error(again({calls[0], calls[0]}), Errc::coverage, "written twice: x rows 0..5");
  expect_error(again({calls[0], calls[2], calls[3]}), Errc::coverage, "never written: x rows 5..10");
  expect_error(again({}), Errc::coverage, "never written: x");
  ASSERT_TRUE(again({calls[3], calls[1], calls[2], calls[0]}).ok());
  ASSERT_TRUE(again(calls).ok());
  ASSERT_TRUE(again(calls).ok());
}

TEST(Coverage, RandomFillsAgreeWithTheCheckOfPlans) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 1000; ++i) {
    auto p = make_partition(random);
    Coverage c(p.layout);
    for (int fill = 0; fill < 6; ++fill) {
      auto q = p;
      if (fill % 2 == 1) spoil(q, random);
      if (fill == 4) std::shuffle(q.slices.begin(), q.slices.end(), random);
      c.reset();
      const auto tracked = add_all(c, q.slices);
      const auto checked = check_coverage(*q.layout, q.slices);
      ASSERT_EQ(tracked.ok(), checked.ok()) << "seed case " << i << " fill " << fill;
    }
  }
}

TEST(Coverage, WithAPlanExactlyItsRectangles) {
  const auto layout = example();
  Coverage c(layout);
  const std::vector<TensorSlice> plan = {{0, {0, 0, 5, 64}}, {0, {5, 0, 2, 64}}, {2, {0, 0, 4, 4}}, {1, {0, 0, 0, 0}}};
  ASSERT_TRUE(c.set_plan(plan).ok());
  for (int i = 0; i < 2; ++i) {
    c.reset();
    EXPECT_TRUE(add_all(c, plan).ok());
    c.reset();
    EXPECT_TRUE(add_all(c, {plan[2], plan[0], plan[1]}).ok());
  }
  c.reset();
  expect_error(c.add(0, {0, 0, 4, 64}), Errc::coverage, "not in this writer's plan: x rows 0..4");
  c.reset();
  expect_error(c.add(3, {0, 0, 1, 1}), Errc::coverage, "not in this writer's plan: z");
  c.reset();
  expect_error(add_all(c, {plan[0], plan[0]}), Errc::coverage, "written twice: x rows 0..5");
  c.reset();
  expect_error(add_all(c, {plan[1], plan[2]}), Errc::coverage, "never written: x rows 0..5");
  c.reset();
  expect_error(c.finish(), Errc::coverage, "never written: x rows 0..5");
  expect_error(c.set_plan(std::vector<TensorSlice>{{0, {0, 0, 5, 64}}, {0, {4, 0, 2, 64}}}), Errc::coverage,
               "written twice: x rows 4..5");
  expect_error(c.set_plan(std::vector<TensorSlice>{{0, {0, 0, 50, 64}}}), Errc::out_of_range, "x has 10 rows");

  ASSERT_TRUE(c.set_plan({}).ok());  // a rank that has nothing to write
  EXPECT_TRUE(c.finish().ok());
  expect_error(c.add(0, {0, 0, 10, 64}), Errc::coverage, "not in this writer's plan");
  c.clear_plan();
  EXPECT_TRUE(add_all(c, {whole(*layout, 0), whole(*layout, 2), whole(*layout, 3)}).ok());
}

TEST(RectSet, JoinsRangesAndFindsHoles) {
  RectSet set;
  EXPECT_EQ(set.first_hole(4, 4), (Rect{0, 0, 4, 4}));
  EXPECT_EQ(set.insert({0, 0, 4, 1}), std::nullopt);
  EXPECT_EQ(set.insert({0, 3, 4, 1}), std::nullopt);
  EXPECT_EQ(set.first_hole(4, 4), (Rect{0, 1, 4, 2}));
  EXPECT_EQ(set.insert({1, 1, 2, 2}), std::nullopt);
  EXPECT_EQ(set.first_hole(4, 4), (Rect{0, 1, 1, 2}));
  EXPECT_EQ(set.insert({0, 0, 1, 4}), (Rect{0, 0, 1, 1}));
  EXPECT_EQ(set.insert({0, 1, 1, 2}), std::nullopt);
  EXPECT_EQ(set.first_hole(4, 4), (Rect{3, 1, 1, 2}));
  EXPECT_EQ(set.insert({3, 1, 1, 2}), std::nullopt);
  EXPECT_EQ(set.first_hole(4, 4), std::nullopt);
  EXPECT_EQ(set.elements(), 16u);
}

TEST(RectSet, ARangeThatFillsAGapJoinsBothSides) {
  RectSet set;
  for (const auto& rect : {Rect{0, 0, 1, 2}, Rect{0, 4, 1, 2}, Rect{0, 2, 1, 2}})
    EXPECT_EQ(set.insert(rect), std::nullopt);
  EXPECT_EQ(set.first_hole(1, 10), (Rect{0, 6, 1, 4}));
  EXPECT_EQ(set.insert({0, 3, 1, 5}), (Rect{0, 3, 1, 3}));
}

}  // namespace
}  // namespace deltasync
