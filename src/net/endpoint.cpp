#include "net/endpoint.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <charconv>
#include <cstring>
#include <utility>

namespace deltasync::net {
namespace {

constexpr std::size_t kHostBytesMax = 255;

Error bad(std::string_view text, const char* why) {
  return Error(Errc::invalid_argument, "endpoint \"" + std::string(text.substr(0, 300)) + "\": " + why);
}

}  // namespace

Result<Endpoint> parse_endpoint(std::string_view text) {
  if (text.find("://") != std::string_view::npos) return bad(text, "only HOST:PORT belongs here, without a scheme");
  std::string_view host;
  std::string_view port;
  if (text.starts_with('[')) {
    const auto close = text.find(']');
    if (close == std::string_view::npos) return bad(text, "the bracket is not closed");
    host = text.substr(1, close - 1);
    if (host.find(':') == std::string_view::npos) return bad(text, "brackets are for IPv6 addresses");
    port = text.substr(close + 1);
    if (!port.starts_with(':')) return bad(text, "expected [IPv6]:PORT");
    port.remove_prefix(1);
  } else {
    const auto colon = text.rfind(':');
    if (colon == std::string_view::npos) return bad(text, "expected HOST:PORT");
    host = text.substr(0, colon);
    port = text.substr(colon + 1);
    if (host.find(':') != std::string_view::npos) return bad(text, "write an IPv6 address as [ADDRESS]:PORT");
  }
  if (host.empty()) return bad(text, "the host is empty");
  if (host.size() > kHostBytesMax || host.find('\0') != std::string_view::npos) return bad(text, "no host name");
  std::uint16_t number = 0;
  const auto parsed = std::from_chars(port.data(), port.data() + port.size(), number);
  if (port.empty() || parsed.ec != std::errc() || parsed.ptr != port.data() + port.size()) {
    return bad(text, "the port is no number from 0 to 65535");
  }
  return Endpoint{std::string(host), number};
}

Result<PeerEndpoint> parse_peer_endpoint(std::string_view text) {
  constexpr std::string_view kUcx = "ucx://";
  const bool ucx = text.starts_with(kUcx);
  if (!ucx && text.find("://") != std::string_view::npos) {
    return bad(text, "expected HOST:PORT, or ucx://HOST:PORT for UCX");
  }
  DS_ASSIGN(Endpoint at, parse_endpoint(ucx ? text.substr(kUcx.size()) : text));
  return PeerEndpoint{std::move(at), ucx ? Transport::ucx : Transport::tcp};
}

std::string to_string(const Endpoint& endpoint) {
  const bool v6 = endpoint.host.find(':') != std::string::npos;
  return (v6 ? "[" + endpoint.host + "]" : endpoint.host) + ":" + std::to_string(endpoint.port);
}

bool is_loopback(std::string_view host) {
  if (host == "localhost") return true;
  const std::string text(host);
  in_addr v4{};
  if (::inet_pton(AF_INET, text.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6{};
  if (::inet_pton(AF_INET6, text.c_str(), &v6) != 1) return false;
  if (IN6_IS_ADDR_V4MAPPED(&v6)) return v6.s6_addr[12] == 127;
  return IN6_IS_ADDR_LOOPBACK(&v6);
}

}  // namespace deltasync::net
