#include "agent/agent.hpp"

#include <unistd.h>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/steady_timer.hpp>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "agent/http/health.hpp"
#include "agent/http/metrics_page.hpp"
#include "agent/http/status.hpp"
#include "base/log.hpp"
#include "base/trace.hpp"
#include "net/auth.hpp"
#include "net/coroutine.hpp"
#include "net/log_exception.hpp"
#include "net/tls.hpp"

namespace deltasync::agent {

namespace asio = boost::asio;

namespace {

constexpr auto kFarewellLimit = std::chrono::seconds(2);  ///< for conversations to end by themselves
constexpr const char* kJson = "application/json";

/// Written beside and renamed, so that who waits for it never reads a part.
Status write_ready_file(const std::filesystem::path& path, const nlohmann::json& content) {
  std::filesystem::path part = path;
  part += "." + std::to_string(::getpid()) + ".tmp";
  {
    std::ofstream out(part, std::ios::trunc);
    out << content.dump() << "\n";
    out.flush();
    if (!out) return Error(Errc::io, "ready file " + part.string() + ": cannot write");
  }
  std::error_code ec;
  std::filesystem::rename(part, path, ec);
  if (ec) return Error::from_errno("ready file " + path.string(), ec.value());
  return {};
}

void write_last_trace(const AgentOptions& options) {
  if (options.trace_file.empty()) return;
  try {
    if (auto written = write_timeline(options.trace_file); !written) {
      log::error("trace_failed error=\"{}\"", written.error().to_string());
    }
  } catch (const std::exception& e) {  // memory
    log::error("trace_failed error=\"trace {}: {}\"", options.trace_file.string(), e.what());
  }
}

/// The event loop, for lack of descriptors or threads.
Error cannot_start(const std::exception& e) {
  return {Errc::io, std::string("start the agent: ") + e.what()};
}

}  // namespace

struct Agent::Impl {
  explicit Impl(AgentOptions o) : options(std::move(o)), io(static_cast<int>(options.net_threads)) {}

  const AgentOptions options;
  const std::uint64_t instance = net::make_random_id();
  const std::chrono::steady_clock::time_point started_at = std::chrono::steady_clock::now();
  // Destroyed from the bottom up: servers before the io_context that holds their conversations, those before the core.
  std::unique_ptr<AgentCore> core;
  asio::io_context io;
  asio::executor_work_guard<asio::io_context::executor_type> work{io.get_executor()};
  std::unique_ptr<TrainerServer> trainer_server;
  std::unique_ptr<PullServer> pull_server;
  std::unique_ptr<net::HttpServer> http_server;
  Changes::Listener publications;
  std::atomic<bool> stopping{false};
  bool started = false;
  std::vector<std::thread> threads;

  Status start();
  Status start_or_say_why() {
    try {
      return start();
    } catch (const std::exception& e) {
      return cannot_start(e);
    }
  }
  net::HttpServer::Answer page(std::string_view target) const;
  asio::awaitable<void> maintenance_loop();
  void start_threads();
  void stop();
};

Status Agent::Impl::start() {
  if (!options.trace_file.empty()) {
    start_timeline("agent " + options.core.name);
    DS_TRY(write_timeline(options.trace_file));  // one that cannot be written is better known now
  }
  // sendfile to a peer that left must be an error, not a signal.
  std::signal(SIGPIPE, SIG_IGN);
  DS_ASSIGN(core, AgentCore::start(options.core));
  TrainerServerOptions trainer = options.trainer;
  trainer.instance = instance;
  DS_ASSIGN(trainer_server, TrainerServer::listen(io, core->trainer_hooks(), std::move(trainer)));
  PullServerOptions pull = options.pull;
  pull.instance = instance;
  pull.local_socket = std::filesystem::absolute(trainer_server->socket_path()).string();
  DS_ASSIGN(pull_server, PullServer::listen(io, *core, std::move(pull)));
  if (options.http) {
    net::HttpOptions http = *options.http;
    http.answered = [counted = &core->metrics().http_requests] { Metrics::add(*counted, 1); };
    DS_ASSIGN(http_server,
              net::HttpServer::listen(io, std::move(http), [this](const auto& asked) { return page(asked.target); }));
  }
  started = true;
  publications = core->versions().changes().listen([server = trainer_server.get()] { server->version_served(); });
  asio::co_spawn(
      io, [this]() { return maintenance_loop(); }, net::log_exception("maintenance"));
  start_threads();
  const std::uint16_t http_port = http_server ? http_server->port() : std::uint16_t{0};
  const bool https = options.http && options.http->tls;
  log::info("agent_ready name={} port={} http_port={} https={} socket={} isa={}", options.core.name,
            pull_server->port(), http_port, https ? 1 : 0, trainer_server->socket_path(), delta::isa_name());
  if (options.ready_file.empty()) return {};
  return write_ready_file(options.ready_file, {{"pid", ::getpid()},
                                               {"port", pull_server->port()},
                                               {"http_port", http_port},
                                               {"https", https},
                                               {"socket", trainer_server->socket_path()}});
}

void Agent::Impl::start_threads() {
  for (unsigned i = 0; i < std::max(1u, options.net_threads); ++i) {
    threads.emplace_back([this, i] {
      set_thread_name("net-" + std::to_string(i));
      io.run();
    });
  }
}

/// Revocations and expiries follow the clock, not the publisher, which may be in the middle of a diff.
asio::awaitable<void> Agent::Impl::maintenance_loop() {
  asio::steady_timer timer(io);
  while (!stopping) {
    auto next = std::chrono::milliseconds(50);
    try {
      next = core->run_maintenance();
      if (options.pull.tls) options.pull.tls->run_maintenance();
    } catch (const std::exception& e) {  // memory: revocations must go on once there is some
      log::error("maintenance_failed error=\"{}\"", e.what());
    }
    timer.expires_after(next);
    co_await timer.async_wait(net::kAsTuple);
  }
}

net::HttpServer::Answer Agent::Impl::page(std::string_view target) const {
  const AgentParts parts{*core, *pull_server, trainer_server.get(), instance, started_at, options.pull.tls.get()};
  const std::string_view path = target.substr(0, target.find('?'));
  const std::string_view query = path.size() < target.size() ? target.substr(path.size() + 1) : std::string_view();
  if (path == "/healthz") return health_page(parts);
  if (path == "/readyz") return ready_page(parts);
  if (path == "/v1/status") return net::HttpPage{200, kJson, status_json(parts)};
  if (path == "/metrics") return net::HttpPage{200, metrics::kContentType, metrics_text(parts)};
  if (path == "/v1/trace") {
    return net::HttpServer::Deferred([]() -> net::HttpPage {
      if (timeline_is_on()) return {200, kJson, trace::to_json(trace::snapshot())};
      return {404, kJson, "{\"error\": \"no timeline is recorded: start the agent with --trace FILE\"}\n"};
    });
  }
  if (path == "/v1/layout") {
    return net::HttpServer::Deferred([parts, tensors = query == "tensors=1"]() -> net::HttpPage {
      std::string body = layout_json(parts, tensors);
      if (body.empty()) return {404, kJson, "{\"error\": \"no trainer has brought a layout yet\"}\n"};
      return {200, kJson, std::move(body)};
    });
  }
  return net::HttpPage{404, "text/plain; charset=utf-8",
                       "there is /healthz, /readyz, /v1/status, /v1/layout, /v1/trace and /metrics\n"};
}

void Agent::Impl::stop() {
  if (stopping.exchange(true)) return;
  log::info("agent_stopping");
  if (pull_server) pull_server->stop();
  if (trainer_server) trainer_server->stop();
  if (http_server) http_server->stop();
  const Deadline deadline = Deadline::after(kFarewellLimit);
  while (pull_server && !threads.empty() && pull_server->connections() > 0 && !deadline.passed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    pull_server->stop();  // who was between two operations hears it now
  }
  if (core) core->stop();
  io.stop();
  for (std::thread& thread : threads) thread.join();
  threads.clear();
  http_server.reset();     // its thread may be making a page of all the others
  trainer_server.reset();  // the setup thread may be making a segment
  if (core && started && options.remove_segment_on_exit) core->files().remove(core->versions().generations());
  if (!options.ready_file.empty()) {
    std::error_code ignored;
    std::filesystem::remove(options.ready_file, ignored);
  }
  if (started) write_last_trace(options);
  log::info("agent_stopped");
}

Result<std::unique_ptr<Agent>> Agent::start(const AgentOptions& options) {
  try {
    auto impl = std::make_unique<Impl>(options);
    if (auto started = impl->start_or_say_why(); !started) {
      impl->stop();
      return std::move(started).error();
    }
    return std::unique_ptr<Agent>(new Agent(std::move(impl)));
  } catch (const std::exception& e) {
    return cannot_start(e);
  }
}

Agent::Agent(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Agent::~Agent() {
  impl_->stop();
}

std::uint16_t Agent::port() const noexcept {
  return impl_->pull_server->port();
}
std::uint16_t Agent::http_port() const noexcept {
  return impl_->http_server ? impl_->http_server->port() : std::uint16_t{0};
}
AgentCore& Agent::core() noexcept {
  return *impl_->core;
}
const PullServer& Agent::pull_server() const noexcept {
  return *impl_->pull_server;
}
void Agent::stop() {
  impl_->stop();
}
void Agent::abandon(const AgentOptions& options, const AgentFiles::Names& names) {
  if (!options.remove_segment_on_exit) return;
  names.remove();
  std::error_code ignored;
  if (!options.ready_file.empty()) std::filesystem::remove(options.ready_file, ignored);
}

}  // namespace deltasync::agent
