// Deltas stream through relays: who holds what a relay's agent serves has frames of the next version before the relay
// has them all, and need not wait for the relay's commit. Whatever happens to one of them meanwhile, all end with the
// trainer's bytes.
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "agent/versions/delta_arrival.hpp"
#include "base/hash.hpp"
#include "tests/receiver/targets/segment/relay_hop.hpp"
#include "tests/support/log_lines.hpp"
#include "tests/support/rationed_link.hpp"

namespace deltasync::agent {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kAllBytes = std::size_t{1} << 40;
constexpr double kDensity = 0.6;                    ///< a delta of several requests
constexpr std::size_t kSomeBytes = 2'500'000;       ///< of it, more than one request's
constexpr std::uint64_t kMoreThanWords = 1u << 20;  ///< frames, and not what is said beside them

class RelayDeltaArrival : public ReceiverTest {
 protected:
  RelayDeltaArrival() {
    model_ = test::make_model(3, {{"w", Dtype::bf16, {8192, 1024}, {}, {}}});  // 16 MiB
    options_.core.ring_bytes_max = 256u << 20;
    options_.pull.listen.port = port_.number();
  }
  void SetUp() override {
    start_agent();
    next_version();
    link_ = std::make_unique<test::RationedLink>(port());
    link_->grant(kAllBytes);
  }
  ~RelayDeltaArrival() override {
    link_->grant(kAllBytes);
    if (child_.joinable()) child_.join();
  }

  /// It holds what the hop serves.
  void connect_child(const std::string& from, const std::vector<Slice>& slices = {}) {
    ReceiverOptions options;
    options.endpoint = from;
    options.streams = 2;
    auto receiver = Receiver::connect(options, test_deadline());
    ASSERT_TRUE(receiver) << receiver.error().to_string();
    receiver_ = std::move(*receiver);
    auto target = make_host_target(model_.layout);
    const Status bound = slices.empty() ? receiver_->bind(std::move(target), test_deadline())
                                        : receiver_->bind(std::move(target), slices, test_deadline());
    ASSERT_TRUE(bound) << bound.error().to_string();
    ASSERT_EQ(pull(*receiver_).version.id.number, number_);
  }
  void child_pulls() {
    child_ = std::thread([this] {
      auto staged = receiver_->pull(Want{.newer = true}, test_deadline());
      ASSERT_TRUE(staged) << staged.error().to_string();
      ASSERT_TRUE((*staged)->commit());
      report_ = (*staged)->report();
    });
  }
  void child_has_newest() {
    child_.join();
    EXPECT_EQ(receiver_->current()->id.number, number_);
    EXPECT_EQ(report_.mode, PullMode::delta);
    EXPECT_TRUE(held(*receiver_) == model_.half);
  }
  bool serves_newest(const Hop& hop) const {
    return becomes([&] { return number_of(hop) == number_ && hop.now()->served->root == served()->root; });
  }
  static std::uint64_t number_of(const Hop& hop) {
    const SnapshotPtr now = hop.now();
    return now->served ? now->served->version.id.number : 0;
  }
  static bool becomes(const std::function<bool()>& condition) { return eventually(condition); }
  /// The hop serves version 1, the child holds it, and of version 2 the relay gets some frames.
  void some_comes(Hop& hop, const std::vector<Slice>& slices = {}) {
    ASSERT_TRUE(serves_newest(hop));
    connect_child(hop.endpoint(), slices);
    link_->withdraw();
    next_version(kDensity);
    child_pulls();
    link_->grant(kSomeBytes);
  }

  const test::HeldPort port_;
  std::unique_ptr<test::RationedLink> link_;
  std::unique_ptr<Receiver> receiver_;
  PullReport report_;
  std::thread child_;
};

TEST_F(RelayDeltaArrival, AChildHasFramesBeforeTheRelayHasThemAll) {
  Hop hop(link_->endpoint());
  some_comes(hop);
  ASSERT_TRUE(becomes([&] { return hop.frame_bytes_sent() > kMoreThanWords; }));
  EXPECT_EQ(number_of(hop), 1u);
  link_->grant(kAllBytes);
  child_has_newest();
  EXPECT_EQ(report_.replans, 0u);
  EXPECT_TRUE(serves_newest(hop));
  EXPECT_TRUE(becomes([&] { return hop.now()->ahead == nullptr; }));
}

/// What is held is later than what is served, for as long as that lasts.
TEST_F(RelayDeltaArrival, AChildNeedNotWaitForTheRelaysCommit) {
  Hop hop(link_->endpoint());
  ASSERT_TRUE(serves_newest(hop));
  connect_child(hop.endpoint());
  hop.hold_commits(true);
  next_version();
  child_pulls();
  child_has_newest();
  EXPECT_EQ(number_of(hop), 1u);
  EXPECT_EQ(hop.core().versions().behind({epoch_, 2}), Behind());
  EXPECT_EQ(receiver_->pull(Want{}, test_deadline()).value()->report().mode, PullMode::up_to_date);
  hop.hold_commits(false);
  EXPECT_TRUE(serves_newest(hop));
  next_version();
  child_pulls();
  child_has_newest();
}

TEST_F(RelayDeltaArrival, AChainPassesFramesOnBeforeItsFirstHasThemAll) {
  Hop first(link_->endpoint());
  Hop second(first.endpoint());
  Hop third(second.endpoint());
  some_comes(third);
  ASSERT_TRUE(becomes([&] { return third.frame_bytes_sent() > kMoreThanWords; }));
  EXPECT_EQ(number_of(first), 1u);
  link_->grant(kAllBytes);
  child_has_newest();
  for (const Hop* hop : {&first, &second, &third}) EXPECT_TRUE(serves_newest(*hop));
}

/// How much of the delta is theirs is known once all of it is there.
TEST_F(RelayDeltaArrival, AChildOfSlicesWaitsForTheRelay) {
  Hop hop(link_->endpoint());
  const Slice theirs = *row_slice(*model_.layout, "w", 1, 4);
  some_comes(hop, {theirs});
  ASSERT_TRUE(becomes([&] { return hop.now()->ahead && hop.now()->ahead->arriving->tiles_settled() > 0; }));
  EXPECT_EQ(hop.frame_bytes_sent(), 0u);
  link_->grant(kAllBytes);
  child_.join();
  EXPECT_EQ(report_.mode, PullMode::delta);
  EXPECT_EQ(receiver_->current()->id.number, number_);
}

TEST_F(RelayDeltaArrival, WhoHoldsAnotherVersionGetsWhatIsServed) {
  Hop hop(link_->endpoint());
  ASSERT_TRUE(serves_newest(hop));
  link_->withdraw();
  next_version(kDensity);
  link_->grant(kSomeBytes);
  ASSERT_TRUE(becomes([&] { return hop.now()->ahead != nullptr; }));
  auto client = Client::connect(hop.port(), wire::Role::control);
  ASSERT_TRUE(client);
  wire::PlanRequest question = ask();
  EXPECT_EQ(client->plan(question)->target.id.number, 1u) << "who has nothing";
  question.base = {epoch_, 1};
  question.base_root = hop.now()->served->root;
  EXPECT_EQ(client->plan(question)->target.id.number, 2u);
  question.compact = 1;
  EXPECT_EQ(client->plan(question)->mode, wire::PlanMode::up_to_date) << "who wants another form";
  question.compact = 0;
  question.base_root.bytes[0] ^= 1;
  EXPECT_EQ(client->plan(question)->target.id.number, 1u) << "who has other bytes";
}

TEST_F(RelayDeltaArrival, TheRelayDiesInTheMiddle) {
  Hop hop(link_->endpoint());
  some_comes(hop);
  ASSERT_TRUE(becomes([&] { return hop.frame_bytes_sent() > kMoreThanWords; }));
  hop.end_relay();
  EXPECT_TRUE(becomes([&] { return hop.now()->ahead == nullptr; }));
  EXPECT_TRUE(becomes([&] { return hop.core().open_plans().list().empty(); }));
  link_->grant(kAllBytes);
  hop.start_relay(link_->endpoint());
  child_has_newest();
  EXPECT_GT(report_.replans, 0u);
}

TEST_F(RelayDeltaArrival, TheNodesAgentDiesInTheMiddle) {
  Hop hop(link_->endpoint());
  some_comes(hop);
  ASSERT_TRUE(becomes([&] { return hop.frame_bytes_sent() > kMoreThanWords; }));
  hop.start_agent();
  link_->grant(kAllBytes);
  child_has_newest();
  EXPECT_TRUE(serves_newest(hop));
}

TEST_F(RelayDeltaArrival, TheAgentAboveDiesInTheMiddle) {
  Hop hop(link_->endpoint());
  some_comes(hop);
  ASSERT_TRUE(becomes([&] { return hop.frame_bytes_sent() > kMoreThanWords; }));
  writer_.reset();
  stop_agent();
  start_agent();
  ASSERT_TRUE(becomes([&] { return served() != nullptr && served()->version.id.number == number_; }));
  link_->grant(kAllBytes);
  child_.join();
  EXPECT_EQ(receiver_->current()->id.number, number_);
  EXPECT_TRUE(held(*receiver_) == model_.half);
}

/// Its children wait for the commit; and may ask for the whole model meanwhile.
TEST_F(RelayDeltaArrival, ARelayThatStandsStillIsWaitedForElsewhere) {
  test::LogLines log;
  Hop hop(link_->endpoint());
  some_comes(hop);
  ASSERT_TRUE(becomes([&] { return hop.now()->ahead != nullptr; }));
  ASSERT_TRUE(becomes([&] { return hop.now()->ahead == nullptr; })) << "five seconds without a frame";
  EXPECT_TRUE(log.has("delta_stands"));
  EXPECT_EQ(number_of(hop), 1u);
  link_->grant(kAllBytes);
  child_has_newest();
  EXPECT_LT(report_.replans, 20u) << "it waits, and does not ask again and again";
}

TEST_F(RelayDeltaArrival, NewerVersionsComeInTheMiddle) {
  Hop hop(link_->endpoint());
  some_comes(hop);
  ASSERT_TRUE(becomes([&] { return hop.frame_bytes_sent() > kMoreThanWords; }));
  for (int i = 0; i < 3; ++i) next_version();
  link_->grant(kAllBytes);
  child_.join();
  EXPECT_GE(receiver_->current()->id.number, 2u);
  while (receiver_->current()->id.number < number_) {
    child_pulls();
    child_.join();
    EXPECT_EQ(report_.mode, PullMode::delta);
  }
  EXPECT_TRUE(held(*receiver_) == model_.half);
  EXPECT_TRUE(serves_newest(hop));
}

/// It is what all words for it mean, though the agent serves the one before.
TEST_F(RelayDeltaArrival, WhatIsHeldIsUpToDate) {
  Hop hop(link_->endpoint());
  ASSERT_TRUE(serves_newest(hop));
  connect_child(hop.endpoint());
  hop.hold_commits(true);
  next_version();
  const Want second{.number = number_};
  auto staged = receiver_->pull(second, test_deadline());
  ASSERT_TRUE(staged) << staged.error().to_string();
  EXPECT_TRUE(receiver_->is_current(**staged, second, test_deadline()).value());
  ASSERT_TRUE((*staged)->commit());
  for (const Want& want : {Want{}, second}) {
    const auto again = receiver_->pull(want, test_deadline());
    ASSERT_TRUE(again) << again.error().to_string();
    EXPECT_EQ((*again)->report().mode, PullMode::up_to_date);
  }
  wire::PlanRequest question = ask();  // as of a receiver that takes what it gets
  question.base = {epoch_, number_};
  question.base_root = hop.now()->ahead->delta->to_root;
  EXPECT_EQ(Client::connect(hop.port(), wire::Role::control)->plan(question)->mode, wire::PlanMode::up_to_date);
  hop.hold_commits(false);
}

/// It does not go back to the one before.
TEST_F(RelayDeltaArrival, WhatIsHeldAndLostIsWaitedFor) {
  Hop hop(link_->endpoint());
  ASSERT_TRUE(serves_newest(hop));
  connect_child(hop.endpoint());
  hop.hold_commits(true);
  next_version();
  child_pulls();
  child_has_newest();
  receiver_->target()->invalidate();
  std::jthread later([&] {
    std::this_thread::sleep_for(500ms);
    hop.hold_commits(false);
  });
  ASSERT_EQ(pull(*receiver_).version.id.number, number_);
  EXPECT_TRUE(held(*receiver_) == model_.half);
}

/// The relay was not there any more to commit what it had handed on.
TEST_F(RelayDeltaArrival, ARelayThatGoesPastWhatItHandedOn) {
  Hop hop(link_->endpoint());
  ASSERT_TRUE(serves_newest(hop));
  connect_child(hop.endpoint());
  hop.hold_commits(true);
  next_version();
  child_pulls();
  child_has_newest();
  hop.end_relay();
  ASSERT_EQ(number_of(hop), 1u);
  next_version();
  hop.hold_commits(false);
  hop.start_relay(link_->endpoint());
  child_pulls();
  child_.join();
  EXPECT_EQ(receiver_->current()->id.number, number_);
  EXPECT_TRUE(held(*receiver_) == model_.half);
}

/// Once one receiver has found out it is offered to nobody any more.
TEST_F(RelayDeltaArrival, AWrongFrameEndsIt) {
  test::LogLines log;
  Hop hop(link_->endpoint());
  ASSERT_TRUE(serves_newest(hop));
  connect_child(hop.endpoint());
  hop.hold_commits(true);
  next_version(kDensity);
  ASSERT_TRUE(becomes([&] {
    const SnapshotPtr now = hop.now();
    return now->ahead && now->ahead->arriving->tiles_settled() == model_.layout->tile_count();
  }));
  for (const auto& piece : hop.now()->ahead->arriving->settled(0, model_.layout->tile_count()).pieces) {
    auto& wrong = const_cast<ArrivingDelta::Piece&>(*piece);
    wrong.frame.bytes.back() ^= std::byte{1};
    wrong.hash = xxh3_64(wrong.frame.bytes);
  }
  child_pulls();
  EXPECT_TRUE(becomes([&] { return log.has("delta_doubted"); }));
  EXPECT_EQ(hop.now()->ahead, nullptr);
  hop.hold_commits(false);
  child_has_newest();
}

TEST_F(RelayDeltaArrival, ADeltaWithoutFramesIsWhole) {
  test::LogLines log;
  Hop hop(link_->endpoint());
  ASSERT_TRUE(serves_newest(hop));
  connect_child(hop.endpoint());
  hop.hold_commits(true);
  next_version(0.0);
  child_pulls();
  child_has_newest();
  std::this_thread::sleep_for(6s);
  EXPECT_FALSE(log.has("delta_stands"));
  EXPECT_NE(hop.now()->ahead, nullptr);
  hop.hold_commits(false);
}

/// The relay's own deadline holds.
TEST_F(RelayDeltaArrival, AnAgentThatHangsHoldsNoPullUpForLong) {
  std::atomic<bool> hangs{false};
  Hop hop(link_->endpoint(), [&](AgentOptions& options) {
    options.net_threads = 1;
    options.core.before_plan_counts = [&] {
      while (hangs) std::this_thread::sleep_for(1ms);
    };
  });
  ASSERT_TRUE(serves_newest(hop));
  connect_child(hop.endpoint());
  hop.limit_pulls(1500ms);
  hangs = true;
  child_pulls();
  next_version(kDensity);
  const unsigned ended = hop.pulls_ended();
  EXPECT_TRUE(becomes([&] { return hop.pulls_ended() >= ended + 2; })) << "one that began since at least";
  hangs = false;
  hop.limit_pulls(30s);
  child_has_newest();
  EXPECT_TRUE(serves_newest(hop));
}

/// As a relay says it: of another epoch, from another state, twice the same tiles. Who asks for a part of a frame gets
/// that.
TEST_F(RelayDeltaArrival, TheAgentLooksAtWhatItIsTold) {
  Hop hop(link_->endpoint());
  ASSERT_TRUE(serves_newest(hop));
  connect_child(hop.endpoint());
  hop.hold_commits(true);
  next_version(kDensity);
  ASSERT_TRUE(becomes([&] {
    const SnapshotPtr now = hop.now();
    return now->ahead && now->ahead->arriving->tiles_settled() == model_.layout->tile_count();
  }));
  const std::uint64_t tiles = model_.layout->tile_count();
  const RingEntryPtr ahead = hop.now()->ahead;
  auto client = Client::connect(hop.port(), wire::Role::control);
  wire::PlanRequest question = ask();
  question.base = {epoch_, 1};
  question.base_root = hop.now()->served->root;
  const auto plan = client->plan(question);
  ASSERT_TRUE(plan);
  std::vector<std::uint64_t> got;
  for (const std::vector<wire::TileRange>& half : {std::vector<wire::TileRange>{{1, 5}}, {{5, tiles}}, {{0, 1}}}) {
    const auto frames = client->frames(wire::GetFrames{plan->plan, 0, half});
    ASSERT_TRUE(frames);
    for (const auto& frame : *frames) {
      const auto records = delta::parse_frame(*model_.layout, frame);
      ASSERT_TRUE(records);
      for (const delta::TileRecord& record : *records) {
        EXPECT_TRUE(record.tile >= half.front().first && record.tile < half.front().end);
        got.push_back(record.tile);
      }
    }
  }
  EXPECT_EQ(got.size(), tiles);

  VersionStore& versions = hop.core().versions();
  DeltaArrival arrival(versions);
  wire::TrainerDelta said{model_.layout->digest(), ahead->from, ahead->to, ahead->delta->from_root,
                          ahead->delta->to_root,   1,           1000,      10};
  ASSERT_TRUE(arrival.begin(7, model_.layout, said));
  EXPECT_NE(versions.snapshot()->ahead, nullptr);
  EXPECT_TRUE(arrival.take(7, {{0, 1}, {}}));
  EXPECT_EQ(arrival.take(7, {{0, 2}, {}}).error().code(), Errc::protocol);
  EXPECT_EQ(versions.snapshot()->ahead, nullptr) << "nothing of it counts any more";
  said.from_root.bytes[0] ^= 1;
  ASSERT_TRUE(arrival.begin(7, model_.layout, said));
  EXPECT_EQ(versions.snapshot()->ahead, nullptr) << "from other bytes";
  said.from_root = ahead->delta->from_root;
  said.to.id.epoch += 1;
  EXPECT_EQ(arrival.begin(7, model_.layout, said).error().code(), Errc::invalid_argument);
  EXPECT_EQ(versions.snapshot()->ahead, nullptr);
  hop.hold_commits(false);
}

}  // namespace
}  // namespace deltasync::agent
