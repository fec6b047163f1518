// A stop ends what waits, at once, as its deadline would later; and what comes after it finds everything in order. The
// agent's own bound ends nothing.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "tests/shm/support.hpp"
#include "tests/writer/harness.hpp"

namespace deltasync::test {
namespace {

using shm::testing::TempDir;
using ::testing::HasSubstr;

class WriterStop : public ::testing::Test {
 protected:
  std::unique_ptr<Writer> attach(std::uint32_t index = 0, std::uint32_t writers = 1) {
    auto writer = Writer::attach(model_.layout, Sidecar{}, writer_options(dir_.path(), index, writers), soon());
    if (!writer) ADD_FAILURE() << writer.error().to_string();
    return std::move(writer).value();
  }
  void publish(Writer& writer, std::uint64_t number) {
    const auto status = writer.begin(version(7, number), soon());
    ASSERT_TRUE(status) << status.error().to_string();
    ASSERT_TRUE(write_all(writer, model_.half));
    const auto report = writer.commit(soon());
    ASSERT_TRUE(report) << report.error().to_string();
  }
  void expect_served(Writer& writer, std::uint64_t number) {
    ASSERT_TRUE(writer.wait_ready({7, number}, soon()));
    EXPECT_TRUE(agent_->served_bytes() == model_.half);
  }

  TempDir dir_;
  TestModel model_ = make_model(11);
  std::unique_ptr<MiniAgent> agent_ = std::make_unique<MiniAgent>(dir_.path());
};

void a_little_later() {
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
}

/// The error of a call whose stop is requested once `when` returns, long before the call's deadline.
template <class Call>
Error stopped(const Call& call, const std::function<void()>& when = a_little_later) {
  std::stop_source source;
  const std::jthread stopper([&] {
    when();
    source.request_stop();
  });
  const Deadline deadline = soon();
  const auto result = call(CallOptions(CallContext(deadline, source.get_token())));
  EXPECT_FALSE(deadline.passed()) << "it was the deadline that ended the call";
  if (result) return Error(Errc::internal, "it succeeded");
  return result.error();
}

TEST_F(WriterStop, AStopEndsWhatWaitsForTheAgent) {
  auto writer = attach();
  agent_->busy = true;
  publish(*writer, 1);
  publish(*writer, 2);
  const Error begin = stopped([&](const CallOptions& end) { return writer->begin(version(7, 3), end); });
  EXPECT_EQ(begin.code(), Errc::cancelled) << begin.to_string();
  EXPECT_THAT(begin.message(), HasSubstr("SEALED"));
  const Error ready = stopped([&](const CallOptions& end) { return writer->wait_ready({7, 1}, end); });
  EXPECT_EQ(ready.code(), Errc::cancelled) << ready.to_string();
  agent_->busy = false;
  publish(*writer, 3);
  expect_served(*writer, 3);

  agent_.reset();
  const Error absent = stopped([&](const CallOptions& end) { return writer->wait_ready({7, 3}, end); });
  EXPECT_EQ(absent.code(), Errc::cancelled) << absent.to_string();
  std::stop_source before;
  before.request_stop();
  EXPECT_EQ(writer->wait_ready({7, 3}, CallContext(soon(), before.get_token())).error().code(), Errc::cancelled)
      << "requested before the call";
}

TEST_F(WriterStop, GoodbyeIsSaidAfterAStop) {
  auto writer = attach();
  const Error ready = stopped([&](const CallOptions& end) { return writer->wait_ready({7, 1}, end); });
  EXPECT_EQ(ready.code(), Errc::cancelled) << ready.to_string();
  writer.reset();
  EXPECT_THAT(agent_->gone(), ::testing::ElementsAre(0u)) << "the slot would be taken for as long as the process lives";
}

TEST_F(WriterStop, AStopEndsWhatWaitsForOtherWriters) {
  std::unique_ptr<Writer> both[2];
  for (std::uint32_t i = 0; i < 2; ++i) both[i] = attach(i, 2);
  const std::vector<TensorSlice> plans[] = {share(*model_.layout, 0, 2), share(*model_.layout, 1, 2)};
  const auto waits = [&] { return agent_->server().status().at(0).waiting; };
  // With a deadline beyond that of what follows: the agent must not need it.
  const Error plan = stopped(
      [&](const CallOptions& end) {
        return both[0]->register_plan(plans[0], CallOptions::within(std::chrono::minutes(2), end.stop));
      },
      [&] { EXPECT_TRUE(eventually(waits)); });
  EXPECT_EQ(plan.code(), Errc::cancelled) << plan.to_string();
  ASSERT_TRUE(eventually([&] { return !waits(); })) << "nobody is left to hear the verdict";
  const auto alone = both[1]->register_plan(plans[1], in_ms(2'000));
  ASSERT_FALSE(alone) << "writer 0 has no plan";
  EXPECT_THAT(alone.error().message(), HasSubstr("writer(s) 0"));
  Status second;
  {
    const std::jthread other([&] { second = both[1]->register_plan(plans[1], soon()); });
    const Status first = both[0]->register_plan(plans[0], soon());
    ASSERT_TRUE(first) << first.error().to_string();
  }
  ASSERT_TRUE(second) << second.error().to_string();
  const auto fill = [&] {
    for (std::uint32_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(both[i]->begin(version(7, 1), soon()));
      for (const TensorSlice& s : plans[i]) ASSERT_TRUE(write_slice(*both[i], model_.half, s.tensor, s.rect));
    }
  };
  fill();
  const Error commit = stopped([&](const CallOptions& end) { return both[0]->commit(end); });
  EXPECT_EQ(commit.code(), Errc::cancelled) << commit.to_string();
  EXPECT_THAT(commit.message(), HasSubstr("writer 1 (pid "));
  EXPECT_EQ(both[1]->commit(soon()).error().code(), Errc::aborted);
  fill();
  std::optional<Result<OffloadReport>> other;
  {
    const std::jthread thread([&] { other = both[1]->commit(soon()); });
    const auto report = both[0]->commit(soon());
    EXPECT_TRUE(report) << report.error().to_string();
  }
  EXPECT_TRUE(*other) << other->error().to_string();
  expect_served(*both[0], 1);
}

TEST_F(WriterStop, TheAgentsBoundOfAWaitIsNotTheCallers) {
  agent_.reset();
  agent::TrainerServerOptions options;
  options.wait_limit = std::chrono::milliseconds(50);
  agent_ = std::make_unique<MiniAgent>(dir_.path(), options);
  const auto later = [&options](const std::function<void()>& act) {
    return std::jthread([&options, act] {
      std::this_thread::sleep_for(4 * options.wait_limit);
      act();
    });
  };
  auto writer = attach();
  agent_->busy = true;
  publish(*writer, 1);
  {
    const auto serves = later([&] { agent_->busy = false; });
    const Status ready = writer->wait_ready({7, 1});
    EXPECT_TRUE(ready) << ready.error().to_string();
  }
  writer.reset();

  const auto first = attach(0, 2);
  const auto second = attach(1, 2);
  const auto registers = later([&] { EXPECT_TRUE(second->register_plan(share(*model_.layout, 1, 2), soon())); });
  const Status registered = first->register_plan(share(*model_.layout, 0, 2));
  EXPECT_TRUE(registered) << registered.error().to_string();
}

}  // namespace
}  // namespace deltasync::test
