#include "tools/cli/program.hpp"

#include <csignal>
#include <cstdio>
#include <exception>

#include "base/log_setup.hpp"
#include "base/utf8.hpp"
#include "deltasync/timeline.hpp"
#include "tools/cli/cli.hpp"

namespace deltasync::cli {
namespace {

int parse_and_work(const Program& program, int argc, char** argv) {
  CLI::App& app = program.app;
  app.footer(exit_code_help());
  app.set_version_flag("--version", DELTASYNC_VERSION);
  std::string log_level = "warn";
  app.add_option("--log-level", log_level, "log lines on stderr: trace debug info warn error off")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "off"}));
  std::string log_format = "text";
  app.add_option("--log-format", log_format, "text, or json: one object a line")
      ->check(CLI::IsMember({"text", "json"}));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? static_cast<int>(Exit::ok) : static_cast<int>(Exit::usage);
  }

  init_log("deltasync", log_level, log_format == "json" ? LogFormat::json : LogFormat::text);
  const Status status = program.work();
  if (status) return static_cast<int>(Exit::ok);
  std::string name = program.name;
  for (const CLI::App* sub : app.get_subcommands()) name += " " + sub->get_name();
  std::fprintf(stderr, "%s: %s\n", name.c_str(), printable(status.error().to_string()).c_str());
  const int signal = StopOnSignal::received();
  if (signal != 0 && status.error().code() == Errc::cancelled) return 128 + signal;  // as a shell says it
  return static_cast<int>(exit_of(status.error().code()));
}

}  // namespace

Status with_trace(const std::string& file, const std::string& process, const std::function<Status()>& work) {
  if (file.empty()) return work();
  start_timeline(process);
  DS_TRY(write_timeline(file));  // one that cannot be written is better known now
  Status worked = work();
  stop_timeline();
  Status written = write_timeline(file);
  return worked ? std::move(written) : std::move(worked);
}

int run_program(const Program& program, int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  try {
    return parse_and_work(program, argc, argv);
  } catch (const std::exception& e) {  // bad_alloc and the like, from libraries
    std::fprintf(stderr, "%s: %s\n", program.name.c_str(), e.what());
    return static_cast<int>(Exit::other);
  }
}

}  // namespace deltasync::cli
