#include "net/blocking.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

namespace deltasync::net {
namespace {

timespec to_timespec(std::chrono::nanoseconds ns) {
  timespec t{};
  t.tv_sec = static_cast<std::time_t>(ns.count() / 1'000'000'000);
  t.tv_nsec = static_cast<long>(ns.count() % 1'000'000'000);
  return t;
}

/// Waits until the socket is readable or writable. An error or hang-up counts as ready: the next call will say which.
/// `process` is of a ProcessWatch on the peer, or -1.
Status wait_for(int fd, short events, Deadline deadline, const char* what, int process = -1) {
  for (;;) {
    pollfd p[] = {{fd, events, 0}, {process, POLLIN, 0}};
    const timespec left = to_timespec(deadline.remaining());
    const int n = ::ppoll(p, 2, &left, nullptr);
    // What it said just before it died counts.
    if (n > 0 && (p[0].revents != 0 || poll_now(fd, events) != 0)) return {};
    if (n > 0) return Error(Errc::connection, "the peer's process has died");
    if (n == 0) return Error(Errc::timed_out, what);
    if (errno != EINTR) return Error::from_errno("poll", errno);
  }
}

/// Finishes a connect() that was started on a non-blocking socket.
Status finish_connect(int fd, Deadline deadline) {
  DS_TRY(wait_for(fd, POLLOUT, deadline, "no answer to connect"));
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) return Error::from_errno("getsockopt", errno);
  if (error != 0) return Error::from_errno("connect", error);
  return {};
}

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

Result<Addresses> ask_resolver(const std::string& host, const std::string& service, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* list = nullptr;
  const int rc = ::getaddrinfo(host.c_str(), service.c_str(), &hints, &list);
  if (rc == EAI_SYSTEM) return Error::from_errno("resolve " + host, errno);
  if (rc != 0) return Error(Errc::connection, "resolve " + host + ": " + ::gai_strerror(rc));
  return Addresses(list);
}

/// What a look-up and its caller share; the last of them frees it.
struct Lookup {
  std::mutex mutex;
  std::condition_variable_any done;
  std::optional<Result<Addresses>> answer;  // protected by mutex
};

/// getaddrinfo knows no deadline, so that a name is looked up on a thread that may outlive its caller.
Result<Addresses> resolve(const std::string& host, std::uint16_t port, const CallContext& until) {
  const std::string service = std::to_string(port);
  if (auto numeric = ask_resolver(host, service, AI_NUMERICHOST)) return numeric;
  auto lookup = std::make_shared<Lookup>();
  try {
    std::thread([lookup, host, service] {
      auto answer = ask_resolver(host, service, 0);
      const std::lock_guard lock(lookup->mutex);
      lookup->answer = std::move(answer);
      lookup->done.notify_all();
    }).detach();
  } catch (const std::system_error& e) {
    return Error(Errc::no_space, "resolve " + host + ": no thread: " + e.code().message());
  }
  std::unique_lock lock(lookup->mutex);
  lookup->done.wait_until(lock, until.stop(), until.deadline().at(), [&] { return lookup->answer.has_value(); });
  if (lookup->answer) return std::move(*lookup->answer);
  if (until.stop_requested()) return cancelled_while("resolving " + host);
  return Error(Errc::timed_out, "resolving " + host);
}

Result<UniqueFd> connect_address(const addrinfo& address, const CallContext& until) {
  UniqueFd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, address.ai_protocol));
  if (!fd) return Error::from_errno("socket", errno);
  if (::connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return Error::from_errno("connect", errno);
    // Only a socket that is connecting already can be shut down: from here on, not before.
    const ShutDown wake(until.stop(), fd.get());
    if (auto connected = finish_connect(fd.get(), until.deadline()); !connected) {
      if (until.stop_requested() && connected.error().code() == Errc::connection) return cancelled_while("connecting");
      return std::move(connected).error();
    }
  }
  const int on = 1;
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return fd;
}

Result<Tried> try_with_file(int socket, ByteSpan bytes, int file) {
  for (;;) {
    const ssize_t sent = net::send_with_file(socket, bytes, file);
    if (sent >= 0) return Tried::moved(static_cast<std::size_t>(sent));
    if (errno == EAGAIN) return Tried{Tried::Came::wants_write};
    if (errno != EINTR) return Error::from_errno("send a descriptor", errno);
  }
}

}  // namespace

Result<UniqueFd> make_unix_socket(const std::string& path, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return Error(Errc::invalid_argument, "socket path '" + path + "' has " + std::to_string(path.size()) +
                                             " bytes; 1 to " + std::to_string(sizeof address.sun_path - 1) +
                                             " are possible");
  }
  std::copy(path.begin(), path.end(), address.sun_path);
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return Error::from_errno("socket", errno);
  return fd;
}

Result<UniqueFd> connect_unix(const std::string& path, const CallContext& until) {
  sockaddr_un address;
  DS_ASSIGN(UniqueFd fd, make_unix_socket(path, address));
  for (;;) {
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return fd;
    if (errno == ENOENT || errno == ECONNREFUSED) {
      // connect() says the same of a file that will never be a socket.
      struct stat found {};
      if (::stat(path.c_str(), &found) == 0 && !S_ISSOCK(found.st_mode)) {
        return Error(Errc::invalid_argument, path + " is not a socket");
      }
      return Error(Errc::connection, "nobody listens on " + path);
    }
    // The listener's backlog is full: a Unix socket offers nothing to poll for, so ask again.
    if (errno != EAGAIN && errno != EINTR) return Error::from_errno("connect to " + path, errno);
    DS_TRY(until.check("connecting to " + path));
    until.pause(std::chrono::milliseconds(5));
  }
}

Result<UniqueFd> connect_tcp(const std::string& host, std::uint16_t port, const CallContext& until) {
  const std::string where = host + ":" + std::to_string(port);
  DS_ASSIGN(const Addresses list, resolve(host, port, until));
  Error last(Errc::connection, "connect to " + where + ": no address");
  int left = 0;
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) ++left;
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    // One that says nothing leaves the others their parts of the time.
    auto fd = connect_address(*a, until.earlier(Deadline::after(until.deadline().remaining() / left--)));
    if (fd) return fd;
    last = std::move(fd).error().with_context("connect to " + where);
    if (!until.check("connecting")) break;  // what the address itself said is the better reason
  }
  return last;
}

bool has_own_address(int fd) noexcept {
  sockaddr_storage own{};
  sockaddr_storage peer{};
  socklen_t own_size = sizeof own;
  socklen_t peer_size = sizeof peer;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) != 0) return false;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0) return false;
  if (own.ss_family != peer.ss_family) return false;
  if (own.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(own).sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(peer).sin_addr.s_addr;
  }
  return own.ss_family == AF_INET6 && IN6_ARE_ADDR_EQUAL(&reinterpret_cast<const sockaddr_in6&>(own).sin6_addr,
                                                         &reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr);
}

void use_no_pacing(int fd) noexcept {
  constexpr std::string_view kReno = "reno";  // in every kernel, and allowed to everybody
  ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kReno.data(), kReno.size());
}

void ShutDown::Call::operator()() const noexcept {
  ::shutdown(fd, SHUT_RDWR);
}

MessageSocket::MessageSocket(UniqueFd fd) : fd_(std::move(fd)) {
  if (!fd_) return;
  const int flags = ::fcntl(fd_.get(), F_GETFL);
  if (flags >= 0) ::fcntl(fd_.get(), F_SETFL, flags | O_NONBLOCK);
  channel_ = plain_channel(fd_.get());
}

MessageSocket& MessageSocket::operator=(MessageSocket&& other) noexcept {
  if (this == &other) return *this;
  close();
  shut_down_ = std::move(other.shut_down_);
  stop_ = std::move(other.stop_);
  channel_ = std::move(other.channel_);
  fd_ = std::move(other.fd_);
  pulse_ = std::move(other.pulse_);
  process_ = std::move(other.process_);
  bytes_sent_ = other.bytes_sent_;
  bytes_received_ = other.bytes_received_;
  waited_ = other.waited_;
  skip_wait_ = other.skip_wait_;
  last_words_ = std::move(other.last_words_);
  file_ = std::move(other.file_);
  return *this;
}

void MessageSocket::accept_files() {
  if (!fd_) return;
  file_ = std::make_unique<UniqueFd>();
  channel_ = plain_channel(fd_.get(), file_.get());
}

MessageSocket::~MessageSocket() {
  close();
}

void MessageSocket::close() noexcept {
  shut_down_.reset();
  if (fd_ && channel_) channel_->say_end();
  channel_.reset();
  fd_.reset();
}

void MessageSocket::end_sending() noexcept {
  if (!fd_) return;
  channel_->say_end();
  ::shutdown(fd_.get(), SHUT_WR);
}

Status MessageSocket::wait_on(const Channel& channel, Tried::Came want, Deadline deadline, const char* what) const {
  const int fd = channel.waits_on() >= 0 ? channel.waits_on() : fd_.get();
  return wait_for(fd, want == Tried::Came::wants_write ? POLLOUT : POLLIN, deadline, what, process_fd());
}

Status MessageSocket::wait_as(Tried::Came want, Deadline deadline, const char* what) const {
  return wait_on(*channel_, want, deadline, what);
}

Status MessageSocket::wait_for_peer(Tried::Came want, Deadline deadline) const {
  const char* const what = "waiting for the peer's message";
  if (!pulse_) return wait_as(want, deadline, what);
  const auto began = Pulse::Clock::now();
  for (;;) {
    const Deadline gone(pulse_->gone_at(began));
    Status ready = wait_as(want, deadline.earlier(gone), what);
    if (ready || ready.error().code() != Errc::timed_out || deadline.passed()) return ready;
    if (Deadline(pulse_->gone_at(began)).passed()) {
      return Error(Errc::timed_out,
                   "the peer has fallen silent: no word for " + std::to_string(pulse_->patience().count()) + " ms");
    }
  }
}

Status MessageSocket::secure(std::unique_ptr<Channel> channel, Deadline deadline) {
  if (!fd_) return broken(Error(Errc::connection, "the connection is closed"));
  const Deadline first_word = Deadline::after(deadline.remaining() / 2);
  for (;;) {
    auto tried = channel->handshake();
    if (tried && tried->came == Tried::Came::moved) break;
    const bool unbegun = channel->peer_may_be_plain();
    Status status = tried ? wait_on(*channel, tried->came, unbegun ? first_word : deadline, channel->handshake_name())
                          : Status(std::move(tried).error());
    if (status) continue;
    if (!unbegun) return broken(std::move(status).error());
    return status.error().code() == Errc::timed_out ? speaks_tls_only() : std::move(status).error();
  }
  channel_ = std::move(channel);
  return {};
}

void MessageSocket::stop_on(const std::stop_token& stop) {
  shut_down_.reset();
  stop_ = stop;
  if (fd_ && stop_.stop_possible()) shut_down_ = std::make_unique<ShutDown>(stop_, fd_.get());
}

Error MessageSocket::broken(Error error) {
  close();
  if (error.code() == Errc::connection && stop_.stop_requested()) return cancelled_while("speaking with the peer");
  return error;
}

/// They may lie still on this side of the connection.
void MessageSocket::hear_last_words() {
  for (;;) {
    const auto said = recv(wire::kControlBytesMax, Deadline::after({}));
    if (!said) return;
    if (said->type() != wire::Type::error) continue;
    if (auto why = wire::ErrorMessage::decode(said->payload)) last_words_ = Error(why->code, why->message);
    return;
  }
}

Status MessageSocket::send(wire::Type type, std::uint64_t request, ByteSpan payload, Deadline deadline) {
  return send_parts(type, request, payload, -1, deadline);
}

Status MessageSocket::send_with_file(wire::Type type, std::uint64_t request, ByteSpan payload, int file,
                                     Deadline deadline) {
  return send_parts(type, request, payload, file, deadline);
}

Status MessageSocket::send_parts(wire::Type type, std::uint64_t request, ByteSpan payload, int file,
                                 Deadline deadline) {
  if (!fd_) return broken(Error(Errc::connection, "the connection is closed"));
  const wire::Header header = wire::make_header(type, request, payload);
  if (payload.size() > wire::payload_bytes_max(header.type)) {
    return Error(Errc::invalid_argument, wire::describe(header) + " with " + std::to_string(payload.size()) +
                                             " bytes is over its limit of " +
                                             std::to_string(wire::payload_bytes_max(header.type)));
  }
  ByteSpan parts[] = {bytes_of(header), payload};
  while (!parts[0].empty() || !parts[1].empty()) {
    iovec pieces[2];
    std::size_t used = 0;
    for (const ByteSpan part : parts) {
      if (!part.empty()) pieces[used++] = {const_cast<std::byte*>(part.data()), part.size()};
    }
    auto tried = file < 0 ? channel_->send({pieces, used}) : try_with_file(fd_.get(), parts[0], file);
    if (!tried) {
      if (tried.error().code() == Errc::connection) hear_last_words();
      return broken(std::move(tried).error());
    }
    if (tried->came != Tried::Came::moved) {
      if (auto ready = wait_as(tried->came, deadline, "the peer does not read"); !ready) {
        return broken(std::move(ready).error());
      }
      continue;
    }
    file = -1;  // it left with the first byte
    std::size_t left = tried->bytes;
    bytes_sent_ += left;
    for (ByteSpan& part : parts) {
      const std::size_t taken = std::min(left, part.size());
      part = part.subspan(taken);
      left -= taken;
    }
  }
  return {};
}

Result<std::size_t> MessageSocket::receive(std::span<const iovec> pieces, Deadline deadline) {
  for (;;) {
    DS_ASSIGN(const Tried tried, channel_->receive(pieces));
    if (tried.came == Tried::Came::ended) return std::size_t{0};
    if (tried.came == Tried::Came::moved) {
      bytes_received_ += tried.bytes;
      skip_wait_ = false;
      if (pulse_) pulse_->heard();
      return tried.bytes;
    }
    const auto before = std::chrono::steady_clock::now();
    auto ready = wait_for_peer(tried.came, deadline);
    if (!skip_wait_) waited_ += std::chrono::steady_clock::now() - before;
    if (!ready) return std::move(ready).error();
  }
}

Status MessageSocket::recv_exact(MutByteSpan to, bool at_message_start, Deadline deadline) {
  if (!fd_) return broken(Error(Errc::connection, "the connection is closed"));
  std::size_t done = 0;
  while (done < to.size()) {
    const iovec piece{to.data() + done, to.size() - done};
    auto received = receive({&piece, 1}, deadline);
    const bool between = at_message_start && done == 0;
    if (!received) {
      if (between && received.error().code() == Errc::timed_out) return std::move(received).error();
      return broken(std::move(received).error());
    }
    if (*received == 0) {
      return broken(Error(Errc::connection,
                          between ? "the peer closed the connection" : "the peer closed in the middle of a message"));
    }
    done += *received;
  }
  return {};
}

Result<std::size_t> MessageSocket::recv_some(std::span<const iovec> pieces, Deadline deadline) {
  if (!fd_) return broken(Error(Errc::connection, "the connection is closed"));
  auto received = receive(pieces, deadline);
  if (!received) return broken(std::move(received).error());
  if (*received == 0) return broken(Error(Errc::connection, "the peer closed in the middle of a message"));
  return received;
}

Status MessageSocket::feed(wire::MessageParser& message, bool at_message_start, Deadline deadline) {
  for (MutByteSpan to = message.next(); !to.empty(); to = message.next()) {
    DS_TRY(recv_exact(to, at_message_start, deadline));
    if (auto taken = message.took(to.size()); !taken) return broken(std::move(taken).error());
  }
  return {};
}

Result<wire::Header> MessageSocket::recv_header(Deadline deadline) {
  wire::MessageParser message;
  DS_TRY(feed(message, true, deadline));
  return message.header();
}

Status MessageSocket::recv_payload(MutByteSpan to, Deadline deadline) {
  return recv_exact(to, false, deadline);
}

Result<Message> MessageSocket::recv(std::uint64_t payload_bytes_max, Deadline deadline) {
  wire::MessageParser message;
  DS_TRY(feed(message, true, deadline));
  if (auto allowed = message.allow_payload(payload_bytes_max); !allowed) return broken(std::move(allowed).error());
  DS_TRY(feed(message, false, deadline));
  return std::move(message).take();
}

Result<Message> MessageSocket::recv_answer(std::uint64_t request, wire::Type type, Deadline deadline) {
  const std::uint64_t limit =
      std::max(wire::payload_bytes_max(static_cast<std::uint16_t>(type)), wire::kControlBytesMax);
  DS_ASSIGN(Message message, recv(limit, deadline));
  while (message.header.request < request && message.header.request != 0) {
    DS_ASSIGN(message, recv(limit, deadline));
  }
  if (message.type() == wire::Type::error) {
    auto sent = wire::ErrorMessage::decode(message.payload);
    if (!sent) return broken(std::move(sent).error());
    return Error(sent->code, sent->message);
  }
  if (message.type() != type || message.header.request != request) {
    return broken(Error(Errc::protocol, "expected a message of type " + std::string(wire::to_string(type)) +
                                            " for request " + std::to_string(request) + ", got one of type " +
                                            wire::type_name(message.header.type) + " for request " +
                                            std::to_string(message.header.request)));
  }
  return message;
}

bool MessageSocket::peer_closed() const {
  return !fd_ || poll_now(fd_.get(), POLLRDHUP) != 0 || (process_ && process_->dead());
}

}  // namespace deltasync::net
