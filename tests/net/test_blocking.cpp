// Blocking message sockets over a socket pair: what arrives, what is refused, and when a call ends.
#include "net/blocking.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.hpp"
#include "tests/support/held_port.hpp"

namespace {
constexpr const char* kTwoAddresses = "two-addresses.test";
}

/// In place of the system's: it knows a name with two addresses.
extern "C" int getaddrinfo(const char* host, const char* service, const addrinfo* hints, addrinfo** list) {
  static const auto systems = reinterpret_cast<decltype(&getaddrinfo)>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  const bool numeric = hints != nullptr && (hints->ai_flags & AI_NUMERICHOST) != 0;
  if (numeric || host == nullptr || std::string(host) != kTwoAddresses) return systems(host, service, hints, list);
  const int first = systems("127.0.0.2", service, hints, list);
  return first != 0 ? first : systems("127.0.0.1", service, hints, &(*list)->ai_next);
}

namespace deltasync::net {
namespace {

Deadline in_ms(int ms) {
  return Deadline::after(std::chrono::milliseconds(ms));
}
Deadline soon() {
  return in_ms(60'000);
}

class BlockingTest : public ::testing::Test {
 protected:
  BlockingTest() {
    int fds[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) std::abort();
    a_ = MessageSocket(UniqueFd(fds[0]));
    b_ = MessageSocket(UniqueFd(fds[1]));
  }
  void raw(const void* bytes, std::size_t n) {
    ASSERT_EQ(::send(a_.fd(), bytes, n, MSG_NOSIGNAL), static_cast<ssize_t>(n));
  }
  MessageSocket a_;
  MessageSocket b_;
};

wire::TrainerWait some_message() {
  wire::TrainerWait message;
  message.version = {5, 6};
  message.deadline_ms = 7;
  return message;
}

TEST_F(BlockingTest, MessagesArriveWhole) {
  ASSERT_TRUE(a_.send(9, some_message(), soon()));
  ASSERT_TRUE(a_.send(wire::Type::end, 10, {}, soon()));
  const auto first = b_.recv(wire::kControlBytesMax, soon());
  ASSERT_TRUE(first);
  EXPECT_EQ(first->header.request, 9u);
  EXPECT_EQ(wire::TrainerWait::decode(first->payload)->version, (VersionId{5, 6}));
  const auto second = b_.recv(0, soon());
  ASSERT_TRUE(second);
  EXPECT_EQ(second->type(), wire::Type::end);
  EXPECT_EQ(a_.bytes_sent(), b_.bytes_received());
}

TEST_F(BlockingTest, LargePayloadsCrossASmallBuffer) {
  std::vector<std::byte> payload(30u << 20);
  for (std::size_t i = 0; i < payload.size(); i += 97) payload[i] = static_cast<std::byte>(i);
  Status sent = Error(Errc::internal, "not run");
  std::thread sender([&] { sent = a_.send(wire::Type::frame, 1, payload, soon()); });
  const auto message = b_.recv(wire::kFrameBytesMax, soon());
  sender.join();
  ASSERT_TRUE(sent);
  ASSERT_TRUE(message);
  EXPECT_TRUE(message->payload == payload);
}

TEST_F(BlockingTest, TimeoutBetweenMessagesLeavesTheSocketUsable) {
  EXPECT_EQ(b_.recv(100, in_ms(20)).error().code(), Errc::timed_out);
  ASSERT_TRUE(a_.send(wire::Type::end, 1, {}, soon()));
  EXPECT_TRUE(b_.recv(100, soon()));
}

TEST_F(BlockingTest, TimeoutInsideAMessageClosesIt) {
  const wire::Header header = wire::make_header(wire::Type::end, 1, {});
  raw(&header, 20);
  EXPECT_EQ(b_.recv(100, in_ms(20)).error().code(), Errc::timed_out);
  EXPECT_FALSE(b_.open());
  EXPECT_EQ(b_.recv(100, soon()).error().code(), Errc::connection);
}

TEST_F(BlockingTest, PeerThatDoesNotReadEndsTheSendAtTheDeadline) {
  const std::vector<std::byte> payload(30u << 20);
  EXPECT_EQ(a_.send(wire::Type::frame, 1, payload, in_ms(50)).error().code(), Errc::timed_out);
  EXPECT_FALSE(a_.open()) << "a part of the message has left";
}

TEST_F(BlockingTest, ClosedPeer) {
  EXPECT_FALSE(b_.peer_closed());
  ASSERT_EQ(::send(a_.fd(), "x", 1, MSG_NOSIGNAL), 1);
  EXPECT_FALSE(b_.peer_closed());
  a_.close();
  EXPECT_TRUE(b_.peer_closed()) << "whatever is left to read";
  EXPECT_EQ(b_.recv(100, soon()).error().code(), Errc::connection);
}

TEST_F(BlockingTest, ClosedInTheMiddle) {
  wire::Header header = wire::make_header(wire::Type::frame, 1, std::vector<std::byte>(100));
  raw(&header, sizeof header);
  raw("abc", 3);
  a_.close();
  EXPECT_EQ(b_.recv(wire::kFrameBytesMax, soon()).error().code(), Errc::connection);
}

TEST_F(BlockingTest, DamagedPayload) {
  auto payload = some_message().encode();
  const wire::Header header = wire::make_header(wire::TrainerWait::kType, 1, payload);
  payload[3] ^= std::byte{4};
  raw(&header, sizeof header);
  raw(payload.data(), payload.size());
  EXPECT_EQ(b_.recv(wire::kControlBytesMax, soon()).error().code(), Errc::corrupt);
  EXPECT_FALSE(b_.open());
}

TEST_F(BlockingTest, DamagedHeader) {
  wire::Header header = wire::make_header(wire::Type::frame, 1, std::vector<std::byte>(100));
  header.request ^= 1;
  raw(&header, sizeof header);
  EXPECT_EQ(b_.recv(wire::kFrameBytesMax, soon()).error().code(), Errc::corrupt) << "before the payload is awaited";
  EXPECT_FALSE(b_.open());
}

TEST_F(BlockingTest, CallersLimit) {
  ASSERT_TRUE(a_.send(1, some_message(), soon()));
  EXPECT_EQ(b_.recv(8, soon()).error().code(), Errc::protocol);
}

TEST_F(BlockingTest, OverlongMessageIsNotEvenSent) {
  const std::vector<std::byte> payload(wire::kControlBytesMax + 1);
  EXPECT_EQ(a_.send(wire::Type::trainer_wait, 1, payload, soon()).error().code(), Errc::invalid_argument);
  EXPECT_TRUE(a_.open());
}

TEST_F(BlockingTest, AnErrorAnswerIsThatError) {
  const wire::ErrorMessage gone{Errc::gone, "v3 is past"};
  ASSERT_TRUE(a_.send(4, gone, soon()));
  const auto answer = b_.recv_as<wire::TrainerReady>(4, soon());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::gone);
  EXPECT_EQ(answer.error().message(), "v3 is past");
}

TEST_F(BlockingTest, WhatThePeerSaidLastIsKnownToWhoFindsItClosed) {
  EXPECT_FALSE(b_.last_words().has_value());
  ASSERT_TRUE(a_.send(wire::Type::end, 1, {}, soon()));
  ASSERT_TRUE(a_.send(0, wire::ErrorMessage{Errc::coverage, "a tensor is missing"}, soon()));
  a_.close();
  EXPECT_EQ(b_.send(wire::Type::end, 2, {}, soon()).error().code(), Errc::connection);
  ASSERT_TRUE(b_.last_words().has_value());
  EXPECT_EQ(b_.last_words()->to_string(), "coverage: a tensor is missing");
}

TEST_F(BlockingTest, AnswerOfAnotherTypeOrRequest) {
  ASSERT_TRUE(a_.send(wire::Type::end, 6, {}, soon()));
  const auto answer = b_.recv_answer(5, wire::Type::plan_reply, soon());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::protocol);
  EXPECT_EQ(answer.error().message(),
            "expected a message of type plan_reply for request 5, got one of type end for request 6");
  EXPECT_FALSE(b_.open());
}

TEST_F(BlockingTest, LateAnswersArePassedOver) {
  const wire::ErrorMessage gone{Errc::gone, "v3 is past"};
  ASSERT_TRUE(a_.send(3, gone, soon()));
  ASSERT_TRUE(a_.send(wire::Type::end, 4, {}, soon()));
  ASSERT_TRUE(a_.send(wire::Type::end, 5, {}, soon()));
  EXPECT_TRUE(b_.recv_answer(5, wire::Type::end, soon()));
}

// ---- stops ---------------------------------------------------------------------------------------------------

TEST_F(BlockingTest, AStopWakesWhoWaits) {
  std::stop_source stop;
  b_.stop_on(stop.get_token());
  const Deadline patience = soon();
  std::jthread other([&] { stop.request_stop(); });
  const auto answer = b_.recv(0, patience);
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), Errc::cancelled);
  EXPECT_FALSE(patience.passed());
  EXPECT_EQ(b_.send(wire::Type::end, 1, {}, soon()).error().code(), Errc::cancelled);
}

TEST_F(BlockingTest, AStopHidesNoOtherReason) {
  std::stop_source stop;
  b_.stop_on(stop.get_token());
  raw("this is no header, but long enough for one: not a word", 48);
  stop.request_stop();  // what has arrived can still be read
  EXPECT_EQ(b_.recv(0, soon()).error().code(), Errc::protocol);
}

TEST_F(BlockingTest, AnEarlierStopIsForgotten) {
  std::stop_source first;
  std::stop_source second;
  b_.stop_on(first.get_token());
  b_.stop_on(second.get_token());
  first.request_stop();
  ASSERT_TRUE(a_.send(wire::Type::end, 1, {}, soon()));
  EXPECT_TRUE(b_.recv(0, soon()));
  b_.stop_on({});
  second.request_stop();
  ASSERT_TRUE(a_.send(wire::Type::end, 2, {}, soon()));
  EXPECT_TRUE(b_.recv(0, soon()));
}

/// A process whose connection stays open when it is dead, since the test has that as well.
class WatchedTest : public BlockingTest {
 protected:
  WatchedTest() : pid_(::fork()) {
    if (pid_ == 0) {
      ::alarm(60);
      for (;;) ::pause();
    }
    b_.watch(ProcessWatch::open(ProcessId::of(pid_).value()).value());
  }
  ~WatchedTest() override {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  /// Once it is dead; it is not reaped before the end.
  void kill() const {
    ::kill(pid_, SIGKILL);
    siginfo_t info;
    ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
  }
  static void expect_death(const Error& error) {
    EXPECT_EQ(error.code(), Errc::connection);
    EXPECT_EQ(error.message(), "the peer's process has died");
  }
  bool shows_death() const {
    pollfd look{b_.process_fd(), POLLIN, 0};
    return ::poll(&look, 1, 0) == 1;
  }

  const pid_t pid_;
};

TEST_F(WatchedTest, WhatADeadProcessSaidIsHeardAndNothingIsWaitedFor) {
  ASSERT_TRUE(a_.send(wire::Type::end, 1, {}, soon()));
  EXPECT_FALSE(b_.peer_closed());
  EXPECT_FALSE(shows_death());
  kill();
  EXPECT_TRUE(b_.peer_closed());
  EXPECT_TRUE(shows_death());
  EXPECT_TRUE(b_.recv(0, soon()));
  const auto more = b_.recv(0, soon());
  ASSERT_FALSE(more);
  expect_death(more.error());
}

TEST_F(WatchedTest, TheRestOfADeadProcessesMessageIsNotWaitedFor) {
  MessageSocket moved = std::move(b_);
  b_ = std::move(moved);  // and the watch with it
  const wire::Header header = wire::make_header(wire::Type::end, 1, {});
  raw(&header, 20);
  std::thread dies([&] { kill(); });
  const auto torn = b_.recv(0, soon());
  dies.join();
  ASSERT_FALSE(torn);
  expect_death(torn.error());
}

TEST_F(BlockingTest, WhatAProcessSaysJustBeforeItsEndIsHeard) {
  for (int i = 0; i < 200; ++i) {
    int go[2];
    ASSERT_EQ(::pipe2(go, O_CLOEXEC), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      char byte = 0;
      static_cast<void>(!::read(go[0], &byte, 1));
      ::_exit(a_.send(wire::Type::end, 1, {}, soon()).ok() ? 0 : 1);
    }
    b_.watch(ProcessWatch::open(ProcessId::of(child).value()).value());
    static_cast<void>(!::write(go[1], "x", 1));
    const auto said = b_.recv(0, soon());
    EXPECT_TRUE(said) << said.error().message();
    ::waitpid(child, nullptr, 0);
    for (const int end : go) ::close(end);
    if (!said) return;
  }
}

TEST_F(WatchedTest, ADeadProcessIsNotWaitedForToRead) {
  kill();
  const std::vector<std::byte> large(16u << 20);
  const Status sent = b_.send(wire::Type::frame, 1, large, soon());
  ASSERT_FALSE(sent);
  expect_death(sent.error());
}

TEST_F(BlockingTest, AStopHitsNoOtherSocketThatGotTheNumber) {
  std::stop_source stop;
  for (const bool assigned : {false, true}) {
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    const UniqueFd far(fds[0]);
    MessageSocket socket{UniqueFd(fds[1])};
    socket.stop_on(stop.get_token());
    if (assigned) {
      socket = MessageSocket();
    } else {
      socket.close();
    }
    int reused[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, reused), 0);
    MessageSocket one{UniqueFd(reused[0])};
    MessageSocket other{UniqueFd(reused[1])};
    ASSERT_TRUE(reused[0] == fds[1] || reused[1] == fds[1]) << "this test proves nothing";
    stop.request_stop();
    ASSERT_TRUE(one.send(wire::Type::end, 1, {}, soon()));
    EXPECT_TRUE(other.recv(0, soon()));
    stop = std::stop_source();
  }
}

/// Listens on that port of 127.0.0.`last`; 0: a free one.
UniqueFd listen_on(std::uint32_t last, std::uint16_t& port, int backlog) {
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(0x7F000000u + last);
  address.sin_port = htons(port);
  socklen_t size = sizeof address;
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(listener.get(), backlog) != 0 ||
      ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return {};
  }
  port = ntohs(address.sin_port);
  return listener;
}

TEST(Connect, TcpByAddressAndByName) {
  std::uint16_t port = 0;
  const UniqueFd listener = listen_on(1, port, 4);
  ASSERT_TRUE(listener);
  for (const char* host : {"127.0.0.1", "localhost"}) {
    const auto fd = connect_tcp(host, port, soon());
    EXPECT_TRUE(fd) << fd.error().to_string();
  }
}

/// One address of a host may lead nowhere: a network that is down, an IPv6 that is none.
TEST(Connect, AnAddressThatSaysNothingLeavesTheOthersTheirTime) {
  std::uint16_t port = 0;
  const UniqueFd good = listen_on(1, port, 4);
  const UniqueFd full = listen_on(2, port, 0);
  ASSERT_TRUE(good && full);
  std::vector<Result<UniqueFd>> filling;  // the kernel drops what comes to a full backlog
  do filling.push_back(connect_tcp("127.0.0.2", port, in_ms(200)));
  while (filling.back() && filling.size() < 8);
  if (filling.back()) GTEST_SKIP() << "this system takes any number of connections";
  const auto fd = connect_tcp(kTwoAddresses, port, in_ms(2'000));
  EXPECT_TRUE(fd) << fd.error().to_string();
}

TEST(Connect, NobodyThere) {
  const test::HeldPort port;
  const auto tcp = connect_tcp("127.0.0.1", port.number(), soon());
  ASSERT_FALSE(tcp);
  EXPECT_EQ(tcp.error().code(), Errc::connection);
  EXPECT_NE(tcp.error().message().find(std::to_string(port.number())), std::string::npos);

  const auto local = connect_unix("/nonexistent/agent.sock", soon());
  ASSERT_FALSE(local);
  EXPECT_EQ(local.error().code(), Errc::connection);
  EXPECT_EQ(connect_unix(std::string(200, 'x'), soon()).error().code(), Errc::invalid_argument);
  EXPECT_EQ(connect_unix("", soon()).error().code(), Errc::invalid_argument);
}

TEST(Connect, NameThatDoesNotExist) {
  const auto fd = connect_tcp("no-such-host.invalid", 1, in_ms(2000));
  ASSERT_FALSE(fd);
  EXPECT_TRUE(fd.error().code() == Errc::connection || fd.error().code() == Errc::timed_out) << fd.error().to_string();
}

}  // namespace
}  // namespace deltasync::net
