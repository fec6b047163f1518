// Serves pages for people, monitors and clients over HTTP or HTTPS: GET and HEAD, and POST on request. Which pages
// there are is its user's.
#pragma once

#include <boost/asio/io_context.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "deltasync/result.hpp"
#include "net/endpoint.hpp"

namespace deltasync::net {

class Tls;

struct HttpPage {
  unsigned status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers = {};  ///< more of them
};

/// What a client asks; valid until the answer is made.
struct HttpQuestion {
  std::string_view method;  ///< GET, HEAD or POST
  std::string_view target;  ///< "/v1/layout?tensors=1"
  std::string_view body;
  std::span<const std::pair<std::string_view, std::string_view>> headers = {};
  std::string_view client = {};  ///< its IP address; empty: unknown

  /// The first of that name, in whatever case; empty: none.
  std::string_view header(std::string_view name) const;
};

struct HttpOptions {
  Endpoint listen{"127.0.0.1", 0};
  bool allow_remote = false;                       ///< beyond loopback only on request, or with client_certificates
  std::shared_ptr<Tls> tls;                        ///< of a server; null: plain HTTP
  bool client_certificates = false;                ///< only for those whose certificate the CA of `tls` has signed
  std::chrono::milliseconds request{5'000};        ///< the handshake; a request; also the reply's sending,
  std::uint64_t reply_bytes_per_s_min = 1u << 20;  ///< which may take so much longer as its bytes take at this rate
  std::chrono::milliseconds keep_alive{30'000};    ///< between requests
  bool takes_posts = false;
  std::size_t makers = 1;  ///< threads that make deferred pages
  std::uint32_t header_bytes_max = 8'192;
  std::uint64_t body_bytes_max = 4'096;
  std::size_t connections_max = 64;       ///< who is idle leaves for who comes; half as many pages are made at a time
  std::function<void()> answered;         ///< called for every answer, refusals too, on a thread of `io`
  std::function<void()> before_deferred;  ///< for tests: called before each deferred page, on the thread that makes it
};

/// Runs on `io`, each connection on a strand of its own. Pages that take long are made on threads "http-pages", one
/// after the other on each; half as many can wait for them as there may be connections.
class HttpServer {
 public:
  using Deferred = std::function<HttpPage()>;
  /// A page, or what makes it, to be called on "http-pages" and finished when the server is destroyed.
  using Answer = std::variant<HttpPage, Deferred>;
  /// Answers on any thread of `io`.
  using Handler = std::function<Answer(const HttpQuestion& question)>;

  static Result<std::unique_ptr<HttpServer>> listen(boost::asio::io_context& io, HttpOptions options, Handler handler);
  /// stop() first, then let `io` run, or destroy the server after `io` has stopped. Waits for the page that is being
  /// made.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  std::uint16_t port() const noexcept;
  /// Any thread: accepts no more and closes all connections.
  void stop();

 private:
  struct Impl;
  explicit HttpServer(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace deltasync::net
