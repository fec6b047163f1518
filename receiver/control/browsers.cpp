#include "receiver/control/browsers.hpp"

#include <algorithm>

#include "net/endpoint.hpp"

namespace deltasync::control {
namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? char(c + 32) : c; });
  return out;
}

/// "[::1]:8000" is ::1.
std::string_view without_port(std::string_view host) {
  if (host.starts_with('[')) return host.substr(1, host.find(']') - 1);
  return host.substr(0, host.rfind(':'));
}

}  // namespace

std::string foreign_page(const net::HttpQuestion& asked, std::string_view listen_host, bool tls) {
  const std::string host = lower(asked.header("Host"));
  const std::string_view name = without_port(host);
  if (!tls && !net::is_loopback(name) && name != lower(listen_host)) {
    return "Host '" + host + "' is not how this host's own programs call it";
  }
  const std::string origin = lower(asked.header("Origin"));
  if (!origin.empty() && origin != (tls ? "https://" : "http://") + host) return "Origin is " + origin;
  const std::string site = lower(asked.header("Sec-Fetch-Site"));
  if (!site.empty() && site != "none" && site != "same-origin") return "Sec-Fetch-Site is " + site;
  return {};
}

}  // namespace deltasync::control
