// UCX for channels: the process's library, its context and progress threads. Addresses are told over a channel's
// socket, which stays: its end is the peer's, a stop shuts it down, and what is said over it is how the byte streams
// end.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/fork_guard.hpp"
#include "deltasync/result.hpp"
#include "net/channel.hpp"
#include "net/ucx/library.hpp"
#include "net/ucx/link.hpp"
#include "net/ucx/progress.hpp"

namespace deltasync::net::ucx {

/// As the environment says: DELTASYNC_UCX_LIBRARY and DELTASYNC_UCX_TRANSPORTS. What UCX itself does is said in UCX's
/// own variables (UCX_TLS, UCX_NET_DEVICES).
struct Options {
  std::string library = "libucp.so.0";
  std::vector<std::string> transports;  ///< that may carry channels; empty: any
  bool loopback = false;                ///< its network transports listen on loopback alone

  static Result<Options> from_environment(bool loopback);
};

/// Any thread.
class Ucx : public std::enable_shared_from_this<Ucx> {
 public:
  static Result<std::shared_ptr<Ucx>> open(Options options);
  /// What channels of this process that are reached alike share until it ends, by the environment as it was for the
  /// first.
  /// `unsupported` in a child that was forked off while its parent had one.
  static Result<std::shared_ptr<Ucx>> share(bool loopback);
  ~Ucx();
  Ucx(const Ucx&) = delete;
  Ucx& operator=(const Ucx&) = delete;

  /// One end of a channel to be. Takes some milliseconds.
  Result<std::shared_ptr<Link>> offer();
  /// `unsupported` unless the other side's libucp is of this version: ask before channel().
  Status accepts(const Offer& peer) const;
  /// Borrows the socket, over which both sides have said all they had to. Its handshake is done once bytes cross, by a
  /// transport that may carry them.
  std::unique_ptr<Channel> channel(int fd, std::shared_ptr<Link> link, Offer peer);

  /// A channel is open: said in the log once for each list of transports.
  void note(const std::string& transports);
  /// Links fail, threads end.
  void halt();

 private:
  explicit Ucx(Library lib, Options options) : lib_(std::move(lib)), options_(std::move(options)) {}
  Status start();

  const ForkGuard guard_{};
  const Library lib_;
  const Options options_;
  Context* context_ = nullptr;
  std::vector<std::unique_ptr<Progress>> threads_;
  std::atomic<std::size_t> next_{0};
  std::mutex mutex_;
  std::set<std::string> noted_;  // protected by mutex_
};

}  // namespace deltasync::net::ucx
