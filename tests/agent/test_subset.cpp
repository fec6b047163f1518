// Plans for some of the tiles: roots, sizes and digests are those of the tiles, whatever version is asked from or for.
#include <gmock/gmock-matchers.h>

#include <algorithm>
#include <map>

#include "agent/plans/subset.hpp"
#include "delta/delta.hpp"
#include "tests/agent/agent_harness.hpp"

namespace deltasync::agent {
namespace {

using testing::HasSubstr;

class Subsets : public AgentTest {
 protected:
  Subsets() { options_.core.ring_bytes_max = 64u << 20; }

  void version(double density = 0.01) {
    next_version(density);
    std::vector<std::uint64_t> digests(model_.layout->tile_count());
    ThreadPool pool(1, "test");
    delta::half_digests(*model_.layout, model_.half, digests, pool);
    history_[number_] = digests;
  }
  TileSet tiles(const std::vector<wire::TileRange>& ranges) const {
    auto set = TileSet::make(*model_.layout, ranges);
    EXPECT_TRUE(set) << set.error().to_string();
    return *set;
  }
  /// Columns of one tensor, rows of another, whole small ones.
  TileSet some() const {
    const Layout& layout = *model_.layout;
    auto set = TileSet::of(layout, {{*col_slice(layout, "ffn.down", 1, 2),
                                     {"embed.weight", Rect{100, 0, 200, 96}},
                                     {"fp16.cube", std::nullopt},
                                     *col_slice(layout, "attn.q", 2, 4)}});
    EXPECT_TRUE(set) << set.error().to_string();
    return *set;
  }
  static Status subscribe(Client& c, const TileSet& set) {
    DS_TRY(c.ask<wire::Empty>(wire::Subscribe{set.layout(), set.ranges()}));
    return {};
  }
  /// Of a receiver that holds version `number`; 0: nothing.
  wire::PlanRequest ask_from(const TileSet& set, std::uint64_t number,
                             wire::WantKind want = wire::WantKind::newest) const {
    wire::PlanRequest plan = ask(want);
    plan.subscription = set.digest();
    if (number == 0) return plan;
    plan.base = {epoch_, number};
    plan.base_root = set.root(history_.at(number));
    return plan;
  }
  /// Frames as they come for the set must be what the step says; returns the tiles that they have.
  std::vector<std::uint64_t> expect_step(Client& stream, const wire::PlanReply& reply, std::uint32_t index,
                                         const TileSet& set) {
    const wire::DeltaStep& step = reply.steps[index];
    EXPECT_EQ(step.to_root, set.root(history_.at(step.to.number)));
    std::vector<std::uint64_t> tiles;
    const auto frames = stream.frames(wire::GetFrames{reply.plan, index, set.ranges()});
    const auto all = stream.frames(wire::GetFrames{reply.plan, index, {{0, model_.layout->tile_count()}}});
    EXPECT_TRUE(all && frames && *all == *frames) << "what is not subscribed to is left out";
    EXPECT_TRUE(frames) << frames.error().to_string();
    if (!frames) return tiles;
    std::uint64_t bytes = 0;
    std::uint64_t changed = 0;
    for (const auto& frame : *frames) {
      bytes += frame.size();
      const auto records = delta::parse_frame(*model_.layout, frame);
      EXPECT_TRUE(records);
      if (!records) continue;
      for (const auto& record : *records) {
        changed += record.changed;
        tiles.push_back(record.tile);
        EXPECT_TRUE(set.contains(record.tile));
      }
    }
    EXPECT_EQ(frames->size(), step.frames);
    EXPECT_EQ(bytes, step.frame_bytes);
    EXPECT_EQ(changed, step.changed);
    return tiles;
  }
  std::vector<std::uint64_t> changed(const TileSet& set, std::uint64_t from, std::uint64_t to) const {
    std::vector<std::uint64_t> tiles;
    for (std::uint64_t t = 0; t < model_.layout->tile_count(); ++t) {
      if (set.contains(t) && history_.at(from)[t] != history_.at(to)[t]) tiles.push_back(t);
    }
    return tiles;
  }

  std::map<std::uint64_t, std::vector<std::uint64_t>> history_;  ///< digests by version number
};

/// Wherever in the model the tiles lie: many receivers of few tiles each would get little but headers.
TEST_F(Subsets, PartsOfFramesComeAsOne) {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 20'000; ++i) specs.push_back({"t" + std::to_string(i), Dtype::bf16, {256}, {}, {}});
  model_ = test::make_model(1, std::move(specs));
  start_agent();
  version();
  std::vector<wire::TileRange> ranges;
  for (std::uint64_t tile = 100; tile < 20'000; tile += 200) ranges.push_back({tile, tile + 20});
  ranges.push_back({4096, 8192});  // all of one frame
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::erase_if(ranges, [](const auto& r) { return r.first > 4076 && r.end < 8192; });
  const TileSet set = tiles(ranges);
  version(0.02);
  auto c = client();
  ASSERT_TRUE(subscribe(c, set));
  const auto reply = c.plan(ask_from(set, 1));
  ASSERT_TRUE(reply) << reply.error().to_string();
  ASSERT_EQ(reply->mode, wire::PlanMode::delta);
  EXPECT_EQ(reply->steps.at(0).frames, 3u) << "before the whole frame, that, and behind it";
  auto stream = client(wire::Role::data);
  EXPECT_EQ(expect_step(stream, *reply, 0, set), changed(set, 1, 2));
  const Room& room = agent_->core().peer_room();
  EXPECT_TRUE(test::eventually([&] { return room.bytes_taken() == Subset::range_bytes(set); })) << room.bytes_taken();
}

TEST_F(Subsets, AFullPlanIsOfTheTiles) {
  start_agent();
  version();
  auto c = client();
  const TileSet set = some();
  ASSERT_TRUE(subscribe(c, set));
  const auto reply = c.plan(ask_from(set, 0));
  ASSERT_TRUE(reply) << reply.error().to_string();
  EXPECT_EQ(reply->mode, wire::PlanMode::full);
  EXPECT_EQ(reply->target_root, set.root(history_.at(1)));
  EXPECT_EQ(reply->full_bytes, set.bytes());
  auto stream = client(wire::Role::data);
  const auto digests = stream.digests(reply->plan);
  ASSERT_TRUE(digests);
  EXPECT_EQ(*digests, set.gather(history_.at(1)));
  const auto raw = stream.frames(wire::GetRawTiles{reply->plan, {{0, model_.layout->tile_count()}}});
  ASSERT_TRUE(raw);
  std::vector<std::uint64_t> came;
  for (const auto& frame : *raw) {
    const auto records = delta::parse_frame(*model_.layout, frame);
    ASSERT_TRUE(records);
    for (const auto& record : *records) came.push_back(record.tile);
  }
  ASSERT_EQ(came.size(), set.tiles());
  for (const std::uint64_t tile : came) EXPECT_TRUE(set.contains(tile));
}

TEST_F(Subsets, DeltasFromAnyVersionOfTheRing) {
  options_.core.merge_steps_min = 0;
  start_agent();
  version();
  // One subscription is there all the time and has every root from when its version was served; the other comes late.
  auto early = client();
  const TileSet set = some();
  ASSERT_TRUE(subscribe(early, set));
  for (int i = 0; i < 5; ++i) {
    version(i == 2 ? 0.0 : 0.002);
    const auto reply = early.plan(ask_from(set, number_ - 1));
    ASSERT_TRUE(reply) << reply.error().to_string();
    EXPECT_EQ(reply->target_root, set.root(history_.at(number_)));
  }
  const TileSet other = tiles({{0, 1}, {model_.layout->tile_count() - 2, model_.layout->tile_count()}});
  auto late = client();
  ASSERT_TRUE(subscribe(late, other));
  auto stream = client(wire::Role::data);
  for (auto* const c : {&early, &late}) {
    const TileSet& of = c == &early ? set : other;
    for (std::uint64_t from = number_ - 1; from >= 1; --from) {
      const auto reply = c->plan(ask_from(of, from));
      ASSERT_TRUE(reply) << reply.error().to_string();
      ASSERT_EQ(reply->mode, wire::PlanMode::delta) << from;
      ASSERT_EQ(reply->steps.size(), number_ - from);
      EXPECT_EQ(reply->target_root, of.root(history_.at(number_)));
      for (std::uint32_t s = 0; s < reply->steps.size(); ++s) {
        EXPECT_EQ(expect_step(stream, *reply, s, of), changed(of, from + s, from + s + 1));
      }
      ASSERT_TRUE(c->release(reply->plan));
    }
    const auto same = c->plan(ask_from(of, number_));
    ASSERT_TRUE(same);
    EXPECT_EQ(same->mode, wire::PlanMode::up_to_date);
  }
}

TEST_F(Subsets, ARootThatIsNotTheTilesIsNoBase) {
  start_agent();
  version();
  version(0.002);
  auto c = client();
  const TileSet set = some();
  ASSERT_TRUE(subscribe(c, set));
  wire::PlanRequest plan = ask_from(set, 1);
  plan.base_root = delta::root_digest(history_.at(1));  // of the whole version
  const auto reply = c.plan(plan);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->mode, wire::PlanMode::full);
}

TEST_F(Subsets, PastVersionsByNumberAndLabel) {
  options_.core.merge_steps_min = 0;
  start_agent();
  for (int i = 0; i < 5; ++i) version(0.002);
  auto c = client();
  const TileSet set = some();
  ASSERT_TRUE(subscribe(c, set));
  wire::PlanRequest plan = ask_from(set, 2, wire::WantKind::number);
  plan.number = 4;
  const auto number = c.plan(plan);
  ASSERT_TRUE(number) << number.error().to_string();
  EXPECT_EQ(number->steps.size(), 2u);
  EXPECT_EQ(number->target_root, set.root(history_.at(4)));
  plan = ask_from(set, 3, wire::WantKind::label);
  plan.label = "step_3";
  const auto label = c.plan(plan);
  ASSERT_TRUE(label) << label.error().to_string();
  EXPECT_EQ(label->mode, wire::PlanMode::up_to_date);
  EXPECT_EQ(label->target_root, set.root(history_.at(3)));
}

TEST_F(Subsets, AMergedDeltaIsCutToo) {
  start_agent();
  version();
  for (int i = 0; i < 4; ++i) version(0.002);
  const TileSet set = some();
  wire::PlanRequest plan = ask_from(set, 1);
  plan.wait_ms = 2 * static_cast<std::uint64_t>(std::chrono::milliseconds(kTestLimit).count());
  auto stream = client(wire::Role::data);
  for (int round = 0; round < 2; ++round) {
    auto c = client();
    ASSERT_TRUE(subscribe(c, set));
    const auto reply = c.plan(plan);
    ASSERT_TRUE(reply) << reply.error().to_string();
    ASSERT_EQ(reply->steps.size(), 1u);
    EXPECT_EQ(expect_step(stream, *reply, 0, set), changed(set, 1, 5));
  }
  EXPECT_EQ(agent_->core().metrics().merges, 1u);
  EXPECT_EQ(agent_->core().metrics().merge_hits, 1u);
}

/// Full against delta is decided by the tiles' own sizes.
/// Merging pays for the model, but not for one tensor of it: differences and then values make it raw.
TEST_F(Subsets, AMergedDeltaLargerThanTheTilesIsNotGiven) {
  model_ = test::make_model(4, {{"t", Dtype::u8, {4000}, {}, {}}, {"big", Dtype::i16, {300'000}, {}, {}}});
  start_agent();
  version();
  const Tensor& t = model_.layout->tensors()[0];
  const Tensor& big = model_.layout->tensors()[1];
  const auto move = [&](std::size_t first, std::size_t end, std::size_t stride, unsigned by) {
    for (std::size_t i = first; i < end; i += stride) {
      std::byte& b = model_.half[i];
      b = static_cast<std::byte>(static_cast<unsigned>(b) + by);
    }
  };
  const auto publish = [&] {
    move(big.offset, big.offset + big.bytes, 32, 1);  // the same elements each time
    ASSERT_TRUE(offload(*writer_, model_.half, ++number_));
    std::vector<std::uint64_t> digests(model_.layout->tile_count());
    ThreadPool pool(1, "test");
    delta::half_digests(*model_.layout, model_.half, digests, pool);
    history_[number_] = digests;
  };
  move(t.offset, t.offset + t.bytes, 1, 1);
  publish();
  move(t.offset + 2000, t.offset + 2040, 4, 100);
  publish();
  auto whole = client();
  wire::PlanRequest all = ask();
  all.base = {epoch_, 1};
  all.base_root = delta::root_digest(history_.at(1));
  all.wait_ms = 2 * static_cast<std::uint64_t>(std::chrono::milliseconds(kTestLimit).count());
  const auto merged = whole.plan(all);
  ASSERT_TRUE(merged) << merged.error().to_string();
  ASSERT_EQ(merged->steps.size(), 1u) << "it does not pay for the model: this test proves nothing";

  auto c = client();
  const TileSet set = tiles({{0, 1}});
  ASSERT_TRUE(subscribe(c, set));
  const auto reply = c.plan(ask_from(set, 1));
  ASSERT_TRUE(reply) << reply.error().to_string();
  EXPECT_EQ(reply->mode, wire::PlanMode::delta);
  std::uint64_t bytes = 0;
  for (const wire::DeltaStep& step : reply->steps) bytes += step.frame_bytes;
  EXPECT_LT(bytes, set.bytes()) << "receivers refuse a delta that is larger than everything";
  EXPECT_EQ(reply->steps.size(), 2u);
}

TEST_F(Subsets, ADeltaLargerThanTheTilesIsFull) {
  start_agent();
  version();
  version(0.5);
  auto c = client();
  const Tensor& small = model_.layout->tensors()[*model_.layout->find("count.i16")];  // less than a frame's header
  const TileSet set = tiles({{small.first_tile, small.first_tile + 1}});
  ASSERT_TRUE(subscribe(c, set));
  const auto reply = c.plan(ask_from(set, 1));
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->mode, wire::PlanMode::full);
  const auto whole = c.plan(ask_from(TileSet::whole(*model_.layout), 1));
  ASSERT_TRUE(whole);
  EXPECT_EQ(whole->mode, wire::PlanMode::delta);
}

TEST_F(Subsets, TheRingCountsTheDigestsThatItKeeps) {
  start_agent();
  version();
  version(0.002);
  const RingEntryPtr entry = agent_->core().versions().snapshot()->ring.back();
  EXPECT_EQ(entry->before.size(), changed(TileSet::whole(*model_.layout), 1, 2).size());
  EXPECT_EQ(entry->bytes(), entry->delta->frame_bytes + 16 * entry->before.size());
}

// ---- what is refused ---------------------------------------------------------------------------------------------

TEST_F(Subsets, BadSubscriptionsAreRefused) {
  start_agent();
  auto early = client();
  const auto none = early.ask<wire::Empty>(wire::Subscribe{model_.layout->digest(), {{0, 1}}});
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code(), Errc::not_found) << "no layout yet";
  version();
  auto c = client();
  const std::uint64_t tiles = model_.layout->tile_count();
  const auto refused = [&](const wire::Subscribe& message, Errc code, const std::string& text) {
    const auto answer = c.ask<wire::Empty>(message);
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().code(), code);
    EXPECT_THAT(answer.error().message(), HasSubstr(text));
  };
  const Digest128 layout = model_.layout->digest();
  refused({layout, {{3, tiles + 1}}}, Errc::out_of_range, "tiles 3 to ");
  refused({layout, {}}, Errc::invalid_argument, "without a tile");
  refused({layout, {{0, tiles}}}, Errc::invalid_argument, "all tiles");
  refused({{}, {{0, 1}}}, Errc::layout_mismatch, "the subscription is of");
  wire::Subscribe many{layout, {}};
  for (std::uint64_t i = 0; i <= tiles; ++i) many.ranges.push_back({2 * i, 2 * i + 1});
  refused(many, Errc::out_of_range, std::to_string(tiles + 1) + " ranges");
  // The connection is as usable as before.
  EXPECT_TRUE(subscribe(c, some()));
  EXPECT_TRUE(c.plan(ask_from(some(), 0)));
}

TEST_F(Subsets, RangesThatAreNoListEndTheConnection) {
  start_agent();
  version();
  auto c = client();
  wire::Subscribe message{model_.layout->digest(), {{0, 1}}};
  std::vector<std::byte> payload = message.encode();
  payload.back() = std::byte{0};  // a range without a tile
  ASSERT_TRUE(c.socket.send(wire::Type::subscribe, 9, payload, test_deadline()));
  const auto answer = c.socket.recv_answer(0, wire::Type::end, test_deadline());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::corrupt);
}

TEST_F(Subsets, APlanNeedsTheSubscriptionOfItsConnection) {
  start_agent();
  version();
  const TileSet set = some();
  auto other = client();
  ASSERT_TRUE(subscribe(other, set));
  auto c = client();
  const auto unknown = c.plan(ask_from(set, 0));
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code(), Errc::invalid_argument);
  EXPECT_THAT(unknown.error().message(), HasSubstr("nobody subscribed to " + to_string(set.digest())));
  // A later subscription takes the place of the first.
  ASSERT_TRUE(subscribe(other, tiles({{0, 1}})));
  EXPECT_FALSE(other.plan(ask_from(set, 0)));
  EXPECT_TRUE(other.plan(ask_from(tiles({{0, 1}}), 0)));
  EXPECT_TRUE(other.plan(ask())) << "everything is always there";
}

TEST_F(Subsets, DataConnectionsDoNotSubscribe) {
  start_agent();
  version();
  auto c = client(wire::Role::data);
  const auto answer = c.ask<wire::Empty>(wire::Subscribe{model_.layout->digest(), {{0, 1}}});
  ASSERT_FALSE(answer);
}

TEST_F(Subsets, AllSubscriptionsTogetherAreBounded) {
  options_.core.peer_bytes_max = 4 * 24;  // a quarter is for answers
  start_agent();
  version();
  auto first = client();
  ASSERT_TRUE(subscribe(first, tiles({{0, 1}, {2, 3}})));
  auto same = client();
  EXPECT_TRUE(subscribe(same, tiles({{0, 1}, {2, 3}}))) << "kept once";
  auto second = client();
  const auto refused = subscribe(second, tiles({{0, 1}, {3, 4}}));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::no_space);
  EXPECT_TRUE(subscribe(second, tiles({{3, 4}})));
  // Those of connections that are gone count no more.
  first = Client();
  same = Client();
  EXPECT_TRUE(eventually([&] { return static_cast<bool>(subscribe(second, tiles({{0, 1}, {3, 4}}))); }));
}

/// A new layout ends what was subscribed to of the old one.
TEST_F(Subsets, AnotherLayoutIsTold) {
  start_agent();
  version();
  const TileSet set = some();
  auto c = client();
  ASSERT_TRUE(subscribe(c, set));
  auto specs = test::sample_specs();
  specs.resize(3);
  const test::TestModel next = test::make_model(5, specs);
  writer_.reset();
  const auto writer = attach(next.layout);
  ASSERT_TRUE(offload(*writer, next.half, 1000));
  wire::PlanRequest plan = ask_from(set, 0);
  const auto old = c.plan(plan);
  ASSERT_FALSE(old);
  EXPECT_EQ(old.error().code(), Errc::layout_mismatch);
  plan.layout = next.layout->digest();
  const auto mixed = c.plan(plan);
  ASSERT_FALSE(mixed);
  EXPECT_EQ(mixed.error().code(), Errc::layout_mismatch);
  EXPECT_THAT(mixed.error().message(), HasSubstr("subscribe again"));
}

}  // namespace
}  // namespace deltasync::agent
