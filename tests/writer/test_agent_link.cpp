// The writer's side of the conversation against an agent that follows a script.
#include "writer/agent_link.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "base/deadline.hpp"
#include "net/unix_listener.hpp"
#include "tests/shm/support.hpp"

namespace deltasync {
namespace {

using shm::testing::in_ms;
using shm::testing::soon;
using shm::testing::TempDir;

class AgentLinkTest : public ::testing::Test {
 protected:
  using Script = std::function<void(net::MessageSocket&)>;
  ~AgentLinkTest() override {
    if (agent_.joinable()) agent_.join();
  }
  /// Accepts one connection, welcomes it, then plays the script.
  void play(Script script, std::vector<std::byte> welcome = wire::TrainerWelcome{}.encode()) {
    listener_ = net::listen_unix(path()).value();
    agent_ = std::thread([this, script = std::move(script), welcome = std::move(welcome)] {
      UniqueFd fd;
      for (const Deadline end = soon(); !fd && !end.passed();
           std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
        fd.reset(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      }
      net::MessageSocket socket(std::move(fd));
      const auto hello = socket.recv(wire::kLayoutBytesMax, soon());
      if (!hello) return;
      static_cast<void>(socket.send(wire::Type::trainer_welcome, hello->header.request, welcome, soon()));
      script(socket);
    });
  }
  std::string path() const { return dir_.path() / "agent.sock"; }

  TempDir dir_;
  UniqueFd listener_;
  std::thread agent_;
};

TEST_F(AgentLinkTest, AStrangerWhoMadeTheSocketFirstIsToldNothing) {
  if (::geteuid() != 0) GTEST_SKIP() << "listening as another user needs root";
  ASSERT_EQ(::chmod(dir_.path().c_str(), 0777), 0);
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t stranger = ::fork();
  if (stranger == 0) {
    ::alarm(60);
    if (::setresuid(65534, 65534, 65534) != 0) ::_exit(1);
    const auto listener = net::listen_unix(path());
    if (!listener || ::write(ready[1], "r", 1) != 1) ::_exit(2);
    UniqueFd fd;
    while (!fd) fd.reset(::accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC));
    char byte = 0;
    ::_exit(::recv(fd.get(), &byte, 1, MSG_WAITALL) == 0 ? 0 : 3);  // not one byte came
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  AgentLink link(path(), {});
  const auto welcome = link.reconnect(soon());
  ASSERT_FALSE(welcome);
  EXPECT_EQ(welcome.error().code(), Errc::permission);
  EXPECT_NE(welcome.error().message().find("user 65534"), std::string::npos) << welcome.error().message();
  EXPECT_NE(welcome.error().message().find(path()), std::string::npos) << welcome.error().message();
  int status = -1;
  EXPECT_EQ(::waitpid(stranger, &status, 0), stranger);
  EXPECT_EQ(status, 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(AgentLinkTest, LateAnswersToGivenUpRequestsAreSkipped) {
  play([](net::MessageSocket& socket) {
    const auto first = socket.recv(wire::kControlBytesMax, soon());
    const auto second = socket.recv(wire::kControlBytesMax, soon());
    if (!first || !second) return;
    const wire::ErrorMessage late{Errc::gone, "the answer to what nobody asks any more"};
    static_cast<void>(socket.send(first->header.request, late, soon()));
    wire::TrainerReady ready;
    ready.version = {7, 2};
    static_cast<void>(socket.send(second->header.request, ready, soon()));
    static_cast<void>(socket.recv(wire::kControlBytesMax, soon()));  // until the link has gone
  });
  AgentLink link(path(), {});
  ASSERT_TRUE(link.connect(soon()));
  const auto first = link.wait_ready({7, 1}, in_ms(30));
  ASSERT_FALSE(first);
  EXPECT_EQ(first.error().code(), Errc::timed_out);
  EXPECT_TRUE(link.connected()) << "giving up between messages breaks nothing";
  const auto second = link.wait_ready({7, 2}, soon());
  ASSERT_TRUE(second) << second.error().to_string();
  EXPECT_EQ(second->version, (VersionId{7, 2}));
}

TEST_F(AgentLinkTest, AnswersThatFitNoQuestionEndTheConnection) {
  play([](net::MessageSocket& socket) {
    const auto question = socket.recv(wire::kControlBytesMax, soon());
    if (question) static_cast<void>(socket.send(wire::Type::trainer_plan_ok, question->header.request, {}, soon()));
    static_cast<void>(socket.recv(wire::kControlBytesMax, soon()));
  });
  AgentLink link(path(), {});
  ASSERT_TRUE(link.connect(soon()));
  const auto answer = link.wait_ready({7, 1}, soon());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::protocol);
  EXPECT_FALSE(link.connected());
}

TEST_F(AgentLinkTest, AWelcomeThatCannotBeReadIsOfAnotherRelease) {
  auto welcome = wire::TrainerWelcome{}.encode();
  welcome.pop_back();
  play([](net::MessageSocket&) {}, std::move(welcome));
  AgentLink link(path(), {});
  const auto attached = link.connect(soon());
  ASSERT_FALSE(attached);
  EXPECT_EQ(attached.error().code(), Errc::protocol);
  EXPECT_NE(attached.error().message().find("the agent is of another release"), std::string::npos)
      << attached.error().message();
}

TEST_F(AgentLinkTest, AgentThatSaysNothingEndsAtTheDeadline) {
  play([](net::MessageSocket& socket) {
    while (socket.recv(wire::kControlBytesMax, soon())) {
    }
  });
  AgentLink link(path(), {});
  ASSERT_TRUE(link.connect(soon()));
  EXPECT_EQ(link.wait_ready({7, 1}, in_ms(20)).error().code(), Errc::timed_out);
  EXPECT_EQ(link.register_plan({}, in_ms(20)).error().code(), Errc::timed_out);
}

TEST_F(AgentLinkTest, ReconnectWaitsForAnAgentUntilTheDeadline) {
  AgentLink link(path(), {});
  const auto none = link.reconnect(in_ms(40));
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code(), Errc::connection);
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    play([](net::MessageSocket& socket) { static_cast<void>(socket.recv(wire::kControlBytesMax, soon())); });
  });
  EXPECT_TRUE(link.reconnect(soon()));
  later.join();
}

}  // namespace
}  // namespace deltasync
