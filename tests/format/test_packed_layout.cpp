// Layouts as they cross the wire: sizes that lie, frames that are damaged.
#include "format/packed_layout.hpp"

#include <gtest/gtest.h>

namespace deltasync::wire {
namespace {

std::vector<std::byte> text(std::size_t n) {
  std::vector<std::byte> out(n);
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<std::byte>((i * i) >> 5);
  return out;
}

TEST(PackedLayout, RoundTrip) {
  for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{100'000}, std::size_t{4} << 20,
                              (std::size_t{4} << 20) + 1, std::size_t{9} << 20}) {
    const auto layout = text(n);
    const auto sidecar = text(n / 3);
    const auto packed = pack_layout(layout, sidecar);
    ASSERT_TRUE(packed);
    const auto back = unpack_layout(*packed);
    ASSERT_TRUE(back) << n << ": " << back.error().to_string();
    EXPECT_TRUE(back->layout == layout && back->sidecar == sidecar) << n;
  }
}

TEST(PackedLayout, SizesThatLie) {
  const auto packed = pack_layout(text(100'000), text(1000)).value();
  for (const std::uint64_t claim : {std::uint64_t{0}, std::uint64_t{99'999}, std::uint64_t{100'001}, kLayoutRawBytesMax,
                                    kLayoutRawBytesMax + 1, ~std::uint64_t{0}}) {
    auto lie = packed;
    lie.layout_raw_bytes = claim;
    const auto back = unpack_layout(lie);
    ASSERT_FALSE(back) << claim;
    EXPECT_EQ(back.error().code(), Errc::corrupt);
    EXPECT_NE(back.error().message().find("layout"), std::string::npos);
  }
}

TEST(PackedLayout, EveryTruncationAndATail) {
  const auto packed = pack_layout(text(3000), text(10)).value();
  for (std::size_t n = 0; n < packed.layout_zstd.size(); ++n) {
    auto cut = packed;
    cut.layout_zstd.resize(n);
    EXPECT_FALSE(unpack_layout(cut)) << n;
  }
  auto longer = packed;
  longer.sidecar_zstd.push_back(std::byte{0});
  EXPECT_FALSE(unpack_layout(longer));
}

}  // namespace
}  // namespace deltasync::wire
