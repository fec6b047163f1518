// A receiver whose versions are in an engine's live memory and in a shadow beside it.
#pragma once

#include <gmock/gmock-matchers.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "deltasync/target.hpp"
#include "receiver/targets/shadow/shadowed_target.hpp"
#include "tests/receiver/any_engine.hpp"
#include "tests/receiver/pull_fixture.hpp"
#include "tests/receiver/trainer_model.hpp"

namespace deltasync::test {

class ShadowPull : public PullTest, public testing::WithParamInterface<AnyEngine::Where> {
 protected:
  void SetUp() override {
    model_ = make_model(7, TiedEngine::specs());
    options_.scrub_tiles = 0;
  }
  void TearDown() override { receiver_.reset(); }

  void start_shadowed(FakeAgent::Setup setup = FakeAgent::Setup()) {
    start(std::move(setup));
    bind_shadowed();
  }
  void bind_shadowed() {
    engine_.emplace(made_.engine, made_.plan, GetParam(), 5);
    bind_to_engine();
  }
  void bind_to_engine() {
    engine_->device_timeout = device_timeout_;
    auto target = make_shadowed_target(*engine_->make(model_.layout), shadow_);
    ASSERT_TRUE(target.ok()) << target.error().to_string();
    const Status bound = receiver_->bind(*std::move(target), engine_->placement()->slices(), in_ms(60'000));
    ASSERT_TRUE(bound.ok()) << bound.error().to_string();
  }
  void expect_live(const std::vector<std::byte>& half) { EXPECT_EQ(engine_->differences(*model_.layout, half), ""); }
  PullReport commit_pull() {
    auto staged = pull();
    EXPECT_TRUE(staged.ok()) << staged.error().to_string();
    if (!staged.ok()) return {};
    const Status committed = (*staged)->commit();
    EXPECT_TRUE(committed.ok()) << committed.error().to_string();
    expect_live(agent_->half_of((*staged)->report().version.id));
    EXPECT_EQ(shadow_of(*receiver_->target())->version, receiver_->current());
    return (*staged)->report();
  }
  std::byte* place(const std::string& tensor, std::uint64_t row, std::uint64_t col, std::size_t nth = 0) {
    return places_of(engine_->plan(), tensor, row, col).at(nth);
  }
  std::uint64_t requests() const {
    std::uint64_t all = 0;
    for (const wire::Type type : {wire::Type::plan, wire::Type::get_digests, wire::Type::get_extent,
                                  wire::Type::get_frames, wire::Type::get_raw_tiles}) {
      all += agent_->requests(type);
    }
    return all;
  }

  TiedEngine made_;
  ShadowOptions shadow_;
  std::chrono::nanoseconds device_timeout_ = std::chrono::seconds(30);
  std::optional<AnyEngine> engine_;
};

}  // namespace deltasync::test
