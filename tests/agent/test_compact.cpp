// Receivers on slow links get deltas in exponent classes, made beside everything else and from the served half.
#include <algorithm>
#include <thread>

#include <nlohmann/json.hpp>

#include "agent/http/metrics_page.hpp"
#include "tests/agent/merges_fixture.hpp"

namespace deltasync::agent {
namespace {

class Compacts : public Merges {
 protected:
  void small_step(double density = 0.01) {
    test::step_small(model_.half, *model_.layout, density, ++seed_);
    const auto report = offload(*writer_, model_.half, ++number_);
    ASSERT_TRUE(report) << report.error().to_string();
  }
  void small_steps(int count) {
    for (int i = 0; i < count; ++i) small_step();
  }
  /// What the next small steps take as one delta.
  std::uint64_t plain_bytes_of(int steps) const {
    std::vector<std::byte> after = model_.half;
    for (int i = 1; i <= steps; ++i) {
      test::step_small(after, *model_.layout, 0.01, seed_ + static_cast<std::uint64_t>(i));
    }
    ThreadPool pool(1, "test");
    std::vector<std::uint64_t> digests(model_.layout->tile_count());
    return delta::encode(*model_.layout, model_.half, after, digests, {}, pool).frame_bytes;
  }
  /// From what is served now, over a slow link.
  Late slow_from_now() const {
    Late late = late_from_now();
    late.plan.compact = 1;
    return late;
  }
  /// The frames of a plan of one step.
  std::vector<std::vector<std::byte>> frames_of(const wire::PlanReply& reply) {
    auto stream = client(wire::Role::data);
    auto frames = stream.frames(wire::GetFrames{reply.plan, 0, {{0, model_.layout->tile_count()}}});
    EXPECT_TRUE(frames) << frames.error().to_string();
    return frames ? *frames : std::vector<std::vector<std::byte>>();
  }
  /// What an encoder makes that has both halves.
  delta::Delta independent(const Late& late) const {
    ThreadPool pool(1, "test");
    std::vector<std::uint64_t> digests = late.digests;
    const delta::Delta plain = delta::encode(*model_.layout, late.half, model_.half, digests, {}, pool);
    return delta::compact(*model_.layout, plain, late.half, pool).value();
  }
  void expect_frames(const wire::PlanReply& reply, const delta::Delta& expected) {
    const auto frames = frames_of(reply);
    ASSERT_EQ(frames.size(), expected.frames.size());
    for (std::size_t i = 0; i < frames.size(); ++i) EXPECT_TRUE(frames[i] == expected.frames[i].bytes) << i;
  }
  bool has_classes(const wire::PlanReply& reply) {
    for (const auto& frame : frames_of(reply)) {
      const auto records = delta::parse_frame(*model_.layout, frame).value();
      for (const auto& record : records) {
        if (record.codec == delta::Codec::rice_class) return true;
      }
    }
    return false;
  }

 private:
  std::uint64_t seed_ = 500;
};

TEST_F(Compacts, OneStepIsExactlyWhatBothHalvesGive) {
  merging_.go_on();
  model_ = test::make_model(3, {{"a", Dtype::bf16, {300, 500}, {}, {}}, {"b", Dtype::f32, {200, 300}, {}, {}}});
  start();
  const Late late = slow_from_now();
  small_step();
  auto c = client();
  const auto reply = c.plan(late.plan);
  ASSERT_TRUE(reply) << reply.error().to_string();
  ASSERT_EQ(reply->steps.size(), 1u);
  EXPECT_LT(reply->steps[0].frame_bytes, ring_bytes());
  const delta::Delta expected = independent(late);
  EXPECT_EQ(reply->steps[0].frame_bytes, expected.frame_bytes);
  EXPECT_EQ(reply->steps[0].changed, expected.changed);
  expect_frames(*reply, expected);
  expect_leads_there(late, *reply, model_.half);
  EXPECT_TRUE(agent_->core().leases().list().empty()) << "a writer would wait for it";

  EXPECT_EQ(metrics().compacts, 1u);
  EXPECT_EQ(metrics().compact_bytes, expected.frame_bytes);
  EXPECT_EQ(metrics().merges, 0u);
  const auto again = c.plan(late.plan);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->steps[0].frame_bytes, expected.frame_bytes);
  EXPECT_EQ(metrics().compacts, 1u) << "kept";
  EXPECT_EQ(metrics().merge_hits, 1u);
  const AgentParts parts{agent_->core(), agent_->pull_server(), nullptr, 1, std::chrono::steady_clock::now()};
  const auto page = nlohmann::json::parse(status_json(parts));
  EXPECT_EQ(page["merges"]["compact_made"], 1);
  EXPECT_EQ(page["merges"]["entries"][0]["compact"], true);
  EXPECT_EQ(page["merges"]["bytes"], expected.frame_bytes);
  EXPECT_NE(metrics_text(parts).find("deltasync_compacts_total 1\n"), std::string::npos);
}

TEST_F(Compacts, WhoDoesNotAskGetsThePlainOne) {
  merging_.go_on();
  start();
  Late late = slow_from_now();
  small_step();
  auto c = client();
  ASSERT_TRUE(c.plan(late.plan));
  late.plan.compact = 0;
  const auto reply = c.plan(late.plan);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->steps[0].frame_bytes, ring_bytes());
  EXPECT_FALSE(has_classes(*reply));
}

/// The merged delta is made on the way, and kept for those on fast links.
TEST_F(Compacts, AChainComesMergedAndCompact) {
  merging_.go_on();
  start();
  Late late = slow_from_now();
  small_steps(4);
  auto c = client();
  const auto reply = c.plan(late.plan);
  ASSERT_TRUE(reply) << reply.error().to_string();
  ASSERT_EQ(reply->steps.size(), 1u);
  EXPECT_TRUE(has_classes(*reply));
  expect_leads_there(late, *reply, model_.half);
  EXPECT_EQ(metrics().merges, 1u);
  EXPECT_EQ(metrics().compacts, 1u);
  late.plan.compact = 0;
  const auto plain = c.plan(late.plan);
  ASSERT_TRUE(plain);
  ASSERT_EQ(plain->steps.size(), 1u);
  EXPECT_GT(plain->steps[0].frame_bytes, reply->steps[0].frame_bytes);
  EXPECT_FALSE(has_classes(*plain));
  EXPECT_EQ(metrics().merges, 1u);
  EXPECT_EQ(agent_->core().deltas().info().entries.size(), 2u);
}

TEST_F(Compacts, ManyReceiversShareOne) {
  start();
  const Late late = slow_from_now();
  small_step();
  std::vector<Client> clients;
  for (int i = 0; i < 6; ++i) {
    clients.push_back(client());
    ASSERT_TRUE(clients.back().socket.send(50, late.plan, test_deadline()));
  }
  ASSERT_TRUE(merging_.reached());
  merging_.go_on();
  for (Client& c : clients) {
    const auto reply = c.socket.recv_as<wire::PlanReply>(50, test_deadline());
    ASSERT_TRUE(reply) << reply.error().to_string();
    EXPECT_TRUE(has_classes(*reply));
  }
  EXPECT_EQ(metrics().compacts, 1u);
  EXPECT_EQ(agent_->core().open_plans().list().size(), clients.size()) << "what was held while they waited";
}

/// It reads the whole model, a merge only what has changed.
TEST_F(Compacts, HoldUpNoMerge) {
  start();
  const Late slow = slow_from_now();
  small_steps(3);
  auto waiting = client();
  ASSERT_TRUE(waiting.socket.send(50, slow.plan, test_deadline()));
  ASSERT_TRUE(merging_.reached());  // and there it stands still
  Late fast = slow;
  fast.plan.compact = 0;
  auto c = client();
  const auto merged = c.plan(fast.plan);
  ASSERT_TRUE(merged) << merged.error().to_string();
  EXPECT_EQ(merged->steps.size(), 1u);
  expect_leads_there(fast, *merged, model_.half);
  merging_.go_on();
  const auto compact = waiting.socket.recv_as<wire::PlanReply>(50, test_deadline());
  ASSERT_TRUE(compact) << compact.error().to_string();
  EXPECT_TRUE(has_classes(*compact));
  expect_leads_there(slow, *compact, model_.half);
  EXPECT_EQ(metrics().merges, 1u) << "it is made of that merged one";
}

/// The merged delta that a compact one is made of comes from where all others come from.
TEST_F(Compacts, AChainThatIsWantedInBothFormsIsMergedOnce) {
  start();
  const Late slow = slow_from_now();
  small_steps(3);
  Late fast = slow;
  fast.plan.compact = 0;
  auto plain = client();
  ASSERT_TRUE(plain.socket.send(50, fast.plan, test_deadline()));
  ASSERT_TRUE(merging_.reached());  // and there the merge stands still
  auto compact = client();
  ASSERT_TRUE(compact.socket.send(50, slow.plan, test_deadline()));
  ASSERT_TRUE(eventually([&] { return agent_->core().deltas().info().wanted == 2; }));
  merging_.go_on();
  const auto merged = plain.socket.recv_as<wire::PlanReply>(50, test_deadline());
  ASSERT_TRUE(merged) << merged.error().to_string();
  EXPECT_FALSE(has_classes(*merged));
  expect_leads_there(fast, *merged, model_.half);
  const auto smaller = compact.socket.recv_as<wire::PlanReply>(50, test_deadline());
  ASSERT_TRUE(smaller) << smaller.error().to_string();
  EXPECT_TRUE(has_classes(*smaller));
  expect_leads_there(slow, *smaller, model_.half);
  EXPECT_EQ(metrics().merges, 1u);
  EXPECT_EQ(metrics().compacts, 1u);
}

/// However many are wanted: who comes too late for a compact one still gets a merge.
TEST_F(Compacts, HalfOfTheRequestsAreLeftToMerges) {
  constexpr std::size_t kCompactMax = 8;
  options_.pull.limits.merge_wait_max = std::chrono::hours(1);
  start();
  std::vector<Late> lates;
  for (std::size_t i = 0; i < kCompactMax + 1; ++i) {
    lates.push_back(slow_from_now());
    small_step();
  }
  std::vector<Client> waiting;
  for (std::size_t i = 1; i <= kCompactMax; ++i) {
    waiting.push_back(client());
    ASSERT_TRUE(waiting.back().socket.send(50, lates[i].plan, test_deadline()));
  }
  ASSERT_TRUE(merging_.reached());  // by the thread that compacts: the one that merges has nothing to do yet
  ASSERT_TRUE(eventually([&] { return agent_->core().deltas().info().wanted == kCompactMax; }));
  auto c = client();
  const auto merged = c.plan(lates[0].plan);
  ASSERT_TRUE(merged) << merged.error().to_string();
  EXPECT_EQ(merged->steps.size(), 1u);
  EXPECT_FALSE(has_classes(*merged));
  expect_leads_there(lates[0], *merged, model_.half);
  merging_.go_on();
  for (Client& receiver : waiting) {
    const auto reply = receiver.socket.recv_as<wire::PlanReply>(50, test_deadline());
    ASSERT_TRUE(reply) << reply.error().to_string();
    EXPECT_TRUE(has_classes(*reply));
  }
}

TEST_F(Compacts, WhoCannotWaitGetsThePlainOne) {
  start();
  Late late = slow_from_now();
  small_step();
  auto patient = client();
  ASSERT_TRUE(patient.socket.send(50, late.plan, test_deadline()));
  ASSERT_TRUE(merging_.reached());
  auto c = client();
  for (const std::uint64_t wait_ms : {0U, 1U, 40U}) {
    late.plan.wait_ms = wait_ms;
    const auto reply = c.plan(late.plan);
    ASSERT_TRUE(reply) << reply.error().to_string();
    EXPECT_EQ(reply->steps[0].frame_bytes, ring_bytes()) << wait_ms;
    expect_leads_there(late, *reply, model_.half);
    ASSERT_TRUE(c.release(reply->plan));
  }
  merging_.go_on();
  EXPECT_TRUE(patient.socket.recv_as<wire::PlanReply>(50, test_deadline()));
  late.plan.wait_ms = 0;
  const auto reply = c.plan(late.plan);
  ASSERT_TRUE(reply);
  EXPECT_TRUE(has_classes(*reply)) << "what is there costs no wait";
}

TEST_F(Compacts, TheServersOwnPatienceEndsToo) {
  options_.pull.limits.merge_wait_max = std::chrono::milliseconds(1);
  start();
  const Late late = slow_from_now();
  small_step();
  auto c = client();
  const auto reply = c.plan(late.plan);  // the merging thread stands still
  ASSERT_TRUE(reply) << reply.error().to_string();
  EXPECT_EQ(reply->steps[0].frame_bytes, ring_bytes());
}

/// Who keeps up has waited for the version itself.
TEST_F(Compacts, TheirTimeBeginsWithTheVersion) {
  constexpr auto kPatience = std::chrono::seconds(1);  // a busy machine begins within it
  options_.pull.limits.merge_wait_max = kPatience;
  start();
  Late late = slow_from_now();
  late.plan.want = wire::WantKind::newer;
  auto c = client();
  ASSERT_TRUE(c.socket.send(50, late.plan, test_deadline()));
  std::this_thread::sleep_for(2 * kPatience);  // a request that is later still is one that asks no less
  small_step();
  ASSERT_TRUE(merging_.reached());
  merging_.go_on();
  const auto reply = c.socket.recv_as<wire::PlanReply>(50, test_deadline());
  ASSERT_TRUE(reply) << reply.error().to_string();
  expect_leads_there(late, *reply, model_.half);
}

/// The half that the delta leads to is the writer's by then.
TEST_F(Compacts, ATargetThatIsSupersededMeanwhileIsGivenUp) {
  start();
  const Late late = slow_from_now();
  small_step();
  auto c = client();
  ASSERT_TRUE(c.socket.send(50, late.plan, test_deadline()));
  ASSERT_TRUE(merging_.reached());
  small_step();  // the publisher does not wait for it
  merging_.go_on();
  const auto reply = c.socket.recv_as<wire::PlanReply>(50, test_deadline());
  ASSERT_TRUE(reply) << reply.error().to_string();
  EXPECT_EQ(reply->target.id.number, number_);
  EXPECT_EQ(reply->steps.size(), 2u) << "a plan waits once";
  EXPECT_FALSE(has_classes(*reply));
  expect_leads_there(late, *reply, model_.half);
  EXPECT_EQ(metrics().compacts, 0u);
  EXPECT_EQ(metrics().compacts_failed, 1u);
  const auto next = c.plan(late.plan);
  ASSERT_TRUE(next);
  ASSERT_EQ(next->steps.size(), 1u);
  EXPECT_TRUE(has_classes(*next));
  expect_leads_there(late, *next, model_.half);
}

/// What was made in time stays good as the beginning of a chain.
TEST_F(Compacts, AChainMayBeginWithOne) {
  merging_.go_on();
  start();
  Late late = slow_from_now();
  small_steps(2);
  auto c = client();
  ASSERT_TRUE(c.plan(late.plan));
  ASSERT_EQ(metrics().compacts, 1u);
  small_step();
  late.plan.wait_ms = 0;
  const auto reply = c.plan(late.plan);
  ASSERT_TRUE(reply) << reply.error().to_string();
  ASSERT_EQ(reply->steps.size(), 2u);
  EXPECT_TRUE(has_classes(*reply));
  expect_leads_there(late, *reply, model_.half);
}

TEST_F(Compacts, APastVersionComesPlain) {
  merging_.go_on();
  start();
  Late late = slow_from_now();
  small_step();
  const std::vector<std::byte> target = model_.half;
  late.plan.want = wire::WantKind::number;
  late.plan.number = number_;
  small_step();
  auto c = client();
  const auto reply = c.plan(late.plan);
  ASSERT_TRUE(reply) << reply.error().to_string();
  EXPECT_FALSE(has_classes(*reply));
  expect_leads_there(late, *reply, target);
  EXPECT_EQ(metrics().compacts + metrics().compacts_failed, 0u);
}

/// Values do not tell what was there before them.
TEST_F(Compacts, WhatGainsNothingIsNotKeptNorTriedAgain) {
  merging_.go_on();
  options_.core.form = delta::ValueForm::absolute;
  start();
  const Late late = slow_from_now();
  small_steps(2);
  auto c = client();
  for (int i = 0; i < 2; ++i) {
    const auto reply = c.plan(late.plan);
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->steps.size(), 1u) << "merged all the same";
    expect_leads_there(late, *reply, model_.half);
  }
  EXPECT_EQ(metrics().compacts, 0u);
  EXPECT_EQ(metrics().compacts_failed, 1u);
  EXPECT_EQ(metrics().merges, 1u);
}

/// Nor merged: one step is no chain.
TEST_F(Compacts, OneStepThatGainsNothingIsNotMerged) {
  merging_.go_on();
  options_.core.form = delta::ValueForm::absolute;
  options_.core.merge_steps_min = 1;
  start();
  const Late late = slow_from_now();
  small_step();
  auto c = client();
  for (int i = 0; i < 2; ++i) {
    const auto reply = c.plan(late.plan);
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->steps.at(0).frame_bytes, ring_bytes());
  }
  EXPECT_EQ(metrics().compacts_failed, 1u);
  EXPECT_EQ(metrics().merges + metrics().merges_failed, 0u);
}

TEST_F(Compacts, ShareTheBoundOfWhatIsKept) {
  merging_.go_on();
  options_.core.merge_bytes_max = 1;
  start();
  const Late late = slow_from_now();
  small_step();
  auto c = client();
  for (int i = 0; i < 2; ++i) {
    const auto reply = c.plan(late.plan);
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->steps[0].frame_bytes, ring_bytes());
  }
  EXPECT_EQ(metrics().compacts, 1u) << "it is not tried again and again";
  EXPECT_EQ(agent_->core().deltas().info().bytes, 0u);
}

/// What is kept is had without the merged one that it was made of, which had to make room for it.
TEST_F(Compacts, OneThatIsKeptCostsNoMerge) {
  merging_.go_on();
  options_.core.merge_bytes_max = plain_bytes_of(2) * 11 / 10;
  start();
  const Late late = slow_from_now();
  small_steps(2);
  auto c = client();
  for (int i = 0; i < 2; ++i) {
    const auto reply = c.plan(late.plan);
    ASSERT_TRUE(reply) << reply.error().to_string();
    ASSERT_EQ(reply->steps.size(), 1u);
    EXPECT_TRUE(has_classes(*reply));
    EXPECT_EQ(agent_->core().deltas().info().entries.size(), 1u);
  }
  EXPECT_EQ(metrics().merges, 1u);
  EXPECT_EQ(metrics().compacts, 1u);
}

TEST_F(Compacts, TheyAreSwitchedOffWithMerging) {
  options_.core.merge_steps_min = 0;
  start();
  const Late late = slow_from_now();
  small_step();
  auto c = client();
  const auto reply = c.plan(late.plan);
  ASSERT_TRUE(reply);
  EXPECT_FALSE(has_classes(*reply));
}

TEST_F(Compacts, PlansOutliveThemAndTheirEviction) {
  merging_.go_on();
  options_.core.ring_entries_max = 1;
  start();
  const Late late = slow_from_now();
  small_step();
  const std::vector<std::byte> target = model_.half;
  auto c = client();
  const auto reply = c.plan(late.plan);
  ASSERT_TRUE(reply);
  EXPECT_EQ(agent_->core().deltas().info().entries.size(), 1u);
  small_step();
  EXPECT_TRUE(eventually([&] { return agent_->core().deltas().info().entries.empty(); }))
      << "its base has left the ring";
  expect_leads_there(late, *reply, target);
}

/// Frames are cut as always, and what the plan says of them is what comes.
TEST_F(Compacts, OfSomeTiles) {
  merging_.go_on();
  start();
  const Late late = slow_from_now();
  small_step(0.03);
  std::vector<wire::TileRange> every_second;
  for (std::uint64_t t = 0; t < model_.layout->tile_count(); t += 2) every_second.push_back({t, t + 1});
  const TileSet tiles = *TileSet::make(*model_.layout, every_second);
  auto c = client();
  ASSERT_TRUE(c.ask<wire::Empty>(wire::Subscribe{model_.layout->digest(), every_second}));
  wire::PlanRequest plan = late.plan;
  plan.subscription = tiles.digest();
  plan.base_root = tiles.root(late.digests);
  const auto reply = c.plan(plan);
  ASSERT_TRUE(reply) << reply.error().to_string();
  ASSERT_EQ(reply->mode, wire::PlanMode::delta);
  ASSERT_EQ(reply->steps.size(), 1u);
  EXPECT_TRUE(has_classes(*reply));
  plan.compact = 0;
  const auto plain = c.plan(plan);
  ASSERT_TRUE(plain);
  EXPECT_LT(reply->steps[0].frame_bytes, plain->steps[0].frame_bytes);
  std::vector<std::uint64_t> digests = late.digests;
  std::uint64_t bytes = 0;
  std::uint64_t changed = 0;
  const auto frames = frames_of(*reply);
  for (const auto& frame : frames) {
    bytes += frame.size();
    const auto records = delta::parse_frame(*model_.layout, frame).value();
    for (const auto& record : records) {
      EXPECT_EQ(record.tile % 2, 0u);
      changed += record.changed;
      digests[record.tile] = record.digest_after;
    }
  }
  EXPECT_EQ(reply->steps[0].frames, frames.size());
  EXPECT_EQ(reply->steps[0].frame_bytes, bytes);
  EXPECT_EQ(reply->steps[0].changed, changed);
  EXPECT_EQ(tiles.root(digests), reply->target_root);
}

}  // namespace
}  // namespace deltasync::agent
