#include "net/message_stream.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/sendfile.h>
#include <sys/socket.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

#include <algorithm>
#include <array>
#include <cerrno>

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

MutByteSpan bytes_in(wire::Header& header) {
  return {reinterpret_cast<std::byte*>(&header), sizeof header};
}

}  // namespace

/// The socket and the watchdog. The timer is armed lazily: while deadlines only move on, as they do from message to
/// message, it is left alone and looks at the newest deadline when it fires.
struct MessageStream::State : std::enable_shared_from_this<State> {
  explicit State(Socket s) : socket(std::move(s)), timer(socket.get_executor()) {}

  Socket socket;
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
    error_code ignored;
    socket.close(ignored);
  }

  short ready_now(short events) {
    pollfd look{socket.native_handle(), events, 0};
    while (::poll(&look, 1, 0) < 0 && errno == EINTR) {
    }
    return look.revents;
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
    arm(limit);
    const auto result = co_await socket.async_read_some(asio::buffer(to.data(), to.size()), kAsTuple);
    disarm();
    bytes_received += std::get<1>(result);
    if (std::get<0>(result)) co_return error_from(std::get<0>(result), what);
    co_return std::get<1>(result);
  }
  awaitable<Status> wait_writable(std::chrono::nanoseconds progress_limit) {
    arm(Deadline::after(progress_limit));
    const auto result = co_await socket.async_wait(Socket::wait_write, kAsTuple);
    disarm();
    if (std::get<0>(result)) co_return error_from(std::get<0>(result), "the peer does not read");
    co_return Status();
  }
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

awaitable<Status> MessageStream::write_pieces(std::span<const ByteSpan> pieces, std::chrono::nanoseconds progress_limit,
                                              const MaySend* permit) {
  State& s = *state_;
  std::size_t done = 0;    // pieces that are out
  std::size_t offset = 0;  // bytes of the next one that are out
  for (;;) {
    std::array<asio::const_buffer, kPiecesAtOnce> buffers;
    std::size_t used = 0;
    for (std::size_t i = done; i < pieces.size() && used < buffers.size(); ++i) {
      const std::size_t skip = i == done ? offset : 0;
      buffers[used++] = asio::const_buffer(pieces[i].data() + skip, pieces[i].size() - skip);
    }
    if (used == 0) co_return Status();
    if (permit != nullptr && !permit->may_send()) co_return revoked();
    s.arm(Deadline::after(progress_limit));
    const std::span<const asio::const_buffer> now(buffers.data(), used);
    const auto result = co_await s.socket.async_write_some(now, kAsTuple);
    s.disarm();
    std::size_t left = std::get<1>(result);
    s.bytes_sent += left;
    if (const error_code ec = std::get<0>(result); ec) {
      // A revocation wakes the wait by cancelling it: say why.
      if (ec == asio::error::operation_aborted && permit != nullptr && !permit->may_send()) co_return revoked();
      co_return s.error_from(ec, "sending");
    }
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
  auto at = static_cast<off_t>(offset);
  std::uint64_t left = bytes;
  while (left > 0) {
    if (!permit.may_send()) co_return revoked();
    const ssize_t n =
        ::sendfile(s.socket.native_handle(), file, &at, static_cast<std::size_t>(std::min(left, kSendPieceBytes)));
    if (n > 0) {
      left -= static_cast<std::uint64_t>(n);
      *sent += static_cast<std::uint64_t>(n);
      s.bytes_sent += static_cast<std::uint64_t>(n);
      continue;
    }
    if (n == 0) co_return Error(Errc::io, "sendfile: the segment's file ends early");
    if (errno == EINTR) continue;
    if (errno != EAGAIN) co_return Error::from_errno("sendfile", errno);
    if (auto ready = co_await s.wait_writable(progress_limit); !ready) {
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
  return state_->ready_now(POLLRDHUP) != 0;
}

bool MessageStream::has_input() const {
  return state_->ready_now(POLLIN) != 0;
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
  s.socket.shutdown(Socket::shutdown_send, ec);
  const Deadline deadline = Deadline::after(limit);
  std::array<std::byte, 4096> discarded;
  while (!ec && !deadline.passed()) {
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
