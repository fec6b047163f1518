// UCX beside the suite of channels: which library, which transports, and ends that do not play their part.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <functional>
#include <memory>
#include <thread>

#include "net/blocking.hpp"
#include "net/ucx/transports.hpp"
#include "net/ucx/ucx.hpp"
#include "tests/support/log_lines.hpp"
#include "tests/support/ucx.hpp"

/// The leak sanitizer's own thread crashes where libucp is loaded.
extern "C" const char* __asan_default_options() {  // NOLINT(bugprone-reserved-identifier)
  return "detect_leaks=0";
}

namespace deltasync::net::ucx {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr auto kLong = std::chrono::seconds(60);  ///< never reached by a test that passes
constexpr auto kShort = std::chrono::milliseconds(200);

Deadline later() {
  return Deadline::after(kLong);
}

TEST(UcxLibrary, OneThatIsMissingIsNamedWithTheRemedy) {
  const auto opened = Ucx::open({"libnosuchucp.so.7", {}, true});
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code(), Errc::unsupported);
  EXPECT_THAT(opened.error().message(), AllOf(HasSubstr("libnosuchucp.so.7"), HasSubstr("DELTASYNC_UCX_LIBRARY")));
}

TEST(UcxLibrary, AnOldOneIsRefusedByBothVersions) {
  const auto opened = Ucx::open({DELTASYNC_OLD_UCP, {}, true});
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code(), Errc::unsupported);
  EXPECT_THAT(opened.error().message(), AllOf(HasSubstr("is version 1.13.1"), HasSubstr("and 1.22 ")));
}

TEST(UcxLibrary, OneThatIsNoLibucpIsNamedByWhatItLacks) {
  const auto opened = Ucx::open({"libc.so.6", {}, true});
  ASSERT_FALSE(opened);
  EXPECT_THAT(opened.error().message(), HasSubstr("libc.so.6 has no ucp_get_version"));
}

TEST(UcxTransports, AreNamedByThemselvesTheirFamilyOrUcxsName) {
  const auto wanted = [](std::string_view transport, const char* list) {
    return is_wanted(transport, *parse_transports(list));
  };
  EXPECT_TRUE(wanted("rc_mlx5", "rc_mlx5"));
  EXPECT_TRUE(wanted("rc_mlx5", "tcp,rc"));
  EXPECT_TRUE(wanted("rc_verbs", "ib"));
  EXPECT_TRUE(wanted("posix", "sm"));
  EXPECT_TRUE(wanted("cuda_ipc", "cuda"));
  EXPECT_TRUE(wanted("gdr_copy", "cuda"));
  EXPECT_FALSE(wanted("tcp", "rc,sm"));
  EXPECT_FALSE(wanted("tcpx", "tcp"));
  EXPECT_FALSE(wanted("posix", "sysv"));
  EXPECT_TRUE(parse_transports("")->empty());
  for (const char* bad : {",", "tcp,", ",tcp", "a,,b"}) EXPECT_FALSE(parse_transports(bad)) << bad;
}

/// Two ends over a socket, each with a context of its own.
class UcxTest : public ::testing::Test {
 protected:
  using Wanted = std::vector<std::string>;

  void SetUp() override {
    library_ = test::find_ucx();
    if (library_.empty()) GTEST_SKIP() << test::kNoUcx;
    std::signal(SIGPIPE, SIG_IGN);
  }
  std::shared_ptr<Ucx> open(Wanted wanted = {}) { return *Ucx::open({library_, std::move(wanted), true}); }
  void connect(std::shared_ptr<Ucx> one, std::shared_ptr<Ucx> other, bool right_id = true) {
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    a_ = MessageSocket(UniqueFd(fds[0]));
    b_ = MessageSocket(UniqueFd(fds[1]));
    const auto ends = std::pair{*one->offer(), *other->offer()};
    links_.insert(links_.end(), {ends.first, ends.second});
    Offer of_b = ends.second->offer();
    if (!right_id) of_b.id.bytes[0] ^= 1;
    to_a_ = one->channel(a_.fd(), ends.first, std::move(of_b));
    to_b_ = other->channel(b_.fd(), ends.second, ends.first->offer());
  }
  /// Both handshakes; a's and b's.
  std::pair<Status, Status> shake(Deadline deadline = later()) {
    Status of_b;
    std::thread other([&] { of_b = b_.secure(std::move(to_b_), deadline); });
    Status of_a = a_.secure(std::move(to_a_), deadline);
    other.join();
    return {of_a, of_b};
  }

  /// Tells its end over the socket, then sends and hears messages for as long as they come. True if an error ended it.
  /// Once it knows the other end it has `meanwhile` run beside.
  bool speak(UniqueFd fd, const std::function<void()>& meanwhile = {}) {
    const int socket = fd.get();
    MessageSocket peer(std::move(fd));
    const auto ucx = open();
    const auto link = *ucx->offer();
    const Offer& mine = link->offer();
    if (!peer.send(wire::Type::frame, 1, std::as_bytes(std::span(mine.id.bytes)), later())) return true;
    if (!peer.send(wire::Type::frame, 1, mine.address, later())) return true;
    Offer other;
    other.version = mine.version;
    const auto id = peer.recv(1000, later());
    if (!id) return true;
    std::copy_n(reinterpret_cast<const std::uint8_t*>(id->payload.data()), 16, other.id.bytes.data());
    auto address = peer.recv(1u << 20, later());
    if (!address) return true;
    other.address = std::move(address->payload);
    std::jthread beside;
    if (meanwhile) beside = std::jthread(meanwhile);
    if (!peer.secure(ucx->channel(socket, link, std::move(other)), later())) return true;
    const std::vector<std::byte> much(300'000);
    const Deadline end = later();
    while (!end.passed()) {
      if (!peer.send(wire::Type::frame, 2, much, end)) return true;
      if (!peer.recv(wire::kFrameBytesMax, end)) return true;
    }
    return false;
  }

  std::string library_;
  std::vector<std::weak_ptr<Link>> links_;
  std::unique_ptr<Channel> to_a_;
  std::unique_ptr<Channel> to_b_;
  MessageSocket a_;
  MessageSocket b_;
};

TEST(UcxTransports, AreAddedOnce) {
  std::string all;
  for (const char* more : {"tcp/lo0", "tcp/lo", "", "posix/memory,tcp/lo", "tcp/lo0"}) add_names(all, more);
  EXPECT_EQ(all, "tcp/lo0,tcp/lo,posix/memory");
}

TEST_F(UcxTest, TheTransportsInUseAreTold) {
  const test::Environment environment{{"UCX_TLS", "tcp"}};
  connect(open(), open());
  const auto [of_a, of_b] = shake();
  ASSERT_TRUE(of_a) << of_a.error().to_string();
  ASSERT_TRUE(of_b) << of_b.error().to_string();
  EXPECT_EQ(a_.transports(), "tcp/lo");
  EXPECT_EQ(b_.transports(), "tcp/lo");
}

/// UCX passes over shared memory that would not notice a peer's death, in silence.
TEST_F(UcxTest, AFallBackToATransportThatIsNotAskedForIsRefusedByName) {
  const test::Environment environment{{"UCX_TLS", "posix,tcp"}, {"UCX_POSIX_ERROR_HANDLING", "n"}};
  connect(open({"posix"}), open());
  const auto [of_a, of_b] = shake();
  ASSERT_FALSE(of_a);
  EXPECT_EQ(of_a.error().code(), Errc::unsupported);
  EXPECT_THAT(of_a.error().message(), AllOf(HasSubstr("UCX uses tcp/lo"), HasSubstr("allows only posix")));
}

TEST_F(UcxTest, SharedMemoryIsUsedWhereItIsAskedFor) {
  const test::Environment environment{{"UCX_TLS", "posix,tcp"}};
  connect(open({"posix"}), open({"posix"}));
  const auto [of_a, of_b] = shake();
  ASSERT_TRUE(of_a) << of_a.error().to_string();
  ASSERT_TRUE(of_b) << of_b.error().to_string();
  EXPECT_THAT(a_.transports(), StartsWith("posix/"));
}

TEST_F(UcxTest, WithNoTransportInCommonTheVariablesAreNamed) {
  const test::Environment environment{{"UCX_TLS", "self"}};
  connect(open(), open());
  const auto [of_a, of_b] = shake();  // one says why, the other may have seen no more than its end
  ASSERT_FALSE(of_a);
  ASSERT_FALSE(of_b);
  EXPECT_EQ(of_a.error().code(), Errc::connection);
  EXPECT_THAT(of_a.error().message() + of_b.error().message(), HasSubstr("UCX_TLS"));
}

/// One that reaches a worker and was not told its channel's name over the socket is not heard.
TEST_F(UcxTest, WhoDoesNotKnowTheChannelIsNotHeard) {
  const test::Environment environment{{"UCX_TLS", "tcp"}};
  connect(open(), open(), false);
  const auto [of_a, of_b] = shake(Deadline::after(std::chrono::seconds(2)));
  ASSERT_FALSE(of_b);
  EXPECT_THAT(of_b.error().code(), ::testing::AnyOf(Errc::timed_out, Errc::connection));
  EXPECT_EQ(b_.bytes_received(), 0u);
}

TEST_F(UcxTest, APeerThatNeverComesMeetsTheDeadline) {
  const test::Environment environment{{"UCX_TLS", "tcp"}};
  connect(open(), open());
  const Status alone = a_.secure(std::move(to_a_), Deadline::after(kShort));
  ASSERT_FALSE(alone);
  EXPECT_EQ(alone.error().code(), Errc::timed_out);
  EXPECT_THAT(alone.error().message(), HasSubstr("UCX"));
}

TEST_F(UcxTest, WhatWasSaidBeforeTheEndArrivesThoughTheSenderIsGone) {
  for (const char* tls : {"tcp", "posix"}) {
    const test::Environment environment{{"UCX_TLS", tls}};
    connect(open(), open());
    const auto [of_a, of_b] = shake();
    ASSERT_TRUE(of_a) << of_a.error().to_string();
    ASSERT_TRUE(of_b) << of_b.error().to_string();
    const std::vector<std::byte> sent(kWindowBytes / 2, std::byte{7});
    ASSERT_TRUE(a_.send(wire::Type::frame, 1, sent, later()));
    a_.close();
    const auto got = b_.recv(wire::kFrameBytesMax, later());
    ASSERT_TRUE(got) << tls << ": " << got.error().to_string();
    EXPECT_TRUE(got->payload == sent);
    EXPECT_EQ(b_.recv(100, later()).error().code(), Errc::connection);
  }
}

/// It is killed at any moment of a channel's life, from the first word of wire-up on; the other process goes on, and
/// what it waits for ends. Both are children: UCX is not open in this process.
TEST_F(UcxTest, APeerThatIsKilledAtAnyMomentEndsTheChannelAlone) {
  for (const char* tls : {"tcp", "posix"}) {
    const test::Environment environment{{"UCX_TLS", tls}};
    for (const int after_us : {0, 500, 1'000, 2'000, 5'000, 30'000}) {
      int fds[2];
      ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
      UniqueFd here(fds[0]);
      UniqueFd there(fds[1]);
      const pid_t victim = ::fork();
      ASSERT_GE(victim, 0);
      if (victim == 0) {
        here.reset();
        speak(std::move(there));
        ::_exit(0);
      }
      there.reset();
      const pid_t survivor = ::fork();
      ASSERT_GE(survivor, 0);
      if (survivor == 0) {
        const bool ended = speak(std::move(here), [&] {
          std::this_thread::sleep_for(std::chrono::microseconds(after_us));
          ::kill(victim, SIGKILL);
        });
        ::_exit(ended ? 0 : 1);
      }
      here.reset();
      int status = 0;
      ASSERT_EQ(::waitpid(survivor, &status, 0), survivor);
      EXPECT_TRUE(WIFEXITED(status)) << tls << " after " << after_us << " us: killed by signal " << WTERMSIG(status);
      EXPECT_EQ(WEXITSTATUS(status), 0) << tls << " after " << after_us << " us";
      ::kill(victim, SIGKILL);
      ASSERT_EQ(::waitpid(victim, &status, 0), victim);
    }
  }
}

/// Each hears the other's end, and neither waits for an answer that the other's close has thrown away.
TEST_F(UcxTest, ChannelsWhoseEndsLeaveTogetherWaitForNothing) {
  for (const char* tls : {"tcp", "posix"}) {
    const test::Environment environment{{"UCX_TLS", tls}};
    const test::LogLines lines;
    {
      const auto one = open();
      const auto other = open();
      for (int i = 0; i < 24; ++i) {
        connect(one, other);
        const auto [of_a, of_b] = shake();
        ASSERT_TRUE(of_a) << of_a.error().to_string();
        ASSERT_TRUE(of_b) << of_b.error().to_string();
        ASSERT_TRUE(a_.send(wire::Type::frame, 1, std::vector<std::byte>(1000), later()));
        ASSERT_TRUE(b_.recv(2000, later()));
        std::thread beside([&] { b_.close(); });
        a_.close();
        beside.join();
      }
      const Deadline end = later();
      const auto is_gone = [](const std::weak_ptr<Link>& link) { return link.expired(); };
      while (!std::all_of(links_.begin(), links_.end(), is_gone) && !end.passed()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      EXPECT_FALSE(end.passed());
    }
    EXPECT_FALSE(lines.has("ucx_end_unheard")) << tls << "\n" << lines.text();
    EXPECT_FALSE(lines.has("ucx_worker_abandoned")) << tls << "\n" << lines.text();
  }
}

TEST_F(UcxTest, WhoFloodsTheSocketIsLeft) {
  connect(open(), open());
  const std::array<std::uint32_t, 4> there{0x58554344, 2, 0, 0};
  std::vector<std::uint32_t> much;
  for (int i = 0; i < 5000; ++i) much.insert(much.end(), there.begin(), there.end());
  ASSERT_EQ(::send(b_.fd(), much.data(), much.size() * 4, MSG_DONTWAIT), static_cast<ssize_t>(much.size() * 4));
  const Status of_a = a_.secure(std::move(to_a_), later());
  ASSERT_FALSE(of_a);
  EXPECT_EQ(of_a.error().code(), Errc::protocol);
  EXPECT_THAT(of_a.error().message(), HasSubstr("floods"));
}

TEST_F(UcxTest, OnlyLibrariesOfOneVersionMeet) {
  const auto ucx = open();
  Offer offer = (*ucx->offer())->offer();
  EXPECT_TRUE(ucx->accepts(offer));
  offer.version += 1;
  EXPECT_EQ(ucx->accepts(offer).error().code(), Errc::unsupported);
}

TEST_F(UcxTest, AForkedChildIsToldThatItHasNone) {
  const test::Environment environment{{"UCX_TLS", "tcp"}, {"DELTASYNC_UCX_LIBRARY", library_}};
  const pid_t child = ::fork();
  if (child == 0) {
    const auto parents = Ucx::share(true);
    const pid_t grandchild = ::fork();
    if (grandchild == 0) {
      const auto own = Ucx::share(true);
      ::_exit(!own && own.error().code() == Errc::unsupported ? 0 : 1);
    }
    int status = 0;
    ::waitpid(grandchild, &status, 0);
    ::_exit(parents && WIFEXITED(status) ? WEXITSTATUS(status) : 2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace deltasync::net::ucx
