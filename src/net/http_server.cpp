#include "net/http_server.hpp"

#include <sys/socket.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>

#include <algorithm>
#include <atomic>
#include <list>
#include <mutex>
#include <utility>

#include "base/log_limit.hpp"
#include "net/acceptor.hpp"
#include "net/channel_stream.hpp"
#include "net/coroutine.hpp"
#include "net/http_stream.hpp"
#include "net/log_exception.hpp"
#include "net/tls.hpp"
#include "net/work_thread.hpp"

namespace deltasync::net {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

constexpr auto kAcceptPause = std::chrono::milliseconds(50);

HttpResponse respond(const HttpRequest& request, HttpPage page, bool posts) {
  HttpResponse response(static_cast<http::status>(page.status), request.version());
  response.set(http::field::content_type, page.content_type);
  response.set(http::field::cache_control, "no-store");
  if (page.status == 405) response.set(http::field::allow, posts ? "GET, HEAD, POST" : "GET, HEAD");
  for (const auto& [name, value] : page.headers) response.set(name, value);
  response.keep_alive(request.keep_alive());
  response.body() = std::move(page.body);
  response.prepare_payload();
  // HEAD: the length of what GET would send, and nothing else.
  if (request.method() == http::verb::head) response.body().clear();
  return response;
}

std::string address_of(const tcp::socket& socket) {
  error_code left;
  const tcp::endpoint peer = socket.remote_endpoint(left);
  return left ? std::string() : peer.address().to_string();
}

}  // namespace

std::string_view HttpQuestion::header(std::string_view name) const {
  const auto found = std::find_if(headers.begin(), headers.end(), [&](const auto& h) {
    return beast::iequals({h.first.data(), h.first.size()}, {name.data(), name.size()});
  });
  return found == headers.end() ? std::string_view() : found->second;
}

struct HttpServer::Impl : std::enable_shared_from_this<HttpServer::Impl> {
  struct Client {
    enum class State : std::uint8_t {
      listening,  ///< no whole request is there, nor perhaps a whole handshake
      making,     ///< its page is being made on "http-pages"
      telling,
    };
    explicit Client(tcp::socket socket)
        : address(address_of(socket)),
          stream(std::make_shared<ChannelStream>(ChannelStream::Socket(std::move(socket)))) {}
    /// Where `io` has stopped first, nothing else has ended it for the peer if a forked child has a copy.
    ~Client() { ::shutdown(stream->fd(), SHUT_RDWR); }
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;
    const std::string address;                    // IP; empty: it has left
    const std::shared_ptr<ChannelStream> stream;  // used on its own strand
    State state = State::listening;               // protected by Impl::mutex
  };

  Impl(asio::io_context& i, HttpOptions o, Handler h, tcp::acceptor a)
      : io(i),
        options(std::move(o)),
        handler(std::move(h)),
        acceptor(std::move(a)),
        pause(acceptor.get_executor()),
        pages("http-pages", options.makers) {
    error_code ignored;
    port = acceptor.local_endpoint(ignored).port();
  }

  asio::io_context& io;
  const HttpOptions options;
  const Handler handler;
  tcp::acceptor acceptor;  // used on its strand
  asio::steady_timer pause;
  std::uint16_t port = 0;
  std::atomic<bool> stopping{false};
  std::mutex mutex;
  std::list<std::shared_ptr<Client>> clients;  // protected by mutex; who has waited longest for a request comes first
  std::size_t deferred = 0;                    // protected by mutex: pages that are being made, or wait for it
  WorkThread pages;
  log::LineLimit accept_lines;
  log::LineLimit handshake_lines;

  asio::awaitable<void> accept_loop() {
    while (!stopping) {
      auto [ec, socket] = co_await acceptor.async_accept(asio::make_strand(io), kAsTuple);
      if (stopping || ec == asio::error::operation_aborted) co_return;
      if (ec) {
        log::warn(accept_lines, "http_accept_failed error=\"{}\"", ec.message());
        pause.expires_after(kAcceptPause);
        co_await pause.async_wait(kAsTuple);
        continue;
      }
      auto client = std::make_shared<Client>(std::move(socket));
      if (!admit(client)) continue;
      asio::co_spawn(client->stream->executor(), run(shared_from_this(), client),
                     [self = shared_from_this(), client](const std::exception_ptr& thrown) {
                       log_exception("http_conversation")(thrown);
                       const std::lock_guard lock(self->mutex);
                       self->clients.remove(client);
                     });
    }
  }

  /// Where all places are taken, one becomes free: of those who have asked nothing yet the one that has been silent for
  /// longest, else of those who do not read what they asked for. A probe always finds a place: fewer pages are made at
  /// a time than there are places.
  bool admit(const std::shared_ptr<Client>& client) {
    const std::lock_guard lock(mutex);
    if (clients.size() >= options.connections_max) {
      auto leaves = clients.end();
      for (const auto state : {Client::State::listening, Client::State::telling}) {
        leaves = std::find_if(clients.begin(), clients.end(), [&](const auto& c) { return c->state == state; });
        if (leaves != clients.end()) break;
      }
      if (leaves == clients.end()) return false;
      asio::post((*leaves)->stream->executor(), [gone = *leaves] { gone->stream->shut(); });
      clients.erase(leaves);
    }
    clients.push_back(client);
    return true;
  }

  /// Nothing changes for one that had to leave.
  void enter(const std::shared_ptr<Client>& client, Client::State state) {
    const std::lock_guard lock(mutex);
    client->state = state;
    const auto found = std::find(clients.begin(), clients.end(), client);
    if (found != clients.end()) clients.splice(clients.end(), clients, found);
  }

  static asio::awaitable<void> run(std::shared_ptr<Impl> self, std::shared_ptr<Client> client) {
    const bool secured = co_await self->secure(*client->stream);
    if (secured) co_await self->converse(client);
    client->stream->shut();
  }

  /// With TLS, the handshake. Browsers and probes that come without are told so in their own words.
  asio::awaitable<bool> secure(ChannelStream& stream) {
    if (!options.tls) co_return true;
    const std::string peer = stream.peer_name();
    const auto lets_in = options.client_certificates ? LetsIn::signed_by_ca : LetsIn::everybody;
    auto channel = options.tls->channel(stream.fd(), peer, lets_in,
                                        [executor = stream.executor(), weak = stream.weak_from_this()] {
                                          asio::post(executor, [weak] {
                                            if (const auto refused = weak.lock()) refused->shut();
                                          });
                                        });
    if (!channel) {
      log::warn(handshake_lines, "http_handshake_failed peer={} error=\"{}\"", peer, channel.error().to_string());
      co_return false;
    }
    const Status secured = co_await stream.secure(std::move(*channel), Deadline::after(options.request));
    if (secured) co_return true;
    const bool spoke = stream.channel().has_input();  // or it said nothing, and left or was left
    if (secured.error().code() == Errc::connection || (secured.error().code() == Errc::unsupported && !spoke)) {
      co_return false;
    }
    log::warn(handshake_lines, "http_handshake_failed peer={} error=\"{}\"", peer, secured.error().to_string());
    if (secured.error().code() == Errc::unsupported) {
      co_await refuse(stream, 400, "this port speaks HTTPS only: ask https://, and trust its CA (--tls-ca)");
    }
    co_return false;
  }

  asio::awaitable<void> converse(const std::shared_ptr<Client>& client) {
    ChannelStream& stream = *client->stream;
    beast::flat_buffer buffer(options.header_bytes_max + static_cast<std::size_t>(options.body_bytes_max));
    bool first = true;
    while (!stopping) {
      HttpRequestParser parser;
      parser.header_limit(options.header_bytes_max);
      parser.body_limit(options.body_bytes_max);
      // Between requests a client may rest; once it has begun one, it must not.
      if (!first && buffer.size() == 0) {
        const auto to = buffer.prepare(1);
        const auto rested = co_await stream.read_some({static_cast<std::byte*>(to.data()), to.size()},
                                                      Deadline::after(options.keep_alive), "waiting for a request");
        if (!rested) co_return;
        buffer.commit(*rested);
      }
      first = false;
      const error_code ec = co_await read_request(stream, buffer, parser, Deadline::after(options.request));
      if (ec) {
        if (const unsigned status = status_of(ec); status != 0) co_await refuse(stream, status, ec.message());
        co_return;
      }
      const bool keep_alive = parser.get().keep_alive();
      if (options.answered) options.answered();
      HttpPage page = co_await make_page(client, parser.get());
      enter(client, Client::State::telling);
      const HttpResponse response = respond(parser.get(), std::move(page), options.takes_posts);
      const Deadline limit = Deadline::after(reply_limit(response.body().size()));
      const Status told = co_await write_response(stream, response, limit);
      if (!told || !keep_alive) co_return;
      enter(client, Client::State::listening);
    }
  }

  /// A timeline may be hundreds of megabytes, but nobody holds one in memory by reading it byte by byte.
  std::chrono::milliseconds reply_limit(std::size_t bytes) const {
    return options.request + std::chrono::milliseconds(bytes * 1000 / options.reply_bytes_per_s_min);
  }

  /// One of the pages that are made at a time, as long as it lives.
  class Making {
   public:
    explicit Making(Impl& impl) : impl_(impl), may_(impl.begin_making()) {}
    ~Making() {
      const std::lock_guard lock(impl_.mutex);
      if (may_) --impl_.deferred;
    }
    Making(const Making&) = delete;
    Making& operator=(const Making&) = delete;
    bool may() const { return may_; }

   private:
    Impl& impl_;
    const bool may_;
  };
  bool begin_making() {
    const std::lock_guard lock(mutex);
    if (deferred >= std::max<std::size_t>(1, options.connections_max / 2)) return false;
    ++deferred;
    return true;
  }

  asio::awaitable<HttpPage> make_page(const std::shared_ptr<Client>& client, const HttpRequest& request) {
    HttpPage page;
    const bool posts = request.method() == http::verb::post && options.takes_posts;
    if (!posts && request.method() != http::verb::get && request.method() != http::verb::head) {
      page.status = 405;
      page.body = options.takes_posts ? "only GET, HEAD and POST\n" : "only GET and HEAD\n";
      co_return page;
    }
    std::vector<std::pair<std::string_view, std::string_view>> headers;
    for (const auto& field : request) {
      const auto name = field.name_string();
      const auto value = field.value();
      headers.emplace_back(std::string_view(name.data(), name.size()), std::string_view(value.data(), value.size()));
    }
    HttpServer::Answer answer = handler({{request.method_string().data(), request.method_string().size()},
                                         {request.target().data(), request.target().size()},
                                         request.body(),
                                         headers,
                                         client->address});
    if (auto* ready = std::get_if<HttpPage>(&answer)) co_return std::move(*ready);
    const auto work = [this, &answer]() -> Result<HttpPage> {
      if (options.before_deferred) options.before_deferred();
      return std::get<HttpServer::Deferred>(answer)();
    };
    const Making making(*this);
    if (!making.may()) {
      page.status = 503;
      page.body = "busy: as many pages as may be are being made; ask again soon\n";
      co_return page;
    }
    enter(client, Client::State::making);
    auto made = co_await pages.run(work);
    if (made) co_return std::move(*made);
    page.status = 500;
    page.body = made.error().to_string() + "\n";
    co_return page;
  }

  /// What is wrong with a request; 0 if there is nobody to be told.
  static unsigned status_of(error_code ec) {
    if (ec == http::error::header_limit) return 431;
    if (ec == http::error::body_limit || ec == http::error::buffer_overflow) return 413;
    return ec == http::error::partial_message ? 0 : 400;
  }

  asio::awaitable<void> refuse(ChannelStream& stream, unsigned status, const std::string& why) {
    if (options.answered) options.answered();
    HttpResponse response(static_cast<http::status>(status), 11);
    response.keep_alive(false);
    response.body() = why + "\n";
    response.prepare_payload();
    const Deadline limit = Deadline::after(options.request);
    // Its body, which nobody reads, may still be on the way.
    const Status told = co_await write_response(stream, response, limit);
    if (told && !stopping) co_await stream.finish(limit.remaining());
  }

  void stop() {
    // Now, as `io` may have stopped, and for the copies of forked children, with which nobody accepts.
    if (!stopping.exchange(true)) ::shutdown(acceptor.native_handle(), SHUT_RDWR);
    asio::post(acceptor.get_executor(), [self = shared_from_this()] {
      error_code ignored;
      self->acceptor.close(ignored);
      self->pause.cancel();
    });
    const std::lock_guard lock(mutex);
    for (const auto& client : clients) {
      asio::post(client->stream->executor(), [client] { client->stream->cancel(); });
    }
  }
};

Result<std::unique_ptr<HttpServer>> HttpServer::listen(asio::io_context& io, HttpOptions options, Handler handler) {
  DS_ASSIGN(tcp::acceptor acceptor, bind_acceptor(io, options.listen));
  error_code ec;
  if (options.client_certificates && !(options.tls && options.tls->asks_for_certificates())) {
    return Error(Errc::invalid_argument, "HTTP on " + to_string(options.listen) +
                                             ": --http-client-certificates needs --tls-cert, and --tls-ca, which says "
                                             "who signs them");
  }
  const bool knows_peers = options.client_certificates;
  if (!options.allow_remote && !knows_peers && !acceptor.local_endpoint(ec).address().is_loopback()) {
    return Error(Errc::unauthenticated, "HTTP on " + to_string(options.listen) +
                                            ": the pages have no authentication; --http-allow-remote says you mean it");
  }
  auto impl = std::make_shared<Impl>(io, std::move(options), std::move(handler), std::move(acceptor));
  asio::co_spawn(
      impl->acceptor.get_executor(), [impl]() { return impl->accept_loop(); }, log_exception("http_server"));
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

HttpServer::HttpServer(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() {
  impl_->stop();
  impl_->pages.join();
}
std::uint16_t HttpServer::port() const noexcept {
  return impl_->port;
}
void HttpServer::stop() {
  impl_->stop();
}

}  // namespace deltasync::net
