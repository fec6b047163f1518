#include "net/channel_stream.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>

#include <algorithm>
#include <array>
#include <utility>

#include "net/coroutine.hpp"

namespace deltasync::net {

namespace asio = boost::asio;
using asio::awaitable;
using boost::system::error_code;

namespace {

/// Of a closed socket, whose number may be another file's by now: nothing is tried on it.
class ClosedChannel final : public Channel {
 public:
  Result<Tried> handshake() override { return closed(); }
  bool peer_may_be_plain() const override { return false; }
  Result<Tried> receive(std::span<const iovec>) override { return closed(); }
  Result<Tried> send(std::span<const iovec>) override { return closed(); }
  Result<Tried> send_file(int, off_t, std::size_t) override { return closed(); }
  bool has_input() const override { return false; }
  void say_end() noexcept override {}

 private:
  static Error closed() { return {Errc::connection, "the connection is closed"}; }
};

Error passed(const char* what) {
  return {Errc::timed_out, std::string(what) + ": the deadline passed"};
}

}  // namespace

ChannelStream::ChannelStream(Socket socket)
    : socket_(std::move(socket)),
      channel_(plain_channel(socket_.native_handle())),
      wakes_(socket_.get_executor()),
      timer_(socket_.get_executor()) {
  error_code ignored;
  socket_.native_non_blocking(true, ignored);
}

void ChannelStream::accept_files() {
  file_ = std::make_unique<UniqueFd>();
  channel_ = plain_channel(socket_.native_handle(), file_.get());
}

void ChannelStream::arm(Deadline deadline) {
  deadline_ = deadline.at();
  armed_ = true;
  timed_out_ = false;
  if (!timer_pending_ || deadline_ < timer_at_) start_timer();
}

void ChannelStream::start_timer() {
  timer_pending_ = true;
  timer_at_ = deadline_;
  timer_.expires_at(timer_at_);
  timer_.async_wait([self = shared_from_this(), round = ++timer_round_](error_code) { self->fired(round); });
}

void ChannelStream::fired(std::uint64_t round) {
  if (round != timer_round_) return;  // replaced by an earlier one
  timer_pending_ = false;
  if (!armed_) return;
  if (std::chrono::steady_clock::now() < deadline_) return start_timer();
  timed_out_ = true;
  cancel();
}

void ChannelStream::cancel() {
  error_code ignored;
  socket_.cancel(ignored);
  if (wakes_.is_open()) wakes_.cancel(ignored);
}

void ChannelStream::shut() {
  armed_ = false;
  ++timer_round_;
  timer_.cancel();
  channel_->say_end();
  channel_ = std::make_unique<ClosedChannel>();
  error_code ignored;
  wakes_.close(ignored);
  socket_.shutdown(Socket::shutdown_both, ignored);  // for the peer it would end with the last copy, of forked children
  socket_.close(ignored);
}

/// Waits look at what this channel names from now on.
Status ChannelStream::watch(const Channel& channel) {
  error_code ec;
  wakes_.close(ec);
  if (channel.waits_on() < 0) return {};
  const int copy = ::fcntl(channel.waits_on(), F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return Error::from_errno("a descriptor for a channel", errno);
  wakes_.assign(copy, ec);
  if (!ec) return {};
  ::close(copy);
  return Error::from_errno("a descriptor for a channel", ec.value());
}

Error ChannelStream::error_from(const error_code& ec, const char* what) const {
  if (ec == asio::error::eof) return Error(Errc::connection, std::string(what) + ": the peer closed the connection");
  if (ec == asio::error::operation_aborted) {
    if (timed_out_) return passed(what);
    return Error(Errc::aborted, std::string(what) + ": cancelled");
  }
  if (ec.category() == boost::system::system_category()) return Error::from_errno(what, ec.value());
  return Error(Errc::connection, std::string(what) + ": " + ec.message());
}

awaitable<Status> ChannelStream::wait_as(Tried::Came want, Deadline deadline, const char* what) {
  arm(deadline);
  const auto direction = want == Tried::Came::wants_write ? Socket::wait_write : Socket::wait_read;
  error_code ec;
  if (wakes_.is_open()) {
    ec = std::get<0>(co_await wakes_.async_wait(asio::posix::stream_descriptor::wait_read, kAsTuple));
  } else {
    ec = std::get<0>(co_await socket_.async_wait(direction, kAsTuple));
  }
  disarm();
  if (ec) co_return error_from(ec, what);
  co_return Status();
}

awaitable<void> ChannelStream::give_way() {
  co_await asio::post(socket_.get_executor(), asio::use_awaitable);
}

awaitable<Status> ChannelStream::secure(std::unique_ptr<Channel> channel, Deadline deadline) {
  const Deadline first_word = Deadline::after(deadline.remaining() / 2);
  DS_CO_TRY(watch(*channel));
  for (;;) {
    if (!socket_.is_open()) co_return Error(Errc::connection, "the connection is closed");
    auto tried = channel->handshake();
    if (tried && tried->came == Tried::Came::moved) break;
    const bool unbegun = channel->peer_may_be_plain();
    begun_ = !unbegun;
    const Deadline limit = unbegun ? first_word : deadline;
    Status status = tried ? Status() : Status(std::move(tried).error());
    if (tried) status = co_await wait_as(tried->came, limit, channel->handshake_name());
    if (status) continue;
    if (unbegun) co_return status.error().code() == Errc::timed_out ? speaks_tls_only() : std::move(status).error();
    if (socket_.is_open()) channel_ = std::move(channel);  // in which nothing more can be said
    co_return status;
  }
  channel_ = std::move(channel);
  co_return Status();
}

/// A cancel that comes while a partial read waits to be delivered has nothing to cancel, so the deadline is looked at
/// again before each.
awaitable<Status> ChannelStream::read_exact(MutByteSpan to, Deadline deadline, const char* what) {
  while (!to.empty()) {
    if (deadline.passed()) co_return passed(what);
    DS_CO_ASSIGN(const std::size_t n, co_await read_some(to, deadline, what));
    to = to.subspan(n);
  }
  co_return Status();
}

awaitable<Result<std::size_t>> ChannelStream::read_some(MutByteSpan to, Deadline deadline, const char* what) {
  const iovec piece{to.data(), to.size()};
  for (;;) {
    auto tried = channel_->receive({&piece, 1});
    if (!tried) co_return std::move(tried).error().with_context(what);
    if (tried->came == Tried::Came::moved) {
      bytes_received_ += tried->bytes;
      co_return tried->bytes;
    }
    if (tried->came == Tried::Came::ended) co_return error_from(asio::error::eof, what);
    if (deadline.passed()) co_return passed(what);
    DS_CO_TRY(co_await wait_as(tried->came, deadline, what));
  }
}

awaitable<Result<std::size_t>> ChannelStream::write_some(std::span<const iovec> from, Deadline deadline,
                                                         const char* what) {
  for (;;) {
    auto tried = channel_->send(from);
    if (!tried) co_return std::move(tried).error().with_context(what);
    if (tried->came == Tried::Came::moved) {
      bytes_sent_ += tried->bytes;
      co_return tried->bytes;
    }
    if (deadline.passed()) co_return passed(what);
    DS_CO_TRY(co_await wait_as(tried->came, deadline, what));
  }
}

awaitable<void> ChannelStream::finish(std::chrono::nanoseconds limit) {
  error_code ec;
  channel_->say_end();
  socket_.shutdown(Socket::shutdown_send, ec);
  const Deadline deadline = Deadline::after(limit);
  std::array<std::byte, 16384> discarded;
  while (!ec && !deadline.passed()) {
    // Whatever it says in whatever channel: nobody listens.
    arm(deadline);
    const auto result = co_await socket_.async_read_some(asio::buffer(discarded), kAsTuple);
    disarm();
    ec = std::get<0>(result);
  }
  shut();
}

std::string ChannelStream::peer_name() {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getpeername(fd(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return "unknown peer";
  if (address.ss_family == AF_UNIX) return "unix peer";
  asio::ip::tcp::endpoint endpoint;
  if (size > endpoint.capacity()) return "unknown peer";
  std::copy_n(reinterpret_cast<const char*>(&address), size, reinterpret_cast<char*>(endpoint.data()));
  endpoint.resize(size);
  const std::string host = endpoint.address().to_string();
  return (endpoint.address().is_v6() ? "[" + host + "]" : host) + ":" + std::to_string(endpoint.port());
}

}  // namespace deltasync::net
