// One version from several trainer nodes: bit for bit what one node would serve, or nothing.
#include <arpa/inet.h>
#include <gmock/gmock-matchers.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <fstream>
#include <iterator>
#include <stop_token>
#include <thread>

#include "deltasync/target.hpp"
#include "receiver/targets/target.hpp"
#include "tests/integration/parts_fixture.hpp"
#include "tests/receiver/fake_agent.hpp"
#include "tests/support/rationed_link.hpp"

namespace deltasync::integration {
namespace {

using testing::HasSubstr;

TEST_F(PartsTest, FullAndDeltaAreTheWholeModel) {
  divide(3);
  start();
  next_version();
  const auto receiver = bound();
  EXPECT_EQ(receiver->layout()->digest(), model_.layout->digest());
  const PullReport first = pull(*receiver);
  EXPECT_EQ(first.mode, PullMode::full);
  EXPECT_EQ(first.full_bytes, model_.layout->model_bytes());
  expect_holds(*receiver, 1);
  for (int i = 0; i < 4; ++i) {
    next_version();
    const PullReport report = pull(*receiver, {.newer = true});
    EXPECT_EQ(report.mode, PullMode::delta);
    EXPECT_LT(report.wire_bytes, model_.layout->model_bytes() / 4);
    EXPECT_EQ(report.version.label, "step_" + std::to_string(number_));
    expect_holds(*receiver, number_);
    const auto wrong = receiver->attest();
    ASSERT_TRUE(wrong.ok());
    EXPECT_TRUE(wrong->empty());
  }
  EXPECT_EQ(pull(*receiver).mode, PullMode::up_to_date);
}

TEST_F(PartsTest, SlicesComeFromTheNodesThatHaveThem) {
  divide(3);
  start();
  next_version();
  const auto receiver = bound({{"rows", Rect{1000, 0, 1500, 257}}, {"columns", Rect{0, 0, 900, 300}}, {"norm", {}}});
  EXPECT_EQ(pull(*receiver).mode, PullMode::full);
  expect_holds(*receiver, 1);
  next_version();
  EXPECT_EQ(pull(*receiver).mode, PullMode::delta);
  expect_holds(*receiver, 2);
}

/// Some nodes are several versions ahead: what all have is taken, and what one never sealed is not.
TEST_F(PartsTest, AVersionThatOneNodeNeverSealedIsNotServed) {
  divide(2);
  start();
  next_version();
  const auto receiver = bound();
  pull(*receiver);
  next_version(nodes_[1].get());
  EXPECT_EQ(pull(*receiver).mode, PullMode::up_to_date);
  const auto none =
      receiver->pull({.newer = true, .wait_max = std::chrono::milliseconds(100)}, {.deadline = limit().at()});
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code(), Errc::timed_out);
  EXPECT_THAT(none.error().message(), HasSubstr("node1"));
  next_version();
  EXPECT_EQ(pull(*receiver, {.newer = true}).version.id.number, 3u);
  expect_holds(*receiver, 3);
  // One behind the other: the older one is what both have.
  next_version(nodes_[0].get());
  model_.half = halves_.at(4);
  EXPECT_EQ(pull(*receiver).version.id.number, 3u);
  seal(*nodes_[0], 4);
  EXPECT_EQ(pull(*receiver).version.id.number, 4u);
  expect_holds(*receiver, 4);
}

TEST_F(PartsTest, ANodeThatIsAheadGivesWhatTheOtherHas) {
  divide(2);
  start();
  next_version();
  const auto receiver = bound();
  pull(*receiver);
  next_version();
  next_version(nodes_[1].get());
  EXPECT_EQ(pull(*receiver, {.newer = true}).version.id.number, 2u);
  expect_holds(*receiver, 2);
}

TEST_F(PartsTest, AnAgentThatWasStartedAgainGoesOn) {
  divide(2);
  start();
  next_version();
  const auto receiver = bound();
  pull(*receiver);
  Node& node = *nodes_[1];
  end(node);
  const auto none = receiver->pull({}, {.deadline = soon(300).at()});
  ASSERT_FALSE(none.ok());
  EXPECT_THAT(none.error().message(), HasSubstr("member node1 (" + node.port.endpoint() + ")"));
  expect_holds(*receiver, 1);
  start_agent(node);
  attach(node);
  next_version();
  const PullReport report = pull(*receiver);
  EXPECT_EQ(report.version.id.number, 2u);
  expect_holds(*receiver, 2);
  // The next incarnation of the job: a new epoch, from the same numbers.
  epoch_ = make_epoch(epoch_);
  number_ = 0;
  next_version();
  EXPECT_EQ(pull(*receiver).version.id.epoch, epoch_);
  expect_holds(*receiver, 1);
}

TEST_F(PartsTest, AnotherHolderTakesThePlaceOfADeadOne) {
  divide(2);
  add_replica_of(1);
  start();
  next_version();
  const auto receiver = bound();
  pull(*receiver);
  expect_holds(*receiver, 1);
  next_version();
  pull(*receiver);
  end(*nodes_[1]);
  next_version(nodes_[1].get());
  const PullReport report = pull(*receiver, {.newer = true});
  EXPECT_EQ(report.mode, PullMode::delta) << "what is held does not depend on who gave it";
  expect_holds(*receiver, 3);
}

TEST_F(PartsTest, WhatNobodyHoldsIsNamed) {
  divide(2);
  nodes_[0]->held.erase(nodes_[0]->held.begin());
  start();
  next_version();
  const auto receiver = connect();
  ASSERT_TRUE(receiver.ok());
  const Status bound = (*receiver)->bind(make_host_target((*receiver)->layout()), {.deadline = limit().at()});
  ASSERT_FALSE(bound.ok());
  EXPECT_EQ(bound.error().code(), Errc::coverage);
  EXPECT_THAT(bound.error().message(), HasSubstr("no member has " + model_.layout->tensors()[0].spec.name));
}

TEST_F(PartsTest, AMemberThatIsAwayIsNamedWithWhatIsMissing) {
  divide(2);
  start();
  next_version();
  end(*nodes_[1]);
  const auto receiver = connect();
  ASSERT_TRUE(receiver.ok()) << receiver.error().to_string();
  const Status bound = (*receiver)->bind(make_host_target((*receiver)->layout()), {.deadline = limit().at()});
  ASSERT_FALSE(bound.ok());
  EXPECT_EQ(bound.error().code(), Errc::connection) << "who follows waits for it";
  EXPECT_THAT(bound.error().message(), HasSubstr("member node1 (" + nodes_[1]->port.endpoint() + ")"));
  start_agent(*nodes_[1]);
  const Status later = (*receiver)->bind(make_host_target((*receiver)->layout()), {.deadline = limit().at()});
  EXPECT_TRUE(later.ok()) << later.error().to_string();
}

/// One of the agents is another job's: its part is of another layout.
TEST_F(PartsTest, MembersOfTwoJobsAreRefused) {
  divide(2);
  start();
  next_version();
  Node& node = *nodes_[1];
  end(node);
  std::filesystem::remove_all(node.dir.path());
  std::filesystem::create_directories(node.dir.path());
  auto other = specs_;
  other.push_back({.name = "more", .dtype = Dtype::bf16, .shape = {8}});
  const auto whole = Layout::build(other);
  ASSERT_TRUE(whole.ok());
  auto part = make_part(*whole, make_sidecar(**whole), node.held,
                        {{"node0", nodes_[0]->port.endpoint()}, {"node1", node.port.endpoint()}}, 1);
  ASSERT_TRUE(part.ok());
  std::tie(node.layout, node.sidecar) = *std::move(part);
  start_agent(node);
  attach(node);
  const auto receiver = connect();
  ASSERT_FALSE(receiver.ok());
  EXPECT_EQ(receiver.error().code(), Errc::layout_mismatch);
  EXPECT_THAT(receiver.error().message(), HasSubstr("member node1"));
}

TEST_F(PartsTest, DirectoriesAreThoseOfTheWholeModel) {
  divide(3);
  start();
  next_version();
  const test::TempDir out;
  auto receiver = connect();
  ASSERT_TRUE(receiver.ok());
  auto target = make_hf_target((*receiver)->layout(), (*receiver)->sidecar(), out.path() / "model");
  ASSERT_TRUE(target.ok()) << target.error().to_string();
  ASSERT_TRUE((*receiver)->bind(*std::move(target), {.deadline = limit().at()}).ok());
  const auto expect_directory = [&] {
    const auto read = HfModel::open(out.path() / "model" / "current");
    ASSERT_TRUE(read.ok()) << read.error().to_string();
    for (std::uint32_t t = 0; t < model_.layout->tensors().size(); ++t) {
      const Tensor& tensor = model_.layout->tensors()[t];
      const auto index = read->layout()->find(tensor.spec.name);
      ASSERT_TRUE(index.has_value());
      const auto bytes = read->tensor(*index);
      ASSERT_EQ(bytes.size(), tensor.bytes);
      EXPECT_EQ(std::memcmp(bytes.data(), model_.half.data() + tensor.offset, tensor.bytes), 0) << tensor.spec.name;
    }
  };
  pull(**receiver);
  expect_directory();
  next_version();
  EXPECT_EQ(pull(**receiver).mode, PullMode::delta);
  expect_directory();
  const std::vector<std::uint64_t> tiles = {0};
  const auto none = (*receiver)->repair(tiles, {.deadline = limit().at()});
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code(), Errc::unsupported);
  EXPECT_EQ(pull(**receiver).mode, PullMode::up_to_date) << "nothing was touched";
}

TEST_F(PartsTest, RollsBackAndRepairs) {
  divide(2);
  start();
  next_version();
  const auto receiver = bound();
  pull(*receiver);
  next_version();
  auto staged = receiver->pull({}, {.deadline = limit().at()});
  ASSERT_TRUE(staged.ok());
  const auto current = receiver->is_current(**staged, {.number = 2}, {.deadline = limit().at()});
  ASSERT_TRUE(current.ok()) << current.error().to_string();
  EXPECT_TRUE(*current);
  ASSERT_TRUE((*staged)->commit().ok());
  expect_holds(*receiver, 2);
  ASSERT_TRUE((*staged)->rollback().ok());
  expect_holds(*receiver, 1);
  pull(*receiver);
  expect_holds(*receiver, 2);
  const auto memory = host_target_memory(*receiver->target());
  for (const Tensor& tensor : model_.layout->tensors()) {
    if (tensor.bytes != 0) const_cast<std::byte&>(memory[tensor.offset]) ^= std::byte{1};
  }
  const auto wrong = receiver->attest();
  ASSERT_TRUE(wrong.ok());
  EXPECT_GT(wrong->size(), 3u);
  const auto repaired = receiver->repair(*wrong, {.deadline = limit().at()});
  ASSERT_TRUE(repaired.ok()) << repaired.error().to_string();
  EXPECT_EQ(repaired->tiles, wrong->size());
  expect_holds(*receiver, 2);
}

/// Live memory is not what was committed: a delta over it would not be the version, so all parts come again.
TEST_F(PartsTest, AWrongBaseIsReplacedByAFullUpdate) {
  divide(2);
  start();
  next_version();
  const auto receiver = bound();
  pull(*receiver);
  const auto memory = host_target_memory(*receiver->target());
  const Tensor& rows = model_.layout->tensors()[*model_.layout->find("rows")];
  for (std::uint64_t i = 0; i < rows.bytes; i += 2) const_cast<std::byte&>(memory[rows.offset + i]) ^= std::byte{1};
  next_version(nullptr, 0.3);
  PullReport report;
  for (int attempt = 0; attempt < 3 && report.mode != PullMode::full; ++attempt) {
    auto staged = receiver->pull({}, {.deadline = limit().at()});
    if (!staged.ok()) continue;  // the scrub saw it first: the next pull replaces the version
    ASSERT_TRUE((*staged)->commit().ok());
    report = (*staged)->report();
  }
  EXPECT_EQ(report.mode, PullMode::full);
  expect_holds(*receiver, 2);
}

/// A receiver that does not know of parts must not take one for the model; one that does finds the model at any member.
TEST_F(PartsTest, AnyMemberNamesTheOthers) {
  divide(3);
  start();
  next_version();
  ReceiverOptions others = options();
  others.endpoint = "127.0.0.1:1," + nodes_[2]->port.endpoint();
  auto receiver = Receiver::connect(others, {.deadline = limit().at()});
  ASSERT_TRUE(receiver.ok()) << receiver.error().to_string();
  ASSERT_TRUE((*receiver)->bind(make_host_target((*receiver)->layout()), {.deadline = limit().at()}).ok());
  pull(**receiver);
  expect_holds(**receiver, 1);
  const auto status = receiver::status_of(**receiver);
  ASSERT_NE(status, nullptr);
  EXPECT_EQ(status->lag(limit()).versions, 0u);
  next_version(nodes_[0].get());
  EXPECT_EQ(status->lag(limit()).versions, 1u) << "of the part that is furthest behind";
  end(*nodes_[1]);
  EXPECT_THAT(status->lag(limit()).last_error, HasSubstr("member node1"));
}

/// Each time the halves are reclaimed, what has come is kept and brought forward, on all members.
TEST_F(PartsTest, AFirstPullThatIsSlowerThanTheStepsEnds) {
  specs_ = {{.name = "rows", .dtype = Dtype::bf16, .shape = {8192, 1024}}};
  lease_grace_ = std::chrono::milliseconds(300);
  divide(2);
  constexpr std::size_t kRation = 512u << 10;  // a step's worth: each part takes sixteen
  std::vector<std::unique_ptr<test::RationedLink>> links;
  for (const auto& node : nodes_) {
    links.push_back(std::make_unique<test::RationedLink>(node->port.number()));
    links.back()->grant(kRation);
    node->endpoint = links.back()->endpoint();
  }
  start();
  next_version();
  ReceiverOptions slow = options();
  slow.local = false;  // the links are what is slow
  auto receiver = Receiver::connect(slow, {.deadline = limit().at()});
  ASSERT_TRUE(receiver.ok()) << receiver.error().to_string();
  ASSERT_TRUE((*receiver)->bind(make_host_target((*receiver)->layout()), {.deadline = limit().at()}).ok());
  std::atomic<bool> stop{false};
  std::thread trainer([&] {
    while (!stop) {
      next_version(nullptr, 0.0005);
      for (const auto& link : links) link->grant(kRation);
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // or what nobody asks for adds up
    }
  });
  auto staged = (*receiver)->pull({}, {.deadline = soon(240'000).at()});
  stop = true;
  trainer.join();
  for (const auto& link : links) link->grant(std::size_t{1} << 40);
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  ASSERT_TRUE((*staged)->commit().ok());
  const std::uint64_t number = (*staged)->report().version.id.number;
  EXPECT_GT(number, 5u) << "no lease was revoked: the test did not test";
  expect_holds(**receiver, number);
}

/// The agent of a node that is not in the job any more serves on what it had: without a word, that would be the newest
/// version which all of them have.
TEST_F(PartsTest, ATrainerThatGoesOnOnOtherNodesIsNoticed) {
  divide(2);
  start();
  next_version();
  const auto receiver = bound();
  pull(*receiver);
  const std::unique_ptr<Node> left = std::move(nodes_[1]);
  nodes_[1] = std::make_unique<Node>();
  nodes_[1]->held = left->held;
  make_parts();
  nodes_[0]->writer.reset();
  attach(*nodes_[0]);
  start_agent(*nodes_[1]);
  attach(*nodes_[1]);
  epoch_ = make_epoch(epoch_);
  number_ = 0;
  next_version();
  const auto none = receiver->pull({}, {.deadline = limit().at()});
  ASSERT_FALSE(none.ok()) << to_string((*none)->report().version) << " is old";
  EXPECT_EQ(none.error().code(), Errc::layout_mismatch);
  EXPECT_THAT(none.error().message(), HasSubstr("connect again"));
  const auto again = bound();
  pull(*again);
  expect_holds(*again, 1);
}

TEST_F(PartsTest, AHolderThatDiesWhileAVersionIsWaitedForIsDoneWithout) {
  divide(2);
  add_replica_of(1);
  start();
  next_version();
  const auto receiver = bound();
  pull(*receiver);
  std::thread trainer([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it waits by now
    end(*nodes_[1]);
    next_version(nodes_[1].get());
  });
  const PullReport report = pull(*receiver, {.newer = true});
  trainer.join();
  EXPECT_EQ(report.version.id.number, 2u);
  expect_holds(*receiver, 2);
}

/// A host target that has a call stopped when it is opened.
class StopsWhenOpened final : public Target {
 public:
  StopsWhenOpened(const LayoutPtr& layout, std::stop_source& stop) : host_(make_host_target(layout)), stop_(stop) {}

  const LayoutPtr& layout() const override { return host_->layout(); }
  TargetCapabilities capabilities() override { return host_->capabilities(); }
  Status open(ThreadPool& pool, const CallContext& until) override {
    Status opened = host_->open(pool, until);
    stop_.request_stop();
    return opened;
  }
  const TargetState* committed() const override { return host_->committed(); }
  Result<TileRows> live_tile(const Tile& tile, std::vector<std::byte>& scratch) const override {
    return host_->live_tile(tile, scratch);
  }
  void invalidate() noexcept override { host_->invalidate(); }
  Status begin_full(FullUpdatePolicy policy, const CallContext& until) override {
    return host_->begin_full(policy, until);
  }
  Result<TileRows> full_tile(const Tile& tile, std::vector<std::byte>& scratch) override {
    return host_->full_tile(tile, scratch);
  }
  Status put_tile(const Tile& tile, const TileRows& rows) override { return host_->put_tile(tile, rows); }
  Status commit_full(TargetState state, Deadline deadline) override {
    return host_->commit_full(std::move(state), deadline);
  }
  void discard_full() noexcept override { host_->discard_full(); }
  Status commit_delta(std::vector<StagedStep> steps, TargetState state, Deadline deadline) override {
    return host_->commit_delta(std::move(steps), std::move(state), deadline);
  }
  const Target& host() const { return *host_; }

 private:
  const std::unique_ptr<Target> host_;
  std::stop_source& stop_;
};

/// Whom the members ask their tiles for is changed for all of them, or for none.
TEST_F(PartsTest, ABindThatIsStoppedLeavesNoMemberOut) {
  divide(3);
  start();
  next_version();
  const auto receiver = bound();
  pull(*receiver);
  std::stop_source stop;
  auto* const target = new StopsWhenOpened(receiver->layout(), stop);
  const Target& host = target->host();
  const CallContext until(limit(), stop.get_token());
  const Status again = receiver->bind(std::unique_ptr<Target>(target), std::vector<Slice>(), until);
  EXPECT_TRUE(stop.stop_requested());
  ASSERT_TRUE(again.ok()) << again.error().to_string();
  pull(*receiver);
  const auto memory = host_target_memory(host);
  for (const Tensor& tensor : model_.layout->tensors()) {
    EXPECT_EQ(std::memcmp(memory.data() + tensor.offset, model_.half.data() + tensor.offset, tensor.bytes), 0)
        << tensor.spec.name;
  }
}

/// A holder whose tiles are not what it says that they are.
TEST_F(PartsTest, AHolderOfWrongTilesIsDoneWithout) {
  divide(2);
  add_replica_of(1);
  for (const auto& node : nodes_) ASSERT_TRUE(add_cuts(specs_, node->held).ok());
  model_ = test::make_model(7, specs_);
  make_parts();
  for (std::size_t n = 0; n < 2; ++n) {
    start_agent(*nodes_[n]);
    attach(*nodes_[n]);
  }
  next_version(nodes_[2].get());
  const Node& third = *nodes_[2];
  test::FakeAgent::Setup setup;
  setup.port = third.port.number();
  setup.epoch = epoch_;
  test::FakeAgent liar(third.layout, setup);
  liar.change_sidecar(third.sidecar);
  liar.publish(bytes_of(model_, third), "step_1");
  liar.on_request([](const test::Request& request) {
    const bool tiles = request.type == wire::Type::get_extent || request.type == wire::Type::get_raw_tiles;
    return tiles ? test::Fault::flip_at_source : test::Fault::none;
  });
  for (const Want& want : {Want{}, Want{.number = 1}}) {
    const auto receiver = bound();
    EXPECT_EQ(pull(*receiver, want).version.id.number, 1u);
    expect_holds(*receiver, 1);
  }
}

/// Connections come about there, and no word.
UniqueFd listen_in_silence(std::uint16_t port) {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), 0);
  EXPECT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::listen(fd.get(), 64), 0);
  return fd;
}

/// One after the other, their limits would add up.
TEST_F(PartsTest, AllMembersAreAskedForTheLagAtOnce) {
  constexpr int kNodes = 4;
  receiver::Tuning tuning;
  tuning.handshake = std::chrono::milliseconds(3'000);
  divide(kNodes);
  start();
  next_version();
  auto receiver = receiver::connect(options(), tuning, limit());
  ASSERT_TRUE(receiver.ok()) << receiver.error().to_string();
  ASSERT_TRUE((*receiver)->bind(make_host_target((*receiver)->layout()), {.deadline = limit().at()}).ok());
  std::vector<UniqueFd> silent;
  for (const auto& node : nodes_) {
    end(*node);
    silent.push_back(listen_in_silence(node->port.number()));
  }
  const auto begin = std::chrono::steady_clock::now();
  const Lag lag = (*receiver)->lag({.deadline = limit().at()});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kNodes * tuning.handshake);
  EXPECT_THAT(lag.last_error, HasSubstr("member node"));
}

TEST_F(PartsTest, WhatIsHeldAlreadyIsCurrent) {
  divide(2);
  start();
  next_version();
  const auto receiver = bound();
  pull(*receiver);
  next_version();
  ASSERT_TRUE(receiver->pull({}, {.deadline = limit().at()}).ok());  // and dropped
  auto staged = receiver->pull({.number = 1}, {.deadline = limit().at()});
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  EXPECT_EQ((*staged)->report().mode, PullMode::up_to_date);
  const auto current = receiver->is_current(**staged, {.number = 1}, {.deadline = limit().at()});
  ASSERT_TRUE(current.ok()) << current.error().to_string();
  EXPECT_TRUE(*current);
}

}  // namespace
}  // namespace deltasync::integration
