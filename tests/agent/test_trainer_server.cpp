// The trainer socket from the outside: a client that says what it likes.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <fstream>
#include <future>
#include <stdexcept>

#include "format/packed_layout.hpp"
#include "net/blocking.hpp"
#include "tests/shm/support.hpp"
#include "tests/writer/harness.hpp"

namespace deltasync::test {
namespace {

using net::MessageSocket;
using shm::testing::Child;
using shm::testing::TempDir;
using ::testing::HasSubstr;

class TrainerServerTest : public ::testing::Test {
 protected:
  MessageSocket connect() const {
    return MessageSocket(net::connect_unix(MiniAgent::socket_in(dir_.path()), soon()).value());
  }
  wire::TrainerHello hello(std::uint32_t index = 0, std::uint32_t writers = 1) const {
    wire::TrainerHello hello;
    hello.writer_index = index;
    hello.writers = writers;
    hello.name = "a test";
    hello.layout = wire::pack_layout(model_.layout->encode(), {}).value();
    return hello;
  }
  /// hello → welcome.
  MessageSocket attach(std::uint32_t index = 0, std::uint32_t writers = 1) const {
    MessageSocket socket = connect();
    EXPECT_TRUE(socket.send(1, hello(index, writers), soon()));
    const auto welcome = socket.recv_as<wire::TrainerWelcome>(1, soon());
    EXPECT_TRUE(welcome) << welcome.error().to_string();
    return socket;
  }
  wire::TrainerPlan plan(std::uint32_t index, std::uint32_t writers, int deadline_ms = 20'000) const {
    wire::TrainerPlan message;
    message.deadline_ms = static_cast<std::uint64_t>(deadline_ms);
    for (const TensorSlice& s : share(*model_.layout, index, writers)) {
      message.rects.push_back({s.tensor, s.rect.row, s.rect.col, s.rect.rows, s.rect.cols});
    }
    return message;
  }
  /// What comes back for a first message; the connection must be closed after it.
  Error refusal(MessageSocket& socket) const {
    const auto answer = socket.recv_as<wire::TrainerWelcome>(1, soon());
    EXPECT_FALSE(answer);
    EXPECT_TRUE(eventually([&] { return socket.peer_closed(); }));
    return answer ? Error(Errc::internal, "welcome") : answer.error();
  }

  TempDir dir_;
  TestModel model_ = make_model(31);
};

TEST_F(TrainerServerTest, SocketFileIsPrivateAndRemovedAtTheEnd) {
  const std::string path = MiniAgent::socket_in(dir_.path());
  {
    const MiniAgent agent(dir_.path());
    struct stat file {};
    ASSERT_EQ(::stat(path.c_str(), &file), 0);
    EXPECT_EQ(file.st_mode & 0777u, 0600u);
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(TrainerServerTest, StopRemovesTheSocketFileThoughNothingRunsAnyMore) {
  const std::string path = MiniAgent::socket_in(dir_.path());
  const TempDir elsewhere;
  MiniAgent hooks(elsewhere.path());
  boost::asio::io_context io;  // never run
  agent::TrainerServerOptions options;
  options.socket_path = path;
  auto server = agent::TrainerServer::listen(io, hooks, options);
  ASSERT_TRUE(server) << server.error().to_string();
  EXPECT_TRUE(std::filesystem::exists(path));
  (*server)->stop();
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(TrainerServerTest, SecondAgentOnTheSocketIsRefusedAndAStaleFileIsNot) {
  boost::asio::io_context io;
  agent::TrainerServerOptions options;
  options.socket_path = MiniAgent::socket_in(dir_.path());
  {
    MiniAgent agent(dir_.path());
    const auto second = agent::TrainerServer::listen(io, agent, options);
    ASSERT_FALSE(second);
    EXPECT_EQ(second.error().code(), Errc::already_exists);
    EXPECT_THAT(second.error().message(), HasSubstr(options.socket_path));
    attach();  // the first goes on
  }
  {
    const UniqueFd stale(::socket(AF_UNIX, SOCK_STREAM, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    options.socket_path.copy(address.sun_path, sizeof address.sun_path - 1);
    ASSERT_EQ(::bind(stale.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  ASSERT_TRUE(std::filesystem::exists(options.socket_path));
  {
    const MiniAgent agent(dir_.path());
    attach();
  }
  std::ofstream(options.socket_path) << "precious";
  const TempDir elsewhere;
  MiniAgent hooks(elsewhere.path());
  const auto in_the_way = agent::TrainerServer::listen(io, hooks, options);
  ASSERT_FALSE(in_the_way);
  EXPECT_EQ(in_the_way.error().code(), Errc::already_exists);
  EXPECT_TRUE(std::filesystem::exists(options.socket_path)) << "not ours to remove";
}

TEST_F(TrainerServerTest, FirstMessageMustBeHello) {
  const MiniAgent agent(dir_.path());
  MessageSocket socket = connect();
  ASSERT_TRUE(socket.send(1, wire::TrainerNotify(), soon()));
  EXPECT_EQ(refusal(socket).code(), Errc::protocol);
  attach();
}

TEST_F(TrainerServerTest, HellosThatMakeNoSense) {
  const MiniAgent agent(dir_.path());
  const auto expect = [&](const wire::TrainerHello& wrong, Errc code) {
    MessageSocket socket = connect();
    ASSERT_TRUE(socket.send(1, wrong, soon()));
    const Error error = refusal(socket);
    EXPECT_EQ(error.code(), code) << error.to_string();
  };
  auto wrong = hello();
  wrong.protocol = 99;
  expect(wrong, Errc::unsupported);
  expect(hello(0, 0), Errc::invalid_argument);
  expect(hello(2, 2), Errc::invalid_argument);
  expect(hello(0, shm::kSlotsMax + 1), Errc::invalid_argument);
  {
    MessageSocket other_shape = connect();
    ASSERT_TRUE(other_shape.send(wire::Type::trainer_hello, 1, std::vector<std::byte>(2, std::byte{9}), soon()));
    EXPECT_EQ(refusal(other_shape).code(), Errc::unsupported);
  }
  wrong = hello();
  wrong.layout.layout_raw_bytes += 1;
  expect(wrong, Errc::corrupt);
  wrong = hello();
  wrong.layout.layout_raw_bytes -= 1;
  expect(wrong, Errc::corrupt);
  wrong = hello();
  wrong.layout = wire::pack_layout(bytes_of(std::string_view("no layout")), {}).value();
  expect(wrong, Errc::corrupt);
  wrong = hello();
  wrong.layout = wire::pack_layout(model_.layout->encode(), bytes_of(std::string_view("no sidecar"))).value();
  expect(wrong, Errc::corrupt);
  attach();
}

TEST_F(TrainerServerTest, GarbageAndSilence) {
  agent::TrainerServerOptions options;
  options.hello_limit = std::chrono::milliseconds(100);
  options.message_limit = std::chrono::milliseconds(100);
  const MiniAgent agent(dir_.path(), options);
  MessageSocket silent = connect();
  MessageSocket half_a_header = connect();
  ASSERT_EQ(::send(half_a_header.fd(), "DSW1\x28", 5, MSG_NOSIGNAL), 5);
  MessageSocket garbage = connect();
  const std::string noise(4096, '\x5a');
  ASSERT_GT(::send(garbage.fd(), noise.data(), noise.size(), MSG_NOSIGNAL), 0);
  MessageSocket liar = connect();
  wire::Header header = wire::make_header(wire::Type::trainer_hello, 1, {});
  header.payload_bytes = std::uint64_t{1} << 40;  // the hash no longer fits
  ASSERT_GT(::send(liar.fd(), &header, sizeof header, MSG_NOSIGNAL), 0);
  for (MessageSocket* socket : {&silent, &half_a_header, &garbage, &liar}) {
    EXPECT_TRUE(eventually([&] {
      while (socket->open() && socket->recv(wire::kControlBytesMax, in_ms(1))) {
      }  // the error that the agent may have sent
      return !socket->open() || socket->peer_closed();
    }));
  }
  // It goes on serving; a client that is too slow for so short a limit asks again.
  EXPECT_TRUE(eventually([&] {
    MessageSocket socket = connect();
    return socket.send(1, hello(), soon()).ok() && socket.recv_answer(1, wire::Type::trainer_welcome, soon()).ok();
  }));
}

TEST_F(TrainerServerTest, UnknownRequestEndsTheConnectionButNotTheSlot) {
  MiniAgent agent(dir_.path());
  MessageSocket socket = attach();
  ASSERT_TRUE(socket.send(wire::Type::get_layout, 2, {}, soon()));
  const auto answer = socket.recv_answer(2, wire::Type::end, soon());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::protocol);
  EXPECT_TRUE(eventually([&] { return socket.peer_closed(); }));
  EXPECT_TRUE(eventually([&] { return !agent.server().status().at(0).connected; }));
  EXPECT_TRUE(agent.gone().empty());
  attach();  // the same process connects again
  EXPECT_TRUE(agent.gone().empty());
}

TEST_F(TrainerServerTest, AnErrorThatEndsTheConnectionAnswersNoRequest) {
  const MiniAgent agent(dir_.path());
  MessageSocket socket = attach();
  ASSERT_TRUE(socket.send(wire::Type::trainer_wait, 2, wire::TrainerWait{{~0ull, 1}, 0}.encode(), soon()));
  EXPECT_EQ(socket.recv_answer(2, wire::Type::trainer_ready, soon()).error().code(), Errc::timed_out);
  const std::string noise(sizeof(wire::Header), 'n');
  ASSERT_GT(::send(socket.fd(), noise.data(), noise.size(), MSG_NOSIGNAL), 0);
  const auto message = socket.recv(wire::kControlBytesMax, soon());
  ASSERT_TRUE(message) << message.error().to_string();
  EXPECT_EQ(message->type(), wire::Type::error);
  EXPECT_EQ(message->header.request, 0u);
}

/// Whatever descriptor is the one that is missing, the hello fails at most.
TEST_F(TrainerServerTest, SurvivesWantOfDescriptors) {
  MiniAgent agent(dir_.path());
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  for (std::size_t spare = 1; spare < 12; ++spare) {
    MessageSocket socket = connect();
    std::vector<UniqueFd> fillers;
    const rlimit few{256, before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    for (UniqueFd fd(::dup(0)); fd; fd = UniqueFd(::dup(0))) fillers.push_back(std::move(fd));
    ASSERT_GE(fillers.size(), spare);
    fillers.resize(fillers.size() - spare);
    EXPECT_TRUE(socket.send(1, hello(), soon()));
    const auto answer = socket.recv(wire::kControlBytesMax, in_ms(300));  // none at all if it was not even accepted
    fillers.clear();
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    socket.close();
    EXPECT_TRUE(eventually([&] {
      const auto list = agent.server().status();
      return list.empty() || !list[0].connected;
    }));
    MessageSocket again = attach();
    ASSERT_TRUE(again.send(wire::Type::end, 2, {}, soon()));
    ASSERT_TRUE(again.recv_answer(2, wire::Type::end, soon()));
  }
}

TEST_F(TrainerServerTest, StatusTellsWhoIsThere) {
  MiniAgent agent(dir_.path());
  const MessageSocket zero = attach(0, 2);
  const MessageSocket one = attach(1, 2);
  const auto list = agent.server().status();
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[1].slot, 1u);
  EXPECT_EQ(list[1].writers, 2u);
  EXPECT_EQ(list[1].pid, ::getpid());
  EXPECT_EQ(list[1].name, "a test");
  EXPECT_TRUE(list[1].connected);
  EXPECT_FALSE(list[1].planned);
}

TEST_F(TrainerServerTest, WritersMustAgreeOnTheirNumber) {
  const MiniAgent agent(dir_.path());
  const MessageSocket zero = attach(0, 2);
  MessageSocket other = connect();
  ASSERT_TRUE(other.send(1, hello(1, 4), soon()));
  EXPECT_EQ(refusal(other).code(), Errc::already_exists);
}

/// Two hellos that do not agree are at the agent together: the second is refused after it was granted its slot.
TEST_F(TrainerServerTest, WhoIsRefusedAfterTheGrantKeepsNothing) {
  std::promise<void> begun;
  std::promise<void> go_on;
  bool first = true;  // the setup thread's
  MiniAgent agent(dir_.path());
  agent.before_open([&] {
    if (!std::exchange(first, false)) return;
    begun.set_value();
    go_on.get_future().wait();
  });
  MessageSocket zero = connect();
  ASSERT_TRUE(zero.send(1, hello(0, 1), soon()));
  begun.get_future().wait();
  MessageSocket one = connect();
  ASSERT_TRUE(one.send(1, hello(1, 2), soon()));
  MessageSocket other = connect();  // its refusal comes after the agent has looked at the hello before
  ASSERT_TRUE(other.send(1, hello(0, 0), soon()));
  EXPECT_EQ(refusal(other).code(), Errc::invalid_argument);
  go_on.set_value();
  EXPECT_TRUE(zero.recv_as<wire::TrainerWelcome>(1, soon()));
  EXPECT_EQ(refusal(one).code(), Errc::already_exists);
  EXPECT_EQ(agent.slot_owner(0), ::getpid());
  EXPECT_EQ(agent.slot_owner(1), 0);
}

TEST_F(TrainerServerTest, PlansAreJudgedTogether) {
  MiniAgent agent(dir_.path());
  MessageSocket zero = attach(0, 2);
  MessageSocket one = attach(1, 2);
  ASSERT_TRUE(zero.send(2, plan(0, 2), soon()));
  EXPECT_EQ(zero.recv(wire::kControlBytesMax, in_ms(50)).error().code(), Errc::timed_out) << "writer 1 is missing";
  ASSERT_TRUE(one.send(2, plan(1, 2), soon()));
  EXPECT_TRUE(zero.recv_answer(2, wire::Type::trainer_plan_ok, soon()));
  EXPECT_TRUE(one.recv_answer(2, wire::Type::trainer_plan_ok, soon()));
  EXPECT_TRUE(agent.server().status().at(0).planned && agent.server().status().at(1).planned);
}

TEST_F(TrainerServerTest, PlansThatOverlapAreRefusedByTensorName) {
  const MiniAgent agent(dir_.path());
  MessageSocket zero = attach(0, 2);
  MessageSocket one = attach(1, 2);
  ASSERT_TRUE(zero.send(2, plan(0, 2), soon()));
  ASSERT_TRUE(one.send(2, plan(0, 2), soon()));
  const std::string name = model_.layout->tensors()[share(*model_.layout, 0, 2)[0].tensor].spec.name;
  for (MessageSocket* socket : {&zero, &one}) {
    const auto answer = socket->recv_answer(2, wire::Type::trainer_plan_ok, soon());
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().code(), Errc::coverage);
    EXPECT_THAT(answer.error().message(), HasSubstr(name));
  }
}

TEST_F(TrainerServerTest, PlanThatNobodyCompletesEndsAtItsDeadline) {
  const MiniAgent agent(dir_.path());
  MessageSocket zero = attach(0, 3);
  ASSERT_TRUE(zero.send(2, plan(0, 3, 50), soon()));
  const auto answer = zero.recv_answer(2, wire::Type::trainer_plan_ok, soon());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::timed_out);
  EXPECT_THAT(answer.error().message(), HasSubstr("1, 2"));
}

/// The thread that reads plans stands still: a deadline holds all the same, and what is missing is named.
TEST_F(TrainerServerTest, PlanBehindLongWorkEndsAtItsDeadline) {
  std::promise<void> begun;
  std::promise<void> go_on;
  MiniAgent agent(dir_.path());
  MessageSocket zero = attach(0, 3);
  agent.before_open([&] {
    begun.set_value();
    go_on.get_future().wait();
  });
  MessageSocket one = connect();
  ASSERT_TRUE(one.send(1, hello(1, 3), soon()));
  begun.get_future().wait();
  for (const std::uint64_t request : {2u, 3u}) {
    ASSERT_TRUE(zero.send(request, plan(0, 3, 50), soon()));
    const auto answer = zero.recv_answer(request, wire::Type::trainer_plan_ok, soon());
    EXPECT_FALSE(answer);
    if (answer) continue;
    EXPECT_EQ(answer.error().code(), Errc::timed_out);
    EXPECT_THAT(answer.error().message(), HasSubstr("busy"));
    EXPECT_THAT(answer.error().message(), HasSubstr("1, 2"));
  }
  go_on.set_value();
  EXPECT_TRUE(one.recv_as<wire::TrainerWelcome>(1, soon()));
}

TEST_F(TrainerServerTest, AProcessComesBackThoughItsLastConnectionStillWaits) {
  MiniAgent agent(dir_.path());
  {
    MessageSocket left = attach(0, 2);
    ASSERT_TRUE(left.send(2, plan(0, 2, 3'600'000), soon()));
    ASSERT_TRUE(eventually([&] { return agent.server().status().at(0).waiting; }));
    ASSERT_TRUE(left.send(wire::Type::end, 3, {}, soon()));  // nobody reads it before the verdict
  }
  MessageSocket zero = attach(0, 2);
  EXPECT_FALSE(agent.server().status().at(0).waiting) << "the client that asked for that verdict is gone";
  MessageSocket one = attach(1, 2);
  ASSERT_TRUE(zero.send(2, plan(0, 2), soon()));
  ASSERT_TRUE(one.send(2, plan(1, 2), soon()));
  EXPECT_TRUE(zero.recv_answer(2, wire::Type::trainer_plan_ok, soon()));
  EXPECT_TRUE(one.recv_answer(2, wire::Type::trainer_plan_ok, soon()));
  EXPECT_TRUE(agent.gone().empty()) << "a goodbye of the connection before";
  EXPECT_TRUE(agent.server().status().at(0).connected);
}

TEST_F(TrainerServerTest, ATrialThatCannotBeMadeIsNotTheLast) {
  std::atomic<int> times{1};
  agent::TrainerServerOptions options;
  options.before_trial = [&times] {
    if (times-- > 0) throw std::runtime_error("no luck");
  };
  const MiniAgent agent(dir_.path(), options);
  MessageSocket zero = attach(0, 1);
  ASSERT_TRUE(zero.send(2, plan(0, 1), soon()));
  const auto answer = zero.recv_answer(2, wire::Type::trainer_plan_ok, soon());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::internal) << answer.error().to_string();
  ASSERT_TRUE(zero.send(3, plan(0, 1), soon()));
  const auto next = zero.recv_answer(3, wire::Type::trainer_plan_ok, soon());
  EXPECT_TRUE(next) << next.error().to_string();
}

TEST_F(TrainerServerTest, DeathOfAWriterEndsTheOthersWaitForItsPlan) {
  Child child([&](const Child::Turns& turns) {
    const MessageSocket one = attach(1, 2);
    turns.tell('a');
    turns.expect('x');
    return 0;
  });
  MiniAgent agent(dir_.path());
  child.go();
  child.expect('a');
  MessageSocket zero = attach(0, 2);
  ASSERT_TRUE(zero.send(2, plan(0, 2), soon()));
  ASSERT_TRUE(eventually([&] { return agent.server().status().at(0).waiting; }));
  child.kill();
  const auto answer = zero.recv_answer(2, wire::Type::trainer_plan_ok, soon());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::peer_died) << answer.error().to_string();
}

TEST_F(TrainerServerTest, GoodbyeIsAcknowledgedAfterTheSlotIsFree) {
  MiniAgent agent(dir_.path());
  MessageSocket socket = attach();
  ASSERT_TRUE(socket.send(wire::Type::end, 2, {}, soon()));
  ASSERT_TRUE(socket.recv_answer(2, wire::Type::end, soon()));
  EXPECT_THAT(agent.gone(), ::testing::ElementsAre(0u));
  EXPECT_TRUE(agent.server().status().empty());
}

TEST_F(TrainerServerTest, AnotherUsersProcessIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "changing to another user needs root";
  Child child([&](const Child::Turns& turns) {
    if (::setresuid(65534, 65534, 65534) != 0) return 50;
    MessageSocket socket = connect();
    if (!socket.send(1, hello(), soon())) return 51;
    const auto answer = socket.recv_as<wire::TrainerWelcome>(1, soon());
    if (answer || answer.error().code() != Errc::permission) return 52;
    turns.tell('r');
    return 0;
  });
  const MiniAgent agent(dir_.path());
  // Somebody opened the doors by hand.
  ASSERT_EQ(::chmod(dir_.path().c_str(), 0777), 0);
  ASSERT_EQ(::chmod(MiniAgent::socket_in(dir_.path()).c_str(), 0666), 0);
  child.go();
  EXPECT_EQ(child.exit_code(), 0);
}

}  // namespace
}  // namespace deltasync::test
