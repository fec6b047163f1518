// The relay's target over a real segment: what its agent serves is always a whole version with the digests that came
// with it, and whatever goes wrong, the one before stays.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.hpp"
#include "receiver/targets/segment/relay_target.hpp"
#include "receiver/targets/verify.hpp"
#include "tests/receiver/trainer_model.hpp"
#include "tests/support/temp_dir.hpp"
#include "tests/writer/harness.hpp"

namespace deltasync::test {
namespace {

using delta::ValueForm;
using relay::RelayTarget;

class RelayTargetTest : public ::testing::Test {
 protected:
  void SetUp() override { start(std::make_unique<TrainerModel>(7)); }

  void start(std::unique_ptr<TrainerModel> trainer) {
    target_.reset();
    agent_.reset();
    dir_ = std::make_unique<TempDir>();
    agent_ = std::make_unique<MiniAgent>(dir_->path());
    trainer_ = std::move(trainer);
    bind();
  }
  /// As a relay process does when it starts.
  void bind() {
    target_.reset();
    writer_ = nullptr;
    auto writer =
        Writer::attach(trainer_->layout(), make_sidecar(*trainer_->layout()), writer_options(dir_->path()), soon());
    ASSERT_TRUE(writer) << writer.error().to_string();
    writer_ = writer->get();
    target_ = std::make_unique<RelayTarget>(trainer_->layout(), *std::move(writer),
                                            RelayTarget::Options{guard_, "agent.sock", [this] {
                                                                   if (written_) written_();
                                                                 }});
    ASSERT_TRUE(ok(target_->open(pool_, in_time())));
  }

  static testing::AssertionResult ok(const Status& status) {
    if (status.ok()) return testing::AssertionSuccess();
    return testing::AssertionFailure() << status.error().to_string();
  }
  static testing::AssertionResult fails(const Status& status, Errc code, const std::string& text = {}) {
    if (status.ok()) return testing::AssertionFailure() << "succeeded";
    const std::string message = status.error().to_string();
    if (status.error().code() == code && message.find(text) != std::string::npos) return testing::AssertionSuccess();
    return testing::AssertionFailure() << message;
  }
  /// The target has this version, and its agent serves it.
  testing::AssertionResult holds(const Reference& reference) {
    const TargetState* state = target_->committed();
    if (state == nullptr) return testing::AssertionFailure() << "nothing is committed";
    if (!(state->version == reference.state.version)) {
      return testing::AssertionFailure() << "version is " << to_string(state->version);
    }
    if (state->root != reference.state.root || state->digests != reference.state.digests) {
      return testing::AssertionFailure() << "other digests";
    }
    if (read_live(*target_) != reference.half) return testing::AssertionFailure() << "live memory differs";
    if (auto served = ok(target_->wait_served(soon())); !served) return served;
    return serves(reference);
  }
  testing::AssertionResult serves(const Reference& reference) {
    if (agent_->served() != reference.state.version.id) return testing::AssertionFailure() << "another is served";
    if (agent_->served_bytes() != reference.half) return testing::AssertionFailure() << "other bytes are served";
    return testing::AssertionSuccess();
  }
  /// As a pull stages it: single steps with decoded changes, as far as the budget goes.
  Status commit(const std::vector<Reference>& versions, ValueForm form = ValueForm::ulp,
                std::uint64_t budget_bytes = 1ull << 40, Deadline deadline = in_time()) {
    std::vector<StagedStep> steps;
    for (std::size_t i = 1; i < versions.size(); ++i) {
      steps.push_back(trainer_->delta(versions[i - 1], versions[i], form));
    }
    if (steps.size() == 1 && target_->committed() != nullptr) DS_TRY(verify(steps[0], versions[0], budget_bytes));
    return target_->commit_delta(std::move(steps), versions.back().state, deadline);
  }
  Status verify(StagedStep& step, const Reference& before, std::uint64_t budget_bytes) {
    ResolvedBudget budget(budget_bytes);
    std::vector<std::uint64_t> digests = before.state.digests;
    for (StagedFrame& frame : step.frames) {
      DS_TRY(verify_frame(*target_, frame, before.state.digests, digests, budget));
    }
    return {};
  }
  /// Of what the writer has mapped, to be damaged.
  std::byte* writable(ByteSpan half) const { return const_cast<std::byte*>(half.data()); }

  ThreadPool pool_{3, "target"};
  std::chrono::nanoseconds guard_ = std::chrono::minutes(1);
  std::function<void()> written_;
  std::unique_ptr<TempDir> dir_;
  std::unique_ptr<MiniAgent> agent_;
  std::unique_ptr<TrainerModel> trainer_;
  Writer* writer_ = nullptr;  // the target's
  std::unique_ptr<RelayTarget> target_;
};

TEST_F(RelayTargetTest, StartsWithNothing) {
  EXPECT_EQ(target_->committed(), nullptr);
  EXPECT_TRUE(fails(roll_back(*target_), Errc::unsupported));
  EXPECT_TRUE(fails(target_->wait_served(soon()), Errc::invalid_argument));
  EXPECT_TRUE(fails(commit({trainer_->now(), trainer_->step(0.1)}), Errc::version_conflict));
}

TEST_F(RelayTargetTest, FullThenDeltas) {
  Reference before = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, before)));
  ASSERT_TRUE(holds(before));
  std::uint64_t budget = 0;
  for (const double density : {0.01, 0.001, 0.3, 0.0, 1.0, 0.01}) {
    for (const ValueForm form : {ValueForm::ulp, ValueForm::absolute}) {
      const Reference after = trainer_->step(density);
      budget = budget == 0 ? 20'000 : budget == 20'000 ? 1ull << 40 : 0;  // not decoded, some, all
      ASSERT_TRUE(ok(commit({before, after}, form, budget))) << density;
      ASSERT_TRUE(holds(after)) << density;
      EXPECT_TRUE(fails(roll_back(*target_), Errc::unsupported)) << "its agent serves it";
      before = after;
    }
  }
  const Reference whole = trainer_->step(0.5);
  ASSERT_TRUE(ok(commit_whole(*target_, whole)));
  ASSERT_TRUE(holds(whole));
  const Reference after = trainer_->step(0.01);
  ASSERT_TRUE(ok(commit({whole, after})));
  EXPECT_TRUE(holds(after));
}

// ---- the first version, while it comes -----------------------------------------------------------------------------

class RelayTargetStreams : public RelayTargetTest {
 protected:
  std::vector<std::uint8_t> none() const {
    return std::vector<std::uint8_t>(static_cast<std::size_t>(trainer_->layout()->tile_count()), 0);
  }
  void comes(const Reference& reference, std::span<const std::uint8_t> have) {
    target_->comes(reference.state.version, reference.state.root, reference.state.digests, have);
  }
  void came(const Reference& reference, std::uint64_t tile) {
    ASSERT_TRUE(ok(put_from_half(*target_, reference, tile_of(*trainer_->layout(), tile))));
    target_->came({&tile, 1});
  }
  bool told(std::size_t arrivals) {
    return eventually([&] { return agent_->arrivals() >= arrivals; });
  }
  std::uint64_t tile_there(std::size_t i, std::uint64_t tile) const {
    return delta::tile_digest(*trainer_->layout(), agent_->memory(i)->model(), tile);
  }
};

TEST_F(RelayTargetStreams, IsSharedTileByTile) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  came(first, 0);
  EXPECT_EQ(agent_->arrivals(), 0u) << "nobody has said of which version";
  std::vector<std::uint8_t> have = none();
  have[0] = 1;
  comes(first, have);
  ASSERT_TRUE(told(1));
  EXPECT_EQ(agent_->said(0).version, first.state.version);
  EXPECT_EQ(agent_->said(0).root, first.state.root);
  EXPECT_EQ(agent_->said(0).digests, first.state.digests);
  const shm::ArrivingMemory& there = *agent_->memory(0);
  EXPECT_TRUE(there.in_place(0)) << "what was there";
  EXPECT_FALSE(there.in_place(1));
  came(first, 1);
  came(first, 1);
  EXPECT_EQ(there.tiles_in_place(), 2u);
  EXPECT_EQ(tile_there(0, 0), first.state.digests[0]);
  EXPECT_EQ(tile_there(0, 1), first.state.digests[1]);
  comes(first, have);
  fill_full(*target_, first);
  EXPECT_NE(agent_->halves().find("FREE"), std::string::npos);
  EXPECT_EQ(agent_->halves().find("FILLING"), std::string::npos) << "no half is concerned";
  ASSERT_TRUE(ok(target_->commit_full(first.state, in_time())));
  ASSERT_TRUE(holds(first));
  EXPECT_EQ(agent_->arrivals(), 1u) << "told once; the version itself says the rest";
  const Reference second = trainer_->step(0.02);
  ASSERT_TRUE(ok(commit({first, second})));
  EXPECT_TRUE(holds(second));
}

/// What was announced is one version for ever.
TEST_F(RelayTargetStreams, AnotherVersionIsNotShared) {
  const Reference first = trainer_->now();
  const Reference second = trainer_->step(0.5);
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  comes(first, none());
  came(first, 0);
  target_->comes_no_more();
  ASSERT_TRUE(told(2));
  EXPECT_FALSE(agent_->said(1).version.id.valid());
  comes(second, none());
  fill_full(*target_, second);
  const std::uint64_t tile = 1;
  target_->came({&tile, 1});
  EXPECT_FALSE(agent_->memory(0)->in_place(1));
  ASSERT_TRUE(ok(target_->commit_full(second.state, in_time())));
  EXPECT_TRUE(holds(second));
  EXPECT_EQ(agent_->arrivals(), 2u);
}

TEST_F(RelayTargetStreams, ItsEndIsTold) {
  for (std::size_t round = 0; round < 3; ++round) {
    ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
    comes(trainer_->now(), none());
    ASSERT_TRUE(told(2 * round + 1));
    target_->discard_full();
    ASSERT_TRUE(told(2 * round + 2));
    EXPECT_FALSE(agent_->said(2 * round + 1).version.id.valid());
  }
}

TEST_F(RelayTargetStreams, NothingIsSharedWhereAVersionIsServed) {
  ASSERT_TRUE(ok(commit_whole(*target_, trainer_->now())));
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  const Reference second = trainer_->step(0.5);
  comes(second, none());
  fill_full(*target_, second);
  ASSERT_TRUE(ok(target_->commit_full(second.state, in_time())));
  EXPECT_TRUE(holds(second));
  EXPECT_EQ(agent_->arrivals(), 0u);
}

/// The memory that children read is damaged: the half is compared before it is sealed.
TEST_F(RelayTargetStreams, WhatIsDamagedThereIsNotCommitted) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  comes(first, none());
  fill_full(*target_, first);
  target_->full_rows(0)[0] ^= std::byte{1};
  EXPECT_TRUE(fails(target_->commit_full(first.state, in_time()), Errc::corrupt));
  EXPECT_EQ(target_->committed(), nullptr);
  target_->discard_full();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  EXPECT_TRUE(holds(first));
}

TEST_F(RelayTargetStreams, AnAgentThatIsStartedAgainHearsOfIt) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  comes(first, none());
  ASSERT_TRUE(told(1));
  came(first, 0);
  agent_.reset();
  came(first, 1);  // nobody is there: it goes on
  agent_ = std::make_unique<MiniAgent>(dir_->path());
  ASSERT_TRUE(eventually([&] {
    came(first, 2);
    return agent_->arrivals() != 0;
  }));
  EXPECT_EQ(agent_->said(0).version, first.state.version);
  EXPECT_EQ(agent_->memory(0)->tiles_in_place(), 3u);
  fill_full(*target_, first);
  ASSERT_TRUE(ok(target_->commit_full(first.state, in_time())));
  EXPECT_TRUE(holds(first));
}

/// Then it waits as later ones do.
TEST_F(RelayTargetStreams, WithoutMemoryThatCanBeSharedItWaitsInItsOwn) {
  const Reference first = trainer_->now();
  const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{4096, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status begun = target_->begin_full(FullUpdatePolicy::stage, in_time());
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, ignored);
  ASSERT_TRUE(ok(begun));
  comes(first, none());
  fill_full(*target_, first);
  ASSERT_TRUE(ok(target_->commit_full(first.state, in_time())));
  EXPECT_TRUE(holds(first));
  EXPECT_EQ(agent_->arrivals(), 0u);
}

TEST_F(RelayTargetTest, AChainIsOneVersion) {
  ASSERT_TRUE(ok(commit_whole(*target_, trainer_->now())));
  for (const ValueForm form : {ValueForm::ulp, ValueForm::absolute}) {
    std::vector<Reference> versions{trainer_->now()};
    for (const double density : {0.05, 0.5, 0.05, 0.9}) versions.push_back(trainer_->step(density));
    ASSERT_TRUE(ok(commit(versions, form)));
    ASSERT_TRUE(holds(versions.back()));
  }
}

TEST_F(RelayTargetTest, ExponentClassesToo) {
  Reference before = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, before)));
  for (const std::uint64_t budget : {std::uint64_t{1} << 40, std::uint64_t{0}}) {
    const Reference after = trainer_->small_step(0.03);
    std::vector<StagedStep> steps;
    steps.push_back(trainer_->compact_delta(before, after));
    if (budget != 0) {
      ASSERT_TRUE(ok(verify(steps[0], before, budget)));
    }
    ASSERT_TRUE(ok(target_->commit_delta(std::move(steps), after.state, in_time())));
    ASSERT_TRUE(holds(after));
    before = after;
  }
}

TEST_F(RelayTargetTest, LayoutsWithoutAnElement) {
  std::vector<TensorSpec> specs(2);
  specs[0] = {"none", Dtype::bf16, {0, 5}, {}, {}};
  specs[1] = {"nothing", Dtype::f32, {3, 0}, {}, {}};
  start(std::make_unique<TrainerModel>(1, specs));
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  const Reference second = trainer_->step(1.0);
  ASSERT_TRUE(ok(commit({first, second})));
  EXPECT_TRUE(holds(second));
}

TEST_F(RelayTargetTest, BoundAgainItGoesOnFromTheSegment) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  bind();
  ASSERT_TRUE(holds(first));
  const Reference second = trainer_->step(0.02);
  ASSERT_TRUE(ok(commit({first, second})));
  bind();
  EXPECT_TRUE(holds(second));
}

TEST_F(RelayTargetTest, ADiscardedFullLeavesNoTrace) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  for (const auto policy : {FullUpdatePolicy::stage, FullUpdatePolicy::in_place}) {
    const Reference second = trainer_->step(0.5);
    ASSERT_TRUE(ok(target_->begin_full(policy, in_time())));
    fill_full(*target_, second);
    ASSERT_TRUE(holds(first));
    target_->discard_full();
    ASSERT_TRUE(holds(first));
  }
  EXPECT_TRUE(fails(target_->begin_full(FullUpdatePolicy::refuse, in_time()), Errc::no_space));
}

TEST_F(RelayTargetTest, CallsOutOfOrderAndWrongStatesAreRefused) {
  const Reference first = trainer_->now();
  EXPECT_TRUE(fails(target_->commit_full(first.state, in_time()), Errc::invalid_argument));
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  const Reference second = trainer_->step(0.1);
  ASSERT_TRUE(ok(target_->begin_full(FullUpdatePolicy::stage, in_time())));
  EXPECT_TRUE(fails(target_->begin_full(FullUpdatePolicy::stage, in_time()), Errc::invalid_argument));
  EXPECT_TRUE(fails(commit({first, second}), Errc::invalid_argument));
  fill_full(*target_, second);
  TargetState state = second.state;
  state.digests[3] ^= 1;
  EXPECT_TRUE(fails(target_->commit_full(state, in_time()), Errc::corrupt));
  target_->discard_full();
  const auto refused = [&](const std::function<void(std::vector<StagedStep>&, TargetState&)>& spoil, Errc code) {
    std::vector<StagedStep> steps;
    steps.push_back(trainer_->delta(first, second));
    state = second.state;
    spoil(steps, state);
    const auto result = fails(target_->commit_delta(std::move(steps), state, in_time()), code);
    return result ? holds(first) : result;
  };
  EXPECT_TRUE(refused([](auto& steps, auto&) { steps.clear(); }, Errc::invalid_argument));
  EXPECT_TRUE(refused([](auto& steps, auto&) { steps[0].from.number = 77; }, Errc::version_conflict));
  EXPECT_TRUE(refused([](auto&, auto& wrong) { wrong.root.bytes[0] ^= 1; }, Errc::corrupt));
  EXPECT_TRUE(refused([](auto& steps, auto&) { steps[0].frames.clear(); }, Errc::corrupt));
  ASSERT_TRUE(ok(commit({first, second})));
  EXPECT_TRUE(holds(second));
}

/// All digests are those that came with the version, so this can only be found by reading what was written.
TEST_F(RelayTargetTest, AByteThatChangesOnTheWayIsFoundBeforeTheVersionIsSealed) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  ASSERT_TRUE(holds(first));
  const Tensor& tensor = trainer_->layout()->tensors()[5];
  ASSERT_GT(tensor.bytes, 0u);
  const Reference second = trainer_->step(0.01);
  for (const bool whole : {false, true}) {
    written_ = [&] { writable(writer_->filling())[tensor.offset + tensor.bytes / 2] ^= std::byte{1}; };
    EXPECT_TRUE(
        fails(whole ? commit_whole(*target_, second) : commit({first, second}), Errc::corrupt, tensor.spec.name));
    target_->discard_full();
    written_ = nullptr;
    ASSERT_TRUE(serves(first)) << "no version with that byte may be served";
    ASSERT_TRUE(holds(first));
  }
  ASSERT_TRUE(ok(commit({first, second})));
  EXPECT_TRUE(holds(second));
}

TEST_F(RelayTargetTest, ATileOfTheBaseThatSomebodyWroteToIsNotHandedOn) {
  Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  ASSERT_TRUE(holds(first));
  const Reference second = trainer_->step(0.0);  // no tile of it changes
  const Tensor& tensor = trainer_->layout()->tensors()[5];
  std::byte& byte = writable(held_version(*writer_)->bytes)[tensor.offset];
  byte ^= std::byte{1};
  EXPECT_TRUE(fails(commit({first, second}), Errc::corrupt, tensor.spec.name));
  ASSERT_TRUE(ok(commit_whole(*target_, second))) << "what a pull does next";
  EXPECT_TRUE(holds(second));
}

/// Once both halves are known a version is made where the one before the last lies.
TEST_F(RelayTargetTest, AVersionIsMadeInPlace) {
  int rounds = 0;
  written_ = [&] { ++rounds; };
  Reference before = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, before)));
  ASSERT_TRUE(holds(before));
  const auto step = [&](double density, std::uint64_t budget, bool in_place) {
    const Reference after = trainer_->step(density);
    rounds = 0;
    ASSERT_TRUE(ok(commit({before, after}, ValueForm::ulp, budget)));
    ASSERT_TRUE(holds(after));
    EXPECT_EQ(rounds == 0, in_place);
    before = after;
  };
  step(0.01, 1ull << 40, false);
  for (const double density : {0.01, 0.0, 1.0, 0.2, 0.001}) {
    for (const std::uint64_t budget : {std::uint64_t{1} << 40, std::uint64_t{20'000}, std::uint64_t{0}}) {
      step(density, budget, true);
    }
  }
  // A fill of somebody else's in between, that came to nothing, may have left anything.
  ASSERT_TRUE(writer_->begin({{before.state.version.id.epoch, before.state.version.id.number + 1}, ""}, soon()));
  writable(writer_->filling())[0] ^= std::byte{1};
  writer_->abort();
  step(0.01, 1ull << 40, false);
  step(0.01, 1ull << 40, true);
  bind();
  step(0.01, 1ull << 40, false);
  step(0.01, 1ull << 40, true);
  // The chain of versions is broken by one that comes whole.
  before = trainer_->step(0.01);
  ASSERT_TRUE(ok(commit_whole(*target_, before)));
  step(0.01, 1ull << 40, false);
  step(0.01, 1ull << 40, true);
}

TEST_F(RelayTargetTest, WhatSomebodyWroteToTheOtherHalfIsFoundOnceItIsServed) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  ASSERT_TRUE(holds(first));
  std::byte* const half = writable(held_version(*writer_)->bytes);
  const Reference second = trainer_->step(0.01);
  ASSERT_TRUE(ok(commit({first, second})));
  ASSERT_TRUE(holds(second));
  const Reference third = trainer_->step(0.0);
  const Tensor& tensor = trainer_->layout()->tensors()[5];
  half[tensor.offset] ^= std::byte{1};
  ASSERT_TRUE(ok(commit({second, third})));
  ASSERT_TRUE(ok(target_->wait_served(soon())));
  EXPECT_TRUE(fails(target_->wait_served(soon()), Errc::corrupt, tensor.spec.name)) << "the second call looks again";
  EXPECT_EQ(target_->committed(), nullptr);
  const Reference fourth = trainer_->step(0.01);
  ASSERT_TRUE(ok(commit_whole(*target_, fourth)));
  EXPECT_TRUE(holds(fourth));
}

/// A segment that was written to while no relay looked: the same version comes whole, and cannot be put in its place.
TEST_F(RelayTargetTest, AVersionThatTheSegmentHasWithOtherBytesIsABaseAllTheSame) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  ASSERT_TRUE(holds(first));
  const Tensor& tensor = trainer_->layout()->tensors()[5];
  writable(held_version(*writer_)->bytes)[tensor.offset] ^= std::byte{1};
  bind();
  ASSERT_NE(target_->committed(), nullptr);
  EXPECT_NE(target_->committed()->root, first.state.root);
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  EXPECT_EQ(target_->committed()->root, first.state.root);
  EXPECT_TRUE(read_live(*target_) == first.half);
  EXPECT_TRUE(fails(target_->wait_served(soon()), Errc::corrupt, "other bytes")) << "what its agent serves is not it";
  const Reference second = trainer_->step(0.01);
  ASSERT_TRUE(ok(commit({first, second})));
  EXPECT_TRUE(holds(second));
}

TEST_F(RelayTargetTest, AHalfThatIsNotFreeEndsInADeadlineThatNamesIt) {
  guard_ = std::chrono::milliseconds(50);
  bind();
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  ASSERT_TRUE(holds(first));
  agent_->busy = true;
  const Reference second = trainer_->step(0.01);
  ASSERT_TRUE(ok(commit({first, second}))) << "there is a free half: no agent is needed";
  const Reference third = trainer_->step(0.01);
  EXPECT_TRUE(fails(commit({second, third}), Errc::timed_out, "half 0 is"));
  EXPECT_TRUE(fails(commit_whole(*target_, third), Errc::timed_out, "half 1 is"));
  target_->discard_full();
  EXPECT_TRUE(fails(target_->wait_served(in_ms(20)), Errc::timed_out));
  agent_->busy = false;
  ASSERT_TRUE(holds(second));
  guard_ = std::chrono::minutes(1);
  bind();
  ASSERT_TRUE(ok(commit({second, third})));
  EXPECT_TRUE(holds(third));
}

TEST_F(RelayTargetTest, ADeadlineThatPassesKeepsTheOldVersion) {
  start(std::make_unique<TrainerModel>(
      7, std::vector<TensorSpec>{{"a", Dtype::bf16, {4096, 1024}, {}, {}}, {"b", Dtype::bf16, {4096, 1024}, {}, {}}}));
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  ASSERT_TRUE(holds(first));
  const Reference second = trainer_->step(0.05);
  // Passed before anything, and in the middle of the fill.
  EXPECT_TRUE(fails(commit({first, second}, ValueForm::ulp, 0, in_ms(0)), Errc::timed_out));
  ASSERT_TRUE(holds(first));
  const Deadline soon_over = in_ms(300);
  written_ = [&] {
    while (!soon_over.passed()) std::this_thread::yield();
  };
  EXPECT_TRUE(fails(commit({first, second}, ValueForm::ulp, 0, soon_over), Errc::timed_out));
  written_ = nullptr;
  ASSERT_TRUE(holds(first));
  ASSERT_TRUE(ok(commit({first, second})));
  EXPECT_TRUE(holds(second));
}

/// An agent that was restarted without its segment: what the target held is gone, and nothing of it is read.
TEST_F(RelayTargetTest, ANewSegmentIsFilledAgain) {
  const Reference first = trainer_->now();
  ASSERT_TRUE(ok(commit_whole(*target_, first)));
  ASSERT_TRUE(holds(first));
  agent_.reset();
  for (const auto& entry : std::filesystem::directory_iterator(dir_->path())) {
    if (entry.path().filename().string().rfind("mini.g", 0) == 0) std::filesystem::remove(entry.path());
  }
  agent_ = std::make_unique<MiniAgent>(dir_->path());
  const Reference second = trainer_->step(0.01);
  EXPECT_TRUE(fails(commit({first, second}), Errc::aborted, "without"));
  EXPECT_EQ(target_->committed(), nullptr);
  ASSERT_TRUE(ok(commit_whole(*target_, second)));
  EXPECT_TRUE(holds(second));
}

}  // namespace
}  // namespace deltasync::test
