// The first version of a segment while a relay writes it: receivers plan for it at once, and get each tile when it is
// in place and not before. If it comes to nothing their leases end, and its half is given back once nobody reads it.
#include <algorithm>
#include <future>
#include <span>
#include <thread>

#include "base/hash.hpp"
#include "delta/delta.hpp"
#include "format/arrival_file.hpp"
#include "format/tile_set.hpp"
#include "shm/side_files.hpp"
#include "tests/agent/agent_harness.hpp"

namespace deltasync::agent {
namespace {

using namespace std::chrono_literals;

class Arriving : public AgentTest {
 protected:
  Arriving() {
    model_ = test::make_model(3, {{"a", Dtype::bf16, {4096, 1024}, {}, {}}, {"b", Dtype::bf16, {4096, 1024}, {}, {}}});
  }

  void SetUp() override {
    start_agent();
    writer_ = attach(model_.layout);
    digests_.resize(static_cast<std::size_t>(model_.layout->tile_count()));
    for (std::uint64_t tile = 0; tile < digests_.size(); ++tile) {
      digests_[tile] = delta::tile_digest(*model_.layout, model_.half, tile);
    }
    root_ = delta::root_digest(digests_);
  }
  void TearDown() override { writer_->abort(); }

  const Snapshot& now() {
    snapshot_ = agent_->core().versions().snapshot();
    return *snapshot_;
  }
  std::filesystem::path file() { return shm::side_file_path(now().generation->segment->path(), shm::kHandedSideFile); }
  /// As a relay does.
  void begin(std::uint64_t number = 1) {
    const Version version{{epoch_, number}, "step_" + std::to_string(number)};
    const std::vector<std::byte> said = encode_arriving(*model_.layout, version, root_, digests_);
    const ByteSpan pieces[] = {said};
    std::filesystem::remove(file());
    ASSERT_TRUE(shm::write_side_file(file(), pieces));
    ASSERT_TRUE(writer_->begin(version, test_deadline()));
  }
  bool arrives() {
    return eventually([&] { return now().arriving != nullptr; });
  }
  void write(std::uint32_t tensor) {
    const std::byte* const from = model_.half.data() + model_.layout->tensors()[tensor].offset;
    ASSERT_TRUE(writer_->write(tensor, Source{from}));
  }
  wire::TileRange tiles_of(std::uint32_t tensor) const {
    const Tensor& t = model_.layout->tensors()[tensor];
    return {t.first_tile, t.first_tile + t.tile_count};
  }
  std::vector<std::byte> bytes_of_tensor(std::uint32_t tensor) const {
    const Tensor& t = model_.layout->tensors()[tensor];
    const std::byte* const from = model_.half.data() + t.offset;
    return {from, from + t.bytes};
  }
  shm::HalfState state_of_fill() { return shm::inspect_half(*now().generation->segment, 0).state; }

  std::vector<std::uint64_t> digests_;
  Digest128 root_;
  SnapshotPtr snapshot_;
};

TEST_F(Arriving, IsPlannedForAndItsTilesGoOutAsTheyCome) {
  begin();
  ASSERT_TRUE(arrives());
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply) << reply.error().to_string();
  EXPECT_EQ(reply->mode, wire::PlanMode::full);
  EXPECT_EQ(reply->target.id.number, 1u);
  EXPECT_EQ(reply->target_root, root_);
  EXPECT_EQ(reply->pack_threads, 0u) << "who packs may not read what is being written";
  EXPECT_EQ(*c.digests(reply->plan), digests_);
  write(0);
  EXPECT_EQ(*c.extent(reply->plan, tiles_of(0)), bytes_of_tensor(0));

  std::promise<std::vector<std::byte>> came;
  auto rest = came.get_future();
  std::thread asks([&] { came.set_value(*c.extent(reply->plan, tiles_of(1))); });
  EXPECT_EQ(rest.wait_for(100ms), std::future_status::timeout) << "it is not there yet";
  EXPECT_EQ(now().served, nullptr);
  write(1);
  EXPECT_EQ(rest.get(), bytes_of_tensor(1)) << "before the version is sealed";
  asks.join();
  EXPECT_EQ(now().served, nullptr);

  ASSERT_TRUE(writer_->commit(test_deadline()));
  ASSERT_TRUE(eventually([&] { return now().served != nullptr; }));
  EXPECT_EQ(now().served->root, root_);
  EXPECT_EQ(now().arriving, nullptr);
  EXPECT_FALSE(std::filesystem::exists(file()));
  EXPECT_TRUE(c.extent(reply->plan, tiles_of(0))) << "the plan goes on";
  EXPECT_TRUE(c.release(reply->plan));
}

/// Tiles of a band come as rows: what is sent ends before the band that is not whole.
TEST_F(Arriving, PartsOfATensorGoOutWholeBandByWholeBand) {
  begin();
  ASSERT_TRUE(arrives());
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  std::promise<std::vector<std::byte>> came;
  auto whole = came.get_future();
  std::thread asks([&] { came.set_value(*c.extent(reply->plan, {0, model_.layout->tile_count()})); });
  for (std::uint32_t tensor = 0; tensor < 2; ++tensor) {
    const Tensor& t = model_.layout->tensors()[tensor];
    for (std::uint64_t row = 0; row < t.rows; row += 100) {
      const std::uint64_t rows = std::min<std::uint64_t>(100, t.rows - row);
      const std::byte* const from = model_.half.data() + t.offset + row * t.row_bytes();
      ASSERT_TRUE(writer_->write(tensor, Rect{row, 0, rows, t.cols}, Source{from}));
      std::this_thread::sleep_for(1ms);
    }
  }
  EXPECT_EQ(whole.get(), model_.half);
  asks.join();
}

TEST_F(Arriving, TilesOfSlicesWaitToo) {
  begin();
  ASSERT_TRUE(arrives());
  auto c = client();
  const auto tiles = TileSet::of(*model_.layout, {{{"b", Rect{0, 0, 1024, 1024}}}});
  ASSERT_TRUE(tiles);
  wire::Subscribe wanted{model_.layout->digest(), tiles->ranges()};
  ASSERT_TRUE(c.ask<wire::Empty>(wanted));
  auto request = ask();
  request.subscription = tiles->digest();
  const auto reply = c.plan(request);
  ASSERT_TRUE(reply) << reply.error().to_string();
  const std::vector<std::uint64_t> theirs = tiles->gather(digests_);
  EXPECT_EQ(reply->target_root, xxh3_128(std::as_bytes(std::span(theirs))));
  std::promise<std::size_t> came;
  auto frames = came.get_future();
  std::thread asks([&] { came.set_value(c.frames(wire::GetRawTiles{reply->plan, tiles->ranges()})->size()); });
  EXPECT_EQ(frames.wait_for(100ms), std::future_status::timeout);
  write(1);
  EXPECT_GT(frames.get(), 0u);
  asks.join();
}

TEST_F(Arriving, IsGivenUpAndWhoWaitsPlansAgain) {
  begin();
  ASSERT_TRUE(arrives());
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  std::promise<Errc> told;
  auto error = told.get_future();
  std::thread asks([&] { told.set_value(c.extent(reply->plan, tiles_of(1)).error().code()); });
  EXPECT_EQ(error.wait_for(50ms), std::future_status::timeout);
  writer_->abort();
  EXPECT_EQ(error.get(), Errc::lease_revoked);
  asks.join();
  EXPECT_TRUE(eventually([&] { return state_of_fill() == shm::HalfState::free; })) << "nobody holds it";
  EXPECT_EQ(now().arriving, nullptr);
  auto request = ask();
  request.wait_ms = 1;
  EXPECT_EQ(c.plan(request).error().code(), Errc::timed_out) << "there is no version, as before";

  begin(2);
  ASSERT_TRUE(arrives());
  const auto again = c.plan(ask());
  ASSERT_TRUE(again);
  EXPECT_EQ(again->target.id.number, 2u);
}

/// Invariant 2: no byte that anyone may still read is written.
TEST_F(Arriving, ItsHalfIsNotGivenBackWhileSomebodyReadsIt) {
  begin();
  ASSERT_TRUE(arrives());
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  LeasePtr lease = agent_->core().leases().begin(now().arriving->half);
  auto reader = agent_->core().leases().enter(lease, [] {});
  ASSERT_TRUE(reader);
  std::optional<LeaseTable::Reader> reads(std::move(*reader));
  writer_->abort();
  EXPECT_TRUE(eventually([&] { return !reads->may_send(); })) << "it is told";
  std::this_thread::sleep_for(200ms);
  EXPECT_EQ(state_of_fill(), shm::HalfState::quarantined);
  reads.reset();
  EXPECT_TRUE(eventually([&] { return state_of_fill() == shm::HalfState::free; }));
}

TEST_F(Arriving, WhatHoldsItAlreadyHasNothingToPull) {
  begin();
  ASSERT_TRUE(arrives());
  auto c = client();
  auto request = ask();
  request.base = now().arriving->version.id;
  request.base_root = root_;
  const auto reply = c.plan(request);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->mode, wire::PlanMode::up_to_date);
  request.want = wire::WantKind::newer;
  request.wait_ms = 1;
  EXPECT_EQ(c.plan(request).error().code(), Errc::timed_out);
}

TEST_F(Arriving, ThatSaysSomethingWrongIsServedOnceItIsWhole) {
  const std::vector<std::uint64_t> right = digests_;
  digests_.back() ^= 1;  // then it has not the root
  begin();
  EXPECT_TRUE(eventually([&] { return !std::filesystem::exists(file()); }));
  EXPECT_EQ(now().arriving, nullptr);
  write(0);
  write(1);
  ASSERT_TRUE(writer_->commit(test_deadline()));
  ASSERT_TRUE(eventually([&] { return now().served != nullptr; }));
  EXPECT_EQ(*now().served->digests, right);
}

/// There a delta may do for those who have what is served.
TEST_F(Arriving, IsNotOfferedWhereAVersionIsServed) {
  next_version();
  const ServedPtr before = served();
  begin(2);
  std::this_thread::sleep_for(200ms);
  EXPECT_EQ(now().arriving, nullptr);
  EXPECT_EQ(served(), before) << "nothing has changed";
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->target.id.number, 1u);
}

class ArrivingSlowly : public Arriving {
 protected:
  ArrivingSlowly() { options_.pull.limits.arrive = 50ms; }
};

/// Else who waits would take the silence for a broken connection.
TEST_F(ArrivingSlowly, WhoHasWaitedForLongPlansAgain) {
  begin();
  ASSERT_TRUE(arrives());
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  EXPECT_EQ(c.extent(reply->plan, tiles_of(0)).error().code(), Errc::lease_revoked);
  EXPECT_EQ(c.frames(wire::GetRawTiles{reply->plan, {tiles_of(1)}}).error().code(), Errc::lease_revoked);
  write(0);
  EXPECT_TRUE(c.extent(reply->plan, tiles_of(0)));
}

}  // namespace
}  // namespace deltasync::agent
