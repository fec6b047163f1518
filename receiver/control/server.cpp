#include "receiver/control/server.hpp"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "base/log.hpp"
#include "base/thread_pool.hpp"
#include "net/auth.hpp"
#include "net/endpoint.hpp"
#include "net/tls.hpp"
#include "receiver/control/browsers.hpp"
#include "receiver/control/routes.hpp"

namespace deltasync::control {
namespace {

using net::HttpPage;
using nlohmann::json;

constexpr std::size_t kMakers = 2 * Service::kWaitingMax;
constexpr std::uint64_t kBodyBytesMax = 1u << 20;
constexpr std::string_view kBearer = "Bearer ";

Result<std::span<const Route>> routes_of(const std::string& dialect) {
  if (dialect == "v1") return v1_routes();
  if (dialect == "vllm") return vllm_routes();
  if (dialect == "sglang") return sglang_routes();
  return Error(Errc::invalid_argument, "no dialect '" + dialect + "': there is v1, vllm and sglang");
}

/// In a time that tells nothing of the token.
bool same_token(std::string_view one, std::string_view other) {
  return net::equal_proofs(net::client_proof(one, {}, {}, wire::Role::control),
                           net::client_proof(other, {}, {}, wire::Role::control));
}

class Server final : public StoppableServer {
 public:
  Server(ControlOptions options, json engine_info, RolloutEngine& engine, std::unique_ptr<EngineWeights> weights)
      : options_(std::move(options)),
        weights_(std::move(weights)),
        service_(engine, *weights_, std::chrono::nanoseconds(std::llround(options_.call_s * 1e9))),
        desk_{service_, engine, options_, *weights_, std::move(engine_info), {}, false, {}, {}, {}} {}

  ~Server() override {
    if (in_hook()) {
      std::fprintf(stderr,
                   "deltasync: a ControlServer is destroyed in a hook of its engine, which it would wait for\n");
      std::abort();
    }
    service_.stop();
    if (http_) http_->stop();
    io_.stop();
    if (thread_.joinable()) thread_.join();
    http_.reset();  // waits for the calls that go on
  }

  std::string endpoint() const override { return net::to_string(net::Endpoint{listen_.host, http_->port()}); }

  void stop() override { service_.stop(); }
  Status check() override {
    const Answering here(this);
    return service_.check();
  }
  bool in_hook() const override { return answering == this; }

  Result<std::pair<Version, std::string>> admit(std::string_view min_version,
                                                std::string_view exact_version) const override {
    Standing now = service_.standing();
    DS_TRY(admits(now, min_version, exact_version));
    now.version->label = now.label;
    return std::pair(std::move(*now.version), std::move(now.cache_salt));
  }

  Status start() {
    if (!(options_.call_s > 0 && options_.call_s < 1e7)) {
      return Error(Errc::invalid_argument, "call_s is no number of seconds");
    }
    if (options_.world_size == 0 || options_.pp_size == 0 || options_.world_size % options_.pp_size != 0) {
      return Error(Errc::invalid_argument, "world_size is no multiple of pp_size");
    }
    for (const std::string& dialect : options_.dialects) {
      DS_ASSIGN(const std::span<const Route> routes, routes_of(dialect));
      for (const Route& route : routes) add(route);
    }
    // It is not asked to serve what is no version.
    if (!weights_->current()) DS_TRY(desk_.engine.stop_admission());
    net::HttpOptions http;
    DS_ASSIGN(http.listen, net::parse_endpoint(options_.listen));
    listen_ = http.listen;
    if (!options_.token.empty()) DS_TRY(net::check_token(options_.token));
    if (options_.tls.wanted()) {
      TlsOptions tls = options_.tls;
      tls.kernel = false;
      DS_ASSIGN(http.tls, net::Tls::server(tls));
      http.client_certificates = !tls.ca.empty();
    }
    if (options_.token.empty() && !http.client_certificates && !net::is_loopback(listen_.host)) {
      return Error(Errc::unauthenticated, "control service on " + options_.listen +
                                              ": anybody could pause the engine; give a token, or certificates of "
                                              "clients (tls.ca)");
    }
    http.allow_remote = true;
    http.takes_posts = true;
    http.makers = kMakers;
    http.body_bytes_max = kBodyBytesMax;
    DS_ASSIGN(http_,
              net::HttpServer::listen(io_, http, [this](const net::HttpQuestion& asked) { return answer(asked); }));
    try {
      thread_ = std::thread([this] {
        set_thread_name("control-http");
        io_.run();
      });
    } catch (const std::system_error& e) {
      return Error(Errc::no_space, std::string("the control service's thread: ") + e.code().message());
    }
    log::debug("control_ready endpoint={} https={}", endpoint(), http.tls ? 1 : 0);
    return {};
  }

 private:
  void add(const Route& route) {
    const auto taken = [&](const Route* other) { return other->path == route.path; };
    if (std::none_of(routes_.begin(), routes_.end(), taken)) routes_.push_back(&route);
  }

  net::HttpServer::Answer answer(const net::HttpQuestion& asked) {
    const std::string_view path = asked.target.substr(0, asked.target.find('?'));
    if (path == "/health" || path == "/health_generate") return HttpPage{200, "text/plain; charset=utf-8", ""};
    if (!admitted(asked.header("Authorization"))) {
      return page_of(401, {{"error", "no token, or a wrong one: Authorization: Bearer TOKEN"}});
    }
    if (options_.token.empty()) {
      const std::string why = foreign_page(asked, listen_.host, options_.tls.wanted());
      if (!why.empty()) return page_of(403, {{"error", why + ": pages of others may not ask; give a token"}});
    }
    if (path == "/openapi.json") return page_of(200, openapi_of(routes_));
    const auto found = std::find_if(routes_.begin(), routes_.end(), [&](const Route* r) { return r->path == path; });
    if (found == routes_.end()) return page_of(404, {{"error", "no such route; /openapi.json has them all"}});
    const Route& route = **found;
    if (!has_method(route, asked.method)) {  // some GETs change something, so a HEAD is none
      return page_of(405, {{"error", std::string(path) + " is for " + std::string(route.methods)}});
    }
    auto ask = parse_ask(asked);
    if (!ask) return page_of(400, {{"error", ask.error().message()}});
    return net::HttpServer::Deferred([this, &route, ask = std::move(*ask),
                                      min = std::string(asked.header(kMinVersionHeader)),
                                      exact = std::string(asked.header(kExactVersionHeader))] {
      const Answering here(this);  // to the end: the user's code is asked for the live version, too
      const Status may = admits_if_asked(min, exact);
      HttpPage page =
          may ? route.answer(desk_, ask) : page_of(status_of(may.error()), {{"error", may.error().message()}});
      const Standing now = service_.standing();
      if (!now.label.empty() && is_header_text(now.label)) page.headers.emplace_back(kVersionHeader, now.label);
      return page;
    });
  }

  Status admits_if_asked(const std::string& min, const std::string& exact) const {
    return min.empty() && exact.empty() ? Status() : admits(service_.standing(), min, exact);
  }

  bool admitted(std::string_view authorization) const {
    if (options_.token.empty()) return true;
    return authorization.starts_with(kBearer) && same_token(authorization.substr(kBearer.size()), options_.token);
  }

  /// Labels are the trainer's, or a client's: what would break a header stays out of it.
  static bool is_header_text(std::string_view text) {
    return text.size() <= 256 && std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
  }

  static thread_local const Server* answering;  ///< whose client's call this thread carries out
  struct Answering {
    explicit Answering(const Server* server) { answering = server; }
    ~Answering() { answering = nullptr; }
    Answering(const Answering&) = delete;
    Answering& operator=(const Answering&) = delete;
  };

  // Constant after start().
  const ControlOptions options_;
  net::Endpoint listen_;
  std::vector<const Route*> routes_;

  const std::unique_ptr<EngineWeights> weights_;
  Service service_;
  Desk desk_;
  boost::asio::io_context io_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_{io_.get_executor()};
  std::unique_ptr<net::HttpServer> http_;
  std::thread thread_;
};

thread_local const Server* Server::answering = nullptr;

}  // namespace

Result<std::unique_ptr<StoppableServer>> start_server(ControlOptions options, RolloutEngine& engine,
                                                      std::unique_ptr<EngineWeights> weights) {
  const std::string& text = options.engine_info;
  json engine_info = text.empty() ? json::object() : json::parse(text, nullptr, false);
  if (!engine_info.is_object()) return Error(Errc::invalid_argument, "engine_info is no JSON object");
  auto server = std::make_unique<Server>(std::move(options), std::move(engine_info), engine, std::move(weights));
  DS_TRY(server->start());
  return std::unique_ptr<StoppableServer>(std::move(server));
}

}  // namespace deltasync::control
