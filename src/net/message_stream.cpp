#include "net/message_stream.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <boost/asio/post.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "net/coroutine.hpp"

namespace deltasync::net {

namespace asio = boost::asio;
using asio::awaitable;

namespace {

constexpr std::size_t kPiecesAtOnce = 32;

Error revoked() {
  return {Errc::lease_revoked, "what was being sent is no longer held for this plan"};
}

}  // namespace

struct MessageStream::Canceller::Weak {
  asio::any_io_executor executor;
  std::weak_ptr<ChannelStream> stream;
};

MessageStream::MessageStream(Socket socket) : stream_(std::make_shared<ChannelStream>(std::move(socket))) {}
MessageStream::~MessageStream() {
  if (stream_) stream_->shut();
}
MessageStream::MessageStream(MessageStream&&) noexcept = default;

int MessageStream::fd() const {
  return stream_->fd();
}

void MessageStream::accept_files() {
  stream_->accept_files();
}

UniqueFd MessageStream::take_file() noexcept {
  return stream_->take_file();
}

awaitable<Status> MessageStream::secure(std::unique_ptr<Channel> channel, Deadline deadline) {
  return stream_->secure(std::move(channel), deadline);
}

awaitable<Result<Message>> MessageStream::read(std::uint64_t payload_bytes_max, Deadline idle,
                                               std::chrono::nanoseconds message_limit) {
  wire::MessageParser message;
  DS_CO_ASSIGN(const std::optional<Deadline> deadline, co_await read_header(message, idle, message_limit));
  if (!deadline) co_return Error(Errc::timed_out, "waiting for a message: the deadline passed");
  co_return co_await read_payload(message, payload_bytes_max, *deadline);
}

awaitable<Result<std::optional<Deadline>>> MessageStream::read_header(wire::MessageParser& message, Deadline idle,
                                                                      std::chrono::nanoseconds message_limit) {
  co_await stream_->give_way();
  auto begun = co_await stream_->read_some(message.next(), idle, "waiting for a message");
  if (!begun && begun.error().code() == Errc::timed_out) co_return std::optional<Deadline>();
  if (!begun) co_return std::move(begun).error();
  const Deadline deadline = Deadline::after(message_limit);
  DS_CO_TRY(message.took(*begun));
  DS_CO_TRY(co_await feed(message, deadline, "receiving a message's header"));
  co_return std::optional<Deadline>(deadline);
}

awaitable<Result<Message>> MessageStream::read_by(std::uint64_t payload_bytes_max, Deadline deadline) {
  wire::MessageParser message;
  co_await stream_->give_way();
  DS_CO_TRY(co_await feed(message, deadline, "waiting for a message"));
  co_return co_await read_payload(message, payload_bytes_max, deadline);
}

awaitable<Result<Message>> MessageStream::read_payload(wire::MessageParser& message, std::uint64_t payload_bytes_max,
                                                       Deadline deadline) {
  DS_CO_TRY(message.allow_payload(payload_bytes_max));
  DS_CO_TRY(co_await feed(message, deadline, "receiving a message's payload"));
  co_return std::move(message).take();
}

awaitable<Status> MessageStream::feed(wire::MessageParser& message, Deadline deadline, const char* what) {
  for (MutByteSpan to = message.next(); !to.empty(); to = message.next()) {
    DS_CO_TRY(co_await stream_->read_exact(to, deadline, what));
    DS_CO_TRY(message.took(to.size()));
  }
  co_return Status();
}

awaitable<Status> MessageStream::write(wire::Type type, std::uint64_t request, ByteSpan payload,
                                       std::chrono::nanoseconds progress_limit) {
  const wire::Header header = wire::make_header(type, request, payload);
  if (payload.size() > wire::payload_bytes_max(header.type)) {
    co_return Error(Errc::internal, wire::describe(header) + " with " + std::to_string(payload.size()) +
                                        " bytes is over its limit of " +
                                        std::to_string(wire::payload_bytes_max(header.type)));
  }
  const std::array<ByteSpan, 2> pieces{bytes_of(header), payload};
  co_return co_await write_pieces(pieces, progress_limit);
}

awaitable<Status> MessageStream::write_with_file(wire::Type type, std::uint64_t request, ByteSpan payload, int file,
                                                 std::chrono::nanoseconds progress_limit) {
  const wire::Header header = wire::make_header(type, request, payload);
  for (;;) {
    const ssize_t n = send_with_file(stream_->fd(), bytes_of(header), file);
    if (n > 0) {
      stream_->count_sent(static_cast<std::uint64_t>(n));
      const std::array<ByteSpan, 2> rest{bytes_of(header).subspan(static_cast<std::size_t>(n)), payload};
      co_return co_await write_pieces(rest, progress_limit);
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) co_return Error::from_errno("sending a descriptor", errno);
    DS_CO_TRY(co_await stream_->wait_as(Tried::Came::wants_write, Deadline::after(progress_limit), "sending"));
  }
}

awaitable<Status> MessageStream::write_pieces(std::span<const ByteSpan> pieces, std::chrono::nanoseconds progress_limit,
                                              const MaySend* permit) {
  ChannelStream& s = *stream_;
  std::size_t done = 0;    // pieces that are out
  std::size_t offset = 0;  // bytes of the next one that are out
  for (;;) {
    std::array<iovec, kPiecesAtOnce> now;
    std::size_t used = 0;
    for (std::size_t i = done; i < pieces.size() && used < now.size(); ++i) {
      const ByteSpan rest = pieces[i].subspan(i == done ? offset : 0);
      if (!rest.empty()) now[used++] = {const_cast<std::byte*>(rest.data()), rest.size()};
    }
    if (used == 0) co_return Status();
    co_await s.give_way();
    if (permit != nullptr && !permit->may_send()) co_return revoked();
    auto tried = s.channel().send({now.data(), used});
    if (!tried) co_return std::move(tried).error().with_context("sending");
    if (tried->came != Tried::Came::moved) {
      const auto ready = co_await s.wait_as(tried->came, Deadline::after(progress_limit), "sending");
      // A revocation wakes the wait by cancelling it: say why.
      if (!ready && ready.error().code() == Errc::aborted && permit != nullptr && !permit->may_send()) {
        co_return revoked();
      }
      DS_CO_TRY(ready);
      continue;
    }
    std::size_t left = tried->bytes;
    s.count_sent(left);
    while (done < pieces.size() && left >= pieces[done].size() - offset) {
      left -= pieces[done].size() - offset;
      offset = 0;
      ++done;
    }
    offset += left;
  }
}

awaitable<Status> MessageStream::send_file(int file, std::uint64_t offset, std::uint64_t bytes, const MaySend& permit,
                                           std::chrono::nanoseconds progress_limit, std::uint64_t* sent) {
  ChannelStream& s = *stream_;
  std::uint64_t left = bytes;
  while (left > 0) {
    if (!permit.may_send()) co_return revoked();
    DS_CO_ASSIGN(const Tried tried, s.channel().send_file(file, static_cast<off_t>(offset + bytes - left),
                                                          static_cast<std::size_t>(std::min(left, kSendPieceBytes))));
    if (tried.came == Tried::Came::moved) {
      left -= tried.bytes;
      *sent += tried.bytes;
      s.count_sent(tried.bytes);
      continue;
    }
    auto ready = co_await s.wait_as(tried.came, Deadline::after(progress_limit), "the peer does not read");
    if (!ready) {
      // A revocation wakes the wait by cancelling it: say why.
      if (ready.error().code() == Errc::aborted && !permit.may_send()) continue;
      co_return ready;
    }
  }
  co_return Status();
}

void MessageStream::Canceller::cancel() const {
  asio::post(weak_->executor, [weak = weak_->stream] {
    if (const auto stream = weak.lock()) stream->cancel();
  });
}

void MessageStream::Canceller::cancel_while(std::shared_ptr<const bool> still) const {
  asio::post(weak_->executor, [weak = weak_->stream, still = std::move(still)] {
    const auto stream = weak.lock();
    if (stream && *still) stream->cancel();
  });
}

void MessageStream::Canceller::close() const {
  asio::post(weak_->executor, [weak = weak_->stream] {
    if (const auto stream = weak.lock()) stream->shut();
  });
}

MessageStream::Canceller MessageStream::canceller() const {
  Canceller canceller;
  canceller.weak_ = std::make_shared<const Canceller::Weak>(Canceller::Weak{executor(), stream_});
  return canceller;
}

bool MessageStream::peer_closed() const {
  return poll_now(fd(), POLLRDHUP) != 0;
}

bool MessageStream::has_input() const {
  return stream_->channel().has_input();
}

void MessageStream::tune_tcp(int keepalive_idle_s) {
  const int fd = stream_->fd();
  const int one = 1;
  const int interval_s = 10;
  const int probes = 3;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &keepalive_idle_s, sizeof keepalive_idle_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

void MessageStream::close() {
  stream_->shut();
}

awaitable<void> MessageStream::finish(std::chrono::nanoseconds limit) {
  return stream_->finish(limit);
}

std::string MessageStream::peer_name() const {
  return stream_->peer_name();
}

asio::any_io_executor MessageStream::executor() const {
  return stream_->executor();
}
std::uint64_t MessageStream::bytes_sent() const noexcept {
  return stream_->bytes_sent();
}
std::uint64_t MessageStream::bytes_received() const noexcept {
  return stream_->bytes_received();
}
bool MessageStream::heard() const noexcept {
  return stream_->heard();
}

}  // namespace deltasync::net
