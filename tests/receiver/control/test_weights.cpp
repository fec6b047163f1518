// What the control service asks of a receiver, and when.
#include "receiver/control/weights.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <thread>

#include "tests/tools/idle_receiver.hpp"

namespace deltasync::control {
namespace {

class Update final : public StagedUpdate {
 public:
  explicit Update(std::function<void()> commit) : commit_(std::move(commit)) {}
  const PullReport& report() const override { return report_; }
  bool is_staged() const noexcept override { return true; }
  Status commit(const CallOptions&) override {
    commit_();
    return {};
  }
  Status rollback() override { return {}; }

 private:
  PullReport report_;
  std::function<void()> commit_;
};

class FakeReceiver final : public test::IdleReceiver {
 public:
  const LayoutPtr& layout() const override { return layout_; }
  std::optional<Version> current() const override {
    EXPECT_FALSE(in_call) << "a receiver is called by one thread at a time";
    return live;
  }
  FullUpdatePolicy full_update_policy() const override { return policy; }
  Result<std::unique_ptr<StagedUpdate>> pull(const Want& want, const CallOptions&) override {
    asked = want;
    during();
    return std::unique_ptr<StagedUpdate>(std::make_unique<Update>([this] {
      during();
      live = Version{.id = {.epoch = 9, .number = 2}, .label = ""};
    }));
  }
  Result<std::vector<TileMismatch>> attest(const CallOptions&) override { return wrong; }
  using Receiver::repair;
  Result<RepairReport> repair(std::span<const std::uint64_t> tiles, const CallOptions&) override {
    repaired = tiles.size();
    if (!repairs) return Error(Errc::gone, "no more");
    return RepairReport();
  }

  std::function<void()> during = [] {};
  bool in_call = false;
  FullUpdatePolicy policy = FullUpdatePolicy::stage;
  std::optional<Version> live = Version{.id = {.epoch = 9, .number = 1}, .label = ""};
  Want asked;
  std::vector<TileMismatch> wrong;
  std::size_t repaired = 0;
  bool repairs = true;

 private:
  LayoutPtr layout_ = *Layout::build({{.name = "a", .dtype = Dtype::bf16, .shape = {4}}});
};

struct Weights : testing::Test {
  /// What another thread sees during each call of the receiver.
  std::optional<std::uint64_t> number() {
    std::optional<std::uint64_t> seen;
    std::thread([&] {
      const auto live = weights->current();
      if (live) seen = live->id.number;
    }).join();
    return seen;
  }
  void look_during_calls(std::optional<std::uint64_t> expected) {
    receiver.during = [this, expected] {
      receiver.in_call = true;
      EXPECT_EQ(number(), expected);
      receiver.in_call = false;
      ++looks;
    };
  }

  FakeReceiver receiver;
  std::unique_ptr<EngineWeights> weights = weights_of(receiver);
  int looks = 0;
};

TEST_F(Weights, WhatIsLiveIsKnownWhileTheReceiverWorks) {
  look_during_calls(1);
  ASSERT_TRUE(weights->stage({}, {}));
  ASSERT_TRUE(weights->commit({}));
  EXPECT_EQ(looks, 2);
  EXPECT_EQ(number(), 2U);
  receiver.live = Version{.id = {.epoch = 9, .number = 7}, .label = ""};  // by the engine's program
  EXPECT_EQ(number(), 7U);
}

TEST_F(Weights, NothingIsLiveWhileItIsOverwritten) {
  receiver.policy = FullUpdatePolicy::in_place;
  look_during_calls(std::nullopt);
  ASSERT_TRUE(weights->stage({}, {}));
  EXPECT_EQ(looks, 1);
}

TEST_F(Weights, AVersionIsANumberOrALabelOrADirectory) {
  ASSERT_TRUE(weights->stage({.version = "12"}, {}));
  EXPECT_EQ(receiver.asked.number, 12U);
  ASSERT_TRUE(weights->stage({.version = "step_12"}, {}));
  EXPECT_EQ(receiver.asked.label, "step_12");
  ASSERT_TRUE(weights->stage({.directory = "/snapshot"}, {}));
  EXPECT_EQ(receiver.asked.directory, "/snapshot");
  ASSERT_TRUE(weights->stage({}, {}));
  EXPECT_TRUE(!receiver.asked.number && receiver.asked.label.empty() && receiver.asked.directory.empty());
}

TEST_F(Weights, WhatIsVerifiedIsRepairedOrNotLive) {
  receiver.wrong = {{.tile = 3}};
  ASSERT_TRUE(weights->stage({}, {}));
  ASSERT_TRUE(weights->commit({}));
  EXPECT_EQ(receiver.repaired, 0U);
  ASSERT_TRUE(weights->stage({.verify = true}, {}));
  ASSERT_TRUE(weights->commit({}));
  EXPECT_EQ(receiver.repaired, 1U);
  receiver.repairs = false;
  ASSERT_TRUE(weights->stage({.verify = true}, {}));
  EXPECT_FALSE(weights->commit({}));
  EXPECT_EQ(number(), std::nullopt);
  receiver.wrong.clear();
  ASSERT_TRUE(weights->stage({}, {}));  // is verified, since nobody knows what is there
  ASSERT_TRUE(weights->commit({}));
  EXPECT_EQ(number(), 2U);
}

}  // namespace
}  // namespace deltasync::control
