// A version that a relay brings, before it is whole: receivers that take it plan for it at once, and get each tile when
// it is in place and not before. If it comes to nothing they plan again. No half is concerned.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "base/hash.hpp"
#include "delta/delta.hpp"
#include "format/tile_set.hpp"
#include "format/tiling.hpp"
#include "format/wire_local.hpp"
#include "format/wire_report.hpp"
#include "shm/arriving_memory.hpp"
#include "tests/agent/agent_harness.hpp"
#include "tests/support/log_lines.hpp"
#include "writer/relay_access.hpp"

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
    for (std::uint64_t tile = 0; tile < model_.layout->tile_count(); ++tile) {
      said_.digests.push_back(delta::tile_digest(*model_.layout, model_.half, tile));
    }
    said_.layout = model_.layout->digest();
    said_.version = {{epoch_, 1}, "step_1"};
    said_.root = delta::root_digest(said_.digests);
    ThreadPool pool(1, "test");
    auto made =
        shm::ArrivingMemory::make({model_.layout->tile_count(), model_.layout->half_bytes()}, pool, test_deadline());
    ASSERT_TRUE(made) << made.error().to_string();
    memory_ = *std::move(made);
  }

  const Snapshot& now() {
    snapshot_ = agent_->core().versions().snapshot();
    return *snapshot_;
  }
  /// As a relay does.
  void announce() { tell_arrival(*writer_, said_, memory_->file()); }
  bool arrives() {
    return eventually([&] { return now().arriving != nullptr; });
  }
  bool is_announced() {
    announce();
    return arrives();
  }
  bool ends() {
    return eventually([&] { return now().arriving == nullptr; });
  }
  wire::PlanRequest ask_arriving() const {
    wire::PlanRequest request = ask();
    request.arriving = 1;
    return request;
  }
  void bring(std::uint64_t tile) {
    const Tile at = tile_of(*model_.layout, tile);
    const Tensor& tensor = model_.layout->tensors()[at.tensor];
    for (std::uint64_t row = at.rect.row; row < at.rect.row + at.rect.rows; ++row) {
      const std::uint64_t from = tensor.offset + row * tensor.row_bytes() + at.rect.col * tensor.element_bytes;
      std::copy_n(model_.half.begin() + static_cast<std::ptrdiff_t>(from), at.rect.cols * tensor.element_bytes,
                  memory_->room().begin() + static_cast<std::ptrdiff_t>(from));
    }
    memory_->set_in_place(tile);
  }
  void bring_tensor(std::uint32_t tensor) {
    for (std::uint64_t tile = tiles_of(tensor).first; tile < tiles_of(tensor).end; ++tile) bring(tile);
  }
  void seal() { ASSERT_TRUE(offload(*writer_, model_.half, 1)); }
  wire::TileRange tiles_of(std::uint32_t tensor) const {
    const Tensor& t = model_.layout->tensors()[tensor];
    return {t.first_tile, t.first_tile + t.tile_count};
  }
  wire::TileRange all() const { return {0, model_.layout->tile_count()}; }
  std::vector<std::byte> bytes_of_tensor(std::uint32_t tensor) const {
    const Tensor& t = model_.layout->tensors()[tensor];
    const std::byte* const from = model_.half.data() + t.offset;
    return {from, from + t.bytes};
  }

  test::LogLines log_;
  wire::TrainerArrival said_;
  std::unique_ptr<shm::ArrivingMemory> memory_;
  SnapshotPtr snapshot_;
};

TEST_F(Arriving, IsPlannedForAndItsTilesGoOutAsTheyCome) {
  ASSERT_TRUE(is_announced());
  auto c = client();
  const auto reply = c.plan(ask_arriving());
  ASSERT_TRUE(reply) << reply.error().to_string();
  EXPECT_EQ(reply->mode, wire::PlanMode::full);
  EXPECT_EQ(reply->target.id.number, 1u);
  EXPECT_EQ(reply->target_root, said_.root);
  EXPECT_EQ(reply->arriving, 1);
  EXPECT_EQ(*c.digests(reply->plan), said_.digests);
  bring_tensor(0);
  EXPECT_EQ(*c.extent(reply->plan, tiles_of(0)), bytes_of_tensor(0));

  std::promise<std::vector<std::byte>> came;
  auto rest = came.get_future();
  std::thread asks([&] { came.set_value(*c.extent(reply->plan, tiles_of(1))); });
  EXPECT_EQ(rest.wait_for(100ms), std::future_status::timeout) << "it is not there yet";
  bring_tensor(1);
  EXPECT_EQ(rest.get(), bytes_of_tensor(1)) << "before the version is sealed";
  asks.join();
  EXPECT_EQ(now().served, nullptr);

  seal();
  EXPECT_EQ(now().served->root, said_.root);
  EXPECT_TRUE(ends());
  EXPECT_TRUE(eventually([&] { return agent_->core().open_plans().list().empty(); })) << "it would hold the memory";
  EXPECT_EQ(c.extent(reply->plan, all()).error().code(), Errc::lease_revoked);
  const auto whole = client().plan(ask_arriving());
  ASSERT_TRUE(whole);
  EXPECT_EQ(whole->arriving, 0) << "the next one is of the half";
}

TEST_F(Arriving, IsNothingToThoseWhoDoNotTakeIt) {
  ASSERT_TRUE(is_announced());
  auto c = client();
  auto request = ask();
  request.wait_ms = 1;
  EXPECT_EQ(c.plan(request).error().code(), Errc::timed_out);
  EXPECT_FALSE(c.ask<wire::Lag>(wire::GetLag{})->newest.id.valid());
}

/// Tiles of a band come as rows: what is sent ends before the band that is not whole.
TEST_F(Arriving, PartsOfATensorGoOutWholeBandByWholeBand) {
  ASSERT_TRUE(is_announced());
  auto c = client();
  const auto reply = c.plan(ask_arriving());
  ASSERT_TRUE(reply);
  std::promise<std::vector<std::byte>> came;
  auto whole = came.get_future();
  std::thread asks([&] { came.set_value(*c.extent(reply->plan, all())); });
  for (std::uint64_t tile = model_.layout->tile_count(); tile-- > 0;) {  // the worst order
    bring(tile);
    if (tile % 8 == 0) std::this_thread::sleep_for(1ms);
  }
  EXPECT_EQ(whole.get(), model_.half);
  asks.join();
}

TEST_F(Arriving, TilesOfSlicesWaitToo) {
  ASSERT_TRUE(is_announced());
  auto c = client();
  const auto tiles = TileSet::of(*model_.layout, {{{"b", Rect{0, 0, 1024, 1024}}}});
  ASSERT_TRUE(tiles);
  wire::Subscribe wanted{model_.layout->digest(), tiles->ranges()};
  ASSERT_TRUE(c.ask<wire::Empty>(wanted));
  auto request = ask_arriving();
  request.subscription = tiles->digest();
  const auto reply = c.plan(request);
  ASSERT_TRUE(reply) << reply.error().to_string();
  const std::vector<std::uint64_t> theirs = tiles->gather(said_.digests);
  EXPECT_EQ(reply->target_root, xxh3_128(std::as_bytes(std::span(theirs))));
  std::promise<std::size_t> came;
  auto frames = came.get_future();
  std::thread asks([&] { came.set_value(c.frames(wire::GetRawTiles{reply->plan, tiles->ranges()})->size()); });
  EXPECT_EQ(frames.wait_for(100ms), std::future_status::timeout);
  bring_tensor(1);
  EXPECT_GT(frames.get(), 0u);
  asks.join();
}

TEST_F(Arriving, IsNeitherPackedNorCopiedOutOfAHalf) {
  ASSERT_TRUE(is_announced());
  auto c = client();
  const auto reply = c.plan(ask_arriving());
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->pack_threads, 0u);
  const wire::GetRawTiles packed{reply->plan, {tiles_of(1)}, wire::RawForm::packed};
  EXPECT_EQ(c.frames(packed).error().code(), Errc::unsupported);
  EXPECT_EQ(c.ask<wire::Local>(wire::GetLocal{reply->plan}).error().code(), Errc::invalid_argument);
}

TEST_F(Arriving, IsGivenUpAndWhoWaitsPlansAgain) {
  ASSERT_TRUE(is_announced());
  auto c = client();
  const auto reply = c.plan(ask_arriving());
  ASSERT_TRUE(reply);
  std::promise<Errc> told;
  auto error = told.get_future();
  std::thread asks([&] { told.set_value(c.extent(reply->plan, tiles_of(1)).error().code()); });
  EXPECT_EQ(error.wait_for(50ms), std::future_status::timeout);
  end_arrival(*writer_, true);
  EXPECT_EQ(error.get(), Errc::lease_revoked);
  asks.join();
  EXPECT_TRUE(ends());
  auto request = ask_arriving();
  request.wait_ms = 1;
  EXPECT_EQ(c.plan(request).error().code(), Errc::timed_out) << "there is no version, as before";
  said_.version.id.number = 2;
  ASSERT_TRUE(is_announced());
  EXPECT_EQ(c.plan(ask_arriving())->target.id.number, 2u);
}

/// Its connection says so: whatever the relay said before stands.
TEST_F(Arriving, EndsWithItsRelay) {
  tell_parents(*writer_, {{{7, "above:7070"}}, 1});
  ASSERT_TRUE(is_announced());
  ASSERT_TRUE(eventually([&] { return agent_->core().origin().cut_off().has_value(); })) << "the agent above is";
  auto c = client();
  const auto reply = c.plan(ask_arriving());
  ASSERT_TRUE(reply) << "what is there is to be had all the same";
  const auto since = std::chrono::steady_clock::now();
  writer_.reset();
  EXPECT_TRUE(ends());
  EXPECT_LT(std::chrono::steady_clock::now() - since, 10s) << "not once no tile has come for long";
  EXPECT_EQ(c.extent(reply->plan, tiles_of(0)).error().code(), Errc::lease_revoked);
  ASSERT_TRUE(eventually([&] { return agent_->core().origin().cut_off().has_value(); }));
  auto request = ask_arriving();
  request.wait_ms = 60'000;
  EXPECT_EQ(c.plan(request).error().code(), Errc::peer_died);
}

/// Who knows another agent goes on there; who does not waits here.
TEST_F(Arriving, IsNotOfferedWhileNoTilesCome) {
  ASSERT_TRUE(is_announced());
  bring_tensor(0);
  auto c = client();
  const auto reply = c.plan(ask_arriving());
  ASSERT_TRUE(reply);
  const auto since = std::chrono::steady_clock::now();
  EXPECT_EQ(c.extent(reply->plan, tiles_of(1)).error().code(), Errc::lease_revoked);
  const auto waited = std::chrono::steady_clock::now() - since;
  EXPECT_GT(waited, 3s);
  EXPECT_LT(waited, 25s) << "5 s, and what a busy machine adds";
  EXPECT_TRUE(ends());
  const auto cut_off = agent_->core().origin().cut_off();
  ASSERT_TRUE(cut_off);
  EXPECT_NE(cut_off->why.find("brings no more tiles"), std::string::npos);
  auto request = ask_arriving();
  request.wait_ms = 60'000;
  EXPECT_EQ(c.plan(request).error().code(), Errc::peer_died) << "it is told so";

  bring(tiles_of(1).first);
  ASSERT_TRUE(arrives());
  EXPECT_FALSE(agent_->core().origin().cut_off());
  const auto goes_on = c.plan(request);
  ASSERT_TRUE(goes_on);
  EXPECT_EQ(*c.extent(goes_on->plan, tiles_of(0)), bytes_of_tensor(0));
  bring_tensor(1);
  EXPECT_EQ(*c.extent(goes_on->plan, tiles_of(1)), bytes_of_tensor(1));
}

TEST_F(Arriving, TheFirstTileMayTakeLonger) {
  ASSERT_TRUE(is_announced());
  std::this_thread::sleep_for(7s);
  EXPECT_NE(now().arriving, nullptr);
  auto c = client();
  const auto reply = c.plan(ask_arriving());
  bring_tensor(0);
  EXPECT_EQ(*c.extent(reply->plan, tiles_of(0)), bytes_of_tensor(0));
}

/// It is found out, and nobody is offered it again.
TEST_F(Arriving, AWrongTileEndsIt) {
  ASSERT_TRUE(is_announced());
  bring_tensor(0);
  auto c = client();
  const auto reply = c.plan(ask_arriving());
  ASSERT_TRUE(reply);
  wire::CheckTiles question{reply->plan, {tiles_of(0)}};
  EXPECT_EQ(c.ask<wire::TilesChecked>(question)->plan_again, 0) << "all is well";
  EXPECT_NE(now().arriving, nullptr);
  memory_->room()[5] ^= std::byte{1};
  question.ranges = {tiles_of(1)};
  EXPECT_EQ(c.ask<wire::TilesChecked>(question)->plan_again, 0) << "those that are not in place are not looked at";
  question.ranges = {tiles_of(0)};
  EXPECT_EQ(c.ask<wire::TilesChecked>(question)->plan_again, 1);
  EXPECT_EQ(now().arriving, nullptr);
  EXPECT_TRUE(log_.has("arriving_tile_is_wrong"));
  EXPECT_EQ(c.extent(reply->plan, tiles_of(0)).error().code(), Errc::lease_revoked);
  bring_tensor(1);
  auto request = ask_arriving();
  request.wait_ms = 200;
  EXPECT_EQ(c.plan(request).error().code(), Errc::timed_out);
  seal();
  EXPECT_EQ(c.plan(request)->target_root, said_.root);
}

TEST_F(Arriving, ARepairOfAWrongTileEndsItToo) {
  ASSERT_TRUE(is_announced());
  bring_tensor(0);
  auto c = client();
  const auto reply = c.plan(ask_arriving());
  memory_->room()[5] ^= std::byte{1};
  EXPECT_EQ(c.frames(wire::GetRawTiles{reply->plan, {{0, 1}}}).error().code(), Errc::lease_revoked);
  EXPECT_EQ(now().arriving, nullptr);
}

TEST_F(Arriving, WhatHoldsItAlreadyHasNothingToPull) {
  ASSERT_TRUE(is_announced());
  auto c = client();
  auto request = ask_arriving();
  request.base = said_.version.id;
  request.base_root = said_.root;
  const auto reply = c.plan(request);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->mode, wire::PlanMode::up_to_date);
  request.want = wire::WantKind::newer;
  request.wait_ms = 1;
  EXPECT_EQ(c.plan(request).error().code(), Errc::timed_out);
}

/// There a delta may do for those who have what is served.
TEST_F(Arriving, IsNotOfferedWhereAVersionIsServed) {
  seal();
  const ServedPtr before = served();
  said_.version.id.number = 2;
  announce();
  std::this_thread::sleep_for(200ms);
  EXPECT_EQ(now().arriving, nullptr);
  EXPECT_EQ(served(), before) << "nothing has changed";
  EXPECT_EQ(client().plan(ask_arriving())->target.id.number, 1u);
}

TEST_F(Arriving, AnotherOneTakesItsPlace) {
  ASSERT_TRUE(is_announced());
  auto c = client();
  const auto reply = c.plan(ask_arriving());
  said_.version.id.number = 2;
  announce();
  ASSERT_TRUE(eventually([&] { return now().arriving && now().arriving->version.id.number == 2; }));
  EXPECT_EQ(c.extent(reply->plan, tiles_of(0)).error().code(), Errc::lease_revoked);
}

/// A half is given back at once: nobody's lease is on it.
TEST_F(Arriving, ItsReadersHoldUpNoWriter) {
  ASSERT_TRUE(is_announced());
  auto c = client();
  const auto reply = c.plan(ask_arriving());
  ASSERT_TRUE(c.socket.send(1, wire::GetExtent{reply->plan, all()}, test_deadline()));
  for (std::uint64_t number = 1; number <= 4; ++number) {
    const auto sealed = offload(*writer_, model_.half, number, Deadline::after(10s));
    ASSERT_TRUE(sealed) << sealed.error().to_string();
    EXPECT_LT(sealed->guard_s, 5);
  }
}

// ---- what is not believed ------------------------------------------------------------------------------------------

class ArrivingWrongly : public Arriving {
 protected:
  void refused_with(const std::string& why) {
    ASSERT_TRUE(eventually([&] { return log_.has("arrival_refused"); }));
    EXPECT_TRUE(log_.has(why)) << log_.text();
    EXPECT_EQ(now().arriving, nullptr);
    seal();  // the relay's connection goes on
    EXPECT_EQ(*now().served->digests, digests_);
  }
  void SetUp() override {
    Arriving::SetUp();
    digests_ = said_.digests;
  }
  std::vector<std::uint64_t> digests_;
};

TEST_F(ArrivingWrongly, DigestsWithAnotherRoot) {
  said_.digests.back() ^= 1;
  announce();
  refused_with("its digests have another root");
}

TEST_F(ArrivingWrongly, AnotherLayout) {
  said_.layout.bytes[0] ^= 1;
  announce();
  refused_with("it is of layout " + to_string(said_.layout));
}

TEST_F(ArrivingWrongly, TooFewDigests) {
  said_.digests.pop_back();
  said_.root = delta::root_digest(said_.digests);
  announce();
  refused_with("with " + std::to_string(said_.digests.size()) + " tiles");
}

TEST_F(ArrivingWrongly, MemoryOfAnotherSize) {
  ThreadPool pool(1, "test");
  const auto small = shm::ArrivingMemory::make({model_.layout->tile_count(), 1}, pool, test_deadline());
  tell_arrival(*writer_, said_, (*small)->file());
  refused_with("bytes, not " +
               std::to_string(shm::ArrivingShape{model_.layout->tile_count(), model_.layout->half_bytes()}.bytes()));
}

TEST_F(ArrivingWrongly, AFileThatItsOwnerMayShrink) {
  dir_.write("file", std::string(64 << 10, 'x'));
  const UniqueFd file(::open((dir_.path() / "file").c_str(), O_RDWR | O_CLOEXEC));
  tell_arrival(*writer_, said_, file.get());
  refused_with("its size is not sealed");
}

}  // namespace
}  // namespace deltasync::agent
