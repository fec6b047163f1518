// Pulls against an agent that misbehaves, a network that breaks, memory that rots.
#include <atomic>
#include <filesystem>
#include <iterator>

#include "base/deadline.hpp"
#include "receiver/pull/fetch.hpp"
#include "tests/receiver/pull_fixture.hpp"
#include "tests/receiver/remote_memory.hpp"
#include "tests/support/eventually.hpp"
#include "tests/support/without_threads.hpp"

namespace deltasync::test {
namespace {

using wire::Type;

// ---- broken streams ------------------------------------------------------------------------------------------

TEST_F(PullTest, BrokenStreamRefetchesOnlyWhatIsMissing) {
  options_.streams = 2;
  receiver::Tuning tuning = quick();
  tuning.item_bytes = 1u << 20;
  start({}, tuning);
  agent_->on_request(fault_on(Type::get_extent, Fault::drop_midway, 2));
  const PullReport report = pull_and_commit();
  EXPECT_EQ(report.stream_restarts, 1u);
  EXPECT_EQ(report.replans, 0u);
  // At most the bands that were half received, and what was asked for ahead on the same stream, come again.
  EXPECT_LT(agent_->extent_bytes(), model_.layout->half_bytes() + (1536u << 10));
  EXPECT_EQ(report.tiles, model_.layout->tile_count()) << "a verified tile was fetched again";
}

TEST_F(PullTest, StreamsThatBreakAgainAndAgain) {
  start();
  std::atomic<int> n{0};
  agent_->on_request([&](const Request& r) {
    if (r.type != Type::get_extent) return Fault::none;
    return ++n % 3 == 0 ? Fault::drop_midway : Fault::none;
  });
  EXPECT_GT(pull_and_commit().stream_restarts, 3u);
}

TEST_F(PullTest, BrokenStreamsLeaveNoDescriptorOrThread) {
  const auto count = [](const char* directory) {
    return std::distance(std::filesystem::directory_iterator(directory), std::filesystem::directory_iterator());
  };
  options_.streams = 4;
  options_.threads = 3;
  const auto descriptors = count("/proc/self/fd");
  const auto threads = count("/proc/self/task");
  start();
  std::atomic<int> n{0};
  agent_->on_request([&](const Request& r) {
    if (r.type != Type::get_extent && r.type != Type::get_frames) return Fault::none;
    return ++n % 3 == 0 ? Fault::drop_midway : Fault::none;
  });
  std::uint32_t broken = pull_and_commit().stream_restarts;
  for (int i = 0; i < 4; ++i) {
    step(0.2);
    broken += pull_and_commit().stream_restarts;
  }
  EXPECT_GT(broken, 10u);
  agent_.reset();
  EXPECT_LE(count("/proc/self/fd"), descriptors + (4 + 1)) << "one for each connection that is kept";
  // The kernel lists a thread for a moment longer than its join() takes.
  const auto threads_are = [&](std::ptrdiff_t wanted) {
    return eventually([&] { return count("/proc/self/task") == wanted; });
  };
  EXPECT_TRUE(threads_are(threads + (4 - 1) + (3 - 1))) << count("/proc/self/task") << " beside " << threads;
  receiver_.reset();
  EXPECT_EQ(count("/proc/self/fd"), descriptors);
  EXPECT_TRUE(threads_are(threads)) << count("/proc/self/task") << " instead of " << threads;
}

TEST(ReceiverConnect, WithoutThreadsItFails) {
  const int code = run_without_threads([] {
    ReceiverOptions options;
    options.endpoint = "127.0.0.1:9";
    const auto receiver = Receiver::connect(options, Deadline::after(std::chrono::seconds(60)));
    return receiver ? 1 : receiver.error().code() == Errc::no_space ? 0 : 2;
  });
  if (code == kThreadsNotLimited) GTEST_SKIP() << "this machine does not limit threads by RLIMIT_NPROC";
  EXPECT_EQ(code, 0);
}

TEST_F(PullTest, BrokenDuringDelta) {
  start();
  pull_and_commit();
  step(0.1);
  agent_->on_request([](const Request& r) {
    if (r.type != Type::get_frames) return Fault::none;
    return r.ordinal % 2 == 0 ? Fault::drop_midway : Fault::none;
  });
  const PullReport report = pull_and_commit();
  EXPECT_EQ(report.mode, PullMode::delta);
  EXPECT_GE(report.stream_restarts, 1u);
}

TEST_F(PullTest, IdleConnectionsThatTheAgentClosedAreReplacedSilently) {
  start();
  pull_and_commit();
  agent_->restart();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  step();
  const PullReport report = pull_and_commit();
  EXPECT_EQ(report.stream_restarts, 0u);
}

/// It may have closed it while nobody used it, and we ask before we hear of it.
TEST_F(PullTest, AKeptConnectionThatIsClosedAsWeAskIsNoBreak) {
  options_.streams = 1;
  receiver::Tuning tuning = quick();
  tuning.rested = std::chrono::milliseconds(0);
  start({}, tuning);
  pull_and_commit();
  step();
  agent_->on_request(fault_on(Type::get_frames, Fault::drop, 0));
  PullReport report = pull_and_commit();
  EXPECT_EQ(report.mode, PullMode::delta);
  EXPECT_EQ(report.stream_restarts, 0u);
  EXPECT_EQ(report.replans, 0u);
  // A new one that is closed as well is one.
  step();
  std::atomic<int> dropped{0};
  agent_->on_request(
      [&](const Request& r) { return r.type == Type::get_frames && ++dropped <= 2 ? Fault::drop : Fault::none; });
  report = pull_and_commit();
  EXPECT_EQ(report.stream_restarts, 1u);
}

TEST_F(PullTest, HelloDroppedOnDataStreams) {
  start();
  agent_->on_request(
      [](const Request& r) { return r.type == Type::hello && r.ordinal % 2 == 1 ? Fault::drop : Fault::none; });
  pull_and_commit();
}

// ---- wrong bytes ---------------------------------------------------------------------------------------------

TEST_F(PullTest, FlippedBitInAnExtentIsRepaired) {
  start();
  agent_->on_request(fault_on(Type::get_extent, Fault::flip_in_transit, 1));
  const PullReport report = pull_and_commit();
  EXPECT_EQ(report.repaired_tiles, 1u);
  EXPECT_EQ(agent_->requests(Type::get_raw_tiles), 1u);
}

TEST_F(PullTest, ManyFlippedExtentsAndOneBadRepair) {
  start();
  agent_->on_request([](const Request& r) {
    if (r.type == Type::get_extent) return Fault::flip_in_transit;
    if (r.type == Type::get_raw_tiles && r.ordinal == 0) return Fault::flip_at_source;
    return Fault::none;
  });
  EXPECT_GT(pull_and_commit().repaired_tiles, 1u);
}

TEST_F(PullTest, TileThatNeverGetsRightNamesItself) {
  start();
  agent_->on_request([](const Request& r) {
    if (r.type == Type::get_extent) return Fault::flip_in_transit;
    return r.type == Type::get_raw_tiles ? Fault::flip_at_source : Fault::none;
  });
  auto staged = pull();
  ASSERT_FALSE(staged.ok());
  EXPECT_EQ(staged.error().code(), Errc::corrupt);
  EXPECT_NE(staged.error().message().find("tile "), std::string::npos) << staged.error().message();
  EXPECT_NE(staged.error().message().find(agent_->endpoint()), std::string::npos) << staged.error().message();
  EXPECT_FALSE(receiver_->current().has_value());
  agent_->on_request(nullptr);
  pull_and_commit();
}

TEST_F(PullTest, FrameFlippedInTransitIsFetchedAgain) {
  start();
  pull_and_commit();
  step();
  agent_->on_request(fault_on(Type::get_frames, Fault::flip_in_transit, 0));
  const PullReport report = pull_and_commit();
  EXPECT_EQ(report.mode, PullMode::delta);
  EXPECT_EQ(report.stream_restarts, 1u);
}

TEST_F(PullTest, FrameWrongOnceAtTheSourceIsFetchedAgain) {
  start();
  pull_and_commit();
  step();
  agent_->on_request(fault_on(Type::get_frames, Fault::flip_at_source, 0));
  EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
}

TEST_F(PullTest, FramesThatStayWrongLeadToAFullUpdate) {
  start();
  pull_and_commit();
  step();
  agent_->on_request(fault_on(Type::get_frames, Fault::flip_at_source, 0, kAlways));
  const PullReport report = pull_and_commit();
  EXPECT_EQ(report.mode, PullMode::full);
  EXPECT_GE(report.replans, 1u);
}

TEST_F(PullTest, FramesThatNeverArriveWholeLeadToAFullUpdate) {
  for (const Fault fault : {Fault::flip_in_transit, Fault::garbage, Fault::bad_header, Fault::lie_huge}) {
    start();
    pull_and_commit();
    step();
    agent_->on_request(fault_on(Type::get_frames, fault, 0, kAlways));
    EXPECT_EQ(pull_and_commit().mode, PullMode::full) << static_cast<int>(fault);
    agent_->on_request(nullptr);
    step();
    EXPECT_EQ(pull_and_commit().mode, PullMode::delta) << "the connection was in trouble, not what we hold";
    receiver_.reset();
  }
}

TEST_F(PullTest, FramesLargerThanThePlanSaidAreNotReceived) {
  start();
  pull_and_commit();
  step();
  agent_->on_request(fault_on(Type::get_frames, Fault::lie_many, 0, kAlways));
  EXPECT_EQ(pull_and_commit().mode, PullMode::full) << "the streams waited for the bytes that were announced";
}

TEST_F(PullTest, FramesOfTilesThatNobodyAskedFor) {
  start();
  pull_and_commit();
  step();
  agent_->on_request(fault_on(Type::get_frames, Fault::wrong_tiles, 0, kAlways));
  EXPECT_EQ(pull_and_commit().mode, PullMode::full);
}

// They would decode to the right bytes: that nobody asked for them is all that is wrong.
TEST_F(PullTest, FramesInACodecThatNobodyAskedFor) {
  start();
  pull_and_commit();
  step();
  agent_->on_request(fault_on(Type::get_frames, Fault::exponent_classes, 0, kAlways));
  EXPECT_EQ(pull_and_commit().mode, PullMode::full);
  agent_->on_request(nullptr);
  step();
  EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
}

TEST_F(PullTest, ARefusedCodecIsNamed) {
  delta::TileRecord record;
  record.tile = 1;
  for (const delta::Codec codec :
       {delta::Codec::raw, delta::Codec::rice_absolute, delta::Codec::rice_ulp, delta::Codec::dense_ulp}) {
    record.codec = codec;
    for (const bool classes : {false, true}) {
      EXPECT_TRUE(receiver::check_codec(*model_.layout, record, classes)) << to_string(codec);
    }
  }
  record.codec = delta::Codec::rice_class;
  EXPECT_TRUE(receiver::check_codec(*model_.layout, record, true));
  const Status refused = receiver::check_codec(*model_.layout, record, false);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::protocol);
  EXPECT_NE(refused.error().message().find("tile 1 of "), std::string::npos) << refused.error().message();
  EXPECT_NE(refused.error().message().find("rice_class"), std::string::npos) << refused.error().message();
}

TEST_F(PullTest, WrongBaseIsFoundAndReplaced) {
  options_.scrub_tiles = 0;
  start();
  pull_and_commit();
  // The whole tensor: the update is sure to touch some of it.
  const std::uint32_t big = tensor("big.2");
  for (std::uint64_t i = 0; i < model_.layout->tensors()[big].bytes; i += 2) live_byte(big, i) ^= std::byte{1};
  step(0.05);
  const PullReport report = pull_and_commit();
  EXPECT_EQ(report.mode, PullMode::full);
  EXPECT_EQ(pull_and_commit().mode, PullMode::up_to_date) << "it is valid again after the full update";
}

TEST_F(PullTest, WrongBaseUnderSeveralSteps) {
  options_.scrub_tiles = 0;
  start();
  pull_and_commit();
  const std::uint32_t big = tensor("big.4");
  for (std::uint64_t i = 0; i < model_.layout->tensors()[big].bytes; i += 2) live_byte(big, i) ^= std::byte{1};
  step(0.05);
  step(0.05);
  EXPECT_EQ(pull_and_commit().mode, PullMode::full);
}

TEST_F(PullTest, ScrubFindsWhatNoUpdateTouches) {
  options_.scrub_tiles = 4;
  start();
  pull_and_commit();
  const std::uint32_t victim = tensor("norm.250");
  live_byte(victim, 3) ^= std::byte{0x20};
  const auto& layout = *model_.layout;
  const std::uint64_t pulls_max = layout.tile_count() / options_.scrub_tiles + 2;
  bool found = false;
  for (std::uint64_t i = 0; i < pulls_max && !found; ++i) {
    // One change far from the victim.
    model_.half[layout.tensors()[tensor("big.0")].offset + 2 * i] ^= std::byte{1};
    agent_->publish(model_.half);
    auto staged = pull();
    if (staged.ok()) {
      ASSERT_TRUE((*staged)->commit().ok());
      continue;
    }
    found = true;
    EXPECT_EQ(staged.error().code(), Errc::corrupt);
    EXPECT_NE(staged.error().message().find("norm.250"), std::string::npos) << staged.error().message();
  }
  ASSERT_TRUE(found);
  EXPECT_EQ(pull_and_commit().mode, PullMode::full);
  expect_holds_newest();
}

// ---- lies ----------------------------------------------------------------------------------------------------

TEST_F(PullTest, LyingHeadersEndInAnErrorThatSaysSo) {
  for (const Fault fault : {Fault::lie_long, Fault::lie_huge, Fault::bad_header, Fault::garbage}) {
    start();
    agent_->on_request(fault_on(Type::get_extent, fault, 0, kAlways));
    auto staged = pull();
    ASSERT_FALSE(staged.ok()) << static_cast<int>(fault);
    EXPECT_TRUE(staged.error().code() == Errc::protocol || staged.error().code() == Errc::corrupt)
        << staged.error().to_string();
    EXPECT_NE(staged.error().message().find("extent from tile "), std::string::npos) << staged.error().message();
    EXPECT_FALSE(receiver_->current().has_value());
    agent_->on_request(nullptr);
    pull_and_commit();
    receiver_.reset();
  }
}

TEST_F(PullTest, AnExtentThatIsTooLongTouchesNoNeighbour) {
  options_.streams = 2;
  start({}, impatient());
  // The third extent stalls until all others are in and verified, then comes with 64 bytes too many.
  std::atomic<std::uint64_t> victim{~std::uint64_t{0}};
  std::atomic<int> times{0};
  agent_->on_request([&](const Request& r) {
    if (r.type != Type::get_extent) return Fault::none;
    if (r.ordinal == 2) victim = r.tiles.first;
    if (r.tiles.first != victim) return Fault::none;
    switch (times++) {
      case 0: return Fault::stall;
      case 1: return Fault::lie_long;
      default: return Fault::none;
    }
  });
  pull_and_commit();
  EXPECT_EQ(times.load(), 3);
}

TEST_F(PullTest, LiesThatStopAreSurvived) {
  for (const Fault fault : {Fault::lie_long, Fault::lie_huge, Fault::bad_header, Fault::garbage, Fault::refuse}) {
    start();
    agent_->on_request(fault_on(Type::get_extent, fault, 1, 2));
    pull_and_commit();
    step();
    agent_->on_request(fault_on(Type::get_frames, fault == Fault::lie_long ? Fault::drop : fault, 0, 2));
    pull_and_commit();
    receiver_.reset();
  }
}

TEST_F(PullTest, LiesOnTheControlConnection) {
  for (const Type type : {Type::plan, Type::get_digests}) {
    for (const Fault fault : {Fault::drop, Fault::lie_huge, Fault::bad_header, Fault::garbage}) {
      start();
      agent_->on_request(fault_on(type, fault, 0, 2));
      pull_and_commit();
      receiver_.reset();
    }
  }
}

TEST_F(PullTest, DigestTableThatDoesNotFitItsRoot) {
  for (const Fault fault : {Fault::flip_at_source, Fault::lie_long}) {
    start();
    agent_->on_request(fault_on(Type::get_digests, fault, 0, kAlways));
    auto staged = pull();
    ASSERT_FALSE(staged.ok());
    EXPECT_TRUE(staged.error().code() == Errc::corrupt || staged.error().code() == Errc::protocol)
        << staged.error().to_string();
    EXPECT_NE(staged.error().message().find("digest"), std::string::npos) << staged.error().message();
    receiver_.reset();
  }
}

TEST_F(PullTest, AnAgentThatAlwaysRefusesIsNotAskedForEver) {
  start();
  agent_->on_request(fault_on(Type::get_extent, Fault::refuse, 0, kAlways));
  auto staged = pull();
  ASSERT_FALSE(staged.ok());
  EXPECT_EQ(staged.error().code(), Errc::internal);
  EXPECT_NE(staged.error().message().find("told to refuse"), std::string::npos) << staged.error().message();
}

// ---- memory that refuses -------------------------------------------------------------------------------------

/// The target's own error ends the pull at once: no other bytes, stream or plan would help.
TEST_F(PullTest, AnErrorOfTheTargetsMemoryEndsThePull) {
  start();
  auto* const remote = new RemoteMemory(model_.layout);
  ASSERT_TRUE(receiver_->bind(std::unique_ptr<Target>(remote), in_ms(60'000)).ok());
  const auto expect_refused = [&](const char* memory_step) {
    SCOPED_TRACE(memory_step);
    const auto staged = pull();
    ASSERT_FALSE(staged.ok());
    EXPECT_EQ(staged.error().code(), Errc::io) << staged.error().to_string();
    EXPECT_NE(staged.error().message().find(memory_step), std::string::npos) << staged.error().message();
    EXPECT_EQ(remote->forget_faults(), 0u);
  };
  const auto expect_delivered = [&](PullMode mode) {
    auto staged = pull();
    ASSERT_TRUE(staged.ok()) << staged.error().to_string();
    EXPECT_EQ((*staged)->report().mode, mode);
    EXPECT_EQ((*staged)->report().replans, 0u);
    ASSERT_TRUE((*staged)->commit().ok());
    EXPECT_EQ(remote->memory(), agent_->newest());
  };
  remote->fail("put", 20);
  expect_refused("put");
  expect_delivered(PullMode::full);
  step(0.05);
  remote->fail("read_tile", 20);
  expect_refused("read_tile");
  EXPECT_TRUE(receiver_->current().has_value());
  expect_delivered(PullMode::delta);
  step(0.05);
  step(0.05);
  remote->fail("read_tile", 20);
  expect_refused("read_tile");
  expect_delivered(PullMode::delta);
}

}  // namespace
}  // namespace deltasync::test
