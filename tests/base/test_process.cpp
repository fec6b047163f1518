// Proof of death: a process is dead when its pidfd says so, and a reused or foreign pid is nobody.
#include "base/process.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <array>
#include <cerrno>

#include "base/fork_guard.hpp"

namespace deltasync {
namespace {

/// A child that waits for a signal. Its end of a pipe lets nothing leak if the test dies first.
class Child {
 public:
  Child() {
    int fds[2];
    if (::pipe(fds) != 0) std::abort();
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(fds[1]);
      char c;
      (void)!::read(fds[0], &c, 1);  // ends with the parent
      ::_exit(0);
    }
    ::close(fds[0]);
    hold_.reset(fds[1]);
  }
  ~Child() {
    if (pid_ > 0) ::kill(pid_, SIGKILL);
    reap();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const { ASSERT_EQ(::kill(pid_, number), 0); }
  void reap() {
    if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  UniqueFd hold_;
};

/// Waits until the pidfd is readable.
bool dies(const ProcessWatch& watch) {
  pollfd p{watch.fd(), POLLIN, 0};
  return ::poll(&p, 1, 10'000) == 1 && watch.dead();
}

TEST(Process, IsStoppedUntilItGoesOn) {
  const Child child;
  const auto id = ProcessId::of(child.pid());
  ASSERT_TRUE(id);
  EXPECT_FALSE(is_stopped(*id));
  child.signal(SIGSTOP);
  ASSERT_EQ(::waitpid(child.pid(), nullptr, WUNTRACED), child.pid());
  EXPECT_TRUE(is_stopped(*id));
  EXPECT_FALSE(is_stopped({id->pid, id->start_ticks + 1})) << "another one of that pid";
  child.signal(SIGCONT);
  ASSERT_EQ(::waitpid(child.pid(), nullptr, WCONTINUED), child.pid());
  EXPECT_FALSE(is_stopped(*id));
}

TEST(Process, SelfIsAliveAndIsFoundByPid) {
  const auto self = ProcessId::self();
  EXPECT_EQ(self.pid, ::getpid());
  EXPECT_NE(self.start_ticks, 0u);
  const auto found = ProcessId::of(::getpid());
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(*found, self);
  EXPECT_FALSE(proved_dead(self));
  EXPECT_EQ(to_string(self), "pid " + std::to_string(::getpid()));
}

TEST(Process, AStoppedProcessIsNotDead) {
  Child child;
  const auto id = ProcessId::of(child.pid());
  ASSERT_TRUE(id.ok());
  const auto watch = ProcessWatch::open(*id);
  ASSERT_TRUE(watch.ok()) << watch.error().to_string();
  child.signal(SIGSTOP);
  int status = 0;
  ASSERT_EQ(::waitpid(child.pid(), &status, WUNTRACED), child.pid());
  ASSERT_TRUE(WIFSTOPPED(status));
  EXPECT_FALSE(watch->dead());
  EXPECT_FALSE(proved_dead(*id));
}

TEST(Process, AKilledOneIsDeadBeforeAndAfterItIsReaped) {
  Child child;
  const auto id = ProcessId::of(child.pid());
  ASSERT_TRUE(id.ok());
  const auto watch = ProcessWatch::open(*id);
  ASSERT_TRUE(watch.ok()) << watch.error().to_string();
  EXPECT_FALSE(watch->dead());
  child.signal(SIGKILL);
  EXPECT_TRUE(dies(*watch));
  EXPECT_TRUE(proved_dead(*id));  // a zombie
  child.reap();
  EXPECT_TRUE(watch->dead());
  EXPECT_TRUE(proved_dead(*id));
  const auto late = ProcessWatch::open(*id);
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Errc::peer_died);
  EXPECT_EQ(ProcessId::of(id->pid).error().code(), Errc::not_found);
}

TEST(Process, APidOfAnotherStartTimeIsAnotherProcess) {
  auto id = ProcessId::self();
  --id.start_ticks;
  EXPECT_TRUE(proved_dead(id));
  const auto watch = ProcessWatch::open(id);
  ASSERT_FALSE(watch.ok());
  EXPECT_EQ(watch.error().code(), Errc::peer_died);
}

TEST(Process, ACommandNameMayHoldAnything) {
  std::array<char, 16> before{};
  ASSERT_EQ(::prctl(PR_GET_NAME, before.data()), 0);
  const auto id = ProcessId::self();
  for (const char* name : {"a\nb", "a) R 1 1", ") (\n"}) {
    ASSERT_EQ(::prctl(PR_SET_NAME, name), 0);
    EXPECT_EQ(ProcessId::self(), id) << name;
    EXPECT_FALSE(proved_dead(id)) << name;
  }
  ::prctl(PR_SET_NAME, before.data());
}

TEST(Process, WithoutDescriptorsNothingIsProved) {
  const auto self = ProcessId::self();
  const int lowest_free = UniqueFd(::dup(0)).get();
  ASSERT_GE(lowest_free, 0);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  for (const int room : {0, 1}) {  // for none, then for the pidfd only
    const rlimit few{static_cast<rlim_t>(lowest_free + room), before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    const auto watch = ProcessWatch::open(self);
    const auto found = ProcessId::of(self.pid);
    const bool dead = proved_dead(self);
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    ASSERT_FALSE(watch.ok());
    EXPECT_NE(watch.error().code(), Errc::peer_died) << watch.error().to_string();
    EXPECT_FALSE(dead);
    EXPECT_EQ(found.ok(), room == 1);
    if (!found.ok()) {
      EXPECT_EQ(found.error().code(), Errc::io);
    }
  }
}

TEST(Process, NonsensePidsAreNobody) {
  for (const int pid : {0, -1}) {
    EXPECT_FALSE(ProcessId::of(pid).ok()) << pid;
    EXPECT_FALSE(ProcessWatch::open({pid, 1}).ok()) << pid;
  }
}

/// Each generation of children is recognised only where it was made.
TEST(ForkGuard, KnowsAForkedChild) {
  const ForkGuard guard;
  EXPECT_TRUE(guard.same_process());
  EXPECT_EQ(guard.pid(), ::getpid());
  const auto status_of = [](pid_t child) {
    int status = -1;
    ::waitpid(child, &status, 0);
    return status;
  };
  const pid_t child = ::fork();
  if (child == 0) {
    const ForkGuard own;
    bool right = !guard.same_process() && own.same_process() && own.pid() == ::getpid();
    const pid_t grandchild = ::fork();
    if (grandchild == 0) ::_exit(!guard.same_process() && !own.same_process() && ForkGuard().same_process() ? 0 : 1);
    right = status_of(grandchild) == 0 && own.same_process() && right;
    ::_exit(right ? 0 : 1);
  }
  EXPECT_EQ(status_of(child), 0);
  EXPECT_TRUE(guard.same_process());
}

}  // namespace
}  // namespace deltasync
