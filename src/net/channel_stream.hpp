// Bytes through a channel, for coroutines: a socket, what lies between it and a conversation (nothing, or TLS), and a
// watchdog beside both. What the bytes mean (messages, pages) is its user's.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/bytes.hpp"
#include "base/deadline.hpp"
#include "deltasync/result.hpp"
#include "net/channel.hpp"

namespace deltasync::net {

/// Owned by a shared_ptr, and used on the socket's executor only: one strand, or one thread. Every operation names its
/// deadline; one at a time waits. `what` is a literal, for errors: timed_out past the deadline, aborted after cancel(),
/// connection if the peer left.
class ChannelStream : public std::enable_shared_from_this<ChannelStream> {
 public:
  using Socket = boost::asio::generic::stream_protocol::socket;

  /// Bytes cross as they are until secure().
  explicit ChannelStream(Socket socket);

  /// The handshake of a channel over fd(), through which everything goes from then on. A server's peer that says
  /// nothing for half of the time that is left gets no more, so that it can still be told why: if the handshake fails
  /// before the peer has begun its part, bytes go on crossing as they are.
  boost::asio::awaitable<Status> secure(std::unique_ptr<Channel> channel, Deadline deadline);

  /// At least one byte.
  boost::asio::awaitable<Result<std::size_t>> read_some(MutByteSpan to, Deadline deadline, const char* what);
  boost::asio::awaitable<Status> read_exact(MutByteSpan to, Deadline deadline, const char* what);
  /// At least one byte; repeated with what is left, as a channel wants it.
  boost::asio::awaitable<Result<std::size_t>> write_some(std::span<const iovec> from, Deadline deadline,
                                                         const char* what);
  /// Until the socket is ready for what a channel wants.
  boost::asio::awaitable<Status> wait_as(Tried::Came want, Deadline deadline, const char* what);
  /// Other conversations of the same thread have their turn: a peer whose messages always wait for us, and who always
  /// takes our answers, never makes us wait.
  boost::asio::awaitable<void> give_way();
  /// The end that loses nothing: tells the peer that nothing follows, then discards what it still says until it closes
  /// too or `limit` has passed. Closing with unread bytes would reset the connection, and a reset throws away what
  /// has been sent and not yet read.
  boost::asio::awaitable<void> finish(std::chrono::nanoseconds limit);

  /// What is waited for fails.
  void cancel();
  /// Closes: what is waited for and all that is tried later fails.
  void shut();

  /// From now on a descriptor that the peer of a Unix socket sends along is kept, the last of several. Before secure().
  void accept_files();
  UniqueFd take_file() noexcept { return file_ ? std::move(*file_) : UniqueFd(); }

  Channel& channel() noexcept { return *channel_; }
  int fd() { return socket_.native_handle(); }  ///< none of any file once it is closed
  boost::asio::any_io_executor executor() { return socket_.get_executor(); }
  std::string peer_name();
  void count_sent(std::uint64_t bytes) noexcept { bytes_sent_ += bytes; }
  std::uint64_t bytes_sent() const noexcept { return bytes_sent_; }
  std::uint64_t bytes_received() const noexcept { return bytes_received_; }
  /// The peer has said a byte, if only one of a handshake.
  bool heard() const noexcept { return begun_ || bytes_received_ != 0; }

 private:
  Status watch(const Channel& channel);
  void arm(Deadline deadline);
  void disarm() { armed_ = false; }
  void start_timer();
  void fired(std::uint64_t round);
  Error error_from(const boost::system::error_code& ec, const char* what) const;

  Socket socket_;
  std::unique_ptr<UniqueFd> file_;               // set: one may come along; what came and was not taken
  std::unique_ptr<Channel> channel_;             // over the socket
  boost::asio::posix::stream_descriptor wakes_;  // a copy of what the channel waits on; closed: on the socket
  // The timer is armed lazily: while deadlines only move on, as they do from message to message, it is left alone and
  // looks at the newest deadline when it fires.
  boost::asio::steady_timer timer_;
  std::chrono::steady_clock::time_point deadline_{};
  std::chrono::steady_clock::time_point timer_at_{};
  std::uint64_t timer_round_ = 0;
  bool timer_pending_ = false;
  bool armed_ = false;
  bool timed_out_ = false;
  bool begun_ = false;  // by the peer: a handshake
  std::uint64_t bytes_sent_ = 0;
  std::uint64_t bytes_received_ = 0;
};

}  // namespace deltasync::net
