// A coroutine end against a blocking end, over a Unix socket pair.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/strand.hpp>

#include <atomic>
#include <csignal>
#include <future>
#include <thread>

#include "base/deadline.hpp"
#include "net/message_stream.hpp"

namespace deltasync::net {
namespace {

using namespace std::chrono_literals;
namespace asio = boost::asio;

constexpr auto kLong = std::chrono::seconds(30);  ///< never reached by a test that passes
constexpr auto kShort = std::chrono::milliseconds(30);

Deadline later() {
  return Deadline::after(kLong);
}

class MessageStreamTest : public ::testing::Test {
 protected:
  MessageStreamTest() {
    std::signal(SIGPIPE, SIG_IGN);
    int fds[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) std::abort();
    peer_ = MessageSocket(UniqueFd(fds[0]));
    MessageStream::Socket socket(asio::make_strand(io_));
    socket.assign(asio::generic::stream_protocol(AF_UNIX, 0), fds[1]);
    stream_.emplace(std::move(socket));
    thread_ = std::thread([this] { io_.run(); });
  }
  ~MessageStreamTest() override { stop(); }
  void stop() {
    work_.reset();
    io_.stop();
    if (thread_.joinable()) thread_.join();
  }

  template <class T>
  static asio::awaitable<void> deliver(asio::awaitable<T> work, std::shared_ptr<std::promise<T>> promise) {
    promise->set_value(co_await std::move(work));
  }
  template <class T>
  static std::future<T> start_on(const asio::any_io_executor& executor, asio::awaitable<T> work) {
    auto promise = std::make_shared<std::promise<T>>();
    auto future = promise->get_future();
    asio::co_spawn(executor, deliver(std::move(work), std::move(promise)), asio::detached);
    return future;
  }
  /// Starts a coroutine on the stream's strand.
  template <class T>
  std::future<T> start(asio::awaitable<T> work) {
    return start_on(stream_->executor(), std::move(work));
  }
  std::future<Result<Message>> start_read(std::uint64_t bytes_max = wire::kControlBytesMax) {
    return start(stream_->read(bytes_max, later(), kLong));
  }
  void send_raw(ByteSpan bytes) {
    ASSERT_EQ(::send(peer_.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }

  asio::io_context io_;
  asio::executor_work_guard<asio::io_context::executor_type> work_{io_.get_executor()};
  std::optional<MessageStream> stream_;
  MessageSocket peer_;
  std::thread thread_;
};

TEST_F(MessageStreamTest, MessagesCrossBothWays) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{1} << 20}) {
    std::vector<std::byte> payload(bytes);
    for (std::size_t i = 0; i < bytes; ++i) payload[i] = static_cast<std::byte>(i * 7);
    auto read = start_read();
    ASSERT_TRUE(peer_.send(wire::Type::plan, 42, payload, later()));
    const auto message = read.get();
    ASSERT_TRUE(message) << message.error().to_string();
    EXPECT_EQ(message->type(), wire::Type::plan);
    EXPECT_EQ(message->header.request, 42u);
    EXPECT_EQ(message->payload, payload);

    auto write = start(stream_->write(wire::Type::plan_reply, 43, payload, kLong));
    const auto answer = peer_.recv(wire::kControlBytesMax, later());
    ASSERT_TRUE(write.get());
    ASSERT_TRUE(answer) << answer.error().to_string();
    EXPECT_EQ(answer->header.request, 43u);
    EXPECT_EQ(answer->payload, payload);
  }
  EXPECT_EQ(stream_->bytes_received(), peer_.bytes_sent());
  EXPECT_EQ(stream_->bytes_sent(), peer_.bytes_received());
}

TEST_F(MessageStreamTest, ManyPiecesArriveInOrder) {
  std::vector<std::vector<std::byte>> parts;
  std::vector<ByteSpan> pieces;
  std::vector<std::byte> all;
  for (unsigned i = 0; i < 300; ++i) {
    parts.emplace_back(i % 7 == 0 ? 0 : i * 31, static_cast<std::byte>(i));
    all.insert(all.end(), parts.back().begin(), parts.back().end());
  }
  pieces.assign(parts.begin(), parts.end());
  auto write = start(stream_->write_pieces(pieces, kLong));
  std::vector<std::byte> got(all.size());
  ASSERT_TRUE(peer_.recv_payload(got, later()));
  EXPECT_TRUE(write.get());
  EXPECT_EQ(got, all);
}

TEST_F(MessageStreamTest, GarbageIsRefusedByItsHeader) {
  auto read = start_read();
  std::vector<std::byte> garbage(sizeof(wire::Header), std::byte{'G'});
  send_raw(garbage);
  const auto message = read.get();
  ASSERT_FALSE(message);
  EXPECT_EQ(message.error().code(), Errc::protocol);
}

TEST_F(MessageStreamTest, ALengthOverTheCallersLimitIsRefusedBeforeThePayload) {
  auto read = start_read(10);
  send_raw(bytes_of(wire::make_header(wire::Type::plan, 1, std::vector<std::byte>(11))));
  const auto message = read.get();
  ASSERT_FALSE(message);
  EXPECT_EQ(message.error().code(), Errc::protocol);
}

TEST_F(MessageStreamTest, AWrongPayloadHashIsCorrupt) {
  auto read = start_read();
  const std::vector<std::byte> payload(100, std::byte{1});
  std::vector<std::byte> other = payload;
  other[50] = std::byte{2};
  send_raw(bytes_of(wire::make_header(wire::Type::plan, 1, payload)));
  send_raw(other);
  const auto message = read.get();
  ASSERT_FALSE(message);
  EXPECT_EQ(message.error().code(), Errc::corrupt);
}

TEST_F(MessageStreamTest, ASilentPeerMeetsTheIdleDeadline) {
  const auto message = start(stream_->read(100, Deadline::after(kShort), kLong)).get();
  ASSERT_FALSE(message);
  EXPECT_EQ(message.error().code(), Errc::timed_out);
}

TEST_F(MessageStreamTest, APeerThatStopsInsideAMessageMeetsTheMessageLimit) {
  auto read = start(stream_->read(1000, later(), kShort));
  send_raw(bytes_of(wire::make_header(wire::Type::plan, 1, std::vector<std::byte>(100))));
  const auto message = read.get();
  ASSERT_FALSE(message);
  EXPECT_EQ(message.error().code(), Errc::timed_out);
}

/// Bytes that arrive just as the watchdog fires: its cancel may find a read that is done but not yet delivered.
TEST_F(MessageStreamTest, APeerThatDripsUpToTheDeadlineAndStopsMeetsIt) {
  std::thread second([this] { io_.run(); });
  constexpr int kPeers = 100;
  std::vector<MessageSocket> peers;
  std::vector<MessageStream> streams;
  std::vector<std::future<Result<Message>>> reads;
  for (int i = 0; i < kPeers; ++i) {
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    peers.emplace_back(UniqueFd(fds[0]));
    MessageStream::Socket socket(asio::make_strand(io_));
    socket.assign(asio::generic::stream_protocol(AF_UNIX, 0), fds[1]);
    streams.emplace_back(std::move(socket));
  }
  const wire::Header header = wire::make_header(wire::Type::plan, 1, std::vector<std::byte>(1 << 20));
  for (int i = 0; i < kPeers; ++i) {
    ASSERT_EQ(::send(peers[i].fd(), &header, sizeof header, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof header));
    reads.push_back(start_on(streams[i].executor(), streams[i].read(wire::kControlBytesMax, later(), kShort)));
  }
  const Deadline dripping = Deadline::after(kShort + kShort);
  while (!dripping.passed()) {
    for (const auto& peer : peers) static_cast<void>(::send(peer.fd(), "drip", 4, MSG_NOSIGNAL | MSG_DONTWAIT));
  }
  for (auto& read : reads) {
    ASSERT_EQ(read.wait_for(kLong), std::future_status::ready) << "a read has lost its deadline";
    EXPECT_EQ(read.get().error().code(), Errc::timed_out);
  }
  stop();  // the streams end before the fixture
  second.join();
}

TEST_F(MessageStreamTest, OneDeadlineForAWholeMessage) {
  send_raw(bytes_of(wire::make_header(wire::Type::plan, 1, std::vector<std::byte>(100))));
  // The header is there when the read begins, and the time for it is long: only the payload is waited for in vain.
  const Deadline deadline = Deadline::after(std::chrono::seconds(1));
  auto read = start(stream_->read_by(1000, deadline));
  const auto message = read.get();
  ASSERT_FALSE(message);
  EXPECT_EQ(message.error().code(), Errc::timed_out);
  EXPECT_TRUE(deadline.passed());

  auto next = start(stream_->read_by(1000, later()));
  send_raw(std::vector<std::byte>(100));  // not a header
  EXPECT_EQ(next.get().error().code(), Errc::protocol);
}

TEST_F(MessageStreamTest, APeerThatLeftAnUnreadByteBehindIsSeen) {
  EXPECT_FALSE(stream_->peer_closed());
  EXPECT_FALSE(stream_->has_input());
  send_raw(std::vector<std::byte>(1));
  EXPECT_FALSE(stream_->peer_closed());
  EXPECT_TRUE(stream_->has_input());
  peer_.close();
  EXPECT_TRUE(stream_->peer_closed());
}

TEST_F(MessageStreamTest, AShortDeadlineAfterALongOneHolds) {
  // Leaves the watchdog's timer far in the future.
  auto first = start(stream_->read(100, Deadline::after(std::chrono::hours(1)), std::chrono::hours(1)));
  ASSERT_TRUE(peer_.send(wire::Type::plan, 1, {}, later()));
  ASSERT_TRUE(first.get());
  const auto message = start(stream_->read(100, Deadline::after(kShort), kLong)).get();
  ASSERT_FALSE(message);
  EXPECT_EQ(message.error().code(), Errc::timed_out);
}

TEST_F(MessageStreamTest, APeerThatLeavesIsAConnectionError) {
  auto read = start_read();
  peer_.close();
  const auto message = read.get();
  ASSERT_FALSE(message);
  EXPECT_EQ(message.error().code(), Errc::connection);
}

TEST_F(MessageStreamTest, APeerThatDoesNotReadMeetsTheProgressLimit) {
  const std::vector<std::byte> payload(8u << 20);
  const auto status = start(stream_->write(wire::Type::frame, 1, payload, kShort)).get();
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code(), Errc::timed_out);
}

TEST_F(MessageStreamTest, AClosedStreamTouchesNoFileThatGotItsNumber) {
  const int number = stream_->fd();
  std::promise<void> closed;
  asio::post(stream_->executor(), [&] {
    stream_->close();
    closed.set_value();
  });
  closed.get_future().wait();
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  const UniqueFd other(fds[1]);
  const UniqueFd moved(fds[0] == number ? fds[0] : ::dup2(fds[0], number));
  if (fds[0] != number) ::close(fds[0]);
  const wire::Header header = wire::make_header(wire::Type::end, 1, {});
  ASSERT_EQ(::send(other.get(), &header, sizeof header, 0), static_cast<ssize_t>(sizeof header));
  const auto message = start_read().get();
  ASSERT_FALSE(message);
  EXPECT_EQ(message.error().code(), Errc::connection);
  EXPECT_FALSE(start(stream_->write(wire::Type::end, 2, {}, kLong)).get());
  char byte = 0;
  EXPECT_EQ(::recv(moved.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK), 1);
  EXPECT_EQ(::recv(other.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK), -1);
}

TEST_F(MessageStreamTest, CancelEndsARead) {
  auto read = start_read();
  stream_->canceller().cancel();
  // A cancel that came before the read began is lost by design; conversations look at their flag first.
  while (read.wait_for(5ms) != std::future_status::ready) stream_->canceller().cancel();
  const auto message = read.get();
  ASSERT_FALSE(message);
  EXPECT_EQ(message.error().code(), Errc::aborted);
}

TEST_F(MessageStreamTest, CancelWhileAsksItsFlag) {
  auto read = start_read();
  const auto canceller = stream_->canceller();
  for (int i = 0; i < 10; ++i) canceller.cancel_while(std::make_shared<const bool>(false));
  ASSERT_TRUE(peer_.send(wire::Type::plan, 9, {}, later()));
  const auto message = read.get();
  ASSERT_TRUE(message) << message.error().to_string();
}

/// Over TCP, where closing with unread bytes resets the connection and drops what is under way.
class EndOfTcp : public MessageStreamTest {
 protected:
  EndOfTcp() {
    asio::ip::tcp::acceptor acceptor(io_, {asio::ip::address_v4::loopback(), 0});
    asio::ip::tcp::socket client(io_);
    client.open(asio::ip::tcp::v4());
    client.set_option(asio::socket_base::receive_buffer_size(8192));  // most of it stays with the sender
    client.connect(acceptor.local_endpoint());
    asio::ip::tcp::socket server(asio::make_strand(io_));
    acceptor.accept(server);
    stream_.emplace(MessageStream::Socket(std::move(server)));
    client.non_blocking(false);
    peer_ = MessageSocket(UniqueFd(client.release()));
  }
  asio::awaitable<Status> say_and_finish(std::size_t bytes) {
    const std::vector<std::byte> payload(bytes);
    auto status = co_await stream_->write(wire::Type::layout, 1, payload, kLong);
    co_await stream_->finish(kLong);
    co_return status;
  }
};

TEST_F(EndOfTcp, FinishLosesNothingThoughRequestsAreUnread) {
  constexpr std::size_t kBytes = 256 << 10;
  ASSERT_TRUE(peer_.send(wire::Type::plan, 1, {}, later()));  // never read as a message
  auto end = start(say_and_finish(kBytes));
  EXPECT_EQ(end.wait_for(50ms), std::future_status::timeout) << "ended before the peer has read";
  const auto message = peer_.recv(wire::kLayoutBytesMax, later());
  ASSERT_TRUE(message) << message.error().to_string();
  EXPECT_EQ(message->payload.size(), kBytes);
  peer_.close();
  EXPECT_TRUE(end.get());
}

TEST_F(EndOfTcp, FinishEndsAtItsLimit) {
  auto end = start([](MessageStream& stream) -> asio::awaitable<Status> {
    co_await stream.finish(kShort);
    co_return Status();
  }(*stream_));
  EXPECT_TRUE(end.get());
}

/// A file in memory with counted words, and permission that can be taken away.
class SendFileTest : public MessageStreamTest, public MessageStream::MaySend {
 protected:
  SendFileTest() : file_(::memfd_create("half", MFD_CLOEXEC)), content_(4u << 20) {
    for (std::size_t i = 0; i < content_.size(); ++i) content_[i] = static_cast<std::byte>(i * 2654435761u >> 13);
    if (::write(file_.get(), content_.data(), content_.size()) != static_cast<ssize_t>(content_.size())) std::abort();
  }
  bool may_send() const override { return permitted_; }

  const UniqueFd file_;
  std::vector<std::byte> content_;
  std::atomic<bool> permitted_{true};
  std::uint64_t sent_ = 0;
};

TEST_F(SendFileTest, SendsExactlyTheRange) {
  const std::uint64_t offset = 12'345;
  const std::uint64_t bytes = 3'000'001;
  auto send = start(stream_->send_file(file_.get(), offset, bytes, *this, kLong, &sent_));
  std::vector<std::byte> got(bytes);
  ASSERT_TRUE(peer_.recv_payload(got, later()));
  const auto status = send.get();
  ASSERT_TRUE(status) << status.error().to_string();
  EXPECT_EQ(sent_, bytes);
  EXPECT_TRUE(std::equal(got.begin(), got.end(), content_.begin() + static_cast<std::ptrdiff_t>(offset)));
}

TEST_F(SendFileTest, RevocationStopsABlockedSender) {
  auto send = start(stream_->send_file(file_.get(), 0, content_.size(), *this, kLong, &sent_));
  // Nobody reads: it blocks with a full socket buffer.
  EXPECT_EQ(send.wait_for(kShort), std::future_status::timeout);
  permitted_ = false;
  const auto inside = std::make_shared<const bool>(true);
  while (send.wait_for(5ms) != std::future_status::ready) stream_->canceller().cancel_while(inside);
  const auto status = send.get();
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code(), Errc::lease_revoked);
  EXPECT_LT(sent_, content_.size());
}

TEST_F(SendFileTest, NothingLeavesWithoutPermission) {
  permitted_ = false;
  const auto status = start(stream_->send_file(file_.get(), 0, 100, *this, kLong, &sent_)).get();
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code(), Errc::lease_revoked);
  EXPECT_EQ(sent_, 0u);
}

TEST_F(SendFileTest, AReaderThatStopsMeetsTheProgressLimit) {
  const auto status = start(stream_->send_file(file_.get(), 0, content_.size(), *this, kShort, &sent_)).get();
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code(), Errc::timed_out);
}

TEST_F(SendFileTest, APeerThatLeftIsAnErrorAndNoSignal) {
  peer_.close();
  const auto gone = start(stream_->send_file(file_.get(), 0, 100, *this, kLong, &sent_)).get();
  ASSERT_FALSE(gone);
  EXPECT_EQ(gone.error().code(), Errc::connection);
}

}  // namespace
}  // namespace deltasync::net
