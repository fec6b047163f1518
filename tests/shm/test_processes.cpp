// Real processes, killed and stopped inside the protocol. The crash matrix of shm_protocol.md in the flesh; all
// interleavings are the explorer's business.
#include <gmock/gmock-matchers.h>
#include <sys/resource.h>

#include <thread>

#include "shm/support.hpp"

namespace deltasync::shm::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Where a writer process pauses, so that the parent can hit it there.
enum class Pause { before_begin, filling, copying, committing, none };

class Processes : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = {dir_.path(), "s"};
    segment_ = create(path_).value();
    agent_ = AgentRole::adopt(*segment_).value();
  }
  void restart_agent() {
    agent_.reset();
    segment_ = Segment::attach(path_).value();
    agent_ = AgentRole::adopt(*segment_).value();
  }

  /// A trainer that publishes one version and pauses on the way ('p' to the parent, 'c' back).
  std::unique_ptr<Child> trainer(unsigned slot, unsigned writers, Version v, std::uint8_t value, Pause pause) {
    auto child = std::make_unique<Child>([=, path = path_](const Child::Turns& turns) {
      const auto at = [&](Pause here) {
        if (pause != here) return;
        turns.tell('p');
        turns.expect('c');
      };
      auto segment = Segment::attach(path);
      if (!segment.ok()) return 10;
      WriterRole role(**segment, slot, writers);
      at(Pause::before_begin);
      auto fill = role.begin(v, soon());
      if (!fill.ok()) return 20 + static_cast<int>(fill.error().code());
      at(Pause::filling);
      if (!role.enter_copy(*fill).ok()) return 11;
      const auto half = (*segment)->half(fill->half);
      const auto part = half.size() / writers;
      std::memset(half.data() + slot * part, value, part / 2);
      at(Pause::copying);
      std::memset(half.data() + slot * part + part / 2, value, part - part / 2);
      role.leave_copy(*fill);
      at(Pause::committing);
      const auto done = role.commit(*fill, soon());
      return done.ok() ? 0 : 60 + static_cast<int>(done.error().code());
    });
    EXPECT_TRUE(agent_->grant_slot(slot, writers, watch(child->pid())).ok());
    child->go();
    return child;
  }
  void publish(Version v, std::uint8_t value) {
    auto child = trainer(0, 1, std::move(v), value, Pause::none);
    ASSERT_EQ(child->exit_code(), 0);
    agent_->reap();
    ASSERT_TRUE(agent_->activate(*agent_->sealed()).ok());
    if (auto old = agent_->retiring()) agent_->retire_done(*old);
  }
  void expect_active(const Version& v, std::uint8_t value) {
    const auto active = agent_->active();
    ASSERT_TRUE(active);
    EXPECT_EQ(active->version, v);
    EXPECT_TRUE(half_is(*segment_, active->half, value));
  }

  TempDir dir_;
  SegmentPath path_;
  std::unique_ptr<Segment> segment_;
  std::unique_ptr<AgentRole> agent_;
};

class KilledTrainer : public Processes, public ::testing::WithParamInterface<Pause> {};

TEST_P(KilledTrainer, LeavesTheActiveVersionAndBlocksNobody) {
  publish(version(1, 1), 1);
  auto child = trainer(0, 1, version(1, 2), 2, GetParam());
  child->expect('p');
  auto rival = agent_->grant_slot(0, 1, watch(::getpid()));
  ASSERT_FALSE(rival.ok());
  EXPECT_EQ(rival.error().code(), Errc::already_exists);
  EXPECT_THAT(rival.error().message(), HasSubstr("pid " + std::to_string(child->pid())));

  child->kill();
  EXPECT_THAT(agent_->reap(), ElementsAre(0u));
  EXPECT_EQ(inspect_slot(*segment_, 0).pid, 0);
  EXPECT_THAT(agent_->reap(), ElementsAre()) << "a death is reported once";
  EXPECT_FALSE(agent_->sealed());
  expect_active(version(1, 1), 1);
  publish(version(2, 1), 3);
  expect_active(version(2, 1), 3);
}
INSTANTIATE_TEST_SUITE_P(Everywhere, KilledTrainer,
                         ::testing::Values(Pause::before_begin, Pause::filling, Pause::copying, Pause::committing));

TEST_F(Processes, AgentRestartsWhileATrainerIsFilling) {
  publish(version(1, 1), 1);
  auto child = trainer(0, 1, version(1, 2), 2, Pause::copying);
  child->expect('p');
  restart_agent();
  expect_active(version(1, 1), 1);
  EXPECT_TRUE(agent_->filling()) << "a living writer's fill is left alone";
  EXPECT_FALSE(agent_->grant_slot(0, 1, watch(::getpid())).ok()) << "the owner is on record";
  EXPECT_TRUE(agent_->grant_slot(0, 1, watch(child->pid())).ok()) << "it may connect again";
  child->tell('c');
  EXPECT_EQ(child->exit_code(), 0);
  EXPECT_EQ(agent_->sealed()->version, version(1, 2));
}

TEST_F(Processes, AnOwnerThatCannotBeWatchedIsTreatedAsAlive) {
  auto child = trainer(0, 1, version(1, 1), 1, Pause::copying);
  child->expect('p');
  agent_.reset();
  const int lowest_free = UniqueFd(::dup(0)).get();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{static_cast<rlim_t>(lowest_free + 1), before.rlim_max};  // a pidfd can be had, no look at /proc
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  auto adopted = AgentRole::adopt(*segment_);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  agent_ = std::move(adopted).value();
  EXPECT_TRUE(agent_->filling());
  EXPECT_EQ(inspect_slot(*segment_, 0).pid, child->pid());
  EXPECT_TRUE(agent_->watch_fds().empty());
  EXPECT_THAT(agent_->reap(), ElementsAre());
  EXPECT_EQ(agent_->watch_fds().size(), 1u) << "looked at again";
  child->kill();
  EXPECT_THAT(agent_->reap(), ElementsAre(0u));
  EXPECT_FALSE(agent_->filling());
}

TEST_F(Processes, TrainerDiesWhileNoAgentIsThere) {
  publish(version(1, 1), 1);
  auto child = trainer(0, 1, version(1, 2), 2, Pause::copying);
  child->expect('p');
  agent_.reset();
  child->kill();
  restart_agent();
  EXPECT_FALSE(agent_->filling());
  expect_active(version(1, 1), 1);
  publish(version(2, 1), 2);
}

TEST_F(Processes, ANewAgentFreesWhatTheOldOneWasRetiring) {
  publish(version(1, 1), 1);
  ASSERT_EQ(trainer(0, 1, version(1, 2), 2, Pause::none)->exit_code(), 0);
  agent_->reap();
  ASSERT_TRUE(agent_->activate(*agent_->sealed()).ok());
  ASSERT_TRUE(agent_->retiring());
  restart_agent();
  EXPECT_FALSE(agent_->retiring());
  expect_active(version(1, 2), 2);
  publish(version(1, 3), 3);
}

TEST_F(Processes, ASealedVersionSurvivesTheAgent) {
  publish(version(1, 1), 1);
  ASSERT_EQ(trainer(0, 1, version(1, 2), 2, Pause::none)->exit_code(), 0);
  restart_agent();
  expect_active(version(1, 1), 1);
  ASSERT_TRUE(agent_->sealed());
  ASSERT_TRUE(agent_->activate(*agent_->sealed()).ok());
  expect_active(version(1, 2), 2);
}

TEST_F(Processes, AStoppedWriterInsideACopyQuarantinesTheHalf) {
  publish(version(1, 1), 1);
  // Writer 0 is this process; writer 1 stops in the middle of its copy.
  ASSERT_TRUE(agent_->grant_slot(0, 2, watch(::getpid())).ok());
  WriterRole leader(*segment_, 0, 2);
  auto stopped = trainer(1, 2, version(1, 2), 2, Pause::copying);
  auto fill = leader.begin(version(1, 2), soon());
  ASSERT_TRUE(fill.ok()) << fill.error().to_string();
  stopped->expect('p');
  stopped->stop();
  const auto late = leader.commit(*fill, in_ms(50));
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Errc::timed_out);
  EXPECT_THAT(late.error().message(), HasSubstr("writer 1 (pid " + std::to_string(stopped->pid())));

  agent_->reap();
  const auto refused = leader.begin(version(1, 3), in_ms(50));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::quarantined);
  EXPECT_THAT(refused.error().message(), HasSubstr("pid " + std::to_string(stopped->pid())));
  expect_active(version(1, 1), 1);
  agent_->revoke_slot(1);
  EXPECT_EQ(inspect_half(*segment_, fill->half).state, HalfState::quarantined) << "its connection is no proof of death";

  // It goes on: its copy ends in the quarantined half, its commit fails, and only then the half is free.
  stopped->resume();
  stopped->tell('c');
  EXPECT_EQ(stopped->exit_code(), 60 + static_cast<int>(Errc::aborted));
  agent_->reap();
  expect_active(version(1, 1), 1);
  auto next = leader.begin(version(1, 3), soon());
  ASSERT_TRUE(next.ok()) << next.error().to_string();
  EXPECT_EQ(next->half, fill->half);
}

TEST_F(Processes, AStoppedWriterThatIsKilledFreesTheHalf) {
  ASSERT_TRUE(agent_->grant_slot(0, 2, watch(::getpid())).ok());
  WriterRole leader(*segment_, 0, 2);
  auto stopped = trainer(1, 2, version(1, 2), 2, Pause::copying);
  auto fill = leader.begin(version(1, 2), soon());
  stopped->expect('p');
  stopped->stop();
  leader.abort(*fill);
  agent_->reap();
  EXPECT_EQ(inspect_half(*segment_, fill->half).state, HalfState::quarantined);
  EXPECT_THAT(describe_half(*segment_, fill->half), HasSubstr("pid " + std::to_string(stopped->pid())));
  stopped->kill();
  EXPECT_THAT(agent_->reap(), ElementsAre(1u));
  EXPECT_EQ(inspect_half(*segment_, fill->half).state, HalfState::free);
}

TEST_F(Processes, AWriterStoppedBetweenCopiesHoldsNothing) {
  ASSERT_TRUE(agent_->grant_slot(0, 2, watch(::getpid())).ok());
  WriterRole leader(*segment_, 0, 2);
  auto stopped = trainer(1, 2, version(1, 2), 2, Pause::filling);
  auto fill = leader.begin(version(1, 2), soon());
  stopped->expect('p');
  stopped->stop();
  leader.abort(*fill);
  agent_->reap();
  EXPECT_EQ(inspect_half(*segment_, fill->half).state, HalfState::free);
  fill_half(*segment_, fill->half, 77);
  stopped->resume();
  stopped->tell('c');
  EXPECT_EQ(stopped->exit_code(), 11) << "enter_copy is refused";
  EXPECT_TRUE(half_is(*segment_, fill->half, 77)) << "not a byte was written";
}

TEST_F(Processes, ADeathAmongSeveralEndsTheFillForAllAtOnce) {
  auto lead = trainer(0, 2, version(1, 1), 1, Pause::none);
  auto other = trainer(1, 2, version(1, 1), 1, Pause::copying);
  other->expect('p');
  other->kill();
  // Nobody waits for a deadline: the death itself ends it.
  while (agent_->reap().empty()) std::this_thread::yield();
  EXPECT_EQ(lead->exit_code(), 60 + static_cast<int>(Errc::aborted));
  EXPECT_FALSE(agent_->sealed());
}

/// What a writer process runs after its exec: the segment's directory and name, and its pipe ends, are the arguments.
int after_exec(char** argv) {
  const Child::Turns turns{std::atoi(argv[2]), std::atoi(argv[3])};
  turns.tell('e');
  turns.expect('g');
  auto segment = Segment::attach({argv[0], argv[1]});
  if (!segment.ok()) return 10;
  WriterRole role(**segment, 0, 1);
  turns.tell('r');
  turns.expect('c');
  auto fill = role.begin(version(1, 3), soon());
  if (!fill.ok()) return 20 + static_cast<int>(fill.error().code());
  if (!role.enter_copy(*fill).ok()) return 11;
  fill_half(**segment, fill->half, 3);
  role.leave_copy(*fill);
  return role.commit(*fill, soon()).ok() ? 0 : 12;
}

TEST_F(Processes, ATrainerThatBecomesAnotherProgramInsideAFill) {
  publish(version(1, 1), 1);
  Child child([path = path_](const Child::Turns& turns) {
    auto segment = Segment::attach(path);
    WriterRole role(**segment, 0, 1);
    const auto fill = role.begin(version(1, 2), soon());
    if (!fill.ok() || !role.enter_copy(*fill).ok()) return 11;
    const std::string in = std::to_string(turns.in), out = std::to_string(turns.out);
    ::execl("/proc/self/exe", "test", "after-exec", path.dir.c_str(), path.name.c_str(), in.c_str(), out.c_str(),
            nullptr);
    return 12;
  });
  ASSERT_TRUE(agent_->grant_slot(0, 1, watch(child.pid())).ok());
  child.go();
  child.expect('e');
  EXPECT_THAT(agent_->reap(), ElementsAre()) << "the process lives";
  EXPECT_TRUE(agent_->filling());
  ASSERT_TRUE(agent_->grant_slot(0, 1, watch(child.pid())).ok()) << "the same process asks again";
  child.tell('g');
  child.expect('r');
  EXPECT_FALSE(agent_->filling()) << "what the old program left open is over";
  agent_->reap();
  child.tell('c');
  EXPECT_EQ(child.exit_code(), 0);
  ASSERT_TRUE(agent_->sealed());
  ASSERT_TRUE(agent_->activate(*agent_->sealed()).ok());
  expect_active(version(1, 3), 3);
}

TEST_F(Processes, AForkedChildHasNoMapping) {
  // A data loader forked by the trainer must not keep the segment alive or touch it.
  const auto mapped = [&] {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find((path_.dir / path_.name).string()) != std::string::npos) return true;
    }
    return false;
  };
  ASSERT_TRUE(mapped());
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(mapped() ? 1 : 0);
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the mapping was inherited";
}

TEST_F(Processes, WritersAndAgentInTheirOwnMappings) {
  // One agent here, two trainer processes that publish twenty versions together; every version that becomes active is
  // looked at while it is.
  constexpr unsigned kVersions = 20;
  const auto body = [path = path_](unsigned slot) {
    return [path, slot](const Child::Turns&) {
      auto segment = Segment::attach(path);
      if (!segment.ok()) return 10;
      WriterRole role(**segment, slot, 2);
      for (unsigned n = 1; n <= kVersions; ++n) {
        auto fill = role.begin(version(1, n), soon());
        if (!fill.ok()) return 20 + static_cast<int>(fill.error().code());
        const auto half = (*segment)->half(fill->half);
        const auto part = half.size() / 2;
        for (std::size_t piece = 0; piece < 4; ++piece) {
          if (!role.enter_copy(*fill).ok()) return 11;
          std::memset(half.data() + slot * part + piece * part / 4, static_cast<int>(n), part / 4);
          role.leave_copy(*fill);
        }
        if (!role.commit(*fill, soon()).ok()) return 12;
      }
      return 0;
    };
  };
  Child a(body(0)), b(body(1));
  ASSERT_TRUE(agent_->grant_slot(0, 2, watch(a.pid())).ok());
  ASSERT_TRUE(agent_->grant_slot(1, 2, watch(b.pid())).ok());
  a.go();
  b.go();
  unsigned seen = 0;
  const auto deadline = soon();
  while (seen < kVersions && !deadline.passed()) {
    agent_->wait_for_change(deadline);
    while (auto sealed = agent_->sealed()) {
      ASSERT_EQ(sealed->version, version(1, ++seen));
      ASSERT_TRUE(agent_->activate(*sealed).ok());
      if (auto old = agent_->retiring()) {
        EXPECT_TRUE(half_is(*segment_, old->half, static_cast<std::uint8_t>(seen - 1)));
        agent_->retire_done(*old);
      }
      EXPECT_TRUE(half_is(*segment_, sealed->half, static_cast<std::uint8_t>(seen)));
    }
  }
  EXPECT_EQ(seen, kVersions);
  EXPECT_EQ(a.exit_code(), 0);
  EXPECT_EQ(b.exit_code(), 0);
}

}  // namespace
}  // namespace deltasync::shm::testing

int main(int argc, char** argv) {
  if (argc == 6 && std::strcmp(argv[1], "after-exec") == 0) return deltasync::shm::testing::after_exec(argv + 2);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
