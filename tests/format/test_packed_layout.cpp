// Layouts as they cross the wire: sizes that lie, frames that are damaged, and few bytes that would become many.
#include "format/packed_layout.hpp"

#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>
#include <zstd.h>

#include <functional>

#include "format/layout_decoder.hpp"
#include "tests/format/random_specs.hpp"

namespace deltasync::wire {
namespace {

using testing::HasSubstr;
using testing_support::RandomSpecs;

LayoutPtr some_layout(std::size_t tensors) {
  RandomSpecs random(11);
  std::vector<TensorSpec> specs;
  for (std::size_t i = 0; i < tensors; ++i) specs.push_back(random.one("t" + std::to_string(i)));
  return Layout::build(std::move(specs)).value();
}

std::vector<std::byte> some_sidecar(const Layout& layout, std::size_t other_bytes) {
  Sidecar sidecar = make_sidecar(layout);
  std::vector<std::byte> contents(other_bytes);
  for (std::size_t i = 0; i < contents.size(); ++i) contents[i] = static_cast<std::byte>((i * i) >> 5);
  sidecar.others.push_back({"tokenizer.json", std::move(contents)});
  return sidecar.encode();
}

/// `raw` and then `zeros` zero bytes, in one zstd frame: how few bytes can become very many.
std::vector<std::byte> zstd_with_zeros(ByteSpan raw, std::uint64_t zeros) {
  ZSTD_CCtx* const context = ::ZSTD_createCCtx();
  std::vector<std::byte> out;
  const auto put = [&](ByteSpan piece, ZSTD_EndDirective end) {
    ZSTD_inBuffer in{piece.data(), piece.size(), 0};
    for (std::size_t left = 1; left != 0 || in.pos < in.size;) {
      out.resize(out.size() + (256u << 10));
      ZSTD_outBuffer to{out.data() + out.size() - (256u << 10), 256u << 10, 0};
      left = ::ZSTD_compressStream2(context, &to, &in, end);
      ASSERT_EQ(::ZSTD_isError(left), 0u);
      out.resize(out.size() - (256u << 10) + to.pos);
      if (end == ZSTD_e_continue && in.pos == in.size) break;
    }
  };
  put(raw, ZSTD_e_continue);
  const std::vector<std::byte> piece(1u << 20);
  for (; zeros >= piece.size(); zeros -= piece.size()) put(piece, ZSTD_e_continue);
  put(ByteSpan(piece).first(static_cast<std::size_t>(zeros)), ZSTD_e_end);
  ::ZSTD_freeCCtx(context);
  return out;
}

void expect_corrupt(const LayoutMessage& message, const std::string& text) {
  const auto back = unpack_layout(message);
  ASSERT_FALSE(back) << text;
  EXPECT_EQ(back.error().code(), Errc::corrupt) << back.error().to_string();
  EXPECT_THAT(back.error().message(), HasSubstr(text));
}

TEST(PackedLayout, RoundTrip) {
  for (const auto& [tensors, other_bytes] :
       {std::pair<std::size_t, std::size_t>{0, 0}, {1, 1}, {3000, 100'000}, {40'000, 9u << 20}}) {
    const LayoutPtr layout = some_layout(tensors);
    const auto sidecar = some_sidecar(*layout, other_bytes);
    const auto packed = pack_layout(layout->encode(), sidecar);
    ASSERT_TRUE(packed);
    auto back = unpack_layout(*packed);
    ASSERT_TRUE(back) << tensors << ": " << back.error().to_string();
    EXPECT_EQ(back->layout->digest(), layout->digest());
    EXPECT_EQ(back->layout_encoded, layout->encode());
    EXPECT_EQ(back->sidecar_encoded, sidecar);
    EXPECT_EQ(take_sidecar(std::move(*back)).encode(), sidecar);
  }
}

TEST(PackedLayout, WithoutASidecarOneIsMade) {
  const LayoutPtr layout = some_layout(5);
  auto back = unpack_layout(pack_layout(layout->encode(), {}).value());
  ASSERT_TRUE(back) << back.error().to_string();
  EXPECT_FALSE(back->sidecar);
  EXPECT_TRUE(back->sidecar_encoded.empty());
  EXPECT_EQ(take_sidecar(std::move(*back)).encode(), make_sidecar(*layout).encode());
}

TEST(PackedLayout, SizesThatLie) {
  const LayoutPtr layout = some_layout(2000);
  const auto packed = pack_layout(layout->encode(), some_sidecar(*layout, 1000)).value();
  const std::uint64_t true_bytes = packed.layout_raw_bytes;
  for (const std::uint64_t claim : {std::uint64_t{0}, true_bytes - 1, true_bytes + 1, kLayoutRawBytesMax,
                                    kLayoutRawBytesMax + 1, ~std::uint64_t{0}}) {
    auto lie = packed;
    lie.layout_raw_bytes = claim;
    expect_corrupt(lie, "layout: ");
    lie = packed;
    lie.sidecar_raw_bytes = claim;
    expect_corrupt(lie, "sidecar: ");
  }
}

TEST(PackedLayout, EveryTruncationAndATail) {
  const LayoutPtr layout = some_layout(30);
  const auto packed = pack_layout(layout->encode(), some_sidecar(*layout, 10)).value();
  for (std::size_t n = 0; n < packed.layout_zstd.size(); ++n) {
    auto cut = packed;
    cut.layout_zstd.resize(n);
    EXPECT_FALSE(unpack_layout(cut)) << n;
  }
  auto longer = packed;
  longer.sidecar_zstd.push_back(std::byte{0});
  expect_corrupt(longer, "sidecar: has bytes after its zstd frame");
}

TEST(PackedLayout, WhatIsDenserThanPlausibleIsNotBegun) {
  const auto head = some_layout(3)->encode();
  LayoutMessage bomb;
  bomb.layout_raw_bytes = kLayoutRawBytesMax;
  bomb.layout_zstd = zstd_with_zeros(head, kLayoutRawBytesMax - head.size());
  ASSERT_LT(bomb.layout_zstd.size(), 100'000u) << "some kilobytes that become two gigabytes";
  expect_corrupt(bomb, "layout: claims 2147483648 bytes in ");

  auto packed = pack_layout(head, {}).value();
  packed.sidecar_raw_bytes = plausible_raw_bytes(packed.sidecar_zstd.size()) + 1;
  expect_corrupt(packed, "sidecar: claims ");
}

/// What the writer would send and nobody take is refused where it can be fixed.
TEST(PackedLayout, TheWriterIsToldThatNobodyWouldBelieveIt) {
  const LayoutPtr layout = some_layout(1);
  Sidecar sidecar = make_sidecar(*layout);
  sidecar.others.push_back({"empty.bin", std::vector<std::byte>(80u << 20)});
  const auto refused = pack_layout(layout->encode(), sidecar.encode());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::out_of_range);
  EXPECT_THAT(refused.error().message(), HasSubstr("sidecar: its 8388"));
}

/// Names as regular as they come, each tensor cut for 256 ranks: nothing that is meant is denser.
TEST(PackedLayout, TheDensestHonestLayoutIsPlausible) {
  std::vector<TensorSpec> specs(40'000);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    char name[32];
    std::snprintf(name, sizeof name, "w.%07zu", i);
    specs[i].name = name;
    specs[i].shape = {4096};
  }
  add_even_cuts(specs, 256);
  const LayoutPtr layout = Layout::build(std::move(specs)).value();
  const auto packed = pack_layout(layout->encode(), {});
  ASSERT_TRUE(packed) << packed.error().to_string();
  ASSERT_GT(packed->layout_raw_bytes, plausible_raw_bytes(0)) << "large enough for its density to matter";
  const auto back = unpack_layout(*packed);
  ASSERT_TRUE(back) << back.error().to_string();
  EXPECT_EQ(back->layout->digest(), layout->digest());
}

/// Both parts end at the first thing that is wrong: the rest of the frame, which is damaged here, is not looked at.
TEST(PackedLayout, EndsAtTheFirstThingThatIsWrong) {
  const LayoutPtr layout = some_layout(40'000);
  const auto unread_rest = [](std::vector<std::byte> raw) {
    auto packed = zstd_with_zeros(raw, 0);
    packed.resize(packed.size() - packed.size() / 4);
    return packed;
  };
  const auto spoilt = [&](const std::function<void(std::vector<std::byte>&)>& spoil, const std::string& text) {
    auto raw = layout->encode();
    ASSERT_GT(raw.size(), 1u << 20);
    spoil(raw);
    LayoutMessage message;
    message.layout_raw_bytes = raw.size();
    message.layout_zstd = unread_rest(std::move(raw));
    expect_corrupt(message, text);
  };
  spoilt([](auto& raw) { raw[0] ^= std::byte{1}; }, "layout: does not begin with DSLAYOUT");
  spoilt([](auto& raw) { store(raw.data() + 12, std::uint64_t{kTensorsMax + 1}); }, "layout: 1000001 tensors");
  spoilt([](auto& raw) { raw[24] = std::byte{'\n'}; }, "layout: tensor 0: its name");
  spoilt([](auto& raw) { std::fill(raw.begin() + 300'000, raw.begin() + 400'000, std::byte{0}); }, "layout: tensor ");

  Sidecar sidecar = make_sidecar(*layout);
  sidecar.weights[0].name = "../model.safetensors";
  LayoutMessage message = pack_layout(layout->encode(), {}).value();
  message.sidecar_raw_bytes = sidecar.encode().size();
  message.sidecar_zstd = unread_rest(sidecar.encode());
  expect_corrupt(message, "sidecar: file name '../model.safetensors'");
}

/// Decoded in pieces of any size: nothing is refused that will be good, and what is wrong is refused with its tensor.
TEST(PackedLayout, PiecesOfAnySize) {
  const auto encoded = some_layout(40)->encode();
  for (const std::size_t piece : {std::size_t{1}, std::size_t{7}, std::size_t{64}, encoded.size()}) {
    LayoutDecoder decoder(encoded.size());
    for (std::size_t n = 0; n < encoded.size(); n += piece) {
      ASSERT_TRUE(decoder.feed(ByteSpan(encoded).first(n)));
      EXPECT_FALSE(LayoutDecoder(decoder).finish(ByteSpan(encoded).first(n))) << n << " bytes are not all of it";
    }
    ASSERT_TRUE(decoder.feed(encoded));
    EXPECT_TRUE(decoder.finish(encoded));
  }
}

}  // namespace
}  // namespace deltasync::wire
