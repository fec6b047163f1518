#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "deltasync/export.hpp"

namespace deltasync {
namespace {

constexpr const char* kPage = R"(
name = "toy"
architectures = ["ToyForCausalLM"]
[[rows]]
mcore = "layers.{L}.fc1.weight"
parts = "[gate: D / 2, up: D / 2]"
hf.gate = "layers.{L}.gate.weight"
hf.up = "layers.{L}.up.weight"
)";
constexpr const char* kConfig = R"({"architectures": ["ToyForCausalLM"]})";

LayoutPtr layout_of(std::vector<TensorSpec> specs) {
  return Layout::build(std::move(specs)).value();
}

/// Rank r has half of the rows of gate and half of those of up, as tensor parallelism has it.
std::vector<std::vector<ShardPiece>> two_ranks() {
  std::vector<std::vector<ShardPiece>> shards(2);
  for (std::uint64_t rank = 0; rank < 2; ++rank) {
    for (const std::uint64_t first : {std::uint64_t{0}, std::uint64_t{4}}) {
      shards[rank].push_back({.key = "layers.3.fc1.weight",
                              .dtype = Dtype::f32,
                              .global_shape = {8, 3},
                              .offset = {first + 2 * rank, 0},
                              .shape = {2, 3}});
    }
  }
  return shards;
}

TEST(PublicExport, PlansTwoRanksAndAppliesThem) {
  const auto page = parse_family(kPage, "toy.toml");
  ASSERT_TRUE(page) << page.error().to_string();
  EXPECT_EQ(page->name(), "toy");
  EXPECT_EQ(page->architectures(), std::vector<std::string>{"ToyForCausalLM"});
  const LayoutPtr layout = layout_of({{.name = "layers.3.gate.weight", .dtype = Dtype::f32, .shape = {4, 3}},
                                      {.name = "layers.3.up.weight", .dtype = Dtype::f32, .shape = {4, 3}}});
  const std::vector<ExportFamily> pages{*page};
  const auto shards = two_ranks();
  const auto plan = plan_export(pages, kConfig, layout, shards);
  ASSERT_TRUE(plan) << plan.error().to_string();
  EXPECT_EQ(plan->family, "toy");

  std::vector<std::vector<float>> hf(2, std::vector<float>(12));
  for (const ExportCopy& copy : plan->copies) {
    const ShardPiece& piece = shards[copy.rank][copy.piece];
    std::vector<float> memory(6);
    std::iota(memory.begin(), memory.end(), static_cast<float>(piece.offset[0] * 3));
    ASSERT_TRUE(apply_on_host(*plan, copy, piece.dtype, std::as_bytes(std::span(memory)),
                              std::as_writable_bytes(std::span(hf[copy.tensor]))));
  }
  std::vector<float> all(24);
  std::iota(all.begin(), all.end(), 0.0F);
  EXPECT_EQ(hf[0], std::vector<float>(all.begin(), all.begin() + 12));
  EXPECT_EQ(hf[1], std::vector<float>(all.begin() + 12, all.end()));
}

TEST(PublicExport, KnowsThePagesThatComeAlong) {
  const std::vector<std::vector<ShardPiece>> shards{
      {{.key = "decoder.final_layernorm.weight", .global_shape = {4}, .offset = {0}, .shape = {4}}}};
  const LayoutPtr layout = layout_of({{.name = "model.norm.weight", .shape = {4}}});
  const auto plan = plan_export({}, R"({"architectures": ["LlamaForCausalLM"]})", layout, shards);
  ASSERT_TRUE(plan) << plan.error().to_string();
  EXPECT_EQ(plan->family, "llama");
  EXPECT_EQ(plan->copies.front().elements(), 4U);
}

TEST(PublicExport, Refusals) {
  EXPECT_EQ(parse_family("[[rows]]\nmcor = 1", "mine.toml").error().code(), Errc::invalid_argument);
  const LayoutPtr layout = layout_of({{.name = "w", .shape = {4}}});
  EXPECT_EQ(plan_export({}, R"({"architectures": ["NobodyForCausalLM"]})", layout, {}).error().code(), Errc::not_found);
  EXPECT_EQ(plan_export({}, "[]", layout, {}).error().code(), Errc::invalid_argument);
  const auto uncovered = plan_export({}, R"({"architectures": ["LlamaForCausalLM"]})", layout, {});
  EXPECT_EQ(uncovered.error().code(), Errc::coverage);
}

TEST(PublicExport, CopiesThatCannotBe) {
  const ExportPlan plan{.layout = layout_of({{.name = "w", .dtype = Dtype::f32, .shape = {2, 2}}}), .rows = {"row"}};
  std::vector<float> from(4, 1);
  std::vector<float> to(4);
  const auto apply = [&](const ExportCopy& copy, Dtype dtype = Dtype::f32) {
    const Status done =
        apply_on_host(plan, copy, dtype, std::as_bytes(std::span(from)), std::as_writable_bytes(std::span(to)));
    return done ? std::optional<Errc>() : done.error().code();
  };
  EXPECT_EQ(apply({.tensor = 1}), Errc::out_of_range);
  EXPECT_EQ(apply({.source_offset = 4}), Errc::out_of_range);
  EXPECT_EQ(apply({.target_offset = 4}), Errc::out_of_range);
  EXPECT_EQ(apply({.steps = {{5, 1, 1}}}), Errc::out_of_range);
  // 2^63 · 2 is 0 in 64 bits: as if all elements were the first.
  EXPECT_EQ(apply({.steps = {{3, std::uint64_t{1} << 63, 1}}}), Errc::out_of_range);
  EXPECT_EQ(apply({.steps = {{3, 1, std::uint64_t{1} << 63}}}), Errc::out_of_range);
  EXPECT_EQ(apply({.source_offset = ~std::uint64_t{0}, .steps = {{2, 1, 1}}}), Errc::out_of_range);
  EXPECT_EQ(apply({.steps = {{4, 1, 1}}}, Dtype::i32), Errc::unsupported);
  EXPECT_EQ(apply({.steps = {{4, 1, 1}}}, Dtype{}), Errc::unsupported);
  EXPECT_EQ(to, std::vector<float>(4));
  EXPECT_EQ(apply({.steps = {{0, 1, 1}, {9, 1, 1}}}), std::nullopt);
  EXPECT_EQ(apply({.steps = {{4, 1, 1}}}), std::nullopt);
  EXPECT_EQ(to, from);
}

/// Carries out both ways, and compares.
void expect_same_bytes(const Layout& layout, const ExportPlan& plan, const ExportCopy& copy) {
  const Tensor& tensor = layout.tensors()[0];
  std::vector<std::uint16_t> piece(400);
  std::iota(piece.begin(), piece.end(), std::uint16_t{1});
  std::vector<std::uint16_t> applied(tensor.rows * tensor.cols);
  std::vector<std::uint16_t> written(applied.size());
  ASSERT_TRUE(apply_on_host(plan, copy, Dtype::bf16, std::as_bytes(std::span(piece)),
                            std::as_writable_bytes(std::span(applied))));
  const auto slices = export_slices(plan, copy, Dtype::bf16);
  ASSERT_TRUE(slices) << slices.error().to_string();
  for (const PlacedSlice& slice : *slices) {
    EXPECT_EQ(slice.tensor, "w");
    EXPECT_EQ(slice.memory, copy.piece);
    ASSERT_LE(slice.rect.row + slice.rect.rows, tensor.rows);
    ASSERT_LE(slice.rect.col + slice.rect.cols, tensor.cols);
    for (std::uint64_t row = 0; row < slice.rect.rows; ++row) {
      for (std::uint64_t col = 0; col < slice.rect.cols; ++col) {
        std::uint16_t& to = written[(slice.rect.row + row) * tensor.cols + slice.rect.col + col];
        EXPECT_EQ(to, 0) << "written twice";
        to = piece[(slice.offset + row * slice.row_stride + col * slice.col_stride) / 2];
      }
    }
  }
  EXPECT_EQ(written, applied);
}

TEST(PublicExport, SlicesHaveTheElementsOfTheCopy) {
  const LayoutPtr layout = layout_of({{.name = "w", .shape = {4, 5, 7}}});
  const ExportPlan plan{.layout = layout, .rows = {"row"}};
  const std::vector<std::vector<CopyStep>> steps = {
      {},
      {{3, 1, 1}},
      {{40, 2, 1}},            // over several rows
      {{21, 1, 1}},            // whole rows, from the beginning of one or not
      {{4, 9, 7}, {5, 1, 1}},  // a rectangle
      {{4, 1, 7}, {5, 9, 1}},  // transposed
      {{2, 99, 35}, {2, 9, 7}, {3, 1, 1}},
      {{2, 99, 70}, {9, 1, 1}},  // runs that cross the end of a row
      {{5, 1, 7}},               // of one column
      {{3, 1, 2}},               // apart
  };
  for (const auto& each : steps) {
    for (const std::uint64_t begin : {0, 2, 7, 13}) {
      expect_same_bytes(*layout, plan, {.piece = 3, .source_offset = 5, .target_offset = begin, .steps = each});
    }
  }
}

TEST(PublicExport, SlicesThatCannotBe) {
  const LayoutPtr layout = layout_of({{.name = "w", .shape = {300'000, 2}}, {.name = "none", .shape = {0, 2}}});
  const ExportPlan plan{.layout = layout, .rows = {"row"}};
  const auto code = [&](const ExportCopy& copy, Dtype dtype = Dtype::bf16) {
    const auto slices = export_slices(plan, copy, dtype);
    return slices ? std::optional<Errc>() : slices.error().code();
  };
  EXPECT_EQ(code({.steps = {{2, 1, 1}}}), std::nullopt);
  EXPECT_EQ(code({.steps = {{0, 1, 1}}}), std::nullopt);
  EXPECT_EQ(code({.steps = {{2, 1, 1}}}, Dtype::f32), Errc::unsupported);
  EXPECT_EQ(code({.steps = {{2, 1, 1}}, .add = 1}), Errc::unsupported);
  EXPECT_EQ(code({.steps = {{100'000, 1, 4}}}), Errc::unsupported);
  EXPECT_EQ(code({.tensor = 2}), Errc::out_of_range);
  EXPECT_EQ(code({.tensor = 1}), Errc::out_of_range);
  EXPECT_EQ(code({.target_offset = 600'000}), Errc::out_of_range);
}

}  // namespace
}  // namespace deltasync
