// Calls of several clients at one engine: their order, deadlines, failures, and what they leave.
#include <gtest/gtest.h>

#include <thread>

#include "receiver/control/service.hpp"
#include "tests/receiver/control/fake_engine.hpp"

namespace deltasync::control {
namespace {

using namespace std::chrono_literals;
using Words = std::vector<std::string>;

class ControlService : public testing::Test {
 protected:
  test::Notes notes;
  test::FakeEngine engine{notes};
  test::FakeWeights weights{notes};
  Service service{engine, weights, 30s};

  bool serves() const { return service.standing().engine.serves(); }
};

TEST_F(ControlService, AnUpdateStopsTheEngineForItsCommitOnly) {
  ASSERT_TRUE(service.call({.kind = Call::Kind::update, .mode = PauseMode::keep}));
  EXPECT_EQ(notes.take(),
            (Words{"stage", "stop_admission", "hold", "commit", "reset_caches", "release_hold", "resume_admission"}));
  EXPECT_TRUE(serves());
  EXPECT_EQ(service.standing().label, "2");
}

TEST_F(ControlService, AVersionIsTakenByItsNumberAndCalledAsTheClientSays) {
  ASSERT_TRUE(
      service.call({.kind = Call::Kind::update, .mode = PauseMode::keep}, {.version = "9", .verify = true}, "nine"));
  EXPECT_EQ(service.standing().version->id.number, 9U);
  EXPECT_EQ(service.standing().label, "nine");
  EXPECT_TRUE(weights.verify);
}

TEST_F(ControlService, AClientsNameIsOfItsVersionOnly) {
  ASSERT_TRUE(service.rename("one"));
  EXPECT_EQ(service.standing().label, "one");
  notes.fail("reset_caches");  // and then succeeds, so that the new version is live though the call fails
  EXPECT_FALSE(service.call({.kind = Call::Kind::update}));
  EXPECT_EQ(service.standing().label, "2");
  ASSERT_TRUE(service.rename("two"));
  ASSERT_TRUE(service.call({.kind = Call::Kind::update}, {.version = "2"}));  // nothing new
  EXPECT_EQ(service.standing().label, "two");
}

TEST_F(ControlService, AHookThatThrowsFailsItsStep) {
  notes.throws("wait_idle");
  const Status failed = service.call({.kind = Call::Kind::pause, .mode = PauseMode::wait});
  ASSERT_FALSE(failed);
  EXPECT_NE(failed.error().message().find("wait_idle throws"), std::string::npos);
  EXPECT_TRUE(serves());
  EXPECT_TRUE(service.call({.kind = Call::Kind::pause, .mode = PauseMode::wait}));
}

TEST_F(ControlService, AFailedUpdateLeavesItServingTheOldVersion) {
  notes.fail("stage");
  const Status staged = service.call({.kind = Call::Kind::update});
  ASSERT_FALSE(staged);
  EXPECT_EQ(staged.error().message(), "stage: stage is broken");
  EXPECT_EQ(notes.take(), Words{"stage"});  // it has served all the time
  notes.fail("commit");
  const Status committed = service.call({.kind = Call::Kind::update});
  ASSERT_FALSE(committed);
  EXPECT_EQ(committed.error().code(), Errc::io);
  EXPECT_TRUE(serves());
  EXPECT_EQ(service.standing().label, "1");
}

TEST_F(ControlService, WeightsOfNoVersionAreNotServed) {
  weights.void_on_failure = true;
  notes.fail("commit");
  const Status failed = service.call({.kind = Call::Kind::update});
  ASSERT_FALSE(failed);
  EXPECT_NE(failed.error().message().find("the weights are those of no version now; the engine is paused"),
            std::string::npos);
  EXPECT_FALSE(serves());
  EXPECT_FALSE(service.call({.kind = Call::Kind::resume}));
  EXPECT_FALSE(serves());
  ASSERT_TRUE(service.call({.kind = Call::Kind::update}));  // nobody had paused it
  EXPECT_TRUE(serves());
}

TEST_F(ControlService, ACheckStopsAnEngineWhoseWeightsBecameVoid) {
  ASSERT_TRUE(service.check());
  EXPECT_EQ(notes.take(), Words());
  weights.become_void();
  notes.fail("stop_admission");
  EXPECT_FALSE(service.check());
  EXPECT_TRUE(serves());
  notes.take();
  ASSERT_TRUE(service.check());
  EXPECT_EQ(notes.take(), (Words{"stop_admission", "abort", "wait_idle"}));
  EXPECT_FALSE(serves());
  ASSERT_TRUE(service.check());
  EXPECT_EQ(notes.take(), Words());
  notes.fail("stage");
  EXPECT_FALSE(service.call({.kind = Call::Kind::update}));
  EXPECT_FALSE(serves());
  notes.take();
  ASSERT_TRUE(service.call({.kind = Call::Kind::update}));  // nobody had paused it
  EXPECT_EQ(notes.take(), (Words{"stage", "commit", "reset_caches", "resume_admission"}));
}

TEST_F(ControlService, AFailedUpdateStopsAnEngineWhoseWeightsBecameVoid) {
  weights.become_void();
  notes.fail("stage");
  const Status failed = service.call({.kind = Call::Kind::update, .mode = PauseMode::wait});
  ASSERT_FALSE(failed);
  EXPECT_NE(failed.error().message().find("no version now; the engine is paused"), std::string::npos);
  EXPECT_EQ(notes.take(), (Words{"stage", "stop_admission", "abort", "wait_idle"}));
  EXPECT_FALSE(serves());
}

TEST_F(ControlService, ASleepGivesMemoryUpAndAWakeFillsIt) {
  ASSERT_TRUE(service.call({.kind = Call::Kind::sleep, .memory = {EngineMemory::weights, EngineMemory::kv_cache}}));
  EXPECT_EQ(notes.take(), (Words{"stop_admission", "abort", "wait_idle", "reset_caches", "release", "release weights",
                                 "release kv_cache"}));
  EXPECT_FALSE(service.standing().version);
  ASSERT_TRUE(service.call({.kind = Call::Kind::wake, .memory = {EngineMemory::weights}}));
  EXPECT_EQ(notes.take(), (Words{"restore weights", "fill"}));
  EXPECT_FALSE(serves());
  ASSERT_TRUE(service.call({.kind = Call::Kind::wake, .memory = {EngineMemory::kv_cache}}));
  EXPECT_EQ(notes.take(), (Words{"restore kv_cache", "resume_admission"}));
  EXPECT_EQ(service.standing().label, "1");
}

TEST_F(ControlService, WhatNeverHadWeightsWakesAndServesOnceItHasSome) {
  weights.become_void();
  const MemorySet slept{EngineMemory::weights};
  ASSERT_TRUE(service.call({.kind = Call::Kind::sleep, .memory = slept}));
  notes.take();
  ASSERT_TRUE(service.call({.kind = Call::Kind::wake, .resumes = true, .may_stay_void = true, .memory = slept}));
  EXPECT_EQ(notes.take(), (Words{"restore weights", "fill"}));
  EXPECT_FALSE(serves());
  ASSERT_TRUE(service.call({.kind = Call::Kind::update}));
  EXPECT_TRUE(serves());
  EXPECT_TRUE(service.standing().version);
}

TEST_F(ControlService, AWakeThatHasToBringWeightsWaitsForTheFirst) {
  weights.become_void();
  const MemorySet slept{EngineMemory::weights};
  ASSERT_TRUE(service.call({.kind = Call::Kind::sleep, .memory = slept}));
  notes.take();
  ASSERT_TRUE(service.call({.kind = Call::Kind::wake, .memory = slept}));
  EXPECT_EQ(notes.take(), (Words{"restore weights", "fill", "stage", "commit", "resume_admission"}));
  EXPECT_TRUE(serves());
}

TEST_F(ControlService, CallsWaitForEachOther) {
  notes.block("wait_idle");
  std::thread first([&] { EXPECT_TRUE(service.call({.kind = Call::Kind::pause, .mode = PauseMode::wait})); });
  notes.wait_for("wait_idle");
  EXPECT_EQ(service.standing().busy, "pause");
  std::thread second([&] { EXPECT_TRUE(service.call({.kind = Call::Kind::resume})); });
  const Status late = service.call({.kind = Call::Kind::resume}, {}, "", 50ms);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code(), Errc::timed_out);
  EXPECT_NE(late.error().message().find("busy: pause goes on"), std::string::npos) << late.error().message();
  EXPECT_EQ(*service.abort(std::vector<std::string>{"a", "b"}), 2U);  // beside it
  notes.unblock();
  first.join();
  second.join();
  EXPECT_TRUE(serves());
}

TEST_F(ControlService, MoreCallsThanMayWaitAreRefusedAtOnce) {
  const auto is_refused = [](const Status& done) {
    return !done && done.error().message().find("as many calls as may wait") != std::string::npos;
  };
  notes.block("reset_caches");
  std::vector<std::thread> waiting;
  for (int i = 0; i < Service::kWaitingMax; ++i) {
    waiting.emplace_back([&] {
      Status done = service.call({.kind = Call::Kind::reset_caches});
      while (is_refused(done)) done = service.call({.kind = Call::Kind::reset_caches});  // the question below was there
      EXPECT_TRUE(done);
    });
  }
  notes.wait_for("reset_caches");
  while (!is_refused(service.call({.kind = Call::Kind::resume}, {}, "", 1ms))) std::this_thread::yield();
  notes.unblock();
  for (std::thread& thread : waiting) thread.join();
}

TEST_F(ControlService, ADeadlineEndsACallAndTheEngineServesAgain) {
  notes.block("wait_idle");
  const Status late = service.call({.kind = Call::Kind::pause, .mode = PauseMode::wait}, {}, "", 30ms);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code(), Errc::timed_out);
  EXPECT_EQ(notes.take(), (Words{"stop_admission", "wait_idle", "resume_admission"}));
  EXPECT_TRUE(serves());
}

TEST_F(ControlService, AHookThatCannotBringItBackIsNamed) {
  notes.fail("commit");
  notes.fail("resume_admission");
  const Status failed = service.call({.kind = Call::Kind::update});
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().message(),
            "commit: commit is broken; then resume_admission: resume_admission is broken; the engine is paused");
  EXPECT_FALSE(serves());
  EXPECT_TRUE(service.call({.kind = Call::Kind::resume}));
  EXPECT_TRUE(serves());
}

TEST_F(ControlService, AnEndStopsWhatGoesOn) {
  notes.block("wait_idle");
  std::thread call([&] {
    const Status stopped = service.call({.kind = Call::Kind::pause, .mode = PauseMode::wait});
    EXPECT_FALSE(stopped);
  });
  notes.wait_for("wait_idle");
  service.stop();
  call.join();
  EXPECT_EQ(notes.take(), (Words{"stop_admission", "wait_idle", "resume_admission"}));
  EXPECT_EQ(service.call({.kind = Call::Kind::resume}).error().code(), Errc::cancelled);
}

TEST_F(ControlService, ARequestIsForAVersion) {
  const auto code = [&](std::string_view min, std::string_view exact) {
    const Status may = admits(service.standing(), min, exact);
    return may ? std::optional<Errc>() : may.error().code();
  };
  ASSERT_TRUE(service.call({.kind = Call::Kind::update}, {.version = "5"}, "five"));
  EXPECT_EQ(code("", ""), std::nullopt);
  EXPECT_EQ(code("5", ""), std::nullopt);
  EXPECT_EQ(code("4", "5"), std::nullopt);
  EXPECT_EQ(code("", "five"), std::nullopt);
  EXPECT_EQ(code("6", ""), Errc::version_conflict);
  EXPECT_EQ(code("6", "five"), Errc::version_conflict);
  EXPECT_EQ(code("", "4"), Errc::version_conflict);
  EXPECT_EQ(code("", "6"), Errc::version_conflict);
  EXPECT_EQ(code("", "four"), Errc::version_conflict);
  EXPECT_EQ(code("five", ""), Errc::invalid_argument);
  EXPECT_EQ(admits(service.standing(), "6", "").error().message(),
            "the request is for version 6 or a later one, and five is live");
  // A directory's number says nothing.
  weights.epoch = kDirectoryEpoch;
  EXPECT_EQ(code("5", ""), Errc::version_conflict);
  EXPECT_EQ(code("", ""), std::nullopt);
  ASSERT_TRUE(service.call({.kind = Call::Kind::sleep, .memory = {EngineMemory::weights}}));
  EXPECT_EQ(code("", ""), Errc::version_conflict);
}

TEST_F(ControlService, AnEndBeginsNoMoreSteps) {
  notes.block("abort");  // a hook that hears nothing
  std::thread call([&] { EXPECT_EQ(service.call({.kind = Call::Kind::pause}).error().code(), Errc::cancelled); });
  notes.wait_for("abort");
  service.stop();
  notes.unblock();
  call.join();
  EXPECT_EQ(notes.take(), (Words{"stop_admission", "abort", "resume_admission"}));
}

TEST(ControlServiceWithoutWeights, ServesWhenAnUpdateBroughtThem) {
  test::Notes notes;
  test::FakeEngine engine(notes);
  test::FakeWeights weights(notes, 0);
  Service service(engine, weights, 30s);
  EXPECT_FALSE(service.call({.kind = Call::Kind::resume}));
  ASSERT_TRUE(service.call({.kind = Call::Kind::update}));
  EXPECT_TRUE(service.standing().engine.serves());
}

}  // namespace
}  // namespace deltasync::control
