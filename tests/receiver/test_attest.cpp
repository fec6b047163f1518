// Live memory that is not what was committed: found and named, after a commit too, and repaired tile by tile.

#include <gmock/gmock-more-matchers.h>

#include <algorithm>
#include <set>

#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "format/tiling.hpp"
#include "placement/regions.hpp"
#include "receiver/targets/attest.hpp"
#include "receiver/targets/verify.hpp"
#include "tests/receiver/any_engine.hpp"
#include "tests/receiver/pull_fixture.hpp"
#include "tests/receiver/remote_memory.hpp"
#include "tests/receiver/trainer_model.hpp"
#include "tests/support/model.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using wire::Type;

// ---- copies, by plans of every shape -------------------------------------------------------------------------------

class AttestedPlans : public testing::TestWithParam<AnyEngine::Where> {};

/// Whichever place of an element changes: its tile is named, and where it is.
TEST_P(AttestedPlans, AnyPlaceOfAnyElement) {
  std::vector<TensorSpec> specs = sample_specs();
  std::erase_if(specs, [](const TensorSpec& spec) { return spec.name == "wide.row" || spec.name == "ffn.down"; });
  ThreadPool pool(3, "attest");
  std::size_t copies = 0;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    TrainerModel trainer(seed, specs);
    const Layout& layout = *trainer.layout();
    RandomPlan made(layout, seed, RandomPlan::Ignore::parts_of_tiles);
    AnyEngine engine(made.engine, made.plan, GetParam(), seed);
    auto target = engine.make(trainer.layout());
    ASSERT_TRUE(target.ok()) << target.error().to_string();
    ASSERT_TRUE((*target)->open(pool, in_time()).ok());
    ASSERT_TRUE(commit_whole(**target, trainer.now()).ok());
    const auto intact = attest(**target, in_time());
    ASSERT_TRUE(intact.ok()) << intact.error().to_string();
    EXPECT_THAT(*intact, IsEmpty());
    Random random(seed);
    for (std::uint64_t i = 0; i < layout.tile_count(); ++i) {
      const Tile tile = tile_of(layout, i);
      const Tensor& tensor = layout.tensors()[tile.tensor];
      const auto places = places_of(engine.plan(), tensor.spec.name, tile.rect.row + random.below(tile.rect.rows),
                                    tile.rect.col + random.below(tile.rect.cols));
      for (std::size_t place = 0; place < places.size(); ++place) {
        std::byte* const at = places[place] + random.below(tensor.element_bytes);
        const auto bit = static_cast<unsigned>(random.below(8));
        engine.flip(at, bit);
        const auto found = attest(**target, parts_of(*engine.placement()).tiles, in_time());
        ASSERT_TRUE(found.ok()) << found.error().to_string();
        const std::string memory = engine.plan().memories[engine.memory_of(at)].name;
        EXPECT_THAT(*found, ElementsAre(TileMismatch{i, tensor.spec.name, place == 0 ? "" : memory}));
        engine.flip(at, bit);
        copies += place == 0 ? 0 : 1;
      }
    }
  }
  EXPECT_GT(copies, 5u) << "nothing is placed twice: this test proves little";
}

INSTANTIATE_TEST_SUITE_P(Where, AttestedPlans,
                         testing::Values(AnyEngine::Where::host, AnyEngine::Where::device, AnyEngine::Where::both),
                         [](const auto& param_info) { return name_of(param_info.param); });

TEST(Attest, NamesATile) {
  EXPECT_EQ(to_string(TileMismatch{88, "up_proj", ""}), "tile 88 (up_proj)");
  EXPECT_EQ(to_string(TileMismatch{7, "lm_head", "embed"}), "tile 7 (lm_head), the copy in embed");
}

/// As directories have it: every second update is another memory's.
TEST(Attest, TheScrubSeesAllTilesOfBothMemories) {
  const TileSet tiles = TileSet::whole(*TrainerModel(1, sample_specs()).layout());
  const std::uint64_t all = tiles.tiles();
  bool even_rounds = false;  // some count takes an even number of scrubs, so that a plain cursor fails
  for (std::uint64_t count = 0; count <= all + 1; ++count) {
    std::vector<std::set<std::uint64_t>> seen(2);
    for (std::uint64_t scrub = 0; scrub < 2 * all + 4; ++scrub) {
      const auto list = scrub_list(tiles, count, scrub);
      EXPECT_EQ(list.size(), std::min(count, all));
      EXPECT_TRUE(std::is_sorted(list.begin(), list.end()));
      seen[scrub % 2].insert(list.begin(), list.end());
    }
    for (const auto& memory : seen) EXPECT_EQ(memory.size(), count == 0 ? 0 : all) << count;
    even_rounds |= count > 0 && all % (2 * count) == 0;
  }
  EXPECT_TRUE(even_rounds) << all;
}

// ---- receivers -----------------------------------------------------------------------------------------------------

class AttestPull : public PullTest, public testing::WithParamInterface<AnyEngine::Where> {
 protected:
  void SetUp() override { model_ = make_model(7, TiedEngine::specs()); }
  void TearDown() override { receiver_.reset(); }

  void start_engine(FakeAgent::Setup setup = FakeAgent::Setup(), const receiver::Tuning& tuning = quick()) {
    options_.scrub_tiles = 0;
    start(std::move(setup), tuning);
    bind_engine();
  }
  void bind_engine() {
    engine_.emplace(made_.engine, made_.plan, GetParam(), 5);
    auto target = engine_->make(model_.layout);
    ASSERT_TRUE(target.ok()) << target.error().to_string();
    const Status bound = receiver_->bind(*std::move(target), engine_->placement()->slices(), in_ms(60'000));
    ASSERT_TRUE(bound.ok()) << bound.error().to_string();
  }
  void expect_live(const std::vector<std::byte>& half) { EXPECT_EQ(engine_->differences(*model_.layout, half), ""); }
  PullReport commit_pull() {
    auto staged = pull();
    EXPECT_TRUE(staged.ok()) << staged.error().to_string();
    if (!staged.ok()) return {};
    const Status committed = (*staged)->commit();
    EXPECT_TRUE(committed.ok()) << committed.error().to_string();
    expect_live(agent_->half_of((*staged)->report().version.id));
    return (*staged)->report();
  }
  std::vector<TileMismatch> wrong() {
    const auto found = receiver_->attest(in_time());
    EXPECT_TRUE(found.ok()) << found.error().to_string();
    return found.ok() ? *found : std::vector<TileMismatch>();
  }
  std::byte* place(const std::string& tensor, std::uint64_t row, std::uint64_t col, std::size_t nth = 0) {
    return places_of(engine_->plan(), tensor, row, col).at(nth);
  }
  std::uint64_t tile_at(const std::string& name, std::uint64_t row, std::uint64_t col) {
    const Tensor& t = model_.layout->tensors()[tensor(name)];
    for (std::uint64_t i = t.first_tile; i < t.first_tile + t.tile_count; ++i) {
      if (has(tile_of(*model_.layout, i).rect, row, col)) return i;
    }
    return ~std::uint64_t{0};
  }
  std::uint64_t bytes_of(std::uint64_t tile) {
    const Tile of = tile_of(*model_.layout, tile);
    return of.rect.elements() * model_.layout->tensors()[of.tensor].element_bytes;
  }

  TiedEngine made_;
  std::optional<AnyEngine> engine_;
};

TEST_P(AttestPull, AFlippedBitIsNamedAndItsTileComesAgain) {
  start_engine();
  commit_pull();
  step(0.05);
  commit_pull();
  const std::uint64_t tile = tile_at("up", 77, 500);
  engine_->flip(place("up", 77, 500), 3);
  EXPECT_THAT(wrong(), ElementsAre(TileMismatch{tile, "up", ""}));
  const std::uint64_t extents = agent_->requests(Type::get_extent);
  const auto repaired = receiver_->repair(wrong(), in_ms(60'000));
  ASSERT_TRUE(repaired.ok()) << repaired.error().to_string();
  EXPECT_EQ(repaired->version, *receiver_->current());
  EXPECT_EQ(repaired->tiles, 1u);
  EXPECT_EQ(repaired->fetched, 1u);
  // The tile's bytes and a frame's header around them.
  EXPECT_GE(repaired->wire_bytes - repaired->metadata_bytes, bytes_of(tile));
  EXPECT_LE(repaired->wire_bytes - repaired->metadata_bytes, bytes_of(tile) + 256);
  EXPECT_LT(repaired->metadata_bytes, 4096u);
  EXPECT_GT(repaired->total_s, 0);
  EXPECT_EQ(agent_->requests(Type::get_extent), extents);
  EXPECT_EQ(agent_->live_plans(), 0u);
  EXPECT_THAT(wrong(), IsEmpty());
  expect_live(model_.half);
  step(0.05);
  EXPECT_EQ(commit_pull().mode, PullMode::delta);
}

TEST_P(AttestPull, CopiesAreNamedAndRepaired) {
  start_engine();
  commit_pull();
  engine_->flip(place("tied", 299, 511, 1), 0);
  engine_->flip(place("gate", 49, 0, 1), 7);
  const std::uint64_t tied = tile_at("tied", 299, 511);
  const std::uint64_t gate = tile_at("gate", 49, 0);
  EXPECT_THAT(wrong(), ElementsAre(TileMismatch{tied, "tied", "head"}, TileMismatch{gate, "gate", "replica"}));
  // Where it is read is the worse place to be wrong.
  engine_->flip(place("tied", 299, 0), 0);
  EXPECT_THAT(wrong(), ElementsAre(TileMismatch{tied, "tied", ""}, TileMismatch{gate, "gate", "replica"}));
  const auto repaired = receiver_->repair(wrong(), in_ms(60'000));
  ASSERT_TRUE(repaired.ok()) << repaired.error().to_string();
  EXPECT_EQ(repaired->tiles, 2u);
  expect_live(model_.half);
}

TEST_P(AttestPull, TheScrubLooksAtCopies) {
  start_engine();
  options_.scrub_tiles = 1000;
  connect();
  bind_engine();
  commit_pull();
  engine_->flip(place("tied", 3, 4, 1), 2);
  step(0.0);
  const auto staged = pull();
  ASSERT_FALSE(staged.ok());
  EXPECT_EQ(staged.error().code(), Errc::corrupt);
  EXPECT_THAT(staged.error().message(), HasSubstr("(tied), the copy in head"));
  EXPECT_EQ(commit_pull().mode, PullMode::full);
}

TEST_P(AttestPull, AnAgentThatHasMovedOnIsSaid) {
  start_engine();
  commit_pull();
  const Version held = *receiver_->current();
  engine_->flip(place("up", 3, 4), 2);
  const std::vector<TileMismatch> found = wrong();
  step(0.01);
  const auto repaired = receiver_->repair(found, in_ms(60'000));
  ASSERT_FALSE(repaired.ok());
  EXPECT_EQ(repaired.error().code(), Errc::gone);
  EXPECT_THAT(repaired.error().message(), HasSubstr(to_string(agent_->newest_version())));
  EXPECT_EQ(*receiver_->current(), held);
  EXPECT_EQ(wrong(), found);
  EXPECT_EQ(agent_->live_plans(), 0u);
  EXPECT_EQ(commit_pull().mode, PullMode::full) << "a version that is known to be wrong is no base";
}

TEST_P(AttestPull, ACommitCanBeRolledBackAfterARepair) {
  start_engine();
  commit_pull();
  const std::vector<std::byte> before = model_.half;
  step(0.1);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  ASSERT_TRUE((*staged)->commit().ok());
  engine_->flip(place("up", 77, 500), 3);
  ASSERT_TRUE(receiver_->repair(wrong(), in_ms(60'000)).ok());
  expect_live(model_.half);
  ASSERT_TRUE((*staged)->rollback().ok());
  expect_live(before);
}

TEST_P(AttestPull, AnUpdateThatIsStagedStaysSo) {
  start_engine();
  commit_pull();
  step(0.1);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  const std::uint64_t tile = tile_at("norm", 0, 0);
  EXPECT_EQ(receiver_->repair(std::vector<std::uint64_t>{tile}, in_ms(60'000)).error().code(), Errc::gone);
  ASSERT_TRUE((*staged)->commit().ok());
  ASSERT_TRUE(receiver_->repair(std::vector<std::uint64_t>{tile, tile}, in_ms(60'000)).ok());
  expect_live(model_.half);
}

TEST_P(AttestPull, WhatCannotBeRepairedIsNamed) {
  start_engine();
  const auto error = [&](std::vector<std::uint64_t> tiles) { return receiver_->repair(tiles, in_ms(60'000)).error(); };
  EXPECT_EQ(error({0}).code(), Errc::not_found);
  commit_pull();
  EXPECT_EQ(error({model_.layout->tile_count()}).code(), Errc::out_of_range);
  const auto none = receiver_->repair(std::vector<std::uint64_t>(), in_ms(60'000));
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(none->wire_bytes, 0u);
  // Bytes that are never right are not written.
  engine_->flip(place("up", 3, 4), 2);
  const std::vector<TileMismatch> found = wrong();
  agent_->on_request(fault_on(Type::get_raw_tiles, Fault::flip_at_source, 0, kAlways));
  const Error bad = error({found[0].tile});
  EXPECT_EQ(bad.code(), Errc::corrupt) << bad.to_string();
  EXPECT_THAT(bad.message(), HasSubstr("of up"));
  EXPECT_EQ(wrong(), found);
  agent_->on_request(nullptr);
  const auto late = receiver_->repair(found, Deadline::after(std::chrono::seconds(0)));
  EXPECT_EQ(late.error().code(), Errc::timed_out);
  std::stop_source stop;
  stop.request_stop();
  EXPECT_EQ(receiver_->repair(found, CallContext(in_ms(60'000), stop.get_token())).error().code(), Errc::cancelled);
  ASSERT_TRUE(receiver_->current().has_value());
  ASSERT_TRUE(receiver_->repair(found, in_ms(60'000)).ok());
  expect_live(model_.half);
}

/// A plan and a lease each time would be what it lacks.
TEST_P(AttestPull, AnAgentThatRefusesTilesIsNotAskedWithoutAPause) {
  receiver::Tuning tuning = quick();
  tuning.backoff_first = std::chrono::milliseconds(50);
  tuning.backoff_max = std::chrono::seconds(1);
  tuning.refused_plans = 1'000'000;
  start_engine({}, tuning);
  commit_pull();
  engine_->flip(place("up", 3, 4), 2);
  const std::vector<TileMismatch> found = wrong();
  agent_->on_request(fault_on(Type::get_raw_tiles, Fault::refuse, 0, kAlways));
  const std::uint64_t before = agent_->requests(Type::plan);
  EXPECT_EQ(receiver_->repair(found, in_ms(1'000)).error().code(), Errc::timed_out);
  EXPECT_LE(agent_->requests(Type::plan) - before, 10u);
  agent_->on_request(nullptr);
  ASSERT_TRUE(receiver_->repair(found, in_ms(60'000)).ok());
  expect_live(model_.half);
}

TEST_P(AttestPull, CommitsAreAttestedIfAsked) {
  options_.attest_commits = true;
  start_engine();
  EXPECT_GT(commit_pull().attest_s, 0);
  const std::vector<std::byte> before = model_.half;
  const Version held = *receiver_->current();
  step(0.01);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  // In an element that stays.
  const Tensor& t = model_.layout->tensors()[tensor("tied")];
  std::uint64_t col = 0;
  while (before[t.offset + 2 * col] != model_.half[t.offset + 2 * col]) ++col;
  engine_->flip(place("tied", 0, col, 1), 0);
  const Status committed = (*staged)->commit();
  ASSERT_FALSE(committed.ok());
  EXPECT_EQ(committed.error().code(), Errc::corrupt);
  EXPECT_THAT(committed.error().message(), HasSubstr("tile " + std::to_string(tile_at("tied", 0, col)) + " (tied)"));
  EXPECT_THAT(committed.error().message(), HasSubstr("rolled back to " + to_string(held)));
  EXPECT_THAT(committed.error().message(), HasSubstr("wrong as well"));
  EXPECT_GT((*staged)->report().attest_s, 0);
  EXPECT_EQ(*receiver_->current(), held);
  engine_->flip(place("tied", 0, col, 1), 0);
  expect_live(before);
  EXPECT_FALSE((*staged)->commit().ok()) << "it is not staged any more";
  EXPECT_EQ(commit_pull().mode, PullMode::full) << "a version that is known to be wrong is no base";
}

INSTANTIATE_TEST_SUITE_P(Where, AttestPull,
                         testing::Values(AnyEngine::Where::host, AnyEngine::Where::device, AnyEngine::Where::both),
                         [](const auto& param_info) { return name_of(param_info.param); });

TEST_F(PullTest, OnlyTilesThatAreKeptAreRepaired) {
  start();
  const Tensor& t = model_.layout->tensors()[tensor("big.1")];
  const std::vector<Slice> only{{"big.1", Rect{0, 0, t.rows, t.cols}}};
  ASSERT_TRUE(receiver_->bind(make_host_target(model_.layout), only, in_ms(60'000)).ok());
  auto staged = pull();
  ASSERT_TRUE(staged.ok() && (*staged)->commit().ok());
  const std::vector<std::uint64_t> other{model_.layout->tensors()[tensor("big.2")].first_tile};
  const auto refused = receiver_->repair(other, in_ms(60'000));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::invalid_argument);
  EXPECT_THAT(refused.error().message(), HasSubstr("(big.2)"));
  live_byte(tensor("big.1")) ^= std::byte{1};
  const auto wrong = receiver_->attest(in_time());
  ASSERT_TRUE(wrong.ok());
  EXPECT_THAT(*wrong, ElementsAre(TileMismatch{t.first_tile, "big.1", ""}));
  ASSERT_TRUE(receiver_->repair(*wrong, in_ms(60'000)).ok());
  EXPECT_THAT(*receiver_->attest(in_time()), IsEmpty());
}

/// A broken memory does not keep what is written: its version is no base until nothing is wrong any more.
TEST_F(PullTest, ATileThatIsWrongAgainIsNotRepaired) {
  options_.scrub_tiles = 0;
  for (const int healed : {0, 1, 2}) {
    SCOPED_TRACE(healed);
    start();
    auto* remote = new RemoteMemory(model_.layout);
    ASSERT_TRUE(receiver_->bind(std::unique_ptr<Target>(remote), in_ms(60'000)).ok());
    auto staged = pull();
    ASSERT_TRUE(staged.ok() && (*staged)->commit().ok());
    const Tensor& t = model_.layout->tensors()[tensor("big.1")];
    const std::size_t at = t.offset + 5;
    remote->stick(at, model_.half[at] ^ std::byte{4});
    remote->memory()[model_.layout->tensors()[tensor("big.2")].offset] ^= std::byte{1};
    const std::vector<std::uint64_t> tiles{t.first_tile, t.first_tile + 1};
    const auto refused = receiver_->repair(tiles, in_ms(60'000));
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), Errc::corrupt);
    EXPECT_THAT(refused.error().message(), HasSubstr("tile " + std::to_string(t.first_tile) + " (big.1) differs"));
    EXPECT_THAT(refused.error().message(), HasSubstr("right after the repair"));
    remote->stick(at, model_.half[at]);
    if (healed == 1) {
      ASSERT_TRUE(receiver_->repair(tiles, in_ms(60'000)).ok());
    }
    if (healed == 2) {
      const auto wrong = receiver_->attest(in_time());
      ASSERT_TRUE(wrong.ok());
      EXPECT_EQ(wrong->size(), 2u);
      ASSERT_TRUE(receiver_->repair(*wrong, in_ms(60'000)).ok());
    }
    step();
    auto next = pull();
    ASSERT_TRUE(next.ok());
    EXPECT_EQ((*next)->report().mode, healed == 2 ? PullMode::delta : PullMode::full);
    receiver_.reset();
  }
}

TEST_F(PullTest, ATileThatCannotBeWrittenLeavesNoVersion) {
  start();
  auto* remote = new RemoteMemory(model_.layout);
  ASSERT_TRUE(receiver_->bind(std::unique_ptr<Target>(remote), in_ms(60'000)).ok());
  auto staged = pull();
  ASSERT_TRUE(staged.ok() && (*staged)->commit().ok());
  remote->fail("open_live");
  const std::vector<std::uint64_t> tiles{3};
  EXPECT_EQ(receiver_->repair(tiles, in_ms(60'000)).error().code(), Errc::io);
  EXPECT_EQ(remote->forget_faults(), 0u);
  EXPECT_TRUE(receiver_->current().has_value()) << "nothing was written";
  for (const char* step : {"put", "settle"}) {
    remote->fail(step);
    const auto refused = receiver_->repair(tiles, in_ms(60'000));
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), Errc::io) << refused.error().to_string();
    EXPECT_THAT(refused.error().message(), HasSubstr("no whole version"));
    EXPECT_EQ(remote->forget_faults(), 0u);
    EXPECT_FALSE(receiver_->current().has_value());
    auto next = pull();
    ASSERT_TRUE(next.ok() && (*next)->commit().ok());
    EXPECT_TRUE(same_bytes(remote->memory(), model_.half));
  }
}

TEST_F(PullTest, DirectoriesTakeNoSingleTiles) {
  TempDir dir;
  options_.attest_commits = true;
  start();
  auto target = make_hf_target(receiver_->layout(), receiver_->sidecar(), dir.path() / "out");
  ASSERT_TRUE(target.ok()) << target.error().to_string();
  ASSERT_TRUE(receiver_->bind(*std::move(target), in_ms(60'000)).ok());
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  ASSERT_TRUE((*staged)->commit().ok());
  EXPECT_GT((*staged)->report().attest_s, 0);
  const std::vector<std::uint64_t> tiles{3};
  EXPECT_EQ(receiver_->repair(tiles, in_ms(60'000)).error().code(), Errc::unsupported);
  EXPECT_TRUE(receiver_->current().has_value());
}

// ---- what a target has after a commit that was found wrong ---------------------------------------------------------

class CommitVerdicts : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(target_.open(pool_, in_time()).ok());
    first_ = trainer_.now();
  }
  Status commit_second() {
    second_ = trainer_.step(0.05);
    std::vector<StagedStep> steps;
    steps.push_back(trainer_.delta(first_, second_));
    return target_.commit_delta(std::move(steps), second_.state, in_time());
  }
  CommitVerdict verdict(Deadline deadline = in_time()) {
    return attest_commit(target_, TileSet::whole(*trainer_.layout()), deadline);
  }
  /// The first byte of a tensor that the step has changed (or has not).
  std::byte& byte(bool changed) {
    const Tensor& t = trainer_.layout()->tensors()[5];
    std::uint64_t at = t.offset;
    while ((first_.half[at] != second_.half[at]) != changed) ++at;
    return target_.memory()[at];
  }
  void expect_holds(const Reference& reference) {
    ASSERT_NE(target_.committed(), nullptr);
    EXPECT_EQ(target_.committed()->version, reference.state.version);
    EXPECT_TRUE(same_bytes(target_.memory(), reference.half));
  }

  ThreadPool pool_{3, "verdict"};
  TrainerModel trainer_{7};
  RemoteMemory target_{trainer_.layout()};
  Reference first_;
  Reference second_;
};

TEST_F(CommitVerdicts, AValidOneIsCommitted) {
  ASSERT_TRUE(commit_whole(target_, first_).ok());
  EXPECT_TRUE(verdict().status.ok());
  ASSERT_TRUE(commit_second().ok());
  EXPECT_TRUE(verdict().status.ok());
  expect_holds(second_);
}

TEST_F(CommitVerdicts, WhatOnlyTheNewVersionHasWrongIsRolledBack) {
  ASSERT_TRUE(commit_whole(target_, first_).ok());
  ASSERT_TRUE(commit_second().ok());
  const Reference third = trainer_.step(0.9);
  ASSERT_TRUE(commit_whole(target_, third).ok());  // staged: what it overwrote comes back whole
  target_.memory()[trainer_.layout()->tensors()[5].offset] ^= std::byte{1};
  const CommitVerdict found = verdict();
  EXPECT_EQ(found.status.error().code(), Errc::corrupt);
  EXPECT_THAT(found.status.error().message(), HasSubstr("rolled back to " + to_string(second_.state.version)));
  EXPECT_FALSE(found.was_wrong) << found.status.error().to_string();
  expect_holds(second_);
}

TEST_F(CommitVerdicts, WhatWasWrongBeforeStaysSoAndIsSaid) {
  ASSERT_TRUE(commit_whole(target_, first_).ok());
  ASSERT_TRUE(commit_second().ok());
  byte(false) ^= std::byte{1};
  const CommitVerdict found = verdict();
  EXPECT_EQ(found.status.error().code(), Errc::corrupt);
  EXPECT_THAT(found.status.error().message(), HasSubstr("wrong as well"));
  EXPECT_TRUE(found.was_wrong);
  byte(false) ^= std::byte{1};
  expect_holds(first_);
}

TEST_F(CommitVerdicts, WithoutAnUndoLogThereIsNoVersion) {
  ASSERT_TRUE(commit_whole(target_, first_).ok());
  second_ = trainer_.step(0.5);
  ASSERT_TRUE(commit_whole(target_, second_, FullUpdatePolicy::in_place).ok());
  target_.memory()[0] ^= std::byte{1};
  const CommitVerdict found = verdict();
  EXPECT_EQ(found.status.error().code(), Errc::corrupt);
  EXPECT_THAT(found.status.error().message(), HasSubstr("no version any more"));
  EXPECT_EQ(target_.committed(), nullptr);
  ASSERT_TRUE(target_.begin_full(FullUpdatePolicy::refuse, in_time()).ok()) << "there is nothing to be kept";
}

TEST_F(CommitVerdicts, AFailedRollbackLeavesNoVersion) {
  ASSERT_TRUE(commit_whole(target_, first_).ok());
  ASSERT_TRUE(commit_second().ok());
  byte(false) ^= std::byte{1};
  target_.fail("put");
  EXPECT_THAT(verdict().status.error().message(), HasSubstr("cannot be rolled back"));
  EXPECT_EQ(target_.forget_faults(), 0u);
  EXPECT_EQ(target_.committed(), nullptr);
}

TEST_F(CommitVerdicts, TheFirstVersionIsRolledBackToNothing) {
  ASSERT_TRUE(commit_whole(target_, first_).ok());
  target_.memory()[0] ^= std::byte{1};
  EXPECT_THAT(verdict().status.error().message(), HasSubstr("no version, as before"));
  EXPECT_EQ(target_.committed(), nullptr);
}

TEST_F(CommitVerdicts, ADeadlineThatPassesTakesItBack) {
  ASSERT_TRUE(commit_whole(target_, first_).ok());
  ASSERT_TRUE(commit_second().ok());
  const CommitVerdict late = verdict(Deadline::after(std::chrono::seconds(0)));
  EXPECT_EQ(late.status.error().code(), Errc::timed_out);
  EXPECT_THAT(late.status.error().message(), HasSubstr("rolled back to " + to_string(first_.state.version)));
  expect_holds(first_);
  ASSERT_TRUE(commit_second().ok());
  target_.fail("read_tile", 4);
  EXPECT_EQ(verdict().status.error().code(), Errc::io);
  EXPECT_EQ(target_.forget_faults(), 0u);
  expect_holds(first_);
}

}  // namespace
}  // namespace deltasync::test
