// The canonical encoding: what it is byte for byte, and that nothing else decodes.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <chrono>

#include "base/bytes.hpp"
#include "base/hash.hpp"
#include "deltasync/layout.hpp"
#include "random_specs.hpp"

namespace deltasync {
namespace {

using testing::HasSubstr;
using testing_support::RandomSpecs;

std::vector<TensorSpec> specs_of(const Layout& layout) {
  std::vector<TensorSpec> specs;
  for (const auto& t : layout.tensors()) specs.push_back(t.spec);
  return specs;
}

std::vector<TensorSpec> example() {
  TensorSpec w;
  w.name = "ab";
  w.dtype = Dtype::bf16;
  w.shape = {4, 6};
  w.row_cuts = {2};
  w.col_cuts = {3, 5};
  TensorSpec s;
  s.name = "s";
  s.dtype = Dtype::f32;
  return {w, s};
}

/// The encoding of example(), put together by hand from the format page.
std::vector<std::byte> example_bytes() {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  const auto u64s = [&](std::initializer_list<std::uint64_t> values) {
    for (const auto v : values) out.put(v);
  };
  out.append(bytes_of(std::string_view("DSLAYOUT")));
  out.put<std::uint32_t>(1);
  out.put<std::uint64_t>(2);
  out.put<std::uint32_t>(2);
  out.append(bytes_of(std::string_view("ab")));
  out.put<std::uint8_t>(4);
  out.put<std::uint8_t>(2);
  u64s({4, 6});
  out.put<std::uint32_t>(1);
  u64s({2});
  out.put<std::uint32_t>(2);
  u64s({3, 5});
  out.put<std::uint32_t>(1);
  out.append(bytes_of(std::string_view("s")));
  out.put<std::uint8_t>(2);
  out.put<std::uint8_t>(0);
  out.put<std::uint32_t>(0);
  out.put<std::uint32_t>(0);
  return bytes;
}

TEST(LayoutEncoding, IsWhatTheFormatPageSays) {
  const auto layout = Layout::build(example());
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ((*layout)->encode(), example_bytes());
  EXPECT_EQ((*layout)->digest(), xxh3_128(example_bytes()));
}

TEST(LayoutEncoding, DecodesToTheSameSpecs) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    RandomSpecs random(seed);
    const auto specs = random.list(20);
    const auto layout = Layout::build(specs);
    ASSERT_TRUE(layout.ok()) << layout.error().to_string();
    const auto decoded = Layout::decode((*layout)->encode());
    ASSERT_TRUE(decoded.ok()) << decoded.error().to_string();
    EXPECT_EQ(specs_of(**decoded), specs);
    EXPECT_EQ((*decoded)->digest(), (*layout)->digest());
    EXPECT_EQ((*decoded)->half_bytes(), (*layout)->half_bytes());
  }
}

TEST(LayoutEncoding, DigestFollowsEveryPartOfTheSpec) {
  std::vector<std::vector<TensorSpec>> variants(7, example());
  variants[1][0].name = "ac";
  variants[2][0].dtype = Dtype::f16;
  variants[3][0].shape = {2, 2, 6};
  variants[4][0].row_cuts = {1};
  variants[5][0].col_cuts = {3};
  std::swap(variants[6][0], variants[6][1]);
  std::set<Digest128> digests;
  for (const auto& v : variants) {
    const auto layout = Layout::build(v);
    ASSERT_TRUE(layout.ok());
    digests.insert((*layout)->digest());
  }
  EXPECT_EQ(digests.size(), variants.size());
}

TEST(LayoutEncoding, EveryTruncationAndTailIsRefused) {
  auto bytes = example_bytes();
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    const auto decoded = Layout::decode(std::span(bytes).first(n));
    ASSERT_FALSE(decoded.ok()) << n << " bytes";
    EXPECT_EQ(decoded.error().code(), Errc::corrupt);
    EXPECT_THAT(decoded.error().message(), HasSubstr("layout"));
  }
  bytes.push_back(std::byte{0});
  const auto decoded = Layout::decode(bytes);
  ASSERT_FALSE(decoded.ok());
  EXPECT_THAT(decoded.error().message(), HasSubstr("too many"));
}

TEST(LayoutEncoding, EveryBitFlipIsRefusedOrMeansExactlyWhatItSays) {
  RandomSpecs random(7);
  auto specs = random.list(12);
  for (auto& s : example()) specs.push_back(s);
  const auto layout = Layout::build(specs);
  ASSERT_TRUE(layout.ok());
  auto bytes = (*layout)->encode();
  std::size_t refused = 0;
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    const auto mask = static_cast<std::byte>(1u << (bit % 8));
    bytes[bit / 8] ^= mask;
    const auto decoded = Layout::decode(bytes);
    if (decoded.ok()) {
      EXPECT_EQ((*decoded)->encode(), bytes) << "bit " << bit;
      EXPECT_NE((*decoded)->digest(), (*layout)->digest()) << "bit " << bit;
    } else {
      ++refused;
      const auto code = decoded.error().code();
      EXPECT_TRUE(code == Errc::corrupt || code == Errc::unsupported) << decoded.error().to_string();
      EXPECT_FALSE(decoded.error().message().empty());
    }
    bytes[bit / 8] ^= mask;
  }
  EXPECT_GT(refused, bytes.size());
}

TEST(LayoutEncoding, LyingCountsAreRefusedBeforeTheyAreAllocated) {
  const auto patched = [](std::size_t at, auto value) {
    auto bytes = example_bytes();
    store(bytes.data() + at, value);
    return Layout::decode(bytes);
  };
  const auto expect_corrupt = [](const Result<LayoutPtr>& decoded, const char* text) {
    ASSERT_FALSE(decoded.ok());
    EXPECT_EQ(decoded.error().code(), Errc::corrupt);
    EXPECT_THAT(decoded.error().message(), HasSubstr(text));
  };
  expect_corrupt(patched(12, ~std::uint64_t{0}), "tensors");
  expect_corrupt(patched(12, std::uint64_t{900'000}), "900000 tensors");
  expect_corrupt(patched(20, ~std::uint32_t{0}), "tensor 0 ");
  expect_corrupt(patched(27, std::uint8_t{255}), "tensor 0 ");
  expect_corrupt(patched(44, ~std::uint32_t{0}), "tensor 0 ");
  expect_corrupt(patched(28, std::uint64_t{1} << 60), "tensor 'ab': larger than any model");
  const auto dtype = patched(26, std::uint8_t{99});
  ASSERT_FALSE(dtype.ok());
  EXPECT_EQ(dtype.error().code(), Errc::unsupported);
  EXPECT_THAT(dtype.error().message(), HasSubstr("tensor 'ab': unknown dtype 99"));
  const auto version = patched(8, std::uint32_t{2});
  ASSERT_FALSE(version.ok());
  EXPECT_EQ(version.error().code(), Errc::unsupported);
}

TEST(LayoutEncoding, HundredThousandTensorsRoundTrip) {
  std::vector<TensorSpec> specs(100'000);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    specs[i].name =
        "model.layers." + std::to_string(i / 400) + ".mlp.experts." + std::to_string(i % 400) + ".up.weight";
    specs[i].shape = {768, 2048};
  }
  add_even_cuts(specs, 8);
  const auto start = std::chrono::steady_clock::now();
  const auto layout = Layout::build(specs);
  ASSERT_TRUE(layout.ok());
  const auto decoded = Layout::decode((*layout)->encode());
  ASSERT_TRUE(decoded.ok());
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  RecordProperty("seconds", std::to_string(seconds.count()));
  EXPECT_EQ((*decoded)->digest(), (*layout)->digest());
  EXPECT_EQ((*decoded)->find(specs[77'777].name), 77'777u);
}

}  // namespace
}  // namespace deltasync
