// A listening TCP socket for threads that may block. Needs no Boost.
#pragma once

#include <cstdint>
#include <string>

#include "base/call_context.hpp"
#include "base/fd.hpp"
#include "deltasync/result.hpp"
#include "net/endpoint.hpp"

namespace deltasync::net {

class Listener {
 public:
  /// Binds and listens. Errors name the endpoint: already_exists if the port is taken, unauthenticated if the address
  /// that was bound is beyond loopback and nothing tells who may connect (no token, and no TLS that asks for
  /// certificates).
  static Result<Listener> bind(const Endpoint& where, bool knows_peers);

  std::uint16_t port() const noexcept { return port_; }
  /// The next connection, close-on-exec, TCP_NODELAY. `cancelled` soon after a stop, timed_out at the deadline.
  Result<UniqueFd> accept(const CallContext& until);

 private:
  Listener(UniqueFd fd, std::uint16_t port) : fd_(std::move(fd)), port_(port) {}
  UniqueFd fd_;
  std::uint16_t port_;
};

}  // namespace deltasync::net
