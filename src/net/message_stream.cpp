#include "net/message_stream.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/hash.hpp"
#include "net/coroutine.hpp"

namespace deltasync::net {

namespace asio = boost::asio;
using asio::awaitable;
using boost::system::error_code;

namespace {

constexpr std::size_t kReceiveStep = 4u << 20;  ///< bytes: a payload buffer never grows further ahead of its data
constexpr std::size_t kPiecesAtOnce = 32;

std::string describe(const wire::Header& header) {
  return "a message of type " + wire::type_name(header.type);
}

Error revoked() {
  return {Errc::lease_revoked, "what was being sent is no longer held for this plan"};
}

/// As send(): how many bytes left, the descriptor with them.
ssize_t send_with_file(int socket, ByteSpan bytes, int file) {
  iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof file)> control{};
  msghdr m{};
  m.msg_iov = &piece;
  m.msg_iovlen = 1;
  m.msg_control = control.data();
  m.msg_controllen = control.size();
  cmsghdr* const along = CMSG_FIRSTHDR(&m);
  along->cmsg_level = SOL_SOCKET;
  along->cmsg_type = SCM_RIGHTS;
  along->cmsg_len = CMSG_LEN(sizeof file);
  std::memcpy(CMSG_DATA(along), &file, sizeof file);
  return ::sendmsg(socket, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
}

MutByteSpan bytes_in(wire::Header& header) {
  return {reinterpret_cast<std::byte*>(&header), sizeof header};
}

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

}  // namespace

/// The socket and the watchdog. The timer is armed lazily: while deadlines only move on, as they do from message to
/// message, it is left alone and looks at the newest deadline when it fires.
struct MessageStream::State : std::enable_shared_from_this<State> {
  explicit State(Socket s)
      : socket(std::move(s)), channel(plain_channel(socket.native_handle())), timer(socket.get_executor()) {}

  Socket socket;
  std::unique_ptr<Channel> channel;  // over the socket
  asio::steady_timer timer;
  Deadline::Clock::time_point deadline{};
  Deadline::Clock::time_point timer_at{};
  std::uint64_t timer_round = 0;
  bool timer_pending = false;
  bool armed = false;
  bool timed_out = false;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;

  void arm(Deadline d) {
    deadline = d.at();
    armed = true;
    timed_out = false;
    if (!timer_pending || deadline < timer_at) start_timer();
  }
  void disarm() { armed = false; }

  void start_timer() {
    timer_pending = true;
    timer_at = deadline;
    timer.expires_at(timer_at);
    timer.async_wait([self = shared_from_this(), round = ++timer_round](error_code) { self->fired(round); });
  }
  void fired(std::uint64_t round) {
    if (round != timer_round) return;  // replaced by an earlier one
    timer_pending = false;
    if (!armed) return;
    if (Deadline::Clock::now() < deadline) return start_timer();
    timed_out = true;
    cancel();
  }
  void cancel() {
    error_code ignored;
    socket.cancel(ignored);
  }
  void shut() {
    armed = false;
    ++timer_round;
    timer.cancel();
    channel->say_end();
    channel = std::make_unique<ClosedChannel>();
    error_code ignored;
    socket.close(ignored);
  }

  Error error_from(const error_code& ec, const char* what) const {
    if (ec == asio::error::eof) return Error(Errc::connection, std::string(what) + ": the peer closed the connection");
    if (ec == asio::error::operation_aborted) {
      if (timed_out) return Error(Errc::timed_out, std::string(what) + ": the deadline passed");
      return Error(Errc::aborted, std::string(what) + ": cancelled");
    }
    if (ec.category() == boost::system::system_category()) return Error::from_errno(what, ec.value());
    return Error(Errc::connection, std::string(what) + ": " + ec.message());
  }

  /// Read by read: a cancel that comes while a partial read waits to be delivered has nothing to cancel, so the
  /// deadline is looked at again before each.
  awaitable<Status> read_exact(MutByteSpan to, Deadline limit, const char* what) {
    while (!to.empty()) {
      if (limit.passed()) co_return Error(Errc::timed_out, std::string(what) + ": the deadline passed");
      DS_CO_ASSIGN(const std::size_t n, co_await read_some(to, limit, what));
      to = to.subspan(n);
    }
    co_return Status();
  }
  awaitable<Result<std::size_t>> read_some(MutByteSpan to, Deadline limit, const char* what) {
    const iovec piece{to.data(), to.size()};
    for (;;) {
      auto tried = channel->receive({&piece, 1});
      if (!tried) co_return std::move(tried).error().with_context(what);
      if (tried->came == Tried::Came::moved) {
        bytes_received += tried->bytes;
        co_return tried->bytes;
      }
      if (tried->came == Tried::Came::ended) co_return error_from(asio::error::eof, what);
      if (limit.passed()) co_return Error(Errc::timed_out, std::string(what) + ": the deadline passed");
      DS_CO_TRY(co_await wait_as(tried->came, limit, what));
    }
  }
  awaitable<Status> wait_as(Tried::Came wish, Deadline limit, const char* what) {
    arm(limit);
    const auto result =
        co_await socket.async_wait(wish == Tried::Came::wants_write ? Socket::wait_write : Socket::wait_read, kAsTuple);
    disarm();
    if (std::get<0>(result)) co_return error_from(std::get<0>(result), what);
    co_return Status();
  }
  /// Other conversations of the same thread have their turn: a peer whose messages always wait for us, and who always
  /// takes our answers, never makes us wait.
  awaitable<void> give_way() { co_await asio::post(socket.get_executor(), asio::use_awaitable); }
};

struct MessageStream::Canceller::Weak {
  asio::any_io_executor executor;
  std::weak_ptr<State> state;
};

MessageStream::MessageStream(Socket socket) : state_(std::make_shared<State>(std::move(socket))) {
  error_code ignored;
  state_->socket.native_non_blocking(true, ignored);
}
MessageStream::~MessageStream() {
  if (state_) state_->shut();
}
MessageStream::MessageStream(MessageStream&&) noexcept = default;

int MessageStream::fd() const {
  return state_->socket.native_handle();  // none of any file once it is closed
}

awaitable<Status> MessageStream::secure(std::unique_ptr<Channel> channel, Deadline deadline) {
  const Deadline first_word = Deadline::after(deadline.remaining() / 2);
  for (;;) {
    if (!state_->socket.is_open()) co_return Error(Errc::connection, "the connection is closed");
    auto tried = channel->handshake();
    if (tried && tried->came == Tried::Came::moved) break;
    const bool unbegun = channel->peer_may_be_plain();
    Status status = tried ? Status() : Status(std::move(tried).error());
    if (tried) {
      status = co_await state_->wait_as(tried->came, unbegun ? first_word : deadline, "waiting for the TLS handshake");
    }
    if (status) continue;
    if (unbegun) co_return status.error().code() == Errc::timed_out ? speaks_tls_only() : std::move(status).error();
    state_->channel = std::move(channel);  // in which nothing more can be said
    co_return status;
  }
  state_->channel = std::move(channel);
  co_return Status();
}

awaitable<Result<Message>> MessageStream::read(std::uint64_t payload_bytes_max, Deadline idle,
                                               std::chrono::nanoseconds message_limit) {
  Message message;
  DS_CO_ASSIGN(const std::optional<Deadline> deadline, co_await read_header(message.header, idle, message_limit));
  if (!deadline) co_return Error(Errc::timed_out, "waiting for a message: the deadline passed");
  DS_CO_TRY(co_await read_payload(message, payload_bytes_max, *deadline));
  co_return message;
}

awaitable<Result<std::optional<Deadline>>> MessageStream::read_header(wire::Header& header, Deadline idle,
                                                                      std::chrono::nanoseconds message_limit) {
  const MutByteSpan head = bytes_in(header);
  co_await state_->give_way();
  auto begun = co_await state_->read_some(head, idle, "waiting for a message");
  if (!begun && begun.error().code() == Errc::timed_out) co_return std::optional<Deadline>();
  if (!begun) co_return std::move(begun).error();
  const Deadline deadline = Deadline::after(message_limit);
  DS_CO_TRY(co_await state_->read_exact(head.subspan(*begun), deadline, "receiving a message's header"));
  DS_CO_TRY(wire::check_header(header));
  co_return std::optional<Deadline>(deadline);
}

awaitable<Result<Message>> MessageStream::read_by(std::uint64_t payload_bytes_max, Deadline deadline) {
  Message message;
  co_await state_->give_way();
  DS_CO_TRY(co_await state_->read_exact(bytes_in(message.header), deadline, "waiting for a message"));
  DS_CO_TRY(wire::check_header(message.header));
  DS_CO_TRY(co_await read_payload(message, payload_bytes_max, deadline));
  co_return message;
}

awaitable<Status> MessageStream::read_payload(Message& message, std::uint64_t payload_bytes_max, Deadline deadline) {
  const std::uint64_t bytes = message.header.payload_bytes;
  if (bytes > payload_bytes_max) {
    co_return Error(Errc::protocol, describe(message.header) + " claims " + std::to_string(bytes) + " bytes where " +
                                        std::to_string(payload_bytes_max) + " are allowed");
  }
  while (message.payload.size() < bytes) {
    const std::size_t at = message.payload.size();
    const auto step = static_cast<std::size_t>(std::min<std::uint64_t>(bytes - at, kReceiveStep));
    message.payload.resize(at + step);
    const MutByteSpan next = MutByteSpan(message.payload).subspan(at);
    DS_CO_TRY(co_await state_->read_exact(next, deadline, "receiving a message's payload"));
  }
  if (message.type() != wire::Type::extent && xxh3_64(message.payload) != message.header.payload_hash) {
    co_return Error(Errc::corrupt, "payload hash of " + describe(message.header));
  }
  co_return Status();
}

awaitable<Status> MessageStream::write(wire::Type type, std::uint64_t request, ByteSpan payload,
                                       std::chrono::nanoseconds progress_limit) {
  const wire::Header header = wire::make_header(type, request, payload);
  if (payload.size() > wire::payload_bytes_max(header.type)) {
    co_return Error(Errc::internal, describe(header) + " with " + std::to_string(payload.size()) +
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
    const ssize_t n = send_with_file(state_->socket.native_handle(), bytes_of(header), file);
    if (n > 0) {
      state_->bytes_sent += static_cast<std::uint64_t>(n);
      const std::array<ByteSpan, 2> rest{bytes_of(header).subspan(static_cast<std::size_t>(n)), payload};
      co_return co_await write_pieces(rest, progress_limit);
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) co_return Error::from_errno("sending a descriptor", errno);
    DS_CO_TRY(co_await state_->wait_as(Tried::Came::wants_write, Deadline::after(progress_limit), "sending"));
  }
}

awaitable<Status> MessageStream::write_pieces(std::span<const ByteSpan> pieces, std::chrono::nanoseconds progress_limit,
                                              const MaySend* permit) {
  State& s = *state_;
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
    auto tried = s.channel->send({now.data(), used});
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
    s.bytes_sent += left;
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
  State& s = *state_;
  std::uint64_t left = bytes;
  while (left > 0) {
    if (!permit.may_send()) co_return revoked();
    DS_CO_ASSIGN(const Tried tried, s.channel->send_file(file, static_cast<off_t>(offset + bytes - left),
                                                         static_cast<std::size_t>(std::min(left, kSendPieceBytes))));
    if (tried.came == Tried::Came::moved) {
      left -= tried.bytes;
      *sent += tried.bytes;
      s.bytes_sent += tried.bytes;
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
  asio::post(weak_->executor, [weak = weak_->state] {
    if (const auto state = weak.lock()) state->cancel();
  });
}

void MessageStream::Canceller::cancel_while(std::shared_ptr<const bool> still) const {
  asio::post(weak_->executor, [weak = weak_->state, still = std::move(still)] {
    const auto state = weak.lock();
    if (state && *still) state->cancel();
  });
}

void MessageStream::Canceller::close() const {
  asio::post(weak_->executor, [weak = weak_->state] {
    if (const auto state = weak.lock()) state->shut();
  });
}

MessageStream::Canceller MessageStream::canceller() const {
  Canceller canceller;
  canceller.weak_ = std::make_shared<const Canceller::Weak>(Canceller::Weak{executor(), state_});
  return canceller;
}

bool MessageStream::peer_closed() const {
  return poll_now(fd(), POLLRDHUP) != 0;
}

bool MessageStream::has_input() const {
  return state_->channel->has_input();
}

void MessageStream::tune_tcp(int keepalive_idle_s) {
  const int fd = state_->socket.native_handle();
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
  state_->shut();
}

awaitable<void> MessageStream::finish(std::chrono::nanoseconds limit) {
  State& s = *state_;
  error_code ec;
  s.channel->say_end();
  s.socket.shutdown(Socket::shutdown_send, ec);
  const Deadline deadline = Deadline::after(limit);
  std::array<std::byte, 4096> discarded;
  while (!ec && !deadline.passed()) {
    // Whatever it says in whatever channel: nobody listens.
    s.arm(deadline);
    const auto result = co_await s.socket.async_read_some(asio::buffer(discarded), kAsTuple);
    s.disarm();
    ec = std::get<0>(result);
  }
  s.shut();
}

std::string MessageStream::peer_name() const {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  const int fd = state_->socket.native_handle();
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "unknown peer";
  if (address.ss_family == AF_UNIX) return "unix peer";
  asio::ip::tcp::endpoint endpoint;
  if (size > endpoint.capacity()) return "unknown peer";
  std::copy_n(reinterpret_cast<const char*>(&address), size, reinterpret_cast<char*>(endpoint.data()));
  endpoint.resize(size);
  const std::string host = endpoint.address().to_string();
  return (endpoint.address().is_v6() ? "[" + host + "]" : host) + ":" + std::to_string(endpoint.port());
}

asio::any_io_executor MessageStream::executor() const {
  return state_->socket.get_executor();
}
std::uint64_t MessageStream::bytes_sent() const noexcept {
  return state_->bytes_sent;
}
std::uint64_t MessageStream::bytes_received() const noexcept {
  return state_->bytes_received;
}

}  // namespace deltasync::net
