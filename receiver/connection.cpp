#include "receiver/connection.hpp"

#include <algorithm>
#include <utility>

#include "base/trace.hpp"
#include "format/handshake.hpp"
#include "format/wire_ucx.hpp"
#include "net/auth.hpp"
#include "net/local_token.hpp"

namespace deltasync::receiver {
namespace {

constexpr std::size_t kStepBytes = 256u << 10;  ///< the silence limit applies to each

/// One message of this type; an `error` answer becomes that error.
Result<net::Message> recv_message(net::MessageSocket& socket, wire::Type type, Deadline deadline) {
  DS_ASSIGN(net::Message message, socket.recv(wire::kControlBytesMax, deadline));
  if (message.type() == wire::Type::error) return agent_error(message.payload);
  if (message.type() != type) return unexpected(message.header, 0);
  return message;
}

}  // namespace

Error agent_error(ByteSpan payload) {
  auto said = wire::ErrorMessage::decode(payload);
  if (!said) return std::move(said).error();
  return Error(said->code, "the agent says: " + said->message);
}

Result<Connection> Connection::dial(const Peer& peer, const CallContext& until) {
  const Address& to = peer.address();
  DS_ASSIGN(UniqueFd fd, net::connect_tcp(to.host, to.port, until));
  Connection c;
  c.socket_ = net::MessageSocket(std::move(fd));
  c.socket_.stop_on(until.stop());
  c.silence_ = peer.tuning.silence;
  c.host_ = to.host;
  return c;
}

Status Connection::handshake(const Peer& peer, wire::Role role, Deadline deadline) {
  if (peer.tls) {
    DS_ASSIGN(auto channel, peer.tls->channel(socket_.fd(), host_));
    DS_TRY(socket_.secure(std::move(channel), deadline));
  }
  auto hello_message = recv_message(socket_, wire::Type::hello, deadline);
  if (!hello_message && socket_.bytes_received() == 0 && hello_message.error().code() != Errc::cancelled) {
    return std::move(hello_message)
        .error()
        .with_context(
            "no word came: an agent that is stopped or has too much to do, or another address of it than "
            "that for receivers (--listen), such as that of its pages (--http)");
  }
  DS_ASSIGN(const net::Message first, std::move(hello_message));
  DS_ASSIGN(protocol_, wire::agree_on_protocol(first.header, first.payload, "the agent"));
  DS_ASSIGN(const wire::Hello hello, wire::decode_handshake<wire::Hello>(first.payload, "the agent"));
  std::string token = peer.token;
  if (token.empty()) {
    auto found = net::find_local_token(socket_.fd());
    if (!found) return socket_.broken(std::move(found).error());  // by a stop, it may be
    token = *std::move(found);
  }
  if (hello.auth_required != 0 && token.empty()) {
    return Error(
        Errc::unauthenticated,
        "the agent wants a token and none was given; only for programs of the agent's user on the agent's host "
        "there is one that needs not be given");
  }
  wire::Auth auth;
  auth.protocol = protocol_;
  auth.role = role;
  auth.name = peer.name;
  auth.nonce = net::make_nonce();
  auth.proof = net::client_proof(token, hello.nonce, auth.nonce, role);
  const std::uint64_t sent_ns = trace::now_ns();
  DS_TRY(socket_.send(0, auth, deadline));
  DS_ASSIGN(const net::Message answer, socket_.recv(wire::kControlBytesMax, deadline));
  if (answer.type() == wire::Type::error) {
    Error said = agent_error(answer.payload);
    turned_away_ = said.code() == Errc::connection;
    return said;
  }
  if (answer.type() != wire::Type::welcome) return unexpected(answer.header, 0);
  DS_ASSIGN(welcome_, wire::decode_handshake<wire::Welcome>(answer.payload, "the agent"));
  const std::uint64_t received_ns = trace::now_ns();
  if (!token.empty() && !net::equal_proofs(welcome_.proof, net::server_proof(token, auth.nonce, hello.nonce))) {
    return Error(Errc::unauthenticated,
                 "the agent did not prove that it knows the token: agent and receiver need the same");
  }
  instance_ = hello.instance;
  trace::add_clock_sample({welcome_.clock, sent_ns, received_ns, welcome_.clock_ns});
  if (peer.pulse && protocol_ >= 5) {
    const wire::KeepAlive asked{static_cast<std::uint32_t>(peer.tuning.alive.count())};
    DS_TRY(socket_.send(next_request(), asked, deadline));
    pulse_ = peer.pulse;
    socket_.follow(pulse_);
  }
  if (role != wire::Role::data || peer.address().transport != net::Transport::ucx || !peer.ucx) return {};
  return go_over_ucx(*peer.ucx, deadline).with_context("UCX");
}

/// Both sides have proved who they are by now: nobody else is told where this process is reached.
Status Connection::go_over_ucx(net::ucx::Ucx& ucx, Deadline deadline) {
  if (protocol_ < 5) {
    return Error(Errc::unsupported, "the agent is of an earlier protocol, without UCX: pull over TCP, without ucx://");
  }
  DS_ASSIGN(auto link, ucx.offer());
  const std::uint64_t request = next_request();
  DS_TRY(
      socket_.send(request, wire::OpenUcx{link->offer().id, link->offer().version, link->offer().address}, deadline));
  DS_ASSIGN(wire::UcxOpened opened, socket_.recv_as<wire::UcxOpened>(request, deadline));
  net::ucx::Offer agents{opened.id, opened.version, std::move(opened.address)};
  DS_TRY(ucx.accepts(agents));
  auto channel = ucx.channel(socket_.fd(), std::move(link), std::move(agents));
  return socket_.secure(std::move(channel), deadline);
}

bool Connection::same_host() const {
  return welcome_.clock == trace::clock_id() && net::has_own_address(socket_.fd());
}

Result<wire::Header> Connection::recv_header(Deadline deadline) {
  for (;;) {
    auto header = socket_.recv_header(deadline);
    const bool alive = header && header->type == static_cast<std::uint16_t>(wire::Type::alive);
    if (!alive || header->payload_bytes != 0) return header;
    // Where such words always wait, nothing above comes to wait for them.
    if (deadline.passed()) return Error(Errc::timed_out, "the agent says that an answer comes, and none has come");
    if (pulse_) pulse_->be_quick();
  }
}

Result<wire::Lag> Connection::lag(const VersionId& held, Deadline deadline) {
  const std::uint64_t request = next_request();
  DS_TRY(send(request, wire::GetLag{held}, deadline));
  DS_ASSIGN(const wire::Header header, recv_header(deadline));
  const auto type = static_cast<wire::Type>(header.type);
  if (header.request != request || (type != wire::Type::error && type != wire::Type::lag)) {
    return unexpected(header, request);
  }
  DS_ASSIGN(const auto payload, recv_payload(header, deadline));
  if (type == wire::Type::error) return agent_error(payload);
  return wire::Lag::decode(payload);
}

Status Connection::recv_some(MutByteSpan to, Deadline deadline) {
  while (!to.empty()) {
    const std::size_t step = std::min(to.size(), kStepBytes);
    DS_TRY(socket_.recv_payload(to.first(step), deadline.earlier(Deadline::after(silence_))));
    to = to.subspan(step);
  }
  return {};
}

Result<std::vector<std::byte>> Connection::recv_payload(const wire::Header& header, Deadline deadline) {
  wire::MessageParser message(header);
  Status taken = message.allow_payload(header.payload_bytes);
  for (MutByteSpan to = message.next(); taken && !to.empty(); to = message.next()) {
    DS_TRY(recv_some(to, deadline));
    taken = message.took(to.size());
  }
  if (!taken) return socket_.broken(std::move(taken).error());
  return std::move(message).take().payload;
}

Status Connection::recv_payload(const wire::Header& header, MutByteSpan to, Deadline deadline) {
  DS_TRY(recv_some(to, deadline));
  auto whole = wire::check_payload(header, to);
  return whole ? whole : socket_.broken(std::move(whole).error());
}

Status Connection::recv_scattered(std::span<iovec> pieces, Deadline deadline) {
  while (!pieces.empty()) {
    // Where bytes always wait, nothing below comes to wait for them.
    if (deadline.passed()) {
      return socket_.broken(Error(Errc::timed_out, "the deadline passed in the middle of an extent"));
    }
    DS_ASSIGN(std::size_t left, socket_.recv_some(pieces, deadline.earlier(Deadline::after(silence_))));
    while (!pieces.empty() && left >= pieces.front().iov_len) {
      left -= pieces.front().iov_len;
      pieces = pieces.subspan(1);
    }
    if (left > 0) {
      pieces.front().iov_base = static_cast<std::byte*>(pieces.front().iov_base) + left;
      pieces.front().iov_len -= left;
    }
  }
  return {};
}

}  // namespace deltasync::receiver
