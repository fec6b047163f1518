#include "tools/cli/receiver_pages.hpp"

#include <unistd.h>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>

#include <CLI/CLI.hpp>
#include <chrono>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "base/log.hpp"
#include "base/metrics.hpp"
#include "base/thread_pool.hpp"
#include "net/endpoint.hpp"
#include "net/http_server.hpp"
#include "net/tls.hpp"
#include "receiver/standing.hpp"
#include "tools/cli/cli.hpp"

namespace deltasync::cli {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr auto kAskLimit = std::chrono::seconds(2);  ///< for the agent's answer; a scrape waits ten
constexpr const char* kJson = "application/json";
constexpr const char* kText = "text/plain; charset=utf-8";

json version_json(const std::optional<Version>& version) {
  if (!version) return nullptr;
  return {{"id", to_string(version->id)}, {"number", version->id.number}, {"label", version->label}};
}

template <class T>
json or_null(const std::optional<T>& value) {
  return value ? json(*value) : json(nullptr);
}

std::string dump(const json& page) {
  return page.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace

void add_pages_options(CLI::App& app, PagesOptions& options) {
  auto* http = app.add_option("--http", options.http, "serve status pages and metrics here; port 0 takes a free one")
                   ->type_name("HOST:PORT");
  app.add_flag("--http-allow-remote", options.allow_remote,
               "serve the status pages beyond loopback (no authentication)")
      ->needs(http);
  auto* plain =
      app.add_flag("--http-plain", options.plain, "the pages without TLS, though there is --tls-cert")->needs(http);
  app.add_flag("--http-client-certificates", options.client_certificates,
               "show the pages only to those whose certificate --tls-ca has signed (default: to everybody who comes)")
      ->needs(http)
      ->excludes(plain);
  app.add_option("--ready-lag", options.ready_lag,
                 "/readyz is 503 while what is held is more versions behind than this (default: any version will do)")
      ->needs(http)
      ->check(not_negative);
}

struct ReceiverPages::Impl {
  Impl(const PagesOptions& o, std::string r, std::string f, TlsOptions t)
      : options(o), role(std::move(r)), from(std::move(f)), tls(std::move(t)) {}
  ~Impl() {
    if (server) server->stop();
    io.stop();
    if (thread.joinable()) thread.join();
    server.reset();  // waits for the page that is being made
  }

  const PagesOptions options;
  const std::string role;
  const std::string from;
  const TlsOptions tls;
  const Clock::time_point started_at = Clock::now();

  metrics::Registry registry;
  metrics::Counter pulls_full = registry.counter("pulls_total", "Versions committed, by mode.", {{"mode", "full"}});
  metrics::Counter pulls_delta = registry.counter("pulls_total", "Versions committed, by mode.", {{"mode", "delta"}});
  metrics::Counter failures = registry.counter("pull_failures_total", "Pulls and commits that failed.");
  metrics::Counter bytes = registry.counter("received_bytes_total", "Bytes received from the agent.");
  metrics::Durations pull_s =
      registry.durations("pull_duration_seconds", "From the agent's plan until a version was verified and staged.");
  metrics::Durations commit_s = registry.durations("commit_duration_seconds", "Commits of staged versions.");

  std::shared_ptr<net::Tls> own;  // of the process's certificate; null if it has none

  std::mutex mutex;
  std::shared_ptr<const receiver::ReceiverStatus> standing;  // protected by mutex, as all below; null: never connected
  std::string connect_error;                                 // since then, of the last try to connect
  std::optional<std::uint64_t> versions_known;               // behind, when the agent last answered
  std::optional<PullReport> last;

  boost::asio::io_context io{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work{io.get_executor()};
  std::unique_ptr<net::HttpServer> server;
  std::thread thread;

  Status start();
  net::HttpServer::Answer page(std::string_view target);
  net::HttpPage ready();
  net::HttpPage status();
  net::HttpPage metrics_page();
  Lag lag();
  std::optional<receiver::Unserved> unserved();
  double not_served_s();
  void connected(const Receiver& receiver);
  void took(const PullReport& report);
  void failed();
};

Status ReceiverPages::Impl::start() {
  net::HttpOptions http;
  DS_ASSIGN(http.listen, net::parse_endpoint(options.http).with_context("--http"));
  http.allow_remote = options.allow_remote;
  // Who only knows a CA has nothing to show.
  if (!tls.cert.empty()) {
    TlsOptions of_server = tls;
    of_server.kernel = false;
    DS_ASSIGN(own, net::Tls::server(of_server));
    if (!options.plain) http.tls = own;
  }
  http.client_certificates = options.client_certificates;
  auto made = net::HttpServer::listen(io, http, [this](const net::HttpQuestion& asked) { return page(asked.target); });
  if (!made) return std::move(made).error().with_context("--http");
  server = std::move(*made);
  try {
    thread = std::thread([this] {
      set_thread_name("http-0");
      io.run();
    });
  } catch (const std::system_error& e) {
    return Error(Errc::no_space, "the thread of --http: " + e.code().message());
  }
  log::info("http_ready port={} https={}", server->port(), http.tls ? 1 : 0);
  return {};
}

net::HttpServer::Answer ReceiverPages::Impl::page(std::string_view target) {
  const std::string_view path = target.substr(0, target.find('?'));
  if (path == "/healthz") return net::HttpPage{200, kText, "ok\n"};
  // The others ask the agent, which takes its time.
  if (path == "/readyz") return net::HttpServer::Deferred([this] { return ready(); });
  if (path == "/v1/status") return net::HttpServer::Deferred([this] { return status(); });
  if (path == "/metrics") return net::HttpServer::Deferred([this] { return metrics_page(); });
  return net::HttpPage{404, kText, "there is /healthz, /readyz, /v1/status and /metrics\n"};
}

std::optional<receiver::Unserved> ReceiverPages::Impl::unserved() {
  const std::lock_guard lock(mutex);
  return standing ? standing->unserved() : std::nullopt;
}

double ReceiverPages::Impl::not_served_s() {
  const auto since = unserved();
  return since ? std::chrono::duration<double>(Clock::now() - since->since).count() : 0;
}

Lag ReceiverPages::Impl::lag() {
  std::shared_ptr<const receiver::ReceiverStatus> whose;
  {
    const std::lock_guard lock(mutex);
    whose = standing;
  }
  Lag lag;
  if (whose) lag = whose->lag(Deadline::after(kAskLimit));
  const std::lock_guard lock(mutex);
  if (!whose) lag.last_error = "not connected to the agent at " + from + " yet";
  if (!connect_error.empty()) lag.last_error = connect_error;
  if (lag.versions) versions_known = lag.versions;
  return lag;
}

/// With the agent away, what it said last counts: its restart is no reason to take servers out of service.
net::HttpPage ReceiverPages::Impl::ready() {
  const Lag now = lag();
  const auto unready = [](const std::string& why) {
    return net::HttpPage{503, kJson, dump({{"status", "not ready"}, {"reason", why}})};
  };
  if (const auto unserved = this->unserved()) return unready(unserved->why);
  if (!now.held) return unready("no version is held yet");
  const std::lock_guard lock(mutex);
  // For nodes it stands between two agents, and looks after nothing without either.
  if (role == "relay" && !connect_error.empty()) return unready(connect_error);
  if (!options.ready_lag) return {200, kText, "ready\n"};
  if (!versions_known) {
    return unready(now.last_error.empty() ? "the agent has not said yet what is newest" : now.last_error);
  }
  if (*versions_known > *options.ready_lag) {
    return unready("what is held is " + std::to_string(*versions_known) + " versions behind; --ready-lag allows " +
                   std::to_string(*options.ready_lag));
  }
  return {200, kText, "ready\n"};
}

net::HttpPage ReceiverPages::Impl::status() {
  const Lag now = lag();
  json page = {{"role", role},
               {"from", from},
               {"pid", ::getpid()},
               {"uptime_s", std::chrono::duration<double>(Clock::now() - started_at).count()},
               {"held", version_json(now.held)},
               {"newest", version_json(now.newest)},
               {"versions_behind", or_null(now.versions)},
               {"seconds_behind", or_null(now.seconds)},
               {"newest_age_s", or_null(now.newest_age_s)},
               {"heard_newest", version_json(now.heard_newest)},
               {"heard_s", or_null(now.heard_s)},
               {"last_error", now.last_error}};
  if (role == "relay") page["not_served_s"] = not_served_s();
  const std::lock_guard lock(mutex);
  page["last_pull"] = nullptr;
  if (last) {
    page["last_pull"] = {{"mode", to_string(last->mode)},  {"version", version_json(last->version)},
                         {"wire_bytes", last->wire_bytes}, {"full_bytes", last->full_bytes},
                         {"transfer_s", last->transfer_s}, {"commit_s", last->commit_s}};
  }
  return {200, kJson, dump(page)};
}

net::HttpPage ReceiverPages::Impl::metrics_page() {
  const Lag now = lag();
  metrics::Gauges out;
  out.add("version_held", "1 if a version is committed.", now.held ? 1 : 0);
  out.add("version_number", "Number of the version that is committed.",
          now.held ? static_cast<double>(now.held->id.number) : 0);
  out.add("failing", "1 if the last pull or commit failed, or the agent cannot be reached.",
          now.last_error.empty() ? 0 : 1);
  out.add("agent_reached", "1 if the agent answered when this page was made.", now.newest ? 1 : 0);
  if (role == "relay") {
    out.add("not_served_seconds", "For how long the node's agent has not served what is committed; 0: it does.",
            not_served_s());
  }
  // What is not known has no line: it is not 0.
  if (now.versions) {
    out.add("versions_behind", "Versions published after the one that is committed.",
            static_cast<double>(*now.versions));
    out.add("seconds_behind", "Time since the first of these was published; 0 if there is none.", *now.seconds);
    out.add("newest_version_age_seconds", "Time since the newest version was published.", *now.newest_age_s);
  }
  if (own) {
    own->run_maintenance();
    if (const auto end = own->certificates_end()) {
      out.add("tls_certificate_not_after_timestamp_seconds", "Unix time at which the certificate ends to be valid.",
              std::chrono::duration<double>(end->time_since_epoch()).count());
    }
  }
  return {200, metrics::kContentType, metrics::to_text({registry.collect(), out.take(), metrics::of_process()})};
}

void ReceiverPages::Impl::connected(const Receiver& receiver) {
  const std::lock_guard lock(mutex);
  standing = receiver::status_of(receiver);
  connect_error.clear();
}

void ReceiverPages::Impl::took(const PullReport& report) {
  bytes.add(static_cast<double>(report.wire_bytes));
  if (report.mode != PullMode::up_to_date) {
    (report.mode == PullMode::full ? pulls_full : pulls_delta).add();
    pull_s.observe(report.transfer_s);
    commit_s.observe(report.commit_s);
  }
  const std::lock_guard lock(mutex);
  last = report;
}

/// A wait in vain is no failure: the receiver knows.
void ReceiverPages::Impl::failed() {
  const std::lock_guard lock(mutex);
  if (standing && !standing->last_error().empty()) failures.add();
}

Result<std::unique_ptr<ReceiverPages>> ReceiverPages::start(const PagesOptions& options, const std::string& role,
                                                            const std::string& from, const TlsOptions& tls) {
  if (options.http.empty()) return std::unique_ptr<ReceiverPages>();
  auto impl = std::make_unique<Impl>(options, role, from, tls);
  DS_TRY(impl->start());
  return std::unique_ptr<ReceiverPages>(new ReceiverPages(std::move(impl)));
}

ReceiverPages::ReceiverPages(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ReceiverPages::~ReceiverPages() = default;

Follower ReceiverPages::watch(Follower follower) {
  Follower seen = follower;
  seen.connect = [this, connect = std::move(follower.connect)](const CallContext& until) {
    auto receiver = connect(until);
    if (receiver) {
      impl_->connected(**receiver);
    } else if (receiver.error().code() != Errc::cancelled) {
      impl_->failures.add();
      const std::lock_guard lock(impl_->mutex);
      impl_->connect_error = receiver.error().to_string();
    }
    return receiver;
  };
  seen.take = [this, take = std::move(follower.take)](Receiver& receiver, const CallContext& until) {
    auto report = take(receiver, until);
    if (report) {
      impl_->took(*report);
    } else {
      impl_->failed();
    }
    return report;
  };
  return seen;
}

Follower watched(ReceiverPages* pages, Follower follower) {
  return pages != nullptr ? pages->watch(std::move(follower)) : follower;
}

}  // namespace deltasync::cli
