// One authenticated connection to an agent: the handshake, then whole messages, and extents that land where they
// belong. Counts every byte that arrives. Used by one thread.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "deltasync/result.hpp"
#include "format/wire.hpp"
#include "format/wire_report.hpp"
#include "net/blocking.hpp"
#include "receiver/peer.hpp"

namespace deltasync::receiver {

class Connection {
 public:
  Connection() = default;

  /// Connects without a word. `connection`, `timed_out` or `cancelled`; the same stop ends what follows, too.
  static Result<Connection> dial(const Peer& peer, const CallContext& until);
  /// TLS if the peer has it, then hello, auth, welcome. With a token the agent has to prove that it knows it too:
  /// `unauthenticated` if not, or if its certificate is not what it must be.
  /// `connection`, with turned_away(), if the agent is there and has no place.
  Status handshake(const Peer& peer, wire::Role role, Deadline deadline);

  /// From now on this stop ends every wait of the connection with `cancelled`, and no earlier one does.
  void stop_on(const std::stop_token& stop) { socket_.stop_on(stop); }
  bool open() const noexcept { return socket_.open(); }
  /// The peer has hung up; nothing may be expected of this connection any more.
  bool stale() const { return socket_.peer_closed(); }
  /// The agent itself said in the handshake that it cannot take us now: others may have a place, or it later.
  bool turned_away() const noexcept { return turned_away_; }
  std::chrono::milliseconds silence() const noexcept { return silence_; }
  /// The agent has this side's own address, and the clock of this host: it is no proxy's.
  bool same_host() const;
  /// UCX's that carry the bytes of this connection, "posix/memory"; empty: TCP does.
  std::string transports() const { return socket_.transports(); }
  /// Random per agent process.
  std::uint64_t instance() const noexcept { return instance_; }
  const wire::Welcome& welcome() const noexcept { return welcome_; }
  /// What both sides speak, from the handshake on.
  std::uint16_t protocol() const noexcept { return protocol_; }
  std::uint64_t next_request() noexcept { return ++last_request_; }

  template <class M>
  Status send(std::uint64_t request, const M& message, Deadline deadline) {
    return socket_.send(request, message, deadline);
  }
  Status send(wire::Type type, std::uint64_t request, Deadline deadline) {
    return socket_.send(type, request, {}, deadline);
  }
  /// Words that the agent is there are passed over.
  Result<wire::Header> recv_header(Deadline deadline);
  /// The payload after a header, hash checked. Fails when no byte comes for `silence`, or at the deadline.
  Result<std::vector<std::byte>> recv_payload(const wire::Header& header, Deadline deadline);
  /// As above, into `to`, which has exactly the payload's size.
  Status recv_payload(const wire::Header& header, MutByteSpan to, Deadline deadline);
  /// Fills all of `pieces` (which it uses up). No hash: the caller verifies tiles.
  Status recv_scattered(std::span<iovec> pieces, Deadline deadline);

  /// How far behind the agent's newest version `held` is; only an agent of protocol 5 knows the question.
  Result<wire::Lag> lag(const VersionId& held, Deadline deadline);

  std::uint64_t bytes_sent() const noexcept { return socket_.bytes_sent(); }
  std::uint64_t bytes_received() const noexcept { return socket_.bytes_received(); }
  /// Time spent in waiting for bytes; see net::MessageSocket.
  std::chrono::nanoseconds waited() const noexcept { return socket_.waited(); }
  void skip_next_wait() noexcept { socket_.skip_next_wait(); }

 private:
  Status recv_some(MutByteSpan to, Deadline deadline);
  Status go_over_ucx(net::ucx::Ucx& ucx, Deadline deadline);

  net::MessageSocket socket_;
  std::chrono::milliseconds silence_{0};
  std::shared_ptr<net::Pulse> pulse_;  ///< as Peer's, of an agent that says that it is there; null: it does not
  std::string host_;                   ///< whose certificate it must be
  std::uint64_t instance_ = 0;
  std::uint16_t protocol_ = wire::kProtocolVersion;
  std::uint64_t last_request_ = 0;
  bool turned_away_ = false;
  wire::Welcome welcome_;
};

/// What an agent said in an `error` message.
Error agent_error(ByteSpan payload);
using wire::unexpected;

}  // namespace deltasync::receiver
