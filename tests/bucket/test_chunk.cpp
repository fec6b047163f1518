// What lies where in a bucket: both ends agree, nothing overlaps, and each guard refuses what it is for.
#include "bucket/chunk.hpp"

#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "delta/delta.hpp"
#include "tests/support/model.hpp"

namespace deltasync::bucket {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t kHalf = 1u << 20;

std::vector<TensorSpec> specs_with_large() {
  std::vector<TensorSpec> specs = test::sample_specs();
  specs.push_back({.name = "large", .dtype = Dtype::f32, .shape = {1500, 1024}, .row_cuts = {100, 333}});
  specs.push_back({.name = "exact", .dtype = Dtype::u8, .shape = {16, 1u << 16}});  // a half, to the byte
  return specs;
}

LayoutPtr layout_with_large() {
  return Layout::build(specs_with_large()).value();
}

LayoutPtr small_layout() {
  return Layout::build({{.name = "a", .dtype = Dtype::f32, .shape = {4, 4}},
                        {.name = "b", .dtype = Dtype::f32, .shape = {4, 4}},
                        {.name = "large", .dtype = Dtype::f32, .shape = {1024, 1024}}})
      .value();
}

Share whole(const LayoutPtr& layout) {
  return Share::make(layout, {}, kHalf).value();
}

/// Sends one tensor after the other; `chunk` gets each chunk.
template <class F>
void send_all(Outgoing& out, const std::vector<std::uint32_t>& order, const F& chunk) {
  const auto take = [&] {
    std::vector<std::uint64_t> digests;
    for (const Piece& piece : out.pieces()) {
      for (std::uint64_t t = 0; t < piece.tiles; ++t) digests.push_back(7 * (piece.first_tile + t) + 1);
    }
    const std::vector<Piece> pieces(out.pieces().begin(), out.pieces().end());
    const unsigned half = out.half();
    chunk(out.take(std::move(digests)), pieces, half);
  };
  for (const std::uint32_t tensor : order) {
    do {
      auto piece = out.next(tensor);
      ASSERT_TRUE(piece.ok()) << piece.error().message();
      if (!*piece) {
        take();
        piece = out.next(tensor);
        ASSERT_TRUE(piece.ok() && *piece);
      }
    } while (!out.is_whole(tensor));
  }
  if (!out.pieces().empty()) take();
}

TEST(BucketChunk, BothEndsAgreeOnEveryPieceAndNothingOverlaps) {
  const LayoutPtr layout = layout_with_large();
  test::Random random(3);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::uint32_t> order(layout->tensors().size());
    std::iota(order.begin(), order.end(), 0u);
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    Outgoing out(whole(layout));
    Incoming in(whole(layout));
    std::vector<std::uint64_t> digests(layout->tile_count());
    std::vector<int> tiles(layout->tile_count());
    unsigned half = 0;
    std::uint64_t bytes = 0;
    send_all(out, order, [&](const wire::BucketChunk& chunk, const std::vector<Piece>& sent, unsigned in_half) {
      EXPECT_EQ(in_half, half);
      half ^= 1;
      const auto taken = in.take(chunk, digests);
      ASSERT_TRUE(taken.ok()) << taken.error().message();
      ASSERT_EQ(taken->size(), sent.size());
      std::uint64_t end = 0;
      for (std::size_t i = 0; i < sent.size(); ++i) {
        const Piece& piece = (*taken)[i];
        EXPECT_EQ(piece.offset, sent[i].offset);
        EXPECT_EQ(piece.from, sent[i].from);
        EXPECT_EQ(piece.bytes, sent[i].bytes);
        EXPECT_EQ(piece.offset % kAlignment, 0u);
        EXPECT_GE(piece.offset, end);
        end = piece.offset + piece.bytes;
        EXPECT_LE(end, kHalf);
        bytes += piece.bytes;
        for (std::uint64_t t = 0; t < piece.tiles; ++t) ++tiles[piece.first_tile + t];
      }
    });
    EXPECT_EQ(bytes, layout->model_bytes());
    EXPECT_TRUE(std::all_of(tiles.begin(), tiles.end(), [](int n) { return n == 1; }));
    for (std::uint64_t t = 0; t < digests.size(); ++t) ASSERT_EQ(digests[t], 7 * t + 1);
    ASSERT_TRUE(out.check_whole().ok());
    EXPECT_EQ(out.finish().root, delta::root_digest(digests)) << "a rank that sends all names the version's own root";
    EXPECT_TRUE(in.finish(out.finish(), digests).ok());
  }
}

TEST(BucketChunk, RanksNameTheRootOfTheirOwnTiles) {
  const LayoutPtr layout = layout_with_large();
  const auto count = static_cast<std::uint64_t>(layout->tensors().size());
  std::vector<std::uint64_t> digests(layout->tile_count());
  std::iota(digests.begin(), digests.end(), 100u);
  const Share first = Share::make(layout, {{0, 2}, {5, 6}}, kHalf).value();
  const Share rest = Share::make(layout, {{2, 5}, {6, count}}, kHalf).value();
  EXPECT_EQ(first.count() + rest.count(), count);
  EXPECT_EQ(first.bytes() + rest.bytes(), layout->model_bytes());
  const Digest128 before = first.root(digests);
  EXPECT_NE(before, rest.root(digests));
  digests[layout->tensors()[2].first_tile] ^= 1;
  EXPECT_EQ(first.root(digests), before) << "not its tile";
  digests[layout->tensors()[0].first_tile] ^= 1;
  EXPECT_NE(first.root(digests), before);
}

TEST(BucketChunk, SharesThatCannotBeAreRefused) {
  const LayoutPtr layout = Layout::build({{.name = "row", .dtype = Dtype::f32, .shape = {1u << 20}}}).value();
  auto share = Share::make(layout, {}, kHalf);
  ASSERT_FALSE(share.ok());
  EXPECT_EQ(share.error().code(), Errc::invalid_argument);
  EXPECT_THAT(share.error().message(), HasSubstr("row goes by bands of 4194304 bytes, and a bucket has 1048576"));
  EXPECT_TRUE(Share::make(layout, {}, 4u << 20).ok());
  EXPECT_EQ(Share::make(layout, {{0, 2}}, 4u << 20).error().code(), Errc::out_of_range);
  for (const std::uint64_t half : {std::uint64_t{0}, kHalf + 1, std::uint64_t{1} << 41}) {
    EXPECT_EQ(Share::make(layout, {}, half).error().code(), Errc::invalid_argument) << half;
  }
}

class BucketGuards : public ::testing::Test {
 protected:
  /// Why a chunk of these parts is refused; its digests are as many as `tiles`.
  Error refused(std::vector<wire::BucketPart> parts, std::size_t tiles, unsigned half = 0) {
    auto taken =
        in_.take({static_cast<std::uint8_t>(half), std::move(parts), std::vector<std::uint64_t>(tiles)}, digests_);
    if (taken.ok()) return Error(Errc::internal, "taken");
    return std::move(taken).error();
  }
  void take(std::vector<wire::BucketPart> parts, std::size_t tiles, unsigned half = 0) {
    EXPECT_THAT(refused(std::move(parts), tiles, half).message(), HasSubstr("taken"));
  }

  const LayoutPtr layout_ = small_layout();  // large: 16 bands of 64 rows, 256 KiB each
  std::vector<std::uint64_t> digests_ = std::vector<std::uint64_t>(layout_->tile_count());
  Incoming in_{Share::make(layout_, {{0, 1}, {2, 3}}, kHalf).value()};
};

TEST_F(BucketGuards, ATensorThatIsNone) {
  const Error error = refused({{3, 0, 0}}, 1);
  EXPECT_EQ(error.code(), Errc::out_of_range);
  EXPECT_THAT(error.message(), HasSubstr("tensor 3 of a layout with 3"));
}
TEST_F(BucketGuards, AnotherRanksTensor) {
  const Error error = refused({{1, 0, 0}}, 1);
  EXPECT_EQ(error.code(), Errc::invalid_argument);
  EXPECT_THAT(error.message(), HasSubstr("b is for another rank to send"));
}
TEST_F(BucketGuards, ATensorThatCameBefore) {
  const Error error = refused({{0, 0, 0}, {0, 0, 0}}, 2);
  EXPECT_EQ(error.code(), Errc::already_exists);
  EXPECT_THAT(error.message(), HasSubstr("a is sent twice in one version"));
}
TEST_F(BucketGuards, BandsOutOfTheirOrder) {
  EXPECT_THAT(refused({{2, 1, 2}}, 2).message(), HasSubstr("large: band 1 came where 0 was due"));
  in_.begin();
  take({{2, 0, 2}}, 2);
  EXPECT_THAT(refused({{2, 0, 2}}, 2, 1).message(), HasSubstr("large: band 0 came where 2 was due"));
}
TEST_F(BucketGuards, BandsThatAreNone) {
  EXPECT_EQ(refused({{2, 0, 17}}, 17).code(), Errc::out_of_range);
  EXPECT_EQ(refused({{2, 0, ~std::uint64_t{0}}}, 1).code(), Errc::out_of_range);
  take({{2, 0, 2}}, 2);
  EXPECT_EQ(refused({{2, 2, ~std::uint64_t{0}}}, 1, 1).code(), Errc::out_of_range) << "2 more are 1 in 64 bits";
}
TEST_F(BucketGuards, MoreThanABucketHas) {
  const Error error = refused({{2, 0, 5}}, 5);
  EXPECT_EQ(error.code(), Errc::no_space);
  EXPECT_THAT(error.message(), HasSubstr("large: 1310720 bytes at 0 of a bucket of 1048576"));
  in_.begin();
  EXPECT_EQ(refused({{2, 0, 0}}, 16).code(), Errc::no_space) << "as a whole";
}
TEST_F(BucketGuards, BandsBesideOthers) {
  EXPECT_THAT(refused({{0, 0, 0}, {2, 0, 1}}, 2).message(), HasSubstr("share a bucket with nothing"));
  in_.begin();
  EXPECT_THAT(refused({{2, 0, 1}, {0, 0, 0}}, 2).message(), HasSubstr("share a bucket with nothing"));
}
TEST_F(BucketGuards, TheOtherHalfsTurn) {
  EXPECT_EQ(refused({{0, 0, 0}}, 1, 1).code(), Errc::protocol);
}
TEST_F(BucketGuards, DigestsThatAreNotAsManyAsTheTiles) {
  EXPECT_EQ(refused({{0, 0, 0}}, 2).code(), Errc::corrupt);
  in_.begin();
  EXPECT_EQ(refused({{0, 0, 0}}, 0).code(), Errc::corrupt);
}
TEST_F(BucketGuards, AManifestOfOtherThings) {
  take({{0, 0, 0}}, 1);
  take({{2, 0, 4}}, 4, 1);
  wire::BucketFinish manifest{2, in_.share().bytes(), in_.share().root(digests_)};
  const Status early = in_.finish(manifest, digests_);
  ASSERT_FALSE(early.ok());
  EXPECT_EQ(early.error().code(), Errc::coverage);
  EXPECT_THAT(early.error().message(), HasSubstr("1 of 2 tensors have not come: large (in part)"));
  for (std::uint64_t band = 4, half = 0; band < 16; band += 4, half ^= 1) {
    take({{2, band, 4}}, 4, static_cast<unsigned>(half));
  }
  EXPECT_TRUE(in_.finish(manifest, digests_).ok());
  wire::BucketFinish wrong = manifest;
  ++wrong.tensors;
  EXPECT_EQ(in_.finish(wrong, digests_).error().code(), Errc::corrupt);
  wrong = manifest;
  --wrong.model_bytes;
  EXPECT_EQ(in_.finish(wrong, digests_).error().code(), Errc::corrupt);
  wrong = manifest;
  wrong.root.bytes[3] ^= 1;
  EXPECT_EQ(in_.finish(wrong, digests_).error().code(), Errc::corrupt);
}

}  // namespace
}  // namespace deltasync::bucket
