// Receivers that are several versions late get one merged delta, made beside everything else.
#include <algorithm>
#include <future>
#include <optional>

#include <nlohmann/json.hpp>

#include "agent/http/metrics_page.hpp"
#include "tests/agent/merges_fixture.hpp"

namespace deltasync::agent {
namespace {

TEST_F(Merges, ALateReceiverGetsOneStep) {
  merging_.go_on();
  start();
  const Late late = late_from_now();
  versions(4);
  auto c = client();
  const auto reply = c.plan(late.plan);
  ASSERT_TRUE(reply) << reply.error().to_string();
  ASSERT_EQ(reply->steps.size(), 1u);
  EXPECT_LT(reply->steps[0].frame_bytes, ring_bytes());
  expect_leads_there(late, *reply, model_.half);
  EXPECT_EQ(metrics().merges, 1u);
  EXPECT_EQ(metrics().merge_bytes, reply->steps[0].frame_bytes);
  EXPECT_EQ(metrics().merge_hits, 0u);
  const auto again = c.plan(late.plan);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->steps.size(), 1u);
  EXPECT_EQ(metrics().merges, 1u);
  EXPECT_EQ(metrics().merge_hits, 1u);
  const AgentParts parts{agent_->core(), agent_->pull_server(), nullptr, 1, std::chrono::steady_clock::now()};
  const auto page = nlohmann::json::parse(status_json(parts));
  EXPECT_EQ(page["ring"]["count"], 4);
  EXPECT_GE(page["ring"]["age_s"], page["ring"]["entries"][3]["age_s"]);
  EXPECT_EQ(page["merges"]["made"], 1);
  EXPECT_EQ(page["merges"]["hits"], 1);
  EXPECT_EQ(page["merges"]["bytes"], reply->steps[0].frame_bytes);
  EXPECT_EQ(page["merges"]["bytes_max"], 16u << 20);
  EXPECT_EQ(page["merges"]["entries"][0]["to"]["number"], 5);
  const std::string text = metrics_text(parts);
  for (const char* line :
       {"deltasync_merges_total 1\n", "deltasync_merge_hits_total 1\n", "deltasync_merged_entries 1\n"})
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
}

TEST_F(Merges, OneStepIsNotMerged) {
  start();
  const Late late = late_from_now();
  next_version();
  auto c = client();
  const auto reply = c.plan(late.plan);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->steps.size(), 1u);
  EXPECT_EQ(metrics().merges, 0u);
}

TEST_F(Merges, ManyReceiversShareOne) {
  options_.net_threads = 1;
  start();
  const Late late = late_from_now();
  versions(3);
  std::vector<Client> clients;
  for (int i = 0; i < 12; ++i) {
    clients.push_back(client());
    ASSERT_TRUE(clients.back().socket.send(50, late.plan, test_deadline()));
  }
  ASSERT_TRUE(merging_.reached());
  // Nothing stands still meanwhile: other plans, other requests, the publisher.
  auto other = client();
  const auto full = other.plan(ask());
  ASSERT_TRUE(full);
  EXPECT_EQ(full->mode, wire::PlanMode::full);
  EXPECT_EQ(agent_->core().deltas().info().wanted, 1u);
  merging_.go_on();
  for (Client& c : clients) {
    const auto reply = c.socket.recv_as<wire::PlanReply>(50, test_deadline());
    ASSERT_TRUE(reply) << reply.error().to_string();
    EXPECT_EQ(reply->steps.size(), 1u);
  }
  EXPECT_EQ(metrics().merges, 1u);
  EXPECT_EQ(metrics().merge_hits, clients.size() - 1);
  EXPECT_EQ(agent_->core().open_plans().list().size(), clients.size() + 1) << "what was held while they waited";
}

TEST_F(Merges, WhoCannotWaitGetsTheChain) {
  start();
  Late late = late_from_now();
  versions(3);
  auto patient = client();
  ASSERT_TRUE(patient.socket.send(50, late.plan, test_deadline()));
  ASSERT_TRUE(merging_.reached());
  auto c = client();
  for (const std::uint64_t wait_ms : {0U, 1U, 40U}) {
    late.plan.wait_ms = wait_ms;
    const auto reply = c.plan(late.plan);
    ASSERT_TRUE(reply) << reply.error().to_string();
    EXPECT_EQ(reply->steps.size(), 3u) << wait_ms;
    expect_leads_there(late, *reply, model_.half);
    ASSERT_TRUE(c.release(reply->plan));
  }
  merging_.go_on();
  EXPECT_TRUE(patient.socket.recv_as<wire::PlanReply>(50, test_deadline()));
  late.plan.wait_ms = 0;
  const auto reply = c.plan(late.plan);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->steps.size(), 1u) << "what is there costs no wait";
}

TEST_F(Merges, TheServersOwnPatienceEndsToo) {
  options_.pull.limits.merge_wait_max = std::chrono::milliseconds(1);
  start();
  const Late late = late_from_now();
  versions(2);
  auto c = client();
  const auto reply = c.plan(late.plan);  // the merge stands still
  ASSERT_TRUE(reply) << reply.error().to_string();
  EXPECT_EQ(reply->steps.size(), 2u);
}

/// What their receivers left is not made for nobody, be it that they went or that their time was up.
TEST_F(Merges, WhatNobodyWaitsForAnyMoreIsNotMade) {
  start();
  std::vector<Late> lates;
  for (int i = 0; i < 4; ++i) {
    lates.push_back(late_from_now());
    versions(1);
  }
  versions(1);
  auto first = client();
  ASSERT_TRUE(first.socket.send(50, lates[0].plan, test_deadline()));
  ASSERT_TRUE(merging_.reached());
  const auto wanted = [&](std::size_t count) {
    return eventually([&] { return agent_->core().deltas().info().wanted == count; });
  };
  auto gone = std::make_optional(client());
  ASSERT_TRUE(gone->socket.send(50, lates[1].plan, test_deadline()));
  ASSERT_TRUE(wanted(2));
  lates[2].plan.wait_ms = 40;
  auto impatient = client();
  const auto chain = impatient.plan(lates[2].plan);
  ASSERT_TRUE(chain) << chain.error().to_string();
  EXPECT_EQ(chain->steps.size(), 3u);
  EXPECT_EQ(agent_->core().deltas().info().wanted, 2u);
  auto last = client();
  ASSERT_TRUE(last.socket.send(50, lates[3].plan, test_deadline()));
  ASSERT_TRUE(wanted(3));
  gone.reset();
  ASSERT_TRUE(wanted(2));
  merging_.go_on();
  for (Client* waiting : {&first, &last}) {
    const auto reply = waiting->socket.recv_as<wire::PlanReply>(50, test_deadline());
    ASSERT_TRUE(reply) << reply.error().to_string();
    EXPECT_EQ(reply->steps.size(), 1u);
  }
  EXPECT_EQ(metrics().merges, 2u);
}

/// Others may come for it.
TEST_F(Merges, WhatIsBegunIsFinished) {
  start();
  const Late late = late_from_now();
  versions(2);
  auto gone = std::make_optional(client());
  ASSERT_TRUE(gone->socket.send(50, late.plan, test_deadline()));
  ASSERT_TRUE(merging_.reached());
  gone.reset();
  ASSERT_TRUE(eventually([&] { return agent_->core().open_plans().list().empty(); })) << "it has heard";
  merging_.go_on();
  ASSERT_TRUE(eventually([&] { return agent_->core().deltas().info().entries.size() == 1; }));
  const auto reply = client().plan(late.plan);
  ASSERT_TRUE(reply) << reply.error().to_string();
  EXPECT_EQ(reply->steps.size(), 1u);
  EXPECT_EQ(metrics().merges, 1u);
}

TEST_F(Merges, ATargetThatIsSupersededMeanwhile) {
  options_.core.form = delta::ValueForm::absolute;  // its merges need no half that is served
  start();
  const Late late = late_from_now();
  versions(3);
  auto c = client();
  ASSERT_TRUE(c.socket.send(50, late.plan, test_deadline()));
  ASSERT_TRUE(merging_.reached());
  next_version();  // the publisher does not wait for the merge
  merging_.go_on();
  const auto reply = c.socket.recv_as<wire::PlanReply>(50, test_deadline());
  ASSERT_TRUE(reply) << reply.error().to_string();
  EXPECT_EQ(reply->target.id.number, 5u);
  EXPECT_EQ(reply->steps.size(), 2u) << "the merged delta, and the step after it";
  expect_leads_there(late, *reply, model_.half);
  const auto next = c.plan(late.plan);
  ASSERT_TRUE(next) << next.error().to_string();
  EXPECT_EQ(next->steps.size(), 1u);
  expect_leads_there(late, *next, model_.half);
}

/// Waiting costs nobody what was to be had without it.
TEST_F(Merges, AChainThatLeavesTheRingMeanwhileIsStillGiven) {
  options_.core.ring_entries_max = 3;
  options_.pull.limits.merge_wait_max = std::chrono::hours(1);
  start();
  Late late = late_from_now();
  late.plan.wait_ms *= 10;
  versions(3);
  const std::vector<std::byte> target = model_.half;
  Late named = late;
  named.plan.want = wire::WantKind::number;
  named.plan.number = number_;
  auto c = client();
  auto d = client();
  ASSERT_TRUE(c.socket.send(50, late.plan, test_deadline()));
  ASSERT_TRUE(d.socket.send(50, named.plan, test_deadline()));
  ASSERT_TRUE(merging_.reached());
  ASSERT_TRUE(eventually([&] { return agent_->core().open_plans().list().size() == 2; }))
      << "neither has a plan while it waits";
  next_version();  // its base leaves the ring; the merge stands still
  for (Client* waiting : {&c, &d}) {
    const auto reply = waiting->socket.recv_as<wire::PlanReply>(50, test_deadline());
    ASSERT_TRUE(reply) << reply.error().to_string();
    EXPECT_EQ(reply->steps.size(), 3u);
    expect_leads_there(late, *reply, target);
  }
  EXPECT_EQ(agent_->core().open_plans().list().size(), 2u);
  merging_.go_on();
  EXPECT_TRUE(eventually([&] { return agent_->core().deltas().info().wanted == 0; }));
  EXPECT_EQ(metrics().merges, 0u) << "nobody can ask for it any more";
}

TEST_F(Merges, AStopDoesNotWaitForIt) {
  start();
  const Late late = late_from_now();
  versions(3);
  auto c = client();
  ASSERT_TRUE(c.socket.send(50, late.plan, test_deadline()));
  ASSERT_TRUE(merging_.reached());
  auto stopped = std::async(std::launch::async, [&] { agent_->stop(); });
  const auto reply = c.socket.recv_as<wire::PlanReply>(50, test_deadline());
  EXPECT_FALSE(reply) << "the conversation ends while the merge stands still";
  EXPECT_TRUE(eventually([&] {
    std::string unused;
    PendingPlan pending;
    const auto plan = agent_->core().plans().plan(ask(), {}, &unused, pending);
    return !plan && plan.error().code() == Errc::connection;  // and not that there are too many plans by now
  })) << "it is shutting down";
  merging_.go_on();
  ASSERT_EQ(stopped.wait_until(test_deadline().at()), std::future_status::ready);
  EXPECT_EQ(metrics().merges, 0u) << "it was given up";
}

TEST_F(Merges, ABoundThatIsTooSmallLeavesTheChain) {
  merging_.go_on();
  options_.core.merge_bytes_max = 1;
  start();
  const Late late = late_from_now();
  versions(2);
  auto c = client();
  for (int i = 0; i < 2; ++i) {
    const auto reply = c.plan(late.plan);
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->steps.size(), 2u);
  }
  EXPECT_EQ(metrics().merges, 1u) << "it is not tried again and again";
  EXPECT_EQ(agent_->core().deltas().info().bytes, 0u);
}

TEST_F(Merges, ShortChainsMayBeLeftAlone) {
  merging_.go_on();
  options_.core.merge_steps_min = 3;
  start();
  const Late late = late_from_now();
  auto c = client();
  versions(2);
  EXPECT_EQ(c.plan(late.plan)->steps.size(), 2u);
  versions(1);
  EXPECT_EQ(c.plan(late.plan)->steps.size(), 1u);
}

TEST_F(Merges, TheyCanBeSwitchedOff) {
  options_.core.merge_steps_min = 0;
  start();
  const Late late = late_from_now();
  versions(2);
  auto c = client();
  const auto reply = c.plan(late.plan);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->steps.size(), 2u);
}

TEST_F(Merges, TheyGoWithTheirBaseAndPlansOutliveThem) {
  merging_.go_on();
  options_.core.ring_bytes_max = 0;
  start();
  const Late late = late_from_now();
  versions(2);
  const std::vector<std::byte> target = model_.half;
  auto c = client();
  const auto reply = c.plan(late.plan);
  ASSERT_TRUE(reply);
  ASSERT_EQ(reply->steps.size(), 1u);
  EXPECT_EQ(agent_->core().deltas().info().entries.size(), 1u);
  const auto base_is_there = [&] {
    const SnapshotPtr now = agent_->core().versions().snapshot();
    return !now->ring.empty() && now->ring.front()->from.id.number == 1;
  };
  for (int i = 0; i < 60 && base_is_there(); ++i) next_version(0.01);
  ASSERT_FALSE(base_is_there()) << "it was never evicted";
  EXPECT_TRUE(eventually([&] { return agent_->core().deltas().info().entries.empty(); }));
  EXPECT_EQ(agent_->core().deltas().info().bytes, 0u);
  expect_leads_there(late, *reply, target);
}

TEST_F(Merges, PlansThatPinTooManyOfThemAreEnded) {
  merging_.go_on();
  options_.core.ring_bytes_max = 0;
  start();
  std::vector<Client> clients;
  std::vector<std::uint64_t> plans;
  for (int i = 0; i < 16; ++i) {
    const Late late = late_from_now();
    versions(2, 0.01);
    clients.push_back(client());
    const auto reply = clients.back().plan(late.plan);
    ASSERT_TRUE(reply);
    ASSERT_EQ(reply->steps.size(), 1u);
    plans.push_back(reply->plan);
  }
  ASSERT_GT(metrics().plans_expired, 0u);
  const wire::TileRange all{0, model_.layout->tile_count()};
  EXPECT_EQ(clients.front().frames(wire::GetFrames{plans.front(), 0, {all}}).error().code(), Errc::lease_revoked);
  EXPECT_TRUE(clients.back().frames(wire::GetFrames{plans.back(), 0, {all}}));
}

/// One small tile that first takes differences and then, elsewhere, values: what it is in the end follows from the
/// served half alone.
class MixedMerges : public Merges {
 protected:
  MixedMerges() { model_ = test::make_model(4, {{"t", Dtype::u8, {4000}, {}, {}}}); }
  void move(std::size_t first, std::size_t end, unsigned by) {
    for (std::size_t i = first; i < end; i += 4) {
      model_.half[i] = static_cast<std::byte>(static_cast<unsigned>(model_.half[i]) + by);
    }
    const auto report = offload(*writer_, model_.half, ++number_);
    ASSERT_TRUE(report) << report.error().to_string();
  }
  void expect_mixed() const {
    const auto ring = agent_->core().versions().snapshot()->ring;
    ASSERT_EQ(ring[0]->delta->stats[static_cast<unsigned>(delta::Codec::rice_ulp)].tiles, 1u);
    ASSERT_EQ(ring[1]->delta->stats[static_cast<unsigned>(delta::Codec::rice_absolute)].tiles, 1u);
  }
};

TEST_F(MixedMerges, ReadTheServedHalfUnderALease) {
  merging_.go_on();
  start();
  const Late late = late_from_now();
  for (int i = 0; i < 2; ++i) {
    move(0, 400, 1);
    move(2000, 2040, 100);
  }
  expect_mixed();
  auto c = client();
  const auto reply = c.plan(late.plan);
  ASSERT_TRUE(reply) << reply.error().to_string();
  ASSERT_EQ(reply->steps.size(), 1u);
  expect_leads_there(late, *reply, model_.half);
  EXPECT_EQ(metrics().merges, 1u);
  EXPECT_TRUE(agent_->core().leases().list().empty()) << "a writer would wait for it";
}

TEST_F(MixedMerges, AreGivenUpWhereThatHalfIsServedNoMore) {
  start();
  const Late late = late_from_now();
  move(0, 400, 1);
  move(2000, 2040, 100);
  expect_mixed();
  auto c = client();
  ASSERT_TRUE(c.socket.send(50, late.plan, test_deadline()));
  ASSERT_TRUE(merging_.reached());
  move(0, 400, 1);
  merging_.go_on();
  const auto reply = c.socket.recv_as<wire::PlanReply>(50, test_deadline());
  ASSERT_TRUE(reply) << reply.error().to_string();
  EXPECT_EQ(reply->steps.size(), 3u);
  expect_leads_there(late, *reply, model_.half);
  EXPECT_EQ(metrics().merges, 0u);
  EXPECT_EQ(metrics().merges_failed, 1u);
}

/// Each step changes a batch of its own, so nothing is saved but the second step.
TEST_F(Merges, OneThatIsAsLargeAsItsChainIsGiven) {
  merging_.go_on();
  const std::uint64_t batch = delta::kBatchBytesTarget;
  model_ = test::make_model(4, {{"a", Dtype::u8, {batch}, {}, {}}, {"b", Dtype::u8, {batch}, {}, {}}});
  start();
  const Late late = late_from_now();
  for (const Tensor& tensor : model_.layout->tensors()) {
    for (std::uint64_t i = 0; i < 1000; ++i) model_.half[tensor.offset + 37 * i] ^= std::byte{1};
    ASSERT_TRUE(offload(*writer_, model_.half, ++number_));
  }
  const auto reply = client().plan(late.plan);
  ASSERT_TRUE(reply) << reply.error().to_string();
  ASSERT_EQ(reply->steps.size(), 1u);
  EXPECT_EQ(reply->steps[0].frame_bytes, ring_bytes());
}

/// Where the chain is larger than a half.
TEST_F(Merges, OneThatIsSmallerThanAHalfReplacesAFullUpdate) {
  merging_.go_on();
  start();
  const Late late = late_from_now();
  const std::uint64_t half_bytes = model_.layout->half_bytes();
  test::Random random(9);
  const auto publish_noise = [&](std::uint64_t bytes_max) {
    std::uint64_t bytes = 0;
    for (const Tensor& tensor : model_.layout->tensors()) {
      if (bytes + tensor.bytes > bytes_max) continue;
      bytes += tensor.bytes;
      for (std::uint64_t i = 0; i < tensor.bytes; ++i) {
        model_.half[tensor.offset + i] = static_cast<std::byte>(random.next());
      }
    }
    ASSERT_TRUE(offload(*writer_, model_.half, ++number_));
  };
  auto c = client();
  for (int i = 0; i < 3; ++i) publish_noise(half_bytes * 9 / 10);
  ASSERT_GE(ring_bytes(), half_bytes);
  const auto reply = c.plan(late.plan);
  ASSERT_TRUE(reply) << reply.error().to_string();
  ASSERT_EQ(reply->steps.size(), 1u);
  EXPECT_LT(reply->steps[0].frame_bytes, half_bytes);
  expect_leads_there(late, *reply, model_.half);
  publish_noise(half_bytes);
  const auto full = c.plan(late.plan);
  ASSERT_TRUE(full) << full.error().to_string();
  EXPECT_EQ(full->mode, wire::PlanMode::full) << "all is new";
  EXPECT_TRUE(full->steps.empty());
  EXPECT_EQ(metrics().merges, 1u);
  EXPECT_EQ(metrics().merges_failed, 1u);
  EXPECT_EQ(agent_->core().deltas().info().entries.size(), 1u) << "what nobody gets is not kept";
}

}  // namespace
}  // namespace deltasync::agent
