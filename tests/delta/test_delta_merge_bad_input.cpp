// Chains that cannot be merged: none of them is undefined behaviour.
#include <gmock/gmock-matchers.h>

#include "merge_history.hpp"

namespace deltasync::delta::test {
namespace {

using ::testing::HasSubstr;

class BadChain : public ::testing::Test {
 protected:
  BadChain() : model_(make_model(2, one_of_each_dtype())), history_(model_) {
    for (int i = 0; i < 3; ++i) history_.push(step_gently(history_.halves.back(), *model_.layout, 0.01, 70 + i));
  }
  void expect_error(Errc code, const std::string& part, const MergeOptions& options = {}) const {
    const auto merged = merge_history(history_, options, 2);
    ASSERT_FALSE(merged.ok()) << "accepted; expected: " << part;
    EXPECT_EQ(merged.error().code(), code) << merged.error().to_string();
    EXPECT_THAT(merged.error().message(), HasSubstr(part));
  }
  TestModel model_;
  History history_;
};

TEST_F(BadChain, ThatIsNone) {
  history_.deltas[1].to_root.bytes[0] ^= 1;
  expect_error(Errc::invalid_argument, "delta 2 begins where none before it ends");
  history_.deltas.erase(history_.deltas.begin() + 1);
  expect_error(Errc::invalid_argument, "delta 1 begins");
  history_.deltas.clear();
  expect_error(Errc::invalid_argument, "no deltas");
}

TEST_F(BadChain, OfAnotherLayout) {
  history_.deltas[1].layout.bytes[0] ^= 1;
  expect_error(Errc::layout_mismatch, "delta 1");
}

TEST_F(BadChain, WithADamagedFrame) {
  history_.deltas[1].frames[0].bytes.back() ^= std::byte{1};
  expect_error(Errc::corrupt, "body hash");
}

/// The frame of a delta with its first payload's last byte changed and its hashes made right.
TEST_F(BadChain, WithADamagedPayload) {
  Frame& frame = history_.deltas[1].frames[0];
  const auto records = records_of(*model_.layout, frame.bytes);
  FrameBuilder builder;
  for (const TileRecord& record : records) {
    builder.payloads().insert(builder.payloads().end(), record.payload.begin(), record.payload.end());
    if (record.tile == records.front().tile) builder.payloads()[0] = ~builder.payloads()[0];
    if (record.tile == records.front().tile) builder.payloads().back() |= std::byte{0x80};
    builder.add(record);
  }
  frame = builder.finish();
  expect_error(Errc::corrupt, "payload");
}

TEST_F(BadChain, WithFramesThatAreNoBatches) {
  std::vector<Frame>& frames = history_.deltas[1].frames;
  ASSERT_GT(frames.size(), 1U);
  FrameBuilder builder;
  for (const Frame& frame : frames) {
    for (const TileRecord& record : records_of(*model_.layout, frame.bytes)) {
      builder.payloads().insert(builder.payloads().end(), record.payload.begin(), record.payload.end());
      builder.add(record);
    }
  }
  frames = {builder.finish()};
  expect_error(Errc::corrupt, "not of one batch");
}

TEST_F(BadChain, InExponentClasses) {
  ThreadPool pool(1, "test");
  history_.deltas[1] = compact(*model_.layout, history_.deltas[1], history_.halves[1], pool).value();
  expect_error(Errc::unsupported, "rice_class");
  history_.deltas = {history_.deltas[1]};
  expect_error(Errc::unsupported, "rice_class");
}

TEST_F(BadChain, ThatNobodyWantsAnyMore) {
  const std::atomic<bool> cancel{true};
  MergeOptions options;
  options.cancel = &cancel;
  expect_error(Errc::cancelled, "no longer wanted", options);
}

}  // namespace
}  // namespace deltasync::delta::test
