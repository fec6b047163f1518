// What lies between a conversation and its socket, which does not block: nothing, TLS, or UCX beside it. A channel
// tries once and says what came of it; who waits, for how long, and how (a thread or a coroutine) is the conversation's
// business.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/bytes.hpp"
#include "base/fd.hpp"
#include "deltasync/result.hpp"

namespace deltasync::net {

/// What one try came to.
struct Tried {
  enum class Came : std::uint8_t {
    moved,        ///< `bytes` bytes, at least one; a handshake: it is done
    wants_read,   ///< try again when the socket is readable, or what waits_on() names
    wants_write,  ///< try again when it is writable
    ended,        ///< the peer said that nothing follows
  };
  Came came;
  std::size_t bytes = 0;

  static Tried moved(std::size_t bytes) { return {Came::moved, bytes}; }
};

/// Borrows the socket. Used by one thread at a time. After an error, and after a try to send that was not repeated with
/// the same bytes until they had moved, nothing more can be said or heard.
class Channel {
 public:
  virtual ~Channel() = default;

  /// Before anything else: repeated until it has moved.
  virtual Result<Tried> handshake() = 0;
  virtual const char* handshake_name() const { return "waiting for the TLS handshake"; }  ///< for errors
  /// A server's peer that has not begun a handshake: it may be one that speaks no TLS, and waits for a plain word.
  virtual bool peer_may_be_plain() const = 0;
  /// In place of the socket: readable when another try may come to more than the last. -1: the socket itself.
  virtual int waits_on() const { return -1; }
  /// What carries its bytes once the handshake is done, for reports; empty: the socket does.
  virtual std::string transports() const { return {}; }

  virtual Result<Tried> receive(std::span<const iovec> to) = 0;
  virtual Result<Tried> send(std::span<const iovec> from) = 0;
  /// At most `bytes` of the file from `offset`. `io` if the file ends before.
  virtual Result<Tried> send_file(int file, off_t offset, std::size_t bytes) = 0;

  /// receive() would not have to wait for the socket. Never blocks.
  virtual bool has_input() const = 0;
  /// Tells the peer, as far as this can be done without waiting, that this side says nothing more.
  virtual void say_end() noexcept = 0;
};

/// Bytes as they are. `file`, if not null, outlives the channel and takes the descriptor that comes along over a Unix
/// socket, the last of several; without it the kernel lets none through.
std::unique_ptr<Channel> plain_channel(int fd, UniqueFd* file = nullptr);

/// As ::send(), and never waits: how many bytes left a Unix socket, the descriptor with the first of them (SCM_RIGHTS).
ssize_t send_with_file(int socket, ByteSpan bytes, int file) noexcept;

/// What a peer is told that does not begin a handshake where one is due.
Error speaks_tls_only();

/// Does not block: what poll() says of the events now.
short poll_now(int fd, short events) noexcept;

}  // namespace deltasync::net
