// The TCP side of the agent: accepts receivers and runs one conversation for each connection.
#pragma once

#include <boost/asio/io_context.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "agent/core.hpp"
#include "agent/options.hpp"
#include "agent/serve/children.hpp"
#include "agent/serve/receiver_table.hpp"
#include "net/endpoint.hpp"

namespace deltasync::net {
class Tls;
namespace ucx {
class Ucx;
}
}  // namespace deltasync::net

namespace deltasync::agent {

struct PullServerOptions {
  net::Endpoint listen{"127.0.0.1", 0};
  std::string token;  ///< empty: none; then loopback only, or `tls` that asks for certificates
  /// Where there is none, one is made, for programs of this user on this host (net/local_token.hpp); loopback only too.
  bool make_token = false;
  std::shared_ptr<net::Tls> tls;       ///< null: none
  std::shared_ptr<net::ucx::Ucx> ucx;  ///< for data connections that ask for it; null: none
  std::uint64_t instance = 0;          ///< tells one agent process from the next
  std::string local_socket;            ///< where receivers on this host get the segment's descriptor; empty: nowhere
  PullLimits limits;
};

/// A connection as the status page shows it.
struct PeerStatus {
  std::uint64_t connection = 0;
  std::string address;
  std::string name;  ///< as the peer calls itself; empty before the handshake
  std::string role;
  std::chrono::steady_clock::time_point connected_at;
  std::string last_mode;  ///< of its last plan; empty if none
  VersionId last_target;
  std::uint64_t bytes_sent = 0;
};

/// Runs on `io`, each conversation on a strand of its own; `io` may be run by any number of threads.
class PullServer {
 public:
  /// Binds and listens. unauthenticated: a bind beyond loopback with nothing that says who may connect.
  /// invalid_argument: a short token.
  static Result<std::unique_ptr<PullServer>> listen(boost::asio::io_context& io, AgentCore& core,
                                                    PullServerOptions options);
  /// stop() first, then let `io` run until connections() is 0, or destroy the server after `io` has stopped.
  ~PullServer();
  PullServer(const PullServer&) = delete;
  PullServer& operator=(const PullServer&) = delete;

  std::uint16_t port() const noexcept;
  /// Any thread: accepts no more and ends all conversations; may be called again.
  void stop();
  std::size_t connections() const;
  std::vector<PeerStatus> peers() const;
  /// Those that are connected, and for a while those that were.
  std::vector<ReceiverRow> receivers() const;
  const Children& children() const;

 private:
  struct Impl;
  explicit PullServer(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace deltasync::agent
