// The sidecar: round trip, every lie refused, and files that come out as they went in.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include "base/bytes.hpp"
#include "deltasync/layout.hpp"
#include "format/file_name.hpp"
#include "format/hf_files.hpp"
#include "format/safetensors.hpp"
#include "random_specs.hpp"

namespace deltasync {
namespace {

using testing::HasSubstr;

LayoutPtr example_layout() {
  std::vector<TensorSpec> specs(3);
  specs[0].name = "a";
  specs[0].shape = {2, 3};
  specs[1].name = "b";
  specs[1].dtype = Dtype::f32;
  specs[1].shape = {5};
  specs[2].name = "none";
  specs[2].shape = {0};
  auto layout = Layout::build(std::move(specs));
  EXPECT_TRUE(layout.ok());
  return std::move(layout).value();
}

std::vector<std::byte> blob(std::string_view text) {
  const auto bytes = bytes_of(text);
  return {bytes.begin(), bytes.end()};
}

Sidecar example(const Layout& layout) {
  Sidecar s = make_sidecar(layout);
  s.others.push_back({"config.json", blob("{\"a\": 1}\n")});
  s.others.push_back({"1_Pooling/config.json", blob("")});
  return s;
}

void expect_refused(const Sidecar& sidecar, const std::string& text) {
  const auto layout = example_layout();
  const auto decoded = Sidecar::decode(sidecar.encode(), *layout);
  ASSERT_FALSE(decoded.ok()) << "accepted, expected: " << text;
  EXPECT_EQ(decoded.error().code(), Errc::corrupt);
  EXPECT_THAT(decoded.error().message(), HasSubstr(text));
}

TEST(Sidecar, RoundTrips) {
  const auto layout = example_layout();
  const auto sidecar = example(*layout);
  const auto decoded = Sidecar::decode(sidecar.encode(), *layout);
  ASSERT_TRUE(decoded.ok()) << decoded.error().to_string();
  EXPECT_EQ(decoded->encode(), sidecar.encode());
  ASSERT_EQ(decoded->weights.size(), 1u);
  EXPECT_EQ(decoded->weights[0].bytes, sidecar.weights[0].bytes);
  EXPECT_EQ(decoded->others[0].bytes, blob("{\"a\": 1}\n"));
  const auto none = Sidecar::decode(Sidecar().encode(), *layout);
  ASSERT_TRUE(none.ok());
  EXPECT_TRUE(none->empty());
}

TEST(Sidecar, EncodingIsWhatTheFormatPageSays) {
  Sidecar s;
  s.others.push_back({"c", blob("xy")});
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  out.append(bytes_of(std::string_view("DSSIDCAR")));
  out.put<std::uint32_t>(1);
  out.put<std::uint32_t>(0);
  out.put<std::uint32_t>(1);
  out.put<std::uint32_t>(1);
  out.append(bytes_of(std::string_view("c")));
  out.put<std::uint64_t>(2);
  out.append(bytes_of(std::string_view("xy")));
  EXPECT_EQ(s.encode(), bytes);
  const auto layout = example_layout();
  store(bytes.data() + 8, std::uint32_t{7});
  const auto decoded = Sidecar::decode(bytes, *layout);
  ASSERT_FALSE(decoded.ok());
  EXPECT_EQ(decoded.error().code(), Errc::unsupported);
}

TEST(Sidecar, EveryTruncationIsRefusedAndEveryBitFlipHandled) {
  const auto layout = example_layout();
  auto bytes = example(*layout).encode();
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    const auto decoded = Sidecar::decode(std::span(bytes).first(n), *layout);
    ASSERT_FALSE(decoded.ok()) << n;
    EXPECT_EQ(decoded.error().code(), Errc::corrupt);
  }
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    const auto decoded = Sidecar::decode(bytes, *layout);
    if (decoded.ok()) {
      EXPECT_EQ(decoded->encode(), bytes) << "bit " << bit;
    }
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  }
  bytes.push_back(std::byte{0});
  EXPECT_FALSE(Sidecar::decode(bytes, *layout).ok());
}

TEST(Sidecar, RefusesNamesThatLeaveTheDirectory) {
  const auto layout = example_layout();
  for (const char* name :
       {"", "/etc/passwd", "../x", "a/../x", "a/..", "..", ".", "./x", "a//b", "a/", ".hidden", "a/.git/config"}) {
    Sidecar s = example(*layout);
    s.others[0].name = name;
    expect_refused(s, "file name '" + std::string(name) + "'");
    s = example(*layout);
    s.weights[0].name = name;
    expect_refused(s, "file name '" + std::string(name) + "'");
  }
  Sidecar s = example(*layout);
  s.others[0].name = std::string("a\0b", 3);
  expect_refused(s, "file name 'a\\x00b': contains a control character");
  for (const char* name : {"a\nb", "\x1b[2J.json", "a\x7f",
                           "\xC2\x9B"
                           "2J"}) {
    s.others[0].name = name;
    expect_refused(s, "contains a control character");
  }
  s.others[0].name = "caf\xE9.json";
  expect_refused(s, "file name 'caf\\xe9.json': is not UTF-8");
  s.others[0].name = "a\\..\\b";
  expect_refused(s, "contains a '\\'");
  s.others[0].name = "model.safetensors";
  expect_refused(s, "occurs twice");
  s.others[0].name = "1_Pooling";
  expect_refused(s, "is a file and the directory of");
  EXPECT_FALSE(check_file_name(std::string(1025, 'a')).ok());
  EXPECT_FALSE(check_file_name(std::string(256, 'a')).ok());
  EXPECT_TRUE(check_file_name(std::string(255, 'a') + "/model..v2").ok());
}

TEST(Sidecar, RefusesHeadersThatDoNotDescribeTheLayout) {
  const auto layout = example_layout();
  Sidecar s = example(*layout);
  s.weights[0].tensors[1] = 3;
  expect_refused(s, "file 'model.safetensors': tensor index 3 of 3");
  s = example(*layout);
  s.weights[0].tensors[1] = s.weights[0].tensors[0];
  expect_refused(s, "occurs twice");
  s = example(*layout);
  s.weights[0].tensors.pop_back();
  expect_refused(s, "its header lists 3 tensors, the sidecar 2");
  s = example(*layout);
  std::swap(s.weights[0].tensors[0], s.weights[0].tensors[1]);
  expect_refused(s, "has another shape, dtype or tensor");
  s = example(*layout);
  s.weights[0].bytes.pop_back();
  expect_refused(s, "file 'model.safetensors'");
  // The same bytes in all, but other tensors.
  std::vector<TensorSpec> other(3);
  other[0].name = "a";
  other[0].shape = {3, 2};
  other[1] = layout->tensors()[1].spec;
  other[2] = layout->tensors()[2].spec;
  const auto other_layout = Layout::build(other);
  ASSERT_TRUE(other_layout.ok());
  s = make_sidecar(**other_layout);
  expect_refused(s, "another shape");
  s = example(*layout);
  s.weights.push_back(s.weights[0]);
  s.weights[1].name = "second.safetensors";
  expect_refused(s, "file 'second.safetensors': tensor 'b' occurs twice");
}

TEST(Sidecar, LyingCountsAreRefusedBeforeTheyAreAllocated) {
  const auto layout = example_layout();
  const auto bytes = example(*layout).encode();
  for (const std::size_t at : {12u, 16u, 20u}) {
    auto lying = bytes;
    store(lying.data() + at, ~std::uint32_t{0});
    EXPECT_FALSE(Sidecar::decode(lying, *layout).ok());
  }
}

TEST(HfPlaces, FollowTheHeaderWithoutGaps) {
  const auto layout = example_layout();
  const auto sidecar = make_sidecar(*layout);
  const auto places = hf_places(*layout, sidecar);
  ASSERT_TRUE(places.ok());
  const auto header = sidecar.weights[0].bytes.size();
  EXPECT_EQ((*places)[1].offset, header);  // F32 first
  EXPECT_EQ((*places)[0].offset, header + 20);
  EXPECT_EQ((*places)[2].offset, header + 32);
  Sidecar part = sidecar;
  part.weights[0].tensors = {1};
  const auto missing = hf_places(*layout, part);
  ASSERT_FALSE(missing.ok());
  EXPECT_THAT(missing.error().message(), HasSubstr("no file holds tensor 'a'"));
  part.weights[0].tensors = {0, 1, 2, 1};
  EXPECT_FALSE(hf_places(*layout, part).ok());
  part.weights[0].tensors = {0, 1, 2, 9};
  EXPECT_FALSE(hf_places(*layout, part).ok());
}

TEST(MakeSidecar, IsAcceptedForEveryLayoutAndAlignsEveryTensor) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    testing_support::RandomSpecs random(seed);
    const auto layout = Layout::build(random.list(15));
    ASSERT_TRUE(layout.ok());
    const auto sidecar = make_sidecar(**layout);
    ASSERT_EQ(sidecar.weights.size(), 1u);
    EXPECT_EQ(sidecar.weights[0].name, "model.safetensors");
    const auto decoded = Sidecar::decode(sidecar.encode(), **layout);
    ASSERT_TRUE(decoded.ok()) << "seed " << seed << ": " << decoded.error().to_string();
    const auto places = hf_places(**layout, *decoded);
    ASSERT_TRUE(places.ok());
    for (std::size_t i = 0; i < places->size(); ++i) {
      EXPECT_EQ((*places)[i].offset % (*layout)->tensors()[i].element_bytes, 0u);
    }
  }
}

TEST(MakeSidecar, SplitsWhatOneHeaderCannotHold) {
#ifdef DELTASYNC_SANITIZED
  GTEST_SKIP() << "100 MB of JSON take this build two minutes";
#endif
  // Names of 1,000 bytes: 100 MB of JSON are full after about 90,000.
  std::vector<TensorSpec> specs(120'000);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto number = std::to_string(i);
    specs[i].name = std::string(1000 - number.size(), 'n') + number;
    specs[i].shape = {4};
  }
  const auto layout = Layout::build(std::move(specs));
  ASSERT_TRUE(layout.ok());
  const auto sidecar = make_sidecar(**layout);
  ASSERT_EQ(sidecar.weights.size(), 2u);
  EXPECT_EQ(sidecar.weights[1].name, "model-00002-of-00002.safetensors");
  ASSERT_EQ(sidecar.others.size(), 1u);
  EXPECT_EQ(sidecar.others[0].name, "model.safetensors.index.json");
  EXPECT_TRUE(hf_places(**layout, sidecar).ok());
  for (const auto& file : sidecar.weights) {
    EXPECT_LE(file.bytes.size(), safetensors::kJsonBytesMax + safetensors::kLengthBytes);
    EXPECT_TRUE(safetensors::parse_header(file.bytes, file.tensors.size() * 8).ok());
  }
}

}  // namespace
}  // namespace deltasync
