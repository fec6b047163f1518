// The roles over one mapping: what each call does and how each refusal reads.
#include <gmock/gmock-matchers.h>

#include <atomic>
#include <thread>

#include "shm/info.hpp"
#include "shm/support.hpp"

namespace deltasync::shm::testing {
namespace {

using ::testing::HasSubstr;

class Roles : public ::testing::Test {
 protected:
  void SetUp() override {
    segment_ = create({dir_.path(), "s"}).value();
    agent_ = AgentRole::adopt(*segment_).value();
  }
  void grant(unsigned slot, unsigned writers) {
    const auto status = agent_->grant_slot(slot, writers, watch(::getpid()));
    ASSERT_TRUE(status.ok()) << status.error().to_string();
  }
  void publish(WriterRole& writer, const Version& v, std::uint8_t value) {
    auto fill = writer.begin(v, soon());
    ASSERT_TRUE(fill.ok()) << fill.error().to_string();
    ASSERT_TRUE(writer.enter_copy(*fill).ok());
    fill_half(*segment_, fill->half, value);
    writer.leave_copy(*fill);
    const auto done = writer.commit(*fill, soon());
    ASSERT_TRUE(done.ok()) << done.error().to_string();
  }
  void serve() {
    const auto sealed = agent_->sealed();
    ASSERT_TRUE(sealed.has_value());
    ASSERT_TRUE(agent_->activate(*sealed).ok());
    if (auto old = agent_->retiring()) agent_->retire_done(*old);
  }

  TempDir dir_;
  std::unique_ptr<Segment> segment_;
  std::unique_ptr<AgentRole> agent_;
};

TEST_F(Roles, VersionsAlternateBetweenTheHalves) {
  grant(0, 1);
  WriterRole writer(*segment_, 0, 1);
  EXPECT_FALSE(writer.newest().valid());
  for (std::uint64_t n = 1; n <= 6; ++n) {
    publish(writer, version(7, n), static_cast<std::uint8_t>(n));
    EXPECT_EQ(writer.newest(), (VersionId{7, n}));
    const auto sealed = agent_->sealed();
    ASSERT_TRUE(sealed);
    EXPECT_EQ(sealed->version, version(7, n));
    const auto before = agent_->active();
    ASSERT_EQ(before.has_value(), n > 1);
    ASSERT_TRUE(agent_->activate(*sealed).ok());
    EXPECT_FALSE(agent_->sealed());
    EXPECT_EQ(agent_->active()->version, version(7, n));
    const auto old = agent_->retiring();
    ASSERT_EQ(old.has_value(), n > 1);
    if (old) {
      EXPECT_NE(old->half, sealed->half);
      EXPECT_TRUE(half_is(*segment_, old->half, static_cast<std::uint8_t>(n - 1)));
      agent_->retire_done(*old);
    }
    EXPECT_TRUE(half_is(*segment_, sealed->half, static_cast<std::uint8_t>(n)));
  }
}

TEST_F(Roles, BeginWaitsWhileTheOtherHalfIsRead) {
  grant(0, 1);
  WriterRole writer(*segment_, 0, 1);
  publish(writer, version(7, 1), 1);
  serve();
  publish(writer, version(7, 2), 2);
  ASSERT_TRUE(agent_->activate(*agent_->sealed()).ok());

  EXPECT_FALSE(agent_->writer_waiting());
  const auto refused = writer.begin(version(7, 3), in_ms(30));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::timed_out);
  EXPECT_THAT(refused.error().message(), HasSubstr("RETIRING (step_1"));
  EXPECT_FALSE(agent_->writer_waiting()) << "a request outlived its begin";

  std::thread waiting([&] {
    auto fill = writer.begin(version(7, 3), soon());
    EXPECT_TRUE(fill.ok());
    if (fill.ok()) writer.abort(*fill);
  });
  while (!agent_->writer_waiting()) agent_->wait_for_change(soon());
  EXPECT_GT(agent_->writer_waiting()->remaining_ms().count(), 0);
  agent_->retire_done(*agent_->retiring());
  waiting.join();
}

/// Writers of protocol 4 take any label without a NUL; receivers would refuse every message that has it.
TEST_F(Roles, LabelsOfOlderWritersBecomePlainText) {
  const auto read_as = [](const std::string& label) { return to_version(to_words({{7, 1}, label}, 1)).label; };
  EXPECT_EQ(read_as("step\n7\x1b"), "step\\x0a7\\x1b");
  EXPECT_EQ(read_as("caf\xE9"), "caf\\xe9");
  const std::string plain = std::string(121, 'x') + "\xE4\xB8\xAD";
  EXPECT_EQ(read_as(plain), plain);
  EXPECT_EQ(read_as("\n" + plain), "\\x0a" + plain.substr(0, 121)) << "not cut inside a character";
}

TEST_F(Roles, NumbersOfAnEpochMustGrow) {
  grant(0, 1);
  WriterRole writer(*segment_, 0, 1);
  publish(writer, version(7, 5), 1);
  serve();
  for (const auto& v : {version(7, 5), version(7, 4)}) {
    const auto refused = writer.begin(v, soon());
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), Errc::version_conflict);
    EXPECT_THAT(refused.error().message(), HasSubstr("step_5"));
  }
  publish(writer, version(7, 6), 2);
  EXPECT_EQ(agent_->sealed()->version, version(7, 6));
}

/// Whatever its clock says, or who else has published here.
TEST_F(Roles, ATrainerOfAnyOtherEpochIsLetIn) {
  grant(0, 1);
  WriterRole writer(*segment_, 0, 1);
  std::uint64_t fills = 0;
  for (const auto& v : {version(7, 5), version(8, 1), version(6, 9), version(5, 1), version(~std::uint64_t{0}, 1)}) {
    publish(writer, v, static_cast<std::uint8_t>(++fills));
    EXPECT_EQ(writer.newest(), v.id) << "what was committed last, not what is largest";
    EXPECT_EQ(inspect_newest(*segment_), v);
    ASSERT_TRUE(agent_->sealed());
    EXPECT_EQ(agent_->sealed()->version, v);
    serve();
  }
}

TEST_F(Roles, BadArguments) {
  WriterRole writer(*segment_, 0, 1);
  EXPECT_EQ(writer.begin(version(7, 1), soon()).error().code(), Errc::invalid_argument) << "not granted";
  grant(0, 1);
  EXPECT_EQ(writer.begin(version(0, 1), soon()).error().code(), Errc::invalid_argument);
  EXPECT_EQ(writer.begin({{7, 1}, std::string(128, 'x')}, soon()).error().code(), Errc::invalid_argument);
  for (const std::string& bad :
       {std::string("a\0b", 3), std::string("a\nb"), std::string("\xC2\x9B"), std::string("\xFF")}) {
    EXPECT_EQ(writer.begin({{7, 1}, bad}, soon()).error().code(), Errc::invalid_argument) << bad;
  }
  auto fill = writer.begin({{7, 1}, std::string(127, 'x')}, soon());
  ASSERT_TRUE(fill.ok());
  EXPECT_EQ(writer.begin(version(7, 2), soon()).error().code(), Errc::invalid_argument) << "a fill is open";
  ASSERT_TRUE(writer.enter_copy(*fill).ok());
  EXPECT_EQ(writer.commit(*fill, soon()).error().code(), Errc::invalid_argument) << "a copy is running";
  writer.leave_copy(*fill);
  ASSERT_TRUE(writer.commit(*fill, soon()).ok());
  EXPECT_EQ(agent_->sealed()->version.label, std::string(127, 'x'));
  EXPECT_EQ(agent_->grant_slot(3, 3, watch(::getpid())).error().code(), Errc::invalid_argument);
  EXPECT_EQ(agent_->grant_slot(0, 65, watch(::getpid())).error().code(), Errc::invalid_argument);
}

TEST_F(Roles, AbortKeepsTheActiveVersionAndTheNumberMayBeUsedAgain) {
  grant(0, 1);
  WriterRole writer(*segment_, 0, 1);
  publish(writer, version(7, 1), 1);
  serve();
  auto fill = writer.begin(version(7, 2), soon());
  ASSERT_TRUE(fill.ok());
  writer.abort(*fill);
  EXPECT_FALSE(agent_->sealed());
  EXPECT_EQ(agent_->active()->version, version(7, 1));
  const auto late = writer.enter_copy(*fill);
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Errc::aborted);
  agent_->reap();
  publish(writer, version(7, 2), 2);
  EXPECT_EQ(agent_->sealed()->version, version(7, 2));
}

TEST_F(Roles, AnAbortWaitsForTheCopyThatIsInside) {
  grant(0, 1);
  WriterRole writer(*segment_, 0, 1);
  publish(writer, version(7, 1), 1);
  serve();
  auto fill = writer.begin(version(7, 2), soon());
  ASSERT_TRUE(writer.enter_copy(*fill).ok());
  ASSERT_TRUE(writer.enter_copy(*fill).ok());  // a second thread
  writer.abort(*fill);
  agent_->reap();
  EXPECT_EQ(inspect_half(*segment_, fill->half).state, HalfState::quarantined);
  EXPECT_EQ(writer.begin(version(7, 3), soon()).error().code(), Errc::invalid_argument) << "its copy is still running";
  writer.leave_copy(*fill);
  agent_->reap();
  EXPECT_EQ(inspect_half(*segment_, fill->half).state, HalfState::quarantined);
  writer.leave_copy(*fill);
  agent_->reap();
  EXPECT_EQ(inspect_half(*segment_, fill->half).state, HalfState::free);
}

TEST_F(Roles, SeveralWritersSealTogether) {
  for (unsigned k = 0; k < 3; ++k) grant(k, 3);
  WriterRole a(*segment_, 0, 3), b(*segment_, 1, 3), c(*segment_, 2, 3);
  const auto early = b.begin(version(7, 1), in_ms(20));
  ASSERT_FALSE(early.ok());
  EXPECT_EQ(early.error().code(), Errc::timed_out);
  EXPECT_THAT(early.error().message(), HasSubstr("writer 0"));

  auto fa = a.begin(version(7, 1), soon());
  auto fb = b.begin(version(7, 1), soon());
  auto fc = c.begin(version(7, 1), soon());
  ASSERT_TRUE(fa.ok() && fb.ok() && fc.ok());
  EXPECT_EQ(fa->half, fb->half);
  EXPECT_EQ(fa->sequence, fc->sequence);
  std::atomic<int> sealed{0};
  std::thread ta([&] { sealed += a.commit(*fa, soon()).ok() ? 1 : 0; });
  std::thread tb([&] { sealed += b.commit(*fb, soon()).ok() ? 1 : 0; });
  while (inspect_slot(*segment_, 0).phase != Phase::committed || inspect_slot(*segment_, 1).phase != Phase::committed) {
    std::this_thread::yield();
  }
  EXPECT_FALSE(agent_->sealed()) << "writer 2 has not committed";
  EXPECT_TRUE(c.commit(*fc, soon()).ok());
  ta.join();
  tb.join();
  EXPECT_EQ(sealed, 2);
  EXPECT_EQ(agent_->sealed()->version, version(7, 1));
}

TEST_F(Roles, ACommitThatWaitsInVainAbortsForAll) {
  for (unsigned k = 0; k < 2; ++k) grant(k, 2);
  WriterRole a(*segment_, 0, 2), b(*segment_, 1, 2);
  auto fa = a.begin(version(7, 1), soon());
  auto fb = b.begin(version(7, 1), soon());
  const auto late = a.commit(*fa, in_ms(30));
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Errc::timed_out);
  EXPECT_THAT(late.error().message(), HasSubstr("writer 1 (pid " + std::to_string(::getpid())));
  EXPECT_EQ(b.enter_copy(*fb).error().code(), Errc::aborted);
  EXPECT_EQ(b.commit(*fb, soon()).error().code(), Errc::aborted);
  EXPECT_FALSE(agent_->sealed());
}

TEST_F(Roles, JoinersMustAgreeWithTheLeader) {
  for (unsigned k = 0; k < 2; ++k) grant(k, 2);
  WriterRole a(*segment_, 0, 2), b(*segment_, 1, 2);
  ASSERT_TRUE(a.begin(version(7, 3), soon()).ok());
  for (const auto& v : {version(8, 3), version(6, 3), version(7, 2)}) {
    const auto refused = b.begin(v, soon());
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), Errc::version_conflict);
    EXPECT_THAT(refused.error().message(), HasSubstr(to_string(v)));
    EXPECT_THAT(refused.error().message(), HasSubstr(to_string(version(7, 3))));
  }
  // A later number of the same epoch: writer 0 may still come to it.
  const auto waited = b.begin(version(7, 4), in_ms(20));
  EXPECT_EQ(waited.error().code(), Errc::timed_out);
  EXPECT_THAT(waited.error().message(), HasSubstr("writer 0 is filling " + to_string(version(7, 3))));
  WriterRole alone(*segment_, 1, 3);
  EXPECT_THAT(alone.begin(version(7, 3), soon()).error().message(), HasSubstr("with 2 writers"));
}

TEST_F(Roles, ProgressBelongsToOneFill) {
  grant(0, 1);
  WriterRole writer(*segment_, 0, 1);
  auto fill = writer.begin(version(7, 1), soon());
  auto view = agent_->filling();
  ASSERT_TRUE(view);
  EXPECT_EQ(view->version, version(7, 1));
  EXPECT_EQ(agent_->elements_done(*view, 1), 0u);
  writer.add_progress(*fill, 1, 17);
  writer.add_progress(*fill, 1, 4);
  writer.add_progress(*fill, 4, 1);
  EXPECT_EQ(agent_->elements_done(*view, 0), 0u);
  EXPECT_EQ(agent_->elements_done(*view, 1), 21u);
  EXPECT_EQ(agent_->elements_done(*view, kBatches), 0u) << "there is no such batch";
  EXPECT_EQ(inspect_progress(*segment_, fill->half, fill->sequence), 22u);
  ASSERT_TRUE(agent_->hold(*view).ok());
  writer.abort(*fill);
  agent_->reap();
  EXPECT_EQ(inspect_half(*segment_, fill->half).state, HalfState::quarantined)
      << "the agent reads while the writer writes";
  auto next = writer.begin(version(7, 2), soon());  // the other half is free
  ASSERT_TRUE(next.ok());
  EXPECT_EQ(agent_->elements_done(*agent_->filling(), 1), 0u);
  agent_->unhold(*view);
  EXPECT_EQ(inspect_half(*segment_, fill->half).state, HalfState::free);
  EXPECT_EQ(agent_->hold(*view).error().code(), Errc::gone);
}

// The half is filled again: what the fill before had counted is not the new one's.
TEST_F(Roles, ProgressBeginsAgainInTheSameHalf) {
  grant(0, 1);
  WriterRole writer(*segment_, 0, 1);
  const auto first = writer.begin(version(7, 1), soon());
  writer.add_progress(*first, 2, 30);
  writer.abort(*first);
  agent_->reap();
  const auto second = writer.begin(version(7, 2), soon());
  ASSERT_TRUE(second.ok());
  ASSERT_EQ(second->half, first->half);
  const auto view = agent_->filling();
  EXPECT_EQ(agent_->elements_done(*view, 2), 0u);
  writer.add_progress(*second, 2, 5);
  EXPECT_EQ(agent_->elements_done(*view, 2), 5u);
}

TEST_F(Roles, ProgressOfManyThreadsAddsUp) {
  grant(0, 1);
  WriterRole writer(*segment_, 0, 1);
  const auto fill = writer.begin(version(7, 1), soon());
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (unsigned i = 0; i < 1000; ++i) writer.add_progress(*fill, i % kBatches, 3);
    });
  }
  for (auto& thread : threads) thread.join();
  const auto view = agent_->filling();
  for (std::uint64_t b = 0; b < kBatches; ++b) EXPECT_EQ(agent_->elements_done(*view, b), 4u * 200 * 3);
}

TEST_F(Roles, TwoSealedHalvesAreActivatedInOrder) {
  grant(0, 1);
  WriterRole writer(*segment_, 0, 1);
  publish(writer, version(7, 1), 1);
  publish(writer, version(7, 2), 2);
  EXPECT_EQ(agent_->sealed()->version, version(7, 1));
  serve();
  EXPECT_EQ(agent_->sealed()->version, version(7, 2));
  serve();
  EXPECT_EQ(agent_->active()->version, version(7, 2));
}

TEST_F(Roles, ActivateRefusesWhatIsNotSealed) {
  grant(0, 1);
  WriterRole writer(*segment_, 0, 1);
  auto fill = writer.begin(version(7, 1), soon());
  EXPECT_EQ(agent_->activate({fill->half, fill->sequence, version(7, 1)}).error().code(), Errc::internal);
  ASSERT_TRUE(writer.commit(*fill, soon()).ok());
  EXPECT_EQ(agent_->activate({fill->half, fill->sequence + 1, version(7, 1)}).error().code(), Errc::internal);
  EXPECT_TRUE(agent_->activate({fill->half, fill->sequence, version(7, 1)}).ok());
}

TEST_F(Roles, WaitForChangeSeesWhatHappenedBeforeItWasCalled) {
  grant(0, 1);
  WriterRole writer(*segment_, 0, 1);
  agent_->wait_for_change(in_ms(0));
  publish(writer, version(7, 1), 1);
  agent_->wait_for_change(soon());  // returns, though the seal is past
  EXPECT_TRUE(agent_->sealed());
  agent_->wait_for_change(in_ms(0));
  agent_->wake();
  agent_->wait_for_change(soon());
}

TEST_F(Roles, ADestroyedWriterAbortsItsFill) {
  grant(0, 1);
  unsigned half = 0;
  {
    WriterRole writer(*segment_, 0, 1);
    half = writer.begin(version(7, 1), soon())->half;
  }
  EXPECT_EQ(inspect_half(*segment_, half).state, HalfState::quarantined);
  agent_->revoke_slot(0);
  EXPECT_EQ(inspect_half(*segment_, half).state, HalfState::free);
  EXPECT_EQ(inspect_slot(*segment_, 0).pid, 0);
}

TEST_F(Roles, ARevocationThatComesLateSparesTheNextGrant) {
  const auto first = agent_->grant_slot(0, 1, watch(::getpid()));
  ASSERT_TRUE(first.ok());
  const auto second = agent_->grant_slot(0, 1, watch(::getpid()));
  ASSERT_TRUE(second.ok());
  agent_->revoke_slot(0, *first);
  EXPECT_EQ(inspect_slot(*segment_, 0).pid, ::getpid());
  agent_->revoke_slot(0, *second);
  EXPECT_EQ(inspect_slot(*segment_, 0).pid, 0);
}

TEST_F(Roles, ConcurrentBracketsOfManyThreads) {
  grant(0, 1);
  WriterRole writer(*segment_, 0, 1);
  for (std::uint64_t n = 1; n <= 20; ++n) {
    auto fill = writer.begin(version(7, n), soon());
    ASSERT_TRUE(fill.ok());
    std::atomic<bool> wrong{false};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 200; ++i) {
          if (!writer.enter_copy(*fill).ok()) return;
          if (inspect_slot(*segment_, 0).phase != Phase::copying) wrong = true;
          writer.leave_copy(*fill);
        }
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_FALSE(wrong) << "a bracket was open and COPYING was not up";
    EXPECT_EQ(inspect_slot(*segment_, 0).phase, Phase::joined);
    ASSERT_TRUE(writer.commit(*fill, soon()).ok());
    serve();
  }
}

}  // namespace
}  // namespace deltasync::shm::testing
