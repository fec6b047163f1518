#include "tools/cli/http_get.hpp"

#include <poll.h>
#include <strings.h>

#include <algorithm>
#include <array>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <cerrno>
#include <cstring>

#include "base/deadline.hpp"
#include "format/wire.hpp"
#include "net/blocking.hpp"
#include "net/channel.hpp"
#include "net/tls.hpp"

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

/// A connection to who has the pages, plain or TLS.
class Line {
 public:
  static Result<Line> open(const HttpSource& source, Deadline deadline) {
    DS_ASSIGN(const auto tls, net::Tls::client_if_wanted(source.tls));
    const auto& [host, port] = source.endpoint;
    DS_ASSIGN(UniqueFd fd, net::connect_tcp(host, port, deadline));
    std::unique_ptr<net::Channel> channel;
    if (tls) {
      DS_ASSIGN(channel, tls->channel(fd.get(), host));
    } else {
      channel = net::plain_channel(fd.get());
    }
    Line line(std::move(fd), std::move(channel), deadline);
    DS_TRY(line.again("waiting for the TLS handshake", [&] { return line.channel_->handshake(); }));
    return line;
  }

  Status send_all(std::string_view bytes) {
    while (!bytes.empty()) {
      const iovec piece{const_cast<char*>(bytes.data()), bytes.size()};
      DS_ASSIGN(const net::Tried sent, again("sending the request", [&] { return channel_->send({&piece, 1}); }));
      bytes.remove_prefix(sent.bytes);
    }
    return {};
  }
  /// More bytes, or none at the end of the stream.
  Result<std::string_view> receive() {
    const iovec piece{buffer_.data(), buffer_.size()};
    DS_ASSIGN(const net::Tried came, again("waiting for the answer", [&] { return channel_->receive({&piece, 1}); }));
    return std::string_view(buffer_.data(), came.bytes);
  }

 private:
  Line(UniqueFd fd, std::unique_ptr<net::Channel> channel, Deadline deadline)
      : fd_(std::move(fd)), channel_(std::move(channel)), deadline_(deadline) {}

  /// Until it has moved, or the peer said that nothing follows.
  template <class Try>
  Result<net::Tried> again(const char* what, Try&& once) {
    for (;;) {
      auto tried = once();
      if (!tried) return std::move(tried).error().with_context(what);
      using Came = net::Tried::Came;
      if (tried->came == Came::moved || tried->came == Came::ended) return tried;
      DS_TRY(wait_for(fd_.get(), tried->came == Came::wants_write ? POLLOUT : POLLIN, deadline_, what));
    }
  }

  UniqueFd fd_;
  std::unique_ptr<net::Channel> channel_;  // over it
  Deadline deadline_;
  std::array<char, 16384> buffer_{};
};

/// Takes `scheme` off the front of `text`, if it is there, in whatever case.
bool take_scheme(std::string& text, std::string_view scheme) {
  if (::strncasecmp(text.c_str(), scheme.data(), scheme.size()) != 0) return false;
  text.erase(0, scheme.size());
  return true;
}

/// What an agent says to receivers begins so.
bool is_wire(std::string_view bytes) {
  return bytes.size() >= sizeof wire::kMagic && std::memcmp(bytes.data(), &wire::kMagic, sizeof wire::kMagic) == 0;
}

}  // namespace

Result<HttpSource> parse_http_source(const std::string& text, const TlsOptions& tls) {
  std::string address = text;
  const bool https = take_scheme(address, "https://");
  const bool plain = !https && take_scheme(address, "http://");
  while (!address.empty() && address.back() == '/') address.pop_back();
  if ((https || plain) && address.find_first_of("/?#") != std::string::npos) {
    return Error(Errc::invalid_argument, text + ": give HOST:PORT alone, without the path of a page");
  }
  auto endpoint = net::parse_endpoint(address);
  if (!endpoint) return std::move(endpoint).error().with_context(text);
  if (https && tls.ca.empty()) {
    return Error(Errc::invalid_argument, text + ": say by --tls-ca FILE who signed its certificate");
  }
  if (plain && tls.wanted()) {
    return Error(Errc::invalid_argument,
                 text + ": http:// is without TLS, and --tls-... wants it: write https://, or leave out --tls-...");
  }
  return HttpSource{*std::move(endpoint), tls};
}

bool is_http_url(std::string text) {
  return take_scheme(text, "https://") || take_scheme(text, "http://");
}

Result<std::string> http_get(const HttpSource& source, const std::string& target, Deadline deadline) {
  DS_ASSIGN(Line line, Line::open(source, deadline));
  DS_TRY(line.send_all("GET " + target + " HTTP/1.1\r\nHost: " + net::to_string(source.endpoint) +
                       "\r\nConnection: close\r\n\r\n"));
  http::response_parser<http::string_body> parser;
  parser.body_limit(kBodyBytesMax);
  parser.eager(true);
  std::string pending;  // what the parser could not use yet
  const auto bad = [&pending](const boost::system::error_code& error) {
    if (is_wire(pending)) {
      return Error(Errc::protocol,
                   "this is an agent's address for receivers (--listen); its pages are at another (--http)");
    }
    return Error(Errc::protocol, "not the answer of an agent: " + error.message());
  };
  boost::system::error_code error;
  while (!parser.is_done()) {
    DS_ASSIGN(const std::string_view more, line.receive());
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
