#include "tools/http_get.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <cerrno>

#include "net/blocking.hpp"

namespace deltasync::tools {
namespace {

namespace http = boost::beast::http;

constexpr std::uint64_t kBodyBytesMax = 256u << 20;
constexpr std::size_t kReasonBytesMax = 200;  ///< of a refusal's body

Status wait_for(int fd, short events, Deadline deadline, const char* what) {
  for (;;) {
    pollfd item{fd, events, 0};
    // One millisecond more than remains, so that rounding down never spins.
    const int ready =
        ::poll(&item, 1, static_cast<int>(std::min<long long>(deadline.remaining_ms().count() + 1, 60'000)));
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) return Error::from_errno(what, errno);
    if (deadline.passed()) return Error(Errc::timed_out, what);
  }
}

Status send_all(int fd, std::string_view bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const auto n = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno == EAGAIN) {
      DS_TRY(wait_for(fd, POLLOUT, deadline, "sending the request"));
    } else if (errno != EINTR) {
      return Error(Errc::connection, Error::from_errno("sending the request", errno).message());
    }
  }
  return {};
}

/// More bytes, or none at the end of the stream.
Result<std::string_view> receive(int fd, std::array<char, 16384>& buffer, Deadline deadline) {
  for (;;) {
    const auto n = ::recv(fd, buffer.data(), buffer.size(), 0);
    if (n >= 0) return std::string_view(buffer.data(), static_cast<std::size_t>(n));
    if (errno == EAGAIN) {
      DS_TRY(wait_for(fd, POLLIN, deadline, "waiting for the answer"));
    } else if (errno != EINTR) {
      return Error(Errc::connection, Error::from_errno("reading the answer", errno).message());
    }
  }
}

}  // namespace

Result<std::string> http_get(const net::Endpoint& endpoint, const std::string& target, Deadline deadline) {
  DS_ASSIGN(const UniqueFd fd, net::connect_tcp(endpoint.host, endpoint.port, deadline));
  DS_TRY(send_all(fd.get(),
                  "GET " + target + " HTTP/1.1\r\nHost: " + net::to_string(endpoint) + "\r\nConnection: close\r\n\r\n",
                  deadline));
  http::response_parser<http::string_body> parser;
  parser.body_limit(kBodyBytesMax);
  parser.eager(true);
  std::string pending;  // what the parser could not use yet
  std::array<char, 16384> buffer;
  const auto bad = [](const boost::system::error_code& error) {
    return Error(Errc::protocol, "not the answer of an agent: " + error.message());
  };
  boost::system::error_code error;
  while (!parser.is_done()) {
    DS_ASSIGN(const std::string_view more, receive(fd.get(), buffer, deadline));
    if (more.empty()) {
      parser.put_eof(error);
      if (error || !parser.is_done()) return Error(Errc::connection, "the answer ended early");
      break;
    }
    pending += more;
    const std::size_t used = parser.put(boost::asio::buffer(pending), error);
    if (error == http::error::body_limit) {
      return Error(Errc::out_of_range,
                   target + ": the answer has more than " + std::to_string(kBodyBytesMax) + " bytes");
    }
    if (error && error != http::error::need_more) return bad(error);
    pending.erase(0, used);
  }
  if (parser.get().result() != http::status::ok) {
    std::string why = target + ": HTTP status " + std::to_string(parser.get().result_int());
    const std::string& body = parser.get().body();
    if (!body.empty()) why += ": " + body.substr(0, std::min(body.find('\n'), kReasonBytesMax));
    return Error(Errc::protocol, why);
  }
  return std::move(parser.get().body());
}

}  // namespace deltasync::tools
