// Two agents with the same versions: a receiver whose agent falls silent, or is gone amid a transfer, goes on at the
// other one from what it holds, long before any limit of a receiver that has one agent only.
#include <chrono>
#include <string>
#include <thread>

#include "tests/receiver/pull_fixture.hpp"

namespace deltasync::test {
namespace {

using wire::Type;
using Seconds = std::chrono::duration<double>;

constexpr std::uint64_t kEpoch = 77;

class NextAgent : public PullTest {
 protected:
  static FakeAgent::Setup setup(std::uint64_t instance) {
    FakeAgent::Setup setup;
    setup.epoch = kEpoch;
    setup.instance = instance;
    return setup;
  }
  static receiver::Tuning tuning() {
    receiver::Tuning t = quick();
    t.handshake = t.silence = std::chrono::seconds(50);  // where there is one agent
    t.patience = std::chrono::seconds(2);
    return t;
  }
  void start_both(receiver::Tuning with = tuning(), double bytes_per_s = 0) {
    FakeAgent::Setup first = setup(1);
    first.bytes_per_s = bytes_per_s;
    agent_ = std::make_unique<FakeAgent>(model_.layout, first);
    other_ = std::make_unique<FakeAgent>(model_.layout, setup(2));
    agent_->publish(model_.half);
    other_->publish(model_.half);
    options_.endpoint = agent_->endpoint() + "," + other_->endpoint();
    auto made = receiver::ReceiverImpl::connect(options_, with, in_ms(60'000));
    ASSERT_TRUE(made.ok()) << made.error().to_string();
    receiver_ = std::move(*made);
    bind();
  }
  void step_both() {
    step();
    other_->publish(model_.half);
  }
  /// The newest version, from the other agent.
  PullReport pull_there(PullMode mode) {
    const auto began = std::chrono::steady_clock::now();
    auto staged = pull();
    const double took_s = Seconds(std::chrono::steady_clock::now() - began).count();
    EXPECT_TRUE(staged.ok()) << staged.error().to_string();
    if (!staged) return {};
    EXPECT_TRUE((*staged)->commit());
    EXPECT_EQ((*staged)->report().mode, mode);
    EXPECT_EQ(receiver_->agent_instance(), 2u);
    EXPECT_LT(took_s, 40.0) << "as if there was no other agent";
    EXPECT_EQ(receiver_->current(), other_->newest_version());
    expect_memory(other_->newest());
    return (*staged)->report();
  }
  void silent_on(Type type, std::uint64_t first = 0) {
    agent_->on_request(fault_on(type, Fault::stall, agent_->requests(type) + first, kAlways));
  }

  std::unique_ptr<FakeAgent> other_;
};

TEST_F(NextAgent, OneThatFallsSilentBeforeAPlan) {
  start_both();
  pull_and_commit();
  step_both();
  silent_on(Type::plan);
  pull_there(PullMode::delta);
}

TEST_F(NextAgent, OneThatFallsSilentInADelta) {
  start_both();
  pull_and_commit();
  step_both();
  silent_on(Type::get_frames);
  pull_there(PullMode::delta);
}

TEST_F(NextAgent, OneThatFallsSilentInAFullUpdate) {
  start_both();
  silent_on(Type::get_extent, 12);
  const PullReport report = pull_there(PullMode::full);
  EXPECT_LT(other_->extent_bytes(), model_.half.size()) << "what was there came once more";
  EXPECT_GE(report.replans, 1u);
}

TEST_F(NextAgent, OneThatIsGoneInAFullUpdate) {
  start_both();
  std::thread end;
  agent_->on_request([&](const Request& r) {
    if (r.type == Type::get_extent && r.ordinal == 12) end = std::thread([this] { agent_.reset(); });
    return r.type == Type::get_extent && r.ordinal >= 12 ? Fault::stall : Fault::none;
  });
  pull_there(PullMode::full);
  end.join();
}

TEST_F(NextAgent, OneThatDoesNotTakeANewConnection) {
  start_both();
  pull_and_commit();
  step_both();
  agent_->on_request([](const Request& r) { return r.type == Type::hello ? Fault::stall : Fault::none; });
  agent_->restart();  // and closes the ones that there are
  pull_there(PullMode::delta);
}

/// A word now and then is enough, however long the answer takes, and a pause that is shorter than the patience is none.
TEST_F(NextAgent, ASlowOneIsNotLeft) {
  receiver::Tuning t = tuning();
  t.wait_slice = std::chrono::seconds(4);
  start_both(t);
  pull_and_commit();
  const auto waited = pull({.newer = true, .wait_max = std::chrono::milliseconds(10)});
  ASSERT_FALSE(waited.ok());
  EXPECT_EQ(waited.error().code(), Errc::timed_out);
  EXPECT_EQ(receiver_->agent_instance(), 1u);
  step_both();
  agent_->on_request([](const Request& r) {
    if (r.type == Type::get_frames) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    return Fault::none;
  });
  EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
  EXPECT_EQ(receiver_->agent_instance(), 1u);
}

/// It says something on its other connections.
TEST_F(NextAgent, AStreamThatStandsStillIsNoSilentAgent) {
  receiver::Tuning t = tuning();
  t.silence = std::chrono::seconds(4);
  start_both(t, 1e6);
  agent_->on_request(fault_on(Type::get_extent, Fault::stall, 3));
  EXPECT_EQ(pull_and_commit().stream_restarts, 1u);
  EXPECT_EQ(receiver_->agent_instance(), 1u);
}

/// Where both are slower than the patience, it grows until one of them is heard out.
TEST_F(NextAgent, WhereBothAreSlowOneIsHeardOut) {
  receiver::Tuning t = tuning();
  t.patience = std::chrono::milliseconds(100);
  start_both(t);
  const auto slow = [](const Request& r) {
    if (r.type == Type::plan) std::this_thread::sleep_for(std::chrono::milliseconds(700));
    return Fault::none;
  };
  agent_->on_request(slow);
  other_->on_request(slow);
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  EXPECT_LE(agent_->requests(Type::plan) + other_->requests(Type::plan), 8u);
}

/// What it holds by then is no reason to wait for the preferred one to have it, too: that may never be.
TEST_F(NextAgent, ThePreferredOneThatIsBehindIsNotGoneBackTo) {
  receiver::Tuning t = tuning();
  t.preferred_look = t.lately = std::chrono::milliseconds(50);
  start_both(t);
  pull_and_commit();
  silent_on(Type::plan);
  mutate(model_.half, *model_.layout, 0.01, ++seed_);
  other_->publish(model_.half);
  pull_there(PullMode::delta);
  agent_->on_request(nullptr);
  for (int version = 0; version < 5; ++version) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    mutate(model_.half, *model_.layout, 0.01, ++seed_);
    other_->publish(model_.half);
    pull_there(PullMode::delta);
  }
}

/// A trainer that began again elsewhere is the one to follow, however lately the one before it is served again.
class ThePreferredOneOfAnOlderTrainer : public NextAgent {
 protected:
  void replace_trainer() {
    receiver::Tuning t = tuning();
    t.preferred_look = std::chrono::milliseconds(50);
    start_both(t);
    pull_and_commit();
    FakeAgent::Setup again = setup(3);
    again.port = net::parse_endpoint(agent_->endpoint())->port;
    agent_.reset();
    other_->new_trainer();
    other_->publish(model_.half);
    pull_there(PullMode::full);
    agent_ = std::make_unique<FakeAgent>(model_.layout, again);
    mutate(model_.half, *model_.layout, 0.01, ++seed_);
    agent_->publish(model_.half);
    ASSERT_LT(agent_->newest_version().id.epoch, receiver_->current()->id.epoch);
  }
};

TEST_F(ThePreferredOneOfAnOlderTrainer, IsNotGoneBackTo) {
  replace_trainer();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  pull_there(PullMode::up_to_date);
}

TEST_F(ThePreferredOneOfAnOlderTrainer, IsLeftAgainByWhoConnectsThere) {
  replace_trainer();
  const std::uint64_t asked = agent_->requests(Type::plan);
  other_->restart();  // ends the connections
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  EXPECT_GT(agent_->requests(Type::plan), asked) << "it is the preferred one";
  EXPECT_EQ((*staged)->report().mode, PullMode::up_to_date);
  EXPECT_EQ(receiver_->current(), other_->newest_version());
}

/// Who is left with it follows it.
TEST_F(ThePreferredOneOfAnOlderTrainer, IsFollowedWhereNoOtherIsThere) {
  replace_trainer();
  other_.reset();
  EXPECT_EQ(pull_and_commit().mode, PullMode::full);
  EXPECT_EQ(receiver_->agent_instance(), 3u);
}

/// Whatever holds up who brings its versions: it is there, and answers.
TEST_F(NextAgent, OneThatHasNothingNewerForLongIsLeft) {
  receiver::Tuning t = tuning();
  t.others_look = std::chrono::milliseconds(300);
  start_both(t);
  pull_and_commit();
  const auto nothing = pull({.newer = true}, 1'000);
  ASSERT_FALSE(nothing.ok());
  EXPECT_NE(receiver_->agent_instance(), 2u) << "it has nothing newer";
  mutate(model_.half, *model_.layout, 0.01, ++seed_);
  other_->publish(model_.half);
  auto staged = pull({.newer = true}, 20'000);
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  ASSERT_TRUE((*staged)->commit());
  EXPECT_EQ(receiver_->agent_instance(), 2u);
  EXPECT_EQ(receiver_->current(), other_->newest_version());
  expect_memory(other_->newest());
}

/// Who asks for what is newest, again and again, does not wait.
TEST_F(NextAgent, WhatIsNewestThereIsNotTakenForTheNewestForLong) {
  receiver::Tuning t = tuning();
  t.others_look = std::chrono::milliseconds(300);
  start_both(t);
  pull_and_commit();
  mutate(model_.half, *model_.layout, 0.01, ++seed_);
  other_->publish(model_.half);
  const Deadline limit = in_ms(20'000);
  while (receiver_->current() != other_->newest_version() && !limit.passed()) {
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    ASSERT_TRUE((*staged)->commit());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_EQ(receiver_->agent_instance(), 2u);
  expect_memory(other_->newest());
}

/// One that wants another token, say, is no reason to fail while another one is there.
TEST_F(NextAgent, OneThatRefusesForGood) {
  start_both();
  pull_and_commit();
  FakeAgent::Setup strict = setup(3);
  strict.port = net::parse_endpoint(agent_->endpoint())->port;
  strict.token = "0123456789abcdef";
  agent_.reset();
  agent_ = std::make_unique<FakeAgent>(model_.layout, strict);
  mutate(model_.half, *model_.layout, 0.01, ++seed_);
  other_->publish(model_.half);
  pull_there(PullMode::delta);

  const auto began = std::chrono::steady_clock::now();
  other_.reset();
  const auto refused = pull();
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::unauthenticated) << refused.error().to_string();
  EXPECT_LT(Seconds(std::chrono::steady_clock::now() - began).count(), 40.0) << "no other try would help";
}

/// Words that an answer comes are no answer, however many there are.
TEST_F(NextAgent, OneThatOnlySaysThatAnAnswerComes) {
  start_both();
  pull_and_commit();
  step_both();
  agent_->on_request(fault_on(Type::plan, Fault::chatter, agent_->requests(Type::plan), kAlways));
  const auto began = std::chrono::steady_clock::now();
  const auto staged = pull({}, 3'000);
  ASSERT_FALSE(staged.ok());
  EXPECT_EQ(staged.error().code(), Errc::timed_out) << staged.error().to_string();
  EXPECT_LT(Seconds(std::chrono::steady_clock::now() - began).count(), 30.0);
}

/// It goes back to the preferred one; if that falls silent again and again, more seldom each time.
TEST_F(NextAgent, ThePreferredOneThatComesAndGoesIsLeftAloneForLonger) {
  receiver::Tuning t = tuning();
  t.patience = std::chrono::milliseconds(300);
  t.preferred_look = std::chrono::milliseconds(500);
  start_both(t);
  pull_and_commit();
  const auto pull_for = [&](double seconds) {
    const auto began = std::chrono::steady_clock::now();
    while (Seconds(std::chrono::steady_clock::now() - began).count() < seconds) {
      ASSERT_TRUE(pull().ok());
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  };
  silent_on(Type::plan);
  const auto before = agent_->requests(Type::plan);
  pull_for(8);
  const auto asked = agent_->requests(Type::plan) - before;
  EXPECT_GE(asked, 2u) << "it never came back";
  EXPECT_LE(asked, 6u);
  agent_->on_request(nullptr);
  pull_for(8.5);
  EXPECT_EQ(receiver_->agent_instance(), 1u);
}

}  // namespace
}  // namespace deltasync::test
