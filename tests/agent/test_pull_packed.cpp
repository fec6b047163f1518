// Packed tiles as a receiver's end sees them: content, divisions, refusals, and ends in the middle.
#include "delta/raw_planes.hpp"
#include "tests/agent/agent_harness.hpp"

namespace deltasync::agent {
namespace {

class Packed : public AgentTest {
 protected:
  /// 24 MiB: several frames, more than are packed ahead.
  void serve_large() {
    std::vector<TensorSpec> specs;
    for (int i = 0; i < 3; ++i) specs.push_back({"w" + std::to_string(i), Dtype::bf16, {2048, 2048}, {}, {}});
    model_ = test::make_model(2, specs);
    start_agent();
    next_version();
  }
  wire::TileRange all() const { return {0, model_.layout->tile_count()}; }
};

TEST_F(Packed, TilesInFramesOfAFewMegabytes) {
  serve_large();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->pack_threads, 2u);
  const auto digests = c.digests(reply->plan);
  ASSERT_TRUE(digests);
  const auto frames = c.frames(wire::GetRawTiles{reply->plan, {all()}, wire::RawForm::packed});
  ASSERT_TRUE(frames) << frames.error().to_string();
  EXPECT_GE(frames->size(), 6u);
  std::vector<std::byte> half(model_.half.size());
  std::uint64_t next = 0;
  std::uint64_t packed = 0;
  std::uint64_t bytes = 0;
  for (const auto& frame : *frames) {
    bytes += frame.size();
    const auto records = delta::parse_frame(*model_.layout, frame);
    ASSERT_TRUE(records) << records.error().to_string();
    std::uint64_t elements = 0;
    for (const auto& record : *records) {
      ASSERT_EQ(record.tile, next++);
      packed += record.codec == delta::Codec::raw_planes ? 1 : 0;
      elements += record.changed;
      const Tile tile = model_.layout->tile(record.tile);
      const Tensor& tensor = model_.layout->tensors()[tile.tensor];
      std::byte* const at =
          delta::tile_address({half.data() + tensor.offset, tensor.row_bytes()}, tile, tensor.element_bytes);
      const auto after = delta::apply_tile(*model_.layout, record, at, tensor.row_bytes(), 0);
      ASSERT_TRUE(after) << after.error().to_string();
      EXPECT_EQ(*after, (*digests)[record.tile]);
    }
    EXPECT_LE(elements * 2, 4u << 20);
  }
  EXPECT_EQ(next, all().end);
  EXPECT_GT(packed, 0u);
  EXPECT_LT(bytes, model_.layout->half_bytes() * 85 / 100);
  EXPECT_EQ(half, model_.half);
  // The connection goes on.
  const auto raw = c.frames(wire::GetRawTiles{reply->plan, {{0, 2}}});
  ASSERT_TRUE(raw);
  EXPECT_EQ(delta::parse_frame(*model_.layout, raw->front()).value().front().codec, delta::Codec::raw);
}

TEST_F(Packed, WithoutThreadsItIsRefused) {
  options_.core.pack_threads = 0;
  start_agent();
  next_version();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->pack_threads, 0u);
  const auto frames = c.frames(wire::GetRawTiles{reply->plan, {all()}, wire::RawForm::packed});
  ASSERT_FALSE(frames);
  EXPECT_EQ(frames.error().code(), Errc::unsupported);
  EXPECT_TRUE(c.frames(wire::GetRawTiles{reply->plan, {all()}}));
}

TEST_F(Packed, AReleasedPlanIsRefused) {
  serve_large();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  ASSERT_TRUE(c.release(reply->plan));
  const auto frames = c.frames(wire::GetRawTiles{reply->plan, {all()}, wire::RawForm::packed});
  ASSERT_FALSE(frames);
  EXPECT_EQ(frames.error().code(), Errc::lease_revoked);
}

TEST_F(Packed, PeersThatLeaveAndAnAgentThatStopsInTheMiddle) {
  serve_large();
  for (int i = 0; i < 4; ++i) {
    auto c = client();
    const auto reply = c.plan(ask());
    ASSERT_TRUE(reply);
    ASSERT_TRUE(c.socket.send(99, wire::GetRawTiles{reply->plan, {all()}, wire::RawForm::packed}, test_deadline()));
    if (i % 2 != 0) continue;
    ASSERT_TRUE(c.socket.recv(wire::kFrameBytesMax, test_deadline()));
  }
  EXPECT_TRUE(eventually([&] { return agent_->core().leases().list().empty(); })) << "what they read is let go of";
  std::vector<Client> left;
  for (int i = 0; i < 3; ++i) {
    left.push_back(client());
    const auto reply = left.back().plan(ask());
    ASSERT_TRUE(reply);
    ASSERT_TRUE(
        left.back().socket.send(99, wire::GetRawTiles{reply->plan, {all()}, wire::RawForm::packed}, test_deadline()));
  }
  stop_agent();
}

}  // namespace
}  // namespace deltasync::agent
