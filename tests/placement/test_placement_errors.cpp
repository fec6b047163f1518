// What a plan may not say, one mistake at a time, and that the message names what is wrong.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <utility>

#include "deltasync/placement.hpp"

namespace deltasync {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class PlacementErrors : public testing::Test {
 protected:
  PlacementErrors() {
    auto layout = Layout::build({{"q", Dtype::bf16, {64, 32}, {}, {}},
                                 {"k", Dtype::bf16, {16, 32}, {}, {}},
                                 {"scale", Dtype::f32, {32}, {}, {}},
                                 {"none", Dtype::bf16, {0, 4}, {}, {}}});
    EXPECT_TRUE(layout.ok());
    layout_ = *layout;
    plan_.memories = {{"qk_proj", memory_, 80 * 64, {}, Dtype::bf16}, {"norm", memory_ + 8192, 256, {}, {}}};
    plan_.slices = {{"q", {0, 0, 64, 32}, 0, 0, 64, 2},
                    {"k", {0, 0, 16, 32}, 0, 64 * 64, 64, 2},
                    {"scale", {0, 0, 1, 32}, 1, 0, 0, 4}};
  }

  testing::AssertionResult refused(const std::function<void(PlacementPlan&)>& spoil, Errc code,
                                   const testing::Matcher<std::string>& message) {
    PlacementPlan plan = plan_;
    spoil(plan);
    const auto built = Placement::build(layout_, plan);
    if (built.ok()) return testing::AssertionFailure() << "accepted";
    if (built.error().code() != code) return testing::AssertionFailure() << built.error().to_string();
    if (!message.Matches(built.error().message())) return testing::AssertionFailure() << built.error().message();
    return testing::AssertionSuccess();
  }
  testing::AssertionResult accepted(const std::function<void(PlacementPlan&)>& change) {
    PlacementPlan plan = plan_;
    change(plan);
    const auto built = Placement::build(layout_, plan);
    if (!built.ok()) return testing::AssertionFailure() << built.error().to_string();
    return testing::AssertionSuccess();
  }

  alignas(64) std::byte memory_[16384];
  LayoutPtr layout_;
  PlacementPlan plan_;
};

TEST_F(PlacementErrors, TheValidPlanIsAccepted) {
  const auto built = Placement::build(layout_, plan_);
  ASSERT_TRUE(built.ok()) << built.error().to_string();
  EXPECT_EQ((*built)->placed_bytes(), 80u * 64 + 128);
  EXPECT_EQ((*built)->rest_bytes(), 0u);
  EXPECT_EQ((*built)->slices().size(), 3u);
  EXPECT_EQ(to_string(Device{}), "host");
  EXPECT_EQ(to_string(Device{3}), "cuda:3");
}

TEST_F(PlacementErrors, Memories) {
  EXPECT_TRUE(refused([](auto& p) { p.memories[1].base = nullptr; }, Errc::invalid_argument, HasSubstr("'norm'")));
  EXPECT_TRUE(refused([](auto& p) { p.memories[1].bytes = 0; }, Errc::invalid_argument, HasSubstr("'norm'")));
  EXPECT_TRUE(refused([](auto& p) { p.memories[1].bytes = std::numeric_limits<std::uint64_t>::max(); },
                      Errc::invalid_argument, HasSubstr("'norm'")));
  EXPECT_TRUE(refused([](auto& p) { p.memories[1].device.ordinal = -2; }, Errc::invalid_argument, HasSubstr("'norm'")));
  EXPECT_TRUE(refused([](auto& p) { p.memories[1].dtype = static_cast<Dtype>(99); }, Errc::invalid_argument,
                      HasSubstr("norm")));
  EXPECT_TRUE(refused([](auto& p) { p.memories[1].name = "qk_proj"; }, Errc::invalid_argument, HasSubstr("'qk_proj'")));
  EXPECT_TRUE(refused([&](auto& p) { p.memories[1].base = memory_ + 80 * 64 - 4; }, Errc::invalid_argument,
                      AllOf(HasSubstr("'norm'"), HasSubstr("'qk_proj'"), HasSubstr("overlap"))));
  EXPECT_TRUE(accepted([&](auto& p) { p.memories[1].base = memory_ + 80 * 64; }));
  EXPECT_TRUE(accepted([&](auto& p) {  // an address of another device is another place
    p.memories[1].base = memory_;
    p.memories[1].device.ordinal = 0;
  }));
}

TEST_F(PlacementErrors, Names) {
  EXPECT_TRUE(refused([](auto& p) { p.slices[1].tensor = "v"; }, Errc::not_found,
                      AllOf(HasSubstr("'v'"), HasSubstr("slice 1"))));
  EXPECT_TRUE(refused([](auto& p) { p.slices[1].memory = 2; }, Errc::out_of_range,
                      AllOf(HasSubstr("slice 1 (k"), HasSubstr("memory 2"))));
  EXPECT_TRUE(refused(
      [](auto& p) {
        p.ignored.push_back({"v", {}});
      },
      Errc::not_found, AllOf(HasSubstr("'v'"), HasSubstr("ignored slice 0"))));
}

TEST_F(PlacementErrors, Rectangles) {
  EXPECT_TRUE(refused([](auto& p) { p.slices[1].rect.row = 1; }, Errc::out_of_range,
                      AllOf(HasSubstr("slice 1"), HasSubstr("k has 16 rows"))));
  EXPECT_TRUE(refused([](auto& p) { p.slices[1].rect.cols = ~0ull; }, Errc::out_of_range, HasSubstr("slice 1")));
  EXPECT_TRUE(refused(
      [](auto& p) {
        p.ignored.push_back({"k", Rect{16, 0, 1, 1}});
      },
      Errc::out_of_range, HasSubstr("ignored slice 0")));
}

TEST_F(PlacementErrors, Dtypes) {
  EXPECT_TRUE(refused([](auto& p) { p.memories[1].dtype = Dtype::bf16; }, Errc::invalid_argument,
                      AllOf(HasSubstr("scale"), HasSubstr("'norm'"), HasSubstr("F32"), HasSubstr("BF16"))));
  EXPECT_TRUE(accepted([](auto& p) { p.memories[1].dtype = Dtype::f32; }));
}

TEST_F(PlacementErrors, PlacesBeyondTheMemory) {
  const auto names = AllOf(HasSubstr("slice 1 (k"), HasSubstr("'qk_proj'"));
  EXPECT_TRUE(refused([](auto& p) { p.slices[1].offset += 2; }, Errc::out_of_range, names));
  EXPECT_TRUE(refused([](auto& p) { p.slices[1].row_stride += 2; }, Errc::out_of_range, names));
  EXPECT_TRUE(refused([](auto& p) { p.slices[1].col_stride = 1ull << 63; }, Errc::out_of_range, names));
  EXPECT_TRUE(refused([](auto& p) { p.slices[1].row_stride = ~1ull; }, Errc::out_of_range, names));
  EXPECT_TRUE(refused([](auto& p) { p.slices[1].offset = ~1ull; }, Errc::out_of_range, names));
  EXPECT_TRUE(refused([](auto& p) { p.memories[0].bytes -= 1; }, Errc::out_of_range, names));
  EXPECT_TRUE(refused([](auto& p) { p.slices[1].offset = 80 * 64; }, Errc::out_of_range, names));
}

TEST_F(PlacementErrors, Alignment) {
  const auto names = AllOf(HasSubstr("slice 2 (scale"), HasSubstr("'norm'"), HasSubstr("aligned"));
  EXPECT_TRUE(refused([](auto& p) { p.slices[2].offset = 2; }, Errc::invalid_argument, names));
  EXPECT_TRUE(refused([](auto& p) { p.slices[2].col_stride = 6; }, Errc::invalid_argument, names));
  EXPECT_TRUE(refused([&](auto& p) { p.memories[1].base += 2; }, Errc::invalid_argument, names));
  EXPECT_TRUE(accepted([&](auto& p) { p.memories[1].base += 4; }));
  EXPECT_TRUE(accepted([&](auto& p) { p.slices[2].row_stride = 3; })) << "of a single row";
}

TEST_F(PlacementErrors, FoldedSlices) {
  const auto names = AllOf(HasSubstr("slice 1 (k"), HasSubstr("several elements"));
  EXPECT_TRUE(refused([](auto& p) { p.slices[1].row_stride = 0; }, Errc::invalid_argument, names));
  EXPECT_TRUE(refused([](auto& p) { p.slices[1].col_stride = 0; }, Errc::invalid_argument, names));
  EXPECT_TRUE(refused([](auto& p) { p.slices[1].row_stride = 62; }, Errc::invalid_argument, names));
}

TEST_F(PlacementErrors, TwoSlicesInOnePlace) {
  EXPECT_TRUE(refused([](auto& p) { p.slices[1].offset -= 2; }, Errc::coverage,
                      AllOf(HasSubstr("'qk_proj'"), HasSubstr("slice 0 (q"), HasSubstr("slice 1 (k"))));
  EXPECT_TRUE(refused([](auto& p) { p.slices.push_back(p.slices[2]); }, Errc::coverage,
                      AllOf(HasSubstr("slice 2 (scale"), HasSubstr("slice 3 (scale"))));
  EXPECT_TRUE(accepted([](auto& p) {  // the same elements twice, in two places
    p.slices.push_back(p.slices[2]);
    p.slices.back().offset = 128;
  }));
}

TEST_F(PlacementErrors, IgnoredAndPlaced) {
  EXPECT_TRUE(refused(
      [](auto& p) {
        p.ignored.push_back({"q", Rect{63, 31, 1, 1}});
      },
      Errc::coverage, AllOf(HasSubstr("q rows 63..64, columns 31..32"), HasSubstr("slice 0"))));
  EXPECT_TRUE(refused([](auto& p) { p.ignored.push_back({"k", {}}); }, Errc::coverage, HasSubstr("k by slice 1")));
  EXPECT_TRUE(accepted([](auto& p) { p.ignored.push_back({"none", {}}); }));
  EXPECT_TRUE(accepted([](auto& p) { p.ignored.push_back({"q", Rect{3, 3, 0, 0}}); }));
}

TEST_F(PlacementErrors, Forgotten) {
  EXPECT_TRUE(refused([](auto& p) { p.slices.erase(p.slices.begin() + 1); }, Errc::coverage,
                      AllOf(HasSubstr("k"), HasSubstr("without a place"))));
  EXPECT_TRUE(refused([](auto& p) { p.slices[0].rect.rows = 63; }, Errc::coverage, HasSubstr("q rows 63..64")));
  const auto half_of_q = [](PlacementPlan& p, std::uint64_t ignored_rows) {
    p.slices[0].rect.rows = 32;
    p.ignored.push_back({"q", Rect{32, 0, ignored_rows, 32}});
    p.ignored.push_back({"q", Rect{40, 0, 8, 32}});  // may overlap each other
  };
  EXPECT_TRUE(refused([&](auto& p) { half_of_q(p, 31); }, Errc::coverage, HasSubstr("q rows 63..64")));
  EXPECT_TRUE(accepted([&](auto& p) { half_of_q(p, 32); }));
}

TEST_F(PlacementErrors, AllForgottenTensorsAreNamedUpToSome) {
  EXPECT_TRUE(refused(
      [](auto& p) {
        p.slices[0].rect.rows = 63;
        p.slices.erase(p.slices.begin() + 1);
      },
      Errc::coverage, AllOf(HasSubstr("2 of the tensors"), HasSubstr("q rows 63..64"), HasSubstr("k"))));
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 20; ++i) specs.push_back({"expert." + std::to_string(i), Dtype::bf16, {4, 4}, {}, {}});
  const auto layout = Layout::build(std::move(specs));
  ASSERT_TRUE(layout.ok());
  PlacementPlan plan;
  plan.memories = {{"experts", memory_, 32, {}, {}}};
  plan.slices = {{"expert.3", {0, 0, 4, 4}, 0, 0, 8, 2}};
  const auto built = Placement::build(*layout, plan);
  ASSERT_FALSE(built.ok());
  EXPECT_THAT(built.error().message(),
              AllOf(HasSubstr("19 of the tensors"), HasSubstr("expert.8"), HasSubstr("and 11 more")));
  EXPECT_THAT(built.error().message(), testing::Not(HasSubstr("expert.9")));
}

TEST_F(PlacementErrors, WholeMemories) {
  const auto whole = [](PlacementPlan& p) { p.memories[0].whole = true; };
  EXPECT_TRUE(accepted(whole));
  EXPECT_TRUE(refused(
      [&](auto& p) {
        whole(p);
        p.slices[1].rect.rows = 15;
        p.ignored.push_back({"k", Rect{15, 0, 1, 32}});
      },
      Errc::coverage, AllOf(HasSubstr("'qk_proj' (64 of 5120 bytes)"), testing::Not(HasSubstr("norm")))));
  EXPECT_TRUE(
      refused([](auto& p) { p.memories[1].whole = true; }, Errc::coverage, HasSubstr("'norm' (128 of 256 bytes)")));
}

TEST_F(PlacementErrors, NothingPlaced) {
  EXPECT_TRUE(refused(
      [](auto& p) {
        p.slices = {{"none", {0, 0, 0, 0}, 0, 0, 8, 2}};
        for (const char* name : {"q", "k", "scale"}) p.ignored.push_back({name, {}});
      },
      Errc::invalid_argument, HasSubstr("no slice")));
}

TEST_F(PlacementErrors, UnplacedIsWhatMayBeIgnored) {
  plan_.slices[0].rect = {8, 0, 32, 16};
  plan_.slices.pop_back();
  const auto left = unplaced(*layout_, plan_.slices);
  ASSERT_TRUE(left.ok());
  EXPECT_FALSE(Placement::build(layout_, plan_).ok());
  plan_.ignored = *left;
  const auto built = Placement::build(layout_, plan_);
  ASSERT_TRUE(built.ok()) << built.error().to_string();
  EXPECT_EQ((*built)->rest_bytes(), (64u * 32 - 32 * 16) * 2) << "q is one tile";
  plan_.slices[0].tensor = "v";
  EXPECT_FALSE(unplaced(*layout_, plan_.slices).ok());
}

TEST_F(PlacementErrors, CutsMakeWholeTiles) {
  std::vector<TensorSpec> specs;
  for (const Tensor& t : layout_->tensors()) specs.push_back(t.spec);
  plan_.slices[0].rect = {8, 0, 32, 16};
  ASSERT_TRUE(add_cuts(specs, slices_of(plan_.slices)).ok());
  ASSERT_TRUE(add_cuts(specs, slices_of(plan_.slices)).ok());  // nothing new
  EXPECT_EQ(specs[0].row_cuts, (std::vector<std::uint64_t>{8, 40}));
  EXPECT_EQ(specs[0].col_cuts, (std::vector<std::uint64_t>{16}));
  EXPECT_TRUE(specs[2].row_cuts.empty() && specs[2].col_cuts.empty());
  auto layout = Layout::build(specs);
  ASSERT_TRUE(layout.ok()) << layout.error().to_string();
  plan_.ignored = *unplaced(**layout, plan_.slices);
  const auto built = Placement::build(*layout, plan_);
  ASSERT_TRUE(built.ok()) << built.error().to_string();
  EXPECT_EQ((*built)->rest_bytes(), 0u);

  EXPECT_EQ(add_cuts(specs, {{{"v", {}}}}).error().code(), Errc::not_found);
  EXPECT_EQ(add_cuts(specs, {{{"q", Rect{0, 0, 65, 1}}}}).error().code(), Errc::out_of_range);
  EXPECT_TRUE(add_cuts(specs, {{{"q", {}}}}).ok());
}

/// Slices of one memory need not follow each other in the plan.
TEST_F(PlacementErrors, OverlapsAreFoundWhateverIsBetween) {
  EXPECT_TRUE(accepted([](auto& p) { std::swap(p.slices[1], p.slices[2]); }));
  EXPECT_TRUE(refused(
      [](auto& p) {
        std::swap(p.slices[1], p.slices[2]);
        p.slices[2].offset -= 64;
      },
      Errc::coverage, AllOf(HasSubstr("slice 0"), HasSubstr("slice 2"))));
}

TEST_F(PlacementErrors, RectanglesWithoutAnElementMeanNothing) {
  EXPECT_TRUE(accepted([](auto& p) { p.slices.push_back({"q", {3, 0, 0, 32}, 1, 9999, 7, 7}); }));
  EXPECT_TRUE(accepted([](auto& p) { p.slices.push_back({"q", {0, 3, 64, 0}, 1, 9999, 7, 7}); }));
  EXPECT_TRUE(accepted([](auto& p) { p.ignored.push_back({"q", Rect{0, 3, 64, 0}}); }));
}

}  // namespace
}  // namespace deltasync
