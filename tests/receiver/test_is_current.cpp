// Whether what is staged is still what is asked for: one question, after which everything is as it was.
#include "deltasync/receiver.hpp"

#include <thread>

#include "base/call_context.hpp"
#include "tests/receiver/pull_fixture.hpp"

namespace deltasync::test {
namespace {

Want number(std::uint64_t n) {
  return {.number = n};
}
Want label(const std::string& text) {
  return {.label = text};
}

class StillWanted : public PullTest {
 protected:
  /// Version 1 is committed and 2, "two", is staged.
  void SetUp() override {
    PullTest::SetUp();
    start();
    pull_and_commit();
    step(0.01, "two");
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    staged_ = std::move(*staged);
  }
  Result<bool> wanted(const Want& want, int ms = 60'000) { return receiver_->is_current(*staged_, want, in_ms(ms)); }
  void expect(const Want& want, bool expected) {
    const auto answer = wanted(want);
    ASSERT_TRUE(answer.ok()) << answer.error().to_string();
    EXPECT_EQ(*answer, expected);
  }
  void expect_commits() {
    const Status committed = staged_->commit();
    ASSERT_TRUE(committed.ok()) << committed.error().to_string();
    EXPECT_EQ(receiver_->current(), staged_->report().version);
    expect_memory(two_);
  }

  std::unique_ptr<StagedUpdate> staged_;
  std::vector<std::byte> two_ = {};
};

TEST_F(StillWanted, ByItsNumberAndItsLabel) {
  two_ = agent_->newest();
  const std::uint64_t extents = agent_->extent_bytes();
  const std::uint64_t frames = agent_->requests(wire::Type::get_frames);
  expect(number(2), true);
  expect(label("two"), true);
  expect(number(1), false);
  expect(label("one"), false);
  EXPECT_EQ(agent_->extent_bytes(), extents);
  EXPECT_EQ(agent_->requests(wire::Type::get_frames), frames);
  EXPECT_EQ(agent_->live_plans(), 0U) << "a question leaves no plan behind";
  expect_commits();
}

TEST_F(StillWanted, WhenANewerOneIsThere) {
  two_ = agent_->newest();
  step(0.01, "three");
  expect(number(2), true);
  expect(number(3), false);
  EXPECT_EQ(agent_->live_plans(), 0U);
  expect_commits();
}

TEST_F(StillWanted, NotWhatIsStillToCome) {
  two_ = agent_->newest();
  expect(number(3), false);
  expect(label("three"), false);
  expect_commits();
}

TEST_F(StillWanted, NotOfTheTrainerBefore) {
  agent_->new_trainer();
  expect(number(2), false);  // it has none yet
  step(0.5, "one");
  step(0.5, "two");
  expect(number(2), false);
  expect(label("two"), false);
  EXPECT_EQ(agent_->live_plans(), 0U);
  staged_.reset();
  EXPECT_EQ(pull_and_commit(number(2)).mode, PullMode::full);
}

TEST_F(StillWanted, OverABrokenConnection) {
  two_ = agent_->newest();
  agent_->restart();
  expect(number(2), true);
  const std::uint64_t before = agent_->requests(wire::Type::plan);
  agent_->on_request(fault_on(wire::Type::plan, Fault::drop, before, 2));
  expect(number(2), true);
  EXPECT_EQ(agent_->requests(wire::Type::plan), before + 3);
  expect_commits();
}

TEST_F(StillWanted, EndsByItsDeadlineAndByAStop) {
  two_ = agent_->newest();
  agent_->on_request(fault_on(wire::Type::plan, Fault::stall, 0, kAlways));
  const auto late = wanted(number(2), 200);
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Errc::timed_out);
  const std::uint64_t before = agent_->requests(wire::Type::plan);
  std::stop_source stop;
  std::thread caller([&] {
    while (agent_->requests(wire::Type::plan) == before) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    stop.request_stop();
  });
  const auto stopped = receiver_->is_current(*staged_, number(2), CallContext(in_ms(60'000), stop.get_token()));
  caller.join();
  ASSERT_FALSE(stopped.ok());
  EXPECT_EQ(stopped.error().code(), Errc::cancelled);
  agent_->on_request({});
  expect(number(2), true);
  expect_commits();
}

TEST_F(StillWanted, OnlyOfWhatIsStaged) {
  const auto kind = wanted({});
  ASSERT_FALSE(kind.ok());
  EXPECT_EQ(kind.error().code(), Errc::invalid_argument);
  auto later = pull();
  ASSERT_TRUE(later.ok()) << later.error().to_string();
  const auto overtaken = wanted(number(2));
  ASSERT_FALSE(overtaken.ok());
  EXPECT_EQ(overtaken.error().code(), Errc::invalid_argument);
  const auto answer = receiver_->is_current(**later, number(2), in_ms(60'000));
  ASSERT_TRUE(answer.ok()) << answer.error().to_string();
  EXPECT_TRUE(*answer);
}

}  // namespace
}  // namespace deltasync::test
