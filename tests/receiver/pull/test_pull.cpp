// Pulls against an honest agent: modes, versions, staging, commit, rollback.
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/deadline.hpp"
#include "receiver/targets/recycled_bytes.hpp"
#include "tests/receiver/hf_fixture.hpp"
#include "tests/receiver/pull_fixture.hpp"
#include "tests/support/eventually.hpp"

namespace deltasync::test {
namespace {

TEST_F(PullTest, FirstPullIsFullAndEqual) {
  start();
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  EXPECT_FALSE(receiver_->current().has_value()) << "nothing is published before commit";
  const PullReport& report = (*staged)->report();
  EXPECT_EQ(report.mode, PullMode::full);
  EXPECT_EQ(report.version, agent_->newest_version());
  EXPECT_EQ(report.full_bytes, model_.layout->model_bytes());
  EXPECT_EQ(report.tiles, model_.layout->tile_count());
  EXPECT_EQ(report.stream_restarts, 0u);
  EXPECT_EQ(report.repaired_tiles, 0u);
  EXPECT_EQ(report.replans, 0u);
  EXPECT_GE(report.wire_bytes, agent_->extent_bytes());
  EXPECT_LT(report.metadata_bytes, 64u << 10);
  ASSERT_TRUE((*staged)->commit().ok());
  expect_holds_newest();
  EXPECT_EQ(agent_->live_plans(), 0u) << "the lease was not acknowledged";
}

TEST_F(PullTest, NoByteIsFetchedTwiceWithoutCause) {
  start();
  pull_and_commit();
  EXPECT_LE(agent_->extent_bytes(), model_.layout->half_bytes());
}

TEST_F(PullTest, DeltaLeavesLiveMemoryAloneUntilCommit) {
  start();
  pull_and_commit();
  const auto before = agent_->newest();
  step();
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  EXPECT_EQ((*staged)->report().mode, PullMode::delta);
  EXPECT_EQ((*staged)->report().delta_steps, 1u);
  EXPECT_GT((*staged)->report().changed, 0u);
  EXPECT_LT((*staged)->report().wire_bytes, model_.layout->model_bytes() / 4);
  expect_memory(before);
  ASSERT_TRUE((*staged)->commit().ok());
  expect_holds_newest();
  EXPECT_EQ(agent_->live_plans(), 0u);
}

TEST_F(PullTest, SeveralStepsAreAppliedInOrder) {
  start();
  pull_and_commit();
  for (int i = 0; i < 4; ++i) step(0.02);
  const PullReport report = pull_and_commit();
  EXPECT_EQ(report.mode, PullMode::delta);
  EXPECT_EQ(report.delta_steps, 4u);
}

TEST_F(PullTest, ALongRunOfSteps) {
  start();
  pull_and_commit();
  for (int i = 0; i < 12; ++i) {
    for (int k = 0; k <= i % 3; ++k) step(i % 4 == 0 ? 0.2 : 0.005);
    EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
  }
}

TEST_F(PullTest, AStepWithoutAnyChange) {
  start();
  pull_and_commit();
  agent_->publish(model_.half);
  EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
  step();
  pull_and_commit();
}

TEST_F(PullTest, UpToDate) {
  start();
  pull_and_commit();
  const PullReport report = pull_and_commit();
  EXPECT_EQ(report.mode, PullMode::up_to_date);
  EXPECT_EQ(report.version, agent_->newest_version());
}

/// Memory that the last update has left is for the next one, however often a receiver asks before there is one.
TEST_F(PullTest, OnlyAPullThatBringsSomethingGivesIdleMemoryBack) {
  start();
  pull_and_commit();
  BlockPool& blocks = BlockPool::shared();
  blocks.give_back(blocks.take(BlockPool::kBlockMin), BlockPool::kBlockMin);
  ASSERT_EQ(pull_and_commit().mode, PullMode::up_to_date);
  EXPECT_EQ(blocks.idle_bytes(), BlockPool::kBlockMin);
  step();
  const auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  ASSERT_EQ((*staged)->report().mode, PullMode::delta);
  EXPECT_EQ(blocks.idle_bytes(), 0U);
}

TEST_F(PullTest, NewerWaitsForTheNextVersion) {
  start();
  pull_and_commit();
  auto early = pull({.newer = true}, 1'500);
  ASSERT_FALSE(early.ok());
  EXPECT_EQ(early.error().code(), Errc::timed_out);
  EXPECT_NE(early.error().message().find("a newer version"), std::string::npos) << early.error().message();
  std::thread trainer([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(350));
    step();
  });
  const PullReport report = pull_and_commit({.newer = true});
  trainer.join();
  EXPECT_EQ(report.mode, PullMode::delta);
  EXPECT_GT(report.wait_s, 0.0);
}

TEST_F(PullTest, AWaitThatEndsCostsNoConnection) {
  start();
  pull_and_commit();
  const std::uint64_t before = agent_->connections();
  for (int wait = 0; wait < 20; ++wait) EXPECT_FALSE(pull({.newer = true}, 150).ok());
  EXPECT_LE(agent_->connections() - before, 4u) << "now and then the machine was busy";
}

/// The next one may be a delta away, once it is whole: who has a version keeps it until then.
TEST_F(PullTest, OnlyTheFirstVersionIsTakenWhileItArrives) {
  start();
  pull_and_commit();
  EXPECT_EQ(agent_->plans().back().arriving, 1);
  step();
  pull_and_commit({.newer = true});
  EXPECT_EQ(agent_->plans().back().arriving, 0);
}

/// How long a version is waited for bounds no transfer, and that none came is no failure, whether there was an agent.
TEST_F(PullTest, AWaitMayEndLongBeforeThePull) {
  start();
  Want newer{.newer = true};
  newer.wait_max = std::chrono::milliseconds(0);
  EXPECT_EQ(pull_and_commit(newer).mode, PullMode::full);
  const auto ends_at_once = [&] {
    const Deadline deadline = in_ms(600'000);
    const auto none = receiver_->pull(newer, deadline);
    ASSERT_FALSE(none.ok());
    EXPECT_EQ(none.error().code(), Errc::timed_out) << none.error().to_string();
    EXPECT_FALSE(deadline.passed());
    EXPECT_EQ(receiver_->status()->last_error(), "");
  };
  ends_at_once();
  step();
  EXPECT_EQ(pull_and_commit(newer).mode, PullMode::delta);
  agent_.reset();
  ends_at_once();
}

TEST_F(PullTest, NamedVersions) {
  start();
  pull_and_commit();
  step(0.01, "two");
  const auto second = agent_->newest();
  step(0.01, "three");
  auto staged = pull({.label = "two"});
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  ASSERT_TRUE((*staged)->commit().ok());
  EXPECT_EQ(receiver_->current()->label, "two");
  expect_memory(second);
  pull_and_commit({.number = 3});

  auto past = pull({.number = 1});
  ASSERT_FALSE(past.ok());
  EXPECT_EQ(past.error().code(), Errc::gone);
  auto never = pull({.number = 99}, 1'500);
  ASSERT_FALSE(never.ok());
  EXPECT_EQ(never.error().code(), Errc::timed_out);
  EXPECT_NE(never.error().message().find("version number 99"), std::string::npos) << never.error().message();
  EXPECT_NE(never.error().message().find(agent_->endpoint()), std::string::npos) << never.error().message();
  expect_holds_newest();
}

TEST_F(PullTest, DroppedUpdatesLeaveNoTrace) {
  start();
  {
    auto staged = pull();
    ASSERT_TRUE(staged.ok());
  }
  EXPECT_FALSE(receiver_->current().has_value());
  pull_and_commit();
  const auto before = agent_->newest();
  step();
  {
    auto staged = pull();
    ASSERT_TRUE(staged.ok());
  }
  expect_memory(before);
  auto staged = pull();
  ASSERT_TRUE(staged.ok());
  ASSERT_TRUE((*staged)->rollback().ok());
  EXPECT_EQ((*staged)->commit().error().code(), Errc::invalid_argument);
  expect_memory(before);
  pull_and_commit();
}

TEST_F(PullTest, RollbackAfterCommit) {
  start();
  pull_and_commit();
  const auto before = agent_->newest();
  const Version version = *receiver_->current();
  step();
  auto staged = pull();
  ASSERT_TRUE(staged.ok());
  ASSERT_TRUE((*staged)->commit().ok());
  ASSERT_TRUE((*staged)->rollback().ok());
  expect_memory(before);
  EXPECT_EQ(*receiver_->current(), version);
  EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
}

TEST_F(PullTest, ALaterPullOvertakesAStagedUpdate) {
  start();
  auto first = pull();
  ASSERT_TRUE(first.ok());
  auto second = pull();
  ASSERT_TRUE(second.ok());
  EXPECT_EQ((*first)->commit().error().code(), Errc::invalid_argument);
  ASSERT_TRUE((*second)->commit().ok());
  expect_holds_newest();
  first->reset();
  second->reset();
  expect_holds_newest();
}

TEST_F(PullTest, AnUpdateMayOutliveItsReceiver) {
  start();
  auto staged = pull();
  ASSERT_TRUE(staged.ok());
  receiver_.reset();
  EXPECT_EQ((*staged)->commit().error().code(), Errc::invalid_argument);
}

TEST_F(PullTest, FullUpdatePolicy) {
  FakeAgent::Setup setup;
  setup.ring_deltas = 0;  // never a delta
  start(setup);
  pull_and_commit();
  const auto before = agent_->newest();
  step();
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  EXPECT_EQ((*staged)->report().mode, PullMode::full);
  expect_memory(before);
  ASSERT_TRUE((*staged)->commit().ok());
  expect_holds_newest();
}

TEST_F(PullTest, MemoryForTheUndoLogIsGivenBack) {
  FakeAgent::Setup setup;
  setup.ring_deltas = 1;
  std::vector<TensorSpec> specs(1);
  specs[0] = {"w", Dtype::bf16, {16384, 1024}, {}, {}};  // 32 MiB
  model_ = make_model(3, specs);
  start(setup);
  const auto resident = [] {
    std::ifstream in("/proc/self/statm");
    std::uint64_t all = 0;
    std::uint64_t pages = 0;
    in >> all >> pages;
    return pages * 4096;
  };
  const std::uint64_t model = model_.layout->half_bytes();
  pull_and_commit();
  step(0.01);
  step(0.01);
  {
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    ASSERT_EQ((*staged)->report().mode, PullMode::full);
    ASSERT_TRUE((*staged)->commit().ok());
    const std::uint64_t with_undo_log = resident();
    staged->reset();
    EXPECT_LT(resident() + model * 9 / 10, with_undo_log) << "the undo log ended with the update";
  }
  ASSERT_FALSE(roll_back(*receiver_->target()).ok());
  step(0.01);
  auto first = pull();
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE((*first)->commit().ok());
  step(0.01);
  auto second = pull();  // ends the first one's undo log, though the object lives
  ASSERT_TRUE(second.ok());
  EXPECT_EQ((*second)->report().mode, PullMode::delta);
  ASSERT_FALSE(roll_back(*receiver_->target()).ok());
  ASSERT_TRUE((*second)->commit().ok());
  expect_holds_newest();
}

TEST_F(PullTest, ACommitWithoutTimeCanBeTriedAgain) {
  start();
  auto staged = pull();
  ASSERT_TRUE(staged.ok());
  EXPECT_EQ((*staged)->commit(in_ms(0)).error().code(), Errc::timed_out);
  EXPECT_FALSE(receiver_->current().has_value());
  ASSERT_TRUE((*staged)->commit(in_ms(60'000)).ok());
  expect_holds_newest();
}

TEST_F(PullTest, FullOverLiveRefused) {
  FakeAgent::Setup setup;
  setup.ring_deltas = 0;
  options_.full_update_policy = FullUpdatePolicy::refuse;
  start(setup);
  pull_and_commit();
  const auto before = agent_->newest();
  step();
  auto staged = pull();
  ASSERT_FALSE(staged.ok());
  EXPECT_EQ(staged.error().code(), Errc::no_space);
  expect_memory(before);
  EXPECT_EQ(agent_->live_plans(), 0u) << "a plan that leads nowhere keeps its lease";
}

TEST_F(PullTest, FullInPlace) {
  FakeAgent::Setup setup;
  setup.ring_deltas = 0;
  options_.full_update_policy = FullUpdatePolicy::in_place;
  start(setup);
  pull_and_commit();
  step();
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  EXPECT_FALSE(receiver_->current().has_value());
  ASSERT_TRUE((*staged)->commit().ok());
  expect_holds_newest();
}

TEST_F(PullTest, ADeltaThatTakesTooMuchMemoryBecomesAFullUpdate) {
  options_.delta_bytes_max = 4096;
  start();
  pull_and_commit();
  step(0.01, "large");
  const PullReport report = pull_and_commit();
  EXPECT_EQ(report.mode, PullMode::full);
  EXPECT_EQ(report.replans, 1u);
  EXPECT_EQ(agent_->requests(wire::Type::get_frames), 0u);
  model_.half[model_.layout->tensors()[tensor("big.0")].offset] ^= std::byte{1};
  agent_->publish(model_.half);
  EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
  // A past version has no half any more.
  step(0.01, "past");
  step(0.01, "newest");
  EXPECT_EQ(pull_and_commit({.label = "past"}).mode, PullMode::delta);
}

TEST_F(PullTest, ADeltaLargerThanTheModel) {
  FakeAgent::Setup setup;
  setup.large_deltas = true;
  start(setup);
  pull_and_commit();
  const auto before = agent_->newest();
  for (int i = 0; i < 12; ++i) step(1.0, i == 10 ? "second" : "");
  auto newest = pull();
  ASSERT_FALSE(newest.ok());
  EXPECT_EQ(newest.error().code(), Errc::protocol) << newest.error().to_string();
  auto named = pull({.label = "second"});
  ASSERT_FALSE(named.ok());
  EXPECT_EQ(named.error().code(), Errc::no_space) << named.error().to_string();
  EXPECT_EQ(agent_->requests(wire::Type::get_frames), 0u);
  expect_memory(before);
}

TEST_F(PullTest, OneStreamAndMany) {
  for (const unsigned streams : {1u, 2u, 9u}) {
    options_.streams = streams;
    start();
    pull_and_commit();
    step(0.05);
    pull_and_commit();
    receiver_.reset();
  }
  options_.streams = 0;
  EXPECT_EQ(receiver::ReceiverImpl::connect(options_, quick(), in_ms(100)).error().code(), Errc::invalid_argument);
}

TEST_F(PullTest, ThreadsAsAsked) {
  const auto named = [](const std::string& name) {
    std::size_t n = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::ifstream in(task.path() / "comm");
      std::string comm;
      in >> comm;
      n += comm.rfind(name, 0) == 0 ? 1 : 0;
    }
    return n;
  };
  options_.threads = 5;
  options_.streams = 3;
  start();
  pull_and_commit();
  step(0.05);
  step(0.05);
  pull_and_commit();
  // The kernel lists threads of the test before for a moment longer than their join() takes.
  EXPECT_TRUE(eventually([&] { return named("ds-receiver") == 4u; })) << "the caller is the fifth";
  EXPECT_TRUE(eventually([&] { return named("ds-stream") == 2u; }));
  options_.threads = 257;
  EXPECT_EQ(receiver::ReceiverImpl::connect(options_, quick(), in_ms(100)).error().code(), Errc::invalid_argument);
}

TEST_F(PullTest, EveryDtypeAndSeed) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    model_ = make_model(seed);
    start();
    pull_and_commit();
    for (int i = 0; i < 3; ++i) {
      step(0.01 * static_cast<double>(1 + 10 * i));
      pull_and_commit();
    }
    receiver_.reset();
  }
}

TEST_F(PullTest, SideFilesThatChangeAreNeverMixedWithOldOnes) {
  TempDir dir;
  const auto out = dir.path() / "out";
  const auto bind_directory = [&] {
    auto target = make_hf_target(receiver_->layout(), receiver_->sidecar(), out);
    ASSERT_TRUE(target.ok()) << target.error().to_string();
    ASSERT_TRUE(receiver_->bind(std::move(*target), in_ms(60'000)).ok());
  };
  const auto commit_next = [&] {
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    ASSERT_TRUE((*staged)->commit().ok());
  };
  Sidecar sidecar = awkward_sidecar(*model_.layout);
  agent_ = std::make_unique<FakeAgent>(model_.layout);
  agent_->change_sidecar(sidecar);
  agent_->publish(model_.half);
  connect();
  bind_directory();
  commit_next();
  step();
  commit_next();
  const auto before = model_.half;
  EXPECT_EQ(compare_directory(out / "current", *model_.layout, sidecar, before), "");

  const Sidecar old = sidecar;
  sidecar.others[0].bytes.push_back(std::byte{'x'});
  sidecar.others.push_back({"chat_template.jinja", {std::byte{'y'}}});
  agent_->change_sidecar(sidecar);
  step();
  for (int i = 0; i < 2; ++i) {
    auto mixed = pull();
    ASSERT_FALSE(mixed.ok());
    EXPECT_EQ(mixed.error().code(), Errc::layout_mismatch) << mixed.error().to_string();
    EXPECT_NE(mixed.error().message().find("chat_template.jinja, " + sidecar.others[0].name), std::string::npos)
        << mixed.error().message();
    EXPECT_EQ(compare_directory(out / "current", *model_.layout, old, before), "");
  }
  receiver_.reset();
  connect();
  bind_directory();
  commit_next();
  EXPECT_EQ(compare_directory(out / "current", *model_.layout, sidecar, model_.half), "");
}

TEST_F(PullTest, MetadataCrossesOnce) {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 20'000; ++i) {
    TensorSpec s;
    s.name = "layers." + std::to_string(i) + ".weight";
    s.shape = {8, 16};
    specs.push_back(s);
  }
  model_ = make_model(3, specs);
  start();
  pull_and_commit();
  model_.half[model_.layout->tensors()[777].offset] ^= std::byte{1};
  agent_->publish(model_.half);
  const PullReport report = pull_and_commit();
  EXPECT_EQ(report.mode, PullMode::delta);
  EXPECT_EQ(report.changed, 1u);
  EXPECT_EQ(report.tiles, 1u);
  EXPECT_LT(report.metadata_bytes, 1024u);
}

TEST(ReceiverConnect, BadEndpoints) {
  for (const char* endpoint : {"", "localhost", "host:", ":1", "host:0", "host:70000", "host:12x"}) {
    ReceiverOptions options;
    options.endpoint = endpoint;
    auto made = Receiver::connect(options, in_ms(200));
    ASSERT_FALSE(made.ok()) << endpoint;
    EXPECT_EQ(made.error().code(), Errc::invalid_argument) << made.error().to_string();
  }
}

}  // namespace
}  // namespace deltasync::test
