#include "tools/cli/delta_check.hpp"

#include <gtest/gtest.h>

#include "format/tiling.hpp"
#include "tests/support/model.hpp"
#include "tools/cli/diff_sizes.hpp"

namespace deltasync::tools {
namespace {

class DeltaCheck : public ::testing::Test {
 protected:
  DeltaCheck() : model_(test::make_model(3)), after_(model_.half), digests_(model_.layout->tile_count()) {
    test::mutate(after_, *model_.layout, 0.05, 3);
    delta::half_digests(*model_.layout, model_.half, digests_, pool_);
    auto digests = digests_;
    delta_ = delta::encode(*model_.layout, model_.half, after_, digests,
                           {{1, 1}, {1, 2}, delta::root_digest(digests_), delta::ValueForm::ulp}, pool_);
  }

  ThreadPool pool_{2, "test"};
  test::TestModel model_;
  std::vector<std::byte> after_;
  std::vector<std::uint64_t> digests_;  ///< of the half before
  delta::Delta delta_;
};

TEST_F(DeltaCheck, AValidDeltaPasses) {
  const Status checked = check_delta(*model_.layout, delta_, model_.half, after_, digests_, pool_);
  EXPECT_TRUE(checked) << checked.error().to_string();
}

TEST_F(DeltaCheck, OtherBytesThanTheNewOnesAreFound) {
  // A byte in a tile that the delta touches.
  const Tile tile = tile_of(*model_.layout, delta_.frames.at(0).first_tile);
  const Tensor& tensor = model_.layout->tensors()[tile.tensor];
  const std::uint64_t last_row = (tile.rect.row + tile.rect.rows - 1) * tensor.row_bytes();
  after_[tensor.offset + last_row + tile.rect.col * tensor.element_bytes] ^= std::byte{1};
  const Status checked = check_delta(*model_.layout, delta_, model_.half, after_, digests_, pool_);
  ASSERT_FALSE(checked);
  EXPECT_EQ(checked.error().code(), Errc::corrupt);
  EXPECT_NE(checked.error().message().find("tile " + std::to_string(tile.index)), std::string::npos)
      << checked.error().message();
  EXPECT_FALSE(compact_sizes(*model_.layout, delta_, model_.half, after_, digests_, pool_));
}

TEST_F(DeltaCheck, AMissingTileIsFound) {
  const std::uint64_t lost = delta_.frames.back().first_tile;
  delta_.frames.pop_back();
  const Status checked = check_delta(*model_.layout, delta_, model_.half, after_, digests_, pool_);
  ASSERT_FALSE(checked);
  EXPECT_EQ(checked.error().code(), Errc::corrupt);
  EXPECT_NE(checked.error().message().find("the delta does not have it"), std::string::npos) << lost;
}

TEST_F(DeltaCheck, ADamagedFrameAndAWrongBaseAreFound) {
  auto wrong_digests = digests_;
  ++wrong_digests[delta_.frames.at(0).first_tile];
  EXPECT_FALSE(check_delta(*model_.layout, delta_, model_.half, after_, wrong_digests, pool_));
  delta_.frames.back().bytes.back() ^= std::byte{1};
  EXPECT_FALSE(check_delta(*model_.layout, delta_, model_.half, after_, digests_, pool_));
}

}  // namespace
}  // namespace deltasync::tools
