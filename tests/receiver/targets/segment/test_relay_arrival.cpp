// The first version streams through relays: who pulls from a relay's agent has tiles of it before the relay has it
// whole. Whatever happens to one of them meanwhile, all end with the trainer's bytes.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stop_token>
#include <string>
#include <thread>

#include "tests/receiver/fake_agent.hpp"
#include "tests/receiver/targets/segment/relay_hop.hpp"
#include "tests/support/rationed_link.hpp"

namespace deltasync::agent {
namespace {

constexpr std::size_t kSomeBytes = 6u << 20;
constexpr std::size_t kAllBytes = std::size_t{1} << 40;
constexpr std::uint64_t kTold = 1u << 20;  ///< more than what an agent says beside tiles

class RelayArrival : public ReceiverTest {
 protected:
  RelayArrival() {
    model_ = test::make_model(3, {{"w", Dtype::bf16, {8192, 1024}, {}, {}}});  // 16 MiB
    options_.core.lease_grace = std::chrono::milliseconds(100);
    options_.core.ring_bytes_max = 256u << 20;
    options_.pull.listen.port = port_.number();  // found at the same place after a restart
  }
  void SetUp() override {
    start_agent();
    next_version();
    link_ = std::make_unique<test::RationedLink>(port());
    link_->grant(kSomeBytes);
  }
  ~RelayArrival() override {
    if (child_.joinable()) child_.join();
  }

  /// Pulls until it has a version; of `slices`, or all of it.
  void start_child(const std::string& from, std::optional<bool> local = false, const std::vector<Slice>& slices = {}) {
    ReceiverOptions options;
    options.endpoint = from;
    options.streams = 2;
    options.local = local;
    auto receiver = Receiver::connect(options, test_deadline());
    ASSERT_TRUE(receiver) << receiver.error().to_string();
    receiver_ = std::move(*receiver);
    auto target = make_host_target(model_.layout);
    const Status bound = slices.empty() ? receiver_->bind(std::move(target), test_deadline())
                                        : receiver_->bind(std::move(target), slices, test_deadline());
    ASSERT_TRUE(bound) << bound.error().to_string();
    child_ = std::thread([this] { report_ = pull(*receiver_); });
  }
  void child_has_newest() {
    child_.join();
    EXPECT_EQ(report_.version.id.number, number_);
    EXPECT_EQ(report_.root, served()->root);
    EXPECT_TRUE(held(*receiver_) == model_.half);
  }
  std::string trainers() const { return port_.endpoint(); }
  /// How long it takes until it has the newest version.
  std::chrono::duration<double> child_goes_on() {
    const auto since = std::chrono::steady_clock::now();
    child_has_newest();
    return std::chrono::steady_clock::now() - since;
  }
  std::uint64_t sent_by_trainers() const { return metrics().bytes_extent + metrics().bytes_raw_tiles; }
  /// As if the wire were of so many bytes a second, until it is destroyed.
  static std::jthread flow(test::RationedLink& link, double bytes_per_s) {
    return std::jthread([&link, bytes_per_s](const std::stop_token& stop) {
      const auto since = std::chrono::steady_clock::now();
      for (std::size_t granted = 0; !stop.stop_requested();) {
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - since;
        const auto due = static_cast<std::size_t>(passed.count() * bytes_per_s);
        link.grant(due - granted);
        granted = due;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      link.grant(kAllBytes);
    });
  }
  /// Somebody writes to a byte of what arrives at the hop.
  static void damage(const Hop& hop, std::uint64_t at) {
    const ServedPtr arriving = hop.now()->arriving;
    ASSERT_NE(arriving, nullptr);
    std::byte byte = arriving->bytes()[at] ^ std::byte{1};
    ASSERT_EQ(::pwrite(arriving->file(), &byte, 1, static_cast<off_t>(arriving->file_offset() + at)), 1);
  }
  static bool becomes(const std::function<bool()>& condition) { return eventually(condition); }

  const test::HeldPort port_;
  std::unique_ptr<test::RationedLink> link_;
  std::unique_ptr<Receiver> receiver_;
  PullReport report_;
  std::thread child_;
};

TEST_F(RelayArrival, AChildHasTilesBeforeTheRelayHasThemAll) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint());
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  EXPECT_FALSE(hop.serves());
  link_->grant(kAllBytes);
  child_has_newest();
  EXPECT_LE(report_.replans, 2u) << "it waits for tiles, and does not ask again and again";
  EXPECT_TRUE(becomes([&] { return hop.serves(); }));
  EXPECT_EQ(hop.now()->served->root, served()->root);
  EXPECT_TRUE(becomes([&] { return hop.now()->arriving == nullptr; }));
}

TEST_F(RelayArrival, AChainPassesTilesOnBeforeItsFirstHasThemAll) {
  Hop first(link_->endpoint());
  Hop second(first.endpoint());
  start_child(second.endpoint());
  ASSERT_TRUE(becomes([&] { return second.sent() > kTold; }));
  EXPECT_FALSE(first.serves());
  link_->grant(kAllBytes);
  child_has_newest();
  for (const Hop* hop : {&first, &second}) {
    EXPECT_TRUE(becomes([&] { return hop->serves(); }));
    EXPECT_EQ(hop->now()->served->root, served()->root);
  }
}

/// A copy out of memory takes no time on a link, and needs the half.
TEST_F(RelayArrival, AChildOnTheSameHostCopiesItOnceItIsWhole) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint(), std::nullopt);
  ASSERT_TRUE(becomes([&] { return hop.now()->arriving != nullptr; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(hop.sent(), 0u);
  link_->grant(kAllBytes);
  child_has_newest();
  EXPECT_EQ(report_.local_bytes, model_.half.size());
}

TEST_F(RelayArrival, AChildOfSlices) {
  Hop hop(link_->endpoint());
  const Slice theirs = *row_slice(*model_.layout, "w", 1, 4);
  start_child(hop.endpoint(), false, {theirs});
  link_->grant(kSomeBytes);  // some of it is theirs
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; })) << "before the seal";
  EXPECT_FALSE(hop.serves());
  link_->grant(kAllBytes);
  child_.join();
  const std::uint64_t at = 2048 * model_.layout->tensors()[0].row_bytes();
  const std::vector<std::byte> got = held(*receiver_);
  EXPECT_TRUE(std::equal(got.begin() + static_cast<std::ptrdiff_t>(at),
                         got.begin() + static_cast<std::ptrdiff_t>(2 * at),
                         model_.half.begin() + static_cast<std::ptrdiff_t>(at)));
  EXPECT_EQ(report_.version.id.number, number_);
}

/// As of a relay that is stopped, or behind an agent that is, or that gets nothing itself.
TEST_F(RelayArrival, ARelayThatStandsStillIsLeftForAnotherAgent) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint() + "," + trainers());
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  const double went_on = child_goes_on().count();
  EXPECT_GT(went_on, 3) << "a moment without tiles is nothing";
  EXPECT_LT(went_on, 25) << "five seconds, and a plan";
  EXPECT_FALSE(hop.serves());
  EXPECT_LT(sent_by_trainers(), kSomeBytes + model_.half.size() - kTold) << "what it had stays";
}

TEST_F(RelayArrival, WhoKnowsNoOtherWaitsAndGoesOn) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint());
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  ASSERT_TRUE(becomes([&] { return hop.now()->arriving == nullptr; })) << "it stands";
  EXPECT_TRUE(becomes([&] { return hop.cut_off(); }));
  EXPECT_FALSE(hop.serves());
  std::this_thread::sleep_for(std::chrono::seconds(1));
  link_->grant(1u << 20);
  EXPECT_TRUE(becomes([&] { return hop.now()->arriving != nullptr; })) << "it goes on";
  EXPECT_FALSE(hop.cut_off());
  link_->grant(kAllBytes);
  child_has_newest();
  EXPECT_LT(hop.sent(), model_.half.size() + kSomeBytes) << "what it had stays";
  EXPECT_LT(report_.replans, 20u) << "it waits, and does not ask again and again";
}

TEST_F(RelayArrival, TheRelayDiesAndItsChildGoesToAnotherAgent) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint() + "," + trainers());
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  hop.end_relay();
  EXPECT_LT(child_goes_on().count(), 25) << "at once, and not after a minute";
  EXPECT_LT(sent_by_trainers(), kSomeBytes + model_.half.size() - kTold) << "what it had stays";
  EXPECT_TRUE(becomes([&] { return hop.cut_off(); })) << "as its relay left it";
}

TEST_F(RelayArrival, TheRelayDiesInTheMiddle) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint());
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  hop.end_relay();
  EXPECT_TRUE(becomes([&] { return hop.now()->arriving == nullptr; }));
  EXPECT_FALSE(hop.serves());
  link_->grant(kAllBytes);
  hop.start_relay(link_->endpoint());
  child_has_newest();
  EXPECT_GT(report_.replans, 0u);
  EXPECT_LT(hop.sent(), 2 * model_.half.size()) << "what it had stays";
}

TEST_F(RelayArrival, TheNodesAgentDiesInTheMiddle) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint());
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  hop.start_agent();
  const auto trickle = flow(*link_, 1e6);
  EXPECT_TRUE(becomes([&] { return hop.now()->arriving != nullptr; })) << "the relay tells it, too";
  EXPECT_FALSE(hop.serves());
  link_->grant(kAllBytes);
  child_has_newest();
  EXPECT_TRUE(becomes([&] { return hop.serves(); }));
  EXPECT_EQ(hop.now()->served->root, served()->root);
}

TEST_F(RelayArrival, TheNodesAgentLosesItsSegmentInTheMiddle) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint());
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  hop.start_agent_without_segment();
  link_->grant(kAllBytes);
  child_has_newest();
  EXPECT_TRUE(becomes([&] { return hop.serves(); }));
  EXPECT_EQ(hop.now()->served->root, served()->root);
  EXPECT_LT(sent_by_trainers(), model_.half.size() + kTold) << "the relay has all that it brought";
}

TEST_F(RelayArrival, TheAgentAboveDiesInTheMiddle) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint());
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  writer_.reset();
  stop_agent();
  EXPECT_FALSE(hop.serves());
  start_agent();
  ASSERT_TRUE(becomes([&] { return served() != nullptr; }));
  link_->grant(kAllBytes);
  child_has_newest();
  EXPECT_LT(hop.sent(), model_.half.size() + kSomeBytes) << "what arrives is the same version still";
}

/// What was announced is one version for ever. The next one is served once it is whole.
TEST_F(RelayArrival, ANewerVersionComesInTheMiddle) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint());
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  next_version();
  next_version();  // takes the half that the relay was reading
  link_->grant(kSomeBytes / 2);
  EXPECT_TRUE(becomes([&] { return hop.now()->arriving == nullptr; }));
  EXPECT_FALSE(hop.serves());
  link_->grant(kAllBytes);
  child_has_newest();
  EXPECT_GT(report_.replans, 0u);
}

/// What children have by then is right.
TEST_F(RelayArrival, AByteThatChangesAfterItWasReadHarmsNobody) {
  Hop hop(link_->endpoint());
  start_child(hop.endpoint());
  ASSERT_TRUE(becomes([&] { return hop.sent() > kTold; }));
  damage(hop, 0);
  link_->grant(kAllBytes);
  child_has_newest();
  ASSERT_TRUE(becomes([&] { return hop.serves(); })) << "the relay finds out before the seal, and brings it again";
  EXPECT_EQ(hop.now()->served->root, served()->root);
  start_child(hop.endpoint());
  child_has_newest();
}

/// The child finds out, and the agent believes it once it has looked: what arrives is withdrawn.
TEST_F(RelayArrival, AByteThatChangesBeforeItIsReadIsNeverCommitted) {
  Hop hop(link_->endpoint());
  ASSERT_TRUE(becomes([&] {
    const SnapshotPtr now = hop.now();
    return now->arriving && now->arriving->arriving->in_place(0);
  }));
  damage(hop, 0);
  start_child(hop.endpoint());
  link_->grant(model_.half.size() - kSomeBytes / 2);  // not all of it: the relay has not seen it
  ASSERT_TRUE(becomes([&] { return hop.now()->arriving == nullptr || hop.serves(); }));
  link_->grant(kAllBytes);
  child_has_newest();
  EXPECT_LT(report_.replans, 40u) << "it waits for the seal, and does not ask again and again";
  EXPECT_TRUE(becomes([&] { return hop.serves(); }));
  EXPECT_EQ(hop.now()->served->root, served()->root);
}

/// It has a plan, and never reads what it asked for. The relay goes from version to version meanwhile.
TEST_F(RelayArrival, AChildThatDoesNotReadHoldsNobodyUp) {
  Hop hop(link_->endpoint());
  ASSERT_TRUE(becomes([&] { return hop.now()->arriving != nullptr; }));
  auto control = Client::connect(hop.port(), wire::Role::control);
  auto data = Client::connect(hop.port(), wire::Role::data);
  ASSERT_TRUE(control && data);
  wire::PlanRequest question = ask();
  question.arriving = 1;
  const auto reply = control->plan(question);
  ASSERT_TRUE(reply) << reply.error().to_string();
  ASSERT_EQ(reply->arriving, 1);
  ASSERT_TRUE(data->socket.send(1, wire::GetExtent{reply->plan, {0, model_.layout->tile_count()}}, test_deadline()));
  for (int i = 0; i < 3; ++i) {
    next_version();
    next_version();  // takes the half that the relay was reading
    link_->grant(kSomeBytes / 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  link_->grant(kAllBytes);
  ASSERT_TRUE(becomes([&] { return hop.serves() && hop.now()->served->root == served()->root; }));
  start_child(hop.endpoint());
  child_has_newest();
}

/// Bytes that are not verified yet would take the place of those that the mark promises.
TEST_F(RelayArrival, WhatWasHandedOnIsNotWrittenAgain) {
  using test::FakeAgent;
  using test::Fault;
  const auto panels = test::make_model(3, {{"w", Dtype::bf16, {64, 1024}, {}, {512}}});
  ASSERT_EQ(panels.layout->tile_count(), 2u) << "of one band";
  FakeAgent above(panels.layout);
  above.publish(panels.half);
  std::thread restarts;
  above.on_request([&](const test::Request& request) {
    if (request.ordinal != 0) return Fault::none;
    if (request.type == wire::Type::get_extent) return Fault::flip_at_source;
    if (request.type != wire::Type::get_raw_tiles) return Fault::none;
    restarts = std::thread([&] { above.restart(); });
    return Fault::stall;
  });
  Hop hop(above.endpoint());
  ASSERT_TRUE(becomes([&] { return hop.serves(); }));
  hop.end_relay();
  restarts.join();
  EXPECT_EQ(above.requests(wire::Type::get_raw_tiles), 2u) << "the other tile alone, of the same plan and of the next";
  EXPECT_EQ(above.extents_asked().size(), 1u);
}

/// The relay finds out, and who trusts the relay gets nothing of it.
TEST_F(RelayArrival, AWrongTileIsNotPassedOn) {
  const ServedPtr version = served();
  const std::uint64_t last = model_.layout->tile_count() - 1;
  const Tensor& tensor = model_.layout->tensors()[0];
  version->generation->segment->half(version->half.half)[tensor.bytes - 1] ^= std::byte{1};
  Hop hop(link_->endpoint());
  start_child(hop.endpoint());
  link_->grant(kAllBytes);
  child_.join();
  // The agent above has published it again, as it is; that is what everybody has.
  EXPECT_NE(served()->root, version->root);
  EXPECT_EQ(report_.root, served()->root);
  const std::vector<std::byte> got = held(*receiver_);
  EXPECT_EQ(delta::tile_digest(*model_.layout, got, last), (*served()->digests)[static_cast<std::size_t>(last)]);
  EXPECT_TRUE(becomes([&] { return hop.serves(); }));
  EXPECT_EQ(hop.now()->served->root, served()->root);
}

}  // namespace
}  // namespace deltasync::agent
