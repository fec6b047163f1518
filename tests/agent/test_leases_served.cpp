// The guard of invariant 2 from end to end: readers, writers that need their half, revocation; and new layouts,
// restarts.
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <thread>

#include "base/deadline.hpp"
#include "delta/delta.hpp"
#include "tests/agent/agent_harness.hpp"

namespace deltasync::agent {
namespace {

using namespace std::chrono_literals;

/// One tensor of 48 MiB: far more than the sockets between us buffer.
std::vector<TensorSpec> big_specs() {
  TensorSpec spec;
  spec.name = "big";
  spec.dtype = Dtype::bf16;
  spec.shape = {6144, 4096};
  return {spec};
}

class ServedLeases : public AgentTest {
 protected:
  wire::TileRange all() const { return {0, model_.layout->tile_count()}; }
  bool segment_exists(std::uint64_t generation) const {
    return std::filesystem::exists(dir_.path() / ("test.g" + std::to_string(generation)));
  }
};

TEST_F(ServedLeases, AWriterRevokesWhatItNeedsAfterTheGrace) {
  options_.core.lease_grace = 10ms;
  start_agent();
  next_version();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  next_version();  // the other half: nobody is in the way
  EXPECT_TRUE(c.extent(reply->plan, all()));
  EXPECT_EQ(agent_->core().metrics().leases_revoked, 0u);
  next_version();  // needs the leased half
  EXPECT_TRUE(revoked(1));
  EXPECT_EQ(c.extent(reply->plan, all()).error().code(), Errc::lease_revoked);
  EXPECT_EQ(c.frames(wire::GetRawTiles{reply->plan, {all()}}).error().code(), Errc::lease_revoked);
  EXPECT_TRUE(c.digests(reply->plan)) << "the digests fixed at publication stay";
}

TEST_F(ServedLeases, AReleasedHalfIsNotRevoked) {
  options_.core.lease_grace = 1h;
  start_agent();
  next_version();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  next_version();
  std::thread releaser([&] {
    // Once the writer waits.
    EXPECT_TRUE(eventually(
        [&] { return agent_->core().versions().generations().front()->role->writer_waiting().has_value(); }));
    EXPECT_TRUE(c.release(reply->plan));
  });
  next_version();
  releaser.join();
  EXPECT_EQ(agent_->core().metrics().leases_revoked, 0u);
}

TEST_F(ServedLeases, TheGraceNeverTakesMoreThanHalfOfTheWritersTime) {
  options_.core.lease_grace = 1h;
  start_agent();
  next_version();
  auto c = client();
  ASSERT_TRUE(c.plan(ask()));
  next_version();
  const auto report = offload(*writer_, model_.half, ++number_, Deadline::after(6s));
  EXPECT_TRUE(report) << report.error().to_string();
  EXPECT_TRUE(revoked(1));
}

/// Waits for half of the first writer's time; from then on for nothing, as often as it comes back.
TEST_F(ServedLeases, WhoLostALeaseHoldsUpNobodyAnyMore) {
  model_ = test::make_model(1, big_specs());
  options_.core.lease_grace = 1h;
  options_.pull.limits.progress = 1h;
  start_agent();
  next_version();
  for (int i = 0; i < 4; ++i) {
    SCOPED_TRACE(i);
    auto c = client();
    const auto reply = c.plan(ask());
    ASSERT_TRUE(reply);
    auto stream = client(wire::Role::data);
    ASSERT_TRUE(stream.socket.send(1, wire::GetExtent{reply->plan, all()}, test_deadline()));  // and does not read
    next_version();
    const Deadline deadline = i == 0 ? Deadline::after(6s) : Deadline::after(2h);
    const auto report = offload(*writer_, model_.half, ++number_, deadline);
    ASSERT_TRUE(report) << report.error().to_string();
    EXPECT_TRUE(revoked(static_cast<std::uint64_t>(i) + 1));
  }
}

/// What was copied out of the half before it was taken away arrives, and is that version's.
TEST_F(ServedLeases, CopiesArriveAfterARevocation) {
  model_ = test::make_model(1, big_specs());
  options_.core.lease_grace = 10ms;
  options_.pull.limits.progress = 1h;
  start_agent();
  next_version();
  {
    auto loser = client();
    ASSERT_TRUE(loser.plan(ask()));
    next_version();
    next_version();
  }
  ASSERT_TRUE(revoked(1));
  const std::vector<std::byte> bytes = model_.half;
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  auto stream = client(wire::Role::data);
  ASSERT_TRUE(stream.socket.send(1, wire::GetExtent{reply->plan, all()}, test_deadline()));
  // Until the buffers between us are full: then it waits, and not inside the half.
  std::uint64_t sent = 0;
  ASSERT_TRUE(eventually([&] {
    const std::uint64_t before = std::exchange(sent, agent_->core().metrics().bytes_extent.load());
    std::this_thread::sleep_for(100ms);
    return before != 0 && before == sent;
  }));
  for (int i = 0; i < 2; ++i) next_version();
  EXPECT_TRUE(revoked(2));
  std::vector<std::byte> got;
  for (;;) {
    const auto message = stream.socket.recv(wire::kExtentBytesMax, test_deadline());
    ASSERT_TRUE(message) << "the connection stays: " << message.error().to_string();
    if (message->type() != wire::Type::extent) {
      ASSERT_EQ(message->type(), wire::Type::error);
      EXPECT_EQ(wire::ErrorMessage::decode(message->payload).value().code, Errc::lease_revoked);
      break;
    }
    got.insert(got.end(), message->payload.begin(), message->payload.end());
  }
  EXPECT_GE(got.size(), sent);
  EXPECT_LT(got.size(), bytes.size()) << "all was in the buffers: nothing was tested";
  EXPECT_TRUE(std::equal(got.begin(), got.end(), bytes.begin()));
}

TEST_F(ServedLeases, WhoGivesLeasesBackInTimeGetsThemAsBefore) {
  model_ = test::make_model(1, big_specs());
  options_.core.lease_grace = 40ms;
  start_agent();
  next_version();
  const auto first_extent = [&](Client& c, std::uint64_t plan) {
    EXPECT_TRUE(c.socket.send(100, wire::GetExtent{plan, all()}, test_deadline()));
    std::uint64_t bytes = 0;
    for (;;) {
      const auto message = c.socket.recv(wire::kExtentBytesMax, test_deadline());
      if (!message || message->type() != wire::Type::extent) return bytes;
      if (bytes == 0) bytes = message->payload.size();
    }
  };
  auto c = client();
  auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  const std::uint64_t whole = first_extent(c, reply->plan);
  next_version();
  next_version();
  ASSERT_TRUE(revoked(1));
  reply = c.plan(ask());
  ASSERT_TRUE(reply);
  EXPECT_LT(first_extent(c, reply->plan), whole) << "copied, piece by piece";
  ASSERT_TRUE(c.release(reply->plan));  // in time
  reply = c.plan(ask());
  ASSERT_TRUE(reply);
  EXPECT_EQ(first_extent(c, reply->plan), whole);
}

TEST_F(ServedLeases, ASenderThatIsBlockedLeavesTheHalf) {
  model_ = test::make_model(1, big_specs());
  options_.core.lease_grace = 10ms;
  options_.pull.limits.progress = 1h;  // only the revocation wakes it
  start_agent();
  next_version();
  const auto before = *served()->digests;
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  auto stream = client(wire::Role::data);
  ASSERT_TRUE(stream.socket.send(1, wire::GetExtent{reply->plan, all()}, test_deadline()));
  // Nobody reads: the sender fills the buffers and waits inside the half.
  ASSERT_TRUE(eventually([&] {
    const auto list = agent_->core().leases().list();
    return list.size() == 1 && list[0].readers == 1;
  }));
  next_version();
  next_version();  // has to get the half although the reader sleeps
  EXPECT_TRUE(revoked(1));
  EXPECT_TRUE(agent_->core().leases().list().empty()) << "no reader is inside any more";
  // The reader wakes up: what it gets ends early, or in an error between two extents.
  std::uint64_t got = 0;
  for (;;) {
    const auto message = stream.socket.recv(wire::kExtentBytesMax, test_deadline());
    if (!message || message->type() != wire::Type::extent) break;
    got += message->payload.size();
  }
  EXPECT_LT(got, model_.layout->half_bytes());
}

/// Who does not read may be stuck anywhere, also in the end of an answer.
TEST_F(ServedLeases, PeersThatDoNotReadHoldNoHalf) {
  TensorSpec spec;
  spec.name = "small";
  spec.dtype = Dtype::bf16;
  spec.shape = {8};
  model_ = test::make_model(1, {spec});
  options_.core.lease_grace = 10ms;
  options_.pull.limits.progress = 1h;
  start_agent();
  next_version();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  // Each stream has another mix, and so gets stuck at another place.
  struct Talker {
    Client stream;
    std::vector<std::byte> requests;
    std::size_t at = 0;
  };
  std::mt19937_64 random(5);
  std::vector<Talker> talkers(64);
  for (Talker& talker : talkers) {
    talker.stream = client(wire::Role::data);
    const int few = 4096;
    ::setsockopt(talker.stream.socket.fd(), SOL_SOCKET, SO_RCVBUF, &few, sizeof few);
    ByteWriter out(talker.requests);
    for (int i = 0; i < 500; ++i) {
      const bool extent = random() % 8 != 0;
      const std::vector<std::byte> payload =
          extent ? wire::GetExtent{reply->plan, all()}.encode() : wire::GetDigests{reply->plan}.encode();
      out.append(bytes_of(wire::make_header(extent ? wire::Type::get_extent : wire::Type::get_digests, 1, payload)));
      out.append(payload);
    }
  }
  // Until the agent takes no more, since it cannot answer.
  for (int refused = 0; refused < 20; ++refused) {
    for (Talker& talker : talkers) {
      const ByteSpan rest = ByteSpan(talker.requests).subspan(talker.at);
      const ssize_t n = ::send(talker.stream.socket.fd(), rest.data(), rest.size(), MSG_DONTWAIT);
      ASSERT_TRUE(n > 0 || errno == EAGAIN);
      if (n <= 0) continue;
      talker.at = (talker.at + static_cast<std::size_t>(n)) % talker.requests.size();
      refused = 0;
    }
    std::this_thread::sleep_for(5ms);
  }
  next_version();
  next_version();  // has to get the half although nobody reads
  EXPECT_TRUE(revoked(1));
  EXPECT_TRUE(agent_->core().leases().list().empty());
}

TEST_F(ServedLeases, ASlowReaderLetsGoOfDeltasThatLeftTheRing) {
  model_ = test::make_model(1, big_specs());
  options_.core.ring_bytes_max = 1;
  options_.pull.limits.progress = 1h;
  start_agent();
  next_version();
  const wire::PlanRequest plan = ask_from_served();
  next_version(0.5);
  auto c = client();
  const auto reply = c.plan(plan);
  ASSERT_TRUE(reply);
  ASSERT_EQ(reply->mode, wire::PlanMode::delta);
  constexpr std::uint64_t kTimes = 8;
  const std::uint64_t asked = kTimes * reply->steps.at(0).frame_bytes;
  ASSERT_GT(asked, 32u << 20) << "more than the sockets between us buffer";
  const std::weak_ptr<const RingEntry> entry = agent_->core().versions().snapshot()->ring.at(0);
  auto stream = client(wire::Role::data);
  for (std::uint64_t i = 0; i < kTimes; ++i) {
    ASSERT_TRUE(stream.socket.send(1, wire::GetFrames{reply->plan, 0, {all()}}, test_deadline()));
  }
  ASSERT_TRUE(stream.socket.recv(wire::kFrameBytesMax, test_deadline())) << "the answer has begun";
  next_version(0.5);  // the ring is over its bound
  EXPECT_TRUE(eventually([&] { return entry.expired(); }));
  EXPECT_EQ(agent_->core().metrics().plans_expired, 1u);
  EXPECT_EQ(c.frames(wire::GetFrames{reply->plan, 0, {all()}}).error().code(), Errc::lease_revoked);
  std::uint64_t got = 0;
  for (;;) {
    const auto message = stream.socket.recv(wire::kFrameBytesMax, test_deadline());
    if (!message || message->type() == wire::Type::error) break;
    got += message->payload.size();
  }
  EXPECT_LT(got, asked);
}

TEST_F(ServedLeases, AReceiverThatStopsReadingIsDropped) {
  model_ = test::make_model(1, big_specs());
  options_.pull.limits.progress = 50ms;
  start_agent();
  next_version();
  auto c = client();
  const auto reply = c.plan(ask());
  ASSERT_TRUE(reply);
  auto stream = client(wire::Role::data);
  ASSERT_TRUE(stream.socket.send(1, wire::GetExtent{reply->plan, all()}, test_deadline()));
  EXPECT_TRUE(eventually([&] { return agent_->pull_server().connections() == 1; })) << "only the control connection";
  const auto list = agent_->core().leases().list();
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0].readers, 0u);
}

/// What has arrived while the lease lived is right, however fast the trainer steps. (What arrives later may be torn:
/// the pages wait in the socket. That is why receivers verify, and why the acknowledgement is theirs.)
TEST_F(ServedLeases, NothingThatArrivedUnderALiveLeaseIsTorn) {
  options_.core.lease_grace = 1ms;
  start_agent();
  next_version();
  std::atomic<bool> stop{false};
  std::atomic<int> whole{0};
  std::atomic<int> wrong{0};
  const auto pull_often = [&] {
    auto c = client();
    auto stream = client(wire::Role::data);
    while (!stop) {
      const auto reply = c.plan(ask());
      if (!reply) continue;
      const auto digests = c.digests(reply->plan);
      auto bytes = stream.extent(reply->plan, all());
      if (!bytes && !stream.socket.open()) stream = client(wire::Role::data);
      const auto plan = agent_->core().open_plans().find(reply->plan);
      const bool live = plan && (*plan)->lease->live();
      static_cast<void>(c.release(reply->plan));
      if (!bytes || !digests || !live) continue;
      bytes->resize(model_.layout->half_bytes());
      std::vector<std::uint64_t> got(digests->size());
      ThreadPool pool(1, "check");
      delta::half_digests(*model_.layout, *bytes, got, pool);
      wrong += got != *digests;
      ++whole;
    }
  };
  std::thread one(pull_often);
  std::thread two(pull_often);
  for (int i = 0; i < 100 || (whole < 20 && i < 2000); ++i) next_version(0.05);
  stop = true;
  one.join();
  two.join();
  EXPECT_GT(whole, 0);
  EXPECT_EQ(wrong, 0);
}

/// A lease that begins after its version was superseded may begin too late for the publisher to see it.
TEST_F(ServedLeases, APlanThatWasOvertakenIsMadeAgain) {
  std::function<void()> meanwhile;
  options_.core.before_plan_counts = [&] {
    if (meanwhile) std::exchange(meanwhile, nullptr)();
  };
  start_agent();
  next_version();
  meanwhile = [&] { next_version(); };
  std::string waiting_for;
  PendingPlan pending;
  const auto reply = agent_->core().plans().plan(ask(), {}, &waiting_for, pending);
  ASSERT_TRUE(reply) << reply.error().to_string();
  ASSERT_TRUE(*reply) << waiting_for;
  EXPECT_EQ((*reply)->target.label, "step_2");
  const auto leases = agent_->core().leases().list();
  ASSERT_EQ(leases.size(), 1u) << "the first has ended";
  EXPECT_EQ(leases.front().key, served()->half);
  EXPECT_EQ(agent_->core().open_plans().list().size(), 1u);
  EXPECT_EQ(agent_->core().metrics().leases, 1u);
  EXPECT_EQ(agent_->core().metrics().pulls_full, 1u);
}

/// The same where what is served is released meanwhile: no plan may keep its memory.
TEST_F(ServedLeases, APlanThatWasReleasedMeanwhileHoldsNothing) {
  std::function<void()> meanwhile;
  options_.core.before_plan_counts = [&] {
    if (meanwhile) std::exchange(meanwhile, nullptr)();
  };
  start_agent();
  next_version();
  meanwhile = [&] { EXPECT_TRUE(agent_->core().versions().release_all("the test")); };
  std::string waiting_for;
  PendingPlan pending;
  const auto reply = agent_->core().plans().plan(ask(), {}, &waiting_for, pending);
  EXPECT_TRUE(!reply || !*reply);
  EXPECT_TRUE(agent_->core().open_plans().list().empty());
  EXPECT_TRUE(agent_->core().leases().list().empty());
}

TEST_F(ServedLeases, ARestartedAgentServesTheLastVersion) {
  start_agent();
  next_version();
  next_version();
  const wire::PlanRequest plan = ask_from_served();
  writer_.reset();
  stop_agent();
  EXPECT_TRUE(segment_exists(1));
  start_agent();
  auto c = client();
  wire::PlanRequest waiting = plan;
  waiting.wait_ms = 60'000;
  const auto same = c.plan(waiting);
  ASSERT_TRUE(same) << same.error().to_string();
  EXPECT_EQ(same->mode, wire::PlanMode::up_to_date) << "the digests were computed again and are the same";
  EXPECT_EQ(same->target.label, "step_2");
  EXPECT_EQ(agent_->core().versions().snapshot()->ring.size(), 1u) << "kept beside the segment";
  next_version();
  const auto delta = c.plan(plan);
  ASSERT_TRUE(delta);
  EXPECT_EQ(delta->mode, wire::PlanMode::delta);
}

TEST_F(ServedLeases, ATrainerRestartWithALowerNumberIsANewerVersion) {
  start_agent();
  next_version();
  next_version();
  const wire::PlanRequest plan = ask_from_served();
  writer_.reset();
  epoch_ = make_epoch(epoch_);
  number_ = 0;
  next_version();
  auto c = client();
  const auto reply = c.plan(plan);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->mode, wire::PlanMode::delta);
  EXPECT_EQ(reply->target.id, (VersionId{epoch_, 1}));
}

TEST_F(ServedLeases, ANewLayoutTakesOverWhenItSeals) {
  start_agent();
  next_version();
  auto c = client();
  const auto old = c.plan(ask());
  ASSERT_TRUE(old);
  const auto old_half = model_.half;

  test::TestModel other = test::make_model(2, big_specs());
  const auto beside = agent_->core().trainer_hooks().open_segment(other.layout, other.layout->encode(), {}, {});
  ASSERT_FALSE(beside) << "a live writer has the other layout";
  EXPECT_EQ(beside.error().code(), Errc::layout_mismatch);

  writer_.reset();
  ASSERT_TRUE(eventually([&] { return agent_->core().versions().generations().front()->role->watch_fds().empty(); }));
  auto writer = attach(other.layout);
  ASSERT_NE(writer, nullptr);
  EXPECT_TRUE(segment_exists(2));
  const auto meanwhile = c.plan(ask());
  ASSERT_TRUE(meanwhile) << "the old layout serves until the new one seals";
  EXPECT_EQ(meanwhile->mode, wire::PlanMode::full);
  ASSERT_TRUE(c.release(meanwhile->plan));

  const auto report = offload(*writer, other.half, 9);
  ASSERT_TRUE(report) << report.error().to_string();
  const auto mismatch = c.plan(ask());
  ASSERT_FALSE(mismatch);
  EXPECT_EQ(mismatch.error().code(), Errc::layout_mismatch);
  const auto bytes = c.extent(old->plan, all());
  ASSERT_TRUE(bytes) << "who reads the old one may finish: " << bytes.error().to_string();
  EXPECT_EQ(std::memcmp(bytes->data(), old_half.data(), bytes->size()), 0);
  EXPECT_TRUE(segment_exists(1));
  ASSERT_TRUE(c.release(old->plan));
  EXPECT_TRUE(eventually([&] { return !segment_exists(1); }));
  EXPECT_EQ(agent_->core().versions().generations().size(), 1u);
  writer.reset();
}

TEST_F(ServedLeases, ANewSidecarOfTheSameLayoutIsANewGeneration) {
  start_agent();
  next_version();
  Sidecar other = make_sidecar(*model_.layout);
  other.others.push_back({"config.json", std::vector<std::byte>(7, std::byte{'x'})});
  const std::vector<std::byte> encoded = other.encode();
  const auto beside = agent_->core().trainer_hooks().open_segment(model_.layout, model_.layout->encode(), encoded, {});
  ASSERT_FALSE(beside) << "a live writer has the other files";
  EXPECT_EQ(beside.error().code(), Errc::layout_mismatch);
  EXPECT_NE(beside.error().message().find("config.json"), std::string::npos) << beside.error().message();
  EXPECT_NE(beside.error().message().find(std::to_string(::getpid())), std::string::npos) << beside.error().message();
  const auto same = agent_->core().trainer_hooks().open_segment(model_.layout, model_.layout->encode(), {}, {});
  ASSERT_TRUE(same) << "who brings no files has nothing against those that are there";
  EXPECT_EQ(same->generation, 1u);

  writer_.reset();
  WriterOptions options;
  options.agent_socket = options_.trainer.socket_path;
  options.threads = 1;
  auto writer = Writer::attach(model_.layout, other, options, test_deadline());
  ASSERT_TRUE(writer) << writer.error().to_string();
  writer_ = std::move(*writer);
  const wire::PlanRequest plan = ask_from_served();
  next_version();
  EXPECT_EQ(served()->half.generation, 2u);
  const ByteSpan now = served()->generation->segment->sidecar_encoded();
  EXPECT_TRUE(std::equal(now.begin(), now.end(), encoded.begin(), encoded.end()));
  auto c = client();
  const auto reply = c.plan(plan);
  ASSERT_TRUE(reply) << "the layout is the same: " << reply.error().to_string();
  EXPECT_EQ(reply->mode, wire::PlanMode::full);
}

TEST_F(ServedLeases, AGoodbyeLostWithAnAgentDoesNotBindItsProcess) {
  start_agent();
  next_version();
  stop_agent();
  writer_.reset();  // nobody hears it
  start_agent();
  test::TestModel other = test::make_model(2, big_specs());
  auto writer = attach(other.layout);
  ASSERT_NE(writer, nullptr);
  EXPECT_TRUE(segment_exists(2));
}

TEST_F(ServedLeases, ALayoutThatNeverSealedIsDropped) {
  start_agent();
  next_version();
  writer_.reset();
  test::TestModel other = test::make_model(2, big_specs());
  ASSERT_TRUE(eventually([&] { return agent_->core().versions().generations().front()->role->watch_fds().empty(); }));
  attach(other.layout).reset();
  ASSERT_TRUE(segment_exists(2));
  ASSERT_TRUE(eventually([&] { return agent_->core().versions().generations().back()->role->watch_fds().empty(); }));
  next_version();  // the first trainer again
  EXPECT_FALSE(segment_exists(2));
  EXPECT_EQ(served()->half.generation, 1u);
  auto c = client();
  EXPECT_TRUE(c.plan(ask()));
}

TEST_F(ServedLeases, LowMemoryReleasesTheOldLayoutFirst) {
  options_.core.low_memory = true;
  start_agent();
  next_version();
  auto c = client();
  const auto old = c.plan(ask());
  ASSERT_TRUE(old);
  auto watcher = client(wire::Role::watch);
  ASSERT_TRUE(watcher.socket.send(wire::Type::watch, 1, {}, test_deadline()));
  ASSERT_TRUE(watcher.socket.recv_as<wire::VersionReady>(1, test_deadline())) << "it holds nothing from now on";
  writer_.reset();
  ASSERT_TRUE(eventually([&] { return agent_->core().versions().generations().front()->role->watch_fds().empty(); }));
  test::TestModel other = test::make_model(2, big_specs());
  auto writer = attach(other.layout);
  ASSERT_NE(writer, nullptr);
  EXPECT_FALSE(segment_exists(1));
  EXPECT_TRUE(segment_exists(2));
  EXPECT_EQ(c.extent(old->plan, all()).error().code(), Errc::lease_revoked);
  EXPECT_EQ(c.plan(ask()).error().code(), Errc::layout_mismatch);
  EXPECT_TRUE(offload(*writer, other.half, 1));
  const auto ready = watcher.socket.recv_as<wire::VersionReady>(1, test_deadline());
  ASSERT_TRUE(ready);
  EXPECT_EQ(ready->layout, other.layout->digest());
}

TEST_F(ServedLeases, ReadersHaveALimitAtARelease) {
  options_.core.low_memory = true;
  options_.core.release_limit = std::chrono::milliseconds(50);
  start_agent();
  next_version();
  const GenerationPtr reader = served()->generation;
  writer_.reset();
  ASSERT_TRUE(eventually([&] { return agent_->core().versions().generations().front()->role->watch_fds().empty(); }));
  const test::TestModel other = test::make_model(2, big_specs());
  WriterOptions options;
  options.agent_socket = options_.trainer.socket_path;
  const auto refused = Writer::attach(other.layout, make_sidecar(*other.layout), options, test_deadline());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::timed_out);
  EXPECT_NE(refused.error().message().find("is still read"), std::string::npos) << refused.error().message();
}

TEST_F(ServedLeases, UnmappingIsNotHeldAgainstAReleasesReaders) {
  options_.core.low_memory = true;
  options_.core.release_limit = std::chrono::seconds(4);
  options_.core.before_unmap = [] { std::this_thread::sleep_for(std::chrono::seconds(5)); };
  start_agent();
  next_version();
  writer_.reset();
  ASSERT_TRUE(eventually([&] { return agent_->core().versions().generations().front()->role->watch_fds().empty(); }));
  const test::TestModel other = test::make_model(2, big_specs());
  EXPECT_NE(attach(other.layout), nullptr);
}

TEST_F(ServedLeases, BadSegmentsAreRemovedAtStart) {
  dir_.write("test.g7", std::string_view("this is no segment"));
  ::chmod((dir_.path() / "test.g7").c_str(), 0600);
  dir_.write("test.g7x", std::string_view("not ours"));
  dir_.write("other.g1", std::string_view("not ours"));
  start_agent();
  EXPECT_FALSE(segment_exists(7));
  EXPECT_TRUE(std::filesystem::exists(dir_.path() / "test.g7x"));
  EXPECT_TRUE(std::filesystem::exists(dir_.path() / "other.g1"));
  next_version();
  EXPECT_TRUE(segment_exists(8)) << "numbers go on";
}

/// Whatever descriptor is the one that is missing: a start may fail, the last version stays.
TEST_F(ServedLeases, AStartThatFailsForWantOfDescriptorsKeepsTheSegment) {
  start_agent();
  next_version();
  const Digest128 root = served()->root;
  writer_.reset();
  stop_agent();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  options_.remove_segment_on_exit = true;  // what was adopted by a start that failed is not this agent's
  int failed = 0;
  for (std::size_t spare = 0; spare < 40; ++spare) {
    std::vector<UniqueFd> fillers;
    const rlimit few{256, before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    for (UniqueFd fd(::dup(0)); fd; fd = UniqueFd(::dup(0))) fillers.push_back(std::move(fd));
    ASSERT_GE(fillers.size(), spare);
    fillers.resize(fillers.size() - spare);
    auto agent = Agent::start(options_);
    fillers.clear();
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    if (agent) {
      agent_ = std::move(*agent);
      break;
    }
    ++failed;
    ASSERT_TRUE(segment_exists(1)) << agent.error().to_string();
    EXPECT_FALSE(std::filesystem::exists(options_.trainer.socket_path));
  }
  EXPECT_GT(failed, 2);
  ASSERT_NE(agent_, nullptr);
  ASSERT_TRUE(eventually([&] { return served() != nullptr; }));
  EXPECT_EQ(served()->root, root);
}

TEST_F(ServedLeases, ASegmentThatOthersMayTouchStopsTheStart) {
  start_agent();
  next_version();
  writer_.reset();
  stop_agent();
  ::chmod((dir_.path() / "test.g1").c_str(), 0666);
  const auto agent = Agent::start(options_);
  ASSERT_FALSE(agent);
  EXPECT_EQ(agent.error().code(), Errc::permission);
  EXPECT_TRUE(segment_exists(1));
}

}  // namespace
}  // namespace deltasync::agent
