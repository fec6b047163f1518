// Packed tiles as a receiver's end sees them: content, divisions, refusals, and ends in the middle.
#include <atomic>
#include <future>
#include <memory>
#include <utility>

#include "agent/serve/pack_pool.hpp"
#include "delta/raw_planes.hpp"
#include "format/tiling.hpp"
#include "tests/agent/agent_harness.hpp"
#include "tests/support/model.hpp"

namespace deltasync::agent {
namespace {

using namespace std::chrono_literals;

class Packed : public AgentTest {
 protected:
  Packed() { options_.pull.limits.pack = 1h; }  // however little of the processor its threads get here
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
      const Tile tile = tile_of(*model_.layout, record.tile);
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
  EXPECT_TRUE(test::same_bytes(half, model_.half));
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

/// Counts the frames that are packed.
class PackedOnce : public Packed {
 protected:
  PackedOnce() {
    options_.core.before_pack = [this] { ++packed_; };
  }
  ~PackedOnce() override { agent_.reset(); }
  /// All of what a new plan leads to, packed.
  std::vector<std::vector<std::byte>> pull(Client& c) {
    const auto reply = c.plan(ask());
    EXPECT_TRUE(reply);
    auto frames = c.frames(wire::GetRawTiles{reply->plan, {all()}, wire::RawForm::packed});
    EXPECT_TRUE(frames) << frames.error().to_string();
    last_plan_ = reply->plan;
    return frames ? *frames : std::vector<std::vector<std::byte>>();
  }
  std::atomic<int> packed_{0};
  std::uint64_t last_plan_ = 0;
};

TEST_F(PackedOnce, ReceiversOfAVersionShareItsFrames) {
  serve_large();
  auto first = client();
  auto second = client();
  const auto frames = pull(first);
  const int packed = packed_;
  EXPECT_EQ(packed, static_cast<int>(frames.size()));
  EXPECT_EQ(pull(second), frames);
  EXPECT_EQ(packed_, packed) << "nothing was packed twice";
  // Another version's are its own.
  next_version(0.5);
  auto third = client();
  const auto other = pull(third);
  EXPECT_EQ(packed_, packed + static_cast<int>(other.size()));
  EXPECT_NE(other, frames);
  const auto digests = third.digests(last_plan_);
  ASSERT_TRUE(digests);
  for (const auto& frame : other) {
    const auto records = delta::parse_frame(*model_.layout, frame);
    ASSERT_TRUE(records);
    for (const auto& record : *records) EXPECT_EQ(record.digest_after, (*digests)[record.tile]);
  }
}

TEST_F(PackedOnce, TheyGoWithTheLastPlan) {
  serve_large();
  auto first = client();
  auto second = client();
  pull(first);
  const int packed = packed_;
  const std::uint64_t plan = last_plan_;
  pull(second);
  EXPECT_EQ(packed_, packed);
  ASSERT_TRUE(first.release(plan));
  ASSERT_TRUE(second.release(last_plan_));
  // A packing thread may still be letting go of the plan.
  EXPECT_TRUE(eventually([&] {
    pull(first);
    EXPECT_TRUE(first.release(last_plan_));
    return packed_ != packed;
  }));
  EXPECT_EQ(packed_, 2 * packed);
}

/// Packing threads that stand still, each with its copy made, until a test lets them go on.
class PackingStands : public Packed {
 protected:
  PackingStands() {
    options_.pull.limits.progress = 1h;
    options_.core.before_pack = [this] {
      ++packing_;
      go_.wait();
    };
  }
  ~PackingStands() override {
    go_on();
    agent_.reset();  // before what it waits for
  }
  void go_on() {
    if (!std::exchange(gone_on_, true)) gate_.set_value();
  }
  /// All tiles are asked for on a stream, and so many threads stand.
  void begin(Client& control, Client& stream, int threads = 2) {
    const auto reply = control.plan(ask());
    ASSERT_TRUE(reply);
    plan_ = reply->plan;
    const wire::GetRawTiles wanted{plan_, {all()}, wire::RawForm::packed};
    ASSERT_TRUE(stream.socket.send(99, wanted, test_deadline()));
    ASSERT_TRUE(eventually([&] { return packing_ == threads; }));
  }
  /// What comes next is an error, and the connection goes on.
  void expect_refused(Client& stream, Errc code) {
    const auto message = stream.socket.recv(wire::kFrameBytesMax, test_deadline());
    ASSERT_TRUE(message) << message.error().to_string();
    ASSERT_EQ(message->type(), wire::Type::error);
    EXPECT_EQ(message->header.request, 99u);
    EXPECT_EQ(wire::ErrorMessage::decode(message->payload).value().code, code);
    EXPECT_TRUE(stream.layout());
  }

  std::atomic<int> packing_{0};
  std::uint64_t plan_ = 0;

 private:
  std::promise<void> gate_;
  const std::shared_future<void> go_ = gate_.get_future().share();
  bool gone_on_ = false;
};

TEST_F(PackingStands, TheTilesComeRaw) {
  options_.pull.limits.pack = 50ms;
  serve_large();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  const auto digests = c.digests(reply->plan);
  ASSERT_TRUE(digests);
  const auto frames = c.frames(wire::GetRawTiles{reply->plan, {all()}, wire::RawForm::packed});
  ASSERT_TRUE(frames) << frames.error().to_string();
  std::uint64_t next = 0;
  for (const auto& frame : *frames) {
    const auto records = delta::parse_frame(*model_.layout, frame);
    ASSERT_TRUE(records) << records.error().to_string();
    for (const auto& record : *records) {
      ASSERT_EQ(record.tile, next);
      EXPECT_EQ(record.codec, delta::Codec::raw);
      EXPECT_EQ(record.digest_after, (*digests)[next++]);
    }
  }
  EXPECT_EQ(next, all().end);
}

TEST_F(PackingStands, APlanThatEndsIsToldOnALivingConnection) {
  start_agent();  // one frame, so that it is packed before the agent looks at the plan by itself
  next_version();
  auto c = client();
  auto stream = client(wire::Role::data);
  begin(c, stream, 1);
  ASSERT_TRUE(c.release(plan_));
  go_on();  // what was copied is packed, and may not be sent any more
  expect_refused(stream, Errc::lease_revoked);
}

TEST_F(PackingStands, AWriterGetsTheHalfAndThePeerIsTold) {
  options_.core.lease_grace = 10ms;
  serve_large();
  auto c = client();
  auto stream = client(wire::Role::data);
  begin(c, stream);
  next_version();
  next_version();  // needs the half that is being packed
  EXPECT_TRUE(revoked(1));
  EXPECT_TRUE(agent_->core().leases().list().empty());
  expect_refused(stream, Errc::lease_revoked);
}

TEST_F(PackingStands, ForAPeerThatLeftNothingMoreIsPacked) {
  serve_large();
  auto c = client();
  {
    auto stream = client(wire::Role::data);
    begin(c, stream);
  }
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 1; })) << "no limit was waited for";
  go_on();
  ASSERT_TRUE(c.frames(wire::GetRawTiles{plan_, {{0, 1}}, wire::RawForm::packed}));
  EXPECT_EQ(packing_, 3) << "the two that stood, and this one";
}

TEST(PackPool, WhatAJobHeldIsFreedOutsideOfTheLock) {
  std::promise<void> freed;
  PackPool pool(1);
  // Freeing it needs the lock.
  std::shared_ptr<int> held(new int(0), [&](const int* p) {
    delete p;
    pool.add([&](bool) { freed.set_value(); });
  });
  pool.add([held = std::move(held)](bool) {});
  EXPECT_EQ(freed.get_future().wait_until(test_deadline().at()), std::future_status::ready);
}

}  // namespace
}  // namespace deltasync::agent
