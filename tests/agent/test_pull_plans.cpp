// What receivers get: layouts, plans, bytes; and when plans end.
#include <algorithm>
#include <cstring>

#include "delta/delta.hpp"
#include "format/tiling.hpp"
#include "format/wire_report.hpp"
#include "tests/agent/agent_harness.hpp"
#include "writer/relay_access.hpp"

namespace deltasync::agent {
namespace {

class Plans : public AgentTest {
 protected:
  wire::TileRange all() const { return {0, model_.layout->tile_count()}; }
  /// Bytes of the half up to the end of the last tensor.
  std::vector<std::byte> expected_half() const {
    const auto& tensors = model_.layout->tensors();
    const Tile last = tile_of(*model_.layout, model_.layout->tile_count() - 1);
    const Tensor& tensor = tensors[last.tensor];
    return {model_.half.begin(), model_.half.begin() + static_cast<std::ptrdiff_t>(tensor.offset + tensor.bytes)};
  }
  /// Applies frames to `half`, tile after tile, and checks every digest.
  void apply(std::vector<std::byte>& half, const std::vector<std::vector<std::byte>>& frames,
             std::vector<std::uint64_t>& digests) {
    for (const auto& frame : frames) {
      const auto records = delta::parse_frame(*model_.layout, frame);
      ASSERT_TRUE(records) << records.error().to_string();
      for (const auto& record : *records) {
        const Tile tile = tile_of(*model_.layout, record.tile);
        const Tensor& tensor = model_.layout->tensors()[tile.tensor];
        const delta::TensorMemory memory{half.data() + tensor.offset, tensor.row_bytes()};
        const auto after = delta::apply_tile(*model_.layout, record, tile_address(memory, tile, tensor.element_bytes),
                                             tensor.row_bytes(), digests[record.tile]);
        ASSERT_TRUE(after) << after.error().to_string();
        digests[record.tile] = *after;
      }
    }
  }
};

TEST_F(Plans, TheLayoutCrossesWhole) {
  start_agent();
  auto early = client();
  const auto none = early.layout();
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code(), Errc::not_found);
  next_version();
  const auto layout = early.layout();  // the same connection goes on
  ASSERT_TRUE(layout) << layout.error().to_string();
  EXPECT_EQ((*layout)->digest(), model_.layout->digest());
  auto c = client();
  EXPECT_EQ(c.welcome.has_layout, 1);
  EXPECT_EQ(c.welcome.layout, model_.layout->digest());
}

TEST_F(Plans, AFullPullDeliversTheHalfAndItsDigests) {
  start_agent();
  next_version();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply) << reply.error().to_string();
  EXPECT_EQ(reply->mode, wire::PlanMode::full);
  EXPECT_NE(reply->plan, 0u);
  EXPECT_EQ(reply->target.id, (VersionId{epoch_, 1}));
  EXPECT_EQ(reply->target.label, "step_1");
  EXPECT_EQ(reply->full_bytes, model_.layout->half_bytes());
  const auto digests = c.digests(reply->plan);
  ASSERT_TRUE(digests);
  EXPECT_EQ(digests->size(), model_.layout->tile_count());
  EXPECT_EQ(delta::root_digest(*digests), reply->target_root);
  auto stream = client(wire::Role::data);
  const auto bytes = stream.extent(reply->plan, all());
  ASSERT_TRUE(bytes) << bytes.error().to_string();
  EXPECT_TRUE(*bytes == expected_half());
  EXPECT_EQ(agent_->core().leases().list().size(), 1u);
  EXPECT_TRUE(c.release(reply->plan));
  EXPECT_TRUE(agent_->core().leases().list().empty());
}

TEST_F(Plans, ExtentsBeginAndEndAtWholeBands) {
  start_agent();
  next_version();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  const Layout& layout = *model_.layout;
  bool inside_seen = false;
  for (std::uint64_t first = 0; first < layout.tile_count(); ++first) {
    const std::uint64_t end = std::min(first + 3, layout.tile_count());
    const Tile begin = tile_of(layout, first);
    const Tile last = tile_of(layout, end - 1);
    const Tensor& a = layout.tensors()[begin.tensor];
    const Tensor& b = layout.tensors()[last.tensor];
    const auto bytes = c.extent(reply->plan, {first, end});
    if (begin.rect.col != 0 || last.rect.col + last.rect.cols != b.cols) {
      inside_seen = true;
      ASSERT_FALSE(bytes);
      EXPECT_EQ(bytes.error().code(), Errc::invalid_argument);
      continue;
    }
    ASSERT_TRUE(bytes) << bytes.error().to_string();
    const auto from = a.offset + begin.rect.row * a.row_bytes();
    const auto to = b.offset + (last.rect.row + last.rect.rows) * b.row_bytes();
    ASSERT_EQ(bytes->size(), to - from);
    EXPECT_EQ(std::memcmp(bytes->data(), model_.half.data() + from, bytes->size()), 0);
  }
  EXPECT_TRUE(inside_seen) << "the sample layout has no tensor of several panels";
  for (const wire::TileRange range :
       {wire::TileRange{0, layout.tile_count() + 1}, {layout.tile_count(), layout.tile_count() + 1}, {5, 5}, {6, 5}}) {
    const auto bytes = c.extent(reply->plan, range);
    if (range.end <= range.first) {
      EXPECT_FALSE(bytes);
      if (!c.socket.open() || c.socket.peer_closed()) c = client();
      continue;
    }
    ASSERT_FALSE(bytes);
    EXPECT_EQ(bytes.error().code(), Errc::out_of_range);
  }
}

TEST_F(Plans, DeltaStepsLeadToTheTargetBitForBit) {
  start_agent();
  next_version();
  std::vector<std::byte> held = model_.half;
  std::vector<std::uint64_t> digests = *served()->digests;
  const wire::PlanRequest plan = ask_from_served();
  for (int i = 0; i < 3; ++i) next_version(0.002);
  auto c = client();
  auto stream = client(wire::Role::data);
  const auto reply = c.plan(plan);
  ASSERT_TRUE(reply) << reply.error().to_string();
  ASSERT_EQ(reply->mode, wire::PlanMode::delta);
  ASSERT_EQ(reply->steps.size(), 3u);
  for (std::uint32_t step = 0; step < 3; ++step) {
    const auto frames = stream.frames(wire::GetFrames{reply->plan, step, {all()}});
    ASSERT_TRUE(frames) << frames.error().to_string();
    EXPECT_EQ(frames->size(), reply->steps[step].frames);
    std::uint64_t bytes = 0;
    for (const auto& frame : *frames) bytes += frame.size();
    EXPECT_EQ(bytes, reply->steps[step].frame_bytes);
    apply(held, *frames, digests);
  }
  EXPECT_TRUE(held == model_.half);
  EXPECT_EQ(delta::root_digest(digests), reply->target_root);
}

TEST_F(Plans, RangesGetExactlyTheirTiles) {
  start_agent();
  next_version();
  const wire::PlanRequest plan = ask_from_served();
  next_version(0.05);
  auto c = client();
  const auto reply = c.plan(plan);
  ASSERT_TRUE(reply);
  ASSERT_EQ(reply->mode, wire::PlanMode::delta);
  const auto tiles_of = [&](const std::vector<wire::TileRange>& ranges) {
    std::vector<std::uint64_t> tiles;
    const auto frames = c.frames(wire::GetFrames{reply->plan, 0, ranges});
    if (!frames) {
      ADD_FAILURE() << frames.error().to_string();
      return tiles;
    }
    for (const auto& frame : *frames) {
      const auto records = delta::parse_frame(*model_.layout, frame);
      if (!records) {
        ADD_FAILURE() << records.error().to_string();
        continue;
      }
      for (const auto& record : *records) tiles.push_back(record.tile);
    }
    return tiles;
  };
  const auto changed = tiles_of({all()});
  ASSERT_GT(changed.size(), 10u);
  test::Random random(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<wire::TileRange> ranges;
    std::vector<std::uint64_t> expected;
    for (std::uint64_t at = random.below(4); at < model_.layout->tile_count();) {
      const std::uint64_t end = std::min(model_.layout->tile_count(), at + 1 + random.below(round % 2 == 0 ? 3 : 40));
      ranges.push_back({at, end});
      at = end + random.below(round % 3 == 0 ? 2 : 30);
    }
    for (const std::uint64_t tile : changed) {
      if (std::any_of(ranges.begin(), ranges.end(), [&](auto r) { return r.first <= tile && tile < r.end; })) {
        expected.push_back(tile);
      }
    }
    EXPECT_EQ(tiles_of(ranges), expected);
  }
  EXPECT_TRUE(tiles_of({}).empty());
}

TEST_F(Plans, RawTilesAreTheHalfs) {
  start_agent();
  next_version();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  const auto digests = c.digests(reply->plan);
  ASSERT_TRUE(digests);
  const std::uint64_t n = model_.layout->tile_count();
  const auto frames = c.frames(wire::GetRawTiles{reply->plan, {{1, 4}, {n / 2, n}}});
  ASSERT_TRUE(frames) << frames.error().to_string();
  std::vector<std::byte> half(model_.half.size());
  std::vector<std::uint64_t> seen;
  for (const auto& frame : *frames) {
    const auto records = delta::parse_frame(*model_.layout, frame);
    ASSERT_TRUE(records) << records.error().to_string();
    for (const auto& record : *records) {
      const Tile tile = tile_of(*model_.layout, record.tile);
      const Tensor& tensor = model_.layout->tensors()[tile.tensor];
      std::byte* const at =
          delta::tile_address({half.data() + tensor.offset, tensor.row_bytes()}, tile, tensor.element_bytes);
      const auto after = delta::apply_tile(*model_.layout, record, at, tensor.row_bytes(), 0);
      ASSERT_TRUE(after) << after.error().to_string();
      EXPECT_EQ(*after, (*digests)[record.tile]);
      seen.push_back(record.tile);
    }
  }
  std::vector<std::uint64_t> wanted{1, 2, 3};
  for (std::uint64_t tile = n / 2; tile < n; ++tile) wanted.push_back(tile);
  EXPECT_EQ(seen, wanted);
  const auto beyond = c.frames(wire::GetRawTiles{reply->plan, {{n - 1, n + 1}}});
  ASSERT_FALSE(beyond);
  EXPECT_EQ(beyond.error().code(), Errc::out_of_range);
}

TEST_F(Plans, UpToDateOpensNothing) {
  start_agent();
  next_version();
  auto c = client();
  const auto reply = c.plan(ask_from_served());
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->mode, wire::PlanMode::up_to_date);
  EXPECT_EQ(reply->plan, 0u);
  EXPECT_TRUE(agent_->core().open_plans().list().empty());
}

TEST_F(Plans, AWrongRootGetsAFullUpdate) {
  start_agent();
  next_version();
  wire::PlanRequest plan = ask_from_served();
  next_version();
  plan.base_root.bytes[0] ^= 1;
  auto c = client();
  const auto reply = c.plan(plan);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->mode, wire::PlanMode::full);
}

TEST_F(Plans, ADeltaPlanGivesNoHalf) {
  start_agent();
  next_version();
  const wire::PlanRequest plan = ask_from_served();
  next_version();
  auto c = client();
  const auto reply = c.plan(plan);
  ASSERT_TRUE(reply);
  ASSERT_EQ(reply->mode, wire::PlanMode::delta);
  EXPECT_EQ(c.extent(reply->plan, all()).error().code(), Errc::invalid_argument);
  EXPECT_EQ(c.frames(wire::GetRawTiles{reply->plan, {all()}}).error().code(), Errc::invalid_argument);
  EXPECT_EQ(c.digests(reply->plan).error().code(), Errc::invalid_argument);
  EXPECT_EQ(c.frames(wire::GetFrames{reply->plan, 1, {all()}}).error().code(), Errc::out_of_range);
  EXPECT_EQ(c.frames(wire::GetFrames{reply->plan, 0, {{0, all().end + 1}}}).error().code(), Errc::out_of_range);
  EXPECT_TRUE(c.frames(wire::GetFrames{reply->plan, 0, {all()}}));  // and the connection still works
}

/// Ranges take 16 bytes each once they are decoded: a request is refused by what it says before them.
TEST_F(Plans, RangesThatCannotBeAreRefusedBeforeTheyAreDecoded) {
  start_agent();
  next_version();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  const auto refusal = [&](wire::Type type, std::uint64_t plan, std::uint64_t count) {
    std::vector<std::byte> payload;
    ByteWriter out(payload);
    out.put(plan);
    if (type == wire::Type::get_frames) out.put<std::uint32_t>(0);
    if (type == wire::Type::get_raw_tiles) out.put(std::uint8_t{0});  // form
    out.put_varint(count);
    payload.resize(payload.size() + count * 2);  // of length 0: they do not decode
    if (!c.socket.send(type, 99, payload, test_deadline())) return Errc::io;
    const auto answer = c.socket.recv_answer(99, wire::Type::end, test_deadline());
    return answer ? Errc::internal : answer.error().code();
  };
  for (const auto type : {wire::Type::get_frames, wire::Type::get_raw_tiles}) {
    EXPECT_EQ(refusal(type, reply->plan + 1, 1), Errc::lease_revoked);
    EXPECT_EQ(refusal(type, reply->plan, all().end + 1), Errc::out_of_range);
  }
  EXPECT_EQ(refusal(wire::Type::get_frames, reply->plan, 1), Errc::corrupt) << "the connection ends only now";
}

TEST_F(Plans, AnotherLayoutIsAMismatch) {
  start_agent();
  next_version();
  auto c = client();
  wire::PlanRequest plan = ask();
  plan.layout.bytes[0] ^= 1;
  const auto reply = c.plan(plan);
  ASSERT_FALSE(reply);
  EXPECT_EQ(reply.error().code(), Errc::layout_mismatch);
}

TEST_F(Plans, AVersionThatNeverComesTimesOutByName) {
  start_agent();
  next_version();
  auto c = client();
  wire::PlanRequest plan = ask(wire::WantKind::number);
  plan.number = 99;
  plan.wait_ms = 20;
  const auto reply = c.plan(plan);
  ASSERT_FALSE(reply);
  EXPECT_EQ(reply.error().code(), Errc::timed_out);
  EXPECT_NE(reply.error().message().find(":99"), std::string::npos) << reply.error().message();
  plan.want = wire::WantKind::label;
  plan.label = "never";
  const auto label = c.plan(plan);
  ASSERT_FALSE(label);
  EXPECT_EQ(label.error().code(), Errc::timed_out);
  EXPECT_NE(label.error().message().find("never"), std::string::npos);
}

TEST_F(Plans, APastVersionIsGoneWithAList) {
  start_agent();
  next_version();
  next_version();
  auto c = client();
  wire::PlanRequest plan = ask(wire::WantKind::number);
  plan.number = 1;
  const auto reply = c.plan(plan);
  ASSERT_FALSE(reply);
  EXPECT_EQ(reply.error().code(), Errc::gone);
  EXPECT_NE(reply.error().message().find("step_2"), std::string::npos) << reply.error().message();
}

TEST_F(Plans, AWaitEndsWithTheVersion) {
  start_agent();
  auto c = client();
  wire::PlanRequest first = ask();
  first.wait_ms = 3'600'000;
  ASSERT_TRUE(c.socket.send(77, first, test_deadline()));  // before there is even a layout
  next_version();
  const auto reply = c.socket.recv_as<wire::PlanReply>(77, test_deadline());
  ASSERT_TRUE(reply) << reply.error().to_string();
  EXPECT_EQ(reply->target.id.number, 1u);

  wire::PlanRequest newer = ask_from_served();
  newer.want = wire::WantKind::newer;
  newer.wait_ms = 3'600'000;
  ASSERT_TRUE(c.socket.send(78, newer, test_deadline()));
  next_version();
  const auto second = c.socket.recv_as<wire::PlanReply>(78, test_deadline());
  ASSERT_TRUE(second) << second.error().to_string();
  EXPECT_EQ(second->mode, wire::PlanMode::delta);
  EXPECT_EQ(second->target.id.number, 2u);
}

/// Only who asks for it hears that his answer will come.
TEST_F(Plans, WhileAnAnswerIsDueTheAgentSaysThatItIsThere) {
  start_agent();
  next_version();
  wire::PlanRequest newer = ask_from_served();
  newer.want = wire::WantKind::newer;
  newer.wait_ms = 400;
  for (const std::uint32_t every_ms : {50u, 0u, 0x1'0000u}) {
    auto c = client();
    if (every_ms != 0) {
      ASSERT_TRUE(c.socket.send(1, wire::KeepAlive{every_ms}, test_deadline()));
    }
    ASSERT_TRUE(c.socket.send(2, newer, test_deadline()));
    unsigned alive = 0;
    for (;;) {
      const auto message = c.socket.recv(wire::kControlBytesMax, test_deadline());
      ASSERT_TRUE(message) << message.error().to_string();
      EXPECT_EQ(message->header.request, 2u);
      if (message->type() == wire::Type::error) break;
      ASSERT_EQ(message->type(), wire::Type::alive);
      EXPECT_TRUE(message->payload.empty());
      ++alive;
    }
    EXPECT_EQ(alive != 0, every_ms == 50);
    EXPECT_LE(alive, 8u);
    EXPECT_TRUE(c.plan(ask())) << "the connection goes on";
  }
}

/// A relay hears where the agent has its versions from, and is refused by name if that is its own agent.
TEST_F(Plans, ARelayOfACycleIsRefused) {
  start_agent();
  next_version();
  auto c = client();
  const auto parents = [&](std::uint64_t instance) { return c.ask<wire::Parents>(wire::RelayTo{instance, {}}); };
  const auto refused = [&](std::uint64_t instance, const std::string& way) {
    const auto answer = parents(instance);
    if (answer) return testing::AssertionFailure() << "not refused";
    if (answer.error().code() != Errc::invalid_argument) return testing::AssertionFailure() << "another code";
    const bool said = answer.error().message().find("it pulls from this one" + way) != std::string::npos;
    return (said ? testing::AssertionSuccess() : testing::AssertionFailure()) << answer.error().message();
  };
  const auto of_trainer = parents(7);
  ASSERT_TRUE(of_trainer) << of_trainer.error().to_string();
  EXPECT_TRUE(of_trainer->list.empty());
  EXPECT_TRUE(refused(c.hello.instance, ", which is its own agent"));

  const std::vector<wire::Parent> above = {{5, "relay1:7070"}, {7, "relay2:7070"}};
  tell_parents(*writer_, {above, 0});
  ASSERT_TRUE(eventually([&] { return parents(1).ok() && parents(1)->list == above; }));
  EXPECT_TRUE(refused(5, ", that from relay1:7070, which is its own agent"));
  EXPECT_TRUE(refused(7, ", that from relay1:7070, that from relay2:7070, which is its own agent"));

  writer_.reset();
  EXPECT_TRUE(eventually([&] { return parents(7).ok(); })) << "it is no relay's any more";
}

TEST_F(Plans, APeerThatLeavesWhileItWaitsIsNoticed) {
  start_agent();
  {
    auto c = client();
    wire::PlanRequest plan = ask();
    plan.wait_ms = 3'600'000;
    ASSERT_TRUE(c.socket.send(1, plan, test_deadline()));
  }
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 0; }));
}

TEST_F(Plans, WatchTellsEachVersion) {
  start_agent();
  auto c = client(wire::Role::watch);
  ASSERT_TRUE(c.socket.send(wire::Type::watch, 5, {}, test_deadline()));
  for (std::uint64_t number = 1; number <= 3; ++number) {
    next_version();
    const auto ready = c.socket.recv_as<wire::VersionReady>(5, test_deadline());
    ASSERT_TRUE(ready) << ready.error().to_string();
    EXPECT_EQ(ready->version.id.number, number);
    EXPECT_EQ(ready->layout, model_.layout->digest());
  }
  auto late = client(wire::Role::watch);
  ASSERT_TRUE(late.socket.send(wire::Type::watch, 6, {}, test_deadline()));
  const auto ready = late.socket.recv_as<wire::VersionReady>(6, test_deadline());
  ASSERT_TRUE(ready);
  EXPECT_EQ(ready->version.id.number, 3u);
}

TEST_F(Plans, APlanEndsWithItsControlConnection) {
  start_agent();
  next_version();
  auto stream = client(wire::Role::data);
  std::uint64_t plan = 0;
  {
    auto c = client();
    const auto reply = c.plan(ask());
    ASSERT_TRUE(reply);
    plan = reply->plan;
    EXPECT_TRUE(stream.extent(plan, all()));
  }
  EXPECT_TRUE(eventually([&] { return agent_->core().leases().list().empty(); }));
  const auto bytes = stream.extent(plan, all());
  ASSERT_FALSE(bytes);
  EXPECT_EQ(bytes.error().code(), Errc::lease_revoked);
}

TEST_F(Plans, NobodyElseReleasesAPlan) {
  start_agent();
  next_version();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  auto other = client();
  EXPECT_TRUE(other.release(reply->plan));
  EXPECT_TRUE(c.extent(reply->plan, all()));
  EXPECT_TRUE(c.release(reply->plan));
  EXPECT_EQ(c.extent(reply->plan, all()).error().code(), Errc::lease_revoked);
  EXPECT_TRUE(c.release(reply->plan)) << "releasing twice is harmless";
  EXPECT_EQ(c.digests(12345).error().code(), Errc::lease_revoked) << "a plan that never was";
}

TEST_F(Plans, PlansOfAConnectionAreLimited) {
  options_.core.plans_per_connection_max = 2;
  start_agent();
  next_version();
  auto c = client();
  const auto first = c.plan(ask());
  ASSERT_TRUE(first);
  ASSERT_TRUE(c.plan(ask()));
  const auto third = c.plan(ask());
  ASSERT_FALSE(third);
  EXPECT_EQ(third.error().code(), Errc::invalid_argument);
  ASSERT_TRUE(c.release(first->plan));
  EXPECT_TRUE(c.plan(ask()));
}

TEST_F(Plans, APlanExpires) {
  options_.core.plan_limit = std::chrono::milliseconds(50);
  start_agent();
  next_version();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  EXPECT_TRUE(eventually([&] { return agent_->core().leases().list().empty(); }));
  EXPECT_EQ(c.digests(reply->plan).error().code(), Errc::lease_revoked);
}

TEST_F(Plans, TheRingIsBoundedAndPlansOutliveIt) {
  start_agent();
  next_version();
  const wire::PlanRequest base = ask_from_served();
  next_version(0.01);
  auto c = client();
  const auto reply = c.plan(base);
  ASSERT_TRUE(reply);
  ASSERT_EQ(reply->mode, wire::PlanMode::delta);
  const std::uint64_t bytes_max = agent_->core().versions().snapshot()->ring_bytes_max;
  EXPECT_EQ(bytes_max, model_.layout->half_bytes() / 20);
  // Until the first delta is evicted; its plan still serves it.
  std::uint64_t steps = 0;
  for (; steps < 60; ++steps) {
    const SnapshotPtr now = agent_->core().versions().snapshot();
    std::uint64_t bytes = 0;
    for (const auto& entry : now->ring) bytes += entry->delta->frame_bytes;
    EXPECT_TRUE(bytes <= bytes_max || now->ring.size() == 1);
    if (now->ring.empty() || now->ring.front()->from.id.number != 1) break;
    next_version(0.01);
  }
  ASSERT_LT(steps, 60u) << "nothing was ever evicted";
  EXPECT_TRUE(c.frames(wire::GetFrames{reply->plan, 0, {all()}}));
  const auto late = c.plan(base);
  ASSERT_TRUE(late);
  EXPECT_EQ(late->mode, wire::PlanMode::full);
}

TEST_F(Plans, PlansThatPinTooMuchAreEnded) {
  start_agent();
  next_version();
  std::vector<Client> clients;
  std::vector<std::uint64_t> plans;
  for (int i = 0; i < 12; ++i) {
    const wire::PlanRequest base = ask_from_served();
    next_version(0.02);
    clients.push_back(client());
    const auto reply = clients.back().plan(base);
    ASSERT_TRUE(reply);
    if (reply->mode == wire::PlanMode::delta) plans.push_back(reply->plan);
  }
  const Metrics& metrics = agent_->core().metrics();
  EXPECT_TRUE(eventually([&] { return metrics.plans_expired > 0; }));
  ASSERT_FALSE(plans.empty());
  EXPECT_EQ(clients.front().frames(wire::GetFrames{plans.front(), 0, {all()}}).error().code(), Errc::lease_revoked);
  EXPECT_TRUE(clients.back().frames(wire::GetFrames{plans.back(), 0, {all()}}));
}

}  // namespace
}  // namespace deltasync::agent
