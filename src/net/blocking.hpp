// One message conversation over a connected stream socket (Unix or TCP), for threads that may block: the trainer's
// side of the agent's Unix socket and a receiver's control conversation. Every call ends at its deadline. Needs no
// Boost, so that the trainer's process does not load it.
#pragma once

#include <sys/un.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>

#include "base/bytes.hpp"
#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "base/fd.hpp"
#include "base/process.hpp"
#include "deltasync/result.hpp"
#include "format/message.hpp"
#include "format/wire.hpp"
#include "net/channel.hpp"
#include "net/pulse.hpp"

namespace deltasync::net {

/// A stream socket, non-blocking and close-on-exec, bound to nothing yet; and the address that `path` is.
/// `invalid_argument` if it is empty or too long.
Result<UniqueFd> make_unix_socket(const std::string& path, sockaddr_un& address);
/// A stream socket, non-blocking and close-on-exec. `connection` if nobody listens there, `invalid_argument` if `path`
/// is another kind of file or too long, `timed_out`.
Result<UniqueFd> connect_unix(const std::string& path, const CallContext& until);
/// Tries each address of `host` in turn, none for longer than its part of the time; name resolution is bounded too.
/// TCP_NODELAY is set. `cancelled` soon after a stop is requested.
Result<UniqueFd> connect_tcp(const std::string& host, std::uint16_t port, const CallContext& until);

/// While it lives, a requested stop shuts the socket down, which wakes every thread that waits on it and fails what is
/// tried on it from then on. A stop requested before counts. Destroy it before the descriptor is closed: the
/// destructor waits for a shutdown that is under way, so that no other file that gets the same number is hit.
class ShutDown {
 public:
  ShutDown(std::stop_token stop, int fd) : callback_(std::move(stop), Call{fd}) {}

 private:
  struct Call {
    int fd;
    void operator()() const noexcept;
  };
  std::stop_callback<Call> callback_;
};

/// Both ends of a connected TCP socket have one address: the peer is on this host, and in this network namespace.
bool has_own_address(int fd) noexcept;

using wire::Message;

/// For a TCP socket that will speak over loopback, before it connects or listens (accepted sockets inherit it): a
/// congestion control without pacing. One that paces, as BBR does, costs a timer for every 64 KiB where nothing can be
/// congested. Best effort.
void use_no_pacing(int fd) noexcept;

/// Not thread-safe. After a failure inside a message the byte stream has no known position any more: the socket is
/// closed and every later call fails with `connection`. A recv that timed out before the first byte leaves it usable.
/// Once the stop given to stop_on() is requested, calls fail with `cancelled` where they would have to wait.
class MessageSocket {
 public:
  MessageSocket() = default;
  /// Takes a connected socket of any kind and makes it non-blocking. Bytes cross as they are until secure().
  explicit MessageSocket(UniqueFd fd);
  ~MessageSocket();
  MessageSocket(MessageSocket&&) noexcept = default;
  MessageSocket& operator=(MessageSocket&& other) noexcept;

  bool open() const noexcept { return static_cast<bool>(fd_); }
  int fd() const noexcept { return fd_.get(); }
  void close() noexcept;
  /// Nothing more will be sent, and the peer is told; what it says can still be received.
  void end_sending() noexcept;

  /// The handshake of a channel over fd(), through which everything goes from then on. A server's peer that says
  /// nothing for half of the time that is left gets no more, so that it can still be told why: if the handshake fails
  /// before the peer has begun its part, bytes go on crossing as they are.
  Status secure(std::unique_ptr<Channel> channel, Deadline deadline);

  /// From now on this stop ends the conversation, and no earlier one; none if it cannot be requested.
  void stop_on(const std::stop_token& stop);
  /// From now on what comes counts for the peer's pulse, and who waits for a word of a peer that is gone by that fails
  /// with `timed_out`. One of several connections.
  void follow(std::shared_ptr<Pulse> pulse) { pulse_ = std::move(pulse); }
  /// From now on the conversation ends with this process too, whose forked child may keep the connection open: once it
  /// is dead, and what it said has been heard, calls that would have to wait fail with `connection`. None: it cannot be
  /// watched.
  void watch(std::optional<ProcessWatch> peer) { process_ = std::move(peer); }
  /// Of the watched process, for poll: readable once it is dead; -1 if there is none.
  int process_fd() const noexcept { return process_ ? process_->fd() : -1; }
  /// The `error` that the peer said before it closed, if that was found out by a send, which fails with `connection`.
  const std::optional<Error>& last_words() const noexcept { return last_words_; }
  /// Closes; returns the error, or `cancelled` in its place if it is only what the stop made of the connection.
  Error broken(Error error);

  Status send(wire::Type type, std::uint64_t request, ByteSpan payload, Deadline deadline);
  template <class M>
  Status send(std::uint64_t request, const M& message, Deadline deadline) {
    return send(M::kType, request, message.encode(), deadline);
  }

  /// The same with a descriptor for the peer of a Unix socket, over which bytes cross as they are.
  Status send_with_file(wire::Type type, std::uint64_t request, ByteSpan payload, int file, Deadline deadline);

  /// One whole message. Checks the header (its hash before its length), the type's own limit, `payload_bytes_max`,
  /// and the payload's hash (an `extent` has none). Memory grows with what arrives, not with what a header claims.
  Result<Message> recv(std::uint64_t payload_bytes_max, Deadline deadline);
  /// The two halves of recv, for payloads that land in the caller's memory. The caller checks the payload's hash.
  Result<wire::Header> recv_header(Deadline deadline);
  Status recv_payload(MutByteSpan to, Deadline deadline);
  /// At least one byte of a payload, into the first of `pieces`, which are not all empty; fails at the deadline.
  Result<std::size_t> recv_some(std::span<const iovec> pieces, Deadline deadline);

  /// Receives a message of type M that answers `request`; late answers to earlier ones are passed over. An `error`
  /// answer becomes that Error; anything else is `protocol`.
  template <class M>
  Result<M> recv_as(std::uint64_t request, Deadline deadline) {
    DS_ASSIGN(const Message message, recv_answer(request, M::kType, deadline));
    return M::decode(message.payload);
  }
  /// The same for a bare type (`end`, `trainer_plan_ok`).
  Result<Message> recv_answer(std::uint64_t request, wire::Type type, Deadline deadline);

  /// From now on a descriptor that the peer of a Unix socket sends along (SCM_RIGHTS) is kept. Without this the kernel
  /// closes it.
  void accept_files();
  /// What came last and has not been taken; none if nothing came.
  UniqueFd take_file() noexcept { return file_ ? std::move(*file_) : UniqueFd(); }

  /// True when the peer has closed its end or its watched process is dead, whatever it left to be read. Never blocks.
  bool peer_closed() const;

  /// As Channel's.
  std::string transports() const { return channel_ ? channel_->transports() : std::string(); }

  std::uint64_t bytes_sent() const noexcept { return bytes_sent_; }
  std::uint64_t bytes_received() const noexcept { return bytes_received_; }
  /// Time spent in waiting for bytes to receive.
  std::chrono::nanoseconds waited() const noexcept { return waited_; }
  /// Does not count the wait for the next byte: the peer has just been asked, and has to hear it first.
  void skip_next_wait() noexcept { skip_wait_ = true; }

 private:
  Status send_parts(wire::Type type, std::uint64_t request, ByteSpan payload, int file, Deadline deadline);
  void hear_last_words();
  Status recv_exact(MutByteSpan to, bool at_message_start, Deadline deadline);
  /// All that the message wants now.
  Status feed(wire::MessageParser& message, bool at_message_start, Deadline deadline);
  /// Bytes, or none at the peer's end. What is tried again has waited for the socket first.
  Result<std::size_t> receive(std::span<const iovec> pieces, Deadline deadline);
  Status wait_on(const Channel& channel, Tried::Came want, Deadline deadline, const char* what) const;
  Status wait_as(Tried::Came want, Deadline deadline, const char* what) const;
  Status wait_for_peer(Tried::Came want, Deadline deadline) const;

  UniqueFd fd_;
  std::unique_ptr<UniqueFd> file_;    // set: that one may come along; what came and was not taken
  std::unique_ptr<Channel> channel_;  // over fd_
  std::shared_ptr<Pulse> pulse_;      // null: none
  std::optional<ProcessWatch> process_;
  std::stop_token stop_;
  std::unique_ptr<ShutDown> shut_down_;  // after fd_, so that it goes first
  std::uint64_t bytes_sent_ = 0;
  std::uint64_t bytes_received_ = 0;
  std::chrono::nanoseconds waited_{0};
  bool skip_wait_ = false;
  std::optional<Error> last_words_;
};

}  // namespace deltasync::net
