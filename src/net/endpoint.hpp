// Network endpoints as people write them: "HOST:PORT", "[IPv6]:PORT", and where bytes may go over UCX
// "ucx://HOST:PORT".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "deltasync/result.hpp"

namespace deltasync::net {

struct Endpoint {
  std::string host;  ///< name or address, without brackets
  std::uint16_t port = 0;

  bool operator==(const Endpoint&) const = default;
};

/// invalid_argument, naming `text`. Port 0 is accepted: "any" for a listener.
Result<Endpoint> parse_endpoint(std::string_view text);
std::string to_string(const Endpoint& endpoint);

/// What carries the bytes of data connections.
enum class Transport : std::uint8_t { tcp, ucx };
struct PeerEndpoint {
  Endpoint at;
  Transport transport = Transport::tcp;

  bool operator==(const PeerEndpoint&) const = default;
};
/// Of an agent that is to be pulled from: as above, or "ucx://HOST:PORT".
Result<PeerEndpoint> parse_peer_endpoint(std::string_view text);

/// True for 127.0.0.0/8, ::1 (also IPv4-mapped) and "localhost": what needs no token.
bool is_loopback(std::string_view host);

}  // namespace deltasync::net
