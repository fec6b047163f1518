// deltasync: publish, pull, relay, status, inspect, clean, diff, trace, bench: the command table and the way from an
// error to an exit code.
#include <pthread.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>

#include "agent/program.hpp"
#include "base/log_setup.hpp"
#include "base/utf8.hpp"
#include "tools/cli.hpp"

namespace deltasync::cli {
namespace {

constexpr Command kCommands[] = {
    {"publish", "act as a trainer: publish model directories as successive versions", setup_publish},
    {"pull", "fetch versions from an agent into a model directory", setup_pull},
    {"relay", "pull versions once for a node and serve them on through its own agent", setup_relay},
    {"status", "versions and receivers of a live agent, and how far behind each is", setup_status},
    {"inspect", "describe a model, layout, delta or segment file, or a live agent", setup_inspect},
    {"clean", "list segments in shared memory, and remove those that dead processes left", setup_clean},
    {"diff", "compare two versions of a model: density by tensor, size by codec", setup_diff},
    {"trace", "lay what several processes recorded on one timeline; summarise or draw one version", setup_trace},
#ifndef DELTASYNC_AGENT_INSIDE
    {"bench", "measure one case against the machine's limit", setup_bench},
    {"bench-receiver", "the receiver process of bench e2e and tensors", setup_bench_receiver},
#endif
};

int run(int argc, char** argv) {
  CLI::App app("deltasync: keeps rollout weights identical to a trainer's", "deltasync");
  app.require_subcommand(1);
  app.footer(exit_code_help());
  app.set_version_flag("--version", DELTASYNC_VERSION);
  std::string log_level = "warn";
  app.add_option("--log-level", log_level, "log lines on stderr: trace debug info warn error off")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "off"}));

  std::string log_format = "text";
  app.add_option("--log-format", log_format, "text, or json: one object a line")
      ->check(CLI::IsMember({"text", "json"}));

  std::function<Status()> chosen;
  const char* chosen_name = "";
  for (const Command& command : kCommands) {
    CLI::App* sub = app.add_subcommand(command.name, command.summary);
    sub->footer(exit_code_help());
    sub->final_callback([&chosen, &chosen_name, name = command.name, run_it = command.setup(*sub)] {
      chosen = run_it;
      chosen_name = name;
    });
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? static_cast<int>(Exit::ok) : static_cast<int>(Exit::usage);
  }

  init_log("deltasync", log_level, log_format == "json" ? LogFormat::json : LogFormat::text);
  const Status status = chosen();
  if (status) return static_cast<int>(Exit::ok);
  std::fprintf(stderr, "deltasync %s: %s\n", chosen_name, printable(status.error().to_string()).c_str());
  const int signal = StopOnSignal::received();
  if (signal != 0 && status.error().code() == Errc::cancelled) return 128 + signal;  // as a shell says it
  return static_cast<int>(exit_of(status.error().code()));
}

}  // namespace
}  // namespace deltasync::cli

int main(int argc, char** argv) {
#ifdef DELTASYNC_AGENT_INSIDE
  constexpr const char* kAgent = "deltasync-agent";
  if (argc > 0 && std::filesystem::path(argv[0]).filename() == kAgent) {
    ::pthread_setname_np(::pthread_self(), kAgent);
    return deltasync::agent::run(argc, argv);
  }
#endif
  std::signal(SIGPIPE, SIG_IGN);
  try {
    return deltasync::cli::run(argc, argv);
  } catch (const std::exception& e) {  // bad_alloc and the like, from libraries
    std::fprintf(stderr, "deltasync: %s\n", e.what());
    return static_cast<int>(deltasync::cli::Exit::other);
  }
}
