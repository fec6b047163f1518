// What a relay says of a version before it has it: read as it was written, and refused where a byte of it differs.
#include <gtest/gtest.h>

#include "format/arrival_file.hpp"

namespace deltasync {
namespace {

LayoutPtr layout(std::uint64_t rows = 512) {
  return Layout::build({{"w", Dtype::bf16, {rows, 512}, {}, {}}, {"b", Dtype::f32, {64}, {}, {}}}).value();
}

class ArrivalFile : public ::testing::Test {
 protected:
  ArrivalFile() {
    for (std::uint64_t i = 0; i < layout_->tile_count(); ++i) digests_.push_back(i * 0x9E3779B97F4A7C15);
    root_.bytes[3] = 7;
  }
  std::vector<std::byte> encoded() const { return encode_arriving(*layout_, version_, root_, digests_); }
  Errc refused(ByteSpan file) const {
    const auto read = decode_arriving(file, *layout_);
    EXPECT_FALSE(read);
    return read ? Errc::internal : read.error().code();
  }

  const LayoutPtr layout_ = layout();
  Version version_{{77, 5}, "global_step_5"};
  Digest128 root_;
  std::vector<std::uint64_t> digests_;
};

TEST_F(ArrivalFile, IsReadAsItWasWritten) {
  const auto read = decode_arriving(encoded(), *layout_);
  ASSERT_TRUE(read) << read.error().to_string();
  EXPECT_EQ(read->version, version_);
  EXPECT_EQ(read->root, root_);
  EXPECT_EQ(read->digests, digests_);
}

TEST_F(ArrivalFile, IsRefusedWhateverByteDiffersAndWhereverItEnds) {
  const std::vector<std::byte> whole = encoded();
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::vector<std::byte> wrong = whole;
    wrong[at] ^= std::byte{1};
    EXPECT_EQ(refused(wrong), Errc::corrupt) << "byte " << at;
    EXPECT_EQ(refused(ByteSpan(whole).first(at)), Errc::corrupt) << "cut at " << at;
  }
  std::vector<std::byte> longer = whole;
  longer.push_back(std::byte{0});
  EXPECT_EQ(refused(longer), Errc::corrupt);
}

TEST_F(ArrivalFile, OfAnotherLayoutOrWithoutSomeDigestsIsRefused) {
  EXPECT_EQ(refused(encode_arriving(*layout(1024), version_, root_, digests_)), Errc::layout_mismatch);
  digests_.pop_back();
  EXPECT_EQ(refused(encoded()), Errc::corrupt);
  digests_.resize(digests_.size() + 2);
  EXPECT_EQ(refused(encoded()), Errc::corrupt);
}

TEST_F(ArrivalFile, WithALabelThatIsNoPlainTextIsRefused) {
  version_.label = std::string("a\0b", 3);
  EXPECT_EQ(refused(encoded()), Errc::corrupt);
}

}  // namespace
}  // namespace deltasync
