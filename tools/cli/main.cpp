// deltasync: publish, pull, relay, status, doctor, inspect, clean, diff, trace, plan, export-plan, bench, completion:
// the commands.
#include <pthread.h>

#include <filesystem>

#include "agent/program.hpp"
#include "base/utf8.hpp"
#include "tools/cli/cli.hpp"
#include "tools/cli/program.hpp"

namespace deltasync::cli {
namespace {

constexpr Command kCommands[] = {
    {"publish", "act as a trainer: publish model directories as successive versions", setup_publish},
    {"pull", "fetch versions from an agent into a model directory", setup_pull},
    {"relay", "pull versions once for a node and serve them on through its own agent", setup_relay},
    {"status", "versions and receivers of a live agent, and how far behind each is", setup_status},
    {"doctor", "check whether an agent can run here or be reached, and say what to do", setup_doctor},
    {"inspect", "describe a model, layout, delta or segment file, or a live agent", setup_inspect},
    {"clean", "list segments in shared memory, and remove those that dead processes left", setup_clean},
    {"diff", "compare two versions of a model: density by tensor, size by codec", setup_diff},
    {"trace", "lay what several processes recorded on one timeline; summarise or draw one version", setup_trace},
    {"plan", "predict how long until the engines of a fleet serve a version, and what that hangs on", setup_plan},
    {"export-plan", "work out which bytes of a trainer's shards are which of a model directory", setup_export_plan},
    {"bench", "measure one case against the machine's limit (the program deltasync-bench)", setup_bench},
    {"completion", "print a script by which a shell completes this command line", setup_completion},
};

int run(int argc, char** argv) {
  CLI::App app("deltasync: keeps rollout weights identical to a trainer's", "deltasync");
  app.require_subcommand(1);
  app.failure_message([](const CLI::App* at, const CLI::Error& e) {
    const std::vector<std::string> unknown = at->remaining();
    if (at->get_parent() != nullptr || unknown.empty() || !at->get_subcommands().empty()) {
      return CLI::FailureMessage::simple(at, e);
    }
    return "no command is named " + printable(unknown.front()) + "; --help lists them\n";
  });
  std::function<Status()> chosen;
  for (const Command& command : kCommands) {
    CLI::App* sub = app.add_subcommand(command.name, command.summary);
    sub->footer(exit_code_help());
    sub->final_callback([&chosen, work = command.setup(*sub)] { chosen = work; });
  }
  return run_program({app, "deltasync", [&chosen] { return chosen(); }}, argc, argv);
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
  return deltasync::cli::run(argc, argv);
}
