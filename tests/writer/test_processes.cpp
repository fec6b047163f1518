// Several writer processes, killed and stopped at awkward moments, and an agent process that dies.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "tests/shm/support.hpp"
#include "tests/writer/harness.hpp"

namespace deltasync::test {
namespace {

using shm::testing::Child;
using shm::testing::TempDir;
using ::testing::HasSubstr;

/// Children are forked before the agent's threads start, and wait for go().
class WriterProcessTest : public ::testing::Test {
 protected:
  void start_agent() { agent_ = std::make_unique<MiniAgent>(dir_.path()); }
  const Layout& layout() const { return *model_.layout; }
  Result<std::unique_ptr<Writer>> attach(std::uint32_t index = 0, std::uint32_t writers = 1) const {
    return Writer::attach(model_.layout, Sidecar{}, writer_options(dir_.path(), index, writers), soon());
  }
  /// In a child: attach, or exit with 10.
  std::unique_ptr<Writer> attach_or_exit(std::uint32_t index = 0, std::uint32_t writers = 1) const {
    auto writer = attach(index, writers);
    if (!writer) {
      std::fprintf(stderr, "child: %s\n", writer.error().to_string().c_str());
      ::_exit(10);
    }
    return std::move(writer).value();
  }
  Status write_share(Writer& writer, std::uint32_t index, std::uint32_t writers) const {
    for (const TensorSlice& s : share(layout(), index, writers)) {
      DS_TRY(write_slice(writer, model_.half, s.tensor, s.rect));
    }
    return {};
  }
  void expect_served(const VersionId& id) {
    EXPECT_TRUE(eventually([&] { return agent_->served() == id; })) << agent_->halves();
    EXPECT_TRUE(agent_->served_bytes() == model_.half);
  }
  void expect_works(std::uint64_t number) {
    auto writer = attach();
    ASSERT_TRUE(writer) << writer.error().to_string();
    const auto status = (*writer)->begin(version(7, number), soon());
    ASSERT_TRUE(status) << status.error().to_string();
    ASSERT_TRUE(write_all(**writer, model_.half));
    ASSERT_TRUE((*writer)->commit(soon()));
    expect_served({7, number});
  }

  TempDir dir_;
  TestModel model_ = make_model(21);
  std::unique_ptr<MiniAgent> agent_;
};

/// 'p' plan registered, 'w' share written, 'c' committed; then waits for a letter at each step.
int fill_in_turns(Writer& writer, const std::vector<TensorSlice>& plan, const std::vector<std::byte>& half,
                  const Child::Turns& turns) {
  if (!writer.register_plan(plan, soon())) return 11;
  turns.tell('p');
  turns.expect('b');
  if (!writer.begin(version(7, 1), soon())) return 12;
  for (const TensorSlice& s : plan) {
    if (!write_slice(writer, half, s.tensor, s.rect)) return 13;
  }
  turns.tell('w');
  turns.expect('c');
  const auto report = writer.commit(soon());
  if (!report) return report.error().code() == Errc::aborted ? 20 : 14;
  turns.tell('c');
  turns.expect('x');
  return 0;
}

TEST_F(WriterProcessTest, FourWritersFillOneVersion) {
  constexpr std::uint32_t kWriters = 4;
  std::vector<std::unique_ptr<Child>> children;
  for (std::uint32_t i = 0; i < kWriters; ++i) {
    children.push_back(std::make_unique<Child>([&, i](const Child::Turns& turns) {
      const auto writer = attach_or_exit(i, kWriters);
      return fill_in_turns(*writer, share(layout(), i, kWriters), model_.half, turns);
    }));
  }
  start_agent();
  for (auto& child : children) child->go();
  for (auto& child : children) child->expect('p');
  for (auto& child : children) child->tell('b');
  for (auto& child : children) child->expect('w');
  EXPECT_FALSE(agent_->served().valid());
  for (auto& child : children) child->tell('c');
  for (auto& child : children) child->expect('c');
  expect_served({7, 1});
  for (auto& child : children) child->tell('x');
  for (auto& child : children) EXPECT_EQ(child->exit_code(), 0);
}

TEST_F(WriterProcessTest, OneOfTwoIsKilledMidFill) {
  std::vector<std::unique_ptr<Child>> children;
  for (std::uint32_t i = 0; i < 2; ++i) {
    children.push_back(std::make_unique<Child>([&, i](const Child::Turns& turns) {
      const auto writer = attach_or_exit(i, 2);
      return fill_in_turns(*writer, share(layout(), i, 2), model_.half, turns);
    }));
  }
  start_agent();
  for (auto& child : children) child->go();
  for (auto& child : children) child->expect('p');
  for (auto& child : children) child->tell('b');
  for (auto& child : children) child->expect('w');
  children[1]->kill();
  children[0]->tell('c');
  EXPECT_EQ(children[0]->exit_code(), 20) << "aborted, long before its deadline";
  EXPECT_FALSE(agent_->served().valid());
  // The survivor said goodbye, the dead one is proved dead: a job of one writer may follow.
  EXPECT_TRUE(eventually([&] { return agent_->gone().size() == 2; }));
  expect_works(1);
}

TEST_F(WriterProcessTest, TwoWritersWithDifferentEpochs) {
  Child child([&](const Child::Turns& turns) {
    const auto writer = attach_or_exit(1, 2);
    if (!writer->register_plan(share(layout(), 1, 2), soon())) return 11;
    turns.tell('p');
    turns.expect('b');
    for (const std::uint64_t epoch : {8u, 6u}) {
      const auto refused = writer->begin(version(epoch, 1), soon());
      if (refused || refused.error().code() != Errc::version_conflict) return 12;
      if (refused.error().message().find("which is of another epoch") == std::string::npos) return 13;
    }
    if (!writer->begin(version(7, 1), soon())) return 14;
    if (!write_share(*writer, 1, 2)) return 15;
    return writer->commit(soon()) ? 0 : 16;
  });
  start_agent();
  child.go();
  auto attached = attach(0, 2);
  ASSERT_TRUE(attached) << attached.error().to_string();
  Writer& writer = **attached;
  ASSERT_TRUE(writer.register_plan(share(layout(), 0, 2), soon()));
  child.expect('p');
  ASSERT_TRUE(writer.begin(version(7, 1), soon()));
  child.tell('b');
  ASSERT_TRUE(write_share(writer, 0, 2));
  const auto report = writer.commit(soon());
  ASSERT_TRUE(report) << report.error().to_string();
  EXPECT_EQ(child.exit_code(), 0);
  expect_served({7, 1});
}

TEST_F(WriterProcessTest, WriterKilledMidFillAndANewOneAttachesAtOnce) {
  Child child([&](const Child::Turns& turns) {
    const auto writer = attach_or_exit();
    if (!writer->begin(version(7, 1), soon())) return 12;
    if (!write_slice(*writer, model_.half, 0, whole(layout(), 0))) return 13;
    turns.tell('w');
    turns.expect('x');
    return 0;
  });
  start_agent();
  child.go();
  child.expect('w');
  child.kill();
  expect_works(2);
  EXPECT_THAT(agent_->gone(), ::testing::ElementsAre(0u, 0u));
}

TEST_F(WriterProcessTest, SecondTrainerIsToldThePidOfTheFirst) {
  Child child([&](const Child::Turns& turns) {
    const auto writer = attach_or_exit();
    turns.tell('a');
    turns.expect('x');
    return 0;
  });
  start_agent();
  child.go();
  child.expect('a');
  const auto second = attach();
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), Errc::already_exists);
  EXPECT_THAT(second.error().message(), HasSubstr("pid " + std::to_string(child.pid())));
  child.tell('x');
  EXPECT_EQ(child.exit_code(), 0);
  expect_works(1);
}

TEST_F(WriterProcessTest, ClosedConnectionIsNoProofOfDeath) {
  Child child([&](const Child::Turns& turns) {
    const auto writer = attach_or_exit();
    if (!writer->begin(version(7, 1), soon())) return 12;
    for (int fd = 3; fd < 64; ++fd) {  // the connection breaks; the process and its fill live
      if (fd != turns.in && fd != turns.out) ::shutdown(fd, SHUT_RDWR);
    }
    turns.tell('s');
    turns.expect('c');
    if (!write_all(*writer, model_.half)) return 13;
    if (!writer->commit(soon())) return 14;
    if (!writer->wait_ready({7, 1}, soon())) return 15;  // connects again by itself
    return 0;
  });
  start_agent();
  child.go();
  child.expect('s');
  EXPECT_TRUE(
      eventually([&] { return agent_->server().status().size() == 1 && !agent_->server().status()[0].connected; }));
  const auto second = attach();
  ASSERT_FALSE(second) << "the slot is the living process's";
  EXPECT_EQ(second.error().code(), Errc::already_exists);
  child.tell('c');
  EXPECT_EQ(child.exit_code(), 0);
  expect_served({7, 1});
}

TEST_F(WriterProcessTest, AForkedChildMayDestroyItsCopyOfAWriterInsideAFill) {
  Child child([&](const Child::Turns&) {
    auto writer = attach_or_exit();
    if (!writer->begin(version(7, 1), soon())) return 11;
    if (!write_slice(*writer, model_.half, 0, whole(layout(), 0))) return 12;
    const pid_t fork = ::fork();
    if (fork == 0) {
      ::alarm(20);
      const auto refused = write_slice(*writer, model_.half, 1, whole(layout(), 1));
      if (refused || refused.error().code() != Errc::invalid_argument) ::_exit(1);
      if (writer->newest().valid()) ::_exit(2);
      writer.reset();
      ::_exit(0);
    }
    int status = 0;
    if (::waitpid(fork, &status, 0) != fork || status != 0) return 13;
    for (std::uint32_t i = 1; i < layout().tensors().size(); ++i) {
      if (!write_slice(*writer, model_.half, i, whole(layout(), i))) return 14;
    }
    if (!writer->commit(soon())) return 15;
    return writer->wait_ready({7, 1}, soon()) ? 0 : 16;
  });
  start_agent();
  child.go();
  EXPECT_EQ(child.exit_code(), 0);
  expect_served({7, 1});
  EXPECT_EQ(agent_->gone().size(), 1u) << "one goodbye: the child's own";
}

/// A page that stops the process when it is first read, and is readable once the process goes on: a copy out of it is
/// stopped half-way for certain.
class StoppingPage {
 public:
  static std::byte* make() {
    page_ = ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page_ == MAP_FAILED) ::_exit(40);
    struct sigaction action {};
    action.sa_handler = [](int) {
      ::kill(::getpid(), SIGSTOP);
      if (::mprotect(page_, kBytes, PROT_READ) != 0) ::_exit(41);
    };
    if (::sigaction(SIGSEGV, &action, nullptr) != 0) ::_exit(42);
    return static_cast<std::byte*>(page_);
  }
  static constexpr std::size_t kBytes = 1u << 20;

 private:
  static inline void* page_ = nullptr;
};

TEST_F(WriterProcessTest, WriterStoppedInsideACopyQuarantinesTheHalfUntilItGoesOn) {
  const auto theirs = share(layout(), 1, 2);
  Child child([&](const Child::Turns& turns) {
    const auto writer = attach_or_exit(1, 2);
    if (const int failed = fill_in_turns(*writer, theirs, model_.half, turns); failed != 0) return failed;
    if (!writer->begin(version(7, 2), soon())) return 22;
    Source trap;
    trap.data = StoppingPage::make();
    // Stops in here. The half is lost to this fill, but these bytes may still land in it.
    static_cast<void>(writer->write(theirs[0].tensor, theirs[0].rect, trap));
    const auto next = write_slice(*writer, model_.half, theirs[1].tensor, theirs[1].rect);
    if (next || next.error().code() != Errc::aborted) return 23;
    writer->abort();
    turns.tell('a');
    turns.expect('b');
    if (const auto begun = writer->begin(version(7, 3), soon()); !begun) {
      std::fprintf(stderr, "child: %s\n", begun.error().to_string().c_str());
      return 24;
    }
    if (!write_share(*writer, 1, 2)) return 25;
    if (!writer->commit(soon())) return 26;
    return 0;
  });
  start_agent();
  child.go();
  auto attached = attach(0, 2);
  ASSERT_TRUE(attached) << attached.error().to_string();
  Writer& writer = **attached;
  ASSERT_TRUE(writer.register_plan(share(layout(), 0, 2), soon()));
  child.expect('p');
  child.tell('b');
  ASSERT_TRUE(writer.begin(version(7, 1), soon()));
  ASSERT_TRUE(write_share(writer, 0, 2));
  child.expect('w');
  child.tell('c');
  ASSERT_TRUE(writer.commit(soon()));
  child.expect('c');
  expect_served({7, 1});

  child.tell('x');
  ASSERT_TRUE(writer.begin(version(7, 2), soon()));
  ASSERT_TRUE(write_share(writer, 0, 2));
  int status = 0;
  ASSERT_EQ(::waitpid(child.pid(), &status, WUNTRACED), child.pid());
  ASSERT_TRUE(WIFSTOPPED(status));
  std::uint64_t ours = 0;
  for (const TensorSlice& s : share(layout(), 0, 2)) ours += s.rect.elements();
  EXPECT_EQ(agent_->progress(), ours) << "bytes that are not there yet count as written";
  const auto report = writer.commit(in_ms(100));
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code(), Errc::timed_out);
  EXPECT_THAT(report.error().message(), HasSubstr("writer 1 (pid " + std::to_string(child.pid())));

  const auto refused = writer.begin(version(7, 3), in_ms(100));
  ASSERT_FALSE(refused) << "a stopped process may still write into the half";
  EXPECT_EQ(refused.error().code(), Errc::quarantined);
  EXPECT_THAT(refused.error().message(), HasSubstr(std::to_string(child.pid())));
  EXPECT_TRUE(agent_->served_bytes() == model_.half) << "the active version stays";

  child.resume();
  child.expect('a');
  child.tell('b');
  const auto begun = writer.begin(version(7, 3), soon());
  ASSERT_TRUE(begun) << begun.error().to_string();
  ASSERT_TRUE(write_share(writer, 0, 2));
  ASSERT_TRUE(writer.commit(soon()));
  EXPECT_EQ(child.exit_code(), 0);
  expect_served({7, 3});
}

TEST_F(WriterProcessTest, AgentDiesMidFillAndTheNextOneServesTheVersion) {
  auto agent = std::make_unique<Child>([&](const Child::Turns& turns) {
    const MiniAgent mini(dir_.path());
    turns.tell('r');
    turns.expect('x');
    return 0;
  });
  agent->go();
  agent->expect('r');
  auto attached = attach();
  ASSERT_TRUE(attached) << attached.error().to_string();
  Writer& writer = **attached;
  ASSERT_TRUE(writer.begin(version(7, 1), soon()));
  ASSERT_TRUE(write_slice(writer, model_.half, 0, whole(layout(), 0)));
  agent->kill();
  for (std::uint32_t i = 1; i < layout().tensors().size(); ++i) {
    ASSERT_TRUE(write_slice(writer, model_.half, i, whole(layout(), i)));
  }
  const auto report = writer.commit(soon());
  ASSERT_TRUE(report) << report.error().to_string();
  EXPECT_EQ(writer.wait_ready({7, 1}, in_ms(50)).error().code(), Errc::connection);
  ASSERT_TRUE(writer.begin(version(7, 2), soon())) << "the other half is still free";
  writer.abort();

  start_agent();  // its socket file is the dead agent's: replaced
  const auto ready = writer.wait_ready({7, 1}, soon());
  ASSERT_TRUE(ready) << ready.error().to_string();
  expect_served({7, 1});
  ASSERT_TRUE(writer.begin(version(7, 2), soon()));
  mutate(model_.half, layout(), 0.1, 3);
  ASSERT_TRUE(write_all(writer, model_.half));
  ASSERT_TRUE(writer.commit(soon()));
  expect_served({7, 2});
}

}  // namespace
}  // namespace deltasync::test
