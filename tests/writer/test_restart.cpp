// What a writer tells an agent that was restarted, and what it learns from it.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "tests/shm/support.hpp"
#include "tests/writer/harness.hpp"

namespace deltasync::test {
namespace {

using shm::testing::TempDir;

class WriterRestart : public ::testing::Test {
 protected:
  std::unique_ptr<Writer> attach(std::uint32_t index, std::uint32_t writers) {
    auto writer = Writer::attach(model_.layout, Sidecar{}, writer_options(dir_.path(), index, writers), soon());
    if (!writer) ADD_FAILURE() << writer.error().to_string();
    return std::move(writer).value();
  }
  std::vector<TensorSlice> part(std::uint32_t index) const { return share(*model_.layout, index, 2); }
  std::future<Status> registering(Writer& writer, std::uint32_t index) {
    return std::async(std::launch::async, [&writer, plan = part(index)] { return writer.register_plan(plan, soon()); });
  }
  void publish(std::unique_ptr<Writer> (&both)[2], std::uint64_t number) {
    for (std::uint32_t i = 0; i < 2; ++i) {
      const auto begun = both[i]->begin(version(7, number), soon());
      ASSERT_TRUE(begun) << begun.error().to_string();
      for (const TensorSlice& s : part(i)) ASSERT_TRUE(write_slice(*both[i], model_.half, s.tensor, s.rect));
    }
    auto second = std::async(std::launch::async, [&] { return both[1]->commit(soon()).ok(); });
    const auto report = both[0]->commit(soon());
    EXPECT_TRUE(report) << report.error().to_string();
    EXPECT_TRUE(second.get());
  }
  void restart_agent() {
    agent_.reset();
    agent_ = std::make_unique<MiniAgent>(dir_.path());
  }

  TempDir dir_;
  TestModel model_ = make_model(13);
  std::unique_ptr<MiniAgent> agent_ = std::make_unique<MiniAgent>(dir_.path());
};

/// Rank 0 sees no reason to register anything: it has been agreed on. Nobody waits for a deadline all the same.
TEST_F(WriterRestart, ARankThatIsReplacedAfterItIsJudgedByThePlansOfBefore) {
  std::unique_ptr<Writer> both[2] = {attach(0, 2), attach(1, 2)};
  auto other = registering(*both[1], 1);
  ASSERT_TRUE(both[0]->register_plan(part(0), soon()));
  ASSERT_TRUE(other.get());
  publish(both, 1);

  restart_agent();
  both[1].reset();
  both[1] = attach(1, 2);
  auto again = registering(*both[1], 1);
  ASSERT_TRUE(eventually([&] {
    for (const auto& trainer : agent_->server().status()) {
      if (trainer.slot == 1 && trainer.waiting) return true;
    }
    return false;
  }));
  ASSERT_TRUE(both[0]->begin(version(7, 2), soon()));  // which connects again
  const Status judged = again.get();
  ASSERT_TRUE(judged) << judged.error().to_string();
  both[0]->abort();
  publish(both, 3);
}

/// The plans of before are no freebie: what does not fit them is refused as it was.
TEST_F(WriterRestart, AReplacedRankWithAnotherPlanIsToldThatItDoesNotFit) {
  std::unique_ptr<Writer> both[2] = {attach(0, 2), attach(1, 2)};
  auto other = registering(*both[1], 1);
  ASSERT_TRUE(both[0]->register_plan(part(0), soon()));
  ASSERT_TRUE(other.get());
  publish(both, 1);

  restart_agent();
  ASSERT_TRUE(both[0]->wait_ready({7, 1}, soon()));
  both[1].reset();
  both[1] = attach(1, 2);
  const Status judged = both[1]->register_plan(part(0), in_ms(2'000));
  ASSERT_FALSE(judged);
  EXPECT_EQ(judged.error().code(), Errc::timed_out);
  EXPECT_THAT(judged.error().message(), ::testing::HasSubstr("does not fit those that the other writers registered"));
}

TEST_F(WriterRestart, AFreshEpochComesAfterWhatTheSegmentHas) {
  const auto publish_alone = [&](Writer& writer, const Version& v) {
    ASSERT_TRUE(writer.begin(v, soon()));
    ASSERT_TRUE(write_all(writer, model_.half));
    ASSERT_TRUE(writer.commit(soon()));
    ASSERT_TRUE(writer.wait_ready(v.id, soon()));
  };
  auto writer = attach(0, 1);
  const std::uint64_t first = writer->fresh_epoch();
  publish_alone(*writer, version(first, 1));
  EXPECT_GT(writer->fresh_epoch(), first) << "what it has published itself counts too";
  const std::uint64_t ten_years_ahead = (1'795'000'000'000u + 315'360'000'000u) << 20;
  publish_alone(*writer, version(ten_years_ahead, 1));
  writer.reset();
  restart_agent();
  writer = attach(0, 1);
  const std::uint64_t next = writer->fresh_epoch();
  EXPECT_EQ(next >> 32, (ten_years_ahead >> 32) + 1);
  publish_alone(*writer, version(next, 1));
  publish_alone(*writer, version(5, 1));  // an older one, of somebody who does not ask
  EXPECT_EQ(agent_->served(), (VersionId{5, 1}));
}

}  // namespace
}  // namespace deltasync::test
