// One suite for all that may lie between a conversation and its socket: bytes as they are, TLS, and UCX. A blocking end
// speaks with a blocking or a coroutine end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/strand.hpp>

#include <array>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <future>
#include <numeric>
#include <optional>
#include <thread>

#include "base/deadline.hpp"
#include "net/blocking.hpp"
#include "net/listener.hpp"
#include "net/message_stream.hpp"
#include "net/tls.hpp"
#include "net/ucx/ucx.hpp"
#include "tests/support/certificates.hpp"
#include "tests/support/temp_dir.hpp"
#include "tests/support/ucx.hpp"

namespace deltasync::net {
namespace {

using ::testing::HasSubstr;
namespace asio = boost::asio;

constexpr auto kLong = std::chrono::seconds(60);  ///< never reached by a test that passes
constexpr auto kShort = std::chrono::milliseconds(50);

Deadline later() {
  return Deadline::after(kLong);
}
Deadline soon() {
  return Deadline::after(kShort);
}

std::vector<std::byte> some_bytes(std::size_t bytes) {
  std::vector<std::byte> made(bytes);
  for (std::size_t i = 0; i < bytes; ++i) made[i] = static_cast<std::byte>(i * 7 + (i >> 8));
  return made;
}

/// Two ends of a TCP connection over loopback.
struct Wire {
  UniqueFd client;
  UniqueFd server;

  static Wire make() {
    Listener listener = *Listener::bind({"127.0.0.1", 0}, false);
    auto accepted = std::async(std::launch::async, [&] { return listener.accept(later()); });
    UniqueFd client = *connect_tcp("127.0.0.1", listener.port(), later());
    return {std::move(client), *accepted.get()};
  }
};

using Channels = std::pair<std::unique_ptr<Channel>, std::unique_ptr<Channel>>;

/// "plain", "tls", or UCX: "ucx_tcp", "ucx_shm", "ucx_rendezvous".
class ChannelTest : public ::testing::TestWithParam<std::string> {
 protected:
  ChannelTest() { std::signal(SIGPIPE, SIG_IGN); }
  ~ChannelTest() override {
    work_.reset();
    io_.stop();
    if (thread_.joinable()) thread_.join();
  }

  void SetUp() override {
    wire_ = Wire::make();
    if (GetParam().starts_with("ucx")) {
      open_ucx(GetParam());
    } else if (GetParam() == "tls") {
      client_tls_ = *Tls::client(tls_.client());
      server_tls_ = *Tls::server(tls_.server());
      channels_ = {*client_tls_->channel(wire_.client.get(), "localhost"),
                   *server_tls_->channel(wire_.server.get(), "the client")};
    } else {
      channels_ = {plain_channel(wire_.client.get()), plain_channel(wire_.server.get())};
    }
  }

  /// Each end with a context of its own, as in two processes.
  void open_ucx(const std::string& kind) {
    const std::string library = test::find_ucx();
    if (library.empty()) GTEST_SKIP() << test::kNoUcx;
    const bool shm = kind == "ucx_shm";
    const test::Environment environment{{"UCX_TLS", shm ? "posix" : "tcp"},
                                        {"UCX_RNDV_THRESH", kind == "ucx_rendezvous" ? "0" : "inf"}};
    for (std::shared_ptr<ucx::Ucx>& one : ucx_) {
      auto opened = ucx::Ucx::open({library, {shm ? "posix" : "tcp"}, true});
      ASSERT_TRUE(opened) << opened.error().to_string();
      one = *std::move(opened);
    }
    const auto ends = std::pair{*ucx_[0]->offer(), *ucx_[1]->offer()};
    channels_ = {ucx_[0]->channel(wire_.client.get(), ends.first, ends.second->offer()),
                 ucx_[1]->channel(wire_.server.get(), ends.second, ends.first->offer())};
  }

  static MessageSocket socket_over(UniqueFd fd, std::unique_ptr<Channel> channel) {
    MessageSocket socket(std::move(fd));
    EXPECT_TRUE(socket.secure(std::move(channel), later()));
    return socket;
  }
  /// Both ends block.
  void open_sockets() {
    auto opened = std::async(std::launch::async,
                             [&] { return socket_over(std::move(wire_.server), std::move(channels_.second)); });
    a_ = socket_over(std::move(wire_.client), std::move(channels_.first));
    b_ = opened.get();
  }
  /// b's end is stream_, on a thread of its own.
  void open_stream() {
    MessageStream::Socket socket(asio::make_strand(io_));
    socket.assign(asio::generic::stream_protocol(AF_INET, IPPROTO_TCP), wire_.server.release());
    stream_.emplace(std::move(socket));
    thread_ = std::thread([this] { io_.run(); });
    auto opened = start(stream_->secure(std::move(channels_.second), later()));
    a_ = socket_over(std::move(wire_.client), std::move(channels_.first));
    const Status status = opened.get();
    ASSERT_TRUE(status) << status.error().to_string();
  }

  template <class T>
  static asio::awaitable<void> deliver(asio::awaitable<T> work, std::shared_ptr<std::promise<T>> promise) {
    promise->set_value(co_await std::move(work));
  }
  template <class T>
  std::future<T> start(asio::awaitable<T> work) {
    auto promise = std::make_shared<std::promise<T>>();
    auto future = promise->get_future();
    asio::co_spawn(stream_->executor(), deliver(std::move(work), std::move(promise)), asio::detached);
    return future;
  }

  test::TempDir dir_;
  const test::TestTls tls_{dir_.path()};
  std::shared_ptr<Tls> client_tls_;
  std::shared_ptr<Tls> server_tls_;
  std::array<std::shared_ptr<ucx::Ucx>, 2> ucx_;
  Wire wire_;
  Channels channels_;
  MessageSocket a_;
  MessageSocket b_;
  asio::io_context io_;
  asio::executor_work_guard<asio::io_context::executor_type> work_{io_.get_executor()};
  std::optional<MessageStream> stream_;
  std::thread thread_;
};

#ifdef DELTASYNC_UCX_CHANNELS
const std::vector<std::string> kKinds = {"ucx_tcp", "ucx_shm", "ucx_rendezvous"};
#else
const std::vector<std::string> kKinds = {"plain", "tls"};
#endif
INSTANTIATE_TEST_SUITE_P(All, ChannelTest, ::testing::ValuesIn(kKinds),
                         [](const auto& tested) { return tested.param; });

/// Around those of TLS's records, and more.
constexpr std::size_t kSizes[] = {0, 1, 8143, 8144, 8145, 16384, 262095, 262096, 262097, 3u << 20};

TEST_P(ChannelTest, MessagesOfEverySizeCrossBothWays) {
  open_sockets();
  auto echo = std::async(std::launch::async, [&]() -> Status {
    for ([[maybe_unused]] const std::size_t size : kSizes) {
      DS_ASSIGN(const Message message, b_.recv(wire::kFrameBytesMax, later()));
      DS_TRY(b_.send(wire::Type::frame, message.header.request, message.payload, later()));
    }
    return {};
  });
  for (const std::size_t size : kSizes) {
    const std::vector<std::byte> sent = some_bytes(size);
    ASSERT_TRUE(a_.send(wire::Type::frame, size, sent, later()));
    const auto back = a_.recv(wire::kFrameBytesMax, later());
    ASSERT_TRUE(back) << size << ": " << back.error().to_string();
    EXPECT_EQ(back->header.request, size);
    EXPECT_TRUE(back->payload == sent) << size;
  }
  EXPECT_TRUE(echo.get());
  EXPECT_EQ(a_.bytes_sent(), b_.bytes_received());
}

TEST_P(ChannelTest, ManySmallMessagesKeepTheirOrder) {
  open_sockets();
  constexpr std::uint64_t kMessages = 20'000;
  auto sent = std::async(std::launch::async, [&]() -> Status {
    for (std::uint64_t i = 0; i < kMessages; ++i) DS_TRY(a_.send(wire::Type::frame, i, some_bytes(i % 300), later()));
    return {};
  });
  for (std::uint64_t i = 0; i < kMessages; ++i) {
    const auto message = b_.recv(wire::kFrameBytesMax, later());
    ASSERT_TRUE(message) << i << ": " << message.error().to_string();
    ASSERT_EQ(message->header.request, i);
    ASSERT_EQ(message->payload.size(), i % 300);
  }
  EXPECT_TRUE(sent.get());
}

TEST_P(ChannelTest, BothMaySendBeforeEitherReads) {
  open_sockets();
  const std::vector<std::byte> sent = some_bytes(100'000);
  auto other = std::async(std::launch::async, [&] { return b_.send(wire::Type::frame, 1, sent, later()); });
  ASSERT_TRUE(a_.send(wire::Type::frame, 2, sent, later()));
  ASSERT_TRUE(other.get());
  auto received = std::async(std::launch::async, [&] { return b_.recv(wire::kFrameBytesMax, later()); });
  EXPECT_TRUE(a_.recv(wire::kFrameBytesMax, later()));
  EXPECT_TRUE(received.get());
}

TEST_P(ChannelTest, ASilentPeerMeetsTheDeadlineAndMaySpeakLater) {
  open_sockets();
  EXPECT_EQ(b_.recv(100, soon()).error().code(), Errc::timed_out);
  ASSERT_TRUE(a_.send(wire::Type::end, 1, {}, later()));
  EXPECT_TRUE(b_.recv(100, later()));
}

TEST_P(ChannelTest, APeerThatDoesNotReadMeetsTheDeadline) {
  open_sockets();
  const auto status = a_.send(wire::Type::frame, 1, some_bytes(60u << 20), soon());
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code(), Errc::timed_out);
  EXPECT_FALSE(a_.open());
}

TEST_P(ChannelTest, ASlowReaderGetsAll) {
  open_sockets();
  const std::vector<std::byte> sent = some_bytes(20u << 20);
  auto sending = std::async(std::launch::async, [&] { return a_.send(wire::Type::frame, 1, sent, later()); });
  ASSERT_TRUE(b_.recv_header(later()));
  std::vector<std::byte> got(sent.size());
  for (std::size_t at = 0; at < got.size();) {
    const std::size_t step = std::min<std::size_t>(got.size() - at, 77'777);
    ASSERT_TRUE(b_.recv_payload({got.data() + at, step}, later()));
    at += step;
    if (at % 10 == 0) std::this_thread::yield();
  }
  EXPECT_TRUE(sending.get());
  EXPECT_TRUE(got == sent);
}

TEST_P(ChannelTest, AStopEndsAWaitForBytesAndAWaitForRoom) {
  open_sockets();
  std::stop_source stop;
  b_.stop_on(stop.get_token());
  a_.stop_on(stop.get_token());
  auto hearing = std::async(std::launch::async, [&] { return b_.recv(100, later()); });
  EXPECT_EQ(hearing.wait_for(kShort), std::future_status::timeout);
  stop.request_stop();
  EXPECT_EQ(hearing.get().error().code(), Errc::cancelled);
  EXPECT_EQ(a_.send(wire::Type::frame, 1, some_bytes(60u << 20), later()).error().code(), Errc::cancelled);
}

TEST_P(ChannelTest, APeerThatEndsStillListens) {
  open_sockets();
  auto sent = std::async(std::launch::async, [&] {
    Status status = a_.send(wire::Type::frame, 1, some_bytes(50'000), later());
    a_.end_sending();
    return status;
  });
  EXPECT_TRUE(b_.recv(wire::kFrameBytesMax, later()));
  EXPECT_TRUE(sent.get());
  const auto after = b_.recv(100, later());
  ASSERT_FALSE(after);
  EXPECT_EQ(after.error().code(), Errc::connection);
  EXPECT_THAT(after.error().message(), HasSubstr("closed"));
}

TEST_P(ChannelTest, AnAnswerReachesAPeerThatHasEnded) {
  open_stream();
  ASSERT_TRUE(a_.send(wire::Type::plan, 1, {}, later()));
  a_.end_sending();
  ASSERT_TRUE(start(stream_->read(100, later(), kLong)).get());
  const std::vector<std::byte> sent = some_bytes(8u << 20);
  auto written = start(stream_->write(wire::Type::frame, 1, sent, kLong));
  const auto answer = a_.recv(wire::kFrameBytesMax, later());
  ASSERT_TRUE(answer) << answer.error().to_string();
  EXPECT_TRUE(answer->payload == sent);
  EXPECT_TRUE(written.get());
}

/// As a process that is killed: it says no more, and its sockets close.
TEST_P(ChannelTest, APeerThatDiesInAMessageIsAConnectionError) {
  auto opened =
      std::async(std::launch::async, [&] { return socket_over(std::move(wire_.server), std::move(channels_.second)); });
  std::unique_ptr<Channel> dying = std::move(channels_.first);
  for (auto tried = dying->handshake(); tried->came != Tried::Came::moved; tried = dying->handshake()) {
    ASSERT_TRUE(tried);
  }
  b_ = opened.get();
  const wire::Header header = wire::make_header(wire::Type::frame, 1, some_bytes(1000));
  std::vector<std::byte> half(500);
  const iovec pieces[] = {{const_cast<wire::Header*>(&header), sizeof header}, {half.data(), half.size()}};
  ASSERT_TRUE(dying->send(pieces));
  auto hearing = std::async(std::launch::async, [&] { return b_.recv(wire::kFrameBytesMax, later()); });
  EXPECT_EQ(hearing.wait_for(kShort), std::future_status::timeout);
  dying.reset();
  wire_.client.reset();
  const auto message = hearing.get();
  ASSERT_FALSE(message);
  EXPECT_EQ(message.error().code(), Errc::connection) << message.error().to_string();
}

TEST_P(ChannelTest, APeerThatDiesUnreadIsAConnectionErrorToWhoSends) {
  open_sockets();
  auto sending =
      std::async(std::launch::async, [&] { return a_.send(wire::Type::frame, 1, some_bytes(60u << 20), later()); });
  EXPECT_EQ(sending.wait_for(kShort), std::future_status::timeout);
  b_ = MessageSocket();
  const Status sent = sending.get();
  ASSERT_FALSE(sent);
  EXPECT_EQ(sent.error().code(), Errc::connection) << sent.error().to_string();
}

TEST_P(ChannelTest, ACoroutineSpeaksBothWays) {
  open_stream();
  for (const std::size_t size : kSizes) {
    const std::vector<std::byte> sent = some_bytes(size);
    auto read = start(stream_->read(wire::kFrameBytesMax, later(), kLong));
    ASSERT_TRUE(a_.send(wire::Type::frame, 4, sent, later()));
    const auto message = read.get();
    ASSERT_TRUE(message) << size << ": " << message.error().to_string();
    EXPECT_TRUE(message->payload == sent);
    auto written = start(stream_->write(wire::Type::frame, 5, message->payload, kLong));
    const auto back = a_.recv(wire::kFrameBytesMax, later());
    ASSERT_TRUE(back) << size << ": " << back.error().to_string();
    EXPECT_TRUE(back->payload == sent);
    EXPECT_TRUE(written.get());
  }
  EXPECT_EQ(stream_->bytes_sent(), a_.bytes_received());
}

TEST_P(ChannelTest, ACoroutineMeetsItsDeadlinesAndIsCancelled) {
  open_stream();
  EXPECT_EQ(start(stream_->read(100, soon(), kLong)).get().error().code(), Errc::timed_out);
  auto read = start(stream_->read(100, later(), kLong));
  while (read.wait_for(std::chrono::milliseconds(5)) != std::future_status::ready) stream_->canceller().cancel();
  EXPECT_EQ(read.get().error().code(), Errc::aborted);
  const std::vector<std::byte> much = some_bytes(60u << 20);
  EXPECT_EQ(start(stream_->write(wire::Type::frame, 1, much, kShort)).get().error().code(), Errc::timed_out);
}

struct Permit final : MessageStream::MaySend {
  bool may_send() const override { return allowed; }
  std::atomic<bool> allowed{true};
};

TEST_P(ChannelTest, AFileIsSentUntilItMayNot) {
  open_stream();
  const std::vector<std::byte> content = some_bytes(40u << 20);
  const UniqueFd file(::memfd_create("half", MFD_CLOEXEC));
  ASSERT_EQ(::write(file.get(), content.data(), content.size()), static_cast<ssize_t>(content.size()));
  Permit permit;
  std::uint64_t sent = 0;
  constexpr std::size_t kFrom = 12'345;
  constexpr std::size_t kBytes = 2'000'000;
  auto whole = start(stream_->send_file(file.get(), kFrom, kBytes, permit, kLong, &sent));
  std::vector<std::byte> got(kBytes);
  ASSERT_TRUE(a_.recv_payload(got, later()));
  EXPECT_TRUE(whole.get());
  EXPECT_EQ(sent, kBytes);
  EXPECT_TRUE(std::equal(got.begin(), got.end(), content.begin() + kFrom));

  auto revoked = start(stream_->send_file(file.get(), 0, content.size(), permit, kLong, &sent));
  EXPECT_EQ(revoked.wait_for(kShort), std::future_status::timeout);
  permit.allowed = false;
  stream_->canceller().cancel();
  EXPECT_EQ(revoked.get().error().code(), Errc::lease_revoked);
}

TEST_P(ChannelTest, AFileThatEndsEarlyIsAnError) {
  open_stream();
  const UniqueFd file(::memfd_create("short", MFD_CLOEXEC));
  Permit permit;
  std::uint64_t sent = 0;
  EXPECT_EQ(start(stream_->send_file(file.get(), 0, 10, permit, kLong, &sent)).get().error().code(), Errc::io);
}

/// More than one may come along: all but the last are closed.
TEST(PlainChannel, KeepsOneFileOfThoseThatComeAlong) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  const UniqueFd from(ends[0]);
  const UniqueFd to(ends[1]);
  UniqueFd kept;
  const auto channel = plain_channel(to.get(), &kept);
  const auto open_files = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = open_files();
  for (std::size_t sent = 1; sent <= 4; ++sent) {
    const std::array<int, 4> files{0, 1, 2, 0};
    std::byte byte{1};
    iovec piece{&byte, 1};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof files)> control{};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(sent * sizeof(int));
    cmsghdr* const along = CMSG_FIRSTHDR(&message);
    along->cmsg_level = SOL_SOCKET;
    along->cmsg_type = SCM_RIGHTS;
    along->cmsg_len = CMSG_LEN(sent * sizeof(int));
    std::memcpy(CMSG_DATA(along), files.data(), sent * sizeof(int));
    ASSERT_EQ(::sendmsg(from.get(), &message, 0), 1);
    ASSERT_EQ(channel->receive(std::span(&piece, 1))->bytes, 1u);
    EXPECT_TRUE(kept);
    EXPECT_EQ(open_files(), before + 1);
  }
}

}  // namespace
}  // namespace deltasync::net
