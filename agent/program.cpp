// deltasync-agent: the long-running process between a trainer's shared memory and its receivers.
#include "agent/program.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/signalfd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>

#include "agent/agent.hpp"
#include "agent/descriptors.hpp"
#include "base/cpu_affinity.hpp"
#include "base/log.hpp"
#include "base/log_setup.hpp"
#include "base/process.hpp"
#include "base/runtime_dir.hpp"
#include "net/auth.hpp"
#include "net/endpoint.hpp"
#include "net/tls.hpp"
#include "net/ucx/ucx.hpp"

namespace deltasync::agent {
namespace {

constexpr auto kExitLimit = std::chrono::milliseconds(4500);  ///< signal → gone, whatever still runs

constexpr const char* kFooter =
    "Exit codes:\n"
    "  0  ended by SIGTERM or SIGINT, or with the process of --end-with\n"
    "  1  wrong usage\n"
    "  2  the name, socket or port is in use\n"
    "  3  permission, or a bind beyond loopback with neither a token nor --tls-ca\n"
    "  4  no space for the segment\n"
    "  5  any other failure to start\n";

int exit_code(const Error& error) {
  switch (error.code()) {
    case Errc::invalid_argument: return 1;
    case Errc::already_exists: return 2;
    case Errc::permission:
    case Errc::unauthenticated: return 3;
    case Errc::no_space: return 4;
    default: return 5;
  }
}

/// As the user typed them; become AgentOptions once they parse.
struct Arguments {
  std::string socket;
  std::string listen = "127.0.0.1:0";
  std::string http = "127.0.0.1:0";
  std::string token_file;
  TlsOptions tls;
  std::string tls_kernel = "auto";
  std::string delta_form = "ulp";
  std::string log_level = "info";
  std::string log_format = "text";
  std::uint64_t ring_mib = 0;
  std::uint64_t merge_mib = 0;
  std::uint64_t lease_grace_ms = 1000;
  std::uint64_t copy_mib = 64;
  std::uint64_t peer_memory_mib = 192;
  double scrub_minutes = 10;
  double scrub_cpu_percent = 2;
  std::uint64_t merge_wait_s = 10;
  std::optional<std::size_t> receivers_max;
  std::uint64_t plan_limit_s = 600;
  std::uint64_t idle_limit_s = 3600;
  std::uint64_t handshake_limit_ms = 5000;
  std::uint64_t progress_limit_ms = 30000;
  pid_t end_with = 0;
  std::string cores;
  bool http_allow_remote = false;
  bool http_plain = false;
  bool http_client_certificates = false;
  bool insecure = false;
  bool ucx = false;
};

void add_options(CLI::App& app, Arguments& args, AgentOptions& options) {
  app.add_option("--name", options.core.name, "segments are SHM_DIR/NAME.gN; one agent per name")
      ->capture_default_str();
  app.add_option("--shm-dir", options.core.shm_dir, "where segments live")->capture_default_str();
  app.add_option("--socket", args.socket,
                 "Unix socket for trainers (default: NAME.sock in XDG_RUNTIME_DIR/deltasync, else "
                 "/run/user/UID/deltasync, else /tmp/deltasync-UID)");
  app.add_option("--listen", args.listen, "HOST:PORT for receivers; port 0 takes a free one")->capture_default_str();
  app.add_option("--http", args.http, "HOST:PORT of the status pages, or off")->capture_default_str();
  app.add_flag("--http-allow-remote", args.http_allow_remote,
               "serve the status pages beyond loopback (no authentication)");
  auto* http_plain =
      app.add_flag("--http-plain", args.http_plain, "status pages without TLS, though receivers have it");
  app.add_flag(
         "--http-client-certificates", args.http_client_certificates,
         "show status pages only to those whose certificate --tls-ca has signed (default: to everybody who comes)")
      ->excludes(http_plain);
  auto* token_file =
      app.add_option("--token-file", args.token_file,
                     "shared secret of all receivers, a file of mode 0600 (default: one is made, which receivers of "
                     "this user on this host find by themselves)");
  app.add_flag("--insecure", args.insecure, "no token: every user of this host may pull; loopback only")
      ->excludes(token_file);
  app.add_option(
      "--tls-cert", args.tls.cert,
      "speak TLS with receivers, and HTTPS on the status pages: the agent's certificate and its chain (PEM); read "
      "again when it changes");
  app.add_option("--tls-key", args.tls.key, "its private key, which not everybody may read");
  app.add_option("--tls-ca", args.tls.ca,
                 "let in only those whose certificate a CA in this file has signed (PEM); a token is not needed then");
  app.add_option("--tls-allow", args.tls.allow,
                 "with --tls-ca: only certificates for this DNS or common name; may be repeated");
  app.add_option("--tls-kernel", args.tls_kernel,
                 "auto: let the kernel encrypt full transfers where it can; off: never")
      ->check(CLI::IsMember({"auto", "off"}))
      ->capture_default_str();
  app.add_flag("--ucx", args.ucx,
               "let receivers that ask for it (ucx://HOST:PORT) have their data over UCX; not with TLS");
  app.add_option("--threads", options.core.threads, "threads that diff and encode")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--cores", args.cores, "CPUs that the agent runs on, such as 0-7,16 (default: all that it may)");
  app.add_option("--overlap-threads", options.core.overlap_threads,
                 "low-priority threads that diff a version while it is still being offloaded; 0: only afterwards")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--pack-threads", options.core.pack_threads,
                 "low-priority threads that pack tiles for receivers on slow links; 0: none are packed")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--net-threads", options.net_threads, "threads that serve connections")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--ring-mib", args.ring_mib,
                 "memory for recent deltas, and as much again in --shm-dir, where an agent that is started again finds "
                 "them; 0: "
                 "5 % of a half")
      ->capture_default_str();
  app.add_option("--merge-mib", args.merge_mib, "memory for merged and compact deltas; 0: as much as for recent ones")
      ->capture_default_str();
  app.add_option("--merge-steps-min", options.core.merge_steps_min,
                 "deltas of a chain that is merged for a late receiver; 0: none is, nor made compact")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--merge-wait-s", args.merge_wait_s,
                 "longest time that a receiver waits for a merged or compact delta to be made; half of what it waits "
                 "for a version at most")
      ->check(CLI::Range(0, 1800))
      ->capture_default_str();
  app.add_option("--lease-grace-ms", args.lease_grace_ms,
                 "what readers of a half that a writer waits for are left; half as much after each lease that is lost")
      ->capture_default_str();
  app.add_option("--copy-mib", args.copy_mib,
                 "memory for pieces that are copied out of a half for hosts that lost a lease, which then hold up no "
                 "writer; 0: none are")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--peer-memory-mib", args.peer_memory_mib,
                 "memory for all else that peers make the agent hold: requests, answers that they have not read, "
                 "subscriptions, packed tiles; above it they wait, then they are refused as busy")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--scrub-minutes", args.scrub_minutes,
                 "all of what is served is read again within so long, as far as --scrub-cpu-percent allows; 0: never")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  app.add_option("--scrub-cpu-percent", args.scrub_cpu_percent, "of one core, for that")
      ->check(CLI::Range(0.01, 100.0))
      ->capture_default_str();
  app.add_option("--plan-limit-s", args.plan_limit_s, "longest life of a receiver's plan and its lease")
      ->check(CLI::Range(1, 86400))
      ->capture_default_str();
  app.add_option("--receivers-max", args.receivers_max,
                 "receivers that may be connected, and as many data connections; needs two open files each "
                 "(default: 4096, fewer if ulimit -n allows no more)")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--children-max", options.pull.limits.admission.children_max,
                 "receivers and relays that may pull from here; others are sent to the agents of these relays "
                 "(deltasync relay --advertise); 0: any number")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--unauthenticated-max", options.pull.limits.admission.strangers_max,
                 "connections that have not authenticated yet; when more come, the oldest are closed")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  app.add_option("--unauthenticated-per-address", options.pull.limits.admission.strangers_per_address,
                 "those of them from one IPv4 address or IPv6 /64; from a loopback address four times as many")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  app.add_option("--handshake-limit-ms", args.handshake_limit_ms, "connect to authenticated")
      ->check(CLI::Range(1, 3600000))
      ->capture_default_str();
  app.add_option("--idle-limit-s", args.idle_limit_s, "between two requests of a receiver")
      ->check(CLI::Range(1, 604800))
      ->capture_default_str();
  app.add_option("--progress-limit-ms", args.progress_limit_ms, "without a receiver taking a byte")
      ->check(CLI::Range(1, 3600000))
      ->capture_default_str();
  app.add_option("--delta-form", args.delta_form, "ulp (smallest) or absolute (idempotent)")
      ->check(CLI::IsMember({"ulp", "absolute"}))
      ->capture_default_str();
  app.add_option("--log-level", args.log_level, "trace, debug, info, warn, error or off")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "off"}))
      ->capture_default_str();
  app.add_option("--log-format", args.log_format, "text, or json: one object a line")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  app.add_flag("--low-memory", options.core.low_memory, "release a layout's segment before the next one is made");
  app.add_option("--ready-file", options.ready_file, "JSON with pid, port, http_port and socket, once ready");
  app.add_option("--trace", options.trace_file,
                 "record a timeline; written to this file at the end, and to HTTP /v1/trace at any time");
  app.add_option("--end-with", args.end_with, "end as by SIGTERM when the process of this pid has ended")
      ->check(CLI::PositiveNumber)
      ->type_name("PID");
  app.add_flag("--remove-segment-on-exit", options.remove_segment_on_exit, "do not leave the segment (tests)");
}

/// The pages show the certificate that receivers see, unless they are to be plain.
Status complete_http(const Arguments& args, AgentOptions& options) {
  if (args.http == "off") {
    options.http.reset();
    return {};
  }
  net::HttpOptions& http = *options.http;
  DS_ASSIGN(http.listen, net::parse_endpoint(args.http).with_context("--http"));
  http.allow_remote = args.http_allow_remote;
  if (!args.http_plain) http.tls = options.pull.tls;
  http.client_certificates = args.http_client_certificates;
  return {};
}

Status complete(const Arguments& args, AgentOptions& options) {
  DS_ASSIGN(options.pull.listen, net::parse_endpoint(args.listen).with_context("--listen"));
  if (!args.token_file.empty()) {
    DS_ASSIGN(options.pull.token, net::read_token_file(args.token_file));
  }
  TlsOptions tls = args.tls;
  tls.kernel = args.tls_kernel == "auto";
  DS_ASSIGN(options.pull.tls, net::Tls::server_if_wanted(tls));
  if (args.ucx && options.pull.tls) {
    return Error(Errc::invalid_argument, "--ucx: UCX has no TLS: leave out --ucx or the TLS options");
  }
  if (args.ucx && args.insecure) {
    return Error(Errc::invalid_argument, "--ucx: a peer's wrong address ends libucp's process: leave out --insecure");
  }
  DS_TRY(complete_http(args, options));
  options.pull.make_token = !args.insecure && !(options.pull.tls && options.pull.tls->asks_for_certificates());
  options.trainer.socket_path = args.socket;
  if (args.socket.empty()) {
    DS_ASSIGN(const std::filesystem::path dir, make_runtime_dir().with_context("--socket"));
    options.trainer.socket_path = dir / (options.core.name + ".sock");
  }
  if (args.ring_mib > (std::uint64_t{1} << 32)) return Error(Errc::invalid_argument, "--ring-mib is too large");
  if (args.merge_mib > (std::uint64_t{1} << 32)) return Error(Errc::invalid_argument, "--merge-mib is too large");
  options.core.ring_bytes_max = args.ring_mib << 20;
  options.core.merge_bytes_max = args.merge_mib << 20;
  options.core.lease_grace = std::chrono::milliseconds(std::min<std::uint64_t>(args.lease_grace_ms, 3'600'000));
  options.core.copy_bytes_max = args.copy_mib << 20;
  options.core.peer_bytes_max = args.peer_memory_mib << 20;
  options.core.scrub.pass = std::chrono::milliseconds(static_cast<std::int64_t>(args.scrub_minutes * 60'000));
  options.core.scrub.cpu = args.scrub_cpu_percent / 100;
  options.core.plan_limit = std::chrono::seconds(args.plan_limit_s);
  options.core.form = args.delta_form == "ulp" ? delta::ValueForm::ulp : delta::ValueForm::absolute;
  if (args.receivers_max) {
    options.pull.limits.admission.receivers_max = *args.receivers_max;
    options.pull.limits.admission.data_max = *args.receivers_max;
  }
  options.pull.limits.admission.strangers_per_loopback = 4 * options.pull.limits.admission.strangers_per_address;
  options.pull.limits.handshake = std::chrono::milliseconds(args.handshake_limit_ms);
  options.pull.limits.merge_wait_max = std::chrono::seconds(args.merge_wait_s);
  options.pull.limits.idle = std::chrono::seconds(args.idle_limit_s);
  options.pull.limits.progress = std::chrono::milliseconds(args.progress_limit_ms);
  return {};
}

/// Ends the process if the agent does not end in time: a diff of a very large model is worth nothing any more, and the
/// segment is safe at every instruction. Its thread is there from the start, since at the exit there may be none to be
/// had.
class ExitGuard {
 public:
  /// `options` must outlive it. io if no thread can be started.
  static Result<std::unique_ptr<ExitGuard>> make(const AgentOptions& options) {
    try {
      return std::unique_ptr<ExitGuard>(new ExitGuard(options));
    } catch (const std::system_error& e) {
      return Error(Errc::io, "start the thread that guards the exit: " + e.code().message());
    }
  }
  ~ExitGuard() {
    move_to(State::done);
    thread_.join();
  }
  /// The limit runs from now until the guard's end. `names` is the agent's.
  void exit_begins(AgentFiles::Names names) {
    {
      const std::lock_guard lock(mutex_);
      names_ = std::move(names);
    }
    move_to(State::exiting);
  }
  ExitGuard(const ExitGuard&) = delete;
  ExitGuard& operator=(const ExitGuard&) = delete;

 private:
  enum class State : std::uint8_t { serving, exiting, done };

  explicit ExitGuard(const AgentOptions& options) : options_(options), thread_([this] { watch(); }) {}
  void move_to(State next) {
    {
      const std::lock_guard lock(mutex_);
      state_ = next;
    }
    wake_.notify_all();
  }
  void watch() {
    set_thread_name("exit-guard");
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [this] { return state_ != State::serving; });
    if (wake_.wait_for(lock, kExitLimit, [this] { return state_ == State::done; })) return;
    log::warn("agent_stopped reason=\"work in progress was abandoned at the exit deadline\"");
    Agent::abandon(options_, *names_);
    std::_Exit(0);
  }
  const AgentOptions& options_;
  std::mutex mutex_;
  std::condition_variable wake_;
  State state_ = State::serving;            // protected by mutex_, as the next one
  std::optional<AgentFiles::Names> names_;  // once the exit has begun
  std::thread thread_;
};

/// Waits for one of the blocked signals but SIGHUP, or until the process of --end-with has ended; says which. There is
/// no log file to be opened again, and a terminal that is closed takes no agent with it.
Result<std::string> wait_for_end(const sigset_t& blocked, const std::optional<ProcessWatch>& with) {
  const UniqueFd signals(::signalfd(-1, &blocked, SFD_CLOEXEC));
  if (signals.get() < 0) return Error::from_errno("signalfd", errno);
  pollfd fds[] = {{signals.get(), POLLIN, 0}, {with ? with->fd() : -1, POLLIN, 0}};
  for (;;) {
    if (::poll(fds, std::size(fds), -1) < 0 && errno != EINTR) return Error::from_errno("poll", errno);
    signalfd_siginfo info{};
    if (fds[0].revents != 0 && ::read(signals.get(), &info, sizeof info) == sizeof info) {
      if (info.ssi_signo == SIGHUP) {
        log::info("sighup_ignored");
        continue;
      }
      return "signal number=" + std::to_string(info.ssi_signo);
    }
    if (with && with->dead()) return "process_ended " + to_string(with->id());
  }
}

/// Nothing without --end-with. peer_died if the process is gone already.
Result<std::optional<ProcessWatch>> watch_owner(pid_t pid) {
  if (pid == 0) return std::optional<ProcessWatch>();
  DS_ASSIGN(const ProcessId id, ProcessId::of(pid).with_context("--end-with"));
  DS_ASSIGN(auto watch, ProcessWatch::open(id).with_context("--end-with"));
  return std::optional<ProcessWatch>(std::move(watch));
}

/// Starts threads.
Status open_ucx(const Arguments& args, AgentOptions& options) {
  if (!args.ucx) return {};
  DS_ASSIGN(options.pull.ucx, net::ucx::Ucx::share(net::is_loopback(options.pull.listen.host)).with_context("--ucx"));
  return {};
}

int fail(const Error& error) {
  log::error("agent_failed error=\"{}\"", error.to_string());
  return exit_code(error);
}

}  // namespace

int run(int argc, char** argv) {
  CLI::App app("Serves a trainer's model versions to receivers: diffs them, keeps recent deltas, sends full ones.",
               "deltasync-agent");
  app.set_version_flag("--version", DELTASYNC_VERSION);
  app.footer(kFooter);
  // One line, as of any other failure: who started the agent shows its last one.
  app.failure_message([](const CLI::App*, const CLI::Error& e) {
    return "deltasync-agent: " + std::string(e.what()) + "; --help lists the options\n";
  });
  Arguments args;
  AgentOptions options;
  add_options(app, args, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 1;
  }
  init_log("deltasync-agent", args.log_level, args.log_format == "json" ? LogFormat::json : LogFormat::text);
  if (auto completed = complete(args, options); !completed) return fail(completed.error());

  // Blocked before any thread starts, so that only wait_for_end sees them.
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&signals, signal);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  // Before any thread starts, so that all are confined alike.
  if (auto stays = stay_on_cores(args.cores).with_context("--cores"); !stays) return fail(stays.error());
  if (auto opened = open_ucx(args, options); !opened) return fail(opened.error());
  if (auto fit = fit_connections(args.receivers_max.has_value(), options); !fit) return fail(fit.error());
  auto guard = ExitGuard::make(options);
  if (!guard) return fail(guard.error());
  auto owner = watch_owner(args.end_with);
  if (!owner) return fail(owner.error());
  auto agent = Agent::start(options);
  if (!agent) return fail(agent.error());
  const auto why = wait_for_end(signals, *owner);
  if (!why) return fail(why.error());
  log::info("{}", *why);
  (*guard)->exit_begins(agent.value()->core().files().names());
  agent.value().reset();
  return 0;
}

}  // namespace deltasync::agent
