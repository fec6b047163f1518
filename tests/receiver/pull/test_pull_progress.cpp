// How far a full update is: what Receiver::progress() says while tiles come, and the lines of the log.
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <stop_token>
#include <utility>
#include <vector>

#include "tests/receiver/pull_fixture.hpp"

namespace deltasync::test {
namespace {

using Bytes = std::pair<std::uint64_t, std::uint64_t>;  // done, total

class PullProgress : public PullTest {
 protected:
  /// What is said whenever tiles are asked for, by any stream; `then` is called with the bytes that are there.
  void watch(std::function<void(std::uint64_t)> then = nullptr) {
    agent_->on_request([this, then = std::move(then)](const Request& request) {
      if (request.type != wire::Type::get_extent) return Fault::none;
      const std::lock_guard lock(mutex_);
      seen_.push_back(receiver_->progress());
      if (then) then(seen_.back().first);
      return Fault::none;
    });
  }
  std::uint64_t all_bytes() const { return TileSet::whole(*model_.layout).bytes(); }
  std::vector<Bytes> seen() {
    const std::lock_guard lock(mutex_);
    return seen_;
  }

  std::mutex mutex_;
  std::vector<Bytes> seen_;
};

TEST_F(PullProgress, GrowsToAllOfTheModelAndIsNothingBeforeAndAfter) {
  start();
  watch();
  EXPECT_EQ(receiver_->progress(), Bytes(0, 0));
  pull_and_commit();
  EXPECT_EQ(receiver_->progress(), Bytes(0, 0));
  const std::vector<Bytes> seen = this->seen();
  ASSERT_GT(seen.size(), 8U);
  EXPECT_EQ(seen.front().first, 0U);
  EXPECT_GT(seen.back().first, all_bytes() / 2);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  for (const Bytes& bytes : seen) {
    EXPECT_EQ(bytes.second, all_bytes());
    EXPECT_LE(bytes.first, bytes.second);
  }
}

TEST_F(PullProgress, OneThatIsPulledOnBeginsWithWhatItHas) {
  start();
  std::stop_source stop;
  watch([&stop](std::uint64_t bytes) {
    if (bytes != 0) stop.request_stop();
  });
  const auto cut = receiver_->pull({}, CallOptions::within(std::chrono::minutes(1), stop.get_token()));
  ASSERT_EQ(cut.error().code(), Errc::cancelled);
  EXPECT_EQ(receiver_->progress(), Bytes(0, 0));
  const std::size_t before = seen().size();
  pull_and_commit();
  const std::vector<Bytes> all = seen();
  // A request of the pull that was cut may come to be seen after its end, when there is no pull.
  const auto first = std::find_if(all.begin() + static_cast<std::ptrdiff_t>(before), all.end(),
                                  [](const Bytes& bytes) { return bytes.second != 0; });
  ASSERT_NE(first, all.end());
  EXPECT_GT(first->first, 0U);
}

TEST_F(PullProgress, ADeltaHasNone) {
  start();
  pull_and_commit();
  step();
  std::vector<Bytes> seen;
  agent_->on_request([&](const Request& request) {
    if (request.type == wire::Type::get_frames) seen.push_back(receiver_->progress());
    return Fault::none;
  });
  EXPECT_EQ(pull_and_commit().mode, PullMode::delta);
  ASSERT_FALSE(seen.empty());
  for (const Bytes& bytes : seen) EXPECT_EQ(bytes, Bytes(0, 0));
}

TEST_F(PullProgress, OneThatTakesLongIsInTheLog) {
  std::ostringstream log;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log)));
  receiver::Tuning often = quick();
  often.say_progress = std::chrono::milliseconds(0);
  start({}, often);
  pull_and_commit();
  receiver_.reset();
  spdlog::set_default_logger(before);
  const std::string total = "total_bytes=" + std::to_string(all_bytes());
  EXPECT_NE(log.str().find("pull_progress version=\"one ("), std::string::npos) << log.str();
  EXPECT_NE(log.str().find(total), std::string::npos) << log.str();
}

TEST_F(PullProgress, OneThatDoesNotTakeLongIsNot) {
  std::ostringstream log;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log)));
  receiver::Tuning seldom = quick();
  seldom.say_progress = std::chrono::hours(1);
  start({}, seldom);
  pull_and_commit();
  receiver_.reset();
  spdlog::set_default_logger(before);
  EXPECT_EQ(log.str().find("pull_progress"), std::string::npos) << log.str();
}

}  // namespace
}  // namespace deltasync::test
