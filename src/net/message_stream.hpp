// Message conversations for coroutines, over bytes through a channel, plain or TLS: every operation names its deadline.
// Also the path of full transfers, which hands pages of a file to the socket without a copy in user space.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "base/deadline.hpp"
#include "deltasync/result.hpp"
#include "format/message.hpp"
#include "format/wire.hpp"
#include "net/blocking.hpp"
#include "net/channel.hpp"
#include "net/channel_stream.hpp"

namespace deltasync::net {

/// Used from one strand (or one thread) only: the socket's executor must be that strand, and so must the coroutine's.
/// One read and one write may be in progress at a time only if they share a deadline, so conversations do one thing
/// after the other. After a failure the byte stream has no known position: close and destroy. cancel() may come from
/// anywhere, through canceller().
class MessageStream {
 public:
  using Socket = ChannelStream::Socket;

  /// Bytes cross as they are until secure().
  explicit MessageStream(Socket socket);
  ~MessageStream();
  MessageStream(MessageStream&&) noexcept;
  MessageStream& operator=(MessageStream&&) = delete;

  /// The socket itself, for channels over it.
  int fd() const;
  /// As ChannelStream::secure().
  boost::asio::awaitable<Status> secure(std::unique_ptr<Channel> channel, Deadline deadline);
  /// As Channel's.
  std::string transports() const { return stream_->channel().transports(); }

  /// One whole message. The first byte may take until `idle`; from then on the rest has `message_limit`. Checks the
  /// header's hash before its length, the type's own limit and `payload_bytes_max`, then the payload's hash. Memory
  /// grows with what arrives. `connection` if the peer closed, with "closed" in the message.
  boost::asio::awaitable<Result<Message>> read(std::uint64_t payload_bytes_max, Deadline idle,
                                               std::chrono::nanoseconds message_limit);
  /// The first half of read(): the header and by when the rest has to be there; nothing if no byte came until `idle`.
  boost::asio::awaitable<Result<std::optional<Deadline>>> read_header(wire::MessageParser& message, Deadline idle,
                                                                      std::chrono::nanoseconds message_limit);
  /// The second half, of the same message.
  boost::asio::awaitable<Result<Message>> read_payload(wire::MessageParser& message, std::uint64_t payload_bytes_max,
                                                       Deadline deadline);
  /// read() with one deadline for all of it.
  boost::asio::awaitable<Result<Message>> read_by(std::uint64_t payload_bytes_max, Deadline deadline);

  /// One message. `progress_limit` bounds the time without a byte accepted by the peer's window.
  boost::asio::awaitable<Status> write(wire::Type type, std::uint64_t request, ByteSpan payload,
                                       std::chrono::nanoseconds progress_limit);
  template <class M>
  boost::asio::awaitable<Status> write(std::uint64_t request, const M& message,
                                       std::chrono::nanoseconds progress_limit) {
    const std::vector<std::byte> payload = message.encode();
    co_return co_await write(M::kType, request, payload, progress_limit);
  }

  /// One message with a descriptor (SCM_RIGHTS) for the peer of a Unix socket; it is there with the first byte.
  boost::asio::awaitable<Status> write_with_file(wire::Type type, std::uint64_t request, ByteSpan payload, int file,
                                                 std::chrono::nanoseconds progress_limit);

  /// From now on a descriptor that the peer of a Unix socket sends along is kept; without this the kernel closes it.
  void accept_files();
  /// What came last and has not been taken; none if nothing came.
  UniqueFd take_file() noexcept;

  /// Asked between pieces of what is sent: false = stop.
  class MaySend {
   public:
    virtual ~MaySend() = default;
    virtual bool may_send() const = 0;
  };
  /// Raw bytes in order, e.g. several messages that are ready; the caller has made their headers. lease_revoked when
  /// `permit` (null: none) said stop; part of the bytes may have left then.
  boost::asio::awaitable<Status> write_pieces(std::span<const ByteSpan> pieces, std::chrono::nanoseconds progress_limit,
                                              const MaySend* permit = nullptr);
  /// `bytes` of the file from `offset`, in pieces of ≤ kSendPieceBytes, by sendfile where the channel can.
  /// lease_revoked when `permit` said stop; part of the bytes may have left then, so that the connection can only be
  /// closed. `sent` (never null) counts what the socket took.
  boost::asio::awaitable<Status> send_file(int file, std::uint64_t offset, std::uint64_t bytes, const MaySend& permit,
                                           std::chrono::nanoseconds progress_limit, std::uint64_t* sent);

  /// Cancels whatever the stream is waiting for, from any thread; harmless after the stream's end.
  class Canceller {
   public:
    void cancel() const;
    /// The same if `*still` is true by the time that the stream's strand gets to it; `*still` is that strand's.
    void cancel_while(std::shared_ptr<const bool> still) const;
    /// Closes the stream: what it waits for and all that is tried on it later fails.
    void close() const;

   private:
    friend class MessageStream;
    struct Weak;
    std::shared_ptr<const Weak> weak_;
  };
  Canceller canceller() const;

  /// True when the peer has closed its end, whatever it left to be read. Never blocks.
  bool peer_closed() const;
  /// True when a read would not wait. Never blocks.
  bool has_input() const;
  /// Keepalive probes after `idle` seconds, and no delay for small messages (TCP only, best effort).
  void tune_tcp(int keepalive_idle_s);
  void close();
  /// The end that loses nothing, as ChannelStream::finish().
  boost::asio::awaitable<void> finish(std::chrono::nanoseconds limit);
  std::string peer_name() const;
  boost::asio::any_io_executor executor() const;

  std::uint64_t bytes_sent() const noexcept;
  std::uint64_t bytes_received() const noexcept;
  /// As ChannelStream's.
  bool heard() const noexcept;

 private:
  /// All that the message wants now.
  boost::asio::awaitable<Status> feed(wire::MessageParser& message, Deadline deadline, const char* what);

  std::shared_ptr<ChannelStream> stream_;
};

inline constexpr std::uint64_t kSendPieceBytes = 1u << 20;  ///< a revocation is seen at the next piece

}  // namespace deltasync::net
