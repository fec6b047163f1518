// What Layout::build accepts, what it derives, and how it names what is wrong.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include "deltasync/layout.hpp"
#include "format/tiling.hpp"

namespace deltasync {
namespace {

using testing::HasSubstr;

TensorSpec spec(std::string name, Dtype dtype, std::vector<std::uint64_t> shape) {
  TensorSpec s;
  s.name = std::move(name);
  s.dtype = dtype;
  s.shape = std::move(shape);
  return s;
}

LayoutPtr build(std::vector<TensorSpec> specs) {
  auto layout = Layout::build(std::move(specs));
  EXPECT_TRUE(layout.ok()) << layout.error().to_string();
  return std::move(layout).value();
}

void expect_refused(std::vector<TensorSpec> specs, Errc code, const std::string& text) {
  const auto layout = Layout::build(std::move(specs));
  ASSERT_FALSE(layout.ok()) << "accepted, expected: " << text;
  EXPECT_EQ(layout.error().code(), code) << layout.error().to_string();
  EXPECT_THAT(layout.error().message(), HasSubstr(text));
}

TEST(Dtype, EachHasWidthAndNameAndReadsBack) {
  const std::vector<std::pair<Dtype, std::size_t>> widths = {
      {Dtype::f64, 8},     {Dtype::f32, 4},         {Dtype::f16, 2},         {Dtype::bf16, 2}, {Dtype::f8_e4m3, 1},
      {Dtype::f8_e5m2, 1}, {Dtype::i64, 8},         {Dtype::i32, 4},         {Dtype::i16, 2},  {Dtype::i8, 1},
      {Dtype::u8, 1},      {Dtype::boolean, 1},     {Dtype::u16, 2},         {Dtype::u32, 4},  {Dtype::u64, 8},
      {Dtype::f8_e8m0, 1}, {Dtype::f8_e4m3fnuz, 1}, {Dtype::f8_e5m2fnuz, 1}, {Dtype::c64, 8},  {Dtype::f4, 1}};
  for (const auto& [dtype, bytes] : widths) {
    EXPECT_EQ(dtype_bytes(dtype), bytes) << to_string(dtype);
    EXPECT_EQ(dtype_from_string(to_string(dtype)), dtype);
  }
  EXPECT_TRUE(dtype_is_float(Dtype::f8_e5m2));
  EXPECT_FALSE(dtype_is_float(Dtype::i16));
  for (const int wrong : {0, 21, 255}) {
    EXPECT_EQ(dtype_bytes(static_cast<Dtype>(wrong)), 0u);
    EXPECT_EQ(to_string(static_cast<Dtype>(wrong)), "unknown");
  }
  EXPECT_EQ(dtype_from_string("bf16"), std::nullopt);
}

TEST(LayoutBuild, PairsOfFourBitsAreOneColumn) {
  const auto layout = build({spec("experts", Dtype::f4, {2, 3, 10}), spec("empty", Dtype::f4, {0, 3})});
  const auto t = layout->tensors();
  EXPECT_EQ(t[0].rows, 6u);
  EXPECT_EQ(t[0].cols, 5u);
  EXPECT_EQ(t[0].bytes, 30u);
  EXPECT_EQ(t[1].bytes, 0u);
  EXPECT_EQ(layout->model_bytes(), 30u);
  expect_refused({spec("odd", Dtype::f4, {2, 3})}, Errc::invalid_argument,
                 "'odd': its last dimension is no multiple of");
  expect_refused({spec("scalar", Dtype::f4, {})}, Errc::invalid_argument,
                 "'scalar': its last dimension is no multiple of");
  std::vector<TensorSpec> specs = {spec("cut", Dtype::f4, {4, 16})};
  add_even_cuts(specs, 4);
  EXPECT_EQ(specs[0].col_cuts, (std::vector<std::uint64_t>{2, 4, 6}));
}

TEST(LayoutBuild, DerivesViewOffsetsAndTotals) {
  const auto layout = build({spec("a", Dtype::bf16, {3, 5}), spec("scalar", Dtype::f32, {}),
                             spec("empty", Dtype::i64, {4, 0, 2}), spec("experts", Dtype::u8, {2, 3, 70'000})});
  const auto t = layout->tensors();
  EXPECT_EQ(t[0].rows, 3u);
  EXPECT_EQ(t[0].cols, 5u);
  EXPECT_EQ(t[0].bytes, 30u);
  EXPECT_EQ(t[0].row_bytes(), 10u);
  EXPECT_EQ(t[1].rows * t[1].cols, 1u);
  EXPECT_EQ(t[1].offset, 64u);
  EXPECT_EQ(t[2].bytes, 0u);
  EXPECT_EQ(t[2].tile_count, 0u);
  EXPECT_EQ(t[3].offset, 128u);
  EXPECT_EQ(t[3].rows, 6u);
  EXPECT_EQ(t[3].cols, 70'000u);
  EXPECT_EQ(t[3].tile_count, 12u);
  EXPECT_EQ(t[3].first_tile, 2u);
  EXPECT_EQ(layout->tile_count(), 14u);
  EXPECT_EQ(layout->model_bytes(), 30u + 4u + 420'000u);
  EXPECT_EQ(layout->elements(), 15u + 1u + 420'000u);
  EXPECT_EQ(layout->half_bytes(), (128u + 420'000u + 63u) / 64u * 64u);
  for (const auto& tensor : t) EXPECT_EQ(tensor.offset % kTensorAlignment, 0u);
}

TEST(LayoutBuild, NoTensorsIsALayout) {
  const auto layout = build({});
  EXPECT_EQ(layout->half_bytes(), 0u);
  EXPECT_EQ(layout->tile_count(), 0u);
  EXPECT_EQ(layout->find("x"), std::nullopt);
}

TEST(LayoutBuild, FindsEveryNameAndNoOther) {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 1000; ++i) specs.push_back(spec("layers." + std::to_string(i) + ".w", Dtype::bf16, {1}));
  const auto layout = build(specs);
  for (std::uint32_t i = 0; i < specs.size(); ++i) EXPECT_EQ(layout->find(specs[i].name), i);
  EXPECT_EQ(layout->find("layers.1000.w"), std::nullopt);
  EXPECT_EQ(layout->find(""), std::nullopt);
}

TEST(LayoutBuild, RefusesBadNames) {
  expect_refused({spec("", Dtype::bf16, {1})}, Errc::invalid_argument, "tensor 0: its name is empty");
  expect_refused({spec("a", Dtype::bf16, {1}), spec(std::string("b\0c", 3), Dtype::bf16, {1})}, Errc::invalid_argument,
                 "tensor 1: its name 'b\\x00c' contains a control character");
  for (const char* bad : {"a\nb", "\x1b[2J", "a\x7f", "\xC2\x80", "a\xC2\x9F"}) {
    expect_refused({spec(bad, Dtype::bf16, {1})}, Errc::invalid_argument, "contains a control character");
  }
  expect_refused({spec(std::string(1025, 'n'), Dtype::bf16, {1})}, Errc::invalid_argument, "1025 bytes");
  expect_refused({spec("w", Dtype::bf16, {1}), spec("v", Dtype::bf16, {1}), spec("w", Dtype::f32, {2})},
                 Errc::invalid_argument, "tensor 'w': listed twice");
  for (const char* bad : {"\xff", "\xc0\xaf", "\xed\xa0\x80", "a\xe2\x82", "\xf4\x90\x80\x80", "\x80"}) {
    expect_refused({spec(bad, Dtype::bf16, {1})}, Errc::invalid_argument, "not UTF-8");
  }
  build({spec(std::string(1024, 'n'), Dtype::bf16, {1}),
         spec("gewicht.\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80", Dtype::u8, {})});
}

TEST(LayoutBuild, RefusesSizesThatOverflow) {
  const std::uint64_t big = std::uint64_t{1} << 63;
  expect_refused({spec("w", Dtype::bf16, {big, 2})}, Errc::invalid_argument, "tensor 'w': larger than any model");
  expect_refused({spec("w", Dtype::u8, {std::uint64_t{1} << 32, std::uint64_t{1} << 32})}, Errc::invalid_argument,
                 "tensor 'w'");
  expect_refused({spec("w", Dtype::f64, {kModelBytesMax / 4})}, Errc::invalid_argument, "tensor 'w'");
  expect_refused({spec("v", Dtype::u8, {kModelBytesMax}), spec("w", Dtype::u8, {1})}, Errc::invalid_argument,
                 "tensor 'w'");
  expect_refused({spec("w", Dtype::u8, std::vector<std::uint64_t>(17, 1))}, Errc::invalid_argument, "17 dimensions");
  build({spec("w", Dtype::u8, {kModelBytesMax})});
  build({spec("none", Dtype::f64, {big, big, 0})});
}

TEST(LayoutBuild, RefusesBadCutsAndDtypes) {
  const auto with_cuts = [](std::vector<std::uint64_t> rows, std::vector<std::uint64_t> cols) {
    auto s = spec("w", Dtype::bf16, {8, 16});
    s.row_cuts = std::move(rows);
    s.col_cuts = std::move(cols);
    return std::vector<TensorSpec>{s};
  };
  expect_refused(with_cuts({0}, {}), Errc::invalid_argument, "tensor 'w': row cut 0");
  expect_refused(with_cuts({8}, {}), Errc::invalid_argument, "tensor 'w': row cut 8");
  expect_refused(with_cuts({4, 4}, {}), Errc::invalid_argument, "row cut 4 is not between 4 and 8");
  expect_refused(with_cuts({4}, {8, 3}), Errc::invalid_argument, "column cut 3");
  expect_refused(with_cuts({}, {16}), Errc::invalid_argument, "column cut 16");
  build(with_cuts({1, 7}, {15}));
  auto empty = spec("e", Dtype::bf16, {0, 4});
  empty.col_cuts = {2};
  expect_refused({empty}, Errc::invalid_argument, "tensor 'e'");
  expect_refused({spec("w", static_cast<Dtype>(21), {1})}, Errc::unsupported, "tensor 'w': unknown dtype 21");
  auto many = spec("w", Dtype::u8, {1'000'000});
  for (std::uint64_t i = 1; i <= kTensorCutsMax + 1; ++i) many.col_cuts.push_back(i);
  expect_refused({many}, Errc::invalid_argument, "column cuts, more than");
}

TEST(LayoutBuild, ModelOf4TiBNeedsOnlyItsTensorList) {
  // 64 tensors of 64 GiB: nothing may be allocated in proportion to bytes or tiles.
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 64; ++i) specs.push_back(spec("w" + std::to_string(i), Dtype::bf16, {1u << 20, 1u << 15}));
  add_even_cuts(specs, 8);
  const auto layout = build(specs);
  EXPECT_EQ(layout->model_bytes(), std::uint64_t{1} << 42);
  EXPECT_EQ(layout->tile_count(), std::uint64_t{1} << 25);
  EXPECT_LT(layout->encode().size(), 64u * 256u);
  const auto last = tile_of(*layout, layout->tile_count() - 1);
  EXPECT_EQ(last.tensor, 63u);
  EXPECT_EQ(last.rect.row + last.rect.rows, 1u << 20);
  EXPECT_EQ(last.rect.col + last.rect.cols, 1u << 15);
  EXPECT_EQ(layout->tensors()[63].offset, std::uint64_t{63} << 36);
}

TEST(LayoutBuild, OneTensorOf4TiBIsTiledToItsLastElement) {
  const auto layout = build({spec("w", Dtype::u8, {std::uint64_t{1} << 42})});
  EXPECT_EQ(layout->tile_count(), std::uint64_t{1} << 26);
  const auto last = tile_of(*layout, layout->tile_count() - 1).rect;
  EXPECT_EQ(last.col + last.cols, std::uint64_t{1} << 42);
}

TEST(AddEvenCuts, CutsWhatDividesAndKeepsWhatIsThere) {
  std::vector<TensorSpec> specs = {spec("w", Dtype::bf16, {16, 12}), spec("b", Dtype::bf16, {24}),
                                   spec("s", Dtype::bf16, {}), spec("e", Dtype::bf16, {0, 8})};
  specs[0].row_cuts = {3, 8};
  add_even_cuts(specs, 8);
  EXPECT_EQ(specs[0].row_cuts, (std::vector<std::uint64_t>{2, 3, 4, 6, 8, 10, 12, 14}));
  EXPECT_TRUE(specs[0].col_cuts.empty());  // 8 does not divide 12
  EXPECT_EQ(specs[1].col_cuts, (std::vector<std::uint64_t>{3, 6, 9, 12, 15, 18, 21}));
  EXPECT_TRUE(specs[1].row_cuts.empty());
  build(specs);
  const auto before = specs;
  add_even_cuts(specs, 1);
  EXPECT_EQ(specs, before);
}

}  // namespace
}  // namespace deltasync
