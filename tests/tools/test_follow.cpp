// Which failures a follower survives, and what it says about them.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <memory>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "base/call_context.hpp"
#include "tests/support/log_lines.hpp"
#include "tests/tools/idle_receiver.hpp"
#include "tools/cli/follow.hpp"

namespace deltasync::cli {
namespace {

using ::testing::HasSubstr;

/// What happens at one try.
struct Try {
  enum class Where : std::uint8_t { connect, take, none } where = Where::none;
  Errc code = Errc::internal;
};
constexpr Try kVersion{};
constexpr Try at_connect(Errc code) {
  return {Try::Where::connect, code};
}
constexpr Try at_take(Errc code) {
  return {Try::Where::take, code};
}

class Follow : public ::testing::Test {
 protected:
  /// Until `versions` are there, or an error. Tries that are not in the script bring versions.
  Status run(std::vector<Try> script, std::uint64_t versions = 1) {
    script_ = std::move(script);
    Follower follower;
    follower.count = versions;
    follower.connect = [this](const CallContext&) -> Result<std::unique_ptr<Receiver>> {
      ++connects_;
      if (here().where == Try::Where::connect) return Error(script_[at_++].code, "scripted");
      return std::unique_ptr<Receiver>(std::make_unique<test::IdleReceiver>());
    };
    follower.take = [this](Receiver&, const CallContext&) -> Result<PullReport> {
      const Try now = here();
      ++at_;
      if (now.where == Try::Where::take) return Error(now.code, "scripted");
      return PullReport{};
    };
    follower.tell = [this](const PullReport&) {
      return told_++ < lost_lines_ ? Status(Error(lost_, "scripted")) : Status();
    };
    return follow(follower, stop_.get_token());
  }
  Try here() const { return at_ < script_.size() ? script_[at_] : kVersion; }
  std::size_t lines(const std::string& event) const {
    std::size_t count = 0;
    const std::string text = log_.text();
    for (std::size_t at = text.find(event); at != std::string::npos; at = text.find(event, at + 1)) ++count;
    return count;
  }

  test::LogLines log_;
  std::stop_source stop_;
  std::vector<Try> script_;
  std::size_t at_ = 0;
  unsigned connects_ = 0;
  unsigned told_ = 0;
  unsigned lost_lines_ = 0;  ///< the first ones
  Errc lost_ = Errc::no_space;
};

TEST_F(Follow, AFullDiskUnderItsOutputEndsNothing) {
  lost_lines_ = 3;
  const Status done = run({}, 5);
  ASSERT_TRUE(done) << done.error().to_string();
  EXPECT_EQ(told_, 5u);
  EXPECT_EQ(lines("output_lost"), 1u) << log_.text();
  EXPECT_EQ(lines("output_back lost_lines=3"), 1u) << log_.text();
}

TEST_F(Follow, WhatIsStillLostAtItsEndIsNoSuccess) {
  lost_lines_ = 3;
  const Status done = run({}, 3);
  EXPECT_EQ(told_, 3u);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code(), Errc::no_space);
}

TEST_F(Follow, OutputThatNobodyReadsEndsIt) {
  lost_lines_ = 1;
  lost_ = Errc::io;
  ASSERT_FALSE(run({}, 3));
  EXPECT_EQ(told_, 1u);
}

TEST_F(Follow, AnAgentThatIsNotThereYetIsWaitedFor) {
  const Status done = run({at_connect(Errc::connection), at_connect(Errc::connection), at_connect(Errc::timed_out)});
  ASSERT_TRUE(done) << done.error().to_string();
  EXPECT_EQ(told_, 1u);
  EXPECT_EQ(lines("pull_failed"), 2u) << "one for each state, not for each try:\n" << log_.text();
  EXPECT_EQ(lines("pull_recovered"), 1u);
}

TEST_F(Follow, TheLayoutMayChangeAnyNumberOfTimesBeforeAPullSucceeds) {
  const Status done = run({kVersion, at_take(Errc::layout_mismatch), at_take(Errc::layout_mismatch),
                           at_connect(Errc::layout_mismatch), at_take(Errc::layout_mismatch)},
                          2);
  ASSERT_TRUE(done) << done.error().to_string();
  EXPECT_EQ(told_, 2u);
  EXPECT_EQ(connects_, 5u) << "bound again each time";
  EXPECT_EQ(lines("pull_failed"), 1u) << log_.text();
}

TEST_F(Follow, ALayoutThatChangesOnceIsFollowedWithoutALine) {
  ASSERT_TRUE(run({kVersion, at_take(Errc::layout_mismatch)}, 2));
  EXPECT_EQ(lines("pull_failed"), 0u) << log_.text();
}

TEST_F(Follow, WhatTheUserHasToFixEndsItAtTheStart) {
  for (const Errc code : {Errc::unauthenticated, Errc::permission, Errc::not_found, Errc::out_of_range,
                          Errc::unsupported, Errc::already_exists, Errc::io, Errc::protocol}) {
    at_ = 0;
    const Status ended = run({at_connect(code)});
    ASSERT_FALSE(ended) << to_string(code);
    EXPECT_EQ(ended.error().code(), code);
  }
  EXPECT_EQ(told_, 0u);
}

TEST_F(Follow, OnceItWasConnectedTheSameIsWaitedOut) {
  const Status done = run({kVersion, at_take(Errc::unauthenticated), at_connect(Errc::unauthenticated)}, 2);
  ASSERT_TRUE(done) << done.error().to_string();
  EXPECT_EQ(connects_, 3u) << "with the token as it is then";
  EXPECT_EQ(lines("pull_failed"), 1u) << log_.text();
}

TEST_F(Follow, FilesThatWereGoodOnceAreReadAgain) {
  const Status done = run({kVersion, at_take(Errc::unauthenticated), at_connect(Errc::invalid_argument)}, 2);
  ASSERT_TRUE(done) << done.error().to_string();
  EXPECT_EQ(lines("pull_failed"), 2u) << log_.text();
  at_ = 0;
  const Status ended = run({at_connect(Errc::invalid_argument)});
  ASSERT_FALSE(ended) << "at the start";
  EXPECT_EQ(ended.error().code(), Errc::invalid_argument);
}

TEST_F(Follow, WhatNoRetryHelpsEndsItWheneverItComes) {
  for (const Errc code : {Errc::invalid_argument, Errc::version_conflict, Errc::internal, Errc::cancelled}) {
    at_ = 0;
    const Status ended = run({kVersion, at_take(code)}, 2);
    ASSERT_FALSE(ended) << to_string(code);
    EXPECT_EQ(ended.error().code(), code);
  }
}

}  // namespace
}  // namespace deltasync::cli
