// Live memory that is known to be wrong: it is no base for a delta, whatever fails or is rolled back meanwhile, and who
// cannot look at all of it looks at what can be seen.
#include <gmock/gmock-more-matchers.h>

#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "deltasync/receiver.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/shadow/shadowed_target.hpp"
#include "tests/receiver/any_engine.hpp"
#include "tests/receiver/pull_fixture.hpp"
#include "tests/receiver/remote_memory.hpp"
#include "tests/receiver/trainer_model.hpp"

namespace deltasync::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using wire::Type;
using Call = gpu::FakeDevice::Call;

class Invalidated : public PullTest {
 protected:
  void SetUp() override {
    PullTest::SetUp();
    options_.scrub_tiles = 0;  // nothing but what a test does finds anything
  }
  void TearDown() override { end(); }
  void end() {
    if (remote_ != nullptr) {
      EXPECT_EQ(remote_->forget_faults(), 0u) << "a fault never came up";
    }
    remote_ = nullptr;
    receiver_.reset();
    agent_.reset();
  }

  void start_remote(FakeAgent::Setup setup = FakeAgent::Setup(), bool shadowed = false) {
    start(std::move(setup));
    remote_ = new RemoteMemory(model_.layout);
    std::unique_ptr<Target> target(remote_);
    if (shadowed) target = *make_shadowed_target(std::move(target));
    ASSERT_TRUE(receiver_->bind(std::move(target), in_ms(60'000)).ok());
    commit_pull();
  }
  PullReport commit_pull() {
    auto staged = pull();
    EXPECT_TRUE(staged.ok()) << staged.error().to_string();
    if (!staged.ok()) return {};
    const Status committed = (*staged)->commit();
    EXPECT_TRUE(committed.ok()) << committed.error().to_string();
    EXPECT_TRUE(remote_->memory() == agent_->newest());
    return (*staged)->report();
  }
  std::uint64_t tile_of(const std::string& name) { return model_.layout->tensors()[tensor(name)].first_tile; }
  /// Somebody writes to a tile, which its owner asks to be repaired.
  void damage(const std::string& name) {
    remote_->memory()[model_.layout->tensors()[tensor(name)].offset] ^= std::byte{1};
  }
  Result<RepairReport> repair_tile(const std::string& name, std::stop_token stop = {}) {
    const std::vector<std::uint64_t> tiles{tile_of(name)};
    return receiver_->repair(tiles, CallContext(in_ms(60'000), std::move(stop)));
  }
  /// The agent has a newer version by now, so the tile cannot be had.
  void make_invalid() {
    damage("big.1");
    step();
    ASSERT_EQ(repair_tile("big.1").error().code(), Errc::gone);
  }
  /// What the next pull would be.
  PullMode next_mode() {
    auto staged = pull();
    EXPECT_TRUE(staged.ok()) << staged.error().to_string();
    return staged.ok() ? (*staged)->report().mode : PullMode::up_to_date;
  }

  RemoteMemory* remote_ = nullptr;
};

/// What a pull that ended early had staged over the version that is lost now.
TEST_F(Invalidated, ARepairThatLosesTheVersionClosesWhatAPullHolds) {
  for (const bool shadowed : {false, true}) {
    SCOPED_TRACE(shadowed);
    FakeAgent::Setup setup;
    setup.ring_deltas = 0;
    start_remote(setup, shadowed);
    step(0.3);
    std::stop_source stop;
    const std::uint64_t from = agent_->requests(Type::get_extent);
    agent_->on_request([from, &stop](const Request& r) {
      if (r.type != Type::get_extent || r.ordinal < from + 8) return Fault::none;
      stop.request_stop();
      return Fault::stall;
    });
    const auto part = receiver_->pull({}, CallContext(in_ms(60'000), stop.get_token()));
    ASSERT_FALSE(part.ok());
    ASSERT_EQ(part.error().code(), Errc::cancelled) << part.error().to_string();
    agent_->on_request(nullptr);
    remote_->fail("settle");
    EXPECT_EQ(repair_tile("big.1").error().code(), Errc::io);
    EXPECT_EQ(remote_->forget_faults(), 0u);
    EXPECT_FALSE(receiver_->current().has_value());
    EXPECT_EQ(commit_pull().mode, PullMode::full);
    end();
  }
}

TEST_F(Invalidated, ComesBackWithARollback) {
  start_remote();
  make_invalid();
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  ASSERT_EQ((*staged)->report().mode, PullMode::full);
  ASSERT_TRUE((*staged)->commit().ok());
  ASSERT_TRUE((*staged)->rollback().ok());
  EXPECT_EQ(next_mode(), PullMode::full) << "the damage is back, too";
  EXPECT_EQ(commit_pull().mode, PullMode::full);
  step();
  EXPECT_EQ(commit_pull().mode, PullMode::delta) << "a commit that stays is trusted";
}

TEST_F(Invalidated, ComesBackWhereAttestingTakesACommitBack) {
  options_.attest_commits = true;
  start_remote();
  make_invalid();
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  const Version held = *receiver_->current();
  remote_->fail("read_tile", 4);
  const Status committed = (*staged)->commit();
  ASSERT_FALSE(committed.ok());
  EXPECT_THAT(committed.error().message(), HasSubstr("rolled back to " + to_string(held)));
  EXPECT_EQ(next_mode(), PullMode::full);
}

/// However a repair ends that did not see its tiles right, they are no base.
TEST_F(Invalidated, StaysAfterARepairThatFailed) {
  enum class Way : std::uint8_t { bad_bytes, stopped, refused, unread };
  for (const Way way : {Way::bad_bytes, Way::stopped, Way::refused, Way::unread}) {
    SCOPED_TRACE(static_cast<int>(way));
    start_remote();
    damage("big.1");
    std::stop_source stop;
    Errc expected = Errc::io;
    switch (way) {
      case Way::bad_bytes:
        agent_->on_request(fault_on(Type::get_raw_tiles, Fault::flip_at_source, 0, kAlways));
        expected = Errc::corrupt;
        break;
      case Way::stopped:
        agent_->on_request([&stop](const Request& r) {
          if (r.type != Type::get_raw_tiles) return Fault::none;
          stop.request_stop();
          return Fault::stall;
        });
        expected = Errc::cancelled;
        break;
      case Way::refused: remote_->fail("open_live"); break;
      case Way::unread: remote_->fail("read_tile"); break;  // after it was written
    }
    const auto repaired = repair_tile("big.1", stop.get_token());
    ASSERT_FALSE(repaired.ok());
    EXPECT_EQ(repaired.error().code(), expected) << repaired.error().to_string();
    EXPECT_EQ(remote_->forget_faults(), 0u);
    ASSERT_TRUE(receiver_->current().has_value());
    agent_->on_request(nullptr);
    step();
    EXPECT_EQ(commit_pull().mode, PullMode::full);
    end();
  }
}

TEST_F(Invalidated, EndsWithARepairThatLeavesNothingWrong) {
  start_remote();
  damage("big.1");
  remote_->fail("read_tile");
  ASSERT_FALSE(repair_tile("big.1").ok());
  ASSERT_TRUE(repair_tile("big.1").ok());
  step();
  EXPECT_EQ(commit_pull().mode, PullMode::delta);
}

// ---- readers of copies ---------------------------------------------------------------------------------------------

class CopyReaders : public PullTest, public testing::WithParamInterface<AnyEngine::Where> {
 protected:
  void SetUp() override { model_ = make_model(7, TiedEngine::specs()); }
  void TearDown() override { receiver_.reset(); }

  void start_engine() {
    start();
    engine_.emplace(made_.engine, made_.plan, GetParam(), 5);
  }
  Status bind_engine() {
    DS_ASSIGN(std::unique_ptr<Target> target, engine_->make(model_.layout));
    return bind_to(std::move(target));
  }
  Status bind_to(std::unique_ptr<Target> target) {
    return receiver_->bind(std::move(target), engine_->placement()->slices(), in_ms(60'000));
  }
  void commit_pull(PullMode mode) {
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    EXPECT_EQ((*staged)->report().mode, mode);
    engine_->fake()->fill(false);
    const Status committed = (*staged)->commit();
    ASSERT_TRUE(committed.ok()) << committed.error().to_string();
  }
  std::byte* place(const std::string& tensor, std::uint64_t row, std::uint64_t col, std::size_t nth) {
    return places_of(engine_->plan(), tensor, row, col).at(nth);
  }

  TiedEngine made_;
  std::optional<AnyEngine> engine_;
};

/// Without memory to read copies with, the scrub looks at the places that are read.
TEST_P(CopyReaders, TheScrubGoesOnWithoutThem) {
  options_.scrub_tiles = 1000;
  start_engine();
  ASSERT_TRUE(bind_engine().ok());
  commit_pull(PullMode::full);
  engine_->fake()->fill(true);
  EXPECT_EQ(receiver_->attest(in_time()).error().code(), Errc::no_space);
  step();
  commit_pull(PullMode::delta);
  engine_->flip(place("tied", 3, 4, 1), 2);
  step(0.0);
  engine_->fake()->fill(true);
  commit_pull(PullMode::delta);
  engine_->flip(place("up", 3, 4, 0), 2);
  step(0.0);
  engine_->fake()->fill(true);
  const auto staged = pull();
  ASSERT_FALSE(staged.ok()) << "it was not read";
  EXPECT_EQ(staged.error().code(), Errc::corrupt) << staged.error().to_string();
  EXPECT_THAT(staged.error().message(), HasSubstr("(up) differs"));
  engine_->fake()->fill(false);
  const auto wrong = receiver_->attest(in_time());
  ASSERT_TRUE(wrong.ok()) << wrong.error().to_string();
  EXPECT_EQ(wrong->size(), 2u) << "the copy too, as soon as there is memory";
}

/// Where commits are attested they are there before the first one, in which nothing is taken for them.
TEST_P(CopyReaders, AreMadeWhenATargetIsBound) {
  options_.attest_commits = true;
  options_.scrub_tiles = 0;
  start_engine();
  auto refused = engine_->make(model_.layout);
  ASSERT_TRUE(refused.ok());
  engine_->fake()->fill(true);
  const Status full = bind_to(*std::move(refused));
  ASSERT_FALSE(full.ok());
  EXPECT_EQ(full.error().code(), Errc::no_space);
  EXPECT_THAT(full.error().message(), HasSubstr("looking at copies of tiles"));
  engine_->fake()->fill(false);
  ASSERT_TRUE(bind_engine().ok());
  engine_->fake()->fail(Call::pin, 1);
  commit_pull(PullMode::full);
  EXPECT_EQ(engine_->fake()->forget_faults(), 1u) << "host memory was pinned in a pull or a commit";
}

TEST_P(CopyReaders, AreMadeWithinTheCallersTime) {
  start_engine();
  auto made = engine_->make(model_.layout);
  ASSERT_TRUE(made.ok());
  Target& target = **made;
  const Status late = target.capabilities().copies->prepare_copies(Deadline::after(std::chrono::seconds(0)));
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Errc::timed_out);
  EXPECT_THAT(late.error().message(), HasSubstr("copies of tiles"));
  std::stop_source stop;
  stop.request_stop();
  EXPECT_EQ(target.capabilities().copies->prepare_copies(CallContext(in_time(), stop.get_token())).error().code(),
            Errc::cancelled);
  EXPECT_TRUE(target.capabilities().copies->prepare_copies(in_time()).ok());
}

INSTANTIATE_TEST_SUITE_P(Where, CopyReaders, testing::Values(AnyEngine::Where::device, AnyEngine::Where::both),
                         [](const auto& param_info) { return name_of(param_info.param); });

}  // namespace
}  // namespace deltasync::test
