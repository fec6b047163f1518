// Receivers of slices: whatever goes wrong, their tiles are those of the version, and nothing else is asked for or
// written.
#include <gmock/gmock-matchers.h>

#include <algorithm>
#include <atomic>

#include "format/tile_set.hpp"
#include "format/tiling.hpp"
#include "receiver/pull/ranges.hpp"
#include "tests/receiver/hf_fixture.hpp"
#include "tests/receiver/pull_fixture.hpp"
#include "tests/receiver/trainer_model.hpp"

namespace deltasync::test {
namespace {

using testing::HasSubstr;
using wire::Type;

constexpr std::byte kUntouched{0xEE};

class SubsetPull : public PullTest {
 protected:
  /// Rows and columns at cuts and across them, of large tensors and small.
  std::vector<Slice> some() const {
    const Layout& layout = *model_.layout;
    std::vector<Slice> s;
    for (const char* name : {"big.0", "big.3"}) s.push_back(*row_slice(layout, name, 1, 4));
    s.push_back(*col_slice(layout, "ffn.down", 1, 2));
    s.push_back(*col_slice(layout, "attn.q", 1, 4));
    s.push_back({"wide.row", Rect{1, 70'000, 1, 10}});  // through a tile
    for (int i = 0; i < 300; i += 3) s.push_back({"norm." + std::to_string(i), std::nullopt});
    return s;
  }
  void start_some(FakeAgent::Setup setup = FakeAgent::Setup(), receiver::Tuning tuning = quick()) {
    start(setup, tuning);
    bind_some();
  }
  void bind_some() {
    const auto set = TileSet::of(*model_.layout, some());
    ASSERT_TRUE(set.ok()) << set.error().to_string();
    set_ = *set;
    memory_.assign(model_.layout->half_bytes(), kUntouched);
    const Status bound = receiver_->bind(make_host_target(receiver_->layout(), memory_), some(), in_ms(60'000));
    ASSERT_TRUE(bound.ok()) << bound.error().to_string();
  }
  /// Tiles of the set are those of the version, all other bytes what they were.
  void expect_tiles(const std::vector<std::byte>& half) {
    std::vector<std::byte> expected(half.size(), kUntouched);
    for (std::uint64_t i = 0; i < set_.tiles(); ++i) {
      const Tile tile = tile_of(*model_.layout, set_.nth(i));
      const Tensor& tensor = model_.layout->tensors()[tile.tensor];
      const std::uint64_t bytes = tile.rect.cols * tensor.element_bytes;
      std::uint64_t at = tensor.offset + tile.rect.row * tensor.row_bytes() + tile.rect.col * tensor.element_bytes;
      for (std::uint64_t r = 0; r < tile.rect.rows; ++r, at += tensor.row_bytes()) {
        std::memcpy(expected.data() + at, half.data() + at, bytes);
      }
    }
    EXPECT_TRUE(memory_ == expected);
  }
  PullReport pull_some(Want want = {}) {
    auto staged = pull(want);
    EXPECT_TRUE(staged.ok()) << staged.error().to_string();
    if (!staged) return {};
    const Status committed = (*staged)->commit();
    EXPECT_TRUE(committed.ok()) << committed.error().to_string();
    expect_tiles(agent_->half_of((*staged)->report().version.id));
    EXPECT_EQ((*staged)->report().full_bytes, set_.bytes());
    return (*staged)->report();
  }
  void expect_nothing_else_asked() {
    for (const wire::TileRange& range : agent_->extents_asked()) {
      for (std::uint64_t t = range.first; t < range.end; ++t) ASSERT_TRUE(set_.contains(t)) << t;
    }
  }

  TileSet set_;
  std::vector<std::byte> memory_;
};

TEST_F(SubsetPull, FullThenDeltas) {
  start_some();
  const PullReport full = pull_some();
  EXPECT_EQ(full.mode, PullMode::full);
  EXPECT_EQ(full.tiles, set_.tiles());
  EXPECT_EQ(full.repaired_tiles, 0u);
  // Padding between small tensors comes with them; frames of raw tiles have headers and records.
  EXPECT_LT(full.wire_bytes - full.metadata_bytes, set_.bytes() + (64u << 10));
  EXPECT_GE(full.wire_bytes - full.metadata_bytes, set_.bytes());
  for (int i = 0; i < 6; ++i) {
    for (int k = 0; k <= i % 3; ++k) step(i % 2 == 0 ? 0.05 : 0.002);
    EXPECT_EQ(pull_some().mode, PullMode::delta);
  }
  EXPECT_EQ(pull_some().mode, PullMode::up_to_date);
  expect_nothing_else_asked();
  EXPECT_EQ(agent_->requests(Type::subscribe), 1u) << "the ranges cross once";
  EXPECT_EQ(agent_->live_plans(), 0u);
}

TEST_F(SubsetPull, OwnMemory) {
  start();
  ASSERT_TRUE(receiver_->bind(make_host_target(receiver_->layout()), some(), in_ms(60'000)).ok());
  set_ = *TileSet::of(*model_.layout, some());
  for (int i = 0; i < 3; ++i) {
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    ASSERT_TRUE((*staged)->commit().ok());
    const auto live = host_target_memory(*receiver_->target());
    memory_.assign(live.begin(), live.end());
    for (std::byte& b : memory_) b ^= kUntouched;  // zero where nothing was written
    std::vector<std::byte> half = agent_->newest();
    for (std::byte& b : half) b ^= kUntouched;
    expect_tiles(half);
    step();
  }
}

TEST_F(SubsetPull, RollbackOfDeltasAndFulls) {
  FakeAgent::Setup setup;
  setup.ring_deltas = 1;
  start_some(setup);
  pull_some();
  const auto first = agent_->newest();
  for (const int steps : {1, 2}) {  // a delta, and a full update staged over the live version
    for (int i = 0; i < steps; ++i) step(0.02);
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    EXPECT_EQ((*staged)->report().mode, steps == 1 ? PullMode::delta : PullMode::full);
    expect_tiles(first);
    ASSERT_TRUE((*staged)->commit().ok());
    expect_tiles(agent_->newest());
    ASSERT_TRUE((*staged)->rollback().ok());
    expect_tiles(first);
  }
}

TEST_F(SubsetPull, BrokenStreamsAndWrongTiles) {
  for (const Type type : {Type::get_extent, Type::get_raw_tiles}) {
    for (const Fault fault :
         {Fault::drop, Fault::drop_midway, Fault::flip_at_source, Fault::flip_in_transit, Fault::wrong_tiles}) {
      if (type == Type::get_extent && fault == Fault::wrong_tiles) continue;  // an extent names no tiles
      start_some();
      std::atomic<int> injected{0};
      agent_->on_request([&, faulty = fault_on(type, fault, 0)](const Request& r) {
        const Fault now = faulty(r);
        if (now != Fault::none) ++injected;
        return now;
      });
      const PullReport report = pull_some();
      EXPECT_EQ(report.mode, PullMode::full);
      EXPECT_EQ(injected, 1) << "nothing went wrong: this proves nothing";
      EXPECT_GT(report.stream_restarts + report.repaired_tiles + report.replans, 0u) << to_string(type);
      expect_nothing_else_asked();
      receiver_.reset();
    }
  }
}

TEST_F(SubsetPull, BadFramesOfADelta) {
  for (const Fault fault : {Fault::drop_midway, Fault::flip_at_source, Fault::wrong_tiles, Fault::exponent_classes}) {
    start_some();
    pull_some();
    step(0.02);
    agent_->on_request(fault_on(Type::get_frames, fault, 0));
    pull_some();
    receiver_.reset();
  }
}

TEST_F(SubsetPull, PullSlowerThanTheStepsEnds) {
  receiver::Tuning tuning = quick();
  tuning.item_bytes = 32u << 10;
  start_some({}, tuning);
  std::atomic<int> revoked{0};
  agent_->revoke_after(set_.bytes() / 4, [&] {
    ++revoked;
    step(0.01);
    step(0.01);
  });
  const PullReport report = pull_some();
  EXPECT_EQ(report.mode, PullMode::full);
  EXPECT_GE(revoked.load(), 2) << "the test did not make the pull slow";
  EXPECT_GE(report.delta_steps, 2u) << "verified tiles were not advanced";
  expect_nothing_else_asked();
}

TEST_F(SubsetPull, ARestartedAgentIsToldAgain) {
  start_some();
  pull_some();
  agent_->restart();
  step(0.02);
  EXPECT_EQ(pull_some().mode, PullMode::delta) << "one step after the restart";
  EXPECT_EQ(agent_->requests(Type::subscribe), 2u);
  for (const wire::PlanRequest& plan : agent_->plans()) EXPECT_EQ(plan.subscription, set_.digest());
}

TEST_F(SubsetPull, AnAgentThatRefusesTheSubscription) {
  start_some();
  agent_->on_request(fault_on(Type::subscribe, Fault::refuse, 0));
  auto refused = pull();
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.error().message(), HasSubstr("told to refuse"));
  agent_->on_request(fault_on(Type::subscribe, Fault::drop, 0, 3));
  pull_some();
}

TEST_F(SubsetPull, AScribbledTileIsFoundAndReplaced) {
  options_.scrub_tiles = 1'000'000;
  start_some();
  pull_some();
  // Of another rank: nobody cares.
  const Tensor& other = model_.layout->tensors()[tensor("big.1")];
  memory_[other.offset] ^= std::byte{1};
  step(0.002);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  ASSERT_TRUE((*staged)->commit().ok());
  memory_[other.offset] ^= std::byte{1};
  expect_tiles(agent_->newest());
  // Ours.
  const Tensor& norm = model_.layout->tensors()[tensor("norm.0")];
  memory_[norm.offset] ^= std::byte{1};
  step(0.0);
  auto found = pull();
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(found.error().code(), Errc::corrupt);
  EXPECT_THAT(found.error().message(), HasSubstr("norm.0"));
  EXPECT_EQ(pull_some().mode, PullMode::full);
}

TEST_F(SubsetPull, BadSubscriptionsFailAtBind) {
  start();
  const auto refused = [&](std::unique_ptr<Target> target, const std::vector<Slice>& s, Errc code,
                           const std::string& text) {
    const Status bound = receiver_->bind(std::move(target), s, in_ms(60'000));
    ASSERT_FALSE(bound.ok());
    EXPECT_EQ(bound.error().code(), code);
    EXPECT_THAT(bound.error().message(), HasSubstr(text));
  };
  const LayoutPtr layout = model_.layout;
  refused(make_host_target(layout), {{{"nope", std::nullopt}}}, Errc::not_found, "'nope'");
  refused(make_host_target(layout), {{{"big.0", Rect{500, 0, 13, 1}}}}, Errc::out_of_range, "'big.0': rows 500 to 513");
  TempDir dir;
  auto target = make_hf_target(layout, receiver_->sidecar(), dir.path() / "out");
  ASSERT_TRUE(target.ok());
  refused(*std::move(target), some(), Errc::unsupported, "whole models");
  EXPECT_FALSE(std::filesystem::exists(dir.path() / "out" / "current"));
  pull_and_commit();  // the target bound before is as good as it was
}

/// All that is wanted of a batch is asked for at once, so that no frame is cut in two.
TEST(SubsetItems, NoBatchIsSplit) {
  const TestModel model = make_model(1, pull_specs());
  const std::vector<delta::Batch> batches = delta::make_batches(*model.layout);
  receiver::Ranges every_second;
  for (std::uint64_t t = 0; t < model.layout->tile_count(); t += 2) every_second.push_back({t, t + 1});
  for (const std::uint64_t parts : {1u, 3u, 1'000u}) {
    receiver::Ranges asked;
    std::uint64_t before = 0;  // where the batches of the item before end
    for (const receiver::Item& item : receiver::frame_items(batches, every_second, 0, parts)) {
      EXPECT_GE(item.ranges.front().first, before);
      const std::uint64_t last = item.ranges.back().end - 1;
      before = std::find_if(batches.begin(), batches.end(), [&](const delta::Batch& b) { return last < b.end; })->end;
      asked.insert(asked.end(), item.ranges.begin(), item.ranges.end());
    }
    EXPECT_EQ(asked, every_second);
  }
}

/// The target's own checks, below the pull's.
TEST(SubsetTarget, TakesNoOtherTileAndNoOtherRoot) {
  TrainerModel model(3);
  const TileSet set = *TileSet::of(*model.layout(), {{{"norm.scale", std::nullopt}}});
  const std::unique_ptr<Target> target = make_host_target(model.layout());
  ASSERT_TRUE(subscribe(*target, set).ok());
  ASSERT_TRUE(target->open(model.pool(), in_time()).ok());
  EXPECT_FALSE(subscribe(*target, set).ok()) << "too late";
  const auto cut = [&](TargetState state) {
    std::vector<std::uint64_t> digests(state.digests.size(), 0);
    set.scatter(set.gather(state.digests), digests);
    state.digests = digests;
    state.root = set.root(digests);
    return state;
  };
  const Reference before = model.now();
  ASSERT_TRUE(target->begin_full(FullUpdatePolicy::stage, in_time()).ok());
  const Tensor& tensor = model.layout()->tensors()[*model.layout()->find("norm.scale")];
  for (std::uint64_t i = 0; i < tensor.tile_count; ++i) {
    ASSERT_TRUE(test::put_from_half(*target, before, tile_of(*model.layout(), tensor.first_tile + i)).ok());
  }
  TargetState whole_root = cut(before.state);
  whole_root.root = before.state.root;
  EXPECT_EQ(target->commit_full(whole_root, in_time()).error().code(), Errc::corrupt);
  ASSERT_TRUE(target->commit_full(cut(before.state), in_time()).ok());

  const Reference after = model.step(0.5);
  std::vector<StagedStep> steps;
  steps.push_back(model.delta(before, after));
  const Status other = target->commit_delta(std::move(steps), cut(after.state), in_time());
  ASSERT_FALSE(other.ok());
  EXPECT_EQ(other.error().code(), Errc::corrupt);
  EXPECT_THAT(other.error().message(), HasSubstr("was not subscribed to"));
  EXPECT_EQ(target->committed()->version.id, before.state.version.id);
}

}  // namespace
}  // namespace deltasync::test
